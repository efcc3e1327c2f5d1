"""Problem: every refusal with its exact message, row by row. Fake tensors stand in for CUDA ones: no GPU is needed."""

import math
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import pytest
import torch
from refusal import refused

from hopper_fa3 import problem
from hopper_fa3.hooks import MaskHook, ScoreHook
from hopper_fa3.plan import Plan
from hopper_fa3.problem import ILLEGAL, BackwardStatic, Problem, Static, bounds, chunked, refuse_illegal

SMS = 132  # of the fixture hopper
NUMBERS = {"heads": 4, "heads_k": 2, "head_dim": 64, "head_dim_v": 64, "batch": 2, "seqlen_q": 5, "seqlen_k": 7}


def tensors(device="cpu", dtype=torch.bfloat16, **numbers):
    """q, k, v without memory of their own beyond a view, so that they may be of any size."""
    n = NUMBERS | numbers
    one = torch.empty(1, dtype=dtype, device=device)
    return (
        one.expand(n["batch"], n["seqlen_q"], n["heads"], n["head_dim"]),
        one.expand(n["batch"], n["seqlen_k"], n["heads_k"], n["head_dim"]),
        one.expand(n["batch"], n["seqlen_k"], n["heads_k"], n["head_dim_v"]),
    )


# Facts of a legal call on each device, in the plain values of the table.
LEGAL = {
    "device": "cpu", "architecture": None, "dtype": "bfloat16", "head_dim": 64, "head_dim_v": 64, "seqlen_q": 5,
    "seqlen_k": 7, "tiles": 8, "sm_margin": 0, "remaining_sms": None, "left": None, "num_splits": 1, "pack_gqa": None,
    "attention_chunk": 0, "softcap": 0.0, "large_softcap": None, "qv": None, "q_descale": None, "k_descale": None,
    "v_descale": None,
    "sink": None, "alibi_slopes": None, "score": None, "mask": None, "block_mask": None, "out": None,
    "slopes_gradient": False, "requires_grad": False, "tangent": False, "total_q": 5, "total_k": 7,
    "sequences": 3, "packed_tiles_q": 12, "packed_tiles_k": 12, "page_table": None,
    "score_forward": True, "mask_visible": True, "score_backward": True,
}  # fmt: skip
CUDA = {"device": "cuda", "architecture": "sm_90", "remaining_sms": SMS}
GRAD = {"requires_grad": True}
SLOPES = "alibi_slopes must not require grad (their gradient is not built)"
SOFTCAP = "softcap must be 0 (none), or from 2**-126 to below 2**127"
DIMS = "must be a multiple of 8 and at most 256"

# In the table's order: fact, facts that differ from LEGAL, error, message.
ROWS = (
    ("device", {"device": "meta"}, RuntimeError, "device must be the CPU or a CUDA GPU, got meta"),
    ("architecture", CUDA | {"architecture": "sm_80"}, RuntimeError,
     "the CUDA device must be sm_90 (H100, H200), got sm_80"),
    ("dtype", CUDA | {"dtype": "float32"}, TypeError, "dtype must be bfloat16 or float16 on CUDA, got float32"),
    ("dtype", {"dtype": "int64"}, TypeError,
     "dtype must be float16, bfloat16, float32 or float64 on the CPU, got int64"),
    ("head_dim", CUDA | {"head_dim": 260}, ValueError, f"head_dim {DIMS}, got 260"),
    ("head_dim_v", CUDA | {"head_dim_v": 20}, ValueError, f"head_dim_v {DIMS}, got 20"),
    ("head_dim", {"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
    ("head_dim_v", {"head_dim_v": 0}, ValueError, "head_dim_v must be at least 1, got 0"),
    ("seqlen_q", CUDA | {"seqlen_q": 2**30}, ValueError, "seqlen_q must be less than 2**30, got 1073741824"),
    ("seqlen_k", CUDA | {"seqlen_k": 2**30}, ValueError, "seqlen_k must be less than 2**30, got 1073741824"),
    ("tiles", CUDA | {"tiles": 2**31 - 2**12}, ValueError,
     "batch * heads * ceil(seqlen_q / 64) must be less than 2**31 - 2**12, got 2147479552"),
    ("total_q", CUDA | {"total_q": 2**30}, ValueError, "total_q must be less than 2**30, got 1073741824"),
    ("total_k", CUDA | {"total_k": 2**30}, ValueError, "total_k must be less than 2**30, got 1073741824"),
    ("sequences", CUDA | {"sequences": 2**26}, ValueError,
     "batch must be less than 2**26 for packed sequences, got 67108864"),
    *((f"packed_tiles_{name}", CUDA | {f"packed_tiles_{name}": 2**31 - 2**12}, ValueError,
       f"{heads} * (total_{name} // 64 + min(2 * batch + 2, total_{name})) must be less than 2**31 - 2**12, "
       "got 2147479552") for name, heads in (("q", "heads"), ("k", "heads_k"))),
    ("sm_margin", {"sm_margin": -1}, ValueError, "sm_margin must be an integer of at least 0, got -1"),
    ("remaining_sms", CUDA | {"remaining_sms": 0}, ValueError,
     "the device's SMs minus sm_margin must be at least 1, got 0"),
    ("num_splits", {"num_splits": 4}, NotImplementedError,
     "num_splits must be 0 or 1 (splitting is not built yet), got 4"),
    ("pack_gqa", {"pack_gqa": True}, NotImplementedError,
     "pack_gqa must be None or False (packing is not built yet), got True"),
    ("large_softcap", CUDA | {"large_softcap": 1025.0}, ValueError, "softcap must be at most 1024 on CUDA, got 1025.0"),
    ("score_forward", CUDA | {"score_forward": None}, NotImplementedError,
     "score must have a function forward for tensors on CUDA, got None"),
    ("mask_visible", CUDA | {"mask_visible": None}, NotImplementedError,
     "mask must have a function visible for tensors on CUDA, got None"),
    ("score_backward", CUDA | GRAD | {"score_backward": None}, NotImplementedError,
     "score must have a function backward for gradients on CUDA, got None"),
    *((name, {name: torch.ones(2)}, NotImplementedError, f"{name} must be None (not built yet), got Tensor")
      for name in ("qv", "q_descale", "k_descale", "v_descale", "block_mask", "page_table")),
    ("slopes_gradient", {"slopes_gradient": True}, NotImplementedError, f"{SLOPES}, got True"),
    ("tangent", CUDA | {"tangent": True}, NotImplementedError,
     "q, k and v must have no tangent on CUDA (forward-mode derivatives are not built), got True"),
    ("out", GRAD | {"out": torch.ones(2)}, ValueError,
     "out must be None where q, k, v or sink requires grad (results are written in place), got Tensor"),
)  # fmt: skip


def test_every_row_of_the_table_stands_here():
    assert [row.fact for row in ILLEGAL] == [row[0] for row in ROWS]


@pytest.mark.parametrize("index", range(len(ROWS)), ids=lambda index: f"{index}-{ROWS[index][0]}")
def test_a_row_refuses_and_is_the_only_one_to(index):
    _, change, error, message = ROWS[index]
    with refused(error, message):
        refuse_illegal(LEGAL | change)
    others = ILLEGAL[:index] + ILLEGAL[index + 1 :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problem, "ILLEGAL", others)
        refuse_illegal(LEGAL | change)


@pytest.mark.parametrize(
    "change",
    [
        {}, CUDA, CUDA | {"dtype": "float16"}, {"dtype": "float32"}, {"dtype": "float64"}, {"dtype": "float16"},
        CUDA | {"head_dim": 8}, CUDA | {"head_dim": 256}, CUDA | {"head_dim_v": 8}, CUDA | {"head_dim_v": 256},
        {"head_dim": 1, "head_dim_v": 1}, {"head_dim": 260, "head_dim_v": 20}, {"seqlen_q": 2**31, "seqlen_k": 2**31},
        CUDA | {"seqlen_q": 2**30 - 1, "seqlen_k": 2**30 - 1}, CUDA | {"seqlen_q": 0, "seqlen_k": 0, "tiles": 0},
        CUDA | {"tiles": 2**31 - 2**12 - 1}, {"tiles": 2**31}, {"sm_margin": 8}, {"sm_margin": 1000},
        CUDA | {"sm_margin": SMS - 1, "remaining_sms": 1}, {"num_splits": 0}, {"pack_gqa": False}, GRAD,
        {"out": torch.ones(2)}, CUDA | {"out": torch.ones(2)}, {"tangent": True}, {"left": 3}, {"attention_chunk": 64},
        {"softcap": 15.0}, {"sink": torch.ones(4), "alibi_slopes": torch.ones(4)},
        CUDA | {"total_q": 2**30 - 1, "total_k": 2**30 - 1, "sequences": 2**26 - 1},
        CUDA | {"packed_tiles_q": 2**31 - 2**12 - 1, "packed_tiles_k": 2**31 - 2**12 - 1},
        {"packed_tiles_q": 2**31, "packed_tiles_k": 2**31, "sequences": 2**31}, {"total_q": 2**31, "total_k": 2**31},
        CUDA | {"softcap": 15.0, "attention_chunk": 64, "sink": torch.ones(4), "alibi_slopes": torch.ones(4)},
        CUDA | {"score_backward": None},
        GRAD | dict.fromkeys(("score_forward", "mask_visible", "score_backward")),
    ],
    ids=str,
)  # fmt: skip
def test_legal_facts_pass(change):
    refuse_illegal(LEGAL | change)


def test_head_dims_on_cuda():
    legal = {8 * n for n in range(1, 33)}
    for head_dim in legal:
        refuse_illegal(LEGAL | CUDA | {"head_dim": head_dim, "head_dim_v": head_dim})
    for head_dim in {*range(-8, 300)} - legal:
        with refused(ValueError, f"head_dim {DIMS}, got {head_dim}"):
            refuse_illegal(LEGAL | CUDA | {"head_dim": head_dim})


CALLS = (
    ({"num_splits": 2}, NotImplementedError, "num_splits must be 0 or 1 (splitting is not built yet), got 2"),
    ({"pack_gqa": True}, NotImplementedError, "pack_gqa must be None or False (packing is not built yet), got True"),
    ({"attention_chunk": -1}, ValueError, "attention_chunk must be an integer of at least 0, got -1"),
    ({"attention_chunk": 2.0}, ValueError, "attention_chunk must be an integer of at least 0, got 2.0"),
    ({"attention_chunk": True}, ValueError, "attention_chunk must be an integer of at least 0, got True"),
    ({"attention_chunk": 2**63}, ValueError,
     "attention_chunk must be an integer of at least 0, got 9223372036854775808"),
    ({"attention_chunk": torch.ones(())}, ValueError, "attention_chunk must be an integer of at least 0, got Tensor"),
    ({"softcap": -1.0}, ValueError, f"{SOFTCAP}, got -1.0"),
    ({"softcap": math.nan}, ValueError, f"{SOFTCAP}, got nan"),
    ({"softcap": math.inf}, ValueError, f"{SOFTCAP}, got inf"),
    ({"softcap": -math.inf}, ValueError, f"{SOFTCAP}, got -inf"),
    ({"softcap": 1e-40}, ValueError, f"{SOFTCAP}, got 1e-40"),
    ({"softcap": torch.ones(())}, TypeError, "softcap must be a number, got Tensor"),
    ({"softcap": None}, TypeError, "softcap must be a number, got None"),
    ({"sink": 1.0}, TypeError, "sink must be a torch.Tensor, got 1.0"),
    ({"sink": torch.ones(4, dtype=torch.float16)}, TypeError,
     "sink must have dtype float32 or q's, bfloat16, got float16"),
    ({"sink": torch.ones(2)}, ValueError, "sink must have shape (heads,), here (4,), got (2,)"),
    ({"sink": torch.ones(1, 4)}, ValueError, "sink must have shape (heads,), here (4,), got (1, 4)"),
    ({"sink": torch.ones(4, device="meta")}, RuntimeError, "sink must be on q's device cpu, got meta"),
    ({"sink": torch.ones(4).to_sparse()}, TypeError, "sink must be a dense tensor, got torch.sparse_coo"),
    ({"alibi_slopes": [1.0]}, TypeError, "alibi_slopes must be a torch.Tensor, got list"),
    ({"alibi_slopes": torch.ones(4, dtype=torch.bfloat16)}, TypeError,
     "alibi_slopes must have dtype float32, got bfloat16"),
    ({"alibi_slopes": torch.ones(2)}, ValueError,
     "alibi_slopes must have shape (heads,) or (batch, heads), here (4,) or (2, 4), got (2,)"),
    ({"alibi_slopes": torch.ones(1, 4)}, ValueError,
     "alibi_slopes must have shape (heads,) or (batch, heads), here (4,) or (2, 4), got (1, 4)"),
    ({"alibi_slopes": torch.ones(4, device="meta")}, RuntimeError,
     "alibi_slopes must be on q's device cpu, got meta"),
    ({"alibi_slopes": torch.ones(4, requires_grad=True)}, NotImplementedError, f"{SLOPES}, got True"),
    ({"qv": torch.ones(2)}, NotImplementedError, "qv must be None (not built yet), got Tensor"),
    ({"q_descale": torch.zeros(())}, NotImplementedError, "q_descale must be None (not built yet), got Tensor"),
    ({"k_descale": torch.ones(2)}, NotImplementedError, "k_descale must be None (not built yet), got Tensor"),
    ({"v_descale": torch.ones(2)}, NotImplementedError, "v_descale must be None (not built yet), got Tensor"),
    ({"score": max}, TypeError, "score must be a hopper_fa3.hooks.ScoreHook, got builtin_function_or_method"),
    ({"score": MaskHook("a", max, max)}, TypeError, "score must be a hopper_fa3.hooks.ScoreHook, got MaskHook"),
    ({"score": ScoreHook("a", max)}, NotImplementedError,
     "score must have a function cpu for tensors on the CPU, got None"),
    ({"mask": torch.ones(2)}, TypeError, "mask must be a hopper_fa3.hooks.MaskHook, got Tensor"),
    ({"mask": MaskHook("a", max)}, NotImplementedError,
     "mask must have a function cpu for tensors on the CPU, got None"),
    ({"block_mask": ()}, NotImplementedError, "block_mask must be None (not built yet), got tuple"),
    ({"window_size": (-2, 0)}, ValueError, "each side of window_size must be None, -1 or at least 0, got (-2, 0)"),
    ({"window_size": (-1, -2)}, ValueError, "each side of window_size must be None, -1 or at least 0, got (-1, -2)"),
    ({"window_size": (-1, 1.5)}, ValueError, "each side of window_size must be None, -1 or at least 0, got (-1, 1.5)"),
    ({"window_size": 3}, TypeError, "window_size must be a pair (left, right), got 3"),
    ({"causal": torch.tensor(True)}, TypeError, "causal must be True or False, got Tensor"),
    ({"causal": "no"}, TypeError, "causal must be True or False, got no"),
    ({"deterministic": "yes"}, TypeError, "deterministic must be True or False, got yes"),
    ({"window_size": (1, 2, 3)}, ValueError, "window_size must be a pair (left, right), got 3 values"),
    ({"softmax_scale": math.nan}, ValueError, "softmax_scale must be finite and below 2**127 in magnitude, got nan"),
    ({"softmax_scale": -math.inf}, ValueError, "softmax_scale must be finite and below 2**127 in magnitude, got -inf"),
    ({"softmax_scale": 2.0**127}, ValueError,
     "softmax_scale must be finite and below 2**127 in magnitude, got 1.7014118346046923e+38"),
    ({"softmax_scale": torch.ones(())}, TypeError, "softmax_scale must be a number or None, got Tensor"),
    ({"plan": (128, 128)}, TypeError, "plan must be a hopper_fa3.plan.Plan, got tuple"),
    ({"sm_margin": -3}, ValueError, "sm_margin must be an integer of at least 0, got -3"),
    ({"sm_margin": 2.0}, ValueError, "sm_margin must be an integer of at least 0, got 2.0"),
    ({"sm_margin": True}, ValueError, "sm_margin must be an integer of at least 0, got True"),
    ({"out": 1}, TypeError, "out must be a torch.Tensor, got 1"),
    ({"out": torch.empty(2, 5, 4, 64)}, TypeError, "out must have q's dtype bfloat16, got float32"),
    ({"out": torch.empty(2, 5, 2, 64, dtype=torch.bfloat16)}, ValueError,
     "out must have shape (2, 5, 4, 64), got (2, 5, 2, 64)"),
    ({"out": torch.empty(2, 5, 4, 64, dtype=torch.bfloat16, device="meta")}, ValueError,
     "out must be on q's device cpu, got meta"),
    ({"out": torch.empty(2, 5, 4, 64, dtype=torch.bfloat16, requires_grad=True)}, ValueError,
     "out must not require grad where grad mode is on (results are written in place), got True"),
    ({"out": torch.empty(5, 4, 64, dtype=torch.bfloat16).expand(2, 5, 4, 64)}, ValueError,
     "out must have an address of its own for every element, got strides (0, 256, 64, 1)"),
)  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), CALLS, ids=[row[2] for row in CALLS])
def test_a_call_with_an_illegal_option(options, error, message):
    with refused(error, message):
        Problem.from_tensors(*tensors(), **options)


def test_every_option_that_is_not_built_is_refused_by_a_call():
    unbuilt = {row.fact for row in ILLEGAL if row.error is NotImplementedError}
    # Facts that are no options, and that which only packed calls have
    functions = {"score_forward": "score", "score_backward": "score", "mask_visible": "mask"}
    others = {"slopes_gradient": "alibi_slopes", "tangent": None, "page_table": None, **functions}
    options = {others.get(fact, fact) for fact in unbuilt} - {None}
    calls = [(options, error) for options, error, _ in CALLS] + [(options, error) for _, options, error, _ in ON_CUDA]
    assert options <= {next(iter(given)) for given, error in calls if given and error is NotImplementedError}


SHAPES = (
    ((2, 5, 4), None, None, "q must have shape (batch, seqlen_q, heads, head_dim), got (2, 5, 4)"),
    (None, (14, 2, 64), None, "k must have shape (batch, seqlen_k, heads_k, head_dim), got (14, 2, 64)"),
    (None, None, (2, 7, 2, 1, 64), "v must have shape (batch, seqlen_k, heads_k, head_dim_v), got (2, 7, 2, 1, 64)"),
    ((3, 5, 4, 64), None, None, "q and k must have the same batch, got 3 and 2"),
    (None, None, (1, 7, 2, 64), "k and v must have the same batch, got 2 and 1"),
    (None, None, (2, 8, 2, 64), "k and v must have the same seqlen_k, got 7 and 8"),
    (None, None, (2, 7, 1, 64), "k and v must have the same heads_k, got 2 and 1"),
    ((2, 5, 4, 32), None, None, "q and k must have the same head_dim, got 32 and 64"),
    ((2, 5, 5, 64), None, None, "heads must be a multiple of heads_k, which is at least 1, got 5 and 2"),
    (None, (2, 7, 0, 64), (2, 7, 0, 64), "heads must be a multiple of heads_k, which is at least 1, got 4 and 0"),
    ((2, 5, 4, 0), (2, 7, 2, 0), None, "head_dim must be at least 1, got 0"),
    (None, None, (2, 7, 2, 0), "head_dim_v must be at least 1, got 0"),
)  # fmt: skip


@pytest.mark.parametrize(("q", "k", "v", "message"), SHAPES, ids=[row[-1] for row in SHAPES])
def test_shapes_that_do_not_fit(q, k, v, message):
    shapes = zip((q, k, v), tensors(), strict=True)
    given = [torch.empty(shape or usual.shape) for shape, usual in shapes]
    with refused(ValueError, message):
        Problem.from_tensors(*given)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_tensor(place):
    given = list(tensors())
    given[place] = [1.0]
    with refused(TypeError, f"{'qkv'[place]} must be a torch.Tensor, got list"):
        Problem.from_tensors(*given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_tensors_without_strides(place):
    for tensor, got in (
        (torch.zeros(2, 5, 4, 64).to_sparse(), "torch.sparse_coo"),
        (torch.nested.nested_tensor([torch.zeros(5, 4, 64)] * 2), "a nested one"),
    ):
        given = list(tensors(dtype=torch.float32))
        given[place] = tensor
        with refused(TypeError, f"{'qkv'[place]} must be a dense tensor, got {got}"):
            Problem.from_tensors(*given)


def test_mixed_dtypes_and_devices():
    q, k, v = tensors()
    with refused(TypeError, "q, k and v must have one dtype, got torch.bfloat16, torch.bfloat16 and torch.float16"):
        Problem.from_tensors(q, k, v.half())
    with refused(RuntimeError, "q, k and v must have one device, got cpu, meta and cpu"):
        Problem.from_tensors(q, k.to("meta"), v)
    with refused(RuntimeError, "device must be the CPU or a CUDA GPU, got meta"):
        Problem.from_tensors(*tensors("meta"))
    with refused(TypeError, "dtype must be float16, bfloat16, float32 or float64 on the CPU, got float8_e4m3fn"):
        Problem.from_tensors(*tensors(dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("shape", [(2, 0, 4, 64), (0, 5, 4, 64), (2, 5, 0, 64)])
def test_empty_shapes_are_legal(shape):
    k = torch.empty(shape[0], 7, 2, 64)
    asked = Problem.from_tensors(torch.empty(shape), k, k)
    assert (asked.batch, asked.seqlen_q, asked.heads) == shape[:3] and asked.group == shape[2] // 2


def test_a_problem_says_what_was_asked():
    q, k, v = tensors(head_dim_v=32)
    asked = Problem.from_tensors(q, k, v, causal=True, num_splits=0, pack_gqa=False, deterministic=True, sm_margin=4)
    assert asked == Problem(torch.device("cpu"), torch.bfloat16, 2, 5, 7, 4, 2, 64, 32, 0.125, None, 0)
    assert (asked.attention_chunk, asked.softcap, asked.has_sink, asked.has_alibi) == (0, 0.0, False, False)
    more = {"sink": torch.ones(4), "alibi_slopes": torch.ones(2, 4), "softcap": 15, "window_size": (2, 3)}
    asked = Problem.from_tensors(q, k, v, attention_chunk=4, **more)
    assert (asked.left, asked.right, asked.attention_chunk, asked.softcap) == (2, None, 4, 15.0)
    assert asked.has_sink and asked.has_alibi and type(asked.softcap) is float and hash(asked) == hash(replace(asked))
    assert asked.group == 2 and hash(asked) == hash(replace(asked))
    with pytest.raises(FrozenInstanceError):
        asked.heads = 1


@pytest.mark.parametrize("scale", [0, 0.0, -0.3, 1, Fraction(1, 2), 1.7e38])
def test_scales_are_kept(scale):
    asked = Problem.from_tensors(*tensors(), softmax_scale=scale)
    assert asked.softmax_scale == float(scale) and type(asked.softmax_scale) is float


@pytest.mark.parametrize(
    ("window_size", "causal", "expected"),
    [
        ((-1, -1), False, (None, None)), ((None, None), False, (None, None)), ((-1, None), True, (None, 0)),
        ((-1, 0), False, (None, 0)), ([-1, 0], False, (None, 0)), ((6, 0), False, (None, 0)),
        ((7, 0), False, (None, 0)), ((5, 0), False, (5, 0)), ((0, -1), False, (0, None)), ((-1, 3), False, (None, 3)),
        ((-1, 4), False, (None, None)),
        ((-1, 2**31 - 1), False, (None, None)), ((2**31 - 1, 2**31 - 1), False, (None, None)),
        ((-1, 3), True, (None, 0)), ((2**40, -1), True, (None, 0)),
    ],
)  # fmt: skip
def test_bounds_of_5_queries_and_7_keys(window_size, causal, expected):
    assert bounds(window_size, causal, 5, 7) == expected


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 5), (5, 1), (4, 4), (3, 7), (7, 3)])
def test_a_bound_is_kept_exactly_where_it_hides_a_key(seqlen_q, seqlen_k):
    distances = [j - i - seqlen_k + seqlen_q for i in range(seqlen_q) for j in range(seqlen_k)]
    for side in range(9):
        left, _ = bounds((side, -1), False, seqlen_q, seqlen_k)
        _, right = bounds((-1, side), False, seqlen_q, seqlen_k)
        assert left == (side if any(distance < -side for distance in distances) else None)
        assert right == (side if any(distance > side for distance in distances) else None)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 5), (5, 1), (4, 4), (3, 7), (7, 3), (0, 4), (4, 0)])
def test_a_chunk_is_kept_exactly_where_it_hides_a_key(seqlen_q, seqlen_k):
    """And beside it a bound exactly where it can hide one more."""
    pairs = [(i + seqlen_k - seqlen_q, j) for i in range(seqlen_q) for j in range(seqlen_k)]
    for chunk in range(1, 9):
        seen = [j - p for p, j in pairs if j // chunk == p // chunk]
        kept, left, right = chunked(chunk, None, None, seqlen_q, seqlen_k)
        assert (left, right) == (None, None)
        assert not pairs or kept == (chunk if len(seen) < len(pairs) else 0)
        for side in range(9) if kept else ():
            _, left, right = chunked(chunk, side, side, seqlen_q, seqlen_k)
            assert left is not None or not any(distance < -side for distance in seen)
            assert right is not None or not any(distance > side for distance in seen)
            assert (left is None, right is None) == (side >= chunk - 1,) * 2
    assert chunked(0, 3, 2, seqlen_q, seqlen_k) == (0, 3, 2)


def test_a_softcap_of_minus_zero_is_none():
    plain = Problem.from_tensors(*tensors())
    assert repr(Problem.from_tensors(*tensors(), softcap=-0.0)) == repr(Problem.from_tensors(*tensors(), softcap=0))
    assert Problem.from_tensors(*tensors(), softcap=0) == plain


def test_dtypes_of_a_sink():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for sink in (torch.float32, dtype):
            assert Problem.from_tensors(*tensors(dtype=dtype), sink=torch.ones(4, dtype=sink)).has_sink


def test_causal_in_all_its_spellings_is_one_problem():
    q, k, v = tensors(seqlen_q=7)
    spellings = ({"causal": True}, {"window_size": (-1, 0)}, {"window_size": (6, 0)}, {"window_size": (None, 0)},
                 {"window_size": (-1, 5), "causal": True})  # fmt: skip
    assert len({Problem.from_tensors(q, k, v, **spelling) for spelling in spellings}) == 1
    assert Problem.from_tensors(*tensors(seqlen_q=1), causal=True).right is None


def test_static_holds_classes_and_presence(hopper):
    asked = Problem.from_tensors(*tensors("cuda", head_dim=72, head_dim_v=200), causal=True, softmax_scale=-1.0)
    assert asked.static == Static("bfloat16", 96, 256, True, False, True)
    half = Problem.from_tensors(*tensors("cuda", torch.float16, head_dim=8, head_dim_v=128))
    assert half.static == Static("float16", 64, 128, False, False, False)
    shifted = Problem.from_tensors(*tensors("cuda"), window_size=(-1, 2))
    assert shifted.right == 2 and shifted.static == Static("bfloat16", 64, 64, True, False, False)
    # A left bound is never alone; the right one hides nothing then
    for window, right in (((3, 2), 2), ((3, -1), 4)):
        windowed = Problem.from_tensors(*tensors("cuda"), window_size=window)
        assert windowed.static == Static("bfloat16", 64, 64, True, True, False)
        assert windowed.backward_static(True, False) == BackwardStatic("bfloat16", 64, 64, True, True, False, True)
        assert windowed.kernel_bounds == (right, 3, None)
    assert hash(half.static) == hash(Static(*half.static)) and half.static != shifted.static


ON_CUDA = (
    ({"dtype": torch.float32}, {}, TypeError, "dtype must be bfloat16 or float16 on CUDA, got float32"),
    ({"dtype": torch.float8_e4m3fn}, {}, TypeError, "dtype must be bfloat16 or float16 on CUDA, got float8_e4m3fn"),
    ({"head_dim": 260}, {}, ValueError, f"head_dim {DIMS}, got 260"),
    ({"head_dim_v": 12}, {}, ValueError, f"head_dim_v {DIMS}, got 12"),
    ({"seqlen_k": 2**30}, {}, ValueError, "seqlen_k must be less than 2**30, got 1073741824"),
    ({"batch": 2**20, "heads": 2**5, "seqlen_q": 64 * 63 + 1}, {}, ValueError,
     "batch * heads * ceil(seqlen_q / 64) must be less than 2**31 - 2**12, got 2147483648"),
    ({}, {"sm_margin": 132}, ValueError, "the device's SMs minus sm_margin must be at least 1, got 0"),
    ({}, {"sm_margin": 1.0}, ValueError, "sm_margin must be an integer of at least 0, got 1.0"),
    ({}, {"plan": Plan(100, 128)}, ValueError, "tile_m must be 64, 128 or 192, got 100"),
    ({}, {"softcap": 1025}, ValueError, "softcap must be at most 1024 on CUDA, got 1025.0"),
    ({}, {"softcap": -1.0}, ValueError, f"{SOFTCAP}, got -1.0"),
    ({}, {"score": ScoreHook("a", None, cpu=max)}, NotImplementedError,
     "score must have a function forward for tensors on CUDA, got None"),
    ({}, {"mask": MaskHook("a", None, max)}, NotImplementedError,
     "mask must have a function visible for tensors on CUDA, got None"),
)  # fmt: skip


@pytest.mark.parametrize(("numbers", "options", "error", "message"), ON_CUDA, ids=[row[-1] for row in ON_CUDA])
def test_refusals_on_cuda(numbers, options, error, message, hopper):
    made = {name: torch.ones(options[name], device="cuda") for name in ("sink", "alibi_slopes") if name in options}
    with refused(error, message):
        Problem.from_tensors(*tensors("cuda", **numbers), **options | made)


def test_gradients_on_cuda_need_a_hook_with_a_backward(hopper):
    q, k, v = tensors("cuda")
    q.requires_grad_()
    with refused(NotImplementedError, "score must have a function backward for gradients on CUDA, got None"):
        Problem.from_tensors(q, k, v, score=ScoreHook("a", max))
    a, same, other = (
        Problem.from_tensors(q, k, v, score=ScoreHook(key, f, f), mask=MaskHook("m", f), softmax_scale=-1.0)
        for key, f in (("b", max), ("b", min), ("c", max))
    )
    for of in (lambda each: each.static, lambda each: each.backward_static(False, False)):
        assert of(a) == of(same) and hash(of(a)) == hash(of(same)) and of(a) != of(other) and of(a).mask.key == "m"
    assert not a.static.negative_scale  # scores behind a hook are in natural units


def test_what_is_legal_on_cuda(hopper):
    tiles = {"batch": 2**20, "heads": 2**5, "seqlen_q": 64 * 63}
    assert Problem.from_tensors(*tensors("cuda", **tiles), sm_margin=SMS - 1).device == torch.device("cuda", 0)
    q, k, v = tensors("cuda")
    assert Problem.from_tensors(q, k, v, plan=Plan(128, 128)).heads == 4
    Problem.from_tensors(q, k, v, out=torch.empty(q.shape, dtype=q.dtype, device="cuda"))
    assert Problem.from_tensors(q, k, v, attention_chunk=7, softcap=0) == Problem.from_tensors(q, k, v)


def test_the_static_part_of_a_backward(hopper):
    given = tensors("cuda", torch.float16, head_dim=72, head_dim_v=8)
    shifted = Problem.from_tensors(*given, window_size=(-1, 2), softmax_scale=-1.0)
    assert shifted.backward_static(True, False) == BackwardStatic("float16", 96, 64, True, True, False)
    dense = Problem.from_tensors(*given).backward_static(False, True)
    assert dense == BackwardStatic("float16", 96, 64, False, False, True)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_gradients_on_cuda(place, hopper):
    given = list(tensors("cuda"))
    given[place] = torch.empty(given[place].shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    out = torch.empty(given[0].shape, dtype=torch.bfloat16, device="cuda")
    assert Problem.from_tensors(*given) == Problem.from_tensors(*tensors("cuda"))
    with refused(ROWS[-1][2], ROWS[-1][3].replace("Tensor", "FakeTensor")):
        Problem.from_tensors(*given, out=out)
    with torch.no_grad():
        assert Problem.from_tensors(*given, out=out).batch == 2


def test_gradients_and_out_on_the_cpu():
    q, k, v = tensors()
    out = torch.empty(q.shape, dtype=q.dtype)
    v = v.clone().requires_grad_()
    assert Problem.from_tensors(q, k, v).batch == 2
    with refused(ROWS[-1][2], ROWS[-1][3]):
        Problem.from_tensors(q, k, v, out=out)
    with torch.no_grad():
        assert Problem.from_tensors(q, k, v, out=out.requires_grad_()).batch == 2
    out, sink = out.detach(), torch.ones(4, requires_grad=True)
    with refused(ROWS[-1][2], ROWS[-1][3]):
        Problem.from_tensors(q, k, v.detach(), sink=sink, out=out)
    with torch.no_grad():
        slopes = torch.ones(4, requires_grad=True)
        assert Problem.from_tensors(q, k, v, sink=sink, alibi_slopes=slopes, out=out).has_alibi


def test_the_device_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (8, 6))
    device = torch.device("cuda", 99)
    assert [problem.architecture(device) for _ in range(3)] == ["sm_86"] * 3 and asked == [device]


def test_another_gpu_is_refused(hopper, monkeypatch):
    monkeypatch.setattr(problem, "architecture", lambda device: "sm_100")
    with refused(RuntimeError, "the CUDA device must be sm_90 (H100, H200), got sm_100"):
        Problem.from_tensors(*tensors("cuda"))

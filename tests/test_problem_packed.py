"""PackedProblem: every refusal with its exact message. Fake tensors stand in for CUDA ones: no GPU is needed."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from refusal import refused

from hopper_fa3.hooks import MaskHook, ScoreHook, indices_of
from hopper_fa3.plan import Plan
from hopper_fa3.problem import ILLEGAL, ON_CUDA, BackwardStatic, Packed, Problem, Static
from hopper_fa3.problem_packed import PackedProblem, used_rows

NUMBERS = {"total_q": 9, "total_k": 12, "heads": 4, "heads_k": 2, "head_dim": 64, "head_dim_v": 32}


def offsets(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def arguments(device="cpu", dtype=torch.bfloat16, **changed):
    """Positional arguments: three sequences of 5, 0, 3 queries and 2, 4, 5 keys; each total has a row more."""
    n = NUMBERS | {name: changed.pop(name) for name in list(changed) if name in NUMBERS}
    one = torch.empty(1, dtype=dtype, device=device)
    given = {
        "q": one.expand(n["total_q"], n["heads"], n["head_dim"]),
        "k": one.expand(n["total_k"], n["heads_k"], n["head_dim"]),
        "v": one.expand(n["total_k"], n["heads_k"], n["head_dim_v"]),
        "cu_seqlens_q": offsets(0, 5, 5, 8, device=device), "cu_seqlens_k": offsets(0, 2, 6, 11, device=device),
        "max_seqlen_q": 5, "max_seqlen_k": 5, "seqused_q": None, "seqused_k": None,
    }  # fmt: skip
    return list((given | changed).values())


def asked(*, options=(), **changed):
    return PackedProblem.from_tensors(*arguments(**changed), **dict(options))


OFFSETS = "cu_seqlens_q must"
LONGEST = "max_seqlen_q must be an integer of at least 0 or a 0-dim tensor of integers"

CALLS = (
    ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
    ({"q": torch.empty(2, 5, 4, 64)}, ValueError, "q must have shape (total_q, heads, head_dim), got (2, 5, 4, 64)"),
    ({"k": torch.empty(5, 64)}, ValueError, "k must have shape (total_k, heads_k, head_dim), got (5, 64)"),
    ({"v": torch.empty(64)}, ValueError, "v must have shape (total_k, heads_k, head_dim_v), got (64,)"),
    ({"k": torch.empty(11, 2, 64, dtype=torch.bfloat16)}, ValueError,
     "k and v must have the same total_k, got 11 and 12"),
    ({"k": torch.empty(12, 2, 32, dtype=torch.bfloat16)}, ValueError,
     "q and k must have the same head_dim, got 64 and 32"),
    ({"heads": 3}, ValueError, "heads must be a multiple of heads_k, which is at least 1, got 3 and 2"),
    ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q must be a torch.Tensor, got None"),
    ({"cu_seqlens_k": [0, 2]}, TypeError, "cu_seqlens_k must be a torch.Tensor, got list"),
    ({"cu_seqlens_q": torch.zeros(4, dtype=torch.int64)}, TypeError, f"{OFFSETS} have dtype int32, got int64"),
    ({"cu_seqlens_q": offsets()}, ValueError, f"{OFFSETS} have shape (batch + 1,), got (0,)"),
    ({"cu_seqlens_q": offsets([0, 5])}, ValueError, f"{OFFSETS} have shape (batch + 1,), got (1, 2)"),
    ({"cu_seqlens_k": offsets(0, 2)}, ValueError, "cu_seqlens_k must have shape (4,) beside cu_seqlens_q, got (2,)"),
    ({"cu_seqlens_q": torch.zeros(8, dtype=torch.int32)[::2]}, ValueError,
     f"{OFFSETS} be contiguous, got strides (2,)"),
    ({"cu_seqlens_q": offsets(0, 5, 5, 8).to("meta")}, ValueError, f"{OFFSETS} be on q's device cpu, got meta"),
    ({"seqused_q": 3}, TypeError, "seqused_q must be a torch.Tensor, got 3"),
    ({"seqused_k": torch.zeros(3)}, TypeError, "seqused_k must have dtype int32, got float32"),
    ({"seqused_k": offsets(0, 0, 0, 0)}, ValueError,
     "seqused_k must have shape (3,) beside cu_seqlens_q, got (4,)"),
    ({"cu_seqlens_q": offsets(-1, 5, 5, 8)}, ValueError, f"{OFFSETS} start at 0 or above, got -1"),
    ({"cu_seqlens_q": offsets(0, 5, 4, 8)}, ValueError, f"{OFFSETS} not decrease, got 5 and 4 at 1 and 2"),
    ({"cu_seqlens_q": offsets(0, 5, 5, 10)}, ValueError, f"{OFFSETS} end at total_q, 9, or below, got 10"),
    ({"cu_seqlens_k": offsets(0, 2, 6, 13)}, ValueError, "cu_seqlens_k must end at total_k, 12, or below, got 13"),
    ({"seqused_q": offsets(5, 1, 3)}, ValueError,
     "seqused_q must be from 0 to the sequence's length, got 1 for sequence 1 of length 0"),
    ({"seqused_k": offsets(-1, 1, 3)}, ValueError,
     "seqused_k must be from 0 to the sequence's length, got -1 for sequence 0 of length 2"),
    ({"max_seqlen_q": None}, TypeError, f"{LONGEST}, got None"),
    ({"max_seqlen_q": 5.0}, TypeError, f"{LONGEST}, got 5.0"),
    ({"max_seqlen_q": True}, TypeError, f"{LONGEST}, got True"),
    ({"max_seqlen_q": torch.tensor(5.0)}, TypeError, f"{LONGEST}, got float32"),
    ({"max_seqlen_q": torch.tensor(True)}, TypeError, f"{LONGEST}, got bool"),
    ({"max_seqlen_q": offsets(5)}, ValueError, f"{LONGEST}, got shape (1,)"),
    ({"max_seqlen_q": -1}, ValueError, f"{LONGEST}, got -1"),
    ({"max_seqlen_q": 4}, ValueError, "max_seqlen_q must be at least the longest sequence's used length, 5, got 4"),
    ({"max_seqlen_k": torch.tensor(2), "seqused_k": offsets(1, 3, 0)}, ValueError,
     "max_seqlen_k must be at least the longest sequence's used length, 3, got 2"),
)  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "message"), CALLS, ids=[row[2] for row in CALLS])
def test_arguments_that_do_not_fit(changed, error, message):
    with refused(error, message):
        asked(**changed)


OPTIONS = (
    ({"page_table": torch.zeros(1)}, NotImplementedError, "page_table must be None (not built yet), got Tensor"),
    ({"softcap": -1.0}, ValueError, "softcap must be 0 (none), or from 2**-126 to below 2**127, got -1.0"),
    ({"attention_chunk": -1}, ValueError, "attention_chunk must be an integer of at least 0, got -1"),
    ({"attention_chunk": 2.0}, ValueError, "attention_chunk must be an integer of at least 0, got 2.0"),
    ({"sink": torch.ones(3)}, ValueError, "sink must have shape (heads,), here (4,), got (3,)"),
    ({"sink": 1.0}, TypeError, "sink must be a torch.Tensor, got 1.0"),
    ({"alibi_slopes": torch.ones(9, 4)}, ValueError,
     "alibi_slopes must have shape (heads,) or (batch, heads), here (4,) or (3, 4), got (9, 4)"),
    ({"alibi_slopes": torch.ones(3)}, ValueError,
     "alibi_slopes must have shape (heads,) or (batch, heads), here (4,) or (3, 4), got (3,)"),
    ({"alibi_slopes": torch.ones(4, requires_grad=True)}, NotImplementedError,
     "alibi_slopes must not require grad (their gradient is not built), got True"),
    ({"score": 2.0}, TypeError, "score must be a hopper_fa3.hooks.ScoreHook, got 2.0"),
    ({"mask": ScoreHook("none", None)}, TypeError, "mask must be a hopper_fa3.hooks.MaskHook, got ScoreHook"),
    ({"mask": MaskHook("none", None)}, NotImplementedError,
     "mask must have a function cpu for tensors on the CPU, got None"),
    ({"deterministic": "yes"}, TypeError, "deterministic must be True or False, got yes"),
    ({"causal": torch.tensor(True)}, TypeError, "causal must be True or False, got Tensor"),
    ({"window_size": (-2, 0)}, ValueError, "each side of window_size must be None, -1 or at least 0, got (-2, 0)"),
    ({"softmax_scale": "big"}, TypeError, "softmax_scale must be a number or None, got big"),
    ({"sm_margin": -3}, ValueError, "sm_margin must be an integer of at least 0, got -3"),
    ({"plan": (128, 128)}, TypeError, "plan must be a hopper_fa3.plan.Plan, got tuple"),
    ({"out": torch.empty(9, 4, 64, dtype=torch.bfloat16)}, ValueError,
     "out must have shape (9, 4, 32), got (9, 4, 64)"),
    ({"out": torch.empty(9, 4, 32)}, TypeError, "out must have q's dtype bfloat16, got float32"),
)  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS, ids=[row[2] for row in OPTIONS])
def test_an_illegal_option(options, error, message):
    with refused(error, message):
        asked(options=options)


def test_every_option_of_the_table_is_refused():
    unbuilt = {row.fact for row in ILLEGAL if row.error is NotImplementedError and not row.where} - {"slopes_gradient"}
    assert "page_table" in unbuilt
    for name in unbuilt:
        with pytest.raises(NotImplementedError, match=f"^{name} must be"):
            asked(options={name: 3})


def test_every_option_of_the_table_is_refused_on_cuda(hopper):
    hooks = {"score_forward": ScoreHook("none", None), "mask_visible": MaskHook("none", None)}
    unbuilt = {row.fact for row in ILLEGAL if row.error is NotImplementedError and row.where == ON_CUDA} - {"tangent"}
    assert unbuilt == set(hooks)
    for fact, hook in hooks.items():
        name, function = fact.split("_")
        with refused(NotImplementedError, f"{name} must have a function {function} for tensors on CUDA, got None"):
            asked(device="cuda", options={name: hook})
    with refused(ValueError, "softcap must be at most 1024 on CUDA, got 1025.0"):
        asked(device="cuda", options={"softcap": 1025})


def test_a_problem_says_what_was_asked():
    found = asked(options={"causal": True, "deterministic": True, "sm_margin": 4}, seqused_k=offsets(1, 0, 5))
    expected = PackedProblem(
        torch.device("cpu"), torch.bfloat16, 3, 9, 12, 4, 2, 64, 32, 0.125, None, 0, False, True
    )  # fmt: skip
    assert found == expected and hash(found) == hash(replace(found)) and found.group == 2
    assert found.out_shape == (9, 4, 32)
    score, mask = ScoreHook("none", None, cpu=abs), MaskHook("all", None, cpu=abs)
    numbers, tensors = {"attention_chunk": 100, "softcap": 15}, {"sink": torch.ones(4), "alibi_slopes": torch.ones(4)}
    more = asked(options={"causal": True, "score": score, "mask": mask} | numbers | tensors)
    assert more == replace(
        expected, has_seqused_k=False, has_sink=True, has_alibi=True, score=score, mask=mask, **numbers
    )
    with pytest.raises(FrozenInstanceError):
        found.heads = 1


@pytest.mark.parametrize(
    ("window_size", "expected"),
    [
        ((2, 3), (2, 3)),
        ((10, 7), (10, 7)),
        ((11, 8), (None, None)),
        ((10**6, None), (None, None)),
        ((0, -1), (0, None)),
    ],
)
def test_a_bound_is_kept_where_a_sequence_may_be_as_long(window_size, expected):
    found = asked(options={"window_size": window_size})
    assert (found.left, found.right) == expected


def test_its_sequences_side_by_side():
    options = {"causal": True, "softmax_scale": 0.3, "window_size": (4, 0)}
    found = asked(options=options).side_by_side(torch.arange(3), 5, 7)
    expected = Problem(torch.device("cpu"), torch.bfloat16, 1, 5, 7, 12, 6, 64, 32, 0.3, 4, 0)
    assert found == expected
    more = {"softcap": 2.0, "sink": torch.ones(4), "alibi_slopes": torch.ones(3, 4)}
    found = asked(options=options | more).side_by_side(torch.arange(3), 5, 7)
    assert found == replace(expected, softcap=2.0, has_sink=True, has_alibi=True)


@pytest.mark.parametrize(
    ("chunk", "seqlen_q", "seqlen_k", "expected"),
    [(7, 5, 7, (0, 4, 0)), (6, 5, 7, (6, 4, 0)), (7, 7, 5, (7, 4, 0)), (5, 7, 5, (5, None, 0)), (0, 5, 7, (0, 4, 0))],
)
def test_a_chunk_is_kept_for_the_sequences_of_which_it_hides_keys(chunk, seqlen_q, seqlen_k, expected):
    """All rows together say nothing of it: a sequence may be longer or shorter, with more queries or more keys."""
    problem = asked(options={"window_size": (4, 0), "attention_chunk": chunk})
    assert problem.attention_chunk == chunk
    found = problem.side_by_side(torch.arange(1), seqlen_q, seqlen_k)
    assert (found.attention_chunk, found.left, found.right) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (8, None, None)),
        ({"window_size": (4, 3)}, (3, 4, None)),
        # A chunk as long as all rows still hides keys from queries in front of the first one
        ({"attention_chunk": 12}, (8, 12, 12)),
        ({"attention_chunk": 5, "window_size": (6, 7)}, (7, 6, 5)),
        ({"attention_chunk": 2**62, "causal": True}, (0, 12, 2**30)),
    ],
)
def test_the_bounds_of_kernels(options, expected):
    problem = asked(options=options)
    assert problem.kernel_bounds == expected
    assert (problem.bounded, problem.windowed) == (bool(options), expected[1] is not None)


def test_hooks_of_sequences_side_by_side():
    """They see each sequence as the batch entry that it is, and its heads as they are."""
    seen = []
    hooks = {
        "score": ScoreHook(
            "kept", None, cpu=lambda x, *place: seen.append(place) or x,
            cpu_backward=lambda gradient, x, *place: seen.append(place) or gradient,
        ),
        "mask": MaskHook("kept", None, cpu=lambda *place: seen.append(place) or torch.ones(1, dtype=torch.bool)),
    }  # fmt: skip
    found = asked(options=hooks).side_by_side(torch.tensor([2, 0]), 5, 7)
    place = indices_of(range(1), range(8), range(5), range(7), "cpu")
    tile = torch.zeros(1, 8, 5, 7)
    found.score.scores(tile, place)
    found.score.gradient(tile, tile, place)
    found.mask.hidden(place)
    assert len(seen) == 3
    for sequence, head, query, key in seen:
        assert sequence.flatten().tolist() == [2, 2, 2, 2, 0, 0, 0, 0]
        assert head.flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3] and query is place[2] and key is place[3]
    plain = ScoreHook("doubled", None, cpu=lambda x, *_: 2 * x).side_by_side(torch.arange(2), 4)
    assert plain.gradient(tile + 1, tile, place).unique().tolist() == [2]


def test_rows_that_sequences_use():
    cu_seqlens = offsets(1, 4, 4, 9)
    assert used_rows(cu_seqlens) == [range(1, 4), range(4, 4), range(4, 9)]
    assert used_rows(cu_seqlens, offsets(2, 0, 5)) == [range(1, 3), range(4, 4), range(4, 9)]
    assert used_rows(offsets(3)) == []


@pytest.mark.parametrize("totals", [{"total_q": 8, "total_k": 11}, {"total_q": 100, "total_k": 100}])
def test_totals_from_the_last_offset_on(totals):
    assert asked(**totals).total_q == totals["total_q"]


def test_no_sequences_and_no_rows():
    empty = {"cu_seqlens_q": offsets(0), "cu_seqlens_k": offsets(0), "max_seqlen_q": 0, "max_seqlen_k": 0}
    assert asked(**empty, seqused_k=offsets()).batch == 0
    assert asked(**empty, total_q=0, total_k=0).total_k == 0


def test_nothing_on_cuda_is_read(hopper):
    """A fake tensor has no values: to read one is an error."""
    device = {"device": "cuda"}
    used = {f"seqused_{name}": torch.empty(3, dtype=torch.int32, device="cuda") for name in "qk"}
    longest = {f"max_seqlen_{name}": torch.empty((), dtype=torch.int64, device="cuda") for name in "qk"}
    found = asked(**device, **used, **longest)
    assert found.device == torch.device("cuda", 0) and found.has_seqused_q and found.has_seqused_k
    assert asked(**device, max_seqlen_q=0) == replace(found, has_seqused_q=False, has_seqused_k=False)
    assert asked(**device, options={"plan": Plan(128, 128)}).batch == 3


def test_the_static_parts(hopper):
    found = asked(device="cuda", options={"causal": True, "softmax_scale": -1.0})
    packed = Packed(used_q=False, used_k=False)
    assert found.static == Static("bfloat16", 64, 64, True, False, True, packed)
    gradients = BackwardStatic("bfloat16", 64, 64, True, True, False, packed=packed)
    assert found.backward_static(True, False) == gradients
    hook = {"softcap": 2, "sink": torch.ones(4, device="cuda"), "alibi_slopes": torch.ones(3, 4, device="cuda")}
    more = asked(device="cuda", options={"causal": True, "softmax_scale": -1.0, "attention_chunk": 100} | hook)
    changed = {"left_bound": True, "softcap": True, "sink": True, "alibi": "linear", "chunked": True}
    assert more.static == found.static._replace(negative_scale=False, **changed)
    assert more.backward_static(True, False) == gradients._replace(**changed)
    for softcap, by_sums in ((29.9, False), (30, True)):
        capped = asked(device="cuda", options={"causal": True, "softmax_scale": -1.0, "softcap": softcap})
        assert capped.static == found.static._replace(negative_scale=False, softcap=True, by_sums=by_sums)
    used = {f"seqused_{name}": torch.empty(3, dtype=torch.int32, device="cuda") for name in "qk"}
    assert asked(device="cuda", **used).static.packed == Packed(used_q=True, used_k=True)


def test_hooks_on_cuda(hopper):
    given = {"score": ScoreHook("s", max, max), "mask": MaskHook("m", max)}
    found = asked(device="cuda", options=given | {"softmax_scale": -1.0})
    for static in (found.static, found.backward_static(True, False)):
        assert (static.score, static.mask) == (given["score"], given["mask"]) and static.packed is not None
    assert not found.static.negative_scale  # scores behind a hook are in natural units
    tensors, one_way = arguments("cuda"), ScoreHook("s", max)
    assert PackedProblem.from_tensors(*tensors, score=one_way).score == one_way
    tensors[0].requires_grad_()
    with refused(NotImplementedError, "score must have a function backward for gradients on CUDA, got None"):
        PackedProblem.from_tensors(*tensors, score=one_way)


@pytest.mark.parametrize(
    ("changed", "options", "error", "message"),
    [
        ({"dtype": torch.float32}, {}, TypeError, "dtype must be bfloat16 or float16 on CUDA, got float32"),
        ({"head_dim": 260}, {}, ValueError, "head_dim must be a multiple of 8 and at most 256, got 260"),
        ({"total_k": 2**30}, {}, ValueError, "total_k must be less than 2**30, got 1073741824"),
        ({"total_q": 2**30}, {}, ValueError, "total_q must be less than 2**30, got 1073741824"),
        ({"total_q": 2**29, "heads": 2**8}, {}, ValueError,
         "heads * (total_q // 64 + min(2 * batch + 2, total_q)) must be less than 2**31 - 2**12, got 2147485696"),
        ({"total_k": 2**29, "heads": 2**8, "heads_k": 2**8}, {}, ValueError,
         "heads_k * (total_k // 64 + min(2 * batch + 2, total_k)) must be less than 2**31 - 2**12, got 2147485696"),
        # 32,766 sequences of one query and one unused row each: 65,532 tiles a head
        ({"total_q": 65_532, "heads": 2**15, "batch": 32_766}, {}, ValueError,
         "heads * (total_q // 64 + min(2 * batch + 2, total_q)) must be less than 2**31 - 2**12, got 2180874240"),
        ({"batch": 2**26}, {}, ValueError, "batch must be less than 2**26 for packed sequences, got 67108864"),
        ({}, {"sm_margin": 132}, ValueError, "the device's SMs minus sm_margin must be at least 1, got 0"),
        ({}, {"plan": Plan(100, 128)}, ValueError, "tile_m must be 64, 128 or 192, got 100"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_on_cuda(changed, options, error, message, hopper):
    batch = changed.get("batch", 3)
    ends = {f"cu_seqlens_{name}": torch.empty(batch + 1, dtype=torch.int32, device="cuda") for name in "qk"}
    others = {name: value for name, value in changed.items() if name != "batch"}
    with refused(error, message):
        asked(device="cuda", **ends | others, options=options)


def test_lengths_on_another_device_than_q(hopper):
    with refused(ValueError, "cu_seqlens_k must be on q's device cuda:0, got cpu"):
        asked(device="cuda", cu_seqlens_k=torch.empty(4, dtype=torch.int32))


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 7, 8])
def test_tensors_without_memory_are_refused(place, hopper, monkeypatch):
    used = {f"seqused_{name}": torch.empty(3, dtype=torch.int32, device="cuda") for name in "qk"}
    given = arguments("cuda", **used)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", None, None, "seqused_q", "seqused_k")
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0 if tensor is given[place] else 4096)
    message = f"{names[place]} must have memory on CUDA (fake and wrapped tensors have none), got FakeTensor"
    with refused(TypeError, message):
        PackedProblem.from_tensors(*given)


def test_gradients_and_out():
    given = arguments()
    given[1] = given[1].clone().requires_grad_()
    out = torch.empty(9, 4, 32, dtype=torch.bfloat16)
    message = "out must be None where q, k, v or sink requires grad (results are written in place), got Tensor"
    with refused(ValueError, message):
        PackedProblem.from_tensors(*given, out=out)
    with torch.no_grad():
        assert PackedProblem.from_tensors(*given, out=out).batch == 3

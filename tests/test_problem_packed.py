"""PackedProblem: every refusal with its exact message. Fake tensors stand in for CUDA ones: no GPU is needed."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from refusal import refused

from hopper_fa3.plan import Plan
from hopper_fa3.problem import ILLEGAL, BackwardStatic, Packed, Problem, Static
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
    ({"softcap": 15.0}, NotImplementedError, "softcap must be 0.0 (not built yet), got 15.0"),
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
    unbuilt = {row.fact for row in ILLEGAL if row.error is NotImplementedError} - {"left", "tangent"}
    assert "page_table" in unbuilt
    for name in unbuilt:
        with pytest.raises(NotImplementedError, match=f"^{name} must be"):
            asked(options={name: 3})


def test_a_problem_says_what_was_asked():
    found = asked(options={"causal": True, "deterministic": True, "sm_margin": 4}, seqused_k=offsets(1, 0, 5))
    expected = PackedProblem(
        torch.device("cpu"), torch.bfloat16, 3, 9, 12, 4, 2, 64, 32, 0.125, None, 0, False, True
    )  # fmt: skip
    assert found == expected and hash(found) == hash(replace(found)) and found.group == 2
    assert found.out_shape == (9, 4, 32)
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


def test_one_of_its_sequences():
    found = asked(options={"causal": True, "softmax_scale": 0.3, "window_size": (4, 0)}).of_sequence(5, 7)
    assert found == Problem(torch.device("cpu"), torch.bfloat16, 1, 5, 7, 4, 2, 64, 32, 0.3, 4, 0)


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
    used = {f"seqused_{name}": torch.empty(3, dtype=torch.int32, device="cuda") for name in "qk"}
    assert asked(device="cuda", **used).static.packed == Packed(used_q=True, used_k=True)


@pytest.mark.parametrize(
    ("changed", "options", "error", "message"),
    [
        ({"dtype": torch.float32}, {}, TypeError, "dtype must be bfloat16 or float16 on CUDA, got float32"),
        ({"head_dim": 260}, {}, ValueError, "head_dim must be a multiple of 8 and at most 256, got 260"),
        ({"total_k": 2**30}, {}, ValueError, "total_k must be less than 2**30, got 1073741824"),
        ({"total_q": 2**30}, {}, ValueError, "total_q must be less than 2**30, got 1073741824"),
        ({"total_q": 2**29, "heads": 2**8}, {}, ValueError,
         "heads * (batch + ceil(total_q / 64)) must be less than 2**31 - 2**12, got 2147484416"),
        ({}, {"sm_margin": 132}, ValueError, "the device's SMs minus sm_margin must be at least 1, got 0"),
        ({}, {"plan": Plan(100, 128)}, ValueError, "tile_m must be 64, 128 or 192, got 100"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_on_cuda(changed, options, error, message, hopper):
    with refused(error, message):
        asked(device="cuda", **changed, options=options)


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
    message = "out must be None where q, k or v requires grad (results are written in place), got Tensor"
    with refused(ValueError, message):
        PackedProblem.from_tensors(*given, out=out)
    with torch.no_grad():
        assert PackedProblem.from_tensors(*given, out=out).batch == 3

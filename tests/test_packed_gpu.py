"""Packed sequences on the GPU: values, LSE and gradients over mixes of lengths, head dims, groups and masks."""

import math
from dataclasses import replace

import pytest
import torch
from check_packed import check_neighbours_of_nan, compare, compare_gradients, run, run_gradients, sequences
from packed_cases import CROSSED, EMPTY, LINES, ON_GPU, RAGGED, SPARE, TAILED, USED, WINDOWED, Inputs, PackedCase

from hopper_fa3 import flash_attn_func, flash_attn_varlen_func, plan
from hopper_fa3.problem_packed import PackedProblem

pytestmark = [pytest.mark.gpu, pytest.mark.kernels("128_128")]

DENSE_64 = {"head_dim": 64, "head_dim_v": 64}
FLOWS = ("both", "lse")


def check(case, device):
    inputs = case.inputs(device)
    out, lse = run(inputs, **case.options)
    compare(out, lse, inputs, **case.options)


def check_gradients(case, device, *, flow="out", wanted="qkv", **how):
    inputs = case.inputs(device)
    dout, dlse = case.arriving(inputs)
    arrived = {"dout": None if flow == "lse" else dout, "dlse": None if flow == "out" else dlse}
    gradients = run_gradients(inputs, **arrived, wanted=wanted, **case.options, **how)
    assert [x is not None for x in gradients] == [name in wanted for name in "qkv"]
    compare_gradients(gradients, inputs, **arrived, **case.options)
    return gradients


@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_values_and_lse(case, device):
    check(case, device)


@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_gradients(case, device):
    check_gradients(case, device)


@pytest.mark.parametrize("case", WINDOWED, ids=lambda case: case.name)
def test_values_and_lse_of_windows(case, device):
    check(case, device)


@pytest.mark.parametrize("case", WINDOWED, ids=lambda case: case.name)
def test_gradients_of_windows(case, device):
    check_gradients(case, device)


def test_a_negative_scale(device):
    check(replace(RAGGED, causal=True, softmax_scale=-0.1), device)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("case", (RAGGED, EMPTY, SPARE, USED, CROSSED, *LINES[:3]), ids=lambda case: case.name)
def test_gradients_that_arrive_at_the_lse(case, flow, device):
    _, _, dv = check_gradients(replace(case, causal=True), device, flow=flow)
    assert dv.any() == (flow == "both" and any(queries and keys for queries, keys in case.inputs().lengths.rows))


@pytest.mark.parametrize("case", (EMPTY, SPARE, LINES[2]), ids=lambda case: case.name)
def test_line_12_a_loss_of_out_and_lse(case, device):
    """dO is one element expanded; queries that see no key have LSE -inf, whose weight in the logsumexp is 0."""
    case = replace(case, causal=True)
    inputs = case.inputs(device)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out, lse = flash_attn_varlen_func(*inputs, causal=True, return_attn_probs=True)
    (out.sum() + lse.logsumexp(-1).sum()).backward()
    arrived = torch.ones_like(out), torch.softmax(lse.detach(), -1)
    compare_gradients(
        [x.grad for x in leaves], Inputs(*(x.detach() for x in leaves), *inputs[3:]), *arrived, causal=True
    )


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_any_subset_of_the_inputs_requires_a_gradient(wanted, device):
    check_gradients(replace(SPARE, causal=True), device, wanted=wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("count", "length", "kinds"), [(80_000, 16, 50), (8_300, 1, 83)])
@pytest.mark.gpu(limit=300)
def test_line_6_many_sequences(count, length, kinds, causal, device):
    """A few sequences, repeated: each must have the bits of the one that it repeats, and every value of its gradients
    must lie within the bounds, whatever the order of sums.
    """
    case = PackedCase("many", (length,) * kinds, (length,) * kinds, causal=causal, **DENSE_64)
    few, copies, rows = case.inputs(device), count // kinds, kinds * length
    repeated = [x.repeat(copies, 1, 1) for x in few[:3]]
    offsets = torch.arange(count + 1, dtype=torch.int32, device=device) * length
    many = Inputs(*repeated, offsets, offsets, length, length, None, None)
    dout, _ = case.arriving(few)
    out, lse = run(many, causal=causal)
    compare(out[:rows], lse[:, :rows], few, causal=causal)
    assert torch.equal(out.unflatten(0, (copies, rows)), out[:rows].expand(copies, -1, -1, -1))
    assert torch.equal(lse.unflatten(1, (copies, rows)), lse[:, None, :rows].expand(-1, copies, -1))
    gradients = [x.unflatten(0, (copies, rows)) for x in run_gradients(many, dout.repeat(copies, 1, 1), causal=causal)]
    assert all(x.isfinite().all() for x in gradients)
    for extreme in (torch.amax, torch.amin):
        compare_gradients([extreme(x, 0) for x in gradients], few, dout, causal=causal)


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_rows_and_no_sequences(deterministic, device):
    for lengths in ((), (0,), (0, 0, 0)):
        for behind in ((0, 0), (7, 0), (0, 7), (7, 7)):
            case = PackedCase("none", lengths, lengths, behind=behind, causal=True)
            check(case, device)
            check_gradients(case, device, deterministic=deterministic)


ALONE = (
    replace(CROSSED, causal=True), replace(CROSSED, **DENSE_64), replace(RAGGED, causal=True),
    replace(USED, causal=True),
)  # fmt: skip


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_sequences_one_by_one_have_the_same_bits_under_one_plan(case, device):
    """Also those of flash_attn_func, whose kernel has one sequence to itself."""
    inputs = case.inputs(device)
    chosen = plan.choose(PackedProblem.from_tensors(*inputs, **case.options).static)
    options = {**case.options, "plan": chosen}
    out, lse = run(inputs, **options)
    compare(out, lse, inputs, **case.options)
    for number, (queries, keys, tensors) in enumerate(sequences(inputs)):
        lengths = [len(x[0]) for x in tensors[:2]]
        offsets = [torch.tensor([0, length], dtype=torch.int32, device=device) for length in lengths]
        for alone, alone_lse in (
            run(Inputs(*(x[0] for x in tensors), *offsets, *lengths, None, None), **options),
            (x[0] for x in flash_attn_func(*tensors, **options, return_attn_probs=True)),
        ):
            assert torch.equal(alone, out[queries]), f"sequence {number}, {queries} {keys}"
            assert torch.equal(alone_lse, lse[:, queries]), f"sequence {number}, {queries} {keys}"


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_neighbours_of_nan_change_no_bit(case, device):
    """Neither of the results nor of deterministic gradients."""
    check_neighbours_of_nan(case, device)


ORDERS = (TAILED, CROSSED, *(replace(case, causal=True) for case in (TAILED, CROSSED, USED)))


@pytest.mark.parametrize("case", ORDERS, ids=lambda case: case.name)
def test_deterministic_gradients_are_bit_equal(case, device):
    """While other work keeps the GPU busy, so that blocks come in other orders."""
    case = replace(case, heads=4)
    inputs = case.inputs(device)
    dout, _ = case.arriving(inputs)
    first = run_gradients(inputs, dout, **case.options, deterministic=True)
    compare_gradients(first, inputs, dout, **case.options)
    side, noise = torch.cuda.Stream(device), torch.ones(2048, 2048, device=device, dtype=torch.bfloat16)
    side.wait_stream(torch.cuda.current_stream(device))
    for turn in range(20):
        with torch.cuda.stream(side):
            for _ in range(turn % 5):
                noise[: 256 * (1 + turn % 8)] @ noise
        again = run_gradients(inputs, dout, **case.options, deterministic=True)
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True)), f"run {turn}"
    side.synchronize()


@pytest.mark.parametrize("case", (TAILED, CROSSED), ids=lambda case: case.name)
def test_the_forward_repeats_its_bits(case, device):
    case = replace(case, causal=True, heads=4)
    inputs = case.inputs(device)
    first = [x.clone() for x in run(inputs, **case.options)]
    for _ in range(50):
        assert all(torch.equal(one, two) for one, two in zip(first, run(inputs, **case.options), strict=True))


@pytest.mark.parametrize("sms", [1, 32])
@pytest.mark.parametrize("causal", [False, True])
def test_few_ctas_compute_all_tiles(sms, causal, device):
    margin = torch.cuda.get_device_properties(device).multi_processor_count - sms
    for case in (RAGGED, EMPTY):
        case = replace(case, causal=causal)
        inputs = case.inputs(device)
        out, lse = run(inputs, causal=causal, sm_margin=margin)
        compare(out, lse, inputs, causal=causal)
        check_gradients(case, device, sm_margin=margin)


VIEWS = {
    "of one tensor": lambda q, k, v: torch.stack((q, k, v), 1).unbind(1),
    "heads first": lambda *tensors: [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors],
    "expanded heads": lambda q, k, v: (q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)),
    "expanded rows": lambda q, k, v: (q[:1].expand_as(q), k[:1].expand_as(k), v),
    "not aligned": lambda *tensors: [torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape) for x in tensors],
    "columns first": lambda *tensors: [x.mT.contiguous().mT for x in tensors],
    "padded rows": lambda *tensors: [torch.cat((x, torch.full_like(x, math.nan)), -1)[..., :128] for x in tensors],
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides_are_free(view, device):
    case = replace(RAGGED, lengths_k=RAGGED.lengths_q, heads=3, heads_k=3, causal=True)
    inputs = case.inputs(device)
    inputs = Inputs(*VIEWS[view](*inputs[:3]), *inputs[3:])
    compare(*run(inputs, causal=True), inputs, causal=True)
    dout, _ = case.arriving(inputs)
    (given,) = VIEWS[view](dout, dout, dout)[:1]
    compare_gradients(run_gradients(inputs, given, causal=True), inputs, given, causal=True)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_given_output(head_dim, device):
    """Inside a larger tensor, around which nothing is written, and with its rows last in memory."""
    case = replace(SPARE, head_dim=head_dim, head_dim_v=head_dim, causal=head_dim == 128)
    inputs = case.inputs(device)
    total, heads, _ = inputs.q.shape
    around = torch.full((total + 3, heads + 2, head_dim + 24), 7.0, dtype=torch.bfloat16, device=device)
    for out in (around[1:-2, 1:-1, 8:-16], inputs.q.new_empty((heads, head_dim, total)).permute(2, 0, 1)):
        compare(*run(inputs, out=out, **case.options), inputs, **case.options)
        out.fill_(7)
    assert (around == 7).all(), "the kernel wrote outside the given output"


def test_inputs_stay_as_they_were(device):
    case = replace(RAGGED, causal=True)
    inputs = case.inputs(device)
    tensors = [*inputs[:5], *case.arriving(inputs)]
    before = [x.clone() for x in tensors]
    run_gradients(inputs, *tensors[5:], causal=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_refusals_on_the_gpu(device):
    inputs = RAGGED.inputs(device)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be on q's device cuda:\d, got cpu"):
        flash_attn_varlen_func(*inputs._replace(cu_seqlens_q=inputs.cu_seqlens_q.cpu()))
    with pytest.raises(TypeError, match="cu_seqlens_k must have dtype int32, got int64"):
        flash_attn_varlen_func(*inputs._replace(cu_seqlens_k=inputs.cu_seqlens_k.long()))
    with pytest.raises(TypeError, match="float32"):
        flash_attn_varlen_func(*(x.float() for x in inputs[:3]), *inputs[3:])

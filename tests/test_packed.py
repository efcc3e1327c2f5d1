"""flash_attn_varlen_func on the CPU: each sequence is as in a call of its own, whatever stands beside it."""

import math
import time
from dataclasses import replace

import check_packed
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import EMPTY, LINES, MIXES, RAGGED, SPARE, USED, Inputs, PackedCase, unused
from problems import EXACT, agree

import hopper_fa3 as flash_attn_interface
from hopper_fa3 import flash_attn_func, flash_attn_varlen_func
from hopper_fa3.plan import Plan

pytestmark = pytest.mark.usefixtures("one_thread")

LINE_3, _, LINE_4, LINE_5 = LINES
SMALL = {"head_dim": 8, "head_dim_v": 5, "dtype": "float64"}


def differentiated(case, inputs, **options):
    """((out, lse), (dq, dk, dv), what arrived)"""
    arrived = case.arriving(inputs)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    results = flash_attn_varlen_func(*leaves, *inputs[3:], **case.options, return_attn_probs=True, **options)
    gradients = torch.autograd.grad(results, leaves, arrived)
    return [x.detach() for x in results], gradients, arrived


def is_oracle(case):
    inputs = case.inputs()
    results, gradients, arrived = differentiated(case, inputs)
    true, true_gradients = case.oracle(inputs, *arrived, dtype=torch.float64)
    for ours, theirs in zip(results, true, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)
    agree(gradients, true_gradients, **EXACT)


# BLAS sums in an order that depends on the alignment of rows, and on whether it is given one product or several:
# sequences of equal lengths, computed together, and one alone may differ by that
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def is_alone(ours, alone, *, bits):
    """AssertionError where a sequence's results or gradients are not those of its own call: bit by bit, or rounded."""
    for a, b in zip(ours, alone, strict=True):
        tolerance = 0 if bits else ROUNDING[b.dtype]
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def one_by_one(case, *, bits):
    """Each sequence is as in flash_attn_func, and rows of none are 0, -inf and without gradient."""
    inputs = case.inputs()
    (out, lse), gradients, (dout, dlse) = differentiated(case, inputs)
    for queries, keys, tensors in check_packed.sequences(inputs):
        leaves = [x.detach().requires_grad_() for x in tensors]
        results = flash_attn_func(*leaves, **case.options, return_attn_probs=True)
        alone = torch.autograd.grad(results, leaves, (dout[None, queries], dlse[None, :, queries]))
        ours = [x[rows] for x, rows in zip(gradients, (queries, keys, keys), strict=True)]
        is_alone((out[queries], lse[:, queries], *ours), [x[0] for x in (*results, *alone)], bits=bits)
    rows, key_rows = (unused(inputs.lengths, len(inputs[place]), place) for place in (0, 1))
    assert not out[rows].any() and (lse[:, rows] == -math.inf).all() and not gradients[0][rows].any()
    assert not gradients[1][key_rows].any() and not gradients[2][key_rows].any()


@st.composite
def cases(draw):
    """A few short sequences, some alike; used parts, spare rows, grouped heads and any window."""
    batch = draw(st.integers(0, 5))
    counts = st.lists(st.sampled_from([0, 1, 2, 3, 5, 5, 9, 20]), min_size=batch, max_size=batch).map(tuple)
    lengths = [draw(counts), draw(counts)]
    used = [tuple(draw(st.integers(0, length)) for length in each) if draw(st.booleans()) else None for each in lengths]
    heads_k, side = draw(st.sampled_from([1, 2])), st.sampled_from([-1, None, 0, 1, 2, 4, 7, 30])
    return PackedCase(
        "drawn", *lengths, *used, before=draw(st.tuples(*[st.integers(0, 2)] * 2)),
        behind=draw(st.tuples(*[st.integers(0, 2)] * 2)), heads=heads_k * draw(st.sampled_from([1, 2, 3])),
        heads_k=heads_k, causal=draw(st.booleans()), window_size=(draw(side), draw(side)),
        softmax_scale=draw(st.sampled_from([None, 0.0, -0.7])), seed=draw(st.integers(0, 99)), **SMALL,
    )  # fmt: skip


@given(cases())
@settings(max_examples=150, deadline=None)
def test_drawn_sequences_are_the_oracle(case):
    is_oracle(case)


@given(cases(), st.sampled_from(["float64", "float32", "bfloat16", "float16"]))
@settings(max_examples=150, deadline=None)
def test_drawn_sequences_are_those_of_calls_one_by_one(case, dtype):
    one_by_one(replace(case, dtype=dtype), bits=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", (*MIXES, *LINES), ids=lambda case: case.mix)
def test_mixes_of_lengths(case, causal):
    case = replace(case, causal=causal, dtype="float64", head_dim=16, head_dim_v=24)
    is_oracle(case)
    one_by_one(case, bits=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", (RAGGED, EMPTY, SPARE, USED, *LINES), ids=lambda case: case.mix)
def test_mixes_within_the_bounds_of_the_gpu(case, dtype):
    """The checks that test_packed_gpu.py makes, where what they check is right."""
    case = replace(case, dtype=dtype)
    inputs = case.inputs()
    check_packed.compare(*check_packed.run(inputs, **case.options), inputs, **case.options)
    dout, dlse = case.arriving(inputs)
    for arrived in ({"dout": dout}, {"dlse": dlse}, {"dout": dout, "dlse": dlse}):
        gradients = check_packed.run_gradients(inputs, **arrived, **case.options)
        check_packed.compare_gradients(gradients, inputs, **arrived, **case.options)


def wrong(inputs, results, place):
    """The results with one element of the place wrong that belongs to the last sequence with queries."""
    last = [queries for queries, keys in inputs.lengths.rows if queries and keys][-1]
    changed = [x.clone() for x in results]
    changed[place][(last.start,) if place == 0 else (0, last.start)] += 1
    return changed


@pytest.mark.parametrize("place", [0, 1])
def test_the_bounds_find_what_is_wrong(place):
    inputs = RAGGED.inputs()
    results = check_packed.run(inputs)
    with pytest.raises(AssertionError, match=r"^sequence 8 \(513 queries, 17 keys\): (out|LSE): error"):
        check_packed.compare(*wrong(inputs, results, place), inputs)
    inputs = SPARE.inputs()
    out, lse = check_packed.run(inputs)
    out[0] = 1
    with pytest.raises(AssertionError, match="rows of no sequence must be 0 and -inf"):
        check_packed.compare(out, lse, inputs)


@pytest.mark.parametrize("place", range(3))
def test_the_bounds_find_a_gradient_that_is_wrong(place):
    inputs = SPARE.inputs()
    dout, _ = SPARE.arriving(inputs)
    gradients = check_packed.run_gradients(inputs, dout)
    last = inputs.lengths.rows[-1][min(place, 1)]
    gradients[place][last.start] += 1
    with pytest.raises(AssertionError, match=r"^sequence 3 \(257 queries, 70 keys\): d[qkv]: error"):
        check_packed.compare_gradients(gradients, inputs, dout)
    gradients[place][last.start] -= 1
    gradients[place][0] = 1
    with pytest.raises(AssertionError, match="rows of no sequence must be exactly 0"):
        check_packed.compare_gradients(gradients, inputs, dout)


def test_line_3_a_batch_longer_than_its_rows():
    is_oracle(replace(LINE_3, dtype="float64", causal=True))
    inputs = LINE_3.inputs()
    assert inputs.cu_seqlens_q.tolist() == [0, 0, 0, 0, 1] and inputs.q.shape == (1, 21, 120)
    assert torch.equal(flash_attn_varlen_func(*inputs)[0], inputs.v[0].repeat_interleave(3, 0))


def test_line_4_tiny_keys():
    inputs = LINE_4.inputs()
    assert inputs.cu_seqlens_q.tolist() == [0, 76, 110, 256] and inputs.cu_seqlens_k.tolist() == [0, 1, 2, 3]
    (out, lse), gradients, _ = differentiated(LINE_4, inputs)
    assert all(x.isfinite().all() for x in (out, *gradients))
    seen = lse[0].isfinite().nonzero().flatten()
    assert seen.tolist() == [75, 109, 255]


def test_line_6_many_sequences():
    """80,000 of 16: repeated, so that each must have the bits of the one of 50 that it repeats."""
    kinds, count = 50, 80_000
    case = PackedCase("many", (16,) * kinds, (16,) * kinds, head_dim=64, head_dim_v=64, causal=True)
    few = case.inputs()
    offsets = torch.arange(count + 1, dtype=torch.int32) * 16
    repeated = [x.repeat(count // kinds, 1, 1) for x in few[:3]]
    begin = time.perf_counter()
    out = flash_attn_varlen_func(*repeated, offsets, offsets, 16, 16, causal=True)
    assert time.perf_counter() - begin < 60, "sequences of equal lengths are not computed together"
    expected = flash_attn_varlen_func(*few, causal=True)
    assert torch.equal(out.unflatten(0, (-1, len(expected))), expected.expand(count // kinds, -1, -1, -1))


def test_line_9_max_seqlen_of_any_kind():
    inputs = RAGGED.inputs()
    expected = flash_attn_varlen_func(*inputs)
    for longest in (513, 10**9, torch.tensor(513), torch.tensor(513, dtype=torch.int32), torch.tensor(2**40)):
        given = inputs._replace(max_seqlen_q=longest, max_seqlen_k=longest)
        assert torch.equal(flash_attn_varlen_func(*given), expected)


def test_line_12_a_loss_of_out_and_lse():
    case = replace(EMPTY, causal=True, **SMALL)
    inputs = case.inputs()

    def gradients(out, lse):
        return torch.autograd.grad(out.sum() + lse.logsumexp(-1).sum(), leaves)

    leaves = [x.requires_grad_() for x in inputs[:3]]
    ours = gradients(*flash_attn_varlen_func(*inputs, causal=True, return_attn_probs=True))
    results, _ = case.oracle(inputs, dtype=torch.float64)
    arrived = torch.ones_like(results[0]), torch.softmax(results[1], -1)
    agree(ours, case.oracle(inputs, *arrived, dtype=torch.float64)[1], **EXACT)


@pytest.mark.parametrize("flow", [(True, False), (False, True), (True, True)])
def test_gradcheck(flow):
    case = replace(USED, lengths_q=(3, 0, 4), lengths_k=(2, 3, 5), used_q=(2, 0, 4), used_k=(2, 1, 4), **SMALL)
    inputs = replace(case, before=(1, 1), behind=(1, 2), window_size=(2, 1)).inputs()
    leaves = [x.nan_to_num(0).requires_grad_() for x in inputs[:3]]

    def results(*tensors):
        found = flash_attn_varlen_func(*tensors, *inputs[3:], window_size=(2, 1), return_attn_probs=True)
        out, lse = found[0], found[1].masked_fill(found[1] == -math.inf, 0)
        return [x for x, asked in zip((out, lse), flow, strict=True) if asked]

    assert torch.autograd.gradcheck(results, leaves)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv"])
def test_any_subset_of_the_inputs_requires_a_gradient(wanted):
    case = replace(SPARE, causal=True, **SMALL)
    inputs = case.inputs()
    _, expected, arrived = differentiated(case, inputs)
    some = check_packed.run_gradients(inputs, *arrived, wanted=wanted, causal=True)
    for name, ours, theirs in zip("qkv", some, expected, strict=True):
        assert torch.equal(ours, theirs) if name in wanted else ours is None


def test_a_neighbour_of_nan_changes_no_bit():
    case = replace(RAGGED, causal=True, head_dim=16, head_dim_v=16, dtype="float32")
    inputs = case.inputs()
    results, gradients, _ = differentiated(case, inputs)
    for number, (queries, keys) in enumerate(inputs.lengths.rows):
        rows = [slice(each.start, each.stop) for each in (queries, keys, keys)]
        alone = [torch.full_like(x, math.nan) for x in inputs[:3]]
        for x, part, whole in zip(alone, rows, inputs[:3], strict=True):
            x[part] = whole[part]
        found, found_gradients, _ = differentiated(case, Inputs(*alone, *inputs[3:]))
        assert torch.equal(found[0][rows[0]], results[0][rows[0]]), number
        assert torch.equal(found[1][:, rows[0]], results[1][:, rows[0]]), number
        for part, ours, theirs in zip(rows, found_gradients, gradients, strict=True):
            assert torch.equal(ours[part], theirs[part]), number


def test_strides_are_free():
    case = replace(SPARE, causal=True, heads=3, heads_k=3, lengths_q=SPARE.lengths_k, behind=(65, 65), before=(70, 70))
    q, k, v, *rest = case.inputs()
    expected = flash_attn_varlen_func(q, k, v, *rest, causal=True)
    views = torch.stack((q, k, v), 1).unbind(1)
    assert torch.equal(flash_attn_varlen_func(*views, *rest, causal=True), expected)
    views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    out = torch.full((v.shape[2], *q.shape[:2]), math.nan, dtype=q.dtype).permute(1, 2, 0)
    assert flash_attn_varlen_func(*views, *rest, causal=True, out=out) is out and torch.equal(out, expected)
    one = k[:, :1].expand(k.shape)
    given = flash_attn_varlen_func(q, one, v, *rest), flash_attn_varlen_func(q, one.contiguous(), v, *rest)
    assert torch.equal(*given)


@pytest.mark.parametrize("sink", [None, torch.empty(0)])
def test_no_heads(sink):
    case = replace(RAGGED, heads=0, dtype="float32")
    inputs = case.inputs()
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out, lse = flash_attn_varlen_func(*inputs, causal=True, sink=sink, return_attn_probs=True)
    assert out.shape == (len(inputs.q), 0, inputs.v.shape[-1]) and lse.shape == (0, len(inputs.q))
    assert not any(x.any() for x in torch.autograd.grad((out.sum(), lse.sum()), leaves))


def test_lengths_that_change_before_the_gradients_are_refused():
    inputs = replace(USED, **SMALL).inputs()
    leaf = inputs.q.requires_grad_()
    for lengths in (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k):
        out = flash_attn_varlen_func(*inputs)
        lengths.add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), leaf)


def test_options_that_change_no_value():
    inputs = RAGGED.inputs()
    expected = flash_attn_varlen_func(*inputs, causal=True)
    options = ({"num_splits": 0}, {"pack_gqa": False}, {"deterministic": True}, {"sm_margin": 8},
               {"plan": Plan(128, 64)}, {"window_size": (None, 3)}, {"window_size": (600, 0)})  # fmt: skip
    for option in options:
        assert torch.equal(flash_attn_varlen_func(*inputs, causal=True, **option), expected), option


def test_calls_written_for_flash_attention_3():
    """By position up to softmax_scale and causal, and by keyword."""
    q, k, v, cu_q, cu_k, max_q, max_k, *_ = inputs = replace(RAGGED, dtype="float32").inputs()
    expected = flash_attn_varlen_func(*inputs, softmax_scale=0.2, causal=True)
    out, lse = flash_attn_interface.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max_q, max_k, None, None, 0.2, True, return_attn_probs=True
    )
    assert torch.equal(out, expected) and lse.shape == (2, len(q))
    out = flash_attn_interface.flash_attn_varlen_func(
        q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, seqused_q=None,
        seqused_k=None, softmax_scale=0.2, causal=True, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0,
    )  # fmt: skip
    assert torch.equal(out, expected)


def test_a_second_derivative_is_refused():
    inputs = replace(RAGGED, **SMALL).inputs()
    leaf = inputs.q.requires_grad_()
    (first,) = torch.autograd.grad(flash_attn_varlen_func(*inputs).sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="attention can be differentiated once only"):
        first.sum().backward()


def test_what_autograd_keeps():
    """Nothing of the size of the scores, and no copy of an input."""
    inputs = replace(RAGGED, **SMALL).inputs()
    leaves, kept = [x.requires_grad_() for x in inputs[:3]], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        results = flash_attn_varlen_func(*inputs, return_attn_probs=True)
    known = (*results, *leaves, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in known}

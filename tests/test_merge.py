"""merge_states: the results over two parts of the keys give the result over all of them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import refused

from hopper_fa3 import merge_states
from hopper_fa3.checks import check_states
from hopper_fa3.problem import Problem
from hopper_fa3.reference import blockwise, standard

EXACT = {"rtol": 1e-15, "atol": 1e-12}  # an LSE of thousands has a unit in the last place of 1e-12


def agree(results, expected, **tolerance):
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)


@st.composite
def parts(draw):
    """q, k, v and where the keys are cut; either part may be empty, or hold only keys of score -inf."""
    seqlen_q, first, second = draw(st.integers(1, 4)), draw(st.integers(0, 6)), draw(st.integers(0, 6))
    heads_k, group, head_dim = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 1.0, 30.0]))  # logits from equal to hundreds apart

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys = first + second
    q = normal(2, seqlen_q, heads_k * group, head_dim) * spread
    k, v = normal(2, keys, heads_k, head_dim) * spread, normal(2, keys, heads_k, 3)
    silent = torch.tensor(draw(st.lists(st.booleans(), min_size=keys, max_size=keys)), dtype=torch.bool)
    q[..., 0] = q[..., 0].abs() + 0.5
    k[:, silent, :, 0] = -math.inf
    return q, k, v, first


@given(parts())
@settings(max_examples=200, deadline=None)
def test_two_parts_give_the_whole(drawn):
    q, k, v, cut = drawn
    whole = standard(q, k, v)
    a, b = standard(q, k[:, :cut], v[:, :cut]), standard(q, k[:, cut:], v[:, cut:])
    agree(merge_states(*a, *b), whole, **EXACT)
    agree(merge_states(*b, *a), whole, **EXACT)
    # The online softmax inside the blockwise order makes the same step, with the block as the second part.
    problem = Problem.from_tensors(q, k, v)
    agree(blockwise(problem, q, k, v, block_k=max(cut, 1)), whole, **EXACT)


@given(parts(), st.integers(0, 12))
@settings(max_examples=50, deadline=None)
def test_three_parts_in_either_order(drawn, second_cut):
    q, k, v, cut = drawn
    cut, end = sorted((cut, min(second_cut, k.shape[1])))
    a, b, c = (standard(q, k[:, part], v[:, part]) for part in (slice(cut), slice(cut, end), slice(end, None)))
    agree(merge_states(*merge_states(*a, *b), *c), standard(q, k, v), **EXACT)
    agree(merge_states(*a, *merge_states(*b, *c)), standard(q, k, v), **EXACT)


def one(out, lse):
    return torch.full((1, 1, 1, 2), out, dtype=torch.float64), torch.full((1, 1, 1), lse, dtype=torch.float64)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((2.0, 0.0), (4.0, 0.0), (3.0, math.log(2))),
        ((2.0, 800.0), (4.0, 800.0), (3.0, 800 + math.log(2))),
        ((2.0, -800.0), (4.0, -800.0), (3.0, -800 + math.log(2))),
        ((2.0, math.log(3)), (4.0, 0.0), (2.5, math.log(4))),
        ((0.0, -math.inf), (4.0, 1.5), (4.0, 1.5)),
        ((math.nan, -math.inf), (4.0, 1.5), (4.0, 1.5)),  # a part of scores -inf only
        ((0.0, -math.inf), (0.0, -math.inf), (0.0, -math.inf)),
        ((math.nan, -math.inf), (0.0, -math.inf), (math.nan, -math.inf)),
        ((math.nan, math.nan), (4.0, 1.5), (math.nan, math.nan)),
        ((math.nan, math.nan), (0.0, -math.inf), (math.nan, math.nan)),
    ],
)
def test_single_rows(a, b, expected):
    agree(merge_states(*one(*a), *one(*b)), one(*expected), **EXACT)
    agree(merge_states(*one(*b), *one(*a)), one(*expected), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_and_packed_shapes(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    cut = 4
    (out_a, lse_a), (out_b, lse_b) = standard(q, k[:, :cut], v[:, :cut]), standard(q, k[:, cut:], v[:, cut:])
    whole, whole_lse = standard(q, k, v)
    rounded = out_a.to(dtype), lse_a, out_b.to(dtype), lse_b
    out, lse = merge_states(*rounded)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert (out - whole).abs().max() <= torch.finfo(dtype).eps * whole.abs().max() + 1e-6
    assert (lse - whole_lse).abs().max() < 1e-6
    packed, packed_lse = merge_states(*(x[0] for x in rounded))
    assert torch.equal(packed, out[0]) and torch.equal(packed_lse, lse[0])


def test_gradients_are_those_of_the_whole():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 6, 2, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    weight = torch.randn(1, 6, 2, 4, dtype=torch.float64)

    def gradients(out, lse):
        seen = lse.masked_fill(lse == -math.inf, 0)
        return torch.autograd.grad((out * weight).sum() + seen.square().sum(), (q, k, v))

    whole = standard(q, k, v, right=0)
    for cut in (0, 2, 6):  # queries before the cut see nothing of the second part
        a = standard(q, k[:, :cut], v[:, :cut], right=6 - cut)
        b = standard(q, k[:, cut:], v[:, cut:], right=0)
        merged = merge_states(*a, *b)
        agree(merged, whole, **EXACT)
        agree(gradients(*merged), gradients(*standard(q, k, v, right=0)), **EXACT)


def states(shape_a=(2, 5, 4, 8), shape_b=(2, 5, 4, 8), lse_a=(2, 4, 5), lse_b=(2, 4, 5), dtype_b=torch.float32):
    return torch.empty(shape_a), torch.empty(lse_a), torch.empty(shape_b, dtype=dtype_b), torch.empty(lse_b)


STATES = "out_a and out_b must have one shape (batch, seqlen_q, heads, head_dim_v) or (total, heads, head_dim_v)"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (states(dtype_b=torch.float64), TypeError,
         "out_a and out_b must have one dtype, got torch.float32 and torch.float64"),
        (states(dtype_b=torch.int32), TypeError, "out_b must be floating point, got int32"),
        (states(shape_b=(2, 5, 4, 7)), ValueError, f"{STATES}, got (2, 5, 4, 8) and (2, 5, 4, 7)"),
        (states((5, 4), (5, 4)), ValueError, f"{STATES}, got (5, 4) and (5, 4)"),
        (states(lse_a=(2, 5, 4)), ValueError, "lse_a and lse_b must have shape (2, 4, 5), got (2, 5, 4) and (2, 4, 5)"),
        (states(lse_b=(2, 4, 1)), ValueError, "lse_a and lse_b must have shape (2, 4, 5), got (2, 4, 5) and (2, 4, 1)"),
        ((*states()[:3], None), TypeError, "lse_b must be a torch.Tensor, got None"),
        ((*states()[:2], torch.empty(2, 5, 4, 8, device="meta"), states()[3]), RuntimeError,
         "out_a and out_b must have one device, got cpu and meta"),
    ],
)  # fmt: skip
def test_partial_results_that_do_not_fit(given, error, message):
    with refused(error, message):
        check_states(*given)

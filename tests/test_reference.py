"""Standard attention against loops, and the blockwise orders against standard: values, NaN and inf."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from defined import defined
from problems import EXACT, HEADS, LENGTHS, asked, inputs

from hopper_fa3.reference import blockwise, blockwise_kv_outer, standard

pytestmark = pytest.mark.usefixtures("one_thread")

ORDERS = (blockwise, blockwise_kv_outer)
BLOCKS = ((8, 16), (5, 7), (64, 3), (1, 1))


def agree(given, expected, **tolerance):
    for what, a, b in zip(("out", "LSE"), given, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, msg=lambda text, what=what: f"{what}: {text}", **tolerance)


@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (None, 3), (2, None), (1, 2), (0, 0)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0), (1, 1), (1, 9), (9, 1), (7, 7), (6, 13), (13, 6)])
def test_standard_is_the_definition(seqlen_q, seqlen_k, left, right):
    q, k, v = inputs(seqlen_q, seqlen_k, 6, 2, 5, 3, batch=1)
    expected = defined(q, k, v, softmax_scale=0.7, left=left, right=right)
    agree(standard(q, k, v, softmax_scale=0.7, left=left, right=right), expected, **EXACT)
    as_floats = [x.float() for x in (q, k, v)]
    oracle = standard(*as_floats, softmax_scale=0.7, left=left, right=right, compute_dtype=torch.float64)
    agree(oracle, expected, rtol=0, atol=1e-5)
    assert oracle[0].dtype == oracle[1].dtype == torch.float64


@pytest.mark.parametrize(("heads", "heads_k", "head_dim", "head_dim_v"), HEADS)
def test_standard_maps_heads_as_the_definition(heads, heads_k, head_dim, head_dim_v):
    q, k, v = inputs(3, 5, heads, heads_k, head_dim, head_dim_v)
    agree(standard(q, k, v, right=0), defined(q, k, v, softmax_scale=head_dim**-0.5, right=0), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_standard_in_a_users_dtype(dtype):
    q, k, v = inputs(20, 30, dtype=dtype)
    out, lse = standard(q, k, v, right=0)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    true, true_lse = standard(q, k, v, right=0, compute_dtype=torch.float64)
    unit = torch.finfo(dtype).eps
    assert (out - true).abs().max() < 8 * unit and (lse - true_lse).abs().max() < 16 * unit
    if dtype.itemsize == 2:  # it does round between the products: it is no oracle in disguise
        assert (out - true).abs().max() > (true.to(dtype) - true).abs().max()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_both_orders_are_standard(seqlen_q, seqlen_k, causal, order):
    for heads, (block_q, block_k) in itertools.product(HEADS, BLOCKS[:3]):
        q, k, v = inputs(seqlen_q, seqlen_k, *heads)
        problem = asked(q, k, v, causal=causal)
        expected = standard(q, k, v, right=problem.right)
        agree(order(problem, q, k, v, block_q=block_q, block_k=block_k), expected, **EXACT)
        agree(order(problem, q, k, v), expected, **EXACT)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("left", "right"), [(None, 1), (None, 20), (0, -1), (3, -1), (25, -1), (0, 0), (4, 9)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 40), (40, 3), (33, 33), (21, 50), (50, 21)])
def test_both_orders_with_bounds(seqlen_q, seqlen_k, left, right, order):
    q, k, v = inputs(seqlen_q, seqlen_k)
    problem = asked(q, k, v, left=left, window_size=(-1, right))
    expected = standard(q, k, v, left=left, right=None if right == -1 else right)
    for block_q, block_k in BLOCKS:
        agree(order(problem, q, k, v, block_q=block_q, block_k=block_k), expected, **EXACT)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_both_orders_compute_in_float32(dtype, order):
    q, k, v = inputs(70, 150, 14, 2, 24, 16, dtype=dtype)
    out, lse = order(asked(q, k, v, causal=True), q, k, v, block_q=32, block_k=48)
    true, true_lse = standard(q, k, v, right=0, compute_dtype=torch.float64)
    assert out.dtype == dtype and lse.dtype == torch.float32
    # float32 arithmetic, then one rounding to the output dtype
    assert ((out - true).abs() <= torch.finfo(dtype).eps / 2 * true.abs() + 1e-5).all()
    assert (lse - true_lse).abs().max() < 1e-5


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scale", [0.0, -0.3, -2.0, math.sqrt(120), 1e-30, 5.0])
def test_scales(scale, order):
    q, k, v = inputs(20, 45)
    for causal in (False, True):
        problem = asked(q, k, v, softmax_scale=scale, causal=causal)
        expected = defined(q[:1], k[:1], v[:1], softmax_scale=scale, right=problem.right)
        agree([x[:1] for x in order(problem, q, k, v, block_q=8, block_k=16)], expected, **EXACT)


def test_scale_zero_is_the_mean_of_the_visible_values():
    q, k, v = inputs(5, 5, 1, 1)
    out, lse = blockwise(asked(q, k, v, softmax_scale=0, causal=True), q, k, v, block_q=2, block_k=2)
    count = torch.arange(1, 6, dtype=torch.float64)
    torch.testing.assert_close(out, v.cumsum(1) / count[:, None, None], **EXACT)
    torch.testing.assert_close(lse[0, 0], count.log(), **EXACT)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_that_see_nothing(order):
    """CASES 2: more queries than keys; whole tiles of queries see nothing."""
    for seqlen_q, seqlen_k in ((5, 2), (40, 3), (40, 0)):
        q, k, v = inputs(seqlen_q, seqlen_k)
        out, lse = order(asked(q, k, v, causal=True), q, k, v, block_q=4, block_k=4)
        blind = seqlen_q - seqlen_k
        assert (out[:, :blind] == 0).all() and (lse[:, :, :blind] == -math.inf).all()
        assert (out[:, blind:] != 0).all() and lse[:, :, blind:].isfinite().all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_masked_first_block_and_logits_near_minus_200(dtype, order):
    """CASES 1. A running maximum that starts at 0 or a guard that takes e^-200 for nothing would zero the head."""
    q, k, v = inputs(88, 448, 14, 2, 128, 128, batch=1, dtype=dtype)
    q, k = 4.2 + 0.1 * q, -4.2 + 0.1 * k
    right_half = asked(q, k, v, causal=True)
    mirrored = replace(right_half, left=3, right=0)  # on the left side a masked block does come first
    for problem, left in ((right_half, None), (mirrored, 3)):
        out, lse = order(problem, q, k, v, block_q=32, block_k=64)
        true, true_lse = standard(q, k, v, left=left, right=0, compute_dtype=torch.float64)
        single, single_lse = standard(q, k, v, left=left, right=0, compute_dtype=torch.float32)
        assert ((true_lse < -180) & (true_lse > -220)).all()
        assert (lse - true_lse).abs().max() <= 2 * (single_lse - true_lse).abs().max() + 220 * 2**-24
        rounding = torch.finfo(dtype).eps / 2 * true.abs().max()
        assert (out - true).abs().max() <= 2 * (single - true).abs().max() + rounding


@pytest.mark.parametrize("order", ORDERS)
def test_strided_and_expanded_inputs(order):
    q, k, v = inputs(20, 30, 4, 2, 8, 8)
    expected = standard(q, k, v, right=0)
    spread = [torch.stack((x, torch.full_like(x, math.nan)), -1)[..., 0] for x in (q, k, v)]
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    backward = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in (q, k, v)]
    for views in (spread, swapped, backward):
        agree(order(asked(*views, causal=True), *views, block_q=8, block_k=8), expected, **EXACT)
    for dim in range(4):
        single = [x.narrow(dim, 0, 1).expand_as(x) for x in (q, k, v)]
        copies = [x.contiguous() for x in single]
        agree(order(asked(*single, causal=True), *single, block_q=8, block_k=8), standard(*copies, right=0), **EXACT)


def attention(kind):
    """standard, or an order in small blocks, with the same arguments and the oracle's results."""
    if kind is standard:
        return lambda q, k, v, **options: standard(q, k, v, right=0 if options.get("causal") else None)
    return lambda q, k, v, **options: kind(asked(q, k, v, **options), q, k, v, block_q=8, block_k=8)


EVERY = pytest.mark.parametrize("kind", [standard, *ORDERS])
CAUSAL = pytest.mark.parametrize("causal", [False, True])


@EVERY
@CAUSAL
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_in_q_reaches_its_row_only(value, causal, kind):
    q, k, v = inputs(20, 20)
    clean = attention(kind)(q, k, v, causal=causal)
    q[1, 13, 2, 3] = value
    out, lse = attention(kind)(q, k, v, causal=causal)
    assert out[1, 13, 2].isnan().all() and lse[1, 2, 13].isnan()
    out[1, 13, 2], lse[1, 2, 13] = clean[0][1, 13, 2], clean[1][1, 2, 13]
    agree((out, lse), clean, **EXACT)


@EVERY
@CAUSAL
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_in_k_reaches_the_rows_that_see_it(value, causal, kind):
    q, k, v = inputs(20, 20)
    without = [torch.cat((x[:, :11], x[:, 12:]), 1) for x in (k, v)]
    clean = attention(kind)(q, k, v, causal=causal)
    # A key of score -inf has no weight, as if left out. Only the dense case can be told so: a diagonal would shift.
    absent = None if causal else attention(kind)(q, *without)
    k[1, 11, 1, 3] = value
    out, lse = attention(kind)(q, k, v, causal=causal)
    for i, head in itertools.product(range(20), range(4)):
        score = q[1, i, head, 3].item() * value
        row, row_lse = out[1, i, head], lse[1, head, i]
        if head < 2 or (causal and i < 11):
            agree((row, row_lse), (clean[0][1, i, head], clean[1][1, head, i]), **EXACT)
        elif score != -math.inf:
            assert row.isnan().all() and row_lse.isnan()
        elif absent:
            agree((row, row_lse), (absent[0][1, i, head], absent[1][1, head, i]), **EXACT)
        else:
            assert row.isfinite().all() and row_lse < clean[1][1, head, i]
    agree((out[0], lse[0]), (clean[0][0], clean[1][0]), **EXACT)


@EVERY
@CAUSAL
@pytest.mark.parametrize("values", [(math.nan,), (math.inf,), (-math.inf,), (math.inf, -math.inf)])
def test_values_in_v_reach_exactly_the_rows_that_see_them(values, causal, kind):
    q, k, v = inputs(20, 20)
    clean, clean_lse = attention(kind)(q, k, v, causal=causal)
    for offset, value in enumerate(values):
        v[1, 11 + offset, 1, 3] = value
    out, lse = attention(kind)(q, k, v, causal=causal)
    torch.testing.assert_close(lse, clean_lse, **EXACT)
    expected = clean.clone()
    for offset, value in enumerate(values):
        expected[1, 11 + offset if causal else 0 :, 2:, 3] += value
    torch.testing.assert_close(out, expected, equal_nan=True, **EXACT)


@EVERY
@CAUSAL
@pytest.mark.parametrize("keys", [slice(0, 9), slice(9, 30), slice(4, 26), slice(0, 30, 2)], ids=str)
def test_scores_of_minus_inf_have_no_weight(keys, causal, kind):
    q, k, v = inputs(20, 30)
    q[..., 0] = q[..., 0].abs() + 0.5
    low = k.clone()
    low[:, keys, :, 0] = -math.inf
    out, lse = attention(kind)(q, low, v, causal=causal)
    k[:, keys, :, 0] = -1e5  # finite, but no weight either
    expected = attention(kind)(q, k, v, causal=causal)
    unseen = expected[1] < -1e3  # rows that see only such keys
    assert out[unseen.transpose(1, 2)].isnan().all() and (lse[unseen] == -math.inf).all()
    seen = ~unseen
    assert causal or seen.all()
    agree((out[seen.transpose(1, 2)], lse[seen]), (expected[0][seen.transpose(1, 2)], expected[1][seen]), **EXACT)


@EVERY
def test_a_row_of_only_minus_inf_scores_is_nan_and_a_blind_row_is_zero(kind):
    q, k, v = inputs(20, 12)
    q[..., 0] = q[..., 0].abs() + 0.5
    k[..., 0] = -math.inf
    out, lse = attention(kind)(q, k, v, causal=True)
    assert (out[:, :8] == 0).all() and out[:, 8:].isnan().all() and (lse == -math.inf).all()


@EVERY
def test_autocast_changes_nothing(kind):
    """Not the gradients either."""
    tensors = [x.requires_grad_(kind is not blockwise_kv_outer) for x in inputs(20, 30, dtype=torch.float32)]
    tensors[2].detach()[0, 29, 0, 0] = math.inf  # the path of values that are not finite has products of its own
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out, lse = attention(kind)(*tensors, causal=True)
        grads = () if kind is blockwise_kv_outer else torch.autograd.grad(out[:, :19].sum() + lse.sum(), tensors)
        results.append((out, lse, *grads))
    for plain, under_autocast in zip(*results, strict=True):
        torch.testing.assert_close(under_autocast, plain, rtol=0, atol=0, equal_nan=True)

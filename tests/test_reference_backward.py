"""Values of the CPU path's gradients: against finite differences, and against autograd through standard in float64."""

import itertools
import math

import pytest
import torch
from cases import HEAD_DIMS
from problems import EXACT, HEADS, LENGTHS, agree, arriving, asked, derived, inputs, leaves

from hopper_fa3 import flash_attn_func
from hopper_fa3.reference import blockwise, standard

pytestmark = pytest.mark.usefixtures("one_thread")

THROUGH = pytest.mark.parametrize("through", [("out",), ("lse",), ("out", "lse")], ids="+".join)
BOUNDS = ((None, None), (None, 0), (None, 3), (2, None), (1, 2))  # left, right


def is_oracle(q, k, v, given, ours, **mask):
    """Per (batch, head), as in check.py: within twice the error of autograd in the same dtype and one rounding.

    And 32 float32 roundings of the largest value, which decide where that dtype is float32.
    """
    true_inputs, same_inputs = leaves((q, k, v), torch.float64), leaves((q, k, v))
    upcast = [None if x is None else x.double() for x in given]
    true = derived(standard(*true_inputs, **mask), true_inputs, upcast)
    same = derived(standard(*same_inputs, **mask), same_inputs, given)
    for name, a, b, c in zip(("dq", "dk", "dv"), ours, same, true, strict=True):
        assert a.dtype == q.dtype and a.shape == c.shape and a.isfinite().all(), name
        error, yardstick, rounding = ((x.double() - c).abs().amax((1, 3)) for x in (a, b, c.to(a.dtype)))
        bound = 2 * yardstick + rounding + 32 * 2**-24 * c.abs().amax((1, 3))
        assert (error <= bound).all(), f"{name}: {error.max():.3e}, bounds {bound.min():.3e} to {bound.max():.3e}"


@pytest.mark.parametrize(("left", "right"), BOUNDS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_gradients_are_those_of_standard(seqlen_q, seqlen_k, left, right):
    for heads, blocks in zip(HEADS, ((8, 16), (5, 7), (64, 3), (3, 64), (128, 512)), strict=True):
        tensors = leaves(inputs(seqlen_q, seqlen_k, *heads))
        problem = asked(*tensors, left=left, window_size=(-1, right))
        results = blockwise(problem, *tensors, block_q=blocks[0], block_k=blocks[1])
        given = arriving(results)
        ours = derived(results, tensors, given)
        agree(ours, derived(standard(*tensors, left=left, right=right), tensors, given), **EXACT)
        blind = 0 if right is None else max(0, seqlen_q - seqlen_k - right)
        assert not ours[0][:, :blind].any()


@THROUGH
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "group", "options"),
    [
        (3, 5, 2, {}), (4, 4, 1, {"causal": True}), (3, 5, 5, {"causal": True}), (3, 4, 7, {"window_size": (-1, 1)}),
        (6, 2, 2, {"causal": True}), (6, 2, 2, {"window_size": (-1, 2)}),
    ],
    ids=str,
)  # fmt: skip
def test_finite_differences(seqlen_q, seqlen_k, group, options, through):
    tensors = leaves(inputs(seqlen_q, seqlen_k, group, 1, 3, 2, batch=1))
    problem = asked(*tensors, **options)
    blind = 0 if problem.right is None else max(0, seqlen_q - seqlen_k - problem.right)

    def attention(q, k, v):
        out, lse = blockwise(problem, q, k, v, block_q=2, block_k=2)
        return [{"out": out, "lse": lse[:, :, blind:]}[name] for name in through]  # -inf has no finite differences

    assert torch.autograd.gradcheck(attention, tensors)


@pytest.mark.parametrize("scale", [0.0, -0.3, -2.0, math.sqrt(120), 1e-30])
@pytest.mark.parametrize("causal", [False, True])
def test_scales(scale, causal):
    tensors = leaves(inputs(20, 45))
    problem = asked(*tensors, softmax_scale=scale, causal=causal)
    results = blockwise(problem, *tensors, block_q=8, block_k=16)
    given = arriving(results)
    expected = derived(standard(*tensors, softmax_scale=scale, right=problem.right), tensors, given)
    agree(derived(results, tensors, given), expected, rtol=1e-12, atol=1e-12)


@THROUGH
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype, causal, through):
    tensors = leaves(inputs(150, 200, 14, 2, 24, 16), dtype)
    results = flash_attn_func(*tensors, causal=causal, return_attn_probs=True)
    given = arriving(results, through)
    is_oracle(*tensors, given, derived(results, tensors, given), right=0 if causal else None)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [*((d, d) for d in HEAD_DIMS), (192, 128)])
def test_head_dims(head_dim, head_dim_v):
    """CASES 11."""
    tensors = leaves(inputs(33, 40, 2, 1, head_dim, head_dim_v, batch=1, dtype=torch.bfloat16))
    results = flash_attn_func(*tensors, causal=True, return_attn_probs=True)
    given = arriving(results)
    is_oracle(*tensors, given, derived(results, tensors, given), right=0)


def test_more_queries_than_keys():
    """CASES 2: the first three rows see nothing."""
    tensors = leaves(inputs(5, 2))
    out, lse = flash_attn_func(*tensors, causal=True, return_attn_probs=True)
    assert not out[:, :3].any() and (lse[:, :, :3] == -math.inf).all()
    gradients = torch.autograd.grad(out.square().sum() + lse[:, :, 3:].sum(), tensors)
    expected_out, expected_lse = standard(*tensors, right=0)
    loss = expected_out.square().sum() + expected_lse[:, :, 3:].sum()
    agree(gradients, torch.autograd.grad(loss, tensors), **EXACT)
    assert not gradients[0][:, :3].any() and gradients[0][:, 4:].all()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(76, 1), (34, 2), (146, 3)])
def test_few_keys(seqlen_q, seqlen_k):
    """CASES 4, one sequence at a time."""
    tensors = leaves(inputs(seqlen_q, seqlen_k, 1, 1, batch=1, dtype=torch.float32))
    results = flash_attn_func(*tensors, causal=True, return_attn_probs=True)
    given = arriving(results)
    is_oracle(*tensors, given, derived(results, tensors, given), right=0)


@pytest.mark.parametrize(("batch", "seqlen", "heads"), [(8300, 1, 2), (80_000, 16, 1), (1, 4, 65_536)])
def test_many_small_problems(batch, seqlen, heads):
    """CASES 6. Every problem is one of two, so two tell what all must be."""
    two = inputs(seqlen, seqlen, 2, 2, 8, 8, batch=1, dtype=torch.float32)
    if batch == 1:
        many = leaves(x.repeat(1, 1, heads // 2, 1) for x in two)
    else:
        two = [x[:, :, :heads] for x in inputs(seqlen, seqlen, 2, 2, 8, 8, dtype=torch.float32)]
        many = leaves(x.repeat(batch // 2, 1, 1, 1) for x in two)
    few = leaves(two)
    ours = torch.autograd.grad(flash_attn_func(*many, causal=True).square().sum(), many)
    expected = torch.autograd.grad(standard(*few, right=0)[0].square().sum(), few)
    agree(ours, (x.repeat(*(a // b for a, b in zip(ours[0].shape, x.shape, strict=True))) for x in expected),
          rtol=1e-4, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(12, 20), (20, 12)])
def test_the_gradient_through_a_reduced_lse(seqlen_q, seqlen_k):
    """CASES 12, also where some rows have an LSE of -inf."""
    tensors = leaves(inputs(seqlen_q, seqlen_k))

    def gradients(out, lse):
        return torch.autograd.grad(out.sum() + lse.logsumexp(-1).sum(), tensors)

    ours = gradients(*flash_attn_func(*tensors, causal=True, return_attn_probs=True))
    agree(ours, gradients(*standard(*tensors, right=0)), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("logit", [-200.0, 200.0])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(88, 448), (67, 131), (131, 67)])
def test_logits_far_from_zero(seqlen_q, seqlen_k, logit, dtype):
    """LSE far below log(2^-126), blocks and tiles ragged: a P made without the LSE would be 0 or inf."""
    q, k, v = inputs(seqlen_q, seqlen_k, 4, 2, 128, 128, batch=1, dtype=dtype)
    q, k = 4.2 + 0.1 * q, math.copysign(4.2, logit) + 0.1 * k
    tensors = leaves((q, k, v))
    for causal in (False, True):
        results = blockwise(asked(*tensors, causal=causal), *tensors, block_q=32, block_k=48)
        seen = results[1][results[1] != -math.inf]
        assert (seen * math.copysign(1, logit)).min() > 180
        given = arriving(results)
        is_oracle(*tensors, given, derived(results, tensors, given), right=0 if causal else None)


def layouts(tensors):
    """The same values in other strides: every second element, heads first, reversed dimensions."""
    yield [torch.stack((x, torch.full_like(x, math.nan)), -1)[..., 0] for x in tensors]
    yield [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    yield [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in tensors]


def test_strides_of_inputs_and_of_arriving_gradients():
    tensors = leaves(inputs(20, 30))
    expected_results = standard(*tensors, right=0)
    given = arriving(expected_results)
    expected = derived(expected_results, tensors, given)
    for q, k, v, dout in layouts([*(x.detach() for x in tensors), given[0]]):
        views = [x.requires_grad_() for x in (q, k, v)]
        for dlse in (given[1], given[1].mT.contiguous().mT):
            results = blockwise(asked(*views, causal=True), *views, block_q=8, block_k=8)
            agree(derived(results, views, (dout, dlse)), expected, **EXACT)


@pytest.mark.parametrize("dim", range(4))
def test_expanded_inputs_and_arriving_gradients(dim):
    single = leaves(x.narrow(dim, 0, 1) for x in inputs(20, 20, 4, 4))
    views = [x.expand([20 if i == 1 else size for i, size in enumerate((2, 20, 4, 8))]) for x in single]
    results = blockwise(asked(*views, causal=True), *views, block_q=8, block_k=8)
    ours = torch.autograd.grad(results[0].sum() + results[1].sum(), single)
    expected = standard(*(x.contiguous() for x in views), right=0)
    agree(ours, torch.autograd.grad(expected[0].sum() + expected[1].sum(), single), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("asks", [x for x in itertools.product((False, True), repeat=3) if any(x)], ids=str)
def test_any_subset_of_the_inputs(asks):
    tensors = [x.requires_grad_(ask) for x, ask in zip(inputs(12, 20), asks, strict=True)]
    wanted = [x for x in tensors if x.requires_grad]
    for through in (("out",), ("lse",), ("out", "lse")):
        results = blockwise(asked(*tensors, causal=True), *tensors, block_q=5, block_k=4)
        given = arriving(results, through)
        expected = derived(standard(*tensors, right=0), wanted, given)
        for a, b in zip(derived(results, wanted, given), expected, strict=True):
            torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "batch", "heads"), [(0, 5, 2, 4), (5, 0, 2, 4), (5, 5, 0, 4), (5, 5, 2, 0)]
)
def test_no_work(seqlen_q, seqlen_k, batch, heads):
    tensors = leaves(inputs(seqlen_q, seqlen_k, heads, batch=batch))
    for causal in (False, True):
        out, lse = flash_attn_func(*tensors, causal=causal, return_attn_probs=True)
        for gradient, x in zip(torch.autograd.grad(out.sum() + lse.sum(), tensors), tensors, strict=True):
            assert gradient.shape == x.shape and (gradient == 0).all()


def test_equal_bits_every_time():
    tensors = leaves(inputs(150, 600, 6, 2, dtype=torch.bfloat16))
    first, second = (
        torch.autograd.grad(flash_attn_func(*tensors, causal=True, deterministic=True).square().sum(), tensors)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

"""Score and mask hooks on CPU tensors: against the definition, gradients, what a hook may do, and what is refused."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from defined import defined
from hypothesis import given, settings
from hypothesis import strategies as st
from options import as_defined, beside, calls
from problems import EXACT, agree, arriving, derived, inputs, leaves
from refusal import refused
from test_memory_traffic import allocated, small_blocks

from hopper_fa3 import flash_attn_func
from hopper_fa3.hooks import MaskHook, ScoreHook
from hopper_fa3.problem import Problem
from hopper_fa3.reference import blockwise, blockwise_kv_outer, standard

pytestmark = pytest.mark.usefixtures("one_thread")


def bent(x, b, h, i, j):
    """Depends on all that it is given, and is not linear: of tensors, or of numbers."""
    sine = torch.sin if isinstance(x, torch.Tensor) else math.sin
    return x + sine(x) / 2 + h / 8 - b / 4 + (i % 3) * (j % 4) / 16  # exact in float32, which torch takes for h / 8


def bent_gradient(gradient, x, b, h, i, j):
    return gradient * (1 + torch.cos(x) / 2)


BENT = ScoreHook("bent", None, cpu=bent)
BENT_BY_HAND = ScoreHook("bent", None, cpu=bent, cpu_backward=bent_gradient)


def of_table(table):
    """The mask hook of a bool table (batch, heads, seqlen_q, seqlen_k)."""
    return MaskHook(f"table {hash(table)}", None, lambda *place: table[place])


@st.composite
def hooked_calls(draw):
    """A call with any options, random masks of any pairs among them, and a score hook."""
    (q, k, v), options = draw(calls())
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    table = torch.rand(shape, generator=generator) < draw(st.sampled_from((0.1, 0.5, 0.9)))
    return (q, k, v), options, table if draw(st.booleans()) else None, draw(st.sampled_from((None, BENT, BENT_BY_HAND)))


@settings(max_examples=100, deadline=None)
@given(call=hooked_calls(), block_q=st.integers(1, 9), block_k=st.integers(1, 9))
def test_any_hooks_and_options_are_the_definition(call, block_q, block_k):
    (q, k, v), options, table, score = call
    expected = defined(
        q, k, v, score=score and bent, mask=None if table is None else lambda *place: table[place],
        **as_defined(options),
    )  # fmt: skip
    hooks = {"score": score, "mask": None if table is None else of_table(table)}
    problem = Problem.from_tensors(q, k, v, **options, **hooks)
    for out, lse in (
        standard(q, k, v, **as_defined(options), **hooks),
        flash_attn_func(q, k, v, return_attn_probs=True, **options, **hooks),
        blockwise(problem, q, k, v, block_q=block_q, block_k=block_k, **beside(options)),
    ):
        torch.testing.assert_close(out, expected[0], **EXACT)
        torch.testing.assert_close(lse, expected[1], **EXACT)


@settings(max_examples=60, deadline=None)
@given(call=hooked_calls(), block_q=st.integers(1, 9), block_k=st.integers(1, 9))
def test_gradients_are_those_of_standard(call, block_q, block_k):
    (q, k, v), options, table, score = call
    hooks = {"score": score, "mask": None if table is None else of_table(table)}
    sink = [options.pop("sink").double()] if "sink" in options else []
    tensors = leaves([q, k, v, *sink])
    given = None
    found = []
    problem = Problem.from_tensors(*tensors[:3], sink=tensors[3] if sink else None, **options, **hooks)
    for oracle in (True, False):
        with_sink = {"sink": tensors[3]} if sink else {}
        if oracle:
            results = standard(*tensors[:3], **with_sink, **as_defined(options), **hooks)
            given = arriving(results)
            given[1] = given[1].masked_fill(results[1] == -math.inf, 0)
        else:
            results = blockwise(
                problem, *tensors[:3], block_q=block_q, block_k=block_k, **with_sink, **beside(options)
            )  # fmt: skip
        found.append(derived(results, tensors, given))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("score", [BENT, BENT_BY_HAND], ids=["by autograd", "by hand"])
@pytest.mark.parametrize("options", [{}, {"softcap": 0.8}, {"alibi_slopes": torch.tensor([0.3, -0.1])},
                                     {"window_size": (2, 1)}, {"attention_chunk": 3}], ids=str)  # fmt: skip
def test_finite_differences(options, score):
    tensors = leaves([*inputs(4, 5, 2, 1, 3, 2, batch=2), torch.tensor([0.5, -1])], torch.float64)
    table = torch.rand(2, 2, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.6
    hooks = {"score": score, "mask": of_table(table)}

    def attention(q, k, v, sink):
        problem = Problem.from_tensors(q, k, v, sink=sink, **options, **hooks)
        return blockwise(problem, q, k, v, sink=sink, block_q=2, block_k=2, **beside(options))

    assert torch.autograd.gradcheck(attention, tensors)


def test_the_gradient_by_hand_is_the_one_used():
    tensors = leaves(inputs(4, 5))
    none = replace(BENT, cpu_backward=lambda gradient, *_: torch.zeros_like(gradient))
    dq, dk, dv = torch.autograd.grad(flash_attn_func(*tensors, score=none).square().sum(), tensors)
    assert not dq.any() and not dk.any() and dv.all()


def test_rows_that_a_mask_leaves_without_keys():
    """Anywhere in a tile, and beside rows whose only scores are -inf: those yield NaN, these 0."""
    q, k, v = inputs(20, 12)
    q[..., 0] = q[..., 0].abs() + 0.5
    k[:, 3, :, 0] = -math.inf
    table = torch.ones(2, 4, 20, 12, dtype=torch.bool)
    table[:, :, 7], table[1, 2, 15] = False, False
    table[:, :, 11], table[:, :, 11, 3] = False, True
    for attention in (standard, blockwise):
        hook = of_table(table)
        problem = Problem.from_tensors(q, k, v, mask=hook)
        given = standard(q, k, v, mask=hook) if attention is standard else blockwise(problem, q, k, v, block_q=8)
        out, lse = given
        blind = ~table.any(-1)
        assert not out.transpose(1, 2)[blind].any() and (lse[blind] == -math.inf).all()
        assert out[:, 11].isnan().all() and (lse[:, :, 11] == -math.inf).all()
        blind[:, :, 11] = True
        assert out.transpose(1, 2)[~blind].all() and lse[~blind].isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_keys_that_a_mask_hides_give_and_take_nothing(value):
    tensors = leaves(inputs(20, 12))
    table = torch.rand(2, 4, 20, 12, generator=torch.Generator().manual_seed(0)) < 0.7
    table[..., 5] = False
    results = []
    for spoil in (False, True):
        q, k, v = tensors
        if spoil:
            k.detach()[:, 5], v.detach()[:, 5] = value, value
        found = flash_attn_func(q, k, v, mask=of_table(table), score=BENT, return_attn_probs=True)
        results.append((*found, *derived(found, tensors, arriving(found))))
    for clean, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, clean, **EXACT)


def test_hooks_say_what_options_say():
    """Causal, ALiBi and softcap written as hooks."""
    tensors = leaves(inputs(20, 30))
    slopes = torch.arange(1.0, 5, dtype=torch.float64)
    causal = MaskHook("causal", None, lambda b, h, i, j: j <= i + 10)
    alibi = ScoreHook("alibi", None, cpu=lambda x, b, h, i, j: x - slopes[h] * (i + 10 - j).abs())
    capped = ScoreHook("softcap", None, cpu=lambda x, b, h, i, j: 2 * torch.tanh(x / 2))
    for hooks, options in (
        ({"mask": causal}, {"causal": True}), ({"score": alibi}, {"alibi_slopes": slopes.float()}),
        ({"score": capped}, {"softcap": 2}),
    ):  # fmt: skip
        results = [flash_attn_func(*tensors, return_attn_probs=True, **given) for given in (hooks, options)]
        arrived = arriving(results[0])
        agree(*(derived(result, tensors, arrived) for result in results), **EXACT)
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, **EXACT)


def test_a_hook_may_return_what_it_is_given_or_keeps():
    tensors = leaves(inputs(20, 30))
    plain = flash_attn_func(*tensors)
    same = flash_attn_func(*tensors, score=ScoreHook("same", None, cpu=lambda x, *_: x))
    assert torch.equal(same, plain)
    agree(torch.autograd.grad(same.sum(), tensors), torch.autograd.grad(plain.sum(), tensors), rtol=0, atol=0)
    kept = torch.randn(2, 4, 20, 30, dtype=torch.float64)
    table = kept.clone()
    hook = ScoreHook("table", None, cpu=lambda x, *place: table if x.shape == table.shape else table[place])
    out = flash_attn_func(*tensors, score=hook)
    dq, dk, dv = torch.autograd.grad(out.sum(), tensors)
    assert torch.equal(table, kept) and not dq.any() and not dk.any() and dv.all()
    weights = torch.softmax(kept, -1).unflatten(1, (2, 2))
    torch.testing.assert_close(out, torch.einsum("bhgij,bjhd->bihgd", weights, tensors[2]).flatten(2, 3), **EXACT)
    one = ScoreHook("one", None, cpu=lambda x, *_: torch.ones((), dtype=x.dtype).expand(x.shape),
                    cpu_backward=lambda gradient, *_: gradient[:1, :1, :1, :1].expand(gradient.shape))  # fmt: skip
    torch.autograd.grad(flash_attn_func(*tensors, score=one).sum(), tensors)


def test_a_mask_may_have_fewer_dimensions():
    q, k, v = inputs(20, 30)
    some = torch.rand(30, generator=torch.Generator().manual_seed(0)) < 0.5
    whole = some.expand(2, 4, 20, 30)
    for cpu in (lambda b, h, i, j: some[j], lambda b, h, i, j: some[j][0, 0], lambda b, h, i, j: some[j.flatten()]):
        hook = MaskHook("some", None, cpu)
        assert torch.equal(flash_attn_func(q, k, v, mask=hook), flash_attn_func(q, k, v, mask=of_table(whole)))
        assert torch.equal(standard(q, k, v, mask=hook)[0], standard(q, k, v, mask=of_table(whole))[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_hooks_compute_in_float32(dtype):
    q, k, v = inputs(70, 150, dtype=dtype)
    seen = []
    hook = ScoreHook("seen", None, cpu=lambda x, *place: seen.append((x.dtype, x.shape)) or bent(x, *place))
    out, lse = flash_attn_func(q, k, v, score=hook, causal=True, return_attn_probs=True)
    true, true_lse = standard(q, k, v, score=BENT, right=0, compute_dtype=torch.float64)
    assert ((out - true).abs() <= torch.finfo(dtype).eps / 2 * true.abs() + 1e-5).all()
    assert (lse - true_lse).abs().max() < 1e-5 and (torch.float32, (2, 4, 70, 150)) in seen
    assert {given for given, _ in seen} == {torch.float32}


def test_memory_stays_linear():
    mask = MaskHook("stripes", None, lambda b, h, i, j: (i + j) % 3 > 0)
    lengths = (256, 512, 1024)
    meters = [allocated(small_blocks(blockwise), n, True, with_gradients=True, score=BENT, mask=mask) for n in lengths]
    peaks = [meter.peak for meter in meters]
    assert peaks[1] < 2.2 * peaks[0] and peaks[2] < 2.2 * peaks[1] and meters[2].largest < 1024 * 1024


def test_a_hook_is_its_key():
    for one, other in ((ScoreHook("a", max), ScoreHook("a", min, cpu=min)), (MaskHook("a", max), MaskHook("a", min))):
        assert one == other and hash(one) == hash(other) and one != replace(one, key="b")
        with pytest.raises(FrozenInstanceError):
            one.key = "b"
    assert ScoreHook("a", None) != MaskHook("a", None)
    q, k, v = inputs(4, 5)
    asked = Problem.from_tensors(q, k, v, score=BENT)
    assert asked.score is BENT and hash(asked) == hash(replace(asked)) and asked != replace(asked, score=None)


def wrong(returned):
    return {"score": ScoreHook("wrong", None, cpu=lambda x, *_: returned(x))}


@pytest.mark.parametrize(
    ("hooks", "error", "message"),
    [
        (lambda: {"score": ScoreHook(1, None)}, TypeError, "key of a hook must be a str, got int"),
        (lambda: {"mask": MaskHook("", None)}, ValueError, "key of a hook must not be empty, got ''"),
        (lambda: wrong(lambda x: 1.0), TypeError, "cpu of a score hook must return a torch.Tensor, got float"),
        (lambda: wrong(lambda x: x.sum(-1)), ValueError,
         "cpu of a score hook must return the scores' shape, here (1, 1, 1, 1), got (1, 1, 1)"),
        (lambda: {"mask": MaskHook("wrong", None, lambda b, h, i, j: i + j)}, TypeError,
         "cpu of a mask hook must return a bool tensor, got torch.int64"),
        (lambda: {"mask": MaskHook("wrong", None, lambda b, h, i, j: True)}, TypeError,
         "cpu of a mask hook must return a bool tensor, got bool"),
    ],
)  # fmt: skip
def test_what_a_hook_must_be_and_return(hooks, error, message):
    with refused(error, message):
        flash_attn_func(*inputs(4, 5), **hooks())


def test_tensors_of_a_hook_get_no_gradient():
    bias = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    hook = ScoreHook("bias", None, cpu=lambda x, b, h, i, j: x + bias[h])
    message = "tensors in a score hook must not require grad (their gradient is not built)"
    for tensors in (inputs(4, 5), leaves(inputs(4, 5))):
        with refused(NotImplementedError, message):
            flash_attn_func(*tensors, score=hook)
        with torch.no_grad():
            assert torch.equal(flash_attn_func(*tensors, score=hook), flash_attn_func(*tensors))


def test_the_order_of_flashattention_1_refuses_what_it_has_not():
    q, k, v = inputs(4, 5)
    for options in ({"score": BENT}, {"mask": of_table(torch.ones(2, 4, 4, 5, dtype=torch.bool))},
                    {"sink": torch.ones(4)}, {"alibi_slopes": torch.ones(4)}):  # fmt: skip
        with refused(NotImplementedError, "the order of FlashAttention-1 has no sink, ALiBi slopes and hooks"):
            blockwise_kv_outer(Problem.from_tensors(q, k, v, **options), q, k, v)

"""Gradients under windows, chunks, softcap, sinks and ALiBi on the CPU path, that of the sink among them."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from options import as_defined, beside, calls
from problems import EXACT, agree, arriving, derived, inputs, leaves
from refusal import refused

from hopper_fa3 import flash_attn_func
from hopper_fa3.problem import Problem
from hopper_fa3.reference import blockwise, sink_gradient, standard

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {
    "window": {"window_size": (2, 1)}, "chunk": {"attention_chunk": 3}, "softcap": {"softcap": 0.8},
    "sink": {"sink": torch.tensor([0.5, -1.0])}, "alibi": {"alibi_slopes": torch.tensor([0.3, -0.1])},
    "causal": {"causal": True},
}  # fmt: skip
PAIRS = [*itertools.combinations(OPTIONS, 1), *itertools.combinations(OPTIONS, 2)]
THROUGH = pytest.mark.parametrize("through", [("out",), ("lse",), ("out", "lse")], ids="+".join)


def with_sink(tensors, options):
    """Leaves q, k, v, the sink too where there is one, and the options without it."""
    options = dict(options)
    sink = [options.pop("sink")] if "sink" in options else []
    return leaves([*tensors, *(x.to(tensors[0].dtype) for x in sink)]), options


@THROUGH
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(4, 5), (6, 3)])
@pytest.mark.parametrize(
    "names", [*itertools.combinations(OPTIONS, 1), *itertools.combinations(OPTIONS, 2)], ids="+".join
)
def test_finite_differences(names, seqlen_q, seqlen_k, through):
    """Every option and every pair."""
    options = {name: value for option in names for name, value in OPTIONS[option].items()}
    tensors, options = with_sink(inputs(seqlen_q, seqlen_k, 2, 1, 3, 2, batch=1), options)
    problem = Problem.from_tensors(*tensors[:3], sink=tensors[3] if len(tensors) > 3 else None, **options)

    def attention(q, k, v, sink=None):
        out, lse = blockwise(problem, q, k, v, sink=sink, block_q=2, block_k=2, **beside(options))
        lse = lse.masked_fill(lse == -math.inf, 0)  # which has no finite differences
        return [{"out": out, "lse": lse}[name] for name in through]

    assert torch.autograd.gradcheck(attention, tensors)


def gradients(attention, tensors, given):
    tensors = leaves(tensors)
    results = attention(*tensors)
    if given is None:
        given = arriving(results)
        # A loss through an LSE of -inf is no loss; standard's derivative of one is NaN.
        given[1] = given[1].masked_fill(results[1] == -math.inf, 0)
    return derived(results, tensors, given), given


@settings(max_examples=100, deadline=None)
@given(call=calls(), block_q=st.integers(1, 9), block_k=st.integers(1, 9))
def test_any_combination_is_autograd_through_standard(call, block_q, block_k):
    """standard is the definition, by test_reference_scores.py."""
    (q, k, v), options = call
    tensors = [q, k, v, *([options.pop("sink").double()] if "sink" in options else [])]
    problem = Problem.from_tensors(q, k, v, sink=tensors[3] if len(tensors) > 3 else None, **options)

    def oracle(q, k, v, sink=None):
        return standard(q, k, v, sink=sink, **as_defined(options))

    def ours(q, k, v, sink=None):
        return blockwise(problem, q, k, v, sink=sink, block_q=block_q, block_k=block_k, **beside(options))

    expected, given = gradients(oracle, tensors, None)
    for a, b in zip(gradients(ours, tensors, given)[0], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def is_oracle(tensors, options, through=("out", "lse")):
    """Per head, as in check.py: within twice the error of autograd in the same dtype and one rounding. And 32 float32
    roundings of the largest value, which decide where that dtype is float32; 2^10 for the sink, a sum over all rows.
    """
    tensors = leaves(tensors)
    q, k, v, *sink = tensors
    option = {"sink": sink[0]} if sink else {}
    results = flash_attn_func(q, k, v, return_attn_probs=True, **option, **options)
    given = arriving(results, through)
    ours = derived(results, tensors, given)
    found = []
    for dtype in (torch.float64, None):
        copies = leaves(tensors, dtype)
        option = {"sink": copies[3]} if sink else {}
        upcast = [None if x is None else x.to(dtype or x.dtype) for x in given]
        found.append(derived(standard(*copies[:3], **option, **as_defined(options)), copies, upcast))
    for x, a, b, c in zip(tensors, ours, found[1], found[0], strict=True):
        assert a.dtype == x.dtype and a.shape == c.shape and a.isfinite().all()
        dims = (1, 3) if x.dim() == 4 else (0,)
        error, yardstick, rounding = ((y.double() - c).abs().amax(dims) for y in (a, b, c.to(a.dtype)))
        units = 32 if x.dim() == 4 else 2**10
        assert (error <= 2 * yardstick + rounding + units * 2**-24 * c.abs().amax(dims)).all()


@THROUGH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype, through):
    """All options at once, grouped heads, several tiles."""
    tensors = inputs(150, 200, 14, 2, 24, 16, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    sink, slopes = (torch.randn(14, generator=generator) for _ in range(2))
    options = {"alibi_slopes": slopes.abs() / 8, "softcap": 1.5, "window_size": (90, 20), "attention_chunk": 120}
    for one in (sink, sink.to(dtype)):
        is_oracle([*tensors, one], options, through)


@pytest.mark.parametrize("scale", [0, -0.4, math.sqrt(120)])
def test_softcap_with_large_logits(scale):
    """CASES 19. Most scores are at the cap, where the gradient is next to nothing."""
    tensors = inputs(40, 60, head_dim=64, dtype=torch.bfloat16)
    is_oracle(tensors, {"softcap": 15.0, "softmax_scale": scale, "causal": True})


def test_a_window_of_129_queries_and_32_keys():
    """CASES 20."""
    is_oracle(inputs(129, 32, dtype=torch.bfloat16), {"window_size": (32, 64)}, ("out",))


def test_the_sink_of_rows_without_keys():
    """CASES 13. Their LSE is the sink, their out nothing: the gradient is that of the LSE."""
    sink = torch.tensor([100.0, -3.0], requires_grad=True)
    for seqlen_q, seqlen_k in ((5, 0), (5, 2)):
        q, k, v = leaves(inputs(seqlen_q, seqlen_k, 2, 1, dtype=torch.float32))
        out, lse = flash_attn_func(q, k, v, causal=True, sink=sink, return_attn_probs=True)
        blind = seqlen_q - seqlen_k
        dq, dk, dv, dsink = torch.autograd.grad((out[:, :blind].sum(), lse[:, :, :blind].sum()), (q, k, v, sink))
        assert not dq.any() and not dk.any() and not dv.any()
        assert torch.equal(dsink, torch.full((2,), 2.0 * blind))


def test_a_sink_of_minus_inf_gets_nothing():
    """Also where rows see no key, and where a result of its head is NaN."""
    tensors = inputs(9, 6)
    sink = torch.tensor([-math.inf, 1.0, -math.inf, 2.0], dtype=torch.float64)
    given = arriving(standard(*tensors))
    given[1][:, ::2, :3] = 0  # an LSE of -inf
    plain, _ = gradients(lambda q, k, v: flash_attn_func(q, k, v, causal=True, return_attn_probs=True), tensors, given)
    ours, _ = gradients(
        lambda q, k, v, sink: flash_attn_func(q, k, v, causal=True, sink=sink, return_attn_probs=True),
        (*tensors, sink), given,
    )  # fmt: skip
    assert torch.equal(ours[0][:, :, ::2], plain[0][:, :, ::2]) and not torch.equal(ours[0], plain[0])
    assert not ours[3][::2].any() and ours[3][1::2].all()
    tensors[2][0, 0, 0] = math.nan
    ours, _ = gradients(
        lambda q, k, v, sink: flash_attn_func(q, k, v, causal=True, sink=sink, return_attn_probs=True),
        (*tensors, sink), given,
    )  # fmt: skip
    assert not ours[3][::2].any() and ours[3][1].isnan() and ours[3][3].isfinite()


@pytest.mark.parametrize("asks", [x for x in itertools.product((False, True), repeat=4) if x[3]], ids=str)
def test_the_sink_with_any_subset_of_the_inputs(asks):
    sink = torch.tensor([0.5, -0.5, 1, 2], dtype=torch.float64)
    tensors = [x.requires_grad_(ask) for x, ask in zip((*inputs(12, 20), sink), asks, strict=True)]
    wanted = [x for x in tensors if x.requires_grad]
    for through in (("out",), ("lse",), ("out", "lse")):
        results = flash_attn_func(*tensors[:3], sink=sink, causal=True, return_attn_probs=True)
        given = arriving(results, through)
        expected = derived(standard(*tensors[:3], sink=sink, right=0), wanted, given)
        for a, b in zip(derived(results, wanted, given), expected, strict=True):
            torch.testing.assert_close(a, b, **EXACT)


def test_the_sinks_gradient_does_not_depend_on_tiles():
    q, k, v = inputs(50, 20)
    sink = torch.tensor([0.5, -0.5, 1, 2], dtype=torch.float64)
    problem = Problem.from_tensors(q, k, v, sink=sink)
    results = blockwise(problem, q, k, v, sink=sink)
    given = arriving(results)
    whole = sink_gradient(sink, *results, *given)
    torch.testing.assert_close(sink_gradient(sink, *results, *given, block_q=7), whole, **EXACT)
    assert sink_gradient(sink.float(), *results, *given).dtype == torch.float32


def test_hidden_keys_give_and_take_nothing():
    """NaN outside of the band in keys and values, and in rows without keys, under what works on scores."""
    q, k, v = inputs(20, 12)
    options = {"window_size": (3, 0), "softcap": 0.7, "alibi_slopes": torch.ones(4)}
    problem = Problem.from_tensors(q[:, :17], k, v, **options)  # the last query sees keys 8 to 11

    def attention(q, k, v):
        return blockwise(problem, q, k, v, block_q=5, block_k=7, **beside(options))

    given = arriving(attention(q[:, :17], k, v))
    q[:, :5] = given[0][:, :5] = given[1][:, :, :5] = math.nan  # rows 0 to 4 see no key
    spoiled = [given[0].clone(), given[1].clone()]
    ours, _ = gradients(attention, (q[:, :17], k, v), spoiled)
    assert not ours[0][:, :5].any() and all(x.isfinite().all() for x in ours)
    k[:, 2], v[:, 2] = math.nan, math.nan  # rows 7 to 10 see it
    ours, _ = gradients(attention, (q[:, :17], k, v), spoiled)
    assert ours[0][:, 7:11].isnan().all() and ours[0][:, 5:7].isfinite().all() and ours[0][:, 11:].isfinite().all()


def test_an_inf_behind_a_softcap_is_a_score_at_the_cap():
    q, k, v = inputs(6, 9)
    q[..., 0] = q[..., 0].abs() + 0.5
    far = k.clone()
    far[:, 4, :, 0], k[:, 4, :, 0] = math.inf, 1e6
    results = []
    for keys in (k, far):
        results.append(gradients(lambda q, k, v: flash_attn_func(q, k, v, softcap=2.0, return_attn_probs=True),
                                 (q, keys, v), arriving(standard(q, k, v)))[0])  # fmt: skip
    agree(*results, **EXACT)


def test_what_the_node_keeps():
    q, k, v = leaves(inputs(12, 20))
    sink, slopes = torch.ones(4, requires_grad=True), torch.ones(4)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        out, lse = flash_attn_func(q, k, v, sink=sink, alibi_slopes=slopes, return_attn_probs=True)
    assert [x.data_ptr() for x in packed] == [x.data_ptr() for x in (q, k, v, sink, slopes, out, lse)]
    assert not [name for name, value in vars(out.grad_fn).items() if isinstance(value, torch.Tensor)]
    for changed in (sink.detach(), slopes):
        out = flash_attn_func(q, k, v, sink=sink, alibi_slopes=slopes)
        changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_node_for_the_sink_alone():
    q, k, v = inputs(12, 20)
    sink = torch.ones(4, requires_grad=True)
    out = flash_attn_func(q, k, v, sink=sink)
    assert out.requires_grad and not flash_attn_func(q, k, v, sink=sink.detach()).requires_grad
    (dsink,) = torch.autograd.grad(out.sum(), sink, create_graph=True)
    with refused(NotImplementedError, "attention can be differentiated once only (second derivatives are not built)"):
        dsink.sum().backward()

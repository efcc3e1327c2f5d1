"""Windows, chunks, softcap, sinks and ALiBi on the CPU path and in the oracle, against the definition."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from defined import defined, sees
from hypothesis import given, settings
from hypothesis import strategies as st
from options import as_defined, beside, calls
from problems import EXACT, inputs

from hopper_fa3 import flash_attn_func
from hopper_fa3.band import Band, blocks
from hopper_fa3.problem import Problem
from hopper_fa3.reference import Traffic, blockwise, standard

pytestmark = pytest.mark.usefixtures("one_thread")


def agree(ours, expected, **tolerance):
    for what, a, b in zip(("out", "LSE"), ours, expected, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, what=what: f"{what}: {text}", **(tolerance or EXACT))


@settings(max_examples=150, deadline=None)
@given(call=calls(), block_q=st.integers(1, 9), block_k=st.integers(1, 9))
def test_any_combination_is_the_definition(call, block_q, block_k):
    (q, k, v), options = call
    expected = defined(q, k, v, **as_defined(options))
    agree(standard(q, k, v, **as_defined(options)), expected)
    agree(flash_attn_func(q, k, v, return_attn_probs=True, **options), expected)
    problem = Problem.from_tensors(q, k, v, **options)
    agree(blockwise(problem, q, k, v, block_q=block_q, block_k=block_k, **beside(options)), expected)


@pytest.mark.parametrize("attention_chunk", [0, 1, 3, 4, 20])
@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (2, None), (1, 2), (0, 0), (9, 9)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (7, 7), (5, 12), (12, 5), (0, 4), (4, 0)])
def test_a_band_is_the_definition(seqlen_q, seqlen_k, left, right, attention_chunk):
    """What blocks are visited, in either order, and which of their pairs are hidden."""
    band = Band(seqlen_q, seqlen_k, left, right, attention_chunk)
    mask = [
        [sees(i, j, seqlen_q, seqlen_k, left, right, attention_chunk) for j in range(seqlen_k)] for i in range(seqlen_q)
    ]
    visible = torch.tensor(mask, dtype=torch.bool).reshape(seqlen_q, seqlen_k)
    assert band.blind == int((~visible.any(1)).sum()) and not visible[: band.blind].any()
    for first in range(seqlen_q):
        for last in range(first, seqlen_q):
            seen = visible[first : last + 1].any(0).nonzero().flatten().tolist()
            assert list(band.keys(range(first, last + 1))) == seen
    for first in range(seqlen_k):
        for last in range(first, seqlen_k):
            seen = visible[:, first : last + 1].any(1).nonzero().flatten().tolist()
            assert list(band.queries(range(first, last + 1))) == seen
    for size in (1, 2, 5):
        for rows, keys in itertools.product(blocks(range(seqlen_q), size), blocks(range(seqlen_k), size)):
            part, hidden = visible[rows.start : rows.stop, keys.start : keys.stop], band.hidden(rows, keys, "cpu")
            assert part.all() if hidden is None else torch.equal(~hidden, part) and not part.all()


def visited(seqlen, **options):
    """Number of keys, summed over tiles of 16 queries, that a call reads, by the elements of K and V."""
    q, k, v = inputs(seqlen, seqlen, 1, 1, 4, 4, batch=1)
    traffic = Traffic()
    blockwise(Problem.from_tensors(q, k, v, **options), q, k, v, block_q=16, block_k=8, traffic=traffic)
    return (traffic.read - q.numel()) // 8


def test_work_is_proportional_to_the_band():
    for options, a_tile in (
        ({"window_size": (20, 0)}, 20 + 16), ({"window_size": (20, 10)}, 20 + 16 + 10), ({"attention_chunk": 32}, 32),
        ({"attention_chunk": 24}, (24 + 48 + 24) / 3), ({"attention_chunk": 32, "window_size": (4, 0)}, 2 + 16),
    ):  # fmt: skip
        for seqlen in (256, 1024):
            assert 0.9 * a_tile < visited(seqlen, **options) / (seqlen / 16) <= a_tile, options
    assert visited(1024) == 1024 * 1024 / 16


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(33, 33), (12, 40), (40, 12), (1, 9)])
def test_spellings_of_causal_have_the_same_bits(seqlen_q, seqlen_k):
    """CASES 20."""
    q, k, v = inputs(seqlen_q, seqlen_k, dtype=torch.bfloat16)
    expected = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    for window_size in ((seqlen_k - 1, 0), (-1, 0), (None, 0), (2**31 - 1, 0)):
        ours = flash_attn_func(q, k, v, window_size=window_size, return_attn_probs=True)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    problem = replace(Problem.from_tensors(q, k, v, causal=True), left=seqlen_k - 1)  # which from_tensors leaves out
    assert all(torch.equal(a, b) for a, b in zip(blockwise(problem, q, k, v), expected, strict=True))
    dense = flash_attn_func(q, k, v)
    for window_size in ((2**31 - 1, 2**31 - 1), (-1, 2**31 - 1), (2**31 - 1, -1)):
        assert torch.equal(flash_attn_func(q, k, v, window_size=window_size), dense)


def test_a_window_of_129_queries_and_32_keys():
    """CASES 20: the first 33 queries see no key."""
    tensors = [x.requires_grad_() for x in inputs(129, 32, 2, 1)]
    out, lse = flash_attn_func(*tensors, window_size=(32, 64), return_attn_probs=True)
    with torch.no_grad():
        agree((out, lse), defined(*tensors, softmax_scale=8**-0.5, left=32, right=64))
    assert not out[:, :33].any() and (lse[:, :, :33] == -math.inf).all() and out[:, 33:].all()
    dq, _, _ = torch.autograd.grad(out.square().sum() + lse[:, :, 33:].sum(), tensors)
    assert not dq[:, :33].any() and dq[:, 34:].all()


def test_what_changes_nothing_leaves_the_bits():
    q, k, v = inputs(40, 60, dtype=torch.bfloat16)
    plain = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    for option in ({"softcap": 0}, {"attention_chunk": 60}, {"attention_chunk": 0}, {"window_size": (59, -1)},
                   {"sink": torch.full((4,), -math.inf)}, {"alibi_slopes": torch.zeros(4)}):  # fmt: skip
        ours = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **option)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True)), option
    both = flash_attn_func(q, k, v, alibi_slopes=torch.tensor([1.0, 2, 3, 4]))
    assert torch.equal(both, flash_attn_func(q, k, v, alibi_slopes=torch.tensor([[1.0, 2, 3, 4]] * 2)))


def test_a_chunk_is_attention_in_pieces():
    q, k, v = inputs(20, 20)
    whole = flash_attn_func(q, k, v, causal=True, attention_chunk=8)
    pieces = [flash_attn_func(*(x[:, part : part + 8] for x in (q, k, v)), causal=True) for part in (0, 8, 16)]
    torch.testing.assert_close(whole, torch.cat(pieces, 1), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [0, -0.4, math.sqrt(120), 1000.0])
def test_softcap_with_large_logits(scale, dtype):
    """CASES 19."""
    q, k, v = inputs(30, 50, head_dim=64, dtype=dtype)
    out, lse = flash_attn_func(q, k, v, scale, True, softcap=15, return_attn_probs=True)
    true, true_lse = standard(q, k, v, softmax_scale=scale, right=0, softcap=15, compute_dtype=torch.float64)
    assert ((out - true).abs() <= torch.finfo(dtype).eps / 2 * true.abs() + 2e-5).all()
    assert (lse - true_lse).abs().max() < 2e-5 and (lse.abs() <= 15 + math.log(50) + 1e-5).all()
    if scale == 1000:
        assert (lse.abs() > 14).all()


def test_a_softcap_far_above_the_logits_does_little():
    q, k, v = inputs(30, 50)
    agree(standard(q, k, v, softcap=1e6), standard(q, k, v), rtol=0, atol=1e-9)
    agree(flash_attn_func(q, k, v, softcap=1e6, return_attn_probs=True), standard(q, k, v), rtol=0, atol=1e-9)


@pytest.mark.parametrize("sink", [100.0, -100.0, 0.0])
def test_a_sink_without_keys(sink):
    """CASES 13: no keys at all, and rows that see none."""
    for seqlen_q, seqlen_k in ((5, 0), (5, 2)):
        q, k, v = inputs(seqlen_q, seqlen_k, dtype=torch.float32)
        sinks = sink + torch.arange(4.0)
        out, lse = flash_attn_func(q, k, v, causal=True, sink=sinks, return_attn_probs=True)
        blind = seqlen_q - seqlen_k
        assert not out[:, :blind].any() and (lse[:, :, :blind] == sinks[None, :, None]).all()
        agree((out.double(), lse.double()), defined(q, k, v, softmax_scale=8**-0.5, right=0, sink=sinks),
              rtol=1e-5, atol=1e-5)  # fmt: skip


def test_a_sink_of_minus_inf_is_none():
    q, k, v = inputs(9, 6)
    k[:, 0], q[..., 0] = 0, 1
    k[:, 0, :, 0] = -math.inf  # query 3 sees this key only
    for attention in (standard, flash_attn_func):
        options = {"right": 0} if attention is standard else {"causal": True, "return_attn_probs": True}
        plain = attention(q, k, v, **options)
        same = attention(q, k, v, sink=torch.full((4,), -math.inf), **options)
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(same, plain, strict=True))
        assert plain[0][:, 3].isnan().all() and not plain[0][:, :3].any()
        out, lse = attention(q, k, v, sink=torch.arange(4.0), **options)
        assert not out[:, :4].any() and (lse[:, :, :4] == torch.arange(4.0)[:, None]).all() and out[:, 4:].all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sink_that_is_not_finite_reaches_its_head_only(value):
    q, k, v = inputs(6, 9)
    sink = torch.tensor([1.0, value, 2.0, 3.0])
    clean = flash_attn_func(q, k, v, sink=torch.arange(4.0), return_attn_probs=True)
    for out, lse in (standard(q, k, v, sink=sink), flash_attn_func(q, k, v, sink=sink, return_attn_probs=True)):
        assert out[:, :, 1].isnan().all() and lse[:, 1].isnan().all()
        agree((out[:, :, 3], lse[:, 3]), (clean[0][:, :, 3], clean[1][:, 3]))
        assert out[:, :, ::2].isfinite().all() and lse[:, ::2].isfinite().all()


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"alibi_slopes": torch.arange(4.0)}, {"sink": torch.ones(4)},
                                     {"attention_chunk": 7}, {"window_size": (3, 2)}], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_option_computes_in_float32(options, dtype):
    q, k, v = inputs(70, 150, 4, 2, 24, 16, dtype=dtype)
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    true, true_lse = standard(q, k, v, compute_dtype=torch.float64, **as_defined(options))
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert ((out - true).abs() <= torch.finfo(dtype).eps / 2 * true.abs() + 1e-5).all()
    assert (lse - true_lse).abs().max() < 1e-5
    same, same_lse = standard(q, k, v, **as_defined(options))
    assert same.dtype == dtype and same_lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sink_in_qs_dtype(dtype):
    q, k, v = inputs(20, 30, dtype=dtype)
    sink = torch.randn(4, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = flash_attn_func(q, k, v, sink=sink, return_attn_probs=True)
    expected = flash_attn_func(q, k, v, sink=sink.float(), return_attn_probs=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_strides_of_slopes_and_sink():
    q, k, v = inputs(9, 12)
    slopes, sink = torch.randn(4, 2).mT, torch.randn(4, 2)[:, 0]
    options = {"alibi_slopes": slopes, "sink": sink}
    expected = flash_attn_func(q, k, v, **{name: x.contiguous() for name, x in options.items()})
    assert torch.equal(flash_attn_func(q, k, v, **options), expected)

"""Softcap, sinks, ALiBi and chunks on the GPU, forward and backward, alone and combined with each other and masks."""

import itertools
import math
from dataclasses import replace

import check_gradients
import pytest
import torch
from cases import SMALL, Case
from check import check, compare, run
from check_gradients import arriving

from hopper_fa3 import flash_attn_func
from hopper_fa3.problem import LARGEST_SOFTCAP

pytestmark = pytest.mark.gpu(limit=300)  # a test compiles up to a dozen kernels

# (head_dim, head_dim_v, dtype): the plan's rows and the backward's kinds of kernels; dims that do not fill their class
DIMS = (
    (64, 64, "bfloat16"), (64, 64, "float16"), (8, 8, "bfloat16"), (96, 96, "float16"), (128, 128, "bfloat16"),
    (128, 128, "float16"), (192, 128, "bfloat16"), (256, 256, "bfloat16"), (248, 256, "float16"),
)  # fmt: skip
MASKS = ({}, {"causal": True}, {"window_size": (70, 30)})
LENGTHS = ((113, 255), (255, 113), (512, 512), (300, 1500))
HOOKS = ("softcap", "sink", "alibi")
# The kinds of a hook: slopes run on the same kernels, softcaps on kernels of their own
ALL_OF = {"alibi": ("alibi", "slopes of a batch entry"), "softcap": ("softcap", "small softcap")}


def hook(name, case, device="cuda", seed=3):
    """The options of one of HOOKS or ALL_OF, random where they may be."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(case.batch, case.heads, generator=generator).to(device)
    return {
        "softcap": {"softcap": 30.0},
        "small softcap": {"softcap": 15.0},
        "sink": {"sink": 2 * normal[0]},
        # Heads that see far and near, and one that sees the far keys best
        "alibi": {"alibi_slopes": normal[0] * 2.0 ** -torch.arange(case.heads, device=device)},
        "slopes of a batch entry": {"alibi_slopes": normal / 16},
    }[name]


def hooks(name, case, device):
    """The options of all kinds of one hook."""
    return [hook(each, case, device) for each in ALL_OF.get(name, (name,))]


def case_of(head_dim, head_dim_v, dtype, **changes):
    return replace(SMALL, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, **changes)


def check_both(q, k, v, how=check_gradients.NOTHING, **options):
    """Values and gradients; those of the sink by torch's own formula in float64."""
    out, lse = check(q, k, v, **options)
    dout, dlse = arriving(q, v)
    check_gradients.check(q, k, v, dout=dout, dlse=dlse, how=how, **options)
    if options.get("sink") is not None:
        check_sink(q, k, v, out, lse, dout, dlse, **options)
    return out, lse


def check_sink(q, k, v, out, lse, dout, dlse, *, sink, **options):
    """d sink = -sum exp(sink - LSE) (rowsum(dO O) - dLSE), from the results that the kernel itself gave."""
    leaf = sink.detach().clone().requires_grad_()
    results = flash_attn_func(q, k, v, sink=leaf, return_attn_probs=True, **options)
    (got,) = torch.autograd.grad(results, leaf, (dout, dlse))
    delta = (out.double() * dout.double()).sum(-1).mT - dlse.double()
    terms = torch.exp(sink.double()[:, None] - lse.double()) * delta
    expected = -terms.masked_fill((sink == -math.inf)[:, None], 0).sum((0, 2))
    # Sums of float32 terms in any order, each off by a few of its last bits, its LSE's among them
    bound = 2.0**-18 * terms.abs().nan_to_num(0).sum((0, 2)) + 2.0**-20
    bound += expected.abs() * torch.finfo(sink.dtype).eps
    assert got.dtype == sink.dtype and ((got.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_values_and_gradients(dims, name, options, device):
    for seqlen_q, seqlen_k in LENGTHS:
        case = case_of(*dims, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        for given in hooks(name, case, device):
            check_both(*case.inputs(device), **given, **options)


@pytest.mark.parametrize("dims", [DIMS[0], DIMS[4], DIMS[6], DIMS[7]], ids=str)
@pytest.mark.parametrize("pair", [*itertools.combinations(HOOKS, 2), HOOKS], ids=str)
def test_hooks_together(pair, dims, device):
    case = case_of(*dims, seqlen_q=255, seqlen_k=600)
    options = {key: value for name in pair for key, value in hook(name, case, device).items()}
    for mask in MASKS[1:]:
        check_both(*case.inputs(device), **options, **mask)


@pytest.mark.kernels("groups", "name")
@pytest.mark.parametrize(("group", "heads_k"), [(5, 2), (8, 1)])
@pytest.mark.parametrize("name", HOOKS)
def test_groups_of_heads(name, group, heads_k, device):
    case = replace(SMALL, seqlen_q=255, seqlen_k=600, heads=group * heads_k, heads_k=heads_k)
    for given in hooks(name, case, device):
        check_both(*case.inputs(device), **given, causal=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_tiles(head_dim, device):
    """More tiles than SMs: slopes and sinks are those of the tile at hand."""
    case = Case(3, 1000, 1000, 10, 5, head_dim, head_dim)
    for name, causal in (("sink", False), ("slopes of a batch entry", True)):
        check_both(*case.inputs(device), **hook(name, case, device), causal=causal)


# Softcap


@pytest.mark.kernels("softcap", "dims")
@pytest.mark.parametrize("dims", [DIMS[0], DIMS[1], DIMS[4], DIMS[5], DIMS[7]], ids=str)
@pytest.mark.parametrize(
    ("softcap", "scale"),
    [(15.0, 3.0), (15.0, -0.3), (30.0, 5.0), (30.0, -0.3), (0.5, 1.0), (50.0, 0.0), (1024.0, 0.5)],
)
def test_softcap_of_any_logits(softcap, scale, dims, device):
    """Among them logits far beyond the cap, of which it leaves the sign."""
    case = case_of(*dims, seqlen_q=300, seqlen_k=500)
    check_both(*case.inputs(device), softcap=softcap, softmax_scale=scale, causal=True)


def test_the_smallest_softcap_and_the_largest(device):
    q, k, v = SMALL.inputs(device)
    for softcap in (2.0**-126, LARGEST_SOFTCAP):
        check_both(q, k, v, softcap=softcap)


def test_rows_that_outgrow_their_shift_under_a_softcap(device):
    """Keys grow from the last block to the first: exponents by up to 2 cap log2(e)."""
    q, k, v = Case(1, 200, 1500, 2, 1, 128, 128).inputs(device)
    q, k = q.abs(), k.abs() * torch.linspace(2, -2, k.shape[1], device=device)[:, None, None]
    check_both(q, k.to(q.dtype), v, softcap=30.0)


@pytest.mark.parametrize("dims", [DIMS[0], DIMS[4], DIMS[7]], ids=str)
@pytest.mark.parametrize("name", ["softcap", "small softcap", "alibi", "both"])
def test_what_is_done_again_changes_no_other_row(name, dims, device):
    """Blocks in which a row has a large score, or outgrows its shift, are done again for its whole warpgroup."""
    case = replace(case_of(*dims), batch=1, seqlen_q=256, seqlen_k=900, heads=2, heads_k=1)
    q, k, v = case.inputs(device)
    names = ("softcap", "alibi") if name == "both" else (name,)
    options = {key: value for each in names for key, value in hook(each, case, device).items()}
    for mask in MASKS[:2]:
        out, lse = run(q, k, v, **options, **mask)
        changed = q.clone()
        changed[:, ::3] *= 20
        again, again_lse = run(changed, k, v, **options, **mask)
        compare(again, again_lse, changed, k, v, **options, **mask)
        for rows in (slice(1, None, 3), slice(2, None, 3)):
            assert torch.equal(again[:, rows], out[:, rows]) and torch.equal(again_lse[..., rows], lse[..., rows])


@pytest.mark.parametrize("cap", [15.0, 30.0, 50.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_large_score_among_small_ones(head_dim, cap, device):
    """In any block, on either side: 0.4 to 3 caps, beside scores of a tenth of it."""
    q, k, v = Case(1, 64, 1500, 2, 1, head_dim, head_dim).inputs(device)
    q = torch.ones_like(q)
    k = k / 8
    for index, size in enumerate((0.4, 0.49, 0.51, 1.0, 3.0, -0.51, -3.0)):
        k[:, 200 * index + 7] = cap * size / head_dim**0.5
    check_both(q, k, v, softcap=cap)


# Sink


@pytest.mark.kernels("sinks", "options")
@pytest.mark.parametrize("value", [-math.inf, -100.0, 0.0, 100.0])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_line_13_sinks_of_any_size(options, value, device):
    """Also of queries that see no key: their LSE is the sink, and their result 0."""
    case = replace(SMALL, seqlen_q=255, seqlen_k=113)
    sink = torch.full((case.heads,), value, device=device)
    out, lse = check_both(*case.inputs(device), sink=sink, **options)
    blind = {str(MASKS[1]): 142, str(MASKS[2]): 112}.get(str(options), 0)
    assert not out[:, :blind].any() and (lse[:, :, :blind] == value).all()
    if value == -math.inf:
        assert all(map(torch.equal, (out, lse), run(*case.inputs(device), **options)))


def test_line_13_a_sink_without_any_key(device):
    q, k, v = replace(SMALL, seqlen_k=0).inputs(device)
    sink = torch.tensor([100.0, -3.0], device=device, requires_grad=True)
    out, lse = flash_attn_func(q, k, v, sink=sink, return_attn_probs=True)
    assert not out.any() and torch.equal(lse, sink.detach()[:, None].expand_as(lse))
    (gradient,) = torch.autograd.grad(lse.sum(), sink)
    assert gradient.tolist() == [q.shape[0] * q.shape[1]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_of_either_dtype_in_any_layout(dtype, device):
    q, k, v = SMALL.inputs(device)
    sink = torch.randn(2 * SMALL.heads, generator=torch.Generator().manual_seed(0)).to(device, dtype)[::2]
    check_both(q, k, v, sink=sink, causal=True)


# ALiBi


@pytest.mark.kernels("slopes", "options")
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("slope", [0.0, 1.0, -0.01, -1.0, 30.0])
def test_slopes_of_any_size(slope, options, device):
    """With a negative one far keys count most: each block may outgrow the last one's shift."""
    case = replace(SMALL, seqlen_q=300, seqlen_k=1000)
    slopes = torch.full((case.heads,), slope, device=device)
    check_both(*case.inputs(device), alibi_slopes=slopes, **options)
    check(*case.inputs(device), alibi_slopes=slopes, softmax_scale=0.0, **options)


def test_slopes_in_any_layout(device):
    q, k, v = SMALL.inputs(device)
    slopes = torch.rand(SMALL.heads, 2 * SMALL.batch, generator=torch.Generator().manual_seed(0)).to(device)[:, ::2].mT
    check_both(q, k, v, alibi_slopes=slopes)
    check_both(q, k, v, alibi_slopes=slopes[:1].expand(SMALL.batch, -1), causal=True)


# Chunks


@pytest.mark.kernels("chunks", "dims")
@pytest.mark.parametrize("dims", [DIMS[0], DIMS[4], DIMS[6], DIMS[7]], ids=str)
@pytest.mark.parametrize("chunk", [1, 40, 64, 100, 128, 300])
def test_chunks(chunk, dims, device):
    """Smaller and larger than tiles, and of whole tiles; with more queries than keys, the first see none."""
    for seqlen_q, seqlen_k in ((113, 255), (255, 113), (700, 700), (300, 1500)):
        q, k, v = case_of(*dims, seqlen_q=seqlen_q, seqlen_k=seqlen_k).inputs(device)
        for mask in ({}, {"causal": True}, {"window_size": (70, 30)}, {"window_size": (50, -1)}):
            out, lse = check_both(q, k, v, attention_chunk=chunk, **mask)
            blind = max(seqlen_q - seqlen_k, 0)
            assert not out[:, :blind].any() and (lse[:, :, :blind] == -math.inf).all()


def test_a_chunk_is_attention_of_its_own(device):
    q, k, v = replace(SMALL, seqlen_q=512, seqlen_k=512).inputs(device)
    out, lse = run(q, k, v, causal=True, attention_chunk=128)
    for first in range(0, 512, 128):
        part = slice(first, first + 128)
        compare(out[:, part], lse[:, :, part], q[:, part], k[:, part], v[:, part], causal=True)


def test_chunks_longer_than_the_keys(device):
    """They hide keys only from queries in front of all keys."""
    q, k, v = replace(SMALL, seqlen_q=255, seqlen_k=113).inputs(device)
    for chunk in (113, 2**31, 2**62):
        check_both(q, k, v, attention_chunk=chunk, window_size=(-1, 200))


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_chunks_with_hooks(head_dim, name, device):
    case = case_of(head_dim, head_dim, "bfloat16", seqlen_q=255, seqlen_k=600)
    for mask in MASKS[:2]:
        check_both(*case.inputs(device), attention_chunk=90, **hook(name, case, device), **mask)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_gradients_in_chunks(head_dim, device):
    q, k, v = case_of(head_dim, head_dim, "bfloat16", seqlen_q=700, seqlen_k=900).inputs(device)
    given = {"dout": arriving(q, v)[0], "attention_chunk": 200}
    first = check_gradients.run(q, k, v, **given, deterministic=True)
    check_gradients.compare(first, q, k, v, **given)
    assert all(map(torch.equal, first, check_gradients.run(q, k, v, **given, deterministic=True)))


def test_nan_in_keys_of_other_chunks_stays_there(device):
    q, k, v = replace(SMALL, seqlen_q=512, seqlen_k=512).inputs(device)
    k[:, 128:256], v[:, 256:384] = math.nan, math.nan
    for mask in MASKS[:2]:
        out, lse = run(q, k, v, attention_chunk=128, **mask)
        for first in (0, 384):
            part = slice(first, first + 128)
            assert out[:, part].isfinite().all() and lse[:, :, part].isfinite().all()


# All


def test_values_are_read_at_each_call(device):
    """Neither addresses nor values of sinks and slopes are kept from call to call, nor by a graph."""
    q, k, v = SMALL.inputs(device)
    sink, slopes = torch.zeros(SMALL.heads, device=device), torch.zeros(SMALL.heads, device=device)
    with torch.no_grad():
        flash_attn_func(q, k, v, sink=sink, alibi_slopes=slopes)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = flash_attn_func(q, k, v, sink=sink, alibi_slopes=slopes, return_attn_probs=True)
    for step in range(1, 3):
        sink.fill_(step)
        slopes.fill_(step / 8)
        graph.replay()
        compare(out, lse, q, k, v, sink=sink, alibi_slopes=slopes)
        check(q, k, v, sink=sink.clone(), alibi_slopes=slopes.clone())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", HOOKS)
def test_deterministic_gradients_repeat(name, head_dim, device):
    case = Case(2, 700, 900, 4, 2, head_dim, head_dim, causal=True)
    q, k, v = case.inputs(device)
    options = hook(name, case, device) | {"causal": True}
    dout, dlse = arriving(q, v)
    given = {"dout": dout, "dlse": dlse, "deterministic": True} | options
    first = check_gradients.run(q, k, v, **given)
    check_gradients.compare(first, q, k, v, dout=dout, dlse=dlse, **options)
    for _ in range(3):
        assert all(map(torch.equal, first, check_gradients.run(q, k, v, **given)))


@pytest.mark.kernels("nan", "name")
@pytest.mark.parametrize("name", ["softcap", "sink", "alibi"])
@pytest.mark.parametrize("which", ["query", "key", "last key"])
def test_a_nan_reaches_what_depends_on_it(which, name, device):
    """The oracle's places, in the forward: a capped NaN is one, and reaches no other row through a reciprocal."""
    case = replace(SMALL, seqlen_q=300, seqlen_k=500)
    q, k, v = case.inputs(device)
    tensor, place = {"query": (q, 123), "key": (k, 250), "last key": (k, 499)}[which]
    tensor[0, place, 0, 3] = math.nan
    for mask in MASKS:
        check(q, k, v, **hook(name, case, device), **mask)

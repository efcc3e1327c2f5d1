"""Softcap, sinks, ALiBi and chunks of packed sequences on the GPU, forward and backward, alone and combined."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from check_packed import check_both, check_neighbours_of_nan, compare, compare_gradients, run, run_gradients, sequences
from packed_cases import CROSSED, EMPTY, RAGGED, SPARE, TAILED, USED, PackedCase, of_dims, unused

from hopper_fa3 import flash_attn_func, flash_attn_varlen_func, plan
from hopper_fa3.problem_packed import PackedProblem

pytestmark = pytest.mark.gpu(limit=300)  # a test compiles up to a dozen kernels

# (head_dim, head_dim_v, dtype): the plan's rows and the backward's kinds of kernels
DIMS = (
    (64, 64, "bfloat16"), (96, 96, "float16"), (128, 128, "bfloat16"), (192, 128, "bfloat16"), (256, 256, "bfloat16"),
)  # fmt: skip
FEW = (DIMS[0], DIMS[2], DIMS[4])
MASKS = ({}, {"causal": True}, {"window_size": (70, 30)})
HOOKS = ("softcap", "sink", "alibi")
# The kinds of a hook: slopes run on the same kernels, softcaps on kernels of their own
ALL_OF = {"alibi": ("alibi", "slopes of a sequence"), "softcap": ("softcap", "small softcap")}
# Sequences without keys or queries among others; unused rows between them; shorter than they are stored
CASES = (RAGGED, EMPTY, SPARE, USED, CROSSED)


def hook(name, case, device, seed=3):
    """The options of one of HOOKS or ALL_OF, random where they may be."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(len(case.lengths_q), case.heads, generator=generator).to(device)
    return {
        "softcap": {"softcap": 30.0},
        "small softcap": {"softcap": 15.0},
        "sink": {"sink": 2 * normal[0]},
        "alibi": {"alibi_slopes": normal[0] * 2.0 ** -torch.arange(case.heads, device=device)},
        "slopes of a sequence": {"alibi_slopes": normal / 16},
    }[name]


def hooks(name, case, device):
    """The options of all kinds of one hook."""
    return [hook(each, case, device) for each in ALL_OF.get(name, (name,))]


@pytest.mark.kernels("hooks", "name", "mask")
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.mix)
def test_values_and_gradients(case, name, mask, device):
    for given in hooks(name, case, device):
        check_both(case, device, **given, **mask)


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims, name, device):
    for case, mask in ((RAGGED, MASKS[1]), (EMPTY, MASKS[0])):
        case = of_dims(case, *dims)
        for given in hooks(name, case, device):
            check_both(case, device, **given, **mask)


@pytest.mark.parametrize("dims", FEW, ids=str)
@pytest.mark.parametrize("pair", [*itertools.combinations(HOOKS, 2), HOOKS], ids=str)
def test_hooks_together(pair, dims, device):
    for case, mask in ((USED, MASKS[1]), (EMPTY, MASKS[2])):
        case = of_dims(case, *dims)
        options = {key: value for name in pair for key, value in hook(name, case, device).items()}
        check_both(case, device, **options, **mask)


@pytest.mark.kernels("groups", "name")
@pytest.mark.parametrize(("heads", "heads_k"), [(10, 2), (8, 1)])
@pytest.mark.parametrize("name", HOOKS)
def test_groups_of_heads(name, heads, heads_k, device):
    case = replace(RAGGED, heads=heads, heads_k=heads_k)
    for given in hooks(name, case, device):
        check_both(case, device, **given, causal=True)


@pytest.mark.parametrize("dims", FEW, ids=str)
def test_many_tiles(dims, device):
    """More tiles than SMs, of few CTAs: slopes and sinks are those of the tile at hand."""
    case = replace(of_dims(TAILED, *dims), heads=8, heads_k=4)
    margin = torch.cuda.get_device_properties(device).multi_processor_count - 5
    for name, causal in (("sink", False), ("slopes of a sequence", True)):
        check_both(case, device, {"sm_margin": margin}, **hook(name, case, device), causal=causal)


# Softcap


@pytest.mark.kernels("softcaps")
@pytest.mark.parametrize(
    ("softcap", "scale"), [(15.0, 3.0), (15.0, -0.3), (30.0, 5.0), (30.0, -0.3), (0.5, 1.0), (1024.0, 0.5)]
)
def test_softcap_of_any_logits(softcap, scale, device):
    check_both(replace(USED, softmax_scale=scale), device, softcap=softcap, causal=True)


# Sink


@pytest.mark.kernels("sinks")
@pytest.mark.parametrize("value", [-math.inf, -100.0, 0.0, 100.0])
@pytest.mark.parametrize("case", [EMPTY, SPARE, USED], ids=lambda case: case.mix)
def test_sinks_of_any_size(case, value, device):
    """Also of sequences without keys: their LSE is the sink; and of rows of no sequence, where it is -inf."""
    sink = torch.full((case.heads,), value, device=device)
    for softcap in (0.0, 15.0, 40.0):
        out, lse = check_both(case, device, sink=sink, softcap=softcap)
        for queries, keys in case.inputs().lengths.rows:
            if not keys:
                rows = slice(queries.start, queries.stop)
                assert not out[rows].any() and (lse[:, rows] == value).all()


@pytest.mark.parametrize("used", [None, (3, 0, 50)])
def test_a_sink_without_any_key(used, device):
    case = PackedCase("keyless", (5, 7, 64), (0, 0, 0), used_q=used, before=(2, 0), behind=(3, 0))
    inputs, sink = case.inputs(device), torch.tensor([100.0, -3.0], device=device, requires_grad=True)
    out, lse = flash_attn_varlen_func(*inputs, sink=sink, return_attn_probs=True)
    rows = ~unused(inputs.lengths, len(out), 0).to(device)
    assert not out.any() and torch.equal(lse[:, rows], sink.detach()[:, None].expand(2, rows.sum()))
    assert (lse[:, ~rows] == -math.inf).all()
    (gradient,) = torch.autograd.grad(lse[:, rows].sum(), sink)
    assert gradient.tolist() == [rows.sum()] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_of_either_dtype_in_any_layout(dtype, device):
    sink = torch.randn(2 * RAGGED.heads, generator=torch.Generator().manual_seed(0)).to(device, dtype)[::2]
    check_both(RAGGED, device, sink=sink, causal=True)


# ALiBi


@pytest.mark.kernels("slopes", "mask")
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("slope", [0.0, -0.01, 1.0, 30.0])
def test_slopes_of_any_size(slope, mask, device):
    slopes = torch.full((CROSSED.heads,), slope, device=device)
    check_both(CROSSED, device, alibi_slopes=slopes, **mask)


def test_slopes_in_any_layout(device):
    batch, heads = len(RAGGED.lengths_q), RAGGED.heads
    slopes = torch.rand(heads, 2 * batch, generator=torch.Generator().manual_seed(0)).to(device)[:, ::2].mT
    check_both(RAGGED, device, alibi_slopes=slopes)
    check_both(RAGGED, device, alibi_slopes=slopes[:1].expand(batch, -1), causal=True)


# Chunks


@pytest.mark.kernels("chunks", "dims")
@pytest.mark.parametrize("dims", FEW, ids=str)
@pytest.mark.parametrize("chunk", [1, 40, 64, 100, 128, 300])
def test_chunks(chunk, dims, device):
    """Smaller and larger than tiles, and of whole tiles; with more queries than keys, the first see none."""
    for case, mask in itertools.product((RAGGED, EMPTY, USED), (*MASKS, {"window_size": (50, -1)})):
        check_both(of_dims(case, *dims), device, attention_chunk=chunk, **mask)


@pytest.mark.kernels("long chunks")
@pytest.mark.parametrize("chunk", [513, 2**31, 2**62])
def test_chunks_longer_than_the_keys(chunk, device):
    """They hide keys only from queries in front of all keys."""
    check_both(RAGGED, device, attention_chunk=chunk)
    check_both(CROSSED, device, attention_chunk=chunk, causal=True)


@pytest.mark.parametrize("dims", FEW, ids=str)
@pytest.mark.parametrize("name", HOOKS)
def test_chunks_with_hooks(name, dims, device):
    for case, mask in itertools.product((RAGGED, EMPTY), MASKS[:2]):
        case = of_dims(case, *dims)
        for given in hooks(name, case, device):
            check_both(case, device, attention_chunk=90, **given, **mask)


# All


@pytest.mark.parametrize("name", (*HOOKS, "slopes of a sequence", "chunk"))
def test_sequences_one_by_one_have_the_same_bits_under_one_plan(name, device):
    """Those of flash_attn_func."""
    case = replace(CROSSED, causal=True)
    inputs = case.inputs(device)
    options = {"attention_chunk": 100} if name == "chunk" else hook(name, case, device)
    chosen = plan.choose(PackedProblem.from_tensors(*inputs, **case.options, **options).static)
    out, lse = run(inputs, **case.options, **options, plan=chosen)
    compare(out, lse, inputs, **case.options, **options)
    slopes = options.get("alibi_slopes")
    for number, (queries, _, tensors) in enumerate(sequences(inputs)):
        if slopes is not None and slopes.dim() == 2:
            options = options | {"alibi_slopes": slopes[number : number + 1]}
        given = case.options | options | {"plan": chosen, "return_attn_probs": True}
        # A chunk that is longer than the keys is none to one sequence, whose kernel is another then
        if name != "chunk" or tensors[1].shape[1] > 100:
            alone, alone_lse = (x[0] for x in flash_attn_func(*tensors, **given))
            assert torch.equal(alone, out[queries]) and torch.equal(alone_lse, lse[:, queries]), f"sequence {number}"


@pytest.mark.parametrize("case", [replace(CROSSED, causal=True), USED], ids=lambda case: case.mix)
def test_neighbours_of_nan_change_no_bit(case, device):
    sink, slopes = (hook(name, case, device) for name in ("sink", "slopes of a sequence"))
    check_neighbours_of_nan(case, device, **sink, **slopes, attention_chunk=150)


@pytest.mark.parametrize("dims", FEW, ids=str)
@pytest.mark.parametrize("name", (*HOOKS, "chunk"))
def test_deterministic_gradients_repeat(name, dims, device):
    case = replace(of_dims(CROSSED, *dims), causal=True, heads=4)
    inputs = case.inputs(device)
    dout, dlse = case.arriving(inputs)
    options = case.options | ({"attention_chunk": 200} if name == "chunk" else hook(name, case, device))
    first = run_gradients(inputs, dout, dlse, **options, deterministic=True)
    compare_gradients(first, inputs, dout, dlse, **options)
    for _ in range(3):
        assert all(map(torch.equal, first, run_gradients(inputs, dout, dlse, **options, deterministic=True)))


def test_values_are_read_at_each_call(device):
    """Neither addresses nor values of sinks and slopes are kept from call to call, nor by a graph."""
    inputs, batch = RAGGED.inputs(device), len(RAGGED.lengths_q)
    sink, slopes = torch.zeros(RAGGED.heads, device=device), torch.zeros(batch, RAGGED.heads, device=device)
    with torch.no_grad():
        flash_attn_varlen_func(*inputs, sink=sink, alibi_slopes=slopes)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = flash_attn_varlen_func(*inputs, sink=sink, alibi_slopes=slopes, return_attn_probs=True)
    for step in range(1, 3):
        sink.fill_(step)
        slopes.copy_(step / 8 * torch.rand(slopes.shape))
        graph.replay()
        compare(out, lse, inputs, sink=sink, alibi_slopes=slopes)

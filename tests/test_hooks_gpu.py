"""Hooks of one's own on the GPU, forward and backward, alone, together, and with all else that scores depend on."""

import itertools
import math
from dataclasses import replace

import check_gradients
import pytest
import torch
from cases import SMALL, Case
from check import check, compare, run
from check_gradients import arriving
from hooks import BENT, DISTANCE, DOCUMENTS, EXPLODING, NEVER, SCATTERED

from hopper_fa3 import compile as compiling
from hopper_fa3 import flash_attn_func
from hopper_fa3.hooks import MaskHook, ScoreHook

pytestmark = pytest.mark.gpu(limit=300)  # a test compiles up to a dozen kernels

# (head_dim, head_dim_v, dtype): the plans' rows and the backward's kinds of kernels
DIMS = (
    (64, 64, "bfloat16"), (64, 64, "float16"), (40, 40, "bfloat16"), (96, 96, "float16"), (128, 128, "bfloat16"),
    (128, 128, "float16"), (192, 128, "bfloat16"), (256, 256, "bfloat16"),
)  # fmt: skip
KINDS = (DIMS[0], DIMS[4], DIMS[6], DIMS[7])
MASKS = ({}, {"causal": True}, {"window_size": (70, 30)})
LENGTHS = ((113, 255), (255, 113), (512, 512), (300, 900))
HOOKS = {
    "documents": {"mask": DOCUMENTS}, "scattered": {"mask": SCATTERED}, "distance": {"score": DISTANCE},
    "bent": {"score": BENT}, "both": {"score": BENT, "mask": SCATTERED},
}  # fmt: skip


def case_of(head_dim, head_dim_v, dtype, **changes):
    return replace(SMALL, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, **changes)


def check_both(q, k, v, how=check_gradients.NOTHING, **options):
    """Values and gradients."""
    results = check(q, k, v, **options)
    dout, dlse = arriving(q, v)
    # The LSE of a row without keys is -inf: no gradient can come from it
    dlse = dlse.masked_fill(results[1] == -math.inf, 0)
    check_gradients.check(q, k, v, dout=dout, dlse=dlse, how=how, **options)
    return results


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize(
    ("dims", "options"), [(dims, mask) for dims in DIMS for mask in (MASKS if dims in KINDS else MASKS[1:2])], ids=str
)
def test_values_and_gradients(dims, name, options, device):
    for seqlen_q, seqlen_k in LENGTHS:
        case = case_of(*dims, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        check_both(*case.inputs(device), **HOOKS[name], **options)


@pytest.mark.kernels("groups", "name")
@pytest.mark.parametrize(("group", "heads_k"), [(5, 2), (8, 1)])
@pytest.mark.parametrize("name", HOOKS)
def test_groups_of_heads(name, group, heads_k, device):
    case = replace(SMALL, seqlen_q=255, seqlen_k=600, heads=group * heads_k, heads_k=heads_k)
    check_both(*case.inputs(device), **HOOKS[name], causal=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_tiles(head_dim, device):
    """More tiles than SMs: batch entry and head are those of the tile at hand."""
    case = Case(3, 1000, 1000, 10, 5, head_dim, head_dim)
    for name, causal in itertools.product(("distance", "scattered"), (False, True)):
        check_both(*case.inputs(device), **HOOKS[name], causal=causal)


@pytest.mark.parametrize("dims", KINDS, ids=str)
@pytest.mark.parametrize(
    "options", [{"softcap": 15.0}, {"alibi": 0.125}, {"sink": 1.0}, {"attention_chunk": 90}, {"softmax_scale": -0.1},
                {"softcap": 5.0, "alibi": -0.03125, "sink": -2.0}], ids=str,
)  # fmt: skip
def test_beside_all_else_that_scores_depend_on(options, dims, device):
    options = dict(options)
    case = case_of(*dims, seqlen_q=255, seqlen_k=600)
    for name in ("alibi", "sink"):
        if name in options:
            full = torch.full((case.heads,), options.pop(name), device=device)
            options["alibi_slopes" if name == "alibi" else name] = full
    for mask in MASKS[:2]:
        check_both(*case.inputs(device), **options, **HOOKS["both"], **mask)


@pytest.mark.parametrize("dims", KINDS, ids=str)
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_rows_without_keys(options, dims, device):
    """All, and by a sink."""
    q, k, v = case_of(*dims, seqlen_q=300, seqlen_k=300).inputs(device)
    out, lse = check_both(q, k, v, mask=NEVER, **options)
    assert not out.any() and (lse == -math.inf).all()
    sink = torch.tensor([0.5] * q.shape[2], device=device)
    out, lse = run(q, k, v, mask=NEVER, sink=sink, **options)
    assert not out.any() and torch.equal(lse, torch.full_like(lse, 0.5))
    sink.fill_(-math.inf)
    out, lse = run(q, k, v, mask=NEVER, sink=sink, **options)
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("dims", KINDS, ids=str)
def test_what_lies_past_the_ends_reaches_nothing(dims, device):
    """A hook is asked about pairs past the ends, too: here it makes inf of them."""
    for options in MASKS:
        q, k, v = case_of(*dims, seqlen_q=500, seqlen_k=500).inputs(device)
        check_both(q, k, v, score=EXPLODING, **options)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_that_outgrow_their_shift(head_dim, device):
    """Scores that the hook makes grow from the last key to the first: each block is done again."""
    q, k, v = Case(1, 200, 1500, 2, 1, head_dim, head_dim).inputs(device)
    steep = ScoreHook(
        "steep", *[lambda score, batch, head, query, key: score - key * 0.25, lambda gradient, *_: gradient] * 2
    )
    for hooks in ({"score": steep}, {"score": steep, "mask": SCATTERED}):
        check_both(q, k, v, **hooks)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients_repeat(head_dim, device):
    q, k, v = Case(2, 700, 900, 4, 2, head_dim, head_dim).inputs(device)
    given = {"dout": arriving(q, v)[0], "causal": True, **HOOKS["both"]}
    first = check_gradients.run(q, k, v, **given, deterministic=True)
    check_gradients.compare(first, q, k, v, **given)
    assert all(map(torch.equal, first, check_gradients.run(q, k, v, **given, deterministic=True)))


def test_a_key_is_compiled_once(device):
    """Equal keys share kernels, whatever the functions; others do not."""
    q, k, v = SMALL.inputs(device)
    masks = [MaskHook(key, lambda batch, head, query, key: key >= query, DOCUMENTS.cpu) for key in "aab"]
    counts = [compiling.cached()]
    for mask in masks:
        flash_attn_func(q, k, v, mask=mask)
        counts.append(compiling.cached())
    assert [b - a for a, b in itertools.pairwise(counts)] == [1, 0, 1]
    with torch.no_grad():
        one_way = replace(DISTANCE, key="one way", backward=None)
        out, lse = flash_attn_func(q, k, v, score=one_way, return_attn_probs=True)
    compare(out, lse, q, k, v, score=one_way)
    with pytest.raises(NotImplementedError, match="score must have a function backward for gradients on CUDA"):
        flash_attn_func(q.requires_grad_(), k, v, score=one_way)

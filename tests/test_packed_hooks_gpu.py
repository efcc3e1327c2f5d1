"""Hooks of one's own for packed sequences on the GPU, forward and backward: each sequence is a batch entry."""

import math
from dataclasses import replace

import pytest
import torch
from check_packed import (
    check_both,
    check_neighbours_of_nan,
    compare,
    compare_gradients,
    run,
    run_gradients,
    sequences,
)
from hooks import BENT, DISTANCE, DOCUMENTS, EXPLODING, NEVER, SCATTERED
from packed_cases import CROSSED, EMPTY, RAGGED, SPARE, TAILED, USED, PackedCase, of_dims, unused

from hopper_fa3 import flash_attn_func, flash_attn_varlen_func, plan
from hopper_fa3.hooks import MaskHook
from hopper_fa3.problem_packed import PackedProblem

pytestmark = pytest.mark.gpu(limit=300)  # a test compiles up to a dozen kernels

# (head_dim, head_dim_v, dtype): the plans' rows and the backward's kinds of kernels
DIMS = (
    (64, 64, "bfloat16"), (128, 128, "bfloat16"), (192, 128, "bfloat16"), (256, 256, "bfloat16"), (96, 96, "float16"),
)  # fmt: skip
KINDS, FEW = DIMS[:4], (DIMS[0], DIMS[1], DIMS[3])
HOOKS = {
    "documents": {"mask": DOCUMENTS}, "scattered": {"mask": SCATTERED}, "distance": {"score": DISTANCE},
    "bent": {"score": BENT}, "both": {"score": DISTANCE, "mask": SCATTERED},
}  # fmt: skip
DENSE, CAUSAL, WINDOW = {}, {"causal": True}, {"window_size": (70, 30)}
# Few of all pairs: each is a set of kernels
MASKED = (
    ("documents", DENSE), ("documents", CAUSAL), ("scattered", CAUSAL), ("distance", DENSE), ("bent", CAUSAL),
    ("both", DENSE), ("both", WINDOW),
)  # fmt: skip
# Sequences without keys or queries among others; unused rows between them; shorter than they are stored
CASES = (RAGGED, EMPTY, SPARE, USED, CROSSED)


@pytest.mark.kernels("hooks", "name", "mask")
@pytest.mark.parametrize(("name", "mask"), MASKED, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.mix)
def test_values_and_gradients(case, name, mask, device):
    check_both(case, device, **HOOKS[name], **mask)


@pytest.mark.kernels("dims", "dims", "name")
@pytest.mark.parametrize("name", ["documents", "bent", "both"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("case", [RAGGED, EMPTY, SPARE], ids=lambda case: case.mix)
def test_head_dims(case, dims, name, device):
    check_both(of_dims(case, *dims), device, **HOOKS[name], causal=True)


@pytest.mark.parametrize("dims", FEW, ids=str)
@pytest.mark.parametrize("chunk", [0, 90])
def test_beside_all_else_that_scores_depend_on(chunk, dims, device):
    """A softcap's constant is in the scores that a hook sees, and no longer missing from the LSE."""
    generator = torch.Generator().manual_seed(0)
    for case in (RAGGED, EMPTY):
        slopes = (torch.randn(len(case.lengths_q), case.heads, generator=generator) / 16).to(device)
        sink = torch.tensor([1.0, -2.0], device=device)
        given = {"softcap": 5.0, "alibi_slopes": slopes, "sink": sink, "attention_chunk": chunk}
        check_both(of_dims(case, *dims), device, **given, **HOOKS["both"], causal=True)


@pytest.mark.kernels("softcap")
@pytest.mark.parametrize("scale", [None, -0.3])
def test_softcap_in_front_of_a_score_hook(scale, device):
    check_both(replace(SPARE, softmax_scale=scale), device, softcap=15.0, score=BENT)


@pytest.mark.kernels("groups")
@pytest.mark.parametrize(("heads", "heads_k"), [(10, 2), (8, 1)])
def test_groups_of_heads(heads, heads_k, device):
    check_both(replace(RAGGED, heads=heads, heads_k=heads_k), device, **HOOKS["both"])


@pytest.mark.parametrize("dims", FEW, ids=str)
def test_many_tiles(dims, device):
    """More tiles than SMs, of few CTAs: sequence and head are those of the tile at hand."""
    case = replace(of_dims(TAILED, *dims), heads=8, heads_k=4)
    margin = torch.cuda.get_device_properties(device).multi_processor_count - 5
    check_both(case, device, {"sm_margin": margin}, **HOOKS["both"], causal=True)


@pytest.mark.parametrize("dims", KINDS, ids=str)
def test_rows_without_keys(dims, device):
    """Hidden ones, or of sequences without keys: 0, with LSE -inf or the sink. Rows of no sequence have no sink."""
    for case in (SPARE, EMPTY):
        case, sink = of_dims(case, *dims), torch.tensor([0.5, -math.inf], device=device)
        rows = ~unused(case.inputs().lengths, len(case.inputs().q), 0).to(device)
        for given in ({}, {"sink": sink}):
            out, lse = check_both(case, device, mask=NEVER, **given)
            assert not out.any() and (lse[:, ~rows] == -math.inf).all()
            assert (lse[:, rows] == (sink[:, None] if given else -math.inf)).all()


def test_a_sequence_has_its_number(device):
    """Also behind empty ones."""
    hidden = 4  # of those with queries and keys the first
    mask = MaskHook(f"not {hidden}", *[lambda batch, head, query, key: (batch != hidden) & (key >= 0)] * 2)
    out, lse = check_both(EMPTY, device, mask=mask)
    for number, (queries, keys, _) in enumerate(sequences(EMPTY.inputs(device))):
        if queries.stop > queries.start:
            seen = number != hidden and keys.stop > keys.start
            assert (lse[:, queries] > -math.inf).all() == seen == out[queries].any()


@pytest.mark.parametrize("dims", KINDS, ids=str)
def test_what_lies_past_the_ends_reaches_nothing(dims, device):
    """A hook is asked about pairs past the ends, too, where other sequences are: here it makes inf of them."""
    case = of_dims(PackedCase("long", (500, 490, 500), (490, 500, 500)), *dims)
    for mask in (DENSE, CAUSAL):
        check_both(case, device, score=EXPLODING, **mask)


@pytest.mark.parametrize("name", ["distance", "both"])
def test_sequences_one_by_one_have_the_same_bits_under_one_plan(name, device):
    """Those of flash_attn_func, where they are the batch entry of the same number."""
    case = replace(CROSSED, causal=True)
    inputs, options = case.inputs(device), case.options | HOOKS[name]
    chosen = plan.choose(PackedProblem.from_tensors(*inputs, **options).static)
    out, lse = run(inputs, **options, plan=chosen)
    compare(out, lse, inputs, **options)
    for number, (queries, _, tensors) in enumerate(sequences(inputs)):
        entries = [x.expand(number + 1, -1, -1, -1).contiguous() for x in tensors]
        alone, alone_lse = flash_attn_func(*entries, **options, plan=chosen, return_attn_probs=True)
        assert torch.equal(alone[number], out[queries]), f"sequence {number}"
        assert torch.equal(alone_lse[number], lse[:, queries]), f"sequence {number}"


@pytest.mark.parametrize("case", [replace(CROSSED, causal=True), USED], ids=lambda case: case.mix)
def test_neighbours_of_nan_change_no_bit(case, device):
    check_neighbours_of_nan(case, device, **HOOKS["both"])


@pytest.mark.parametrize("dims", FEW, ids=str)
@pytest.mark.parametrize("name", ["bent", "both"])
def test_deterministic_gradients_repeat(name, dims, device):
    case = replace(of_dims(CROSSED, *dims), causal=True, heads=4)
    inputs = case.inputs(device)
    dout, dlse = case.arriving(inputs)
    options = case.options | HOOKS[name]
    first = run_gradients(inputs, dout, dlse, **options, deterministic=True)
    compare_gradients(first, inputs, dout, dlse, **options)
    for _ in range(3):
        assert all(map(torch.equal, first, run_gradients(inputs, dout, dlse, **options, deterministic=True)))


def test_a_hook_of_one_way_has_no_gradients(device):
    inputs = SPARE.inputs(device)
    one_way = replace(DISTANCE, key="one way", backward=None)
    out, lse = run(inputs, score=one_way)
    compare(out, lse, inputs, score=one_way)
    inputs.q.requires_grad_()
    with pytest.raises(NotImplementedError, match="score must have a function backward for gradients on CUDA"):
        flash_attn_varlen_func(*inputs, score=one_way)

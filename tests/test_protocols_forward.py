"""The forward kernel, executed warp by warp under many orders of events, its softmax lane by lane: simulated_dsl.py and
simulated_forward.py say how. O and LSE are compared with their definition.
"""

import random
from functools import partial

import numpy as np
import pytest
import torch
from defined import defined
from simulated_dsl import ProtocolError
from simulated_forward import Attention, ForwardProblem, PackedForwardProblem, run_forward

QUERIES = (1, 7, 63, 64, 65, 100, 130, 200)
KEYS = (1, 15, 16, 17, 48, 90)
MIXED = (0.1, 1.0, 10.0)  # some scores are beyond half the cap, and rows outgrow their shifts
# What a kind of kernel has; a list: one of these by chance
KINDS = {
    "ALiBi from the diagonal": {"slopes": [(0.3,), (-0.2,), (6.0, 0.5), (0.5, -0.1, 4.0)]},
    "ALiBi from the diagonal, softcap": {
        "slopes": [(0.3,), (-0.2, 4.0)],
        "softcap": [5.0, 30.0, 200.0],
        "spreads": MIXED,
    },
    "ALiBi, causal": {"slopes": [(0.3,), (-0.2,), (6.0, 0.5)], "right": 0},
    "ALiBi, right bound": {"slopes": [(0.3,), (-0.2,), (6.0, 0.5)], "right": [1, 20]},
    "ALiBi, window": {"slopes": [(0.3,), (-0.2, 4.0)], "right": [0, 20], "left": [0, 30, 70]},
    "softcap": {"softcap": [30.0, 50.0, 200.0], "right": [None, 0], "spreads": [(0.3,), MIXED]},
    "small softcap": {"softcap": [1.0, 5.0, 15.0], "right": [None, 0], "spreads": [(0.1,), MIXED]},
    "small softcap, few are large": {"softcap": 5.0, "spreads": (*(0.1,) * 15, 10.0)},
    "softcap, ALiBi, causal": {
        "softcap": [5.0, 30.0, 200.0],
        "slopes": [(0.3, -0.2), (4.0,)],
        "right": 0,
        "spreads": MIXED,
    },
    "softcap, window": {"softcap": [5.0, 40.0], "right": [0, 20], "left": [0, 30, 70], "spreads": MIXED},
    "softcap, sink": {"softcap": [5.0, 40.0], "right": [None, 0], "sink": [-2.0, 30.0], "spreads": MIXED},
    "plain": {"right": [None, 0, 20], "spreads": [(1.0,), MIXED]},
    "window": {"right": [0, 20], "left": [0, 30, 70], "spreads": [(1.0,), MIXED]},
    "chunks": {"right": [0, 20], "left": [30, 200], "chunk": [16, 50, 64]},
    "sink": {"right": [None, 0], "sink": [-2.0, 30.0]},
}
# ForwardConfig: one or the other by chance. Three warpgroups have P early, unless it goes through shared memory
TILES = (
    {}, {}, {"tile_n": 48}, {"stages": 3}, {"pingpong": False}, {"overlap": False}, {"tile_m": 64, "pingpong": False},
    {"tile_m": 192}, {"tile_m": 192, "pingpong": False}, {"tile_m": 192, "shared_p": True},
    {"shared_p": True, "pingpong": False},
)  # fmt: skip
SEEDS = range(6)


def drawn(chance, options):
    return {name: chance.choice(value) if isinstance(value, list) else value for name, value in options.items()}


def shape_of(kind, chance, **lengths):
    """An Attention but for what ``lengths`` leaves out."""
    batch, heads_k, group = chance.choice(((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 2, 2)))
    others = {"batch": batch, "heads_k": heads_k, "group": group, "right": None}
    others |= {"scale": chance.choice((0.5, 0.5, -0.5))}
    others |= {"ctas": chance.choice((1, 2)), "section": chance.choice((1, 2))}
    return {**others, **drawn(chance, KINDS[kind]), **lengths}


def problem(kind, seed, **lengths):
    """``(problem, options of ForwardConfig)`` by chance."""
    chance = random.Random(seed)
    lengths = {"seqlen_q": chance.choice(QUERIES), "seqlen_k": chance.choice(KEYS)} | lengths
    return ForwardProblem(Attention(**shape_of(kind, chance, **lengths)), seed), chance.choice(TILES)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_results_whatever_the_order(kind, seed):
    given, options = problem(kind, seed)
    run_forward(given, seed, **options)


# Fewer queries than keys, as many, more; both ends ragged, and blocks behind and in front of all diagonals
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(129, 129), (70, 200), (200, 70), (128, 96), (1, 130)])
@pytest.mark.parametrize("kind", ["ALiBi from the diagonal", "ALiBi from the diagonal, softcap"])
def test_order_from_the_diagonal(kind, seqlen_q, seqlen_k):
    for tile in range(2):
        given, _ = problem(kind, tile, seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=1, heads_k=1)
        run_forward(given, tile, tile_n=(16, 80)[tile])


def packed_problem(kind, seed):
    """The same of packed sequences, some without queries or keys."""
    chance = random.Random(seed)
    lengths = [(chance.choice((0, *QUERIES)), chance.choice((0, *KEYS))) for _ in range(chance.randint(1, 4))]
    options = shape_of(kind, chance)
    options = {name: value for name, value in options.items() if name != "batch"}
    return PackedForwardProblem(partial(Attention, **options), lengths, seed), chance.choice(TILES)


PACKED = ["ALiBi from the diagonal", "ALiBi, causal", "softcap, ALiBi, causal", "softcap, sink", "window", "chunks"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", PACKED)
def test_results_of_packed_sequences(kind, seed):
    given, options = packed_problem(kind, seed)
    run_forward(given, seed, **options)


# With and without a large score of its own, beside rows that need no second pass and rows that do
@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize("kind", ["softcap", "small softcap", "ALiBi from the diagonal", "softcap, ALiBi, causal"])
def test_bits_of_a_row_are_its_own(kind, spread):
    lengths = {"seqlen_q": 130, "seqlen_k": 100, "batch": 1, "scale": 0.5, "spreads": (1.0,)}
    lengths |= {"slopes": (0.02, -0.02)} if "slopes" in KINDS[kind] else {}
    given, _ = problem(kind, 0, **lengths)
    rows, found = [0, 5, 13, 63, 64, 100, 129], []
    same, again = spread * given.q[:, rows], []
    for others in (0.1, 20.0):
        given.q *= others
        given.q[:, rows] = same
        given.define()
        out, lse, times = run_forward(given, seed=int(others))
        found.append((out[:, rows].tobytes(), lse[:, rows].tobytes()))
        again.append(times)
    assert len(set(found)) == 1
    assert again[0] < again[-1] or spread > 1


def test_bits_beside_a_row_that_is_done_again():
    """Also those of rows that are not, with products whose squares leave float32's range."""
    found = []
    for size in (1.0, 1e3):
        lengths = {"seqlen_q": 64, "seqlen_k": 32, "batch": 1, "heads_k": 1, "group": 1}
        given, _ = problem("softcap", 0, **lengths, scale=1.0, right=None, spreads=(0.3,), softcap=30.0)
        given.q[:] = abs(given.q) + 0.1
        given.k[0, 5] = -1e21
        given.q[0, 40] *= size
        given.v[0, 5] = 1e9  # of which exp(-30) can be seen, and is less than what O is compared to
        given.define()
        out, lse, times = run_forward(given, 0)
        found.append((np.delete(out, 40, 1).tobytes(), np.delete(lse, 40, 1).tobytes(), times))
    assert found[0][:2] == found[1][:2] and found[0][2] < found[1][2]


# The steepest slopes; a scale with which no product is small (fused.polynomial), and the largest cap with which they
# are; blocks wider than a warpgroup has rows
@pytest.mark.parametrize(
    ("options", "tile"),
    [
        ({"slopes": (-4.0,)}, {}),
        ({"slopes": (20.0,)}, {}),
        ({"softcap": 1024.0, "scale": 2.0**-16}, {}),
        ({"softcap": 1024.0, "scale": 2.0**-16, "slopes": (0.3,)}, {}),
        ({"softcap": 1024.0, "spreads": (3.0, 10.0)}, {}),
        ({"softcap": 1e-4}, {}),
        ({"slopes": (0.3, 2.0), "softcap": 5.0, "spreads": MIXED, "seqlen_q": 130, "seqlen_k": 300}, {"tile_n": 128}),
    ],
)
def test_extremes(options, tile):
    lengths = {"seqlen_q": 130, "seqlen_k": 100, "batch": 1, "heads_k": 1, "scale": 0.5}
    given, _ = problem("plain", 0, **{**lengths, "right": None, "group": 1, **options})
    assert run_forward(given, 0, **tile)[2] > 0


def test_results_do_not_depend_on_the_order():
    given, options = problem("ALiBi from the diagonal, softcap", 0, seqlen_q=130, seqlen_k=60)
    first, *others = ([x.tobytes() for x in run_forward(given, seed, **options)[:2]] for seed in range(3))
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    "options",
    [
        {"slopes": (0.3, -0.2)},
        {"right": 2, "left": 5, "softcap": 2.0, "sink": 1.0},
        {"right": 0, "left": 20, "chunk": 6, "slopes": (0.5,)},
    ],
)
def test_definition(options):
    """ForwardProblem.define against defined.py."""
    shape = Attention(
        **{**dict(batch=1, heads_k=1, group=2, right=None, ctas=1, section=1), **options}, seqlen_q=9, seqlen_k=14
    )
    given = ForwardProblem(shape, 0)
    inputs = [torch.tensor(x) for x in (given.q, given.k, given.v)]
    others = {
        "sink": None if given.sink is None else torch.tensor(given.sink),
        "alibi_slopes": torch.tensor(given.slopes),
    }
    band = {"left": shape.left, "right": shape.right, "attention_chunk": shape.chunk or 0}
    out, lse = defined(*inputs, softmax_scale=shape.scale, softcap=shape.softcap, **others, **band)
    given.check(out.numpy(), lse.numpy().swapaxes(1, 2))


FROM_DIAGONAL, CAPPED = "ALiBi from the diagonal", "softcap"
# Each a change in a kernel's text: {name: (kind, options, module, text, text instead)}
FAULTS = {
    "V of the next block": (
        FROM_DIAGONAL, {}, "load", "self.values.tile(tiled_v, s_v, block,", "self.values.tile(tiled_v, s_v, after,"
    ),
    "the last V is the first block's": (
        FROM_DIAGONAL, {}, "load", "last = order.block(end - 1) if const_expr(config.from_diagonal) else Int32(0)",
        "last = Int32(0)",
    ),
    "K begins at the last block": (
        FROM_DIAGONAL, {}, "load", "last = order.block(Int32(0)) if const_expr(config.from_diagonal) else end - 1",
        "last = end - 1",
    ),
    "consumers begin at the last block": (
        FROM_DIAGONAL, {}, "consume", "masked, block = full <= order.pivot, order.pivot", "pass"
    ),
    "consumers go on behind the diagonal": (
        FROM_DIAGONAL, {}, "consume", "order.side(behind, own)", "order.side(1 - behind, own)"
    ),
    "each warpgroup begins at its own diagonal": (
        FROM_DIAGONAL, {}, "consume", "self.band.diagonal_first(tile_query, config.tile_m, first_query",
        "self.band.diagonal_first(first_query, WGMMA_M, first_query",
    ),
    "order goes on one block too low": (
        FROM_DIAGONAL, {}, "blocks", "block < 0, block + self.end, block)", "block < 0, block + self.end - 1, block)"
    ),
    "blocks that a diagonal crosses are linear": (
        FROM_DIAGONAL, {}, "blocks", "cutlass.max(own_begin + shift + 1, 0)", "cutlass.max(own_begin + shift + 40, 0)"
    ),
    "a ragged last block is not masked": (
        FROM_DIAGONAL, {}, "blocks", "(self.near, cutlass.max(own.full, last))", "(self.near, own.end + 1)"
    ),
    "a slope's sign behind the diagonal": (
        FROM_DIAGONAL, {}, "block_softmax", "slope = cutlass.select_(distance > 0, -slope, slope)", "pass"
    ),
    "a slope's sign in front of it": (
        FROM_DIAGONAL, {}, "block_softmax", "slope = cutlass.select_(distance > 0, -slope, slope)", "slope = -slope"
    ),
    "rows lie 4 apart": (FROM_DIAGONAL, {}, "score", "ROWS_APART = 8", "ROWS_APART = 4"),
    "a term of another lane's columns": (
        "ALiBi, causal", {}, "block_softmax", "2 * (cute.arch.lane_idx() % QUAD)", "(cute.arch.lane_idx() % QUAD)"
    ),
    "the constant is left out": (
        CAPPED, {}, "fused", "at[row] = at[row] - cap_constant(run.scale_log2)", "pass"
    ),
    "the constant stays in exponents of large scores": (
        CAPPED, {}, "fused", "term + cap_constant(run.scale_log2)", "term"
    ),
    "large scores are not seen": (
        CAPPED, {}, "fused", "cutlass.select_(served, sums[row], Float32(math.inf))", "sums[row]"
    ),
    "large scores are not seen where the cap is small": (
        "small softcap", {}, "fused", "cutlass.select_(served, sums[row], Float32(math.inf))", "sums[row]"
    ),
    "one of two scores is looked at": (
        "small softcap, few are large", {}, "fused", "max.s32 a, a, b; max.s32 {$w0}, {$r0}, a;",
        "max.s32 {$w0}, {$r0}, a;",
    ),
    "a large sum is trusted": (
        CAPPED, {}, "fused", "cute.arch.fmax(off, -off) < small", "-off < small"
    ),
    "a sum is compared as if nothing were added to the exponents": (
        CAPPED, {}, "fused", "- (added + Float32(middle))", "- Float32(middle)"
    ),
    "no second way behind the first": (
        CAPPED, {}, "block_softmax", "sums, rows, block, run, again=True)", "sums, rows, block, run, again=False)"
    ),
    "a row falls below its shift": (
        CAPPED, {}, "fused", "largest_exponent(scores, row, shift[row], whole",
        "largest_exponent(scores, row, -1e6, whole",
    ),
    "products are not made again": (
        CAPPED, {}, "block_softmax", "issue_again(products, k_stage, scores)\n        bias", "bias"
    ),
    "O is not rescaled": (
        CAPPED, {}, "block_softmax",
        "rescale_rows(rows_and_columns(rows.acc_o), fused.catch_up(self.softmax, self.hook, *given))",
        "fused.catch_up(self.softmax, self.hook, *given)",
    ),
    "a row's sum is not rescaled": (CAPPED, {}, "softmax", "row_sum[row] = row_sum[row] * rescale[row]", "pass"),
    "a block is not done again": (
        "ALiBi, causal", {}, "block_softmax",
        "outgrown = any_of_warpgroup(warpgroup, fresh & self.softmax.outgrown(sums))", "outgrown = False",
    ),
    "the LSE lacks the constant": (CAPPED, {}, "softmax", "log2_sum += constant", "pass"),
    "a sink has the constant": ("softcap, sink", {}, "softmax", "exponent -= constant", "pass"),
    "large scores take the polynomial in place": ("softcap", {}, "score", "(bits & LARGE) != 0", "False"),
    "no cap where a block is done again": (
        "softcap, window", {}, "block_softmax",
        "issue_again(products, k_stage, scores)\n        self.apply_hook(scores, rows, block, run)",
        "issue_again(products, k_stage, scores)",
    ),
    "no mask where a block is done again": (
        "window", {}, "block_softmax",
        "self.mask(scores, rows, block, sides, run)\n        scale", "pass\n        scale",
    ),
    "K is given back before a block is done again": (
        CAPPED, {}, "consume",
        "softmax.exponentiate(products, k_state.index, scores, sums, rows, warpgroup, block, sides, run)\n"
        "        k_pipe.consumer_release(k_state)",
        "k_pipe.consumer_release(k_state)\n"
        "        softmax.exponentiate(products, k_state.index, scores, sums, rows, warpgroup, block, sides, run)",
    ),
    "V is kept": (
        "plain", {}, "consume", "wgmma.wait_group(0)\n        v_pipe.consumer_release(v_state)", "wgmma.wait_group(0)"
    ),
    "V is given back under P V": (
        "plain", {}, "consume", "wgmma.wait_group(0)\n        v_pipe.consumer_release(v_state)",
        "v_pipe.consumer_release(v_state)\n        wgmma.wait_group(0)",
    ),
    "V is read before it is there": (
        "plain", {}, "consume", "v_pipe.consumer_wait(v_state)\n        begin(Phase.ISSUE_PV)\n"
        "        self.probabilities.meet(warpgroup, in_turn=self",
        "begin(Phase.ISSUE_PV)\n        self.probabilities.meet(warpgroup, in_turn=self",
    ),
    "S is read in flight": (
        "plain", {}, "consume", "wgmma.wait_group(1 if config.overlap else 0)", "wgmma.wait_group(2)"
    ),
    "P is written under P V": (
        "plain", {}, "consume",
        "self.end_output(v_pipe, v_state)\n            self.probabilities.keep(products, rows.probabilities, scores)",
        "self.probabilities.keep(products, rows.probabilities, scores)\n            self.end_output(v_pipe, v_state)",
    ),
    "early P is written under P V": (
        FROM_DIAGONAL, {"tile_m": 192}, "consume", "const_expr(config.early_p)", "const_expr(False)"
    ),
    "Q is kept": (
        "plain", {}, "consume", "q_pipe.consumer_release(q_state)\n", "pass\n"
    ),
    "a tile without keys has no Q": (
        "plain", {}, "load", "range_constexpr(config.consumer_warpgroups):",
        "range(config.consumer_warpgroups if end else 0):",
    ),
    "a turn is not awaited": (
        "plain", {}, "consume", "self.turns.wait(warpgroup)\n        self.turns.give(warpgroup)",
        "self.turns.give(warpgroup)",
    ),
    "the last turn is not taken": ("plain", {}, "barriers", "if warpgroup == 0:", "if False:"),
    "a vote and an output share ids": (CAPPED, {"tile_m": 192}, "barriers", "VOTE = 7", "VOTE = 5"),
    "P is written over O": (
        "plain", {"shared_p": True}, "consume", "self.probabilities.claim(warpgroup, is_store_warp)", "pass"
    ),
    "O is written over O": ("plain", {}, "output", "wait_output_free(piece.warpgroup, piece.in_store_warp)", "pass"),
    "O leaves before it is there": (
        "plain", {}, "output", "sync_warpgroup(piece.warpgroup)\n", "pass\n"
    ),
}  # fmt: skip
# The same of packed sequences
PACKED_FAULTS = {
    "slopes of another sequence": (
        FROM_DIAGONAL, {}, "schedule", "self.batch if self.sequence.number is None else self.sequence.number",
        "self.batch",
    ),
    "V is read past its sequence": (
        FROM_DIAGONAL, {}, "kv_source", "cutlass.min(keys - block * self.tile_n, self.tile_n)", "self.tile_n"
    ),
    "K of another sequence": (FROM_DIAGONAL, {}, "load", "sequence.key_row(origin)", "origin"),
    "a tile is read when it may be another": (
        FROM_DIAGONAL, {}, "packed_schedule", "tile, _ = self.receive(queue, state)\n        return tile, None",
        "tile, _ = self.receive(queue, state)\n        queue.pipe.consumer_release(state)\n        return tile, None",
    ),
    "the LSE goes on behind its sequence": (
        FROM_DIAGONAL, {}, "consume", "rows_of(lse, sequence.offset_q, sequence.seqlen_q, mode=2)",
        "rows_of(lse, sequence.offset_q, sequence.seqlen_q + 9, mode=2)",
    ),
    "rows of no sequence have the sink": (
        "softcap, sink", {}, "consume", "cutlass.select_(place.sequence.seqlen_k < 0, Float32(-math.inf), sink)", "sink"
    ),
}  # fmt: skip
LONG = ((140, 100), (65, 130), (200, 65))


def long_problem(kind, seed):
    seqlen_q, seqlen_k = LONG[seed % len(LONG)]
    return problem(kind, seed, seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=1, heads_k=1, group=2, ctas=1)


def reports(made, kind, options, module, text, instead):
    """What the simulation says of a changed kernel and the problems of ``made(kind, seed)``; None where many runs show
    nothing.
    """
    edits = {module: ((text, instead),)}
    for seed in range(24):
        given, _ = made(kind, seed)
        try:
            run_forward(given, seed, edits, **options)
        except (ProtocolError, AssertionError) as error:
            return str(error)
    return None


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_reported(fault):
    assert reports(long_problem, *FAULTS[fault]) is not None


@pytest.mark.parametrize("fault", PACKED_FAULTS)
def test_fault_of_packed_sequences_is_reported(fault):
    assert reports(packed_problem, *PACKED_FAULTS[fault]) is not None

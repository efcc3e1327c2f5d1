"""Protocols of the backward's kernels, executed warp by warp under many orders of events: simulated_dsl.py says how."""

import random
import sys
from dataclasses import replace
from functools import partial

import pytest
from simulated_dsl import ProtocolError
from simulated_launch import Problem, Shape, run_keys, run_queries, run_tail


def of_windows(run, problem, seed, edits=()):
    """A launch for the same sizes with both bounds."""
    chance = random.Random(seed)
    left = chance.choice((0, 1, 30, 64, 100))
    right = problem.shape.seqlen_q - 1 if problem.shape.right is None else problem.shape.right
    run(Problem(replace(problem.shape, right=right, left=left), seed), seed, edits)


def of_chunks(run, problem, seed, edits=()):
    """A launch for the same sizes in chunks, within both bounds."""
    chance = random.Random(seed)
    left = chance.choice((30, problem.shape.seqlen_k))
    right = problem.shape.seqlen_q - 1 if problem.shape.right is None else problem.shape.right
    chunk = chance.choice((16, 50, 64, 150))
    run(Problem(replace(problem.shape, right=right, left=left, chunk=chunk), seed), seed, edits)


LENGTHS = (1, 7, 63, 64, 65, 128, 130, 200, 257)
SEEDS = range(12)
KINDS = {
    "queries": run_queries,
    "queries, V twice": partial(run_queries, head_dim=192),
    "roles": partial(run_keys, head_dims=(256, 256)),
    "early sums": partial(run_keys, head_dims=(128, 128)),
    "early sums, in order": partial(run_keys, head_dims=(128, 128), deterministic=True),
    "late sums": partial(run_keys, head_dims=(64, 64), tile_m=128),
    "late sums, in order": partial(run_keys, head_dims=(64, 64), tile_m=128, deterministic=True),
    "early sums, early release": partial(run_keys, head_dims=(128, 128), early_release=True),
    "late sums, early release": partial(run_keys, head_dims=(64, 64), tile_m=128, early_release=True),
    "late sums, in order, early release": partial(
        run_keys, head_dims=(64, 64), tile_m=128, deterministic=True, early_release=True
    ),
    "roles, split tail": partial(run_tail, head_dims=(256, 256)),
    "early sums, split tail": partial(run_tail, head_dims=(128, 128)),
    "late sums, split tail": partial(run_tail, head_dims=(64, 64), tile_m=128),
    "wide, split tail": partial(run_tail, head_dims=(192, 128)),
    "wide": partial(run_keys, head_dims=(128, 192)),
    "wide, in order": partial(run_keys, head_dims=(128, 192), deterministic=True),
    "wide, dQ in parts": partial(run_keys, head_dims=(192, 128)),
    "wide, dQ in parts, in order": partial(run_keys, head_dims=(192, 128), deterministic=True),
}
# The same with a left bound, where there is a right one
KINDS |= {f"{kind}, window": partial(of_windows, run) for kind, run in KINDS.items() if "tail" not in kind}
# In chunks, a kind of each way to mask
KINDS |= {
    f"{kind}, chunks": partial(of_chunks, KINDS[kind])
    for kind in ("queries", "roles", "early sums, in order", "wide", "late sums")
}
# Faults, each a change in a kernel's text: {name: (kind, module, text, text instead)}
FAULTS = {
    "an arrival is left out": (
        "roles", "backward_roles", "memory.p_pipe.consumer_release(state.p)", "pass"
    ),
    "queries of a tile that nobody sees are loaded": (
        "early sums, window", "backward_load", "self.band.first_head(work, blocks) < last_head if", "True if"
    ),
    "a tile that nobody sees ends a turn": (
        "wide, in order, window", "backward_store", "head = self.band.first_head(work, blocks)", "pass"
    ),
    "a wait is left out": (
        "roles", "backward_roles", "memory.p_pipe.consumer_wait(state.p)", "pass"
    ),
    "a barrier is left half full": (
        "early sums", "backward_consume",
        "sums_barrier(BackwardBarrier.SUMS_FREE, warpgroup, arrive=False)\n        begin(Phase.EXIT)", "pass"
    ),
    "two barriers share ids": (
        "early sums", "barriers", "SUMS_FREE = 5", "SUMS_FREE = 4"
    ),
    "Q is given back under dK": (
        "roles", "backward_roles",
        "self.issue_total(products, total, operand, state.q.index)\n        wgmma.wait_group(0)\n"
        "        release_queries(memory.q_pipe, state.q)",
        "self.issue_total(products, total, operand, state.q.index)\n"
        "        release_queries(memory.q_pipe, state.q)\n        wgmma.wait_group(0)",
    ),
    "a wait for products is too weak": (
        "queries", "query_consume", "wgmma.wait_group(1)", "wgmma.wait_group(2)"
    ),
    "K is given back under dQ": (
        "queries", "query_consume",
        "wgmma.wait_group(1)\n        if const_expr(not first):\n            k_pipe.consumer_release(before)",
        "if const_expr(not first):\n            k_pipe.consumer_release(before)\n        wgmma.wait_group(1)",
    ),
    "V is given back twice": (
        "queries", "query_consume",
        "v_pipe.consumer_release(v_state)",
        "v_pipe.consumer_release(v_state)\n        v_pipe.consumer_release(v_state)",
    ),
    "V is read before it is there": (
        "queries", "query_consume",
        "v_pipe.consumer_wait(v_state)\n        wgmma.fence()", "wgmma.fence()",
    ),
    "a tile that sees no key skips Q": (
        "queries", "query_consume",
        "q_pipe.consumer_wait(q_state)\n            if blocks.end > 0:",
        "if blocks.end > 0:\n                q_pipe.consumer_wait(q_state)",
    ),
    "a slot of the queue is kept": (
        "queries", "schedule", "queue.pipe.consumer_release(state)", "pass"
    ),
    "the producer goes one block too far": (
        "roles", "backward_load",
        "cutlass.range(first, end, unroll=1)", "cutlass.range(first, end + 1, unroll=1)",
    ),
    "dS has two buffers": (
        "early sums", "config", "return 2 if self.wide else 3", "return 2"
    ),
    "dQ does not wait for the other's dS": (
        "late sums", "backward_steps",
        "ds = self.score_gradients(tile, dp, delta)\n        if follows:\n"
        "            self.wait_scores(warpgroup, state.parity ^ 1)",
        "ds = self.score_gradients(tile, dp, delta)",
    ),
    "K is given back under a tile's last dQ": (
        "early sums, early release", "backward_consume",
        "wgmma.wait_group(0)\n        self.release(keys.k_pipe, keys.k_state, keys)",
        "self.release(keys.k_pipe, keys.k_state, keys)\n        wgmma.wait_group(0)",
    ),
    "V is given back after each head": (
        "late sums, early release", "backward_consume", "if keys.last:", "if True:"
    ),
    "K and V of a tile that nobody sees are kept": (
        "late sums, early release, window", "backward_consume",
        "whole = head >= work.last_head if const_expr(config.early_release) else True",
        "whole = not config.early_release",
    ),
    "S does not wait for K": (
        "late sums, early release", "backward_consume", "keys.k_pipe.consumer_wait(keys.k_state)", "pass"
    ),
    "a head's last dQ does not wait for the other's dS": (
        "late sums, early release", "backward_consume",
        "self.wait_scores(warpgroup, state.parity)\n        return", "return",
    ),
    "a bulk copy still reads": (
        "early sums", "backward_store", "cute.arch.cp_async_bulk_wait_group(0, read=True)", "pass"
    ),
    "dQ's memory is not awaited": (
        "early sums", "backward_consume",
        "sums_barrier(BackwardBarrier.SUMS_FREE, warpgroup, arrive=False)\n        write_piece", "write_piece",
    ),
    "a turn ends before the sum is there": (
        "early sums, in order", "backward_store",
        "cute.arch.cp_async_bulk_wait_group(0, read=False)\n        give_turn", "give_turn",
    ),
    "a turn is not awaited": (
        "early sums, in order", "backward_store", "while taken != expected:", "while False:"
    ),
    "a head's last turn does not end": (
        "early sums, in order", "backward_store", "self.finish_turn(turns, end - 1, warpgroup)", "pass"
    ),
    "the first tiles are left out": (
        "wide, in order", "backward_work", "self.take(queue, Int32(0))", "self.take(queue, Int32(2))"
    ),
    "a slot with a tile's fields is kept": (
        "wide", "backward_work", "queue.pipe.consumer_release(state)", "pass"
    ),
    "a part ends for the producer where its tile does": (
        "roles, split tail", "backward_load",
        "head += 1\n                first, *_, end = work.blocks_of(head, blocks)",
        "head += 1\n                first, *_, end = blocks",
    ),
    "dQ of a whole head is awaited in a part": (
        "wide, split tail", "backward_store", "first, *_, end = work.blocks_of(head, blocks)", "first, *_, end = blocks"
    ),
    "the last part is left out": (
        "early sums, split tail", "backward_work",
        "end = run.whole_tiles + (end - run.whole_tiles) * run.parts",
        "end = run.whole_tiles + (end - run.whole_tiles) * run.parts - 1",
    ),
    "two parts leave in one place": (
        "late sums, split tail", "backward_work", "cutlass.max(slot, -1)", "cutlass.max(slot, -1) // 2"
    ),
    "a part of dQ is staged over the one before": (
        "wide, dQ in parts", "backward_wide",
        "sums_barrier(BackwardBarrier.SUMS_FULL, warpgroup, arrive=True)",
        "if part == 0:\n                sums_barrier(BackwardBarrier.SUMS_FULL, warpgroup, arrive=True)",
    ),
    "dS is said to be read too early": (
        "wide", "backward_wide",
        "wgmma.wait_group(1)\n        self.arrive(warpgroup, state.parity)",
        "self.arrive(warpgroup, state.parity)\n        wgmma.wait_group(1)",
    ),
}  # fmt: skip


def problem(seed):
    """Lengths, heads and bounds by chance."""
    chance = random.Random(seed)
    group = chance.choice((1, 1, 2, 3))
    shape = Shape(
        batch=chance.choice((1, 1, 2)),
        seqlen_q=chance.choice(LENGTHS),
        seqlen_k=chance.choice(LENGTHS),
        heads_k=chance.choice((1, 2)),
        group=group,
        right=chance.choice((None, None, 0, 0, 1, 64)),
        ctas=chance.choice((1, 2)),
        section=chance.choice((1, 2)),
        split=chance.randint(1, group),
    )
    return Problem(shape, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_whatever_the_order(kind, seed):
    KINDS[kind](problem(seed), seed)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "right"), [(257, 200, 0), (200, 257, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_where_a_diagonal_crosses_tiles(kind, seqlen_q, seqlen_k, right):
    """More than a head's first step needs a mask, also where a step has as many queries as a tile has keys. No seed
    above has that.
    """
    shape = Shape(1, seqlen_q, seqlen_k, heads_k=1, group=1, right=right, ctas=1, section=1)
    KINDS[kind](Problem(shape, 0), 0)


def reports(kind, edits):
    """What the simulation says of changed kernels; None where many runs show nothing."""
    for seed in range(40):
        # Many steps; or queries that see no key
        keys, ctas = (257, 65, 700)[seed % (3 if "window" in kind else 2)], 2 if "in order" in kind else 1
        shape = Shape(1, 257, keys, heads_k=1, group=2, right=0, ctas=ctas, section=1)
        try:
            KINDS[kind](Problem(shape, seed), seed, edits)
        except (ProtocolError, AssertionError) as error:
            return str(error)
    return None


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_reported(fault):
    kind, module, text, instead = FAULTS[fault]
    assert reports(kind, {module: ((text, instead),)}) is not None


def test_a_seed_fixes_the_order():
    kind, module, text, instead = FAULTS["K is given back under dQ"]
    first, second = (reports(kind, {module: ((text, instead),)}) for _ in range(2))
    assert first == second


def test_real_modules_stay():
    def found():
        return {name: id(module) for name, module in sys.modules.items() if "cutlass" in name or "kernels" in name}

    before = found()
    for run in KINDS.values():
        run(problem(0), 0)
    assert found() == before

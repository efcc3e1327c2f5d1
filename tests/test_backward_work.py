"""Which steps of which K/V tiles a cut tail's pieces of work are: the kernels' own arithmetic, compiled for the CPU."""

import itertools
from collections import defaultdict
from typing import NamedTuple

import pytest

import hopper_fa3.compile  # noqa: F401  chooses the DSL's target, which cutlass takes when it is first imported

# isort: split
import cutlass
from test_backward_tail_gpu import DIMS, FEW_SMS, TAILS, on_few_sms, with_tail
from test_blocks import evaluated

from hopper_fa3.kernels.args import BackwardRunTime
from hopper_fa3.kernels.backward_work import PartWork, WorkSchedule

TILE, STEP = 8, 4  # keys, queries


class Deal(NamedTuple):
    blocks: int  # of queries
    n_blocks: int
    group: int
    heads_k: int
    whole_tiles: int
    parts: int

    @property
    def tiles(self):
        return self.n_blocks * self.heads_k

    @property
    def steps(self):
        return self.blocks * self.group

    @property
    def indices(self):
        return self.whole_tiles + (self.tiles - self.whole_tiles) * self.parts


def deals():
    """Tails of every length in every number of parts."""
    for blocks, n_blocks, group, heads_k in itertools.product((1, 2, 3, 5), (1, 3), (1, 2, 3), (1, 2)):
        for whole_tiles in range(n_blocks * heads_k):
            for parts in range(1, min(blocks * group, 7) + 1):
                yield Deal(blocks, n_blocks, group, heads_k, whole_tiles, parts)


def decoded():
    """{deal: [(index, PartWork)]}, with two indices past the last."""
    schedule = WorkSchedule(TILE, True, False, False, True, STEP)

    def decode(index, blocks, n_blocks, group, heads_k, whole_tiles, parts):
        one = cutlass.Int32(1)
        # The last tile and block are not whole
        lengths = blocks * STEP - 1, n_blocks * TILE - 1, group * heads_k, heads_k, one
        return schedule.decode(
            index, lengths, BackwardRunTime(None, None, None, None, one, heads_k, whole_tiles, parts, None)
        )

    asked = [(index, *deal) for deal in deals() for index in range(deal.indices + 2)]
    found = defaultdict(list)
    for (index, *deal), work in zip(asked, evaluated(decode, asked, len(PartWork._fields)), strict=True):
        found[Deal(*deal)].append((index, PartWork(*work)))
    return found


def cut(head, work, blocks):
    """PartWork.blocks_of, in Python: a warp's shuffles do not run on the CPU."""
    first = work.first_block if head == work.head else 0
    return first, work.end_block if head == work.last_head - 1 else blocks


def test_every_step_is_taken_once():
    for deal, found in decoded().items():
        taken, slots = defaultdict(list), []
        for index, work in found:
            assert (work.n_block < 0) == (index >= deal.indices), deal
            if work.n_block < 0:
                continue
            steps = [
                (head, block)
                for head in range(work.head, work.last_head)
                for block in range(*cut(head, work, deal.blocks))
            ]
            # Sums begin with a head's first step: none is empty
            assert {head for head, _ in steps} == {*range(work.head, work.last_head)} != set(), deal
            taken[work.batch, work.head_k, work.n_block] += steps
            if index < deal.whole_tiles:
                assert (len(steps), work.slot) == (deal.steps, -1), deal
            else:
                assert len(steps) - deal.steps // deal.parts in (0, 1), deal
                slots.append(work.slot)
        assert slots == [*range(deal.indices - deal.whole_tiles)], deal
        assert len(taken) == deal.tiles
        for (_, head_k, _), steps in taken.items():
            # In order: a tile's parts are added as they come
            heads = range(head_k * deal.group, (head_k + 1) * deal.group)
            assert steps == [*itertools.product(heads, range(deal.blocks))], deal


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_cases_for_the_gpu_have_a_tail(dims):
    """On an H200; with_tail itself says what it must be."""
    for tail in TAILS:
        with_tail(*dims, *tail, 132)
    for sms in FEW_SMS:
        on_few_sms(*dims, sms)

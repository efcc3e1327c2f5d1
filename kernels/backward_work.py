"""How the warps of the backward's main kernel learn what to compute next.

The producer warp takes a tile's index from the schedule and decodes it for all: that takes seven divisions, a hundred
clocks each, and this warp has time. The others find the result in shared memory.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .args import BackwardRunTime
from .schedule import Schedule, TileQueue


class Work(NamedTuple):
    """A K/V tile, and query heads that read it."""

    n_block: Int32  # the tile; -1: there is no more work
    head_k: Int32
    part: Int32  # counted over the K/V heads, each of which has as many
    batch: Int32
    head: Int32  # the first query head
    last_head: Int32  # the first one that is not among them


FIELDS = len(Work._fields)


@dataclass(frozen=True)
class WorkSchedule(Schedule):
    """K/V tiles, all from the counter: also equal ones, because CTAs are not equally fast. Where one tile waits for
    another (``ordered``), each CTA's first comes from there as well: then whoever holds the lowest number is running
    and waits for nobody, however many CTAs run.
    """

    ordered: bool

    @cute.jit
    def hand_out(
        self,
        queue: TileQueue,
        state,
        lengths: tuple,
        run: BackwardRunTime,
        first: cutlass.Constexpr[bool] = False,
    ):
        """Producer warp: ``(work, state)`` after telling the other warps; ``first``: this CTA's."""
        queue.pipe.producer_acquire(state)
        index = cute.arch.block_idx()[0]
        if const_expr(self.ordered):
            index = self.take(queue, Int32(0))
        elif const_expr(not first):
            index = self.take(queue, cute.arch.grid_dim()[0])
        work = self.decode(index, lengths, run)
        if cute.arch.lane_idx() == 0:
            for field in cutlass.range_constexpr(FIELDS):
                queue.slots[field, state.index] = work[field]
            queue.pipe.producer_commit(state)
        state.advance()
        return work, state

    @cute.jit
    def decode(self, index: Int32, lengths: tuple, run: BackwardRunTime) -> Work:
        """What an index means. ``lengths``: (seqlen_q, seqlen_k, heads, heads_k, batch)."""
        _, seqlen_k, heads, heads_k, batch = lengths
        tiles = self.count(seqlen_k, run.head_parts, batch)
        # Past the last tile there may be a division by 0
        tile = cutlass.min(index, tiles - 1)
        n_block, part, batch_index = self.coordinates(tile, seqlen_k, run.head_parts, batch, run.section)
        n_block = cutlass.select_(index < tiles, n_block, Int32(-1))
        head_k, head, last_head = run.heads_of(part, heads, heads_k)
        return Work(n_block, head_k, part, batch_index, head, last_head)

    @cute.jit
    def receive_work(self, queue: TileQueue, state) -> Work:
        """Another warp: the next tile's. It stays in shared memory until it is given back."""
        queue.pipe.consumer_wait(state)
        return self.read_work(queue, state)

    @cute.jit
    def read_work(self, queue: TileQueue, state) -> Work:
        """The same again: cheaper than registers that hold all of it from a tile's first step to its last."""
        return Work(*(cute.arch.make_warp_uniform(queue.slots[field, state.index]) for field in range(FIELDS)))

    @cute.jit
    def give_back(self, queue: TileQueue, state):
        """``state`` of the next tile. Every lane has read, and every lane gives back: racecheck knows no other way."""
        queue.pipe.consumer_release(state)
        state.advance()
        return state

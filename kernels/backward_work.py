"""How the warps of the backward's main kernel learn what to compute next.

The producer warp takes a tile's index from the schedule and decodes it for all: that takes seven divisions, a hundred
clocks each, and this warp has time. The others find the result in shared memory.

A launch of equal tiles ends when the last of them do, however few SMs these occupy. Where the tail is split
(``BackwardConfig.split_tail``) a step is a block of queries of one query head, a tile's steps are those of one head
after the other, and each of the launch's last tiles is cut into ``BackwardRunTime.parts`` of as many steps, give or
take one. Indices below ``whole_tiles`` are tiles; the next ones are parts, tile by tile. dK and dV of a part leave as
float32, and a kernel behind adds those of a tile in order.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .args import BackwardRunTime
from .blocks import QueryBlocks
from .schedule import Schedule, TileQueue


def lengths_of_tensors(work, of_tensors: tuple):
    """(seqlen_q, seqlen_k) of a piece of ``work``, given those of the tensors."""
    return of_tensors[:2]


def whole(work, tensor: cute.Tensor):
    """What belongs to the work's sequence: of (length, columns, heads, batch) beside K, or of (lines, ..), one head's
    part of the workspace.
    """
    return tensor


class Work(NamedTuple):
    """A K/V tile, and query heads that read it."""

    n_block: Int32  # the tile; -1: there is no more work
    head_k: Int32
    part: Int32  # counted over the K/V heads, each of which has as many
    batch: Int32
    head: Int32  # the first query head
    last_head: Int32  # the first one that is not among them

    lengths = lengths_of_tensors
    keys_of = lines_of = whole
    offset_q = offset_k = first_line = 0

    def blocks_of(self, head: Int32, blocks: tuple):
        """``blocks``, of a whole head, as far as they belong to the work."""
        return blocks


class PartWork(NamedTuple):
    """The same where the tail is split: some steps of a tile."""

    n_block: Int32
    head_k: Int32
    part: Int32
    batch: Int32
    head: Int32
    last_head: Int32
    first_block: Int32  # of the first query head
    end_block: Int32  # of the last query head
    slot: Int32  # where this part's dK and dV lie; -1: it is a whole tile

    lengths = lengths_of_tensors
    keys_of = lines_of = whole
    offset_q = offset_k = first_line = 0

    @cute.jit
    def blocks_of(self, head: Int32, blocks: tuple):
        """``blocks`` of a head, which begin at 0 and have no left bound, cut to the work."""
        _, unmasked, _, end = blocks
        first = cutlass.select_(head == self.head, self.first_block, Int32(0))
        end = cutlass.select_(head == self.last_head - 1, self.end_block, end)
        found = first, cutlass.min(unmasked, end), end
        # Through shuffles: else the compiler computes them again in every step
        first, unmasked, end = (cute.arch.make_warp_uniform(each) for each in found)
        return QueryBlocks(first, unmasked, end, end)


class Part(NamedTuple):
    """Steps [first, end) of a tile."""

    tile: Int32
    first: Int32
    end: Int32
    slot: Int32  # PartWork.slot


def kind_of_work(split_tail: bool):
    return PartWork if split_tail else Work


def count_fields(split_tail: bool):
    """Numbers that tell a warp of a piece of work."""
    return len(kind_of_work(split_tail)._fields)


@cute.jit
def part_of(index: Int32, steps: Int32, run: BackwardRunTime) -> Part:
    """What an index means. ``steps``: of a tile."""
    slot = index - run.whole_tiles
    of_tail = cutlass.max(slot, 0) // run.parts
    part = slot - of_tail * run.parts
    whole = slot < 0
    first = cutlass.select_(whole, Int32(0), part * steps // run.parts)
    end = cutlass.select_(whole, steps, (part + 1) * steps // run.parts)
    tile = cutlass.select_(whole, index, run.whole_tiles + of_tail)
    return Part(tile, first, end, cutlass.max(slot, -1))


@cute.jit
def heads_and_blocks(first: Int32, end: Int32, blocks: Int32):
    """``(first head, end of heads, first block, end of blocks)`` of steps [first, end), heads counted from the tile's
    first one, as PartWork names them. ``blocks``: of a head.
    """
    first_head = first // blocks
    last_head = (end - 1) // blocks
    return first_head, last_head + 1, first - first_head * blocks, end - last_head * blocks


@dataclass(frozen=True)
class WorkSchedule(Schedule):
    """K/V tiles, all from the counter: also equal ones, because CTAs are not equally fast. Where one tile waits for
    another (``ordered``), each CTA's first comes from there as well: then whoever holds the lowest number is running
    and waits for nobody, however many CTAs run.
    """

    ordered: bool
    split_tail: bool
    step: int  # queries

    @property
    def fields(self):
        return count_fields(self.split_tail)

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
            for field in cutlass.range_constexpr(count_fields(self.split_tail)):
                queue.slots[field, state.index] = work[field]
            queue.pipe.producer_commit(state)
        state.advance()
        return work, state

    @cute.jit
    def decode(self, index: Int32, lengths: tuple, run: BackwardRunTime):
        """What an index means: Work or PartWork. ``lengths``: (seqlen_q, seqlen_k, heads, heads_k, batch)."""
        seqlen_q, seqlen_k, heads, heads_k, batch = lengths
        end = self.count(seqlen_k, run.head_parts, batch)
        if const_expr(self.split_tail):
            end = run.whole_tiles + (end - run.whole_tiles) * run.parts
        # Past the last tile there may be a division by 0
        tile = cutlass.min(index, end - 1)
        found = None
        if const_expr(self.split_tail):
            blocks = (seqlen_q + self.step - 1) // self.step
            found = part_of(tile, blocks * (heads // heads_k), run)
            tile = found.tile
        n_block, part, batch_index = self.coordinates(tile, seqlen_k, run.head_parts, batch, run.section)
        n_block = cutlass.select_(index < end, n_block, Int32(-1))
        head_k, head, last_head = run.heads_of(part, heads, heads_k)
        work = Work(n_block, head_k, part, batch_index, head, last_head)
        if const_expr(self.split_tail):
            first_head, end_head, first_block, end_block = heads_and_blocks(found.first, found.end, blocks)
            heads_within = head + first_head, head + end_head
            work = PartWork(*work[:4], *heads_within, first_block, end_block, found.slot)
        return work

    @cute.jit
    def receive_work(self, queue: TileQueue, state):
        """Another warp: the next tile's. It stays in shared memory until it is given back."""
        queue.pipe.consumer_wait(state)
        return self.read_work(queue, state)

    @cute.jit
    def read_work(self, queue: TileQueue, state):
        """The same again: cheaper than registers that hold all of it from a tile's first step to its last."""
        kind = kind_of_work(self.split_tail)
        fields = (queue.slots[field, state.index] for field in range(len(kind._fields)))
        return kind(*(cute.arch.make_warp_uniform(field) for field in fields))

    def batch_entry(self, queue: TileQueue, state, work: NamedTuple):
        """As in schedule.Place, of ``work``, which has not been given back."""
        return work.batch

    def work_again(self, queue: TileQueue, state, work: NamedTuple):
        """``work`` before it is given back, from registers."""
        return work

    @cute.jit
    def give_back(self, queue: TileQueue, state):
        """``state`` of the next tile. Every lane has read, and every lane gives back: racecheck knows no other way."""
        queue.pipe.consumer_release(state)
        state.advance()
        return state

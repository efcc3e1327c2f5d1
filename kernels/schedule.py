"""Which tiles a CTA computes, of Q or (backward) of K and V, and in which order."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline

from .sequence import Sequence

SLOTS = 2  # tile indices under way from the producer warp to the consumers: it runs at most one tile ahead


class TileQueue(NamedTuple):
    """How the producer warp tells the consumers of its CTA which tile is next. Not used by a static schedule."""

    # Global memory: (tiles handed out, but for each CTA's first where that is dealt; CTAs that are done); 0 between
    # launches
    counter: cute.Tensor
    slots: cute.Tensor  # shared memory
    pipe: object
    table: cute.Tensor | None = None  # of packed sequences: tile_table.py


class Place(NamedTuple):
    """Which tile it is."""

    block: Int32  # among those of its sequence
    head: Int32
    batch: Int32
    sequence: Sequence
    first_line: Int32 | None = None  # of a head's row statistics, the sequence's first

    @property
    def batch_entry(self):
        """As slopes and hooks count them: a packed sequence is one."""
        return self.batch if self.sequence.number is None else self.sequence.number


@cute.jit
def make_tile_queue(
    storage,
    counter: cute.Tensor,
    dynamic: cutlass.Constexpr[bool],
    readers: cutlass.Constexpr[int],
    slots: cutlass.Constexpr = SLOTS,
    table: cute.Tensor | None = None,
):
    """Slots and barriers through which the producer warp tells all that it says to the ``readers``: threads that give
    each slot back. ``slots``: shape of the slots.
    """
    if const_expr(not dynamic):
        return TileQueue(None, None, None)
    group = partial(pipeline.CooperativeGroup, pipeline.Agent.Thread)
    pipe = pipeline.PipelineAsync.create(
        barrier_storage=storage.queue_barriers.data_ptr(),
        num_stages=SLOTS,
        producer_group=group(1),
        consumer_group=group(readers),
        defer_sync=True,
    )
    return TileQueue(counter, storage.queue_slots.get_tensor(cute.make_layout(slots)), pipe, table)


def slots_shape(fields: int | None):
    """Shape of the slots for a schedule's ``fields``."""
    return SLOTS if fields is None else (fields, SLOTS)


@dataclass(frozen=True)
class Schedule:
    """Persistent CTAs, one an SM.

    Heads come in sections of which what their tiles share fits in L2. Tiles are dealt in turn, or (``dynamic``) a CTA
    fetches its next one from a global counter. Where a right bound makes them unequal, a head's longest come first: of
    Q the last ones (``descending``).
    """

    tile: int  # rows
    dynamic: bool
    descending: bool  # a head's last tile comes first

    fields = None  # numbers that tell a consumer of a tile: one, the index

    def readers(self, warps: int):
        """Threads of so many warps that give a slot of the queue back."""
        return warps

    def begin(self, queue: TileQueue, state, lengths: tuple, run):
        """Producer warp: ``(first tile, end, state)``. Tiles of this schedule are indices below ``end``, which every
        warp decodes. ``lengths``: (seqlen_q, seqlen_k, heads, batch).
        """
        seqlen_q, _, heads, batch = lengths
        return self.first(), self.count(seqlen_q, heads, batch), state

    def begin_receiving(self, queue: TileQueue, state, lengths: tuple):
        """Consumer warp: likewise ``(first tile, end)``."""
        seqlen_q, _, heads, batch = lengths
        return self.first(), self.count(seqlen_q, heads, batch)

    def exists(self, tile: Int32, end: Int32):
        return tile < end

    def place(self, tile: Int32, lengths: tuple, run) -> Place:
        """What a tile is."""
        seqlen_q, seqlen_k, heads, batch = lengths
        return Place(*self.coordinates(tile, seqlen_q, heads, batch, run.section), Sequence(seqlen_q, seqlen_k))

    def place_again(self, queue: TileQueue, state, place: Place) -> Place:
        """Consumer warp, at a tile's end: ``place``, which stayed in registers."""
        return place

    def end_receiving(self, queue: TileQueue, state):
        """Consumer warp, after its last tile: every slot has been given back."""

    @cute.jit
    def first(self) -> Int32:
        return cute.arch.block_idx()[0]

    @cute.jit
    def blocks_of_head(self, length: Int32) -> Int32:
        """Tiles of one head."""
        return (length + self.tile - 1) // self.tile

    @cute.jit
    def count(self, length: Int32, heads: Int32, batch: Int32) -> Int32:
        """Number of tiles; indices from here on mean that there is no more work."""
        return self.blocks_of_head(length) * heads * batch

    @cute.jit
    def coordinates(self, index: Int32, length: Int32, heads: Int32, batch: Int32, section: Int32):
        """``(block, head, batch_index)`` of a tile."""
        blocks = self.blocks_of_head(length)
        section_index = index // (section * blocks)
        within = index - section_index * section * blocks
        first_head = section_index * section
        in_section = cutlass.min(section, heads * batch - first_head)
        block = within // in_section
        head_of_all = first_head + within - block * in_section
        if const_expr(self.descending):
            block = blocks - 1 - block
        batch_index = head_of_all // heads
        return block, head_of_all - batch_index * heads, batch_index

    @cute.jit
    def fetch(self, queue: TileQueue, state, index: Int32, lengths: tuple, run):
        """Producer warp: ``(next index, state)`` after handing the next index to the consumers."""
        ctas = cute.arch.grid_dim()[0]
        following = index + ctas
        if const_expr(self.dynamic):
            queue.pipe.producer_acquire(state)
            following = self.take(queue, ctas)
            if cute.arch.lane_idx() == 0:
                queue.slots[state.index] = following
                queue.pipe.producer_commit(state)
            state.advance()
        return following, state

    @cute.jit
    def take(self, queue: TileQueue, dealt: Int32) -> Int32:
        """Producer warp: an index from the counter, behind those that are ``dealt``."""
        index = Int32(0)
        if cute.arch.lane_idx() == 0:
            index = dealt + cute.arch.atomic_add(queue.counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(index, 0)

    @cute.jit
    def receive(self, queue: TileQueue, state, index: Int32):
        """Consumer warp: ``(next index, state)``."""
        following = index + cute.arch.grid_dim()[0]
        if const_expr(self.dynamic):
            queue.pipe.consumer_wait(state)
            # The lane that reads is the one that gives the slot back
            if cute.arch.lane_idx() == 0:
                following = queue.slots[state.index]
                queue.pipe.consumer_release(state)
            following = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(following, 0))
            state.advance()
        return following, state

    @cute.jit
    def finish(self, queue: TileQueue):
        """Producer warp, after its last fetch: the last CTA leaves the counter at 0 for the next launch."""
        if const_expr(self.dynamic):
            if cute.arch.lane_idx() == 0:
                done = cute.arch.atomic_add(queue.counter.iterator + 1, Int32(1), sem="relaxed", scope="gpu")
                if done == cute.arch.grid_dim()[0] - 1:
                    queue.counter[0] = Int32(0)
                    queue.counter[1] = Int32(0)

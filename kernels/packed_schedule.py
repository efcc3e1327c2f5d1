"""Tiles of packed sequences: in the order of a table (tile_table.py), the heads of a section side by side, all from the
counter.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .args import BackwardRunTime
from .config import WARP_THREADS
from .schedule import Place, Schedule, TileQueue
from .sequence import Sequence, behind, rows_of
from .table_size import HEADER
from .tile_table import entry_words


class PackedTile(NamedTuple):
    """What the producer warp tells the others of a tile of Q."""

    block: Int32  # -1: there are no more tiles
    head: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    offset_q: Int32
    offset_k: Int32
    first_line: Int32  # Place.first_line; not read where there are no row statistics
    number: Int32 | None = None  # Sequence.number


class PackedWork(NamedTuple):
    """The same of a tile of K and V, and query heads that read it: see backward_work.Work."""

    n_block: Int32
    head_k: Int32
    head: Int32
    last_head: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    offset_q: Int32
    offset_k: Int32
    first_line: Int32
    number: Int32 | None = None  # as in PackedTile

    batch = 0

    def lengths(self, of_tensors: tuple):
        """(seqlen_q, seqlen_k) of the work's sequence."""
        return self.seqlen_q, self.seqlen_k

    def keys_of(self, tensor: cute.Tensor):
        """Its rows of (total, columns, heads, 1), beside K's."""
        return rows_of(tensor, self.offset_k, self.seqlen_k)

    def lines_of(self, tensor: cute.Tensor):
        """Its lines of (lines, ..), one head's part of the workspace."""
        return behind(tensor, self.first_line)

    def blocks_of(self, head: Int32, blocks: tuple):
        return blocks


@cute.jit
def entry_of(table: cute.Tensor, index: Int32, words: cutlass.Constexpr[int]):
    """The first ``words`` words of an entry; of any one for an index without."""
    line = cutlass.min(cutlass.max(index, 0) + HEADER, table.shape[0] - 1)
    return tuple(table[line, word] for word in range(words))


@dataclass(frozen=True)
class TableSchedule(Schedule):
    """What tiles of Q and work on K and V have in common. The entries are the schedule's blocks: of a section of heads
    the first entry of each head, then the second one.
    """

    tile: int = 1
    dynamic: bool = True
    descending: bool = False
    numbered: bool = False  # the table says which sequence it is

    kind = None  # PackedTile or PackedWork

    @property
    def fields(self):
        return len(self.kind._fields) - (not self.numbered)

    def readers(self, warps: int):
        return warps * WARP_THREADS

    @cute.jit
    def entry(self, queue: TileQueue, index: Int32, heads: Int32):
        """``(entry, head)`` of an index; past the last tile the entry's block is -1."""
        entries, section = queue.table[0, 0], queue.table[0, 1]
        tiles = entries * heads
        # Past the last tile there would be a division by 0
        place, head, _ = self.coordinates(cutlass.min(index, tiles - 1), entries, heads, Int32(1), section)
        block, *others = entry_of(queue.table, place, entry_words(self.numbered))
        return (cutlass.select_(index < tiles, block, Int32(-1)), *others), head

    @cute.jit
    def tell(self, queue: TileQueue, state, tile: NamedTuple):
        """Producer warp: hand a tile, which every lane knows, to the other warps; the next state."""
        if cute.arch.lane_idx() == 0:
            for field in cutlass.range_constexpr(self.fields):
                queue.slots[field, state.index] = tile[field]
            queue.pipe.producer_commit(state)
        state.advance()
        return state

    @cute.jit
    def read(self, queue: TileQueue, state):
        """Another warp: a tile that has been told and not been given back."""
        return self.kind(
            *(cute.arch.make_warp_uniform(queue.slots[field, state.index]) for field in range(self.fields))
        )

    @cute.jit
    def receive(self, queue: TileQueue, state, tile=None):
        """Another warp: ``(next tile, state)``, after giving ``tile`` back where there is one. Every lane has read, and
        every lane gives back: racecheck knows no other way.
        """
        if const_expr(tile is not None):
            queue.pipe.consumer_release(state)
            state.advance()
        queue.pipe.consumer_wait(state)
        return self.read(queue, state), state


@dataclass(frozen=True)
class PackedSchedule(TableSchedule):
    """Tiles of Q. See Schedule for what the methods promise; here a tile is a PackedTile, and there is no ``end``."""

    kind = PackedTile

    def begin(self, queue: TileQueue, state, lengths: tuple, run):
        tile, state = self.hand_out(queue, state, lengths, run, first=True)
        return tile, None, state

    def begin_receiving(self, queue: TileQueue, state, lengths: tuple):
        tile, _ = self.receive(queue, state)
        return tile, None

    def exists(self, tile: PackedTile, end: None):
        return tile.block >= 0

    def place(self, tile: PackedTile, lengths: tuple, run) -> Place:
        return Place(tile.block, tile.head, 0, Sequence(*tile[2:6], tile.number), tile.first_line)

    def place_again(self, queue: TileQueue, state, place: Place) -> Place:
        """From shared memory: no registers hold it meanwhile."""
        return self.place(self.read(queue, state), None, None)

    def end_receiving(self, queue: TileQueue, state):
        queue.pipe.consumer_release(state)

    def fetch(self, queue: TileQueue, state, tile: PackedTile, lengths: tuple, run):
        return self.hand_out(queue, state, lengths, run)

    @cute.jit
    def hand_out(self, queue: TileQueue, state, lengths: tuple, run, first: cutlass.Constexpr[bool] = False):
        """Producer warp: ``(tile, state)`` after telling the other warps; ``first``: this CTA's."""
        queue.pipe.producer_acquire(state)
        index = self.first()
        if const_expr(not first):
            index = self.take(queue, cute.arch.grid_dim()[0])
        _, _, heads, _ = lengths
        (block, *others), head = self.entry(queue, index, heads)
        tile = PackedTile(block, head, *others)
        return tile, self.tell(queue, state, tile)


@dataclass(frozen=True)
class PackedWorkSchedule(TableSchedule):
    """Tiles of K and V; as backward_work.WorkSchedule."""

    ordered: bool = False
    reread: bool = False  # for each head, from shared memory: where store warps have too few registers to keep it

    kind = PackedWork

    @cute.jit
    def hand_out(
        self,
        queue: TileQueue,
        state,
        lengths: tuple,
        run: BackwardRunTime,
        first: cutlass.Constexpr[bool] = False,
    ):
        queue.pipe.producer_acquire(state)
        index = self.first()
        if const_expr(self.ordered):
            index = self.take(queue, Int32(0))
        elif const_expr(not first):
            index = self.take(queue, cute.arch.grid_dim()[0])
        _, _, heads, heads_k, _ = lengths
        (block, *others), head_k = self.entry(queue, index, heads_k)
        _, head, last_head = run.heads_of(head_k, heads, heads_k)
        work = PackedWork(block, head_k, head, last_head, *others)
        return work, self.tell(queue, state, work)

    def receive_work(self, queue: TileQueue, state):
        work, _ = self.receive(queue, state)
        return work

    def read_work(self, queue: TileQueue, state):
        return self.read(queue, state)

    def batch_entry(self, queue: TileQueue, state, work: PackedWork):
        """From shared memory: no registers hold it. Any where nobody needs it."""
        return cute.arch.make_warp_uniform(queue.slots[self.fields - 1, state.index]) if self.numbered else 0

    def work_again(self, queue: TileQueue, state, work: PackedWork):
        return self.read(queue, state) if self.reread else work

    @cute.jit
    def give_back(self, queue: TileQueue, state):
        queue.pipe.consumer_release(state)
        state.advance()
        return state

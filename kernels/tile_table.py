"""Tiles of packed sequences, listed on the device: only there is it known where the sequences begin and end.

One CTA a table lists the tiles of all sequences, the longest first, by a counting sort: tiles are counted by the steps
that they take, then written where those that take more steps end. The rows between and behind the sequences' used ones
are listed like sequences that see nothing, so that their results are written as well.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.memory import SmemAllocator

from .blocks import Band
from .config import WARP_THREADS
from .table_size import HEADER

THREADS = 1024  # of a CTA, and ranges of rows that it holds at once
# Counts of steps that count as one: equal ones below 32, above those that agree in this many leading bits, which is 3 %
LEADING_BITS = 5
BUCKETS = 1024  # of 31 powers of two, 32 each
MOST_STEPS = 2**30
MANTISSA_BITS, EXPONENT_BIAS = 23, 127  # of a float


class Entry(IntEnum):
    """What a line of a table says of a tile."""

    BLOCK = 0  # among the tiles of its sequence
    SEQLEN_Q = 1
    SEQLEN_K = 2
    OFFSET_Q = 3  # row at which the sequence begins
    OFFSET_K = 4
    FIRST_LINE = 5  # of the workspace: BackwardConfig.tile_m queries a line, each sequence begins a new one
    NUMBER = 6  # of the sequence; of rows that none uses any


def entry_words(numbered: bool):
    """Words of a line that say something; ``numbered``: also the sequence's number."""
    return len(Entry) - (not numbered)


class Side(NamedTuple):
    """Where the sequences are among the rows of q, or of k."""

    ends: cute.Tensor  # (batch + 1): cu_seqlens
    used: cute.Tensor | None  # (batch): rows that each one uses; None: all
    total: Int32


class Shared(NamedTuple):
    """Shared memory of a CTA."""

    last: cute.Tensor  # of each range of rows: tiles up to its last one
    lines: cute.Tensor  # (Entry, range): what the range's entries have in common
    places: cute.Tensor  # of each range: where its entries go, if they stand together
    buckets: cute.Tensor
    sums: cute.Tensor  # of each warp


@dataclass(frozen=True)
class TileTable:
    """``keys``: tiles of K and V, else of Q. ``step``: rows of the others that a step takes. ``together``: a sequence's
    tiles stand one behind the other, in the order of their turns (``descending``: the last tile first).
    """

    tile: int
    step: int
    keys: bool
    band: Band  # of the tiles' kernel
    line_rows: int = 0  # queries of a line of the workspace; 0: there is none
    together: bool = False
    descending: bool = False
    numbered: bool = False
    marked: bool = False  # of Q: rows that no sequence uses have -1 keys, those of a sequence without keys 0
    threads: int = THREADS

    @cute.jit
    def run(self, queries: Side, keys: Side, table: cute.Tensor, run):
        """All threads of a CTA. table: (table_lines, ENTRY_WORDS); run: the band's bounds."""
        shared = self.shared()
        thread = cute.arch.thread_idx()[0]
        for first in cutlass.range_constexpr(0, BUCKETS, self.threads):
            shared.buckets[first + thread] = Int32(0)
        ranges = self.count_ranges(queries, keys)
        for first in cutlass.range(0, ranges, self.threads, unroll=1):
            self.read_ranges(shared, first, ranges, queries, keys)
            self.visit(shared, None, run)
        self.bucket_ends(shared, table)
        for first in cutlass.range(0, ranges, self.threads, unroll=1):
            if ranges > self.threads:
                self.read_ranges(shared, first, ranges, queries, keys)
            self.visit(shared, table, run)

    def shared(self) -> Shared:
        ranges, warps, words = self.threads, self.threads // WARP_THREADS, entry_words(self.numbered)

        @cute.struct
        class TableStorage:
            last: cute.struct.MemRange[cutlass.Int32, ranges]
            lines: cute.struct.MemRange[cutlass.Int32, words * ranges]
            places: cute.struct.MemRange[cutlass.Int32, ranges]
            buckets: cute.struct.MemRange[cutlass.Int32, BUCKETS]
            sums: cute.struct.MemRange[cutlass.Int32, warps]

        storage = SmemAllocator().allocate(TableStorage)
        flat = cute.make_layout(ranges)
        return Shared(
            storage.last.get_tensor(flat),
            storage.lines.get_tensor(cute.make_layout((words, ranges), stride=(ranges, 1))),
            storage.places.get_tensor(flat),
            storage.buckets.get_tensor(cute.make_layout(BUCKETS)),
            storage.sums.get_tensor(cute.make_layout(warps)),
        )

    def sides(self, queries: Side, keys: Side):
        """``(that of the tiles, the other one)``"""
        return (keys, queries) if self.keys else (queries, keys)

    def count_ranges(self, queries: Side, keys: Side) -> Int32:
        """The sequences, the rows before and behind them, and what each leaves unused."""
        own, _ = self.sides(queries, keys)
        batch = own.ends.shape[0] - 1
        return batch + 2 if own.used is None else 2 * batch + 2

    @cute.jit
    def read_ranges(self, shared: Shared, first: Int32, ranges: Int32, queries: Side, keys: Side):
        """Each thread one range of rows, from ``first`` on: what its entries say, and how many there are."""
        thread = cute.arch.thread_idx()[0]
        own, other = self.sides(queries, keys)
        batch = own.ends.shape[0] - 1
        index = first + thread
        # What is read may belong to another sequence where the range is none: not used then
        unused = index >= batch + 2
        sequence = cutlass.min(cutlass.select_(unused, index - (batch + 2), index), batch - 1)
        begin, used, end = self.bounds(own, sequence)
        other_begin, other_used, _ = self.bounds(other, sequence)
        is_sequence = index < batch
        before, behind = index == batch, index == batch + 1
        offset = cutlass.select_(is_sequence, begin, begin + used)
        length = cutlass.select_(is_sequence, used, end - begin - used)
        # Rows before the first sequence, and behind the last one
        edge_begin, _, _ = self.bounds(own, Int32(0))
        _, _, edge_end = self.bounds(own, batch - 1)
        offset = cutlass.select_(before, Int32(0), cutlass.select_(behind, edge_end, offset))
        length = cutlass.select_(before, edge_begin, cutlass.select_(behind, own.total - edge_end, length))
        length = cutlass.select_(index < ranges, length, Int32(0))
        other_length = cutlass.select_(is_sequence, other_used, Int32(-1 if self.marked else 0))
        tiles = (length + self.tile - 1) // self.tile
        shared.last[thread] = self.sum_up_to(shared, tiles)
        of_q = (offset, length) if const_expr(not self.keys) else (other_begin, other_length)
        of_k = (offset, length) if const_expr(self.keys) else (other_begin, other_length)
        shared.lines[Entry.OFFSET_Q, thread], shared.lines[Entry.SEQLEN_Q, thread] = of_q
        shared.lines[Entry.OFFSET_K, thread], shared.lines[Entry.SEQLEN_K, thread] = of_k
        if const_expr(self.line_rows > 0):
            # Lines of its own: as many as sequences before it, more than the rows before it fill
            place = cutlass.select_(behind, batch, cutlass.select_(before, Int32(0), sequence))
            shared.lines[Entry.FIRST_LINE, thread] = of_q[0] // self.line_rows + place
        if const_expr(self.numbered):
            shared.lines[Entry.NUMBER, thread] = sequence
        cute.arch.sync_threads()

    @cute.jit
    def bounds(self, side: Side, sequence: Int32):
        """``(begin, rows used, end)`` of a sequence: within the tensor, whatever was given."""
        begin = cutlass.min(cutlass.max(side.ends[sequence], 0), side.total)
        end = cutlass.min(cutlass.max(side.ends[sequence + 1], begin), side.total)
        used = end - begin
        if const_expr(side.used is not None):
            used = cutlass.min(cutlass.max(side.used[sequence], 0), used)
        return begin, used, end

    @cute.jit
    def visit(self, shared: Shared, table: cute.Tensor | None, run):
        """Count the tiles of the ranges at hand by their steps, or with a ``table`` write their entries."""
        thread = cute.arch.thread_idx()[0]
        if const_expr(self.together):
            # A range's tiles count as its longest one
            before = self.tiles_before(shared, thread)
            tiles = shared.last[thread] - before
            steps = self.steps(shared, thread, tiles // 2, run)
            for block in (Int32(0), tiles - 1):
                steps = cutlass.max(steps, self.steps(shared, thread, block, run))
            shared.places[thread] = self.add(shared, steps, tiles)
            cute.arch.sync_threads()
        if const_expr(not self.together or table is not None):
            for tile in cutlass.range(thread, shared.last[self.threads - 1], self.threads, unroll=1):
                owner = self.range_of(shared, tile)
                block = tile - self.tiles_before(shared, owner)
                if const_expr(self.together):
                    place = shared.places[owner] + block
                else:
                    place = self.add(shared, self.steps(shared, owner, block, run), Int32(1))
                if const_expr(table is not None):
                    self.write(shared, table, place, owner, block)
        cute.arch.sync_threads()

    @cute.jit
    def write(self, shared: Shared, table: cute.Tensor, place: Int32, owner: Int32, block: Int32):
        """One entry. Overlapping sequences could make more than there is room for."""
        if const_expr(self.descending):
            block = shared.last[owner] - self.tiles_before(shared, owner) - 1 - block
        if place + HEADER < table.shape[0]:
            table[place + HEADER, Entry.BLOCK] = block
            for word in (Entry.SEQLEN_Q, Entry.SEQLEN_K, Entry.OFFSET_Q, Entry.OFFSET_K):
                table[place + HEADER, word] = shared.lines[word, owner]
            if const_expr(self.line_rows > 0):
                table[place + HEADER, Entry.FIRST_LINE] = shared.lines[Entry.FIRST_LINE, owner]
            if const_expr(self.numbered):
                table[place + HEADER, Entry.NUMBER] = shared.lines[Entry.NUMBER, owner]

    @cute.jit
    def steps(self, shared: Shared, owner: Int32, block: Int32, run) -> Int32:
        """How many steps a tile takes."""
        seqlen_q, seqlen_k = shared.lines[Entry.SEQLEN_Q, owner], shared.lines[Entry.SEQLEN_K, owner]
        lengths = seqlen_q, seqlen_k
        if const_expr(self.keys):
            blocks = self.band.query_blocks(block, self.step, *lengths, run.right, run.left)
        else:
            row = block * self.tile
            origin = self.band.origin(row, *lengths, run.left)
            blocks = self.band.blocks(row, self.tile, *lengths, run.right, run.left, origin)
        return blocks.end - blocks.first

    @cute.jit
    def add(self, shared: Shared, steps: Int32, tiles: Int32) -> Int32:
        """Add ``tiles`` to a bucket; what it held before. The longest tiles' bucket is the first one."""
        bits = float_bits(cutlass.min(cutlass.max(steps, 0), MOST_STEPS) + 1)
        leading = (bits >> (MANTISSA_BITS - LEADING_BITS)) - (EXPONENT_BIAS << LEADING_BITS)
        bucket = shared.buckets.iterator + (BUCKETS - 1 - leading)
        return cute.arch.atomic_add(bucket, tiles, sem="relaxed", scope="cta")

    @cute.jit
    def bucket_ends(self, shared: Shared, table: cute.Tensor):
        """Instead of how many tiles a bucket holds, how many those before it do; the header of the table."""
        thread = cute.arch.thread_idx()[0]
        own = BUCKETS // self.threads
        total = Int32(0)
        for each in cutlass.range_constexpr(own):
            total += shared.buckets[thread * own + each]
        end = self.sum_up_to(shared, total)
        if thread == self.threads - 1:
            table[0, 0] = cutlass.min(end, table.shape[0] - HEADER)
        begin = end - total
        for each in cutlass.range_constexpr(own):
            held = shared.buckets[thread * own + each]
            shared.buckets[thread * own + each] = begin
            begin += held
        cute.arch.sync_threads()

    def tiles_before(self, shared: Shared, owner: Int32) -> Int32:
        """Tiles of the ranges before one."""
        return cutlass.select_(owner > 0, shared.last[cutlass.max(owner - 1, 0)], Int32(0))

    @cute.jit
    def range_of(self, shared: Shared, tile: Int32) -> Int32:
        """The range that a tile belongs to: the first one that ends behind it."""
        found, span = Int32(0), self.threads // 2
        for _ in cutlass.range_constexpr(self.threads.bit_length() - 1):
            found += cutlass.select_(shared.last[found + span - 1] <= tile, Int32(span), Int32(0))
            span //= 2
        return found

    @cute.jit
    def sum_up_to(self, shared: Shared, value: Int32) -> Int32:
        """The sum of the values of all threads up to this one."""
        thread = cute.arch.thread_idx()[0]
        lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
        total = value
        for step in cutlass.range_constexpr(WARP_THREADS.bit_length() - 1):
            other = cute.arch.shuffle_sync_up(total, 1 << step)
            total += cutlass.select_(lane >= 1 << step, other, Int32(0))
        if lane == WARP_THREADS - 1:
            shared.sums[warp] = total
        cute.arch.sync_threads()
        for each in cutlass.range_constexpr(self.threads // WARP_THREADS - 1):
            total += cutlass.select_(each < warp, shared.sums[each], Int32(0))
        cute.arch.sync_threads()
        return total


@cute.jit
def float_bits(number: Int32) -> Int32:
    """The bits of a positive number as a float, rounded down: in their order, like the numbers."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 value; cvt.rz.f32.s32 value, {$r0}; mov.b32 {$w0}, value; }",
        write_only_types=[Int32],
        read_only_args=[number],
    )

"""Tiles of packed sequences, listed on the device: only there is it known where the sequences begin and end.

One CTA a table lists the tiles of all sequences. A sequence's tiles stand together, because they read the same rows
and add to them: L2 holds those of the heads of a few sequences, not of all. The sequence with the longest tile comes
first, by a counting sort: each sequence's tiles are counted by the steps that its longest one takes, then written
where those of sequences with more steps end. A launch ends evenly if its last tiles are short ones, so those of the
last sequences may be sorted among themselves (``level_end``).

The rows between and behind the sequences' used ones are listed like sequences that see nothing, so that their results
are written as well.
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


class Sections(NamedTuple):
    """What decides how many heads are scheduled together: see TileTable.section."""

    heads: Int32  # of K and V
    group: Int32  # heads of the launch's tiles for each of them
    rows: Int32  # of what a sequence's tiles read and add to, that L2 holds
    tiles: Int32  # that keep the SMs busy while the longest runs


class Found(IntEnum):
    """Numbers that one thread tells the others."""

    TILES = 0  # of all ranges
    LEVEL_END = 1  # entry behind which no sequence's tiles stand together
    LEVEL_BEGIN = 2  # entry at which the first of these sequences begins


class Shared(NamedTuple):
    """Shared memory of a CTA."""

    last: cute.Tensor  # of each range of rows: tiles up to its last one
    lines: cute.Tensor  # (Entry, range): what the range's entries have in common
    places: cute.Tensor  # of each range: where its entries go; -1: among those at the end, by their steps
    found: cute.Tensor  # Found
    buckets: cute.Tensor
    sums: cute.Tensor  # of each warp


@dataclass(frozen=True)
class TileTable:
    """``keys``: tiles of K and V, else of Q. ``step``: rows of the others that a step takes. ``descending``: a
    sequence's last tile comes first. ``level_end``: the launch's last tiles come longest first, whatever sequence they
    are of.
    """

    tile: int
    step: int
    keys: bool
    band: Band  # of the tiles' kernel
    line_rows: int = 0  # queries of a line of the workspace; 0: there is none
    descending: bool = False
    level_end: bool = False
    numbered: bool = False
    marked: bool = False  # of Q: rows that no sequence uses have -1 keys, those of a sequence without keys 0
    threads: int = THREADS

    @cute.jit
    def run(self, queries: Side, keys: Side, table: cute.Tensor, run, sections: Sections | None):
        """All threads of a CTA. table: (table_lines, ENTRY_WORDS); run: the band's bounds; ``sections``: None where
        nobody schedules by the table.
        """
        shared = self.shared()
        self.clear_buckets(shared)
        ranges = self.count_ranges(queries, keys)
        for first in cutlass.range(0, ranges, self.threads, unroll=1):
            self.read_ranges(shared, first, ranges, queries, keys)
            self.place_ranges(shared, run)
        self.bucket_ends(shared, Int32(0))
        if cute.arch.thread_idx()[0] == 0:
            table[0, 0] = cutlass.min(shared.found[Found.TILES], table.shape[0] - HEADER)
        for first in cutlass.range(0, ranges, self.threads, unroll=1):
            if ranges > self.threads:
                self.read_ranges(shared, first, ranges, queries, keys)
            self.place_ranges(shared, run)
            if const_expr(sections is not None):
                self.choose_section(shared, table, sections)
            if const_expr(self.level_end):
                # Of more ranges than this the end is a small part
                if ranges <= self.threads:
                    self.sort_end(shared, run)
            self.write_entries(shared, table, run)

    def shared(self) -> Shared:
        ranges, warps, words = self.threads, self.threads // WARP_THREADS, entry_words(self.numbered)

        @cute.struct
        class TableStorage:
            last: cute.struct.MemRange[cutlass.Int32, ranges]
            lines: cute.struct.MemRange[cutlass.Int32, words * ranges]
            places: cute.struct.MemRange[cutlass.Int32, ranges]
            found: cute.struct.MemRange[cutlass.Int32, len(Found)]
            buckets: cute.struct.MemRange[cutlass.Int32, BUCKETS]
            sums: cute.struct.MemRange[cutlass.Int32, warps]

        storage = SmemAllocator().allocate(TableStorage)
        flat = cute.make_layout(ranges)
        return Shared(
            storage.last.get_tensor(flat),
            storage.lines.get_tensor(cute.make_layout((words, ranges), stride=(ranges, 1))),
            storage.places.get_tensor(flat),
            storage.found.get_tensor(cute.make_layout(len(Found))),
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
    def place_ranges(self, shared: Shared, run):
        """Each thread one range: count its tiles in the bucket of its longest one, of the first, the middle and the
        last, and so find their place.
        """
        thread = cute.arch.thread_idx()[0]
        tiles = self.tiles_of(shared, thread)
        steps = Int32(0)
        for sample in cutlass.range(3, unroll=1):
            steps = cutlass.max(steps, self.steps(shared, thread, (tiles - 1) * sample // 2, run))
        shared.places[thread] = self.add(shared, steps, tiles)
        cute.arch.sync_threads()

    @cute.jit
    def choose_section(self, shared: Shared, table: cute.Tensor, sections: Sections):
        """The thread of the sequence that comes first, whose tiles are the longest: the header's number of heads, and
        so how many entries are the launch's last tiles.
        """
        thread = cute.arch.thread_idx()[0]
        tiles = self.tiles_of(shared, thread)
        if (shared.places[thread] == 0) & (tiles > 0):
            rows = shared.lines[Entry.SEQLEN_Q if self.keys else Entry.SEQLEN_K, thread]
            heads = self.section(sections, tiles, rows)
            table[0, 1] = heads
            if const_expr(self.level_end):
                last = (sections.tiles + heads - 1) // heads
                shared.found[Found.LEVEL_END] = cutlass.max(shared.found[Found.TILES] - last, 0)

    @cute.jit
    def section(self, sections: Sections, tiles: Int32, rows: Int32) -> Int32:
        """Heads of the launch's tiles that are scheduled together, where the longest sequence has so many ``tiles``,
        which read and add to so many ``rows``: as many as L2 holds these of, but enough for its tiles to keep the SMs
        busy. All sections are about equal: the longest tile of a last one of few heads would run alone.
        """
        heads = sections.heads
        fitting = cutlass.max(sections.rows // cutlass.max(rows, 1), 1)
        filling = cutlass.max(sections.tiles // (tiles * sections.group), 1)
        count = cutlass.min((heads + fitting - 1) // fitting, cutlass.max(heads // filling, 1))
        return (heads + count - 1) // count * sections.group

    @cute.jit
    def sort_end(self, shared: Shared, run):
        """Places of the tiles of the last sequences: by their own steps."""
        thread = cute.arch.thread_idx()[0]
        self.clear_buckets(shared)
        cute.arch.sync_threads()
        place, end = shared.places[thread], shared.found[Found.LEVEL_END]
        behind = place + self.tiles_of(shared, thread)
        if (place < behind) & (end < behind):
            shared.places[thread] = Int32(-1)
            if place <= end:
                shared.found[Found.LEVEL_BEGIN] = place
        cute.arch.sync_threads()
        for tile in cutlass.range(thread, shared.last[self.threads - 1], self.threads, unroll=1):
            owner = self.range_of(shared, tile)
            if shared.places[owner] < 0:
                block = tile - self.tiles_before(shared, owner)
                self.add(shared, self.steps(shared, owner, block, run), Int32(1))
        cute.arch.sync_threads()
        self.bucket_ends(shared, shared.found[Found.LEVEL_BEGIN])

    @cute.jit
    def write_entries(self, shared: Shared, table: cute.Tensor, run):
        """Those of the ranges at hand."""
        thread = cute.arch.thread_idx()[0]
        for tile in cutlass.range(thread, shared.last[self.threads - 1], self.threads, unroll=1):
            owner = self.range_of(shared, tile)
            turn = tile - self.tiles_before(shared, owner)
            block = turn
            if const_expr(self.descending):
                block = shared.last[owner] - 1 - tile
            place = shared.places[owner] + turn
            if const_expr(self.level_end):
                if shared.places[owner] < 0:
                    place = self.add(shared, self.steps(shared, owner, block, run), Int32(1))
            self.write(shared, table, place, owner, block)
        cute.arch.sync_threads()

    @cute.jit
    def write(self, shared: Shared, table: cute.Tensor, place: Int32, owner: Int32, block: Int32):
        """One entry. Overlapping sequences could make more than there is room for."""
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
    def clear_buckets(self, shared: Shared):
        thread = cute.arch.thread_idx()[0]
        for first in cutlass.range_constexpr(0, BUCKETS, self.threads):
            shared.buckets[first + thread] = Int32(0)

    @cute.jit
    def bucket_ends(self, shared: Shared, begin: Int32):
        """Instead of how many tiles a bucket holds, ``begin`` and how many those before it do."""
        thread = cute.arch.thread_idx()[0]
        own = BUCKETS // self.threads
        total = Int32(0)
        for each in cutlass.range_constexpr(own):
            total += shared.buckets[thread * own + each]
        end = self.sum_up_to(shared, total)
        if thread == self.threads - 1:
            shared.found[Found.TILES] = end
        begin += end - total
        for each in cutlass.range_constexpr(own):
            held = shared.buckets[thread * own + each]
            shared.buckets[thread * own + each] = begin
            begin += held
        cute.arch.sync_threads()

    def tiles_of(self, shared: Shared, owner: Int32) -> Int32:
        """Tiles of a range."""
        return shared.last[owner] - self.tiles_before(shared, owner)

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
        # What the warps before have, one a lane
        before = shared.sums[cutlass.min(lane, self.threads // WARP_THREADS - 1)]
        before = cutlass.select_(lane < warp, before, Int32(0))
        for step in cutlass.range_constexpr(WARP_THREADS.bit_length() - 1):
            before += cute.arch.shuffle_sync_bfly(before, offset=1 << step)
        cute.arch.sync_threads()
        return total + before


@cute.jit
def float_bits(number: Int32) -> Int32:
    """The bits of a positive number as a float, rounded down: in their order, like the numbers."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 value; cvt.rz.f32.s32 value, {$r0}; mov.b32 {$w0}, value; }",
        write_only_types=[Int32],
        read_only_args=[number],
    )

"""What stands before and behind the backward's main kernel: row statistics and zeroed sums; dQ in the input's dtype."""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .blocks import Band
from .config import WARPGROUP_THREADS, WGMMA_M, BackwardConfig
from .output import GROUP, DirectOutput, Piece
from .products import rows_and_columns
from .score import LOG2_E, cap_constant
from .softmax import QUAD, ROWS
from .workspace import VECTOR, read_piece

THREADS = 256  # of a CTA before the main kernel


@dataclass(frozen=True)
class Prologue:
    """For each query: LSE in base 2 and delta = rowsum(dO O) - dLSE; and dQ's sums, or the counters of their turns, set
    to 0.

    A query that sees no key, and one past the end, gets LSE = inf, so that its P is 0, and delta = 0.
    """

    config: BackwardConfig
    dtype: type

    @cute.jit
    def run(
        self,
        thread: Int32,
        place: tuple,
        out: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        dlse,
        rows: cute.Tensor,
        sums,
        turns,
        scale_log2: Float32 | None = None,
    ):
        """One step's queries of one head, ``place``: (block, head, batch). out, do: (batch, seqlen_q, heads,
        head_dim_v); lse, dlse (or None): (batch, heads, seqlen_q); rows: (batch, heads, blocks, 2 tile_m); sums of dQ:
        (batch, heads, blocks, floats), or None; turns (batch, heads, blocks, pieces), or None.
        scale_log2: where exponents lack cap_constant, else None.
        """
        block, head, batch = place
        lanes = 1 << (self.config.head_dim_v // GROUP - 1).bit_length()  # of a row; a power of two for the shuffles
        column = thread % lanes
        queries = [first + thread // lanes for first in range(0, self.config.tile_m, THREADS // lanes)]
        # All reads are under way before anything is waited for. There are no branches around them: what lies past the
        # end is read from elsewhere and not used.
        last = out.shape[1] - 1
        read = []
        for row in queries:
            query = cutlass.min(block * self.config.tile_m + row, last)
            given = tuple(self.group(each[batch, query, head, None], column) for each in (out, do))
            scalars = tuple(each[batch, head, query] for each in (lse, dlse) if each is not None)
            read.append((given, scalars))
        # Where they have turns, the first tile stores
        if const_expr(sums is not None and turns is None):
            self.clear(sums[batch, head, block, None], thread)
        if const_expr(turns is not None):
            if thread < turns.shape[3]:
                turns[batch, head, block, thread] = Int32(0)
        for row, (given, scalars) in zip(queries, read, strict=True):
            delta = product(*given)
            delta = cutlass.select_(GROUP * column < out.shape[3], delta, Float32(0.0))
            for step in cutlass.range_constexpr(int(math.log2(lanes))):
                delta += cute.arch.shuffle_sync_bfly(delta, offset=lanes >> (step + 1))
            if column == 0:
                base_2 = scalars[0] * Float32(LOG2_E)
                delta -= scalars[1] if const_expr(dlse is not None) else Float32(0.0)
                # Neither does a query past the end see a key
                sees_none = block * self.config.tile_m + row > last or base_2 == Float32(-math.inf)
                if const_expr(scale_log2 is not None):
                    base_2 -= cap_constant(scale_log2)
                rows[batch, head, block, row] = cutlass.select_(sees_none, Float32(math.inf), base_2)
                rows[batch, head, block, self.config.tile_m + row] = cutlass.select_(sees_none, Float32(0.0), delta)

    @cute.jit
    def group(self, source: cute.Tensor, column: Int32):
        """A lane's GROUP columns; the first ones where there are fewer."""
        index = cutlass.select_(GROUP * column < source.shape[0], column, Int32(0))
        piece = cute.make_rmem_tensor(GROUP, self.dtype)
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
        cute.copy(copy, cute.local_tile(source, (GROUP,), (index,)), piece)
        return piece

    @cute.jit
    def clear(self, memory: cute.Tensor, thread: Int32):
        zeros = cute.make_rmem_tensor(VECTOR, Float32)
        zeros.fill(0.0)
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
        floats = self.config.tile_m * self.config.head_dim
        for first in cutlass.range_constexpr(0, floats, VECTOR * THREADS):
            target = cute.make_tensor((memory.iterator + (first + VECTOR * thread)).align(16), cute.make_layout(VECTOR))
            cute.copy(copy, zeros, target)


@cute.jit
def product(one: cute.Tensor, other: cute.Tensor) -> Float32:
    """The dot product of two groups of columns."""
    total = Float32(0.0)
    for index in cutlass.range_constexpr(GROUP):
        total += one[index].to(Float32) * other[index].to(Float32)
    return total


@cute.jit
def tile_of(index: Int32, blocks: Int32, heads: Int32):
    """``(block, head, batch)`` of a CTA."""
    head_of_all = index // blocks
    batch = head_of_all // heads
    return index - head_of_all * blocks, head_of_all - batch * heads, batch


@dataclass(frozen=True)
class Epilogue:
    """Float32 sums times the scale, in the input's dtype: dQ, and dK and dV where they left as parts."""

    config: BackwardConfig
    dtype: type
    band: Band

    @cute.jit
    def queries(self, place: tuple, sums: cute.Tensor, dq: cute.Tensor, scale: Float32, seqlen_k: Int32, right):
        """dQ of one step's queries of one head, ``place``: (block, head, batch); a piece a warpgroup. dq: (seqlen_q,
        head_dim, heads, batch). A query that sees no key gets 0, whatever dO held.
        """
        config = self.config
        block, head, batch = place
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        warpgroup = cute.arch.thread_idx()[0] // WARPGROUP_THREADS
        accumulator = cute.make_rmem_tensor(WGMMA_M * config.dq_columns // WARPGROUP_THREADS, Float32)
        read_piece(sums[batch, head, block, None], accumulator, warpgroup)
        query_piece = warpgroup if config.query_pieces > 1 else 0
        first_column = 0 if config.query_pieces > 1 else warpgroup * config.dq_columns
        first_row = block * config.tile_m + query_piece * WGMMA_M + thread // QUAD // 8 * 16 + thread // QUAD % 8
        values = rows_and_columns(accumulator)
        for index in cutlass.range_constexpr(ROWS):
            sees_none = self.band.key_limit(first_row + 8 * index, dq.shape[0], seqlen_k, right) <= 0
            for column in cutlass.range(cute.size(values, mode=[1]), unroll_full=True):
                value = values[index, column] * scale
                if const_expr(self.band.blind_rows):
                    value = cutlass.select_(sees_none, Float32(0.0), value)
                values[index, column] = value
        piece = Piece(0, head, batch, warpgroup, thread, Boolean(False), first_row, first_column)
        DirectOutput(self.dtype, config.dq_columns).store(dq, None, accumulator, None, piece)

    @cute.jit
    def keys(
        self,
        place: tuple,
        parts: cute.Tensor,
        bounds: tuple,
        target: cute.Tensor,
        head_dim: cutlass.Constexpr[int],
        scale: Float32,
    ):
        """dK or dV of one K/V tile of one head, ``place``: (tile, head, batch). parts: (parts, floats), of which those
        in ``bounds``, (first, end), are added in order; target: (seqlen_k, head_dim, heads_k, batch). A warpgroup has
        64 keys; where there are no more, half of their columns if it is whole groups of a quad, or the first has them
        all.
        """
        tile_n, warpgroups = self.config.tile_n, self.config.consumer_warpgroups
        halves = warpgroups * WGMMA_M // tile_n if head_dim % 64 == 0 else 1
        columns = head_dim // halves
        (block, head, batch), (first, end) = place, bounds
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        warpgroup = cute.arch.thread_idx()[0] // WARPGROUP_THREADS
        if warpgroup < tile_n // WGMMA_M * halves:
            total, part = (cute.make_rmem_tensor(WGMMA_M * columns // WARPGROUP_THREADS, Float32) for _ in range(2))
            total.fill(0.0)
            for each in cutlass.range(first, end, unroll=1):
                read_piece(parts[each, None], part, warpgroup)
                for element in cutlass.range(cute.size(total), unroll_full=True):
                    total[element] = total[element] + part[element] * scale
            rows, first_column = warpgroup, 0
            if const_expr(tile_n == WGMMA_M):
                rows, first_column = 0, warpgroup * columns
            first_row = block * tile_n + rows * WGMMA_M + thread // QUAD // 8 * 16 + thread // QUAD % 8
            piece = Piece(0, head, batch, warpgroup, thread, Boolean(False), first_row, first_column)
            DirectOutput(self.dtype, columns).store(target, None, total, None, piece)

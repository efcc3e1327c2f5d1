"""What stands before and behind the backward's main kernel: row statistics and zeroed sums; dQ in the input's dtype."""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .config import WARPGROUP_THREADS, WGMMA_M, BackwardConfig
from .output import GROUP, DirectOutput, Piece
from .softmax import QUAD
from .workspace import VECTOR, read_piece

THREADS = 256  # of a CTA before the main kernel
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Prologue:
    """For each query: LSE in base 2 and delta = rowsum(dO O) - dLSE; and dQ's sums set to 0.

    A query that sees no key, and one past the end, gets LSE = inf, so that its P is 0, and delta = 0.
    """

    config: BackwardConfig
    dtype: type

    @cute.jit
    def run(self, out: cute.Tensor, do: cute.Tensor, lse: cute.Tensor, dlse, rows: cute.Tensor, dq: cute.Tensor):
        """One step's queries of one head. out, do: (batch, seqlen_q, heads, head_dim_v); lse, dlse (or None): (batch,
        heads, seqlen_q); rows: (batch, heads, blocks, 2 tile_m); dq: (batch, heads, blocks, floats).
        """
        thread = cute.arch.thread_idx()[0]
        block, head, batch = tile_of(cute.arch.block_idx()[0], dq.shape[2], dq.shape[1])
        self.clear(dq[batch, head, block, None], thread)
        lanes = max(8, self.config.head_dim_v // 8) if self.config.head_dim_v in (64, 128, 256) else 32
        lanes = 16 if self.config.head_dim_v == 96 else lanes
        column = thread % lanes
        for first in cutlass.range_constexpr(0, self.config.tile_m, THREADS // lanes):
            row = first + thread // lanes
            query = block * self.config.tile_m + row
            delta = Float32(0.0)
            present = query < out.shape[1]
            if present and GROUP * column < out.shape[3]:
                delta = self.product(out[batch, query, head, None], do[batch, query, head, None], column)
            offset = lanes // 2
            for step in cutlass.range_constexpr(int(math.log2(lanes))):
                delta += cute.arch.shuffle_sync_bfly(delta, offset=lanes >> (step + 1))
            if column == 0:
                base_2 = Float32(math.inf)
                if present:
                    natural = lse[batch, head, query]
                    if natural == Float32(-math.inf):
                        delta = Float32(0.0)
                    else:
                        base_2 = natural * Float32(LOG2_E)
                        if cutlass.const_expr(dlse is not None):
                            delta -= dlse[batch, head, query]
                rows[batch, head, block, row] = base_2
                rows[batch, head, block, self.config.tile_m + row] = delta

    @cute.jit
    def product(self, out: cute.Tensor, do: cute.Tensor, column: Int32) -> Float32:
        """The dot product of a lane's GROUP columns."""
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
        pieces = tuple(cute.make_rmem_tensor(GROUP, self.dtype) for _ in range(2))
        for source, piece in zip((out, do), pieces, strict=True):
            cute.copy(copy, cute.local_tile(source, (GROUP,), (column,)), piece)
        total = Float32(0.0)
        for index in cutlass.range_constexpr(GROUP):
            total += pieces[0][index].to(Float32) * pieces[1][index].to(Float32)
        return total

    @cute.jit
    def clear(self, memory: cute.Tensor, thread: Int32):
        zeros = cute.make_rmem_tensor(VECTOR, Float32)
        zeros.fill(0.0)
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
        floats = self.config.tile_m * self.config.key_columns
        for first in cutlass.range_constexpr(0, floats, VECTOR * THREADS):
            target = cute.make_tensor((memory.iterator + (first + VECTOR * thread)).align(16), cute.make_layout(VECTOR))
            cute.copy(copy, zeros, target)


@cute.jit
def tile_of(index: Int32, blocks: Int32, heads: Int32):
    """``(block, head, batch)`` of a CTA."""
    head_of_all = index // blocks
    batch = head_of_all // heads
    return index - head_of_all * blocks, head_of_all - batch * heads, batch


@dataclass(frozen=True)
class Epilogue:
    """dQ: its float32 sums times the scale, in the input's dtype."""

    config: BackwardConfig
    dtype: type

    @cute.jit
    def run(self, sums: cute.Tensor, dq: cute.Tensor, scale: Float32):
        """One step's queries of one head, a piece a warpgroup. dq: (seqlen_q, head_dim, heads, batch)."""
        config = self.config
        block, head, batch = tile_of(cute.arch.block_idx()[0], sums.shape[2], sums.shape[1])
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        warpgroup = cute.arch.thread_idx()[0] // WARPGROUP_THREADS
        accumulator = cute.make_rmem_tensor(WGMMA_M * config.dq_columns // WARPGROUP_THREADS, Float32)
        read_piece(sums[batch, head, block, None], accumulator, warpgroup)
        for element in cutlass.range(cute.size(accumulator), unroll_full=True):
            accumulator[element] = accumulator[element] * scale
        query_piece = warpgroup if config.query_pieces > 1 else 0
        first_column = 0 if config.query_pieces > 1 else warpgroup * config.dq_columns
        first_row = block * config.tile_m + query_piece * WGMMA_M + thread // QUAD // 8 * 16 + thread // QUAD % 8
        piece = Piece(0, head, batch, warpgroup, thread, False, first_row, first_column)
        DirectOutput(self.dtype, config.dq_columns).store(dq, None, accumulator, None, piece)

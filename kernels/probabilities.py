"""Where P waits between the softmax and P V: in registers, or in shared memory.

In registers it costs nothing but the registers: the accumulator of S has the order of the A operand already. With
three consumer warpgroups a thread has 160 of them, and S and O (float32) leave too few for P at wide blocks: there it
goes through shared memory, where its warpgroup's O takes the same bytes after the tile's last P V.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup as wgmma

from .barriers import sync_warpgroup
from .config import WARP_THREADS, WARPGROUP_THREADS, WARPS_PER_WARPGROUP, WGMMA_M
from .output import wait_output_free
from .products import Products, convert, new_left_operand
from .registers import kept

WARP_ROWS = WGMMA_M // WARPS_PER_WARPGROUP
PIECE_COLUMNS = 16  # an stmatrix writes these columns of a warp's rows, lanes 8 columns of a row each
ELEMENTS = WARP_ROWS * PIECE_COLUMNS // WARP_THREADS


class Probabilities(NamedTuple):
    """P of one block in 16 bit."""

    operand: cute.Tensor  # A of P V, (.., tile_n / 16): registers, or descriptors of shared memory
    target: Int32 | None  # byte address in shared memory of what this thread writes first; None: P stays in registers


@dataclass(frozen=True)
class RegisterP:
    """P stays with the threads that computed it."""

    dtype: type
    source = wgmma.OperandSource.RMEM

    def start(self, products: Products, scores: cute.Tensor, memory: None) -> Probabilities:
        return Probabilities(new_left_operand(scores, self.dtype), None)

    def claim(self, warpgroup: Int32, is_store_warp: Boolean):
        """Nobody else uses the registers."""

    @cute.jit
    def keep(self, products: Products, probabilities: Probabilities, scores: cute.Tensor):
        convert(scores, self.dtype, target=probabilities.operand)

    def meet(self, warpgroup: Int32, in_turn: bool):
        """A warp's P V takes P from that warp's registers."""


@dataclass(frozen=True)
class SharedP:
    """P goes through shared memory that belongs to the warpgroup."""

    dtype: type
    columns: int  # of a swizzled row: 64, 32 or 16
    source = wgmma.OperandSource.SMEM

    def start(self, products: Products, scores: cute.Tensor, memory: cute.Tensor) -> Probabilities:
        """P in ``memory``, this warpgroup's (64, tile_n); ``scores`` has the shape of a block's accumulator."""
        pv_slice = products.pv_add.get_slice(0)
        operand = products.pv_add.make_fragment_A(pv_slice.partition_A(memory))
        row = cute.arch.thread_idx()[0] % WARPGROUP_THREADS // WARP_THREADS * WARP_ROWS
        lane = cute.arch.lane_idx()
        first = self.place(row + lane % WARP_ROWS, lane // WARP_ROWS)
        # Kept: one register instead of 20 instructions a block
        return Probabilities(operand, kept(memory.iterator.toint() + first))

    def place(self, row: Int32, half: Int32) -> Int32:
        """Bytes from the memory's beginning to 8 columns of the first piece; ``half``: the first or the last ones.

        Of rows of 128 bytes the swizzle adds the number of the row, modulo 8, to that of 16 bytes in it, without carry;
        of rows of 64 or 32 bytes that of two or four rows, modulo 4 or 2.
        """
        at = 2 * self.columns * row + 16 * half
        return at ^ (at >> 3 & 2 * self.columns - 16)

    def offset(self, piece: int) -> tuple:
        """``(bits, bytes)``: a thread's place in another piece is ``(place ^ bits) + bytes``."""
        in_row = self.columns // PIECE_COLUMNS
        return 2 * PIECE_COLUMNS * (piece % in_row), 2 * WGMMA_M * self.columns * (piece // in_row)

    @cute.jit
    def claim(self, warpgroup: Int32, is_store_warp: Boolean):
        """Before a tile's first P: wait until TMA has read the last tile's O from these bytes."""
        wait_output_free(warpgroup, is_store_warp)

    @cute.jit
    def keep(self, products: Products, probabilities: Probabilities, scores: cute.Tensor):
        """Write P (stmatrix) for WGMMA to read. The P V that read the block before must have ended."""
        self.write(convert(scores, self.dtype), probabilities.target)
        cute.arch.fence_view_async_shared()  # each thread's own writes, before the barrier that P V waits behind

    @cute.jit
    def write(self, converted: cute.Tensor, first: Int32):
        """One block's P; ``first``: Probabilities.target."""
        copy = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        own, layout = converted.iterator, cute.make_layout(ELEMENTS)
        for piece in cutlass.range_constexpr(cute.size(converted) // ELEMENTS):
            bits, more = self.offset(piece)
            there = cute.make_ptr(self.dtype, (first ^ bits) + more, cute.AddressSpace.smem, assumed_align=16)
            cute.copy(copy, cute.make_tensor(own + ELEMENTS * piece, layout), cute.make_tensor(there, layout))

    @cute.jit
    def meet(self, warpgroup: Int32, in_turn: cutlass.Constexpr[bool]):
        """Before P V is issued: all four warps have written their rows. Each warp's quarter of the product may well
        read only that warp's 16 rows, but PTX makes it one operation of the warpgroup on all 64, so the warps meet at
        a barrier. In ping-pong that costs nothing: they met at the turn's (``in_turn``), which stands behind keep().
        """
        if const_expr(not in_turn):
            sync_warpgroup(warpgroup)

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
from .config import WARPGROUP_THREADS
from .output import wait_output_free
from .products import Products, convert, new_left_operand, store_copy


class Probabilities(NamedTuple):
    """P of one block in 16 bit."""

    operand: cute.Tensor  # A of P V, (.., tile_n / 16): registers, or descriptors of shared memory
    target: cute.Tensor  # where this thread writes in shared memory; None where P stays in registers


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
    source = wgmma.OperandSource.SMEM

    def start(self, products: Products, scores: cute.Tensor, memory: cute.Tensor) -> Probabilities:
        """P in ``memory``, this warpgroup's (64, tile_n); ``scores`` has the shape of a block's accumulator."""
        pv_slice = products.pv_add.get_slice(0)
        operand = products.pv_add.make_fragment_A(pv_slice.partition_A(memory))
        return Probabilities(operand, self.copy(products).partition_D(memory))

    def copy(self, products: Products):
        """How a thread writes its part of S's accumulator into the warpgroup's tile."""
        return store_copy(products.qk_first, self.dtype, cute.arch.thread_idx()[0] % WARPGROUP_THREADS)

    @cute.jit
    def claim(self, warpgroup: Int32, is_store_warp: Boolean):
        """Before a tile's first P: wait until TMA has read the last tile's O from these bytes."""
        wait_output_free(warpgroup, is_store_warp)

    @cute.jit
    def keep(self, products: Products, probabilities: Probabilities, scores: cute.Tensor):
        """Write P (stmatrix) for WGMMA to read. The P V that read the block before must have ended."""
        converted = convert(scores, self.dtype)
        copy = self.copy(products)
        cute.copy(copy, copy.retile(converted), probabilities.target)
        cute.arch.fence_view_async_shared()  # each thread's own writes, before the barrier that P V waits behind

    @cute.jit
    def meet(self, warpgroup: Int32, in_turn: cutlass.Constexpr[bool]):
        """Before P V is issued: all four warps have written their rows. Each warp's quarter of the product may well
        read only that warp's 16 rows, but PTX makes it one operation of the warpgroup on all 64, so the warps meet at
        a barrier. In ping-pong that costs nothing: they met at the turn's (``in_turn``), which stands behind keep().
        """
        if const_expr(not in_turn):
            sync_warpgroup(warpgroup)

"""Online softmax in base 2, on one thread's rows of a score tile.

Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; FlashAttention-2 (Dao 2023), section 3.1: O
stays unscaled until the last block. The softmax scale is folded into the exponent: ``p = exp2(s * scale_log2 -
extreme * scale_log2)`` is one FFMA and one MUFU an element.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

# A little below the largest float32: divided by the scale and multiplied by it again, that one rounds to infinity for
# one scale in seven.
LARGEST_EXPONENT = 3.4e38
ROWS = 2  # rows of a WGMMA accumulator that one thread holds
QUAD = 4  # threads that share a row
CHAINS = 4  # independent partial maxima and sums a row: hides the latency of dependent FMNMX and FADD


@dataclass(frozen=True)
class Softmax:
    """``negative_scale``: the exponent is largest where the score is smallest, so the row extreme is a minimum."""

    negative_scale: bool

    @property
    def masked(self):
        """The score of a key that is not seen: its exponent is minus infinity."""
        return math.inf if self.negative_scale else -math.inf

    @cute.jit
    def start(self, scale_log2: Float32):
        """New ``(row_extreme, row_sum)``.

        The extreme starts at a finite bound instead of infinity: then a fully masked block yields exp2(-inf) = 0 with
        no guard in the loop. Dividing by the scale keeps ``extreme * scale_log2`` finite.
        """
        row_extreme = cute.make_rmem_tensor(ROWS, Float32)
        row_sum = cute.make_rmem_tensor(ROWS, Float32)
        magnitude = cute.arch.fmax(scale_log2, -scale_log2)
        bound = Float32(-LARGEST_EXPONENT) / cute.arch.fmax(magnitude, Float32(1.0))
        row_extreme.fill(-bound if const_expr(self.negative_scale) else bound)
        row_sum.fill(0.0)
        return row_extreme, row_sum

    @cute.jit
    def extreme(self, a: Float32, b: Float32) -> Float32:
        return cute.arch.fmin(a, b) if const_expr(self.negative_scale) else cute.arch.fmax(a, b)

    @cute.jit
    def update(self, scores: cute.Tensor, row_extreme: cute.Tensor, scale_log2: Float32):
        """Fold one block's scores (2 rows, columns) into the row extremes; ``(rescale, shift)``: each row's factor
        for what came before, and the exponent that :meth:`exponentiate` subtracts.
        """
        rescale = cute.make_rmem_tensor(ROWS, Float32)
        shift = cute.make_rmem_tensor(ROWS, Float32)
        for row in cutlass.range_constexpr(ROWS):
            before = row_extreme[row]
            partial = [scores[row, chain] for chain in range(CHAINS)]
            for column in cutlass.range_constexpr(CHAINS, cute.size(scores, mode=[1])):
                partial[column % CHAINS] = self.extreme(partial[column % CHAINS], scores[row, column])
            block = self.extreme(self.extreme(partial[0], partial[1]), self.extreme(partial[2], partial[3]))
            block = cute.arch.warp_reduction(block, self.extreme, threads_in_group=QUAD)
            now = self.extreme(before, block)
            row_extreme[row] = now
            rescale[row] = cute.math.exp2((before - now) * scale_log2, fastmath=True)
            shift[row] = now * scale_log2
        return rescale, shift

    @cute.jit
    def exponentiate(
        self,
        scores: cute.Tensor,
        row: cutlass.Constexpr[int],
        row_sum: cute.Tensor,
        rescale: cute.Tensor,
        shift: cute.Tensor,
        scale_log2: Float32,
    ):
        """Turn one row's scores into probabilities in place and bring its sum up to date."""
        columns = cute.size(scores, mode=[1])
        for column in cutlass.range_constexpr(columns):
            scores[row, column] = cute.math.exp2(scores[row, column] * scale_log2 - shift[row], fastmath=True)
        partial = [scores[row, chain] for chain in range(CHAINS)]
        for column in cutlass.range_constexpr(CHAINS, columns):
            partial[column % CHAINS] = partial[column % CHAINS] + scores[row, column]
        # Each thread sums its own columns; the quad meets once, in finish().
        row_sum[row] = row_sum[row] * rescale[row] + ((partial[0] + partial[1]) + (partial[2] + partial[3]))

    @cute.jit
    def finish(self, row_extreme: cute.Tensor, row_sum: cute.Tensor, scale_log2: Float32):
        """``(inverse, lse)``: the factor that normalises each row of O, and the natural-log LSE of each row."""
        inverse = cute.make_rmem_tensor(ROWS, Float32)
        lse = cute.make_rmem_tensor(ROWS, Float32)
        for row in cutlass.range_constexpr(ROWS):
            total = cute.arch.warp_reduction_sum(row_sum[row], threads_in_group=QUAD)
            inverse[row] = Float32(1.0) / total
            log2_sum = cute.math.log2(total, fastmath=True)
            lse[row] = (row_extreme[row] * scale_log2 + log2_sum) * Float32(math.log(2.0))
        return inverse, lse


@cute.jit
def rescale_rows(accumulator: cute.Tensor, factor: cute.Tensor):
    """Multiply each row of a (2 rows, columns) view by its factor, in place."""
    for row in cutlass.range_constexpr(cute.size(accumulator, mode=[0])):
        for column in cutlass.range(cute.size(accumulator, mode=[1]), unroll_full=True):
            accumulator[row, column] = accumulator[row, column] * factor[row]

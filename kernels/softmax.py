"""Online softmax in base 2, on one thread's rows of a score tile.

Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; FlashAttention-2 (Dao 2023), section 3.1: O
stays unnormalised until the last block. The softmax scale is folded into the exponent: ``p = exp2(s * scale_log2 -
shift)`` is one FFMA and one MUFU an element.

Lazily: a row's shift follows its extreme only where an exponent would pass it by more than a tolerance. That is rare,
so a block usually needs no quad-wide extreme, no factor, and no rescaling of O. The result is the same softmax: any
shift cancels between O and the sum.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

# Where the exponent's shift starts: finite, so that a fully masked block yields exp2(-inf) = 0 with no guard.
LOWEST_SHIFT = -3.4e38
# Exponents may pass the shift by this much before O and the sum are rescaled: P then stays below 2**8, which loses
# nothing in bf16 and fp16, and sums in float32 stay far from their range. (FlashAttention-4 waits for 8 on Blackwell.)
TOLERANCE = 8.0
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
    def start(self):
        """New ``(shift, row_sum)``: what each row's exponents are reduced by, and its sum so far."""
        shift = cute.make_rmem_tensor(ROWS, Float32)
        row_sum = cute.make_rmem_tensor(ROWS, Float32)
        shift.fill(LOWEST_SHIFT)
        row_sum.fill(0.0)
        return shift, row_sum

    @cute.jit
    def extreme(self, a: Float32, b: Float32) -> Float32:
        return cute.arch.fmin(a, b) if const_expr(self.negative_scale) else cute.arch.fmax(a, b)

    @cute.jit
    def extremes(self, scores: cute.Tensor):
        """The extreme of each row's scores (2 rows, columns) that this thread holds, a quarter of the row."""
        found = cute.make_rmem_tensor(ROWS, Float32)
        for row in cutlass.range_constexpr(ROWS):
            partial = [scores[row, chain] for chain in range(CHAINS)]
            for column in cutlass.range_constexpr(CHAINS, cute.size(scores, mode=[1])):
                partial[column % CHAINS] = self.extreme(partial[column % CHAINS], scores[row, column])
            found[row] = self.extreme(self.extreme(partial[0], partial[1]), self.extreme(partial[2], partial[3]))
        return found

    @cute.jit
    def outgrown(self, extremes: cute.Tensor, shift: cute.Tensor, scale_log2: Float32):
        """Whether an exponent of any row of the warp passes its shift by more than the tolerance; the same answer in
        all lanes.
        """
        excess = cute.arch.fmax(extremes[0] * scale_log2 - shift[0], extremes[1] * scale_log2 - shift[1])
        return cute.arch.vote_any_sync(excess > Float32(TOLERANCE))

    @cute.jit
    def catch_up(self, extremes: cute.Tensor, shift: cute.Tensor, row_sum: cute.Tensor, scale_log2: Float32):
        """Move the shift of each row that outgrew it to the row's extreme, and rescale its sum; the factor of each row
        for what came before. A row's factor depends on that row alone: it is exactly 1 where only others outgrew.
        """
        rescale = cute.make_rmem_tensor(ROWS, Float32)
        for row in cutlass.range_constexpr(ROWS):
            largest = cute.arch.warp_reduction(extremes[row], self.extreme, threads_in_group=QUAD) * scale_log2
            outgrew = largest - shift[row] > Float32(TOLERANCE)
            now = cutlass.select_(outgrew, largest, shift[row])
            rescale[row] = cutlass.select_(outgrew, cute.math.exp2(shift[row] - now, fastmath=True), Float32(1.0))
            shift[row] = now
            row_sum[row] = row_sum[row] * rescale[row]
        return rescale

    @cute.jit
    def exponentiate(
        self,
        scores: cute.Tensor,
        row: cutlass.Constexpr[int],
        row_sum: cute.Tensor,
        shift: cute.Tensor,
        scale_log2: Float32,
    ):
        """Turn one row's scores into probabilities in place and add them to its sum."""
        columns = cute.size(scores, mode=[1])
        for column in cutlass.range_constexpr(columns):
            scores[row, column] = cute.math.exp2(scores[row, column] * scale_log2 - shift[row], fastmath=True)
        partial = [scores[row, chain] for chain in range(CHAINS)]
        for column in cutlass.range_constexpr(CHAINS, columns):
            partial[column % CHAINS] = partial[column % CHAINS] + scores[row, column]
        # Each thread sums its own columns; the quad meets once, in finish().
        row_sum[row] = row_sum[row] + ((partial[0] + partial[1]) + (partial[2] + partial[3]))

    @cute.jit
    def finish(self, shift: cute.Tensor, row_sum: cute.Tensor):
        """``(inverse, lse)``: the factor that normalises each row of O, and the natural-log LSE of each row."""
        inverse = cute.make_rmem_tensor(ROWS, Float32)
        lse = cute.make_rmem_tensor(ROWS, Float32)
        for row in cutlass.range_constexpr(ROWS):
            total = cute.arch.warp_reduction_sum(row_sum[row], threads_in_group=QUAD)
            inverse[row] = Float32(1.0) / total
            log2_sum = cute.math.log2(total, fastmath=True)
            lse[row] = (shift[row] + log2_sum) * Float32(math.log(2.0))
        return inverse, lse


@cute.jit
def rescale_rows(accumulator: cute.Tensor, factor: cute.Tensor):
    """Multiply each row of a (2 rows, columns) view by its factor, in place."""
    for row in cutlass.range_constexpr(cute.size(accumulator, mode=[0])):
        for column in cutlass.range(cute.size(accumulator, mode=[1]), unroll_full=True):
            accumulator[row, column] = accumulator[row, column] * factor[row]

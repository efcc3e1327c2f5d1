"""Online softmax in base 2, on one thread's rows of a score tile.

Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; FlashAttention-2 (Dao 2023), section 3.1: O
stays unnormalised until the last block. The softmax scale is folded into the exponent: ``p = exp2(s * scale_log2 -
shift)`` is one FFMA and one MUFU an element.

Any shift gives the same softmax, because it cancels between O and the sum; it only has to keep p in range. So no block
but a tile's first computes its row maximum. The sums, needed anyway, bound every p: where one passes SUM_LIMIT, which
is rare, the block's scores are made again, the shift of the rows concerned moves to their maximum, and what came before
is rescaled.
"""

import math
import operator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr

from .score import LOG2_E

# Where a row's shift starts: finite, so that masked scores yield exp2(-inf) = 0 with no guard. The first score that a
# row sees then passes every limit.
LOWEST_SHIFT = -3.4e38
# A thread's sum over its columns of a block (a quarter of a row) may reach this before the shift moves. No p is larger:
# far from 65504, fp16's range, and 16 and 32 bit lose no accuracy at any magnitude inside theirs.
SUM_LIMIT = 2.0**10
ROWS = 2  # rows of a WGMMA accumulator that one thread holds
QUAD = 4  # threads that share a row
CHAINS = 4  # independent partial maxima and sums a row: hides the latency of dependent FMNMX and FADD


@dataclass(frozen=True)
class Softmax:
    """``negative_scale``: the exponent is largest where the score is smallest, so the row extreme is a minimum."""

    negative_scale: bool
    # Whether rows may see no key other than by their position: their sum is 0
    blind_rows: bool = False

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
    def largest_exponent(self, scores: cute.Tensor, row: cutlass.Constexpr[int], scale_log2: Float32) -> Float32:
        """The largest exponent of one whole row of the block; ``scores`` is this thread's (2 rows, columns)."""
        own = in_chains(self.extreme, scores, row)
        return cute.arch.warp_reduction(own, self.extreme, threads_in_group=QUAD) * scale_log2

    @cute.jit
    def set_shift(self, scores: cute.Tensor, shift: cute.Tensor, scale_log2: Float32):
        """Shift of each row for the first block that it meets. fmax drops NaN and keeps a masked row's finite."""
        for row in cutlass.range_constexpr(ROWS):
            shift[row] = cute.arch.fmax(shift[row], self.largest_exponent(scores, row, scale_log2))

    @cute.jit
    def exponentiate(self, scores: cute.Tensor, sums: cute.Tensor, shift: cute.Tensor, scale_log2: Float32):
        """Turn scores (2 rows, columns) into probabilities in place; ``sums``: this thread's of each row. The quad
        meets in :meth:`finish`.
        """
        for row in cutlass.range_constexpr(ROWS):
            for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[row, column] = cute.math.exp2(scores[row, column] * scale_log2 - shift[row], fastmath=True)
            sums[row] = in_chains(operator.add, scores, row)

    @cute.jit
    def outgrown(self, sums: cute.Tensor) -> Boolean:
        """Whether a probability of this thread may be too large. NaN is not: no shift would mend it."""
        return cute.arch.fmax(sums[0], sums[1]) > Float32(SUM_LIMIT)

    @cute.jit
    def catch_up(
        self, scores: cute.Tensor, sums: cute.Tensor, shift: cute.Tensor, row_sum: cute.Tensor, scale_log2: Float32
    ):
        """Move the shift of each row that outgrew it to the row's largest exponent, and rescale its sum; the factor of
        each row for what came before. A row's factor depends on that row alone: it is exactly 1 where only others
        outgrew.
        """
        return self.move(lambda row: self.largest_exponent(scores, row, scale_log2), sums, shift, row_sum)

    def move(self, largest_of, sums: cute.Tensor, shift: cute.Tensor, row_sum: cute.Tensor):
        """The same; ``largest_of(row)`` is the row's largest exponent."""
        rescale = cute.make_rmem_tensor(ROWS, Float32)
        for row in range(ROWS):
            largest = largest_of(row)
            outgrew = cute.arch.warp_reduction(sums[row], cute.arch.fmax, threads_in_group=QUAD) > Float32(SUM_LIMIT)
            now = cutlass.select_(outgrew, largest, shift[row])
            rescale[row] = cutlass.select_(outgrew, cute.math.exp2(shift[row] - now, fastmath=True), Float32(1.0))
            shift[row] = now
            row_sum[row] = row_sum[row] * rescale[row]
        return rescale

    @cute.jit
    def add(self, row_sum: cute.Tensor, sums: cute.Tensor):
        """Bring the rows' sums up to date with a block's."""
        for row in cutlass.range_constexpr(ROWS):
            row_sum[row] = row_sum[row] + sums[row]

    @cute.jit
    def finish(self, shift: cute.Tensor, row_sum: cute.Tensor, sink: Float32 | None, constant: Float32 | None):
        """``(inverse, lse)``: the factor that normalises each row of O, and the natural-log LSE of each row. ``sink``:
        one more logit of each row, ``constant``: what all exponents lack; or None.
        """
        inverse = cute.make_rmem_tensor(ROWS, Float32)
        lse = cute.make_rmem_tensor(ROWS, Float32)
        for row in cutlass.range_constexpr(ROWS):
            total = cute.arch.warp_reduction_sum(row_sum[row], threads_in_group=QUAD)
            top, kept = shift[row], Float32(1.0)
            if const_expr(sink is not None):
                # The shift rises to the sink's exponent, which may be far above all scores; -inf changes nothing
                exponent = sink * Float32(LOG2_E)
                if const_expr(constant is not None):
                    exponent -= constant
                top = cute.arch.fmax(top, exponent)
                kept = cute.math.exp2(shift[row] - top, fastmath=True)
                total = total * kept + cute.math.exp2(exponent - top, fastmath=True)
            inverse[row] = kept / total
            if const_expr(self.blind_rows):
                inverse[row] = cutlass.select_(total == Float32(0.0), Float32(0.0), inverse[row])
            log2_sum = cute.math.log2(total, fastmath=True)
            if const_expr(constant is not None):
                log2_sum += constant
            lse[row] = (top + log2_sum) * Float32(math.log(2.0))
        return inverse, lse


@cute.jit
def in_chains(combine: cutlass.Constexpr, values: cute.Tensor, row: cutlass.Constexpr[int]):
    """One row of (2 rows, columns) combined to one value, along CHAINS chains that meet at the end."""
    partial = [values[row, chain] for chain in range(CHAINS)]
    for column in cutlass.range_constexpr(CHAINS, cute.size(values, mode=[1])):
        partial[column % CHAINS] = combine(partial[column % CHAINS], values[row, column])
    return combine(combine(partial[0], partial[1]), combine(partial[2], partial[3]))


@cute.jit
def rescale_rows(accumulator: cute.Tensor, factor: cute.Tensor):
    """Multiply each row of a (2 rows, columns) view by its factor, in place."""
    for row in cutlass.range_constexpr(cute.size(accumulator, mode=[0])):
        for column in cutlass.range(cute.size(accumulator, mode=[1]), unroll_full=True):
            accumulator[row, column] = accumulator[row, column] * factor[row]

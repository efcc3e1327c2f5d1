"""Masks a score tile in registers."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


@cute.jit
def mask_scores(scores: cute.Tensor, column_limits: cute.Tensor, fill: cutlass.Constexpr[float]):
    """Replace the scores of keys that a row does not see.

    ``scores`` is one thread's (2 rows, columns) view of a WGMMA accumulator: column ``c`` is key ``8 * (c // 2) + c %
    2`` of the block, counted from the thread's first key. ``column_limits`` (2) says, in the same count, where each
    row's keys end.
    """
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        limit = column_limits[row]
        for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            # A comparison with a constant: one ISETP and one FSEL an element.
            visible = Int32(8 * (column // 2) + column % 2) < limit
            scores[row, column] = cutlass.select_(visible, scores[row, column], Float32(fill))

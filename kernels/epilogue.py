"""The end of a Q tile: O is normalised, LSE leaves. How O leaves: output.py."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .blocks import Band, RowKeys
from .softmax import QUAD, ROWS


@cute.jit
def normalise(
    acc_o: cute.Tensor,
    inverse: cute.Tensor,
    row_lse: cute.Tensor,
    keys: RowKeys,
    band: cutlass.Constexpr[Band],
    sink: Float32 | None,
    hidden_rows: cutlass.Constexpr[bool] = False,
):
    """Divide each row of O (2 rows, columns) by its sum. A row that sees no key becomes 0 with LSE -inf or ``sink``,
    whatever V held. ``hidden_rows``: a row's keys may all be hidden by a hook: ``inverse`` is 0 then.
    """
    for row in cutlass.range_constexpr(ROWS):
        if const_expr(band.blind_rows or hidden_rows):
            sees_none = Boolean(False)
            if const_expr(band.blind_rows):
                sees_none = band.sees_none(keys, row)
            if const_expr(hidden_rows):
                sees_none = sees_none | (inverse[row] == Float32(0.0))
            of_none = Float32(-math.inf) if const_expr(sink is None) else sink
            row_lse[row] = cutlass.select_(sees_none, of_none, row_lse[row])
        for column in cutlass.range(cute.size(acc_o, mode=[1]), unroll_full=True):
            value = acc_o[row, column] * inverse[row]
            if const_expr(band.blind_rows or hidden_rows):
                value = cutlass.select_(sees_none, Float32(0.0), value)
            acc_o[row, column] = value


@cute.jit
def store_lse(lse: cute.Tensor, values: cute.Tensor, first_row: Int32, head: Int32, batch: Int32):
    """One thread of each quad writes its rows, ``first_row`` and 8 below it; rows past the end are not written."""
    if cute.arch.lane_idx() % QUAD == 0:
        for index in cutlass.range_constexpr(ROWS):
            row = first_row + 8 * index
            if row < lse.shape[2]:
                lse[batch, head, row] = values[index]

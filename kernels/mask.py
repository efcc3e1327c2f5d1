"""Masks a score tile in registers."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

WORD = 32  # columns that have a bit in a word
BIT = tuple(1 << column if column < 31 else -(1 << 31) for column in range(WORD))  # of a column, as an Int32


@cute.jit
def columns_below(place: Int32) -> Int32:
    """A bit for each of up to 32 columns, as mask_scores() counts them, whose place is below ``place``."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 columns, more; shr.s32 columns, {$r0}, 3; and.b32 more, {$r0}, 7; min.s32 more, more, 2;"
        " mad.lo.s32 columns, columns, 2, more; max.s32 columns, columns, 0; bmsk.clamp.b32 {$w0}, 0, columns; }",
        write_only_types=[Int32],
        read_only_args=[place],
    )


def words_between(first: Int32, limit: Int32, columns: int):
    """The bits of columns whose place is in [first, limit), in words."""
    return [
        columns_below(limit - 4 * column) & ~columns_below(first - 4 * column) for column in range(0, columns, WORD)
    ]


def inside(place, first, limit):
    """Whether ``first <= place < limit``, with constant ``place`` a comparison each; None: no bound."""
    if first is None:
        return Int32(place) < limit
    if limit is None:
        return Int32(place) >= first
    return (Int32(place) >= first) & (Int32(place) < limit)


@cute.jit
def mask_scores(
    scores: cute.Tensor,
    first_columns: cute.Tensor | None,
    column_limits: cute.Tensor | None,
    fill: cutlass.Constexpr[float],
):
    """Replace the scores of keys that a row does not see.

    ``scores`` is one thread's (2 rows, columns) view of a WGMMA accumulator: column ``c`` is key ``8 * (c // 2) + c %
    2`` of the block, counted from the thread's first key. ``first_columns`` and ``column_limits`` (2) say, in the same
    count, where each row's keys begin and end; None: not in this block.
    """
    columns = cute.size(scores, mode=[1])
    both = first_columns is not None and column_limits is not None
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        first = first_columns[row] if const_expr(first_columns is not None) else None
        limit = column_limits[row] if const_expr(column_limits is not None) else None
        words = words_between(first, limit, columns) if both else None
        for column in cutlass.range_constexpr(columns):
            # One FSEL an element, and an ISETP with a constant for a bound, or for two a LOP3
            if const_expr(both):
                visible = words[column // WORD] & Int32(BIT[column % WORD]) != 0
            else:
                visible = inside(8 * (column // 2) + column % 2, first, limit)
            scores[row, column] = cutlass.select_(visible, scores[row, column], Float32(fill))

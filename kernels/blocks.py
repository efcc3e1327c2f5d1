"""Which K/V blocks a Q tile visits, and which of them need a mask."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@dataclass(frozen=True)
class Band:
    """Keys that a query sees: ``j <= i + seqlen_k - seqlen_q + right`` where a right bound is present, and ``j <
    seqlen_k``.

    Masks align to the bottom right: the last query sees the last key when ``right`` is 0 (causal).
    """

    tile_n: int
    right_bound: bool

    @cute.jit
    def key_limit(self, row: Int32, seqlen_q: Int32, seqlen_k: Int32, right: Int32) -> Int32:
        """Number of leading keys that query ``row`` sees; not positive where it sees none."""
        limit = seqlen_k
        if const_expr(self.right_bound):
            limit = cutlass.min(seqlen_k, row + seqlen_k - seqlen_q + right + 1)
        return limit

    @cute.jit
    def blocks(self, row_begin: Int32, rows: Int32, seqlen_q: Int32, seqlen_k: Int32, right: Int32):
        """``(full, end, keys)`` for the rows from ``row_begin``: blocks [0, full) need no mask, [full, end) do, no
        row sees a later one. ``keys`` counts the leading keys that any of the rows sees. ``end`` and ``keys`` are 0
        where all rows lie past the last query.
        """
        fewest = self.key_limit(row_begin, seqlen_q, seqlen_k, right)
        last_row = cutlass.min(row_begin + rows, seqlen_q) - 1
        keys = cutlass.max(self.key_limit(last_row, seqlen_q, seqlen_k, right), 0)
        keys = cutlass.select_(row_begin < seqlen_q, keys, Int32(0))
        full = cutlass.max(fewest, 0) // self.tile_n
        end = (keys + self.tile_n - 1) // self.tile_n
        return full, end, keys

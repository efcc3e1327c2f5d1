"""Which K/V blocks a Q tile visits, and which of them need a mask."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

NO_QUERY = 2**30  # more than any seqlen_q


@dataclass(frozen=True)
class Band:
    """Keys that a query sees: ``j <= i + seqlen_k - seqlen_q + right`` where a right bound is present, and ``j <
    seqlen_k``.

    Masks align to the bottom right: the last query sees the last key when ``right`` is 0 (causal).
    """

    tile_n: int
    right_bound: bool
    packed: bool = False  # lengths are those of one of several sequences: there may be no key

    @property
    def blind_rows(self):
        """True where a query may see no key."""
        return self.right_bound or self.packed

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

    @cute.jit
    def first_query(self, key: Int32, seqlen_q: Int32, seqlen_k: Int32, right: Int32) -> Int32:
        """The first query that sees ``key``: may be negative; past all queries for a key past the end."""
        first = Int32(0)
        if const_expr(self.right_bound):
            first = key - (seqlen_k - seqlen_q) - right
        return cutlass.select_(key < seqlen_k, first, Int32(NO_QUERY))

    @cute.jit
    def query_blocks(
        self, n_block: Int32, rows: cutlass.Constexpr[int], seqlen_q: Int32, seqlen_k: Int32, right: Int32
    ):
        """``(first, unmasked, end)`` for one K/V tile: blocks [first, unmasked) of ``rows`` queries need a mask,
        [unmasked, end) do not, no query of an earlier one sees any of its keys.
        """
        first_key = n_block * self.tile_n
        end = (seqlen_q + rows - 1) // rows
        first, unmasked = Int32(0), Int32(0)
        if const_expr(self.right_bound):
            first = cutlass.max(self.first_query(first_key, seqlen_q, seqlen_k, right), 0) // rows
            last_key = first_key + self.tile_n - 1
            unmasked = cutlass.max(self.first_query(last_key, seqlen_q, seqlen_k, right), 0)
            unmasked = cutlass.min((unmasked + rows - 1) // rows, end)
        # A tile that reaches past the last key: its scores there are 0, whatever the LSE
        unmasked = cutlass.select_(first_key + self.tile_n > seqlen_k, end, unmasked)
        return first, unmasked, end

    @cute.jit
    def turn(
        self,
        n_block: Int32,
        block: Int32,
        rows: cutlass.Constexpr[int],
        seqlen_q: Int32,
        seqlen_k: Int32,
        right: Int32,
    ) -> Int32:
        """How many K/V tiles visit a block of ``rows`` queries before this one: earlier ones, or with a right bound
        later ones, which reach their first block, on the diagonal, sooner. So each tile comes to a block a step later
        than the one before it, and waits for nobody.
        """
        turn = n_block
        if const_expr(self.right_bound):
            last_row = block * rows + rows - 1
            last_tile = (cutlass.min(seqlen_k, last_row + seqlen_k - seqlen_q + right + 1) - 1) // self.tile_n
            turn = last_tile - n_block
        return turn

"""Which K/V blocks a Q tile visits, and which of them need a mask; and the transposed question of the backward."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from .softmax import ROWS

NO_QUERY = 2**30  # more than any seqlen_q


class Sides(NamedTuple):
    """On which sides a block is masked. The end of the keys counts as the right one."""

    left: bool
    right: bool


NO_SIDE = Sides(left=False, right=False)
LEFT = Sides(left=True, right=False)


class KeyBlocks(NamedTuple):
    """Blocks of keys, counted from the tile's origin, for some rows: [first, inner) need a mask on the left, [inner,
    full) none, [full, end) one on the right, and those below ``inner`` also on the left; no row sees another block.
    """

    first: Int32
    inner: Int32  # may be more than full
    full: Int32  # may be more than end
    end: Int32  # first and end are 0 where no row sees a key
    keys: Int32  # from the origin on, up to the last that any of the rows sees


class DiagonalFirst(NamedTuple):
    """All blocks of a tile, beginning at its diagonal: down to the first one, then from the last one down. Where scores
    fall with the distance from the diagonal, a row's largest come first; in any other order nearly each block would
    outgrow the shift of those before it, and be done twice.
    """

    pivot: Int32  # the block of the tile's last row's diagonal, or the nearest one
    end: Int32
    near: Int32  # of some of its rows: blocks in front hold only keys in front of these rows' diagonals; up to pivot

    def block(self, step: Int32) -> Int32:
        """The block that comes ``step`` blocks after the pivot."""
        block = self.pivot - step
        return cutlass.select_(block < 0, block + self.end, block)

    def side(self, behind: Int32, own: KeyBlocks) -> KeyBlocks:
        """Those of the rows' ``own`` that come after the pivot, as if one more came before: in front of it, or
        ``behind``. Those between near and pivot are among the masked ones.
        """
        last = self.pivot + 1
        inner, full, end = (
            cutlass.select_(behind == 0, *each)
            for each in ((Int32(0), last), (self.near, cutlass.max(own.full, last)), (last, own.end + 1))
        )
        return KeyBlocks(own.first, inner, full, end, own.keys)


class RowKeys(NamedTuple):
    """Where the keys of a thread's two rows end."""

    # (2); with a left bound one number, of the first row if keys had no end, and the second row's is 8 more: registers
    limits: cute.Tensor | Int32
    end: Int32 | None  # of all keys, with a left bound


class QueryBlocks(NamedTuple):
    """Blocks of queries that a K/V tile visits, [first, end): [first, unmasked) need a mask on the right (and those
    from ``masked`` on also on the left), [unmasked, masked) none, [masked, end) one on the left.
    """

    first: Int32
    unmasked: Int32
    masked: Int32  # may be less than unmasked
    end: Int32  # not more than first where no query sees a key of the tile


@dataclass(frozen=True)
class Band:
    """Keys that a query sees: ``j <= i + seqlen_k - seqlen_q + right`` where a right bound is present, ``j >= i +
    seqlen_k - seqlen_q - left`` where a left one is, and ``j < seqlen_k``.

    Masks align to the bottom right: the last query sees the last key when ``right`` is 0 (causal). Neither bound is
    negative, so a left one takes from no query all of its keys.

    With a left bound a Q tile counts its blocks from its origin, the first key that it sees, and not from key 0: that
    is as few blocks as the band needs, and none holds a key in front of all its rows, whose NaN in V would reach them.
    """

    tile_n: int
    right_bound: bool
    left_bound: bool = False  # only with a right bound: one that hides nothing will do
    packed: bool = False  # lengths are those of one of several sequences: there may be no key

    @property
    def blind_rows(self):
        """True where a query may see no key."""
        return self.right_bound or self.packed

    @property
    def unseen_tiles(self):
        """True where there may be no query that sees a key of a K/V tile."""
        return self.left_bound or self.packed

    chunked = False  # chunks.py

    @property
    def sides(self):
        """Of a block at the right end of the band: a narrow band ends on both sides in it."""
        return Sides(self.left_bound, right=True)

    @cute.jit
    def key_limit(self, row: Int32, seqlen_q: Int32, seqlen_k: Int32, right) -> Int32:
        """Number of leading keys that query ``row`` sees, those that a left bound hides among them; not positive where
        it sees none.
        """
        limit = seqlen_k
        if const_expr(self.right_bound):
            limit = cutlass.min(seqlen_k, row + seqlen_k - seqlen_q + right + 1)
        return limit

    def first_key(self, row: Int32, seqlen_q: Int32, seqlen_k: Int32, left) -> Int32:
        """The first key that query ``row`` sees by a left bound: may be negative."""
        return row + seqlen_k - seqlen_q - left

    @cute.jit
    def origin(self, row_begin: Int32, seqlen_q: Int32, seqlen_k: Int32, left) -> Int32:
        """The first key that the rows from ``row_begin`` see, where a tile of these begins to count keys."""
        first = Int32(0)
        if const_expr(self.left_bound):
            first = cutlass.max(self.first_key(row_begin, seqlen_q, seqlen_k, left), 0)
        return first

    @cute.jit
    def blocks(
        self,
        row_begin: Int32,
        rows: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        right,
        left,
        origin: Int32,
    ) -> KeyBlocks:
        """For the rows from ``row_begin``, of a tile with this ``origin``. There is no block and no key where all rows
        lie past the last query.
        """
        fewest = self.key_limit(row_begin, seqlen_q, seqlen_k, right)
        last_row = cutlass.min(row_begin + rows, seqlen_q) - 1
        most = self.key_limit(last_row, seqlen_q, seqlen_k, right)
        first, inner = Int32(0), Int32(0)
        if const_expr(self.left_bound):
            fewest, most = fewest - origin, most - origin
            first = cutlass.max(self.first_key(row_begin, seqlen_q, seqlen_k, left) - origin, 0) // self.tile_n
            inner = cutlass.max(self.first_key(last_row, seqlen_q, seqlen_k, left) - origin, 0)
            inner = (inner + self.tile_n - 1) // self.tile_n
        keys = cutlass.max(most, 0)
        keys = cutlass.select_(row_begin < seqlen_q, keys, Int32(0))
        full = cutlass.max(fewest, 0) // self.tile_n
        end = (keys + self.tile_n - 1) // self.tile_n
        first = cutlass.min(first, end)  # rows past the last query
        return KeyBlocks(first, inner, full, end, keys)

    @cute.jit
    def diagonal_first(
        self, row_begin: Int32, rows: Int32, own_begin: Int32, seqlen_q: Int32, seqlen_k: Int32, end: Int32
    ) -> DiagonalFirst:
        """Of a tile of ``end`` blocks, and of those of its rows that begin at ``own_begin``."""
        shift = seqlen_k - seqlen_q
        last_row = cutlass.min(row_begin + rows, seqlen_q) - 1
        pivot = cutlass.min(cutlass.max(last_row + shift, 0) // self.tile_n, end - 1)
        near = cutlass.min(cutlass.max(own_begin + shift + 1, 0) // self.tile_n, pivot)
        return DiagonalFirst(pivot, end, near)

    @cute.jit
    def end_is_masked(self, inner: Int32, full: Int32, end: Int32) -> Boolean:
        """Whether the last block of these KeyBlocks needs a mask."""
        masked = full < end
        if const_expr(self.left_bound):
            masked = masked | (inner >= end)
        return masked

    @cute.jit
    def row_keys(self, first_row: Int32, seqlen_q: Int32, seqlen_k: Int32, run, origin: Int32) -> RowKeys:
        """Of a thread's rows, ``first_row`` and 8 below it, in a tile with this ``origin``."""
        if const_expr(self.left_bound):
            return RowKeys(first_row + seqlen_k - seqlen_q + run.right + 1 - origin, seqlen_k - origin)
        limits = cute.make_rmem_tensor(ROWS, Int32)
        for row in cutlass.range_constexpr(ROWS):
            limits[row] = self.key_limit(first_row + 8 * row, seqlen_q, seqlen_k, run.right)
        return RowKeys(limits, None)

    @cute.jit
    def sees_none(self, keys: RowKeys, row: cutlass.Constexpr[int]) -> Boolean:
        """Whether one of the thread's rows sees no key."""
        if const_expr(self.left_bound and self.packed):
            return cutlass.min(keys.limits + 8 * row, keys.end) <= 0
        if const_expr(self.left_bound):
            return keys.limits + 8 * row <= 0
        return keys.limits[row] <= 0

    @cute.jit
    def columns(self, keys: RowKeys, first_column: Int32, sides: cutlass.Constexpr[Sides], run):
        """``(first columns, column limits)`` of the thread's rows as mask_scores takes them, None for a side that is
        not masked. ``first_column``: the thread's first key of the block, counted from the tile's origin.
        """
        firsts, limits = (cute.make_rmem_tensor(ROWS, Int32) if side else None for side in sides)
        for row in cutlass.range_constexpr(ROWS):
            if const_expr(not self.left_bound):
                limits[row] = keys.limits[row] - first_column
            else:
                limit = keys.limits + 8 * row - first_column
                if const_expr(sides.left):
                    firsts[row] = limit - self.width(run)
                if const_expr(sides.right):
                    limits[row] = cutlass.min(limit, keys.end - first_column)
        return firsts, limits

    @cute.jit
    def first_query(self, key: Int32, seqlen_q: Int32, seqlen_k: Int32, right) -> Int32:
        """The first query that sees ``key``: may be negative; past all queries for a key past the end."""
        first = Int32(0)
        if const_expr(self.right_bound):
            first = key - (seqlen_k - seqlen_q) - right
        return cutlass.select_(key < seqlen_k, first, Int32(NO_QUERY))

    def end_query(self, key: Int32, seqlen_q: Int32, seqlen_k: Int32, left) -> Int32:
        """One more than the last query that sees ``key`` by a left bound: may be past all queries."""
        return key - (seqlen_k - seqlen_q) + left + 1

    def width(self, run):
        """How many keys a query sees and queries a key, those that do not exist counted as well; None without a left
        bound.
        """
        return run.left + run.right + 1 if self.left_bound else None

    @cute.jit
    def query_blocks(
        self,
        n_block: Int32,
        rows: cutlass.Constexpr[int],
        seqlen_q: Int32,
        seqlen_k: Int32,
        right,
        left,
    ) -> QueryBlocks:
        """Blocks of ``rows`` queries for one K/V tile."""
        first_key = n_block * self.tile_n
        last_key = first_key + self.tile_n - 1
        end = (seqlen_q + rows - 1) // rows
        masked = end
        if const_expr(self.left_bound):
            last = self.end_query(cutlass.min(last_key, seqlen_k - 1), seqlen_q, seqlen_k, left)
            end = (cutlass.max(cutlass.min(last, seqlen_q), 0) + rows - 1) // rows
            masked = cutlass.min(cutlass.max(self.end_query(first_key, seqlen_q, seqlen_k, left), 0) // rows, end)
        first, unmasked = Int32(0), Int32(0)
        if const_expr(self.right_bound):
            first = cutlass.max(self.first_query(first_key, seqlen_q, seqlen_k, right), 0) // rows
            unmasked = cutlass.max(self.first_query(last_key, seqlen_q, seqlen_k, right), 0)
            unmasked = cutlass.min((unmasked + rows - 1) // rows, end)
        # A tile that reaches past the last key: its scores there are 0, whatever the LSE
        unmasked = cutlass.select_(first_key + self.tile_n > seqlen_k, end, unmasked)
        return QueryBlocks(first, unmasked, masked, end)

    @cute.jit
    def first_head(self, work: NamedTuple, blocks: QueryBlocks) -> Int32:
        """The first query head of a K/V tile's ``work``; past the last one where no query sees any of its keys: dK
        and dV are 0 then.
        """
        head = work.head
        if const_expr(self.unseen_tiles):
            head = cutlass.select_(blocks.first < blocks.end, head, work.last_head)
        return head

    @cute.jit
    def turn(
        self,
        n_block: Int32,
        block: Int32,
        rows: cutlass.Constexpr[int],
        seqlen_q: Int32,
        seqlen_k: Int32,
        right,
    ) -> Int32:
        """How many K/V tiles visit a block of ``rows`` queries before this one: earlier ones, or with a right bound
        later ones, which reach their first block, on the diagonal, sooner. So each tile comes to a block a step later
        than the one before it, and waits for nobody. A left bound only takes the last of them away: the tiles that
        visit a block are neighbours, and CTAs take them in this order.
        """
        turn = n_block
        if const_expr(self.right_bound):
            last_row = block * rows + rows - 1
            last_tile = (self.key_limit(last_row, seqlen_q, seqlen_k, right) - 1) // self.tile_n
            turn = last_tile - n_block
        return turn

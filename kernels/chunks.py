"""Attention in chunks: a query sees keys of its own chunk only, besides the bounds of its band."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .blocks import NO_QUERY, Band, Sides
from .softmax import ROWS


class Reach(NamedTuple):
    """One bound of a ChunkedBand, where Band has a number."""

    bound: Int32
    chunk: Int32


class ChunkKeys(NamedTuple):
    """Where the keys of a thread's two rows begin and end, counted from the tile's origin."""

    firsts: cute.Tensor  # (2)
    limits: cute.Tensor  # (2)


@dataclass(frozen=True)
class ChunkedBand(Band):
    """Band, and the key on a query's diagonal and those that it sees lie in one chunk: ``j // chunk == (i + seqlen_k -
    seqlen_q) // chunk``. Both bounds are present, of a value that hides nothing where there is none.

    From query to query, where its keys begin and where they end never goes back, nor do a key's queries: all else about
    blocks is Band's.
    """

    chunked = True

    @cute.jit
    def key_limit(self, row: Int32, seqlen_q: Int32, seqlen_k: Int32, right: Reach) -> Int32:
        place = row + seqlen_k - seqlen_q
        limit = cutlass.min(place + right.bound + 1, chunk_begin(place, right.chunk) + right.chunk)
        # A query in front of all keys stands in no chunk of theirs
        return cutlass.select_(place < 0, Int32(0), cutlass.min(seqlen_k, limit))

    @cute.jit
    def first_key(self, row: Int32, seqlen_q: Int32, seqlen_k: Int32, left: Reach) -> Int32:
        place = row + seqlen_k - seqlen_q
        return cutlass.max(place - left.bound, chunk_begin(place, left.chunk))

    @cute.jit
    def row_keys(self, first_row: Int32, seqlen_q: Int32, seqlen_k: Int32, run, origin: Int32) -> ChunkKeys:
        firsts, limits = (cute.make_rmem_tensor(ROWS, Int32) for _ in range(2))
        for row in cutlass.range_constexpr(ROWS):
            place = first_row + 8 * row, seqlen_q, seqlen_k
            firsts[row] = self.first_key(*place, run.left) - origin
            limits[row] = self.key_limit(*place, run.right) - origin
        return ChunkKeys(firsts, limits)

    @cute.jit
    def sees_none(self, keys: ChunkKeys, row: cutlass.Constexpr[int]):
        return keys.limits[row] <= 0

    @cute.jit
    def columns(self, keys: ChunkKeys, first_column: Int32, sides: cutlass.Constexpr[Sides], run):
        firsts, limits = (cute.make_rmem_tensor(ROWS, Int32) if side else None for side in sides)
        for row in cutlass.range_constexpr(ROWS):
            if const_expr(sides.left):
                firsts[row] = keys.firsts[row] - first_column
            if const_expr(sides.right):
                limits[row] = keys.limits[row] - first_column
        return firsts, limits

    @cute.jit
    def first_query(self, key: Int32, seqlen_q: Int32, seqlen_k: Int32, right: Reach) -> Int32:
        first = cutlass.max(key - right.bound, chunk_begin(key, right.chunk)) - (seqlen_k - seqlen_q)
        return cutlass.select_(key < seqlen_k, first, Int32(NO_QUERY))

    @cute.jit
    def end_query(self, key: Int32, seqlen_q: Int32, seqlen_k: Int32, left: Reach) -> Int32:
        end = cutlass.min(key + left.bound + 1, chunk_begin(key, left.chunk) + left.chunk)
        return end - (seqlen_k - seqlen_q)

    def width(self, run):
        """There is none: a key's queries may end at the chunk's end."""
        return None


@cute.jit
def chunk_begin(place: Int32, chunk: Int32) -> Int32:
    """The first key of the chunk in which a key stands; that of the first chunk in front of all keys."""
    return cutlass.max(place, 0) // chunk * chunk


def make_band(config):
    """The Band of a kernel's configuration."""
    kind = ChunkedBand if config.chunked else Band
    return kind(config.tile_n, config.right_bound, config.left_bound, config.packed)


def make_bounds(config, right: Int32, left: Int32 | None, chunk: Int32 | None):
    """``(right, left)`` as its methods take them."""
    return (Reach(right, chunk), Reach(left, chunk)) if config.chunked else (right, left)

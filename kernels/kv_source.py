"""Where K and V tiles come from, and how V rows that no query sees stay out of the result."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .args import TiledTensor, partition


@dataclass(frozen=True)
class DenseValues:
    """Tiles of V.

    A masked key has P = 0, but 0 · NaN is NaN: the V rows of keys that no row of the Q tile sees must be 0 in shared
    memory. TMA writes 0 only past the end of a dimension. Where the tile's keys can end before the tensor does
    (``cut``), V is therefore viewed with its length twice: as ``r`` of extent tile_n and as ``c``, both with the row
    stride, so that (r, c) is key ``r + c - tile_n``. A box that starts at ``r = tile_n - valid`` and ``c = first key
    + valid`` holds ``valid`` rows of V, then zeros.
    """

    tile_n: int
    head_dim_v: int
    cut: bool

    @cute.jit
    def view(self, v: cute.Tensor) -> cute.Tensor:
        """(length, head_dim_v, heads, batch) as TMA shall see it."""
        if const_expr(not self.cut):
            return v
        length, head_dim_v, heads, batch = v.shape
        row, column, head_stride, batch_stride = v.stride
        # The base lies tile_n rows before V; no key before 0 is ever addressed.
        base = (v.iterator - self.tile_n * row).align(16)
        layout = cute.make_layout(
            (self.tile_n, head_dim_v, length + 1, heads, batch), stride=(row, column, row, head_stride, batch_stride)
        )
        return cute.make_tensor(base, layout)

    @cute.jit
    def tile(
        self,
        tiled_v: TiledTensor,
        shared: cute.Tensor,
        block: Int32,
        origin: Int32,
        keys: Int32,
        head: Int32,
        batch: Int32,
    ):
        """``(source, stages)`` of the TMA copy of one block, counted from key ``origin``, as ``keys`` are; those from
        ``keys`` on become 0. With ``origin`` other than 0 only where V is cut.
        """
        box = (self.tile_n, self.head_dim_v)
        if const_expr(self.cut):
            valid = cutlass.min(keys - block * self.tile_n, self.tile_n)
            rows = tiled_v.tensor[None, None, origin + block * self.tile_n + valid, head, batch]
            source = cute.local_tile(cute.domain_offset((self.tile_n - valid, 0), rows), box, (0, 0))
        else:
            source = cute.local_tile(tiled_v.tensor[None, None, head, batch], box, (block, 0))
        stages, source = partition(tiled_v, shared, source)
        return source, stages

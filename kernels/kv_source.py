"""Where K and V tiles come from, and how V rows that no query sees stay out of the result."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .args import TiledTensor, partition
from .cut_rows import CutRows


@dataclass(frozen=True)
class DenseValues:
    """Tiles of V.

    A masked key has P = 0, but 0 · NaN is NaN: the V rows of keys that no row of the Q tile sees must be 0 in shared
    memory. TMA writes 0 only past the end of a dimension. Where the tile's keys can end before the tensor does
    (``cut``), boxes are cut (CutRows).
    """

    tile_n: int
    head_dim_v: int
    cut: bool

    @property
    def boxes(self):
        return CutRows(self.tile_n, self.head_dim_v)

    @cute.jit
    def view(self, v: cute.Tensor) -> cute.Tensor:
        """(length, head_dim_v, heads, batch) as TMA shall see it."""
        return self.boxes.view(v) if const_expr(self.cut) else v

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
        """``(source, stages)`` of the TMA copy of one block, counted from row ``origin``, as ``keys`` are; those from
        ``keys`` on become 0. With ``origin`` other than 0 only where V is cut.
        """
        if const_expr(self.cut):
            valid = cutlass.min(keys - block * self.tile_n, self.tile_n)
            rows = tiled_v.tensor[None, None, None, head, batch]
            source = self.boxes.box(rows, origin + block * self.tile_n, valid)
        else:
            box = (self.tile_n, self.head_dim_v)
            source = cute.local_tile(tiled_v.tensor[None, None, head, batch], box, (block, 0))
        stages, source = partition(tiled_v, shared, source)
        return source, stages

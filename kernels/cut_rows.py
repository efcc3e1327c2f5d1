"""Boxes that TMA cuts where rows end, though the tensor goes on."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class CutRows:
    """Boxes of ``rows`` rows, of which only the first ones are moved.

    TMA reads zeros, and writes nothing, only past the end of a dimension. A tensor is therefore viewed with its length
    twice: as ``r`` of extent ``rows`` and as ``c``, both with the row stride, so that (r, c) is row ``r + c - rows``. A
    box that starts at ``r = rows - valid`` and ``c = first row + valid`` has ``valid`` rows of the tensor, then none.
    """

    rows: int
    columns: int

    @cute.jit
    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        """(length, columns, heads, batch) as TMA shall see it."""
        length, columns, heads, batch = tensor.shape
        row, column, head_stride, batch_stride = tensor.stride
        # The base lies a box before the tensor; no row before 0 is ever addressed.
        base = (tensor.iterator - self.rows * row).align(16)
        layout = cute.make_layout(
            (self.rows, columns, length + 1, heads, batch), stride=(row, column, row, head_stride, batch_stride)
        )
        return cute.make_tensor(base, layout)

    @cute.jit
    def box(self, rows: cute.Tensor, first: Int32, valid: Int32):
        """The box whose ``valid`` rows, at most all, begin at row ``first``. ``rows``: of one head, (r, columns, c)."""
        end = cute.domain_offset((self.rows - valid, 0), rows[None, None, first + valid])
        return cute.local_tile(end, (self.rows, self.columns), (0, 0))

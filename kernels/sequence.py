"""One sequence: its lengths, and where its rows are."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class Sequence(NamedTuple):
    """``offset_q``, ``offset_k``: the rows of q and of k at which it begins; None where it is all rows of a batch."""

    seqlen_q: Int32
    seqlen_k: Int32
    offset_q: Int32 | None = None
    offset_k: Int32 | None = None
    number: Int32 | None = None  # among the sequences, with slopes or hooks

    def query_row(self, query):
        """The row of q of one of its queries."""
        return query if self.offset_q is None else self.offset_q + query

    def key_row(self, key):
        """The row of k of one of its keys."""
        return key if self.offset_k is None else self.offset_k + key

    def queries_of(self, tensor: cute.Tensor):
        """Its rows of (total, columns, heads, batch), beside q's."""
        return rows_of(tensor, self.offset_q, self.seqlen_q)

    def keys_of(self, tensor: cute.Tensor):
        """The same beside k's."""
        return rows_of(tensor, self.offset_k, self.seqlen_k)


def rows_of(tensor: cute.Tensor, offset: Int32 | None, length: Int32, mode: int = 0):
    """``length`` entries of a tensor's ``mode`` from ``offset`` on; all where that is None."""
    if offset is None:
        return tensor
    place = tuple(offset if each == mode else 0 for each in range(len(tensor.shape)))
    shape = tuple(length if each == mode else size for each, size in enumerate(tensor.shape))
    iterator = cute.domain_offset(place, tensor).iterator
    return cute.make_tensor(iterator, cute.make_layout(shape, stride=tensor.stride))


def behind(tensor: cute.Tensor, offset: Int32 | None):
    """A tensor from row ``offset`` on; all of it where that is None."""
    return tensor if offset is None else cute.domain_offset((offset, *(0,) * (len(tensor.shape) - 1)), tensor)

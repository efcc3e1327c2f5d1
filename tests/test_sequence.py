"""Where a sequence's rows are in packed tensors: the kernels' own layouts, compiled for the CPU."""

import pytest
import torch

import hopper_fa3.compile  # noqa: F401  chooses the DSL's target, which cutlass takes when it is first imported

# isort: split
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

from hopper_fa3.kernels.cut_rows import CutRows
from hopper_fa3.kernels.packed_backward import lines_of
from hopper_fa3.kernels.packed_forward import one_batch, one_more_mode
from hopper_fa3.kernels.sequence import Sequence, rows_of

TOTAL, HEADS, COLUMNS = 23, 3, 8


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


@cute.jit
def copy_rows(source: cute.Tensor, target: cute.Tensor, offset: cutlass.Int32, length: cutlass.Int32):
    """A sequence's rows of (total, heads, columns), which is a view of three dimensions in the kernels."""
    own = Sequence(length, length, offset, offset).queries_of(one_batch(source))
    for row in range(own.shape[0]):
        for head in range(HEADS):
            for column in range(COLUMNS):
                target[row, head, column] = own[row, column, head, 0]


@cute.jit
def copy_lse(source: cute.Tensor, target: cute.Tensor, offset: cutlass.Int32, length: cutlass.Int32):
    own = rows_of(one_more_mode(source), offset, length, mode=2)
    for row in range(own.shape[2]):
        for head in range(HEADS):
            target[head, row] = own[0, head, row]


@cute.jit
def copy_lines(source: cute.Tensor, target: cute.Tensor, offset: cutlass.Int32, length: cutlass.Int32):
    own = lines_of(one_more_mode(source), offset)
    for line in range(length):
        for head in range(HEADS):
            for column in range(COLUMNS):
                target[head, line, column] = own[0, head, line, column]


@pytest.mark.parametrize(
    ("function", "shape", "mode"),
    [
        (copy_rows, (TOTAL, HEADS, COLUMNS), 0),
        (copy_lse, (HEADS, TOTAL), 1),
        (copy_lines, (HEADS, TOTAL, COLUMNS), 1),
    ],
)
def test_a_sequence_has_its_own_rows(function, shape, mode):
    source, found = numbered(*shape), torch.empty(shape, dtype=torch.int32)
    tensors = from_dlpack(source), from_dlpack(found)
    compiled = cute.compile(function, *tensors, cutlass.Int32(0), cutlass.Int32(0))
    for offset, length in ((0, TOTAL), (5, 7), (22, 1)):
        found.fill_(-1)
        compiled(*tensors, offset, length)
        assert torch.equal(found.narrow(mode, 0, length), source.narrow(mode, offset, length))
        assert (found.narrow(mode, length, TOTAL - length) == -1).all()


@cute.jit
def copy_box(source: cute.Tensor, target: cute.Tensor, first: cutlass.Int32, valid: cutlass.Int32):
    """The rows of a cut box that lie within the first dimension, as TMA finds them; others stay as they are."""
    boxes = CutRows(4, COLUMNS)
    view = boxes.view(one_batch(source))
    for row in range(valid):
        for column in range(COLUMNS):
            target[row, column] = view[4 - valid + row, column, first + valid, 1, 0]


def test_a_box_ends_with_its_valid_rows():
    source, found = numbered(TOTAL, HEADS, COLUMNS), torch.empty(4, COLUMNS, dtype=torch.int32)
    tensors = from_dlpack(source, assumed_align=16), from_dlpack(found)
    compiled = cute.compile(copy_box, *tensors, cutlass.Int32(0), cutlass.Int32(0))
    for first in range(TOTAL):
        for valid in range(1, min(4, TOTAL - first) + 1):
            compiled(*tensors, first, valid)
            assert torch.equal(found[:valid], source[first : first + valid, 1])
            assert first + valid <= TOTAL  # the third dimension's extent is one more

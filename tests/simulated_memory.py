"""Memory and registers as the simulated warps of simulated_dsl.py see them.

A warp holds 16 of the 64 rows of its warpgroup, as arrays in float64.
"""

from types import SimpleNamespace

import numpy as np
from simulated_dsl import require

WARPGROUP_ROWS, WARP_ROWS = 64, 16


def whole(tile):
    return tile


class Memory:
    """Global or shared memory that warps index as they do tensors; None takes a whole dimension."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape

    def __getitem__(self, place):
        places = place if isinstance(place, tuple) else (place,)
        found = self.array[tuple(slice(None) if each is None else each for each in places)]
        return Memory(found) if isinstance(found, np.ndarray) else found

    def __setitem__(self, place, value):
        self.array[place] = value

    @property
    def iterator(self):
        return Cell(self.array, 0)


class Cell:
    """A pointer to one number."""

    def __init__(self, array, index):
        self.array, self.index = array, index

    def __add__(self, distance):
        return Cell(self.array, self.index + distance)

    def get(self):
        return self.array[self.index]

    def add(self, value):
        before = self.array[self.index]
        self.array[self.index] = before + value
        return int(before)


class Stages:
    """Tiles of shared memory; the last index chooses one."""

    def __init__(self, tiles):
        self.tiles = tiles

    @classmethod
    def new(cls, count, rows, columns):
        return cls([np.full((rows, columns), np.nan) for _ in range(count)])

    def piece(self, rows, index):
        return Stages([tile[rows * index : rows * (index + 1)] for tile in self.tiles])

    def __getitem__(self, place):
        return self.tiles[place[-1]]

    def operand(self, view=whole, fixed=None):
        return Operand(self, view, fixed)


class Operand:
    """What a product reads of a tile in shared memory, at the moment at which it runs."""

    def __init__(self, stages, view, stage):
        self.stages, self.view, self.stage = stages, view, stage

    def __getitem__(self, place):
        return Operand(self.stages, self.view, place[-1])

    def read(self):
        return self.view(self.stages.tiles[self.stage])


class Values(np.ndarray):
    def to(self, _):
        return self


class Registers:
    """An accumulator or an operand, a warp's 16 rows. While products are in flight no one may touch their accumulators
    or write their operands.
    """

    layout = None

    def __init__(self):
        self.values, self.writers, self.readers = None, 0, 0

    @property
    def iterator(self):
        return self

    def read(self):
        require(not self.writers, "an accumulator is read while in flight")
        return self.values

    def write(self, values):
        require(not self.writers and not self.readers, "registers are written while a product in flight uses them")
        self.values = values

    def fill(self, value):
        self.write(np.full((WARP_ROWS, 1), value))

    def __add__(self, columns):
        return Columns(self, columns)

    def __getitem__(self, column):
        return self.read()[:, column]

    def __setitem__(self, column, values):
        self.read()[:, column] = values


class Columns:
    """Registers from a column on, as many as a tensor made of them takes."""

    def __init__(self, registers, first, count=None):
        self.registers, self.first, self.count = registers, first, count

    def read(self):
        return self.registers.read()[:, self.first : self.first + self.count]


class View:
    """Registers by rows and columns, where a loop over one row and one column stands for all."""

    def __init__(self, registers):
        self.registers = registers

    def __getitem__(self, place):
        return self.registers.read().view(Values)

    def __setitem__(self, place, values):
        self.registers.write(np.asarray(values))


class Tensor:
    """A tensor (batch, length, heads, columns) with the shape that kernels see, and its TMA atom."""

    atom = None

    def __init__(self, array):
        batch, length, heads, columns = array.shape
        self.array, self.tensor = array, SimpleNamespace(shape=(length, columns, heads, batch))


class Tiles:
    """Boxes of one head; past its end there are zeros, as TMA fills them."""

    def __init__(self, rows, box):
        self.rows, self.box = rows, box

    def __getitem__(self, place):
        tile, found = np.zeros((self.box, self.rows.shape[1])), self.rows[place[-1] * self.box :][: self.box]
        tile[: len(found)] = found
        return tile

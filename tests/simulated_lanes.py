"""A warp's registers lane by lane, for kernels whose arithmetic shall run as it is written: each value is an array of
32 lanes, in float32, and what the kernels write in PTX is executed instruction by instruction.
"""

import functools

import numpy as np
from simulated_cutlass import StandIn, identity
from simulated_dsl import WARP_THREADS, require
from simulated_memory import WARP_ROWS, Registers

QUAD = 4  # lanes that share a row of an accumulator
LANE = np.arange(WARP_THREADS)


class Whole(np.ndarray):
    """Integers of lanes."""

    def to(self, kind):
        return np.asarray(self, dtype=kind)


def either_array(a, b):
    return isinstance(a, np.ndarray) or isinstance(b, np.ndarray)


def smaller(a, b):
    return np.minimum(a, b) if either_array(a, b) else min(a, b)


def larger(a, b):
    return np.maximum(a, b) if either_array(a, b) else max(a, b)


def reduced(value, combine, threads_in_group):
    """By a butterfly of shuffles."""
    distance = 1
    while distance < threads_in_group:
        value = combine(value, value[LANE ^ distance])
        distance *= 2
    return value


def bits_of(value):
    value = np.asarray(value)
    return value.astype(np.float32).view(np.uint32) if value.dtype.kind == "f" else value.astype(np.uint32)


def of_floats(function):
    """An instruction on float32, rounded once."""

    def run(*operands):
        return function(*(x.view(np.float32).astype(np.float64) for x in operands)).astype(np.float32).view(np.uint32)

    return run


def of_integers(function):
    return lambda *operands: function(*(x.view(np.int32) for x in operands)).view(np.uint32)


def looked_up(a, b, c, table):
    """lop3: bit 4 a + 2 b + c of the table."""
    found = np.uint32(0)
    for index in range(8):
        if int(table) >> index & 1:
            chosen = (x if index & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1)))
            found = found | functools.reduce(np.bitwise_and, chosen)
    return found


def bits_from(base, width):
    """bmsk.clamp: ``width`` bits from ``base`` on, as many as there are."""
    return ((np.uint64(1) << np.minimum(width, 32).astype(np.uint64)) - np.uint64(1)).astype(np.uint32) << base


INSTRUCTIONS = {
    "mov.b32": identity,
    "fma.rn.f32": of_floats(lambda a, b, c: a * b + c),
    "max.s32": of_integers(np.maximum),
    "min.s32": of_integers(np.minimum),
    "mad.lo.s32": of_integers(lambda a, b, c: a * b + c),
    "shr.s32": of_integers(np.right_shift),
    "shr.u32": np.right_shift,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "lop3.b32": looked_up,
    "bmsk.clamp.b32": bits_from,
}


@functools.cache
def instructions(text):
    """(function, target, operands) of each; constants are numbers."""
    body, found = text[1:-1] if text.startswith("{ ") else text, []
    for line in filter(None, (line.strip() for line in body.split(";"))):
        name, rest = line.split(maxsplit=1)
        if name != ".reg":
            target, *operands = (constant(operand.strip(" {}")) for operand in rest.split(","))
            found.append((INSTRUCTIONS[name], target, operands))
    return found


def constant(operand):
    """A float32's bits, a number, or the name of a register."""
    if operand.startswith("0f"):
        return np.uint32(int(operand[2:], 16))
    return np.uint32(int(operand, 0)) if operand[0].isdigit() else operand


def inline_ptx(text, write_only_types, read_only_args):
    """Its only result."""
    registers = {f"$r{index}": bits_of(value) for index, value in enumerate(read_only_args)}
    for function, target, operands in instructions(text):
        given = (registers[operand] if isinstance(operand, str) else operand for operand in operands)
        registers[target] = function(*given)
    found, (kind,) = registers["$w0"], write_only_types
    return found.view(np.float32) if kind is np.float32 else found.view(np.int32).view(Whole)


def select(condition, true, false):
    return np.where(condition, true, false) if isinstance(condition, np.ndarray) else (true if condition else false)


def with_lanes(cutlass, warp):
    """The stand-in of simulated_cutlass.py, for values of lanes. ``warp()``: the current one."""
    arch = cutlass.cute.arch
    vars(cutlass).update(Float32=np.float32, min=smaller, max=larger, select_=select)
    vars(cutlass.cute)["math"] = StandIn(exp2=lambda x, fastmath: np.exp2(x), log2=lambda x, fastmath: np.log2(x))
    vars(arch).update(
        thread_idx=lambda: (WARP_THREADS * warp() + LANE, 0, 0),
        lane_idx=lambda: LANE,
        fmax=np.fmax,
        fmin=np.fmin,
        rcp_approx=np.reciprocal,
        inline_ptx=inline_ptx,
        vote_any_sync=np.any,
        warp_reduction=reduced,
        warp_reduction_sum=lambda value, threads_in_group: reduced(value, np.add, threads_in_group),
    )
    return cutlass


def with_scalar_lane(cute, lane_idx):
    """``cute`` for code that branches on the lane."""
    return StandIn(**{**vars(cute), "arch": StandIn(**{**vars(cute.arch), "lane_idx": lane_idx})})


class Few(list):
    """Registers of a few numbers a thread."""

    def fill(self, value):
        self[:] = [np.full(WARP_THREADS, value, np.float32) for _ in self]


class Accumulator(Registers):
    """Of a WGMMA: (2 rows, columns, lanes) of a warp's 16 rows."""

    def __init__(self, columns):
        super().__init__()
        self.values = np.full((2, columns // QUAD, WARP_THREADS), np.nan, np.float32)
        column = np.arange(columns // QUAD)[None, :, None]
        rows = LANE // QUAD + WARP_ROWS // 2 * np.arange(2)[:, None, None]
        self.places = rows, 8 * (column // 2) + column % 2 + 2 * (LANE % QUAD)

    def __getitem__(self, element):
        require(element == 0, "which element it is depends on the layout")
        return self.read()[0, 0].copy()

    def fill(self, value):
        self.write(np.full_like(self.values, value))

    def matrix(self):
        values = self.read()
        found = np.empty((WARP_ROWS, QUAD * values.shape[1]), np.float32)
        found[self.places] = values
        return found

    def take(self, matrix):
        """What a product writes."""
        self.values = matrix[self.places].astype(np.float32)


class LaneView:
    """An accumulator by rows and columns of a thread."""

    def __init__(self, registers):
        self.registers = registers

    @property
    def shape(self):
        return self.registers.values.shape[:2]

    def __getitem__(self, place):
        return self.registers.read()[place].copy()

    def __setitem__(self, place, values):
        require(not self.registers.writers, "registers are written while a product in flight uses them")
        self.registers.values[place] = values

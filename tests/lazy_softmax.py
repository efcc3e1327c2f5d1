"""The forward kernel's online softmax in plain PyTorch, wrong versions of it, and inputs whose scores are known.

The emulation takes the kernel's steps: blocks of keys from the last to the first, one shift a row that follows the
row's extreme only where an exponent would pass it by more than a tolerance, P in 16 bits, all else in float32. A test
that passes with the emulation and fails with the wrong versions is one that a kernel can fail.
"""

import math

import torch
import torch.nn.functional as F
from cases import bounds

from hopper_fa3.launch import scale_log2

WARP_ROWS = 16  # rows of a WGMMA accumulator that one warp holds; a thread holds row r % 8 and the one 8 below
FACTOR_OF_PAIRS = 1.25  # in base 2, of at_the_tolerance: its products have a bit that float32 must round
PIECES = 3  # 16-bit numbers that add up to any float32 score: 3 x 8 bits in bfloat16


class LazySoftmax:
    """Attention of one head, callable as check.run calls a kernel. ``moves`` (rows) counts how often each row's shift
    moved, ``largest`` is the largest exponent, both of the last call.
    """

    tolerance = 8.0
    lowest = -3.4e38

    def __init__(self, tile_n):
        self.tile_n = tile_n

    def __call__(
        self, q, k, v, *, out, return_attn_probs, softmax_scale=None, causal=False, window_size=(-1, -1)
    ):  # fmt: skip
        assert return_attn_probs and q.shape[0] == q.shape[2] == 1
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        factor, self.sign, self.dtype = torch.tensor(scale_log2(scale)), -1 if scale < 0 else 1, q.dtype
        queries, keys, values = (x[0, :, 0].float() for x in (q, k, v))
        rows, length, right = len(queries), len(keys), bounds(causal, window_size)[1]
        limit = torch.full((rows,), length) if right is None else torch.arange(rows) + length - rows + right + 1
        state = torch.full((rows,), self.lowest), torch.zeros(rows), torch.zeros(rows, v.shape[-1])
        self.moves, self.largest = torch.zeros(rows, dtype=torch.int), -math.inf
        for start in self.starts(length):
            block = slice(start, start + self.tile_n)
            scores = (queries.double() @ keys[block].double().mT).float()
            hidden = torch.arange(start, start + scores.shape[1]) >= limit[:, None]
            scores = scores.masked_fill(hidden, -math.inf * self.sign)
            state = self.absorb(*state, scores, factor, values[block])
        out[0, :, 0], lse = self.finish(*state, limit)
        return out, lse[None, None]

    def starts(self, length):
        return reversed(range(0, length, self.tile_n))

    def absorb(self, shift, total, mixed, scores, scale, values):
        """The state after one more block."""
        # The kernel's extreme passes over NaN, as FMNMX does.
        extreme = self.sign * (self.sign * scores).masked_fill(scores.isnan(), -math.inf).amax(-1)
        moved = self.outgrown(extreme, shift, scale)
        now = torch.where(moved, extreme * scale, shift)
        total, mixed = self.rescaled(total, mixed, torch.where(moved, torch.exp2(shift - now), 1))
        exponents = multiply_subtract(scores, scale, now[:, None])
        probabilities = torch.exp2(exponents)
        self.moves += moved
        self.largest = max(self.largest, exponents.nan_to_num(-math.inf, math.inf).max().item())
        return now, total + probabilities.sum(-1), mixed + probabilities.to(self.dtype).float() @ values

    def outgrown(self, extreme, shift, scale):
        """Which rows move their shift: each by its own scores alone, with the exponent as it will be used."""
        return multiply_subtract(extreme, scale, shift) > self.tolerance

    def rescaled(self, total, mixed, factor):
        return total * factor, mixed * factor[:, None]

    def finish(self, shift, total, mixed, limit):
        lse = (shift + torch.log2(total)) * math.log(2)
        blind = limit <= 0
        return (mixed / total[:, None]).masked_fill(blind[:, None], 0).to(self.dtype), lse.masked_fill(blind, -math.inf)


def multiply_subtract(a, b, c):
    """a * b - c with one rounding (FFMA): products of float32 are exact in float64."""
    return (a.double() * b.double() - c.double()).float()


def warp_any(rows):
    """For each row: whether any of the 16 rows of its warp is True."""
    warps = F.pad(rows, (0, -len(rows) % WARP_ROWS)).unflatten(0, (-1, WARP_ROWS)).any(-1)
    return warps.repeat_interleave(WARP_ROWS)[: len(rows)]


class OutputNotRescaled(LazySoftmax):
    def rescaled(self, total, mixed, factor):
        return total * factor, mixed


class SumNotRescaled(LazySoftmax):
    def rescaled(self, total, mixed, factor):
        return total, mixed * factor[:, None]


class NeverMovesAgain(LazySoftmax):
    """Only the first block that a row sees sets its shift."""

    def outgrown(self, extreme, shift, scale):
        return (shift == self.lowest) & super().outgrown(extreme, shift, scale)


class Tolerance17(LazySoftmax):
    """P passes the largest fp16, 65504, when an exponent reaches 16."""

    tolerance = 17.0


class StartsAtZero(LazySoftmax):
    lowest = 0.0


class StartsAtMinusInfinity(LazySoftmax):
    """-inf - -inf in a fully masked first block."""

    lowest = -math.inf


class FollowsDownwards(LazySoftmax):
    """The shift becomes the extreme of each block, also a smaller one."""

    def outgrown(self, extreme, shift, scale):
        return extreme.isfinite()


class UpperHalfVotes(LazySoftmax):
    """The second of a thread's two rows is forgotten: it moves only where a row of the upper half does."""

    def outgrown(self, extreme, shift, scale):
        grew = super().outgrown(extreme, shift, scale)
        return grew & warp_any(grew & (torch.arange(len(grew)) % WARP_ROWS < WARP_ROWS // 2))


class WarpMoves(LazySoftmax):
    """Right values, but a row moves whenever a neighbour does: its bits depend on it."""

    def outgrown(self, extreme, shift, scale):
        grew = warp_any(super().outgrown(extreme, shift, scale))
        return grew & (multiply_subtract(extreme, scale, shift) > 0)


class TwoRoundings(LazySoftmax):
    """A warp votes with a fused product, then each row decides with a rounded one: where they differ, a row moves only
    if a neighbour called the warp.
    """

    def outgrown(self, extreme, shift, scale):
        return warp_any(super().outgrown(extreme, shift, scale)) & (extreme * scale - shift > self.tolerance)


class LseOfAFollowingShift(LazySoftmax):
    """The LSE takes the largest score for the shift."""

    def absorb(self, shift, total, mixed, scores, scale, values):
        fresh = (shift == self.lowest).all()
        top = (scores * scale).amax(-1)
        self.top = top if fresh else torch.maximum(self.top, top)
        return super().absorb(shift, total, mixed, scores, scale, values)

    def finish(self, shift, total, mixed, limit):
        out, _ = super().finish(shift, total, mixed, limit)
        return out, super().finish(self.top, total, mixed, limit)[1]


def staircase(length, tile_n, step):
    """Scores (length) of keys whose block's largest grows by ``step`` from each block to the next one visited.

    One key a block is the largest, at another place in each; the others lie below it by up to 6 units. All are
    multiples of a power of two that bfloat16 holds, so that also 16-bit PyTorch computes them exactly and the bound of
    check.py stays narrow.
    """
    blocks = -(-length // tile_n)
    key = torch.arange(length)
    visits = blocks - 1 - key // tile_n
    highest = max(abs(step) * (blocks - 1), 1)
    unit = max(0.25, 2.0 ** (math.floor(math.log2(highest)) - 7))
    generator = torch.Generator().manual_seed(1)
    below = torch.randint(1, max(2, int(6 / unit)), (length,), generator=generator) * unit
    width = torch.clamp(length - key // tile_n * tile_n, max=tile_n)
    below[key % tile_n == (37 * visits + 5) % width] = 0
    return step * visits.double() - below


def known_scores(*groups, dtype, head_dim, values=None):
    """q, k, v of one head whose scores q . k are exactly the sum of ``rows[:, None] * keys`` over the groups.

    A group is (rows, keys): a factor for each query, a power of two or 0, and a score for each key. v is ``values``, or
    normal.
    """
    rows, keys = (len(part) for part in groups[0])
    q, k = torch.zeros(1, rows, 1, head_dim, dtype=dtype), torch.zeros(1, keys, 1, head_dim, dtype=dtype)
    for index, (factors, scores) in enumerate(groups):
        rest = scores.double()
        for column in range(PIECES * index, PIECES * (index + 1)):
            q[0, :, 0, column] = factors
            k[0, :, 0, column] = rest
            rest = rest - k[0, :, 0, column].double()
        assert not rest.any(), "a score that the pieces do not hold"
    if values is None:
        values = torch.randn(1, keys, 1, head_dim, generator=torch.Generator().manual_seed(2))
    return q, k, values.to(dtype)


def at_the_tolerance(count):
    """Pairs (first, second) of float32 scores whose exponents at the factor 1.25 differ by exactly 8, where the
    second's, rounded by itself, is more than 8 above the first's.

    They exist only where a power of two lies between the exponents: else shift + 8 is a float32, and rounding does not
    lead past it. At 2^15 the rounding is 2^-9, which shows in P.
    """
    factor = torch.tensor(FACTOR_OF_PAIRS)
    first = torch.arange(2**15 / FACTOR_OF_PAIRS - 6, 2**15 / FACTOR_OF_PAIRS, 2.0**-9, dtype=torch.float64).float()
    shift = first * factor
    second = ((shift.double() + 8) / factor.double()).float()
    found = (multiply_subtract(second, factor, shift) == 8) & (second * factor - shift > 8)
    assert found.sum() >= count, f"{found.sum()} pairs"
    return first[found][:count], second[found][:count]

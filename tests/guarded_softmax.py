"""The forward kernel's online softmax in plain PyTorch, wrong versions of it, and inputs whose scores are known.

The emulation takes the kernel's steps: blocks of keys from the last to the first; the first one's largest exponent as a
row's shift; then exponentials with the standing shift, until a thread's sum passes a limit and the block is done again;
P in 16 bits, all else in float32, summed in the kernel's order. A test that passes with the emulation and fails with
the wrong versions is one that a kernel can fail.
"""

import math

import torch
import torch.nn.functional as F
from cases import bounds

from hopper_fa3.launch import scale_log2

WARPGROUP_ROWS = 64  # that decide together whether to do a block again
HALF = 8  # a thread holds a row and the one 8 below
QUAD = 4  # threads that share a row: each has two neighbouring columns of every eight
CHAINS = 4  # partial sums of a thread
ENDLESS = 10  # passes over one block after which a kernel is taken to hang; two are right
PIECES = 3  # 16-bit numbers that add up to any float32 score: 3 x 8 bits in bfloat16


class GuardedSoftmax:
    """Attention of one head, callable as check.run calls a kernel. Of the last call: ``moves`` (rows) counts in how
    many blocks each row outgrew its shift, ``largest`` is the largest exponent that was used.
    """

    limit = 2.0**10
    lowest = -3.4e38
    at_most_once = True  # a block is done again

    def __init__(self, tile_n):
        self.tile_n = tile_n

    def __call__(
        self, q, k, v, *, out, return_attn_probs, softmax_scale=None, causal=False, window_size=(-1, -1)
    ):  # fmt: skip
        assert return_attn_probs and q.shape[0] == q.shape[2] == 1
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self.factor, self.sign, self.dtype = torch.tensor(scale_log2(scale)), -1 if scale < 0 else 1, q.dtype
        queries, keys, values = (x[0, :, 0].float() for x in (q, k, v))
        rows, length, right = len(queries), len(keys), bounds(causal, window_size)[1]
        limit = torch.full((rows,), length) if right is None else torch.arange(rows) + length - rows + right + 1
        self.shift, self.sum = torch.full((rows, QUAD), self.lowest), torch.zeros(rows, QUAD)
        self.mixed, self.moves, self.largest = torch.zeros(rows, v.shape[-1]), torch.zeros(rows).int(), -math.inf
        for start in reversed(range(0, length, self.tile_n)):
            block = slice(start, start + self.tile_n)
            missing = max(0, start + self.tile_n - length)  # zeros in shared memory
            scores = F.pad((queries.double() @ keys[block].double().mT).float(), (0, missing))
            hidden = torch.arange(start, start + self.tile_n) >= limit.clamp(max=length)[:, None]
            self.block(scores, hidden, F.pad(values[block], (0, 0, 0, missing)), start + self.tile_n >= length)
        out[0, :, 0], lse = self.finish(limit)
        return out, lse[None, None]

    def masked(self, scores, hidden):
        return by_thread(scores.masked_fill(hidden, -math.inf * self.sign))

    def block(self, scores, hidden, values, first):
        """The state after one more block of raw scores (rows, tile_n)."""
        seen = self.masked(scores, hidden)
        if first:
            self.shift = torch.fmax(self.shift, self.largest_exponent(seen))
        fresh = not first
        for _ in range(ENDLESS):
            exponents = multiply_subtract(seen, self.factor, self.shift[..., None])
            probabilities = torch.exp2(exponents)
            sums = chained_sum(probabilities)
            again = self.votes(sums) if fresh else torch.zeros(len(sums), dtype=torch.bool)
            if not again.any():
                break
            fresh = not self.at_most_once
            seen = self.made_again(scores, hidden, probabilities)
            self.catch_up(seen, sums, of_warpgroup(again))
        else:
            raise AssertionError("hangs")
        self.largest = max(self.largest, exponents.nan_to_num(-math.inf, math.inf).max().item())
        self.keep(probabilities, sums, values)

    def keep(self, probabilities, sums, values):
        self.sum = self.sum + sums
        self.mixed = self.mixed + by_row(probabilities).to(self.dtype).float() @ values

    def largest_exponent(self, seen):
        """Of each row, for each of its threads. FMNMX passes over NaN."""
        extreme = (self.sign * seen).masked_fill(seen.isnan(), -math.inf).amax((1, 2)) * self.sign
        return (extreme * self.factor)[:, None].expand(-1, QUAD)

    def votes(self, sums):
        """Which rows ask for the block to be done again."""
        return (sums > self.limit).any(-1)

    def made_again(self, scores, hidden, probabilities):
        return self.masked(scores, hidden)

    def catch_up(self, seen, sums, again):
        """Move the shift of rows that outgrew it, where their warpgroup does the block again."""
        largest = self.largest_exponent(seen)
        moved = self.outgrew(sums, largest) & again[:, None]
        now = torch.where(moved, largest, self.shift)
        self.moves += moved.any(-1)
        self.rescale(torch.where(moved, torch.exp2(self.shift - now), 1))
        self.shift = now

    def outgrew(self, sums, largest):
        """Each row decides by its own sums alone."""
        return (sums > self.limit).any(-1, keepdim=True).expand(-1, QUAD)

    def rescale(self, factor):
        self.rescale_sum(factor)
        self.rescale_output(factor)

    def rescale_sum(self, factor):
        self.sum = self.sum * factor

    def rescale_output(self, factor):
        self.mixed = self.mixed * factor[:, torch.arange(self.mixed.shape[1]) % 8 // 2]

    def finish(self, limit):
        total = self.sum.sum(-1)
        lse, blind = (self.shift[:, 0] + torch.log2(total)) * math.log(2), limit <= 0
        out = (self.mixed / total[:, None]).masked_fill(blind[:, None], 0)
        return out.to(self.dtype), lse.masked_fill(blind, -math.inf)


def by_thread(scores):
    """(rows, columns) of a block as (rows, threads of a row, columns of a thread), and back."""
    return scores.unflatten(1, (-1, QUAD, 2)).transpose(1, 2).flatten(2)


def by_row(scores):
    return scores.unflatten(2, (-1, 2)).transpose(1, 2).flatten(1)


def chained_sum(probabilities):
    """Over a thread's columns, in the kernel's order."""
    columns = probabilities.unflatten(2, (-1, CHAINS))
    partial = columns[:, :, 0]
    for column in range(1, columns.shape[2]):
        partial = partial + columns[:, :, column]
    return (partial[..., 0] + partial[..., 1]) + (partial[..., 2] + partial[..., 3])


def multiply_subtract(a, b, c):
    """a * b - c with one rounding (FFMA): products of float32 are exact in float64."""
    return (a.double() * b.double() - c.double()).float()


def of_warpgroup(rows):
    """For each row: whether any of the 64 rows of its warpgroup is True."""
    groups = F.pad(rows, (0, -len(rows) % WARPGROUP_ROWS)).unflatten(0, (-1, WARPGROUP_ROWS)).any(-1)
    return groups.repeat_interleave(WARPGROUP_ROWS)[: len(rows)]


class OutputNotRescaled(GuardedSoftmax):
    def rescale_output(self, factor):
        pass


class SumNotRescaled(GuardedSoftmax):
    def rescale_sum(self, factor):
        pass


class ProductStillRuns(GuardedSoftmax):
    """O is rescaled before P V of the block before has ended."""

    def keep(self, probabilities, sums, values):
        before = self.mixed
        super().keep(probabilities, sums, values)
        self.running = self.mixed - before

    def rescale_output(self, factor):
        self.mixed = self.mixed - self.running
        super().rescale_output(factor)
        self.mixed = self.mixed + self.running


class NeverMovesAgain(GuardedSoftmax):
    """Only the first block that a row sees sets its shift."""

    def outgrew(self, sums, largest):
        return super().outgrew(sums, largest) & (self.shift == self.lowest)


class NeverVotes(GuardedSoftmax):
    def votes(self, sums):
        return torch.zeros(len(sums), dtype=torch.bool)


class Limit17(GuardedSoftmax):
    """P passes the largest fp16, 65504, when an exponent reaches 16."""

    limit = 2.0**17


class StartsAtZero(GuardedSoftmax):
    lowest = 0.0


class StartsAtMinusInfinity(GuardedSoftmax):
    """-inf - -inf in a fully masked first block."""

    lowest = -math.inf


class UntilItFits(GuardedSoftmax):
    at_most_once = False


class SumsOfTheFirstPass(GuardedSoftmax):
    def catch_up(self, seen, sums, again):
        super().catch_up(seen, sums, again)
        self.stale = torch.where(again[:, None], sums, math.nan)

    def keep(self, probabilities, sums, values):
        stale = getattr(self, "stale", torch.full_like(sums, math.nan))
        self.stale = torch.full_like(sums, math.nan)
        super().keep(probabilities, torch.where(stale.isnan(), sums, stale), values)


class ScoresNotMadeAgain(GuardedSoftmax):
    """The second pass takes the first one's exponentials for scores."""

    def made_again(self, scores, hidden, probabilities):
        return probabilities


class NotMaskedAgain(GuardedSoftmax):
    def made_again(self, scores, hidden, probabilities):
        return by_thread(scores)


class UpperHalfVotes(GuardedSoftmax):
    """The second of a thread's two rows is forgotten: it moves only where a row of the upper half does."""

    def votes(self, sums):
        return super().votes(sums) & (torch.arange(len(sums)) % (2 * HALF) < HALF)


class NaNSilencesItsThread(GuardedSoftmax):
    """A maximum that keeps NaN, instead of FMNMX, over a thread's two sums."""

    def votes(self, sums):
        other = F.pad(sums, (0, 0, 0, -len(sums) % (2 * HALF))).unflatten(0, (-1, 2, HALF)).flip(1).flatten(0, 2)
        return ((sums > self.limit) & ~other[: len(sums)].isnan()).any(-1)


class ThreadsDecideAlone(GuardedSoftmax):
    """The threads of a row do not ask each other whether it outgrew."""

    def outgrew(self, sums, largest):
        return sums > self.limit


class AllMove(GuardedSoftmax):
    """Where a warpgroup does a block again, all its rows take their largest exponent there, also a smaller one."""

    def outgrew(self, sums, largest):
        return torch.ones_like(sums, dtype=torch.bool)


class AllMoveUpwards(GuardedSoftmax):
    """Right values, but a row's bits depend on its neighbours."""

    def outgrew(self, sums, largest):
        return largest > self.shift


class DecidesByTheLargest(GuardedSoftmax):
    """Right values, but a row whose sums are within the limit moves only if a neighbour calls."""

    def outgrew(self, sums, largest):
        return largest - self.shift > 9


class LseOfAFollowingShift(GuardedSoftmax):
    """The LSE takes the largest exponent for the shift."""

    def block(self, scores, hidden, values, first):
        top = self.largest_exponent(self.masked(scores, hidden))
        self.top = top if first else torch.maximum(self.top, top)
        super().block(scores, hidden, values, first)

    def finish(self, limit):
        out, _ = super().finish(limit)
        self.shift = self.top
        return out, super().finish(limit)[1]


def staircase(length, tile_n, step, gap=10):
    """Scores (length) of keys whose block's largest grows by ``step`` from each block to the next one visited.

    One key a block is the largest, at another place in each; the others lie below it by ``gap`` to ``gap`` + 6, or,
    with ``gap`` None, are as large. All are multiples of a power of two that bfloat16 holds, so that also 16-bit
    PyTorch computes them exactly and the bound of check.py stays narrow.
    """
    blocks = -(-length // tile_n)
    key = torch.arange(length)
    visits = blocks - 1 - key // tile_n
    highest = max(abs(step) * (blocks - 1), 1)
    unit = max(0.25, 2.0 ** (math.floor(math.log2(highest)) - 7))
    below = torch.zeros(length, dtype=torch.float64)
    if gap is not None:
        generator = torch.Generator().manual_seed(1)
        below += torch.randint(0, max(2, int(6 / unit)), (length,), generator=generator) * unit
        below += math.ceil(gap / unit) * unit
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

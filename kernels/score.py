"""The score hook: from products of queries and keys to what the softmax takes, on registers in place, before masks."""

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .config import CAP_UNITS

LOG2_E = 1.4426950408889634
LN_2 = math.log(2.0)
LARGE = 2**30  # the bit of a float32 that is set where its magnitude is at least 2, and in a NaN
# (1 - tanh(x / 4)) / 2 = 1/2 + x P(x^2) for |x| < 2: coefficients of P, highest power first, of the least largest error
CAPPED = (1.3236230e-6, -6.4185282e-5, 2.6031763e-3, -0.12499971)
ROWS_APART = 8  # the two rows of a WGMMA accumulator that one thread holds
SIGN = -(2**31)


class Bias(NamedTuple):
    """ALiBi's bias of a thread's (2 rows, columns) of a block."""

    at: cute.Tensor  # slope times (key - diagonal) of each row's first element
    step: Float32  # slope, or where columns are queries minus slope
    sign: Int32 | None  # SIGN where the slope is positive, else 0; None where the bias is linear


class Pairs(NamedTuple):
    """Which pairs a thread's (2 rows, columns) of a block are, for hooks of a user's own."""

    batch: Int32
    head: Int32  # of the queries
    query: Int32  # of the first element, counted from 0, and so the key
    key: Int32

    def indices(self, row: int, column: int, transposed: bool):
        """``(batch, head, query, key)`` of an element; ``transposed``: rows are keys, and columns queries."""
        across, down = 8 * (column // 2) + column % 2, ROWS_APART * row
        query, key = (across, down) if transposed else (down, across)
        return self.batch, self.head, self.query + query, self.key + key


@dataclass(frozen=True)
class ScoreHook:
    """``softcap``: a score is ``cap * tanh(x / cap)``. With ``r = 1 / (1 + exp(2 x / cap))`` it is ``cap - 2 cap r``. A
    product becomes r, by a polynomial where |x| is less than half the cap, else by one exponential and one reciprocal;
    ``scale_log2``, with which it is multiplied then, is -2 cap log2(e), and the constant, the same for all keys, is
    brought back where the LSE needs it. The hardware's tanh is right to 2^-11 only: at a cap of 15 the LSE would be off
    by 0.007.

    ``alibi``: ``-slope * |key - diagonal|`` is added (Press et al. 2022). "linear" where no query sees a key behind its
    diagonal, so that there is no absolute value to take, else "distance". The result is the exponent itself, in base 2.
    In place, because as a term of the exponent the compiler makes it outside of loops, in registers that are not there.

    ``score`` and ``mask``: a user's own, with functions ``forward`` and ``backward``, and ``visible``, of one pair. The
    result of ``forward`` stays in natural units, so that nothing is changed but one factor of the exponents.
    """

    softcap: bool
    alibi: str | None
    score: object | None = None
    mask: object | None = None

    @classmethod
    def of(cls, config):
        """That of a kernel's configuration."""
        return cls(config.softcap, config.alibi, config.score, config.mask)

    @property
    def of_pairs(self):
        """True where it depends on which pair an element is."""
        return self.score is not None or self.mask is not None

    @property
    def numbered(self):
        """True where it depends on the batch entry: kernels of packed sequences know a tile's by its number only."""
        return self.alibi is not None or self.of_pairs

    @property
    def factors(self):
        """True where a score has another derivative by its product than the scale."""
        return self.softcap or self.score is not None

    def scale(self, run):
        """With what the softmax multiplies the results."""
        if self.score is not None:
            return Float32(LOG2_E)
        return Float32(1.0) if self.alibi else run.scale_log2

    def negative(self, negative_scale: bool) -> bool:
        """Whether that is negative; ``negative_scale``: of the problem."""
        return self.score is None and not self.alibi and (self.softcap or negative_scale)

    def constant(self, scale_log2):
        """What all exponents lack, or None."""
        return cap_constant(scale_log2) if self.softcap and self.score is None else None

    @cute.jit
    def apply(
        self,
        scores: cute.Tensor,
        bias: Bias | None,
        pairs: Pairs | None,
        run,
        masked: cutlass.Constexpr[float],
    ):
        """Products (2 rows, columns) in place. ``masked``: the score of a pair that a mask hook hides."""
        if const_expr(self.softcap):
            cap(scores, run.cap_factor)
        if const_expr(self.alibi is not None and self.score is None):
            add_bias(scores, bias, run.scale_log2)
        if const_expr(self.of_pairs):
            for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
                for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                    scores[row, column] = self.of_pair(scores[row, column], bias, pairs, row, column, run, masked)

    def of_pair(self, score, bias, pairs, row, column, run, masked):
        """What the user's hooks make of one element."""
        if self.score is not None:
            score = self.behind(self.natural(score, bias, row, column, run), pairs, row, column, False)
        if self.mask is not None:
            score = cutlass.select_(self.sees(pairs, row, column, False), score, Float32(masked))
        return score

    def natural(self, score, bias, row, column, run):
        """The score in front of ``score``, of one product, capped where there is a softcap."""
        exponent = add_term(score, run.scale_log2, bias, row, column) if self.alibi else score * run.scale_log2
        if self.softcap:
            exponent += cap_constant(run.scale_log2)
        return exponent * Float32(LN_2)

    def behind(self, score, pairs, row, column, transposed):
        """The score behind ``score``."""
        return Float32(self.score.forward(score, *pairs.indices(row, column, transposed)))

    def sees(self, pairs, row, column, transposed):
        """Whether the mask hook lets a query see a key."""
        return Boolean(self.mask.visible(*pairs.indices(row, column, transposed)))

    def unless_hidden(self, exponent, lse, pairs, row, column, transposed):
        """An exponent of the backward, or -inf where the mask hook hides the pair; with a score hook also past the end
        of the queries, where ``lse`` is inf: its results are anything there. Past the end of the keys bounds mask all.
        """
        if self.mask is not None:
            exponent = cutlass.select_(self.sees(pairs, row, column, transposed), exponent, Float32(-math.inf))
        if self.score is not None:
            exponent = cutlass.select_(lse != Float32(math.inf), exponent, Float32(-math.inf))
        return exponent

    def factor(self, probability, score, bias, pairs, row, column, run, transposed):
        """With what dP - delta is multiplied: the probability times the derivative of the score. The gradient of a
        score hook is linear in what it is given, so it can take the probability first. ``score``: as in exponent().
        """
        result = probability
        if self.score is not None:
            before = self.natural(score, bias, row, column, run)
            result = Float32(self.score.backward(result, before, *pairs.indices(row, column, transposed)))
            # Hidden pairs may have any derivative
            result = cutlass.select_(probability == Float32(0.0), Float32(0.0), result)
        if self.softcap:
            result = derivative(score, result)
        return result

    @cute.jit
    def exponent(
        self,
        score: Float32,
        bias: Bias | None,
        row: cutlass.Constexpr[int],
        column: cutlass.Constexpr[int],
        run,
        less: Float32,
        pairs: Pairs | None = None,
        transposed: cutlass.Constexpr[bool] = False,
    ) -> Float32:
        """Of one product, capped where there is a softcap, reduced by ``less``."""
        if const_expr(self.score is not None):
            before = self.natural(score, bias, row, column, run)
            return self.behind(before, pairs, row, column, transposed) * Float32(LOG2_E) - less
        if const_expr(not self.alibi):
            return score * run.scale_log2 - less
        return add_term(score, run.scale_log2, bias, row, column) - less

    @cute.jit
    def slope(self, run, batch: Int32, head: Int32):
        """ALiBi's slope of a head, in base 2; or None."""
        if const_expr(not self.alibi):
            return None
        return run.slopes[batch, head] * Float32(LOG2_E)

    @cute.jit
    def bias(
        self, slope: Float32, distance: Int32, score: Float32, transposed: cutlass.Constexpr[bool] = False
    ) -> Bias:
        """The Bias of a block. ``distance``: key - diagonal of the thread's first element, ``score``: any of its
        products; ``transposed``: rows are keys, and columns queries.
        """
        distance = known_with(score, distance)
        at = cute.make_rmem_tensor(2, Float32)
        for row in cutlass.range_constexpr(2):
            at[row] = slope * (distance + (ROWS_APART if transposed else -ROWS_APART) * row).to(Float32)
        sign = None if const_expr(self.alibi == "linear") else cutlass.select_(slope < 0, Int32(0), Int32(SIGN))
        return Bias(at, -slope if const_expr(transposed) else slope, sign)


def cap_constant(scale_log2: Float32) -> Float32:
    """What the exponents lack with softcap: cap log2(e)."""
    return scale_log2 * Float32(-0.5)


@cute.jit
def cap(scores: cute.Tensor, factor: Float32):
    """Products to r. ``factor``: CAP_UNITS softmax scale / cap.

    An element's r depends on that element alone. What the warp decides together is whether the exponentials of large
    ones can be left out: all of a block's exponentials are as much as the special-function unit can do in the time of
    the products at head_dim 128.
    """
    rows, columns = cute.size(scores, mode=[0]), cute.size(scores, mode=[1])
    bits = Int32(0)
    for row in cutlass.range_constexpr(rows):
        for column in cutlass.range_constexpr(0, columns, 2):
            pair = [scores[row, column + index] * factor for index in range(2)]
            scores[row, column], scores[row, column + 1] = pair
            bits = either(bits, *pair)
    if cute.arch.vote_any_sync((bits & LARGE) != 0):
        for row in cutlass.range_constexpr(rows):
            for column in cutlass.range_constexpr(columns):
                x = scores[row, column]
                small = cute.arch.fmax(x, -x) < Float32(2.0)
                scores[row, column] = cutlass.select_(small, capped_small(x), capped(x))
    else:
        for row in cutlass.range_constexpr(rows):
            for column in cutlass.range_constexpr(columns):
                scores[row, column] = capped_small(scores[row, column])


def capped(x: Float32) -> Float32:
    """r of a score that is x CAP_UNITS-ths of the cap."""
    power = cute.math.exp2(x * Float32(2 * LOG2_E / CAP_UNITS), fastmath=True)
    return cute.arch.rcp_approx(power + Float32(1.0))


def capped_small(x: Float32) -> Float32:
    """The same where |x| < 2, off by 1.7 / 2^24 at most."""
    square = x * x
    result = Float32(CAPPED[0])
    for coefficient in CAPPED[1:]:
        result = result * square + Float32(coefficient)
    return result * x + Float32(0.5)


@cute.jit
def either(bits: Int32, a: Float32, b: Float32) -> Int32:
    """The bits that are set in any."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 a, b; mov.b32 a, {$r1}; mov.b32 b, {$r2}; lop3.b32 {$w0}, {$r0}, a, b, 0xFE; }",
        write_only_types=[Int32],
        read_only_args=[bits, a, b],
    )


@cute.jit
def derivative(capped: Float32, probability: Float32) -> Float32:
    """A probability times the derivative of its score by the product's: 1 - tanh^2 = 4 r (1 - r), of r = ``capped``."""
    four = capped * Float32(4.0)
    return probability * (four - four * capped)


@cute.jit
def add_bias(scores: cute.Tensor, bias: Bias, scale_log2: Float32):
    """Products to exponents."""
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            scores[row, column] = add_term(scores[row, column], scale_log2, bias, row, column)


@cute.jit
def add_term(
    score: Float32, scale_log2: Float32, bias: Bias, row: cutlass.Constexpr[int], column: cutlass.Constexpr[int]
) -> Float32:
    """The exponent of one element. In PTX: the compiler would move what does not depend on the score out of loops, into
    registers that are not there.
    """
    columns = float(8 * (column // 2) + column % 2)
    absolute = "" if const_expr(bias.sign is None) else " lop3.b32 e, e, 0x7fffffff, {$r4}, 0xEA;"
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 e; fma.rn.f32 e, {{$r2}}, {literal(columns)}, {{$r3}};{absolute}"
        " fma.rn.f32 {$w0}, {$r0}, {$r1}, e; }",
        write_only_types=[Float32],
        read_only_args=[score, scale_log2, bias.step, bias.at[row]] + ([] if bias.sign is None else [bias.sign]),
    )


@cute.jit
def known_with(score: Float32, number: Int32) -> Int32:
    """The number, of which the compiler does not know that it is there before the score is: else it makes a block's
    terms while the product runs, or keeps them for when the block is done again, in registers that are not there.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 t; mov.b32 t, {$r1}; shr.u32 t, t, 31; or.b32 t, t, 0x80000000; max.s32 {$w0}, {$r0}, t; }",
        write_only_types=[Int32],
        read_only_args=[number, score],
    )


def literal(value):
    """A float32 in PTX."""
    return "0f" + struct.pack(">f", value).hex()

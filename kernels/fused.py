"""Exponents of unmasked blocks straight from the products, for softcap and ALiBi: what is added to an exponent takes
the shift along, and a capped score is never there by itself. So an element takes one or two instructions less than in
place (score.py), and their number is what softcap costs.

With a softcap the exponents are a polynomial of the products, good for those within LIMIT. A row with others is done
again the long way. It is known by the largest product, where the cap is small or there is a bias. Else by the row's
sum, which is needed anyway: probabilities rise with the polynomial, so a sum below the probability at the limit has no
product beyond it; and below minus the limit they are too small to matter beside a sum that is not small itself. To the
sum, that is: such a probability may be off by all of itself, which shows where its V is millions of times the others'.
"""

import math
import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .config import CAP_UNITS, SMALLEST_CAP
from .registers import kept
from .score import LOG2_E, Bias, ScoreHook, cap_constant, capped, literal
from .softmax import QUAD, ROWS, Softmax, in_chains

# As score.CAPPED for |x| < LIMIT, which is 0.4 caps, off by 10.5 / 2^24 at most (tanh by 21): a term less is 64 of 700
# instructions of a block at head_dim 128
CAPPED_SHORT = (-5.8287463e-5, 2.5956444e-3, -0.12499727)
LIMIT = 0.4 * CAP_UNITS
# The exponent at the limit, in base 2, of a cap of 1: log2(e) tanh(0.4)
SLOPE = 0.54815
# The least mean of the probabilities of a trusted sum, as if nothing were added to exponents, at SMALLEST_CAP. There
# the polynomial's below minus the limit are off by 2.1e-9 at most, which is 2.1e-6 of this mean. With each unit of the
# cap that falls by 2 ** -SLOPE or faster, so this does.
TRUSTED = 1e-3
# Coefficients hold cap_factor to the fifth power: inside float32's range if it is between the inverse and this
LARGEST_FACTOR = 2.0**20


class Polynomial(NamedTuple):
    """Of a softcap: the exponents of small products x are x (constant + middle x^2 + highest x^4) + cap_constant.

    In this order the compiler leaves two of them in constant memory; of other neighbours it makes a pair of registers.
    """

    highest: Float32
    constant: Float32
    limit: Float32  # of x^2: what is above is large
    middle: Float32
    # log2 of what a thread's sum of a row must be below to be trusted, as if nothing were added to exponents
    largest_sum: Float32


class Terms(NamedTuple):
    """What is added to a thread's exponents of a block, (2 rows, columns): at + step column."""

    at: cute.Tensor  # (2)
    step: Float32 | None  # None: 0


def polynomial(cap_factor: Float32, scale_log2: Float32) -> Polynomial:
    """That of a launch with softcap, by the host: kernels read it as they read constants, without registers. Where
    powers of the factor leave float32's range all products are large.
    """
    square = cap_factor * cap_factor
    in_range = (square <= Float32(LARGEST_FACTOR**2)) & (square >= Float32(LARGEST_FACTOR**-2))
    power, powers = scale_log2 * cap_factor, []
    for coefficient in reversed(CAPPED_SHORT):
        powers.append(power * Float32(coefficient))
        power = power * square
    constant, middle, highest = powers
    limit = cutlass.select_(in_range, Float32(LIMIT**2) / square, Float32(-1.0))
    largest_sum = cutlass.select_(in_range, cap_constant(scale_log2) * Float32(SLOPE / LOG2_E), Float32(-math.inf))
    return Polynomial(highest, constant, limit, middle, largest_sum)


@cute.jit
def trusted(total: Float32, added: Float32, columns: cutlass.Constexpr[int], small: Polynomial) -> Boolean:
    """Whether a thread's sum of a row says that no product spoils it; ``added``: to all its exponents. NaN does not."""
    # Between 2 ** (ends - largest_sum) and 2 ** largest_sum
    ends = math.log2(columns * TRUSTED) + SLOPE * SMALLEST_CAP
    middle = ends / 2
    off = cute.math.log2(total, fastmath=True) - (added + Float32(middle))
    return cute.arch.fmax(off, -off) < small.largest_sum - Float32(middle)


@cute.jit
def terms(hook: cutlass.Constexpr[ScoreHook], bias: Bias | None, shift: cute.Tensor | None, run) -> Terms:
    """Those of a block of this linear bias, exponents reduced by ``shift`` (2) where it is given."""
    at = cute.make_rmem_tensor(ROWS, Float32)
    for row in cutlass.range_constexpr(ROWS):
        at[row] = Float32(0.0) if const_expr(shift is None) else -shift[row]
        if const_expr(hook.softcap):
            at[row] = at[row] - cap_constant(run.scale_log2)
        if const_expr(bias is not None):
            at[row] = at[row] + bias.at[row]
    return Terms(at, None if const_expr(bias is None) else bias.step)


@cute.jit
def exponent(
    x: Float32,
    row: cutlass.Constexpr[int],
    column: cutlass.Constexpr[int],
    added: Terms,
    small: Polynomial | None,
    run,
    limit: Float32 | None = None,
) -> Float32:
    """Of one product; with a softcap the long way where x^2 is above ``limit`` or NaN."""
    term = added.at[row]
    if const_expr(added.step is not None):
        if const_expr(small is None):
            # In PTX: see score.add_term
            return cute.arch.inline_ptx(
                f"{{ .reg .f32 e; fma.rn.f32 e, {{$r2}}, {literal(float(8 * (column // 2) + column % 2))}, {{$r3}};"
                " fma.rn.f32 {$w0}, {$r0}, {$r1}, e; }",
                write_only_types=[Float32],
                read_only_args=[x, run.scale_log2, added.step, term],
            )
        term = cute.arch.inline_ptx(
            f"fma.rn.f32 {{$w0}}, {{$r0}}, {literal(float(8 * (column // 2) + column % 2))}, {{$r1}};",
            write_only_types=[Float32],
            read_only_args=[added.step, term],
        )
    square = x * x
    result = ((small.highest * square + small.middle) * square + small.constant) * x + term
    if const_expr(limit is not None):
        # In this order: else up to 100 instructions spill in kernels of windows
        of_large = capped(x * run.cap_factor) * run.scale_log2 + term + cap_constant(run.scale_log2)
        result = cutlass.select_(square <= limit, result, of_large)
    return result


@cute.jit
def exponentiate(
    scores: cute.Tensor,
    sums: cute.Tensor,
    added: Terms,
    small: Polynomial | None,
    run,
    by_sums: cutlass.Constexpr[bool],
    again: cutlass.Constexpr[bool],
):
    """Products (2 rows, columns) to probabilities in place; ``sums``: this thread's of each row, infinite where the
    polynomial does not serve them. ``again``: those the long way now, and others as before, so that a row's bits do not
    depend on its neighbours. ``by_sums``: how it is known.
    """
    columns = cute.size(scores, mode=[1])
    looked_at = const_expr(small is not None and not by_sums and not again)
    for row in cutlass.range_constexpr(ROWS):
        limit, largest = None, Int32(0)
        if const_expr(small is not None and again):
            limit = small.limit
            if const_expr(by_sums):
                limit = cutlass.select_(sums[row] == Float32(math.inf), limit, Float32(math.inf))
        for column in cutlass.range_constexpr(0, columns, 2):
            pair = [scores[row, column + index] for index in range(2)]
            if const_expr(looked_at):
                largest = largest_bits(largest, *(x * x for x in pair))
            for index in cutlass.range_constexpr(2):
                each = exponent(pair[index], row, column + index, added, small, run, limit)
                scores[row, column + index] = cute.math.exp2(each, fastmath=True)
        sums[row] = in_chains(operator.add, scores, row)
        if const_expr(small is not None and not again):
            if const_expr(by_sums):
                served = trusted(sums[row], added.at[row], columns, small)
            else:
                served = largest < bits(small.limit)
            sums[row] = cutlass.select_(served, sums[row], Float32(math.inf))


@cute.jit
def catch_up(
    softmax: cutlass.Constexpr[Softmax],
    hook: cutlass.Constexpr[ScoreHook],
    scores: cute.Tensor,
    sums: cute.Tensor,
    shift: cute.Tensor,
    row_sum: cute.Tensor,
    bias: Bias | None,
    small: Polynomial | None,
    run,
) -> cute.Tensor:
    """Softmax.catch_up; ``scores``: products."""
    whole = terms(hook, bias, None, run)
    rescale = softmax.move(
        lambda row: largest_exponent(scores, row, shift[row], whole, small, run), sums, shift, row_sum
    )
    for row in cutlass.range_constexpr(ROWS):
        for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            # Else the compiler keeps what both have in common, in registers that are not there
            scores[row, column] = kept(scores[row, column])
    return rescale


@cute.jit
def largest_exponent(
    scores: cute.Tensor,
    row: cutlass.Constexpr[int],
    least: Float32,
    added: Terms,
    small: Polynomial | None,
    run,
) -> Float32:
    """Of one whole row of products, but at least ``least``: a row that is done again for its large ones may stay below
    its shift.
    """
    limit = None if const_expr(small is None) else small.limit
    for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        least = cute.arch.fmax(least, exponent(scores[row, column], row, column, added, small, run, limit))
    return cute.arch.warp_reduction(least, cute.arch.fmax, threads_in_group=QUAD)


@cute.jit
def largest_bits(largest: Int32, a: Float32, b: Float32) -> Int32:
    """Of numbers that are not negative, whose bits are in their order; NaN is the largest."""
    return cute.arch.inline_ptx(
        "{ .reg .s32 a, b; mov.b32 a, {$r1}; mov.b32 b, {$r2}; max.s32 a, a, b; max.s32 {$w0}, {$r0}, a; }",
        write_only_types=[Int32],
        read_only_args=[largest, a, b],
    )


@cute.jit
def bits(number: Float32) -> Int32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[number])

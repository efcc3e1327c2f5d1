"""Exponents of unmasked blocks straight from the products, for softcap and ALiBi: what is added to an exponent takes
the shift along, and a capped score is never there by itself. So an element takes one or two instructions less than in
place (score.py), and their number is what softcap costs.
"""

import math
import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .registers import kept
from .score import Bias, ScoreHook, cap_constant, capped, literal
from .softmax import QUAD, ROWS, Softmax, in_chains

# As score.CAPPED for |x| < LIMIT, 0.35 caps, off by 4 / 2^24 at most (tanh by 8): a term less is 64 instructions of 700
# a block at head_dim 128
CAPPED_SHORT = (-5.9804870e-5, 2.5990946e-3, -0.12499878)
LIMIT = 1.4
# Coefficients hold cap_factor to the fifth power: far inside float32's range if it is between the inverse and this
LARGEST_FACTOR = 2.0**12


class Polynomial(NamedTuple):
    """Of a softcap: the exponents of small products x are x (constant + middle x^2 + highest x^4) + cap_constant.

    In this order the compiler leaves two of them in constant memory; of other neighbours it makes a pair of registers.
    """

    highest: Float32
    constant: Float32
    limit: Float32  # of x^2: what is not below is large
    middle: Float32


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
    return Polynomial(highest, constant, cutlass.select_(in_range, Float32(LIMIT**2) / square, Float32(0.0)), middle)


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
    any_size: cutlass.Constexpr[bool],
) -> Float32:
    """Of one product; ``any_size``: also of a large one."""
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
    if const_expr(any_size):
        # In this order: else up to 100 instructions spill in kernels of windows
        of_large = capped(x * run.cap_factor) * run.scale_log2 + term + cap_constant(run.scale_log2)
        result = cutlass.select_(square < small.limit, result, of_large)
    return result


@cute.jit
def exponentiate(
    scores: cute.Tensor,
    sums: cute.Tensor,
    added: Terms,
    small: Polynomial | None,
    run,
    any_size: cutlass.Constexpr[bool],
):
    """Products (2 rows, columns) to probabilities in place; ``sums``: this thread's of each row. Unless of ``any_size``
    the sum of a row with a large one is infinite, and its probabilities are anything.
    """
    for row in cutlass.range_constexpr(ROWS):
        largest = Int32(0)
        for column in cutlass.range_constexpr(0, cute.size(scores, mode=[1]), 2):
            pair = [scores[row, column + index] for index in range(2)]
            if const_expr(small is not None and not any_size):
                largest = largest_bits(largest, *(x * x for x in pair))
            for index in cutlass.range_constexpr(2):
                each = exponent(pair[index], row, column + index, added, small, run, any_size)
                scores[row, column + index] = cute.math.exp2(each, fastmath=True)
        sums[row] = in_chains(operator.add, scores, row)
        if const_expr(small is not None and not any_size):
            sums[row] = cutlass.select_(largest < bits(small.limit), sums[row], Float32(math.inf))


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
    for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        least = cute.arch.fmax(least, exponent(scores[row, column], row, column, added, small, run, any_size=True))
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

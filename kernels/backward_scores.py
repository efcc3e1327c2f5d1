"""What the backward kernels do with scores in registers, a thread's share of (keys, queries)."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .args import BackwardRunTime
from .blocks import NO_SIDE, Band, Sides
from .mask import BIT, columns_below, inside
from .products import converted_pair, rows_and_columns, store_copy
from .score import Bias, Pairs, ScoreHook, cap, known_with, literal
from .softmax import QUAD, ROWS

ROUND = 1.5 * 2**23  # a sum with this keeps no bits behind the point
# Coefficients of 2^f on [-1/2, 1/2], highest power first, without the constant 1: least largest relative error, 1.0e-4
# and 2.8e-6, below half a unit in the last place of the type
EXP2 = {
    cutlass.BFloat16: (0.055008928, 0.24221096, 0.69328293),
    cutlass.Float16: (0.0095828528, 0.055906425, 0.24024099, 0.69312419),
}


class OwnKeys(NamedTuple):
    """What a thread knows of its two keys of a K/V tile, the first one and the one 8 below."""

    # (2): the first query that sees each; (4) in chunks: and one more than the last
    first_queries: cute.Tensor
    # The query on whose diagonal the first one stands, with ALiBi, unless a right bound tells
    place: Int32 | None
    slope: cute.Tensor | None  # (1): of the current query head, with ALiBi
    pairs: cute.Tensor | None  # (3): batch, query head, first key; with hooks of a user's own

    @cute.jit
    def begin_head(self, hook: cutlass.Constexpr[ScoreHook], run, batch: Int32, head: Int32):
        """The next query head, and its slope."""
        if const_expr(hook.alibi is not None):
            self.slope[0] = hook.slope(run, batch, head)
        if const_expr(hook.of_pairs):
            self.pairs[0], self.pairs[1] = batch, head


@cute.jit
def own_keys(
    band: cutlass.Constexpr[Band],
    hook: cutlass.Constexpr[ScoreHook],
    first_key: Int32,
    seqlen_q: Int32,
    seqlen_k: Int32,
    run,
) -> OwnKeys:
    """Of a tile, before its first head."""
    first_queries = cute.make_rmem_tensor(2 * ROWS if band.chunked else ROWS, Int32)
    for row in cutlass.range_constexpr(ROWS):
        first_queries[row] = band.first_query(first_key + 8 * row, seqlen_q, seqlen_k, run.right)
        if const_expr(band.chunked):
            first_queries[ROWS + row] = band.end_query(first_key + 8 * row, seqlen_q, seqlen_k, run.left)
    place, slope = None, None
    if const_expr(hook.alibi is not None):
        if const_expr(not band.right_bound or band.chunked):
            place = first_key - (seqlen_k - seqlen_q)
        slope = cute.make_rmem_tensor(1, Float32)
        slope.fill(0.0)
    pairs = None
    if const_expr(hook.of_pairs):
        pairs = cute.make_rmem_tensor(3, Int32)
        pairs[0], pairs[1], pairs[2] = Int32(0), Int32(0), first_key
    return OwnKeys(first_queries, place, slope, pairs)


@cute.jit
def bias_of(hook: cutlass.Constexpr[ScoreHook], keys: OwnKeys, first: Int32, accumulator: cute.Tensor, run):
    """The Bias of a step that begins at query ``first``, or None."""
    if const_expr(hook.alibi is None):
        return None
    place = keys.first_queries[0] + run.right if const_expr(keys.place is None) else keys.place
    distance = place - first - 2 * (cute.arch.lane_idx() % QUAD)
    return hook.bias(keys.slope[0], distance, accumulator[0], transposed=True)


def pairs_of(hook: ScoreHook, keys: OwnKeys, first: Int32, accumulator: cute.Tensor):
    """The Pairs of a step that begins at query ``first``, or None."""
    if not hook.of_pairs:
        return None
    # Known with the scores only: else what is made of them is made for all steps before, and 133 instructions spill
    places = first + 2 * (cute.arch.lane_idx() % QUAD), keys.pairs[2]
    return Pairs(keys.pairs[0], keys.pairs[1], *(known_with(accumulator[0], each) for each in places))


@cute.jit
def query_limits(first_queries: cute.Tensor, first: Int32):
    """The same, counted from the thread's own first query of a step that begins at ``first``."""
    limits = cute.make_rmem_tensor(cute.size(first_queries), Int32)
    for row in cutlass.range_constexpr(cute.size(first_queries)):
        limits[row] = first_queries[row] - first - 2 * (cute.arch.lane_idx() % QUAD)
    return limits


@cute.jit
def exponentiate(
    accumulator: cute.Tensor,
    lse: cute.Tensor,
    limits: cute.Tensor,
    run: BackwardRunTime,
    sides: cutlass.Constexpr[Sides],
    width: Int32 | None,
    hook: cutlass.Constexpr[ScoreHook],
    bias: Bias | None,
    pairs: Pairs | None,
    factors: cute.Tensor | None = None,
    polynomials: cutlass.Constexpr[int] = 0,
    dtype: cutlass.Constexpr = None,
    by_bits: cutlass.Constexpr[bool] = False,
):
    """Pᵀ = exp2(Sᵀ scale - LSE), in place. ``lse``: of own_statistics, in base 2. ``limits``: of query_limits, on the
    right side of the band; ``width``: how many queries further the left one is, None where ``limits`` say it. ``bias``:
    of bias_of; ``pairs``: of pairs_of. ``factors``: where the hook has any, takes in 16 bit what dP - delta is
    multiplied with. ``polynomials``: of 4 columns, for so many a polynomial good enough for ``dtype``, where nothing is
    masked or ``by_bits``. ``by_bits``: masks with a left side are those of visible_bits, where registers hold them.
    """
    scores = rows_and_columns(accumulator)
    columns = cute.size(scores, mode=[1])
    if const_expr(hook.softcap):
        cap(scores, run.cap_factor)
    if const_expr(hook.factors):
        words = cute.make_tensor(cute.recast_ptr(factors.iterator, dtype=Int32), cute.make_layout((ROWS, columns // 2)))
        even = cute.make_rmem_tensor(ROWS, Float32)
    bits = visible_bits(limits, lse[0, 0], sides, width) if const_expr(by_bits and sides.left) else None
    for column in cutlass.range_constexpr(columns):
        shift = lse[column % 2, column // 2]
        for row in cutlass.range_constexpr(ROWS):
            score = scores[row, column]
            exponent = hook.exponent(score, bias, row, column, run, shift, pairs, transposed=True)
            if const_expr(sides != NO_SIDE):
                visible = visible_at(limits, bits, row, column, sides, width)
                exponent = cutlass.select_(visible, exponent, Float32(-math.inf))
            exponent = hook.unless_hidden(exponent, shift, pairs, row, column, transposed=True)
            if const_expr((sides == NO_SIDE or bits is not None) and column % 4 >= 4 - polynomials):
                scores[row, column] = exp2_polynomial(exponent, EXP2[dtype])
            else:
                scores[row, column] = cute.math.exp2(exponent, fastmath=True)
            if const_expr(hook.factors):
                factor = hook.factor(scores[row, column], score, bias, pairs, row, column, run, transposed=True)
                keep_factor(words, even, factor, row, column, factors.element_type)


def visible_bits(limits: cute.Tensor, lse: Float32, sides: Sides, width: Int32 | None):
    """For each of a thread's keys a bit a column: whether that query sees it. With two comparisons an element, where a
    step is the first of each head, the compiler would make all of them before the first head. ``limits``, ``width``: as
    in exponentiate(); ``lse``: any of the step's.
    """
    bits = []
    for row in range(ROWS):
        # Known with the step's statistics only: else it is made and kept for all first steps
        end = known_with(lse, limits[ROWS + row] if width is None else limits[row] + width)
        before = columns_below(known_with(lse, limits[row])) if sides.right else Int32(0)
        bits.append(columns_below(end) & ~before)
    return bits


def visible_at(limits, bits, row, column, sides, width):
    """Whether a thread's key is seen by the query of a column, by ``bits`` where there are any."""
    if bits is not None:
        return bits[row] & Int32(BIT[column]) != 0
    first = limits[row] if sides.right else None
    end = (limits[ROWS + row] if width is None else limits[row] + width) if sides.left else None
    return inside(8 * (column // 2) + column % 2, first, end)


@cute.jit
def keep_factor(
    words: cute.Tensor,
    even: cute.Tensor,
    factor: Float32,
    row: cutlass.Constexpr[int],
    column: cutlass.Constexpr[int],
    dtype: cutlass.Constexpr,
):
    """In 16 bit, two columns of a row to a register: the first waits in ``even`` (2)."""
    if const_expr(column % 2 == 0):
        even[row] = factor
    else:
        words[row, column // 2] = converted_pair(even[row], factor, dtype)


@cute.jit
def exp2_polynomial(exponent: Float32, coefficients: cutlass.Constexpr) -> Float32:
    """2^exponent without the special-function unit, which makes an exponential in the time of 8 FMAs a lane: the whole
    part by the bits of the exponent, the rest, in [-1/2, 1/2], by a polynomial (Cody and Waite 1980). NaN stays NaN;
    what is below 2^-126 becomes 0.
    """
    horner = "".join(f" fma.rn.ftz.f32 p, p, f, {literal(each)};" for each in (*coefficients[1:], 1.0))
    return cute.arch.inline_ptx(
        "{ .reg .b32 x, n, f, p, power;"
        f" max.NaN.ftz.f32 x, {{$r0}}, {literal(-127.0)};"
        # The sum's last bits are x rounded to a whole number; shifted, with the bias, they are the power's exponent
        f" add.rn.ftz.f32 n, x, {literal(ROUND)};"
        f" mad.lo.s32 power, n, {1 << 23}, {127 << 23};"
        f" sub.rn.ftz.f32 n, n, {literal(ROUND)};"
        " sub.rn.ftz.f32 f, x, n;"
        f" mov.b32 p, {literal(coefficients[0])};" + horner + " mul.rn.ftz.f32 {$w0}, p, power; }",
        write_only_types=[Float32],
        read_only_args=[exponent],
    )


@cute.jit
def differentiate(dp: cute.Tensor, p: cute.Tensor, delta: cute.Tensor):
    """dSᵀ = Pᵀ (dPᵀ - delta), in dP's place. P is taken as dV takes it: in 16 bit; where there are factors, ``p``
    is these. ``delta``: of own_statistics.
    """
    probabilities = rows_and_columns(cute.make_tensor(p.iterator, dp.layout))
    gradients = rows_and_columns(dp)
    for column in cutlass.range_constexpr(cute.size(gradients, mode=[1])):
        shift = delta[column % 2, column // 2]
        for row in cutlass.range_constexpr(ROWS):
            gradients[row, column] = probabilities[row, column].to(Float32) * (gradients[row, column] - shift)


@cute.jit
def write_scores(
    tiled_mma: cute.TiledMma, operand: cute.Tensor, layout: cutlass.Constexpr, target: cute.Tensor, thread: Int32
):
    """A thread's scores in 16 bit to shared memory, where products read them behind a fence. ``layout``: of their
    accumulator; ``thread``: of the warpgroup.
    """
    copy = store_copy(tiled_mma, target.element_type, thread)
    cute.copy(copy, copy.retile(cute.make_tensor(operand.iterator, layout)), copy.partition_D(target))


@cute.jit
def own_statistics(rows: cute.Tensor, first: cutlass.Constexpr[int], queries: cutlass.Constexpr[int]):
    """This thread's share of a step's row statistics from ``first`` on: of each 8 queries those at 2 (place in the
    quad) and one further. To load each once a warp and shuffle takes as long: both pass the same pipeline.
    """
    layout = cute.make_layout((2, queries // 8), stride=(1, 8))
    # align() computes: once, not for each pair
    own = cute.make_tensor((rows.iterator + (first + 2 * (cute.arch.lane_idx() % QUAD))).align(8), layout)
    values = cute.make_rmem_tensor((2, queries // 8), Float32)
    cute.autovec_copy(own, values)
    return values


@cute.jit
def release_queries(pipe, state):
    """Give a stage of Q and row statistics back. One lane arrives for its warp: all must have read theirs before."""
    cute.arch.sync_warp()
    pipe.consumer_release(state)

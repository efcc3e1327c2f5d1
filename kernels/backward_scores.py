"""What the backward kernels do with scores in registers, a thread's share of (keys, queries)."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .blocks import Band
from .config import WARPGROUP_THREADS
from .products import rows_and_columns, store_copy
from .softmax import QUAD, ROWS


@cute.jit
def first_queries_of(band: cutlass.Constexpr[Band], first_key: Int32, seqlen_q: Int32, seqlen_k: Int32, right: Int32):
    """The first query that sees each of the thread's keys, ``first_key`` and the one 8 below."""
    first_queries = cute.make_rmem_tensor(ROWS, Int32)
    for row in cutlass.range_constexpr(ROWS):
        first_queries[row] = band.first_query(first_key + 8 * row, seqlen_q, seqlen_k, right)
    return first_queries


@cute.jit
def query_limits(first_queries: cute.Tensor, first: Int32):
    """The same, counted from the thread's own first query of a step that begins at ``first``."""
    limits = cute.make_rmem_tensor(ROWS, Int32)
    for row in cutlass.range_constexpr(ROWS):
        limits[row] = first_queries[row] - first - 2 * (cute.arch.lane_idx() % QUAD)
    return limits


@cute.jit
def exponentiate(
    accumulator: cute.Tensor,
    lse: cute.Tensor,
    limits: cute.Tensor,
    scale_log2: Float32,
    masked: cutlass.Constexpr[bool],
):
    """Pᵀ = exp2(Sᵀ scale - LSE), in place. ``lse``: of own_statistics, in base 2."""
    scores = rows_and_columns(accumulator)
    for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        shift = lse[column % 2, column // 2]
        for row in cutlass.range_constexpr(ROWS):
            exponent = scores[row, column] * scale_log2 - shift
            if const_expr(masked):
                visible = Int32(8 * (column // 2) + column % 2) >= limits[row]
                exponent = cutlass.select_(visible, exponent, Float32(-math.inf))
            scores[row, column] = cute.math.exp2(exponent, fastmath=True)


@cute.jit
def differentiate(dp: cute.Tensor, p: cute.Tensor, delta: cute.Tensor):
    """dSᵀ = Pᵀ (dPᵀ - delta), in dP's place. P is taken as dV takes it: in 16 bit. ``delta``: of
    own_statistics.
    """
    probabilities = rows_and_columns(cute.make_tensor(p.iterator, dp.layout))
    gradients = rows_and_columns(dp)
    for column in cutlass.range_constexpr(cute.size(gradients, mode=[1])):
        shift = delta[column % 2, column // 2]
        for row in cutlass.range_constexpr(ROWS):
            gradients[row, column] = probabilities[row, column].to(Float32) * (gradients[row, column] - shift)


@cute.jit
def write_scores(tiled_mma: cute.TiledMma, operand: cute.Tensor, layout: cutlass.Constexpr, target: cute.Tensor):
    """A thread's scores in 16 bit to shared memory, where products read them. ``layout``: of their accumulator."""
    copy = store_copy(tiled_mma, target.element_type, cute.arch.thread_idx()[0] % WARPGROUP_THREADS)
    cute.copy(copy, copy.retile(cute.make_tensor(operand.iterator, layout)), copy.partition_D(target))
    cute.arch.fence_view_async_shared()


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

"""The five matrix products of one consumer warpgroup in the backward, and the register views around them."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu import warpgroup as wgmma

from .config import WGMMA_K, WGMMA_M


class BackwardProducts(NamedTuple):
    """WGMMA instructions, and their operands in shared memory. Scores are transposed, a warpgroup's 64 keys by the
    step's queries: their accumulators have the order of the A operand of dV and dK.
    """

    scores_first: cute.TiledMma  # Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, first step of the head dimension
    scores_add: cute.TiledMma  # the other steps
    dv_add: cute.TiledMma  # dV += Pᵀ dO, Pᵀ from registers
    dk_add: cute.TiledMma  # dK += dSᵀ Q, dSᵀ from registers
    dq_first: cute.TiledMma  # dQ = dS K, first step of the keys
    dq_add: cute.TiledMma  # the other steps
    k: cute.Tensor  # (.., head_dim / 16) of this warpgroup's keys
    v: cute.Tensor  # (.., head_dim_v / 16) of this warpgroup's keys
    q: cute.Tensor  # (.., head_dim / 16, stages)
    do: cute.Tensor  # (.., head_dim_v / 16, stages)
    q_transposed: cute.Tensor  # (.., tile_m / 16, stages)
    do_transposed: cute.Tensor  # (.., tile_m / 16, stages)
    ds: cute.Tensor  # (.., tile_n / 16, stages) of this warpgroup's queries
    k_transposed: cute.Tensor  # (.., tile_n / 16) of this warpgroup's columns


def transposed(tensor):
    """The same memory with rows and columns exchanged."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0, 2]))


def piece(tensor, rows, index):
    """``rows`` rows of (rows, columns, stages)."""
    _, columns, stages = tensor.shape
    return cute.local_tile(tensor, (rows, cute.size(columns), cute.size(stages)), (index, 0, 0))


@cute.jit
def make_backward_products(
    config: cutlass.Constexpr, dtype: cutlass.Constexpr, shared: tuple, warpgroup: Int32
) -> BackwardProducts:
    """Instructions and operands of one warpgroup; ``shared`` holds K, V, Q, dO and dS."""
    s_k, s_v, s_q, s_do, s_ds = shared
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    registers = wgmma.OperandSource.RMEM

    def make(a_major, b_major, columns, accumulate, source=wgmma.OperandSource.SMEM):
        tile = (WGMMA_M, columns)
        product = sm90.make_trivial_tiled_mma(dtype, dtype, a_major, b_major, Float32, (1, 1, 1), tile, a_source=source)
        product.set(wgmma.Field.ACCUMULATE, accumulate)
        return product

    scores_first = make(k_major, k_major, config.tile_m, False)
    scores_add = make(k_major, k_major, config.tile_m, True)
    dv_add = make(k_major, mn_major, config.columns_v, True, registers)
    dk_add = make(k_major, mn_major, config.columns, True, registers)
    # Of whole tiles: a swizzle atom has up to 64 columns, and CuTe does not cut one. A descriptor says where columns
    # begin and not how many there are, so it is the same for fewer.
    dv_whole = make(k_major, mn_major, config.head_dim_v, True, registers)
    dk_whole = make(k_major, mn_major, config.head_dim, True, registers)
    dq_first = make(mn_major, mn_major, config.dq_columns, False)
    dq_add = make(mn_major, mn_major, config.dq_columns, True)
    scores, dv, dk, dq = (product.get_slice(0) for product in (scores_first, dv_whole, dk_whole, dq_first))
    query_piece = warpgroup if config.query_pieces > 1 else 0
    column_piece = warpgroup if config.column_pieces > 1 else 0
    return BackwardProducts(
        scores_first,
        scores_add,
        dv_add,
        dk_add,
        dq_first,
        dq_add,
        own_keys(scores_first, s_k, warpgroup),
        own_keys(scores_first, s_v, warpgroup),
        scores_first.make_fragment_B(scores.partition_B(s_q)),
        scores_first.make_fragment_B(scores.partition_B(s_do)),
        dk_whole.make_fragment_B(dk.partition_B(transposed(s_q))),
        dv_whole.make_fragment_B(dv.partition_B(transposed(s_do))),
        dq_first.make_fragment_A(dq.partition_A(piece(s_ds, WGMMA_M, query_piece))),
        dq_first.make_fragment_B(dq.partition_B(piece(transposed(s_k), config.dq_columns, column_piece)))[
            None, None, None, 0
        ],
    )


def own_keys(product, shared, warpgroup):
    """K or V as A: descriptors of this warpgroup's keys in shared memory."""
    own = piece(shared, WGMMA_M, warpgroup)
    return product.make_fragment_A(product.get_slice(0).partition_A(own))[None, None, None, 0]


def new_total(columns):
    """Uninitialised float32 accumulator of 64 rows of dK or dV."""
    return cute.make_rmem_tensor(_accumulator(columns), Float32)


def first_columns(total, columns):
    """The first columns of an accumulator."""
    return cute.make_tensor(total.iterator, _accumulator(columns))


def _accumulator(columns):
    """One thread's part of 64 rows: 2 columns of 2 rows in every 8 columns."""
    return cute.make_layout(((2, 2, columns // 8), 1, 1))


@cute.jit
def issue(
    first: cute.TiledMma,
    add: cute.TiledMma,
    accumulator: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    columns: cutlass.Constexpr = None,
):
    """Start one matrix product, its depth ``b``'s last mode or as many ``columns`` of that, as one group of
    asynchronous WGMMAs. ``first``: the instruction of the first step of depth.
    """
    steps = cute.size(b, mode=[2]) if const_expr(columns is None) else columns // WGMMA_K
    for depth in cutlass.range_constexpr(steps):
        product = first if depth == 0 else add
        cute.gemm(product, accumulator, a[None, None, depth], b[None, None, depth], accumulator)
    wgmma.commit_group()


@cute.jit
def make_dk_from_shared(config: cutlass.Constexpr, dtype: cutlass.Constexpr, s_ds: cute.Tensor, warpgroup: Int32):
    """``(instruction, dSᵀ)`` of dK += dSᵀ Q where dSᵀ comes from shared memory: (.., tile_m / 16, stages) of this
    warpgroup's keys.
    """
    product = sm90.make_trivial_tiled_mma(
        dtype, dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1), (WGMMA_M, config.head_dim)
    )
    product.set(wgmma.Field.ACCUMULATE, True)
    own = piece(transposed(s_ds), WGMMA_M, warpgroup)
    return product, product.make_fragment_A(product.get_slice(0).partition_A(own))

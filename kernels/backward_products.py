"""The five matrix products of one consumer warpgroup in the backward, and the register views around them."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu import warpgroup as wgmma
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp

from .config import WARPGROUP_THREADS, WGMMA_M
from .products import left_operand_layout


class BackwardProducts(NamedTuple):
    """WGMMA instructions, and their operands in shared memory. Scores are transposed, a warpgroup's 64 keys by the
    step's queries: their accumulators have the order of the A operand of dV and dK.
    """

    scores_first: cute.TiledMma  # Sᵀ = K Qᵀ, first step of the head dimension
    scores_add: cute.TiledMma  # the other steps
    dp_first: cute.TiledMma  # dPᵀ = V dOᵀ, likewise: its first steps take V from registers where there are some
    dp_add_registers: cute.TiledMma
    dv_add: cute.TiledMma  # dV += Pᵀ dO, Pᵀ from registers
    dk_add: cute.TiledMma  # dK += dSᵀ Q, dSᵀ from registers
    dq_first: cute.TiledMma  # dQ = dS K, first step of the keys
    dq_add: cute.TiledMma  # the other steps
    k: cute.Tensor  # (.., head_dim / 16) of this warpgroup's keys
    v: cute.Tensor  # (.., head_dim_v / 16) of this warpgroup's keys
    v_registers: cute.Tensor  # (.., register_depth / 16) of them: load_v; None where there are none
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
    first_source = registers if config.register_depth else wgmma.OperandSource.SMEM
    dp_first = make(k_major, k_major, config.tile_m, False, first_source)
    dp_add_registers = make(k_major, k_major, config.tile_m, True, registers)
    dv_add = make(k_major, mn_major, config.head_dim_v, True, registers)
    dk_add = make(k_major, mn_major, config.head_dim, True, registers)
    dq_first = make(mn_major, mn_major, config.dq_columns, False)
    dq_add = make(mn_major, mn_major, config.dq_columns, True)
    scores, dv, dk, dq = (product.get_slice(0) for product in (scores_first, dv_add, dk_add, dq_first))
    query_piece = warpgroup if config.query_pieces > 1 else 0
    column_piece = warpgroup if config.column_pieces > 1 else 0
    return BackwardProducts(
        scores_first,
        scores_add,
        dp_first,
        dp_add_registers,
        dv_add,
        dk_add,
        dq_first,
        dq_add,
        own_keys(scores_first, s_k, warpgroup),
        own_keys(scores_first, s_v, warpgroup),
        new_v(config, dtype) if config.register_depth else None,
        scores_first.make_fragment_B(scores.partition_B(s_q)),
        scores_first.make_fragment_B(scores.partition_B(s_do)),
        dk_add.make_fragment_B(dk.partition_B(transposed(s_q))),
        dv_add.make_fragment_B(dv.partition_B(transposed(s_do))),
        dq_first.make_fragment_A(dq.partition_A(piece(s_ds, WGMMA_M, query_piece))),
        dq_first.make_fragment_B(dq.partition_B(piece(transposed(s_k), config.dq_columns, column_piece)))[
            None, None, None, 0
        ],
    )


def own_keys(product, shared, warpgroup):
    """K or V as A: descriptors of this warpgroup's keys in shared memory."""
    own = piece(shared, WGMMA_M, warpgroup)
    return product.make_fragment_A(product.get_slice(0).partition_A(own))[None, None, None, 0]


def new_v(config, dtype):
    """Registers for the first columns of this warpgroup's keys of V as A."""
    return cute.make_rmem_tensor(left_operand_layout(WGMMA_M * config.register_depth // WARPGROUP_THREADS), dtype)


@cute.jit
def load_v(dtype: cutlass.Constexpr, products: BackwardProducts, shared: cute.Tensor, warpgroup: Int32, thread: Int32):
    """V of a tile, its first columns, from shared memory to the registers in ``products``."""
    atom = cute.make_copy_atom(LdMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
    copy = cute.make_tiled_copy_A(atom, products.dp_first).get_slice(thread)
    source = copy.partition_S(piece(shared, WGMMA_M, warpgroup)[None, None, 0])
    target = copy.retile(products.v_registers)
    for depth in cutlass.range_constexpr(cute.size(target, mode=[2])):
        cute.copy(copy, source[None, None, depth], target[None, None, depth])


@cute.jit
def issue_dp(products: BackwardProducts, accumulator: cute.Tensor, stage: Int32):
    """Start dPᵀ = V dOᵀ of one dO stage as one group."""
    in_registers = 0 if products.v_registers is None else cute.size(products.v_registers, mode=[2])
    for depth in cutlass.range_constexpr(cute.size(products.do, mode=[2])):
        product = products.dp_first if depth == 0 else products.scores_add
        product = products.dp_add_registers if 0 < depth < in_registers else product
        v = products.v_registers if depth < in_registers else products.v
        do = products.do[None, None, depth, stage]
        cute.gemm(product, accumulator, v[None, None, depth], do, accumulator)
    wgmma.commit_group()


@cute.jit
def issue(first: cute.TiledMma, add: cute.TiledMma, accumulator: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    """Start one matrix product, its depth ``b``'s last mode, as one group of asynchronous WGMMAs. ``first``: the
    instruction of the first step of depth.
    """
    for depth in cutlass.range_constexpr(cute.size(b, mode=[2])):
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

"""The two matrix products of one consumer warpgroup, and the register views around them."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu import warpgroup as wgmma
from cutlass.tensor_utils import LayoutEnum

from .config import WGMMA_M
from .softmax import ROWS


class Products(NamedTuple):
    """WGMMA instructions with their operands in shared memory. Each has its accumulate flag set once, here: an
    instruction whose flag changed inside the loop would become a loop-carried value.
    """

    qk_first: cute.TiledMma  # S = Q Kᵀ, first step of the head dimension
    qk_add: cute.TiledMma  # S += Q Kᵀ, the other steps
    pv_add: cute.TiledMma  # O += P V, P from registers or shared memory
    q: cute.Tensor  # (.., head_dim / 16) of this warpgroup's piece of Q
    k: cute.Tensor  # (.., head_dim / 16, stages)
    v: cute.Tensor  # (.., tile_n / 16, stages)


@cute.jit
def make_products(
    config: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    shared: tuple,
    p_source: cutlass.Constexpr,
    warpgroup: Int32,
) -> Products:
    """Instructions and operands of one warpgroup; ``shared`` holds Q, K and V, ``p_source`` says where P lies."""
    s_q, s_k, s_v = shared
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    score_tile, output_tile = (WGMMA_M, config.tile_n), (WGMMA_M, config.head_dim_v)
    make = sm90.make_trivial_tiled_mma
    qk_first = make(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), score_tile)
    qk_add = make(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), score_tile)
    pv_add = make(dtype, dtype, k_major, mn_major, Float32, (1, 1, 1), output_tile, a_source=p_source)
    qk_first.set(wgmma.Field.ACCUMULATE, False)
    qk_add.set(wgmma.Field.ACCUMULATE, True)
    pv_add.set(wgmma.Field.ACCUMULATE, True)
    qk_slice, pv_slice = qk_first.get_slice(0), pv_add.get_slice(0)
    q = qk_first.make_fragment_A(qk_slice.partition_A(s_q))[None, None, None, warpgroup]
    k = qk_first.make_fragment_B(qk_slice.partition_B(s_k))
    # V is stored (keys, head_dim_v): the product wants (head_dim_v, keys), which is the same memory read the other way.
    v_transposed = cute.make_tensor(s_v.iterator, cute.select(s_v.layout, mode=[1, 0, 2]))
    v = pv_add.make_fragment_B(pv_slice.partition_B(v_transposed))
    return Products(qk_first, qk_add, pv_add, q, k, v)


@cute.jit
def issue_scores(products: Products, scores: cute.Tensor, stage: Int32):
    """Start S = Q Kᵀ of one K stage as one group of asynchronous WGMMAs."""
    for depth in cutlass.range_constexpr(cute.size(products.q, mode=[2])):
        product = products.qk_first if depth == 0 else products.qk_add
        cute.gemm(product, scores, products.q[None, None, depth], products.k[None, None, depth, stage], scores)
    wgmma.commit_group()


@cute.jit
def issue_output(products: Products, acc_o: cute.Tensor, probabilities: cute.Tensor, stage: Int32):
    """Start O += P V of one V stage as one group of asynchronous WGMMAs."""
    for depth in cutlass.range_constexpr(cute.size(probabilities, mode=[2])):
        cute.gemm(products.pv_add, acc_o, probabilities[None, None, depth], products.v[None, None, depth, stage], acc_o)
    wgmma.commit_group()


def new_accumulator(tiled_mma, tile):
    """Uninitialised float32 accumulator of a (64, N) tile in registers."""
    return cute.make_rmem_tensor(tiled_mma.partition_shape_C(tile), Float32)


def rows_and_columns(accumulator):
    """One thread's accumulator ((2, 2, N / 8), 1, 1) seen as (2 rows, N / 4 columns)."""
    groups = cute.size(accumulator) // 4
    return cute.make_tensor(accumulator.iterator, cute.make_layout((ROWS, (2, groups)), stride=(2, (1, 4))))


@cute.jit
def convert(accumulator: cute.Tensor, dtype: cutlass.Constexpr, target=None):
    """An accumulator in 16 bit, in its registers' order, which is the A operand's too: in ``target`` where one is
    given.

    By inline PTX, which stays where it is written. Plain conversions LLVM moves to where their results are used: behind
    the exponentials instead of among them, or in fp16 together with the exponentials out of their loop, upon which
    ptxas serialises the WGMMAs.
    """
    converted = cute.make_rmem_tensor_like(accumulator, dtype) if const_expr(target is None) else target
    pairs = cute.size(accumulator) // 2
    words = cute.make_tensor(cute.recast_ptr(converted.iterator, dtype=Int32), cute.make_layout(pairs))
    values = cute.make_tensor(accumulator.iterator, cute.make_layout(2 * pairs))
    for pair in cutlass.range(pairs, unroll_full=True):
        words[pair] = converted_pair(values[2 * pair], values[2 * pair + 1], dtype)
    return converted


@cute.jit
def converted_pair(low: Float32, high: Float32, dtype: cutlass.Constexpr) -> Int32:
    """Two values in 16 bit, in one register."""
    instruction = "cvt.rn.bf16x2.f32" if dtype is cutlass.BFloat16 else "cvt.rn.f16x2.f32"
    return cute.arch.inline_ptx(
        f"{instruction} {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[high, low]
    )


def store_copy(tiled_mma, dtype, thread):
    """How a thread of a warpgroup writes its part of an accumulator, as 16 bit, to shared memory: by stmatrix."""
    atom = sm90.get_smem_store_op(LayoutEnum.ROW_MAJOR, dtype, Float32)
    return cute.make_tiled_copy_C(atom, tiled_mma).get_slice(thread)


def left_operand_layout(elements):
    """Registers of one thread in the order of the A operand of 16-deep WGMMAs: ((2, 2, 2), 1, N / 16)."""
    return cute.make_layout(((2, 2, 2), 1, elements // 8), stride=((1, 2, 4), 0, 8))


def new_left_operand(accumulator, dtype):
    """Registers for P in 16 bit, in the A operand's order."""
    return cute.make_rmem_tensor(left_operand_layout(cute.size(accumulator)), dtype)

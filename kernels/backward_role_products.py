"""The two matrix products of one consumer warpgroup in the backward with roles."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu import warpgroup as wgmma

from .backward_products import transposed
from .config import WGMMA_M


class RoleProducts(NamedTuple):
    """WGMMA instructions, and their operands in shared memory. Scores are transposed, keys by queries."""

    scores_first: cute.TiledMma  # Sᵀ = K Qᵀ or dPᵀ = V dOᵀ, first step of the head dimension
    scores_add: cute.TiledMma  # the other steps
    total_add: cute.TiledMma  # dV += Pᵀ dO or dK += dSᵀ Q, scores from registers
    keys: cute.Tensor  # K or V (.., head dim / 16)
    queries: cute.Tensor  # Q or dO (.., head dim / 16, stages)
    rows: cute.Tensor  # dO or Q (.., tile_m / 16, stages): what the scores are multiplied with


@cute.jit
def make_role_products(
    config: cutlass.Constexpr, dtype: cutlass.Constexpr, scores_of: tuple, total_of: tuple
) -> RoleProducts:
    """``scores_of``: K and Q, or V and dO, in shared memory; ``total_of``: (dO, head_dim_v) or (Q, head_dim)."""
    keys, queries = scores_of
    rows, columns = total_of
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN

    def make(b_major, columns, accumulate, source=wgmma.OperandSource.SMEM):
        tile = (WGMMA_M, columns)
        product = sm90.make_trivial_tiled_mma(dtype, dtype, k_major, b_major, Float32, (1, 1, 1), tile, a_source=source)
        product.set(wgmma.Field.ACCUMULATE, accumulate)
        return product

    scores_first = make(k_major, config.tile_m, False)
    scores_add = make(k_major, config.tile_m, True)
    total_add = make(mn_major, columns, True, wgmma.OperandSource.RMEM)
    scores, total = (product.get_slice(0) for product in (scores_first, total_add))
    return RoleProducts(
        scores_first,
        scores_add,
        total_add,
        scores_first.make_fragment_A(scores.partition_A(keys))[None, None, None, 0],
        scores_first.make_fragment_B(scores.partition_B(queries)),
        total_add.make_fragment_B(total.partition_B(transposed(rows))),
    )

"""The end of a Q tile: O through shared memory and TMA store, LSE straight from registers."""

import math

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.tensor_utils import LayoutEnum

from .args import TiledTensor, partition
from .barriers import sync_warpgroup
from .softmax import QUAD, ROWS


@cute.jit
def normalise(
    acc_o: cute.Tensor, inverse: cute.Tensor, row_lse: cute.Tensor, key_limits: cute.Tensor, band: cutlass.Constexpr
):
    """Divide each row of O (2 rows, columns) by its sum. A row that sees no key becomes 0 with LSE -inf, whatever V
    held.
    """
    for row in cutlass.range_constexpr(ROWS):
        if const_expr(band.right_bound):
            sees_none = key_limits[row] <= 0
            row_lse[row] = cutlass.select_(sees_none, Float32(-math.inf), row_lse[row])
        for column in cutlass.range(cute.size(acc_o, mode=[1]), unroll_full=True):
            value = acc_o[row, column] * inverse[row]
            if const_expr(band.right_bound):
                value = cutlass.select_(sees_none, Float32(0.0), value)
            acc_o[row, column] = value


@cute.jit
def store_lse(lse: cute.Tensor, values: cute.Tensor, first_row: Int32, head: Int32, batch: Int32):
    """One thread of each quad writes its rows, ``first_row`` and 8 below it; rows past the end are not written."""
    if cute.arch.lane_idx() % QUAD == 0:
        for index in cutlass.range_constexpr(ROWS):
            row = first_row + 8 * index
            if row < lse.shape[2]:
                lse[batch, head, row] = values[index]


@cute.jit
def wait_output_free(warpgroup: Int32, is_store_warp: Boolean):
    """Return when the warpgroup may write its O buffer: the last store has read it, and no warp still reads Q from
    it.
    """
    if is_store_warp:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    sync_warpgroup(warpgroup)


@cute.jit
def write_output(
    shared: cute.Tensor, acc_o: cute.Tensor, pv_mma: cute.TiledMma, dtype: cutlass.Constexpr, thread: Int32
):
    """Convert O, write it to shared memory (stmatrix) and make it visible to TMA."""
    converted = cute.make_rmem_tensor_like(acc_o, dtype)
    converted.store(acc_o.load().to(dtype))
    store_atom = sm90.get_smem_store_op(LayoutEnum.ROW_MAJOR, dtype, Float32)
    copy = cute.make_tiled_copy_C(store_atom, pv_mma).get_slice(thread)
    cute.copy(copy, copy.retile(converted), copy.partition_D(shared))
    cute.arch.fence_view_async_shared()


@cute.jit
def send_output(
    out: TiledTensor, shared: cute.Tensor, tile: cutlass.Constexpr, piece: Int32, head: Int32, batch: Int32
):
    """Start the TMA store of 64 rows; TMA clips what lies outside the tensor."""
    target = cute.local_tile(out.tensor[None, None, head, batch], tile, (piece, 0))
    source, target = partition(out, shared, target)
    cute.copy(out.atom, source, target)
    cute.arch.cp_async_bulk_commit_group()

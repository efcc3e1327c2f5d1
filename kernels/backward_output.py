"""How dK and dV leave a consumer warpgroup that holds both, of 64 keys of its own."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .backward_work import Work
from .config import WARPGROUP_THREADS, BackwardConfig
from .output import DirectOutput, Piece
from .workspace import write_piece


@cute.jit
def store_gradients(
    config: cutlass.Constexpr[BackwardConfig],
    dtype: cutlass.Constexpr,
    outputs: tuple,
    totals: tuple,
    work: Work,
    warpgroup: Int32,
    first_key: Int32,
    scale: Float32,
):
    """In the input's dtype, or as one of the parts to be added later. ``totals``: dK and dV in registers."""
    (out_dk, out_dv), (dk, dv) = outputs, totals
    if const_expr(config.split_heads):
        place = work.batch, work.head_k, work.part - work.head_k * out_dk.shape[2], work.n_block, None
        write_piece(out_dk[place], dk, warpgroup)
        write_piece(out_dv[place], dv, warpgroup)
    else:
        for element in cutlass.range(cute.size(dk), unroll_full=True):
            dk[element] = dk[element] * scale
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        piece = Piece(work.n_block, work.head_k, work.batch, warpgroup, thread, Boolean(False), first_key)
        DirectOutput(dtype, config.head_dim).store(out_dk, None, dk, None, piece)
        DirectOutput(dtype, config.head_dim_v).store(out_dv, None, dv, None, piece)

"""How dK and dV leave a consumer warpgroup, of 64 keys."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .config import WARPGROUP_THREADS, BackwardConfig
from .output import DirectOutput, Piece
from .workspace import write_piece


@cute.jit
def store_gradients(
    config: cutlass.Constexpr[BackwardConfig],
    dtype: cutlass.Constexpr,
    outputs: tuple,
    totals: tuple,
    work: NamedTuple,
    warpgroup: Int32,
    first_key: Int32,
    scale: Float32,
):
    """dK and dV of a warpgroup that holds both: ``totals``, with what store_gradient takes of each in ``outputs``."""
    (dk_output, dv_output), (dk, dv) = outputs, totals
    store_gradient(config, dtype, config.head_dim, dk_output, dk, work, warpgroup, first_key, scale)
    store_gradient(config, dtype, config.head_dim_v, dv_output, dv, work, warpgroup, first_key, None)


@cute.jit
def store_gradient(
    config: cutlass.Constexpr[BackwardConfig],
    dtype: cutlass.Constexpr,
    columns: cutlass.Constexpr[int],
    output: tuple,
    total: cute.Tensor,
    work: NamedTuple,
    piece: Int32,
    first_key: Int32,
    scale: Float32 | None,
):
    """In the input's dtype, times ``scale``, or as one of the parts to be added later. ``output``: (dK or dV, its
    parts), None for what the configuration has not; ``piece``: which 64 keys of the tile.
    """
    gradient, parts = output
    direct = DirectOutput(dtype, columns, config.predicated_output)
    if const_expr(config.split_heads):
        part = work.part - work.head_k * parts.shape[2]
        write_piece(parts[work.batch, work.head_k, part, work.n_block, None], total, piece)
    elif const_expr(config.split_tail):
        if work.slot >= 0:
            write_piece(parts[work.slot, None], total, piece)
        else:
            store_directly(direct, gradient, total, work, piece, first_key, scale)
    else:
        store_directly(direct, gradient, total, work, piece, first_key, scale)


@cute.jit
def store_directly(
    direct: cutlass.Constexpr[DirectOutput],
    gradient: cute.Tensor,
    total: cute.Tensor,
    work: NamedTuple,
    piece: Int32,
    first_key: Int32,
    scale: Float32 | None,
):
    """In the input's dtype. ``gradient``: (seqlen_k, columns, heads_k, batch)."""
    if const_expr(scale is not None):
        for element in cutlass.range(cute.size(total), unroll_full=True):
            total[element] = total[element] * scale
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    rows = Piece(work.n_block, work.head_k, work.batch, piece, thread, Boolean(False), first_key)
    direct.store(work.keys_of(gradient), None, total, None, rows)

"""Shared-memory layouts of the backward kernel."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import warpgroup as wgmma
from cutlass.tensor_utils import LayoutEnum

from .config import SHARED_ALIGNMENT, WGMMA_M, BackwardConfig
from .schedule import SLOTS

ROW_MAJOR, COL_MAJOR = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR


def backward_layouts(config: BackwardConfig, dtype):
    """``(k, v, q, do, ds)``: swizzled layouts. K and V are (tile_n, head dim, 1), Q and dO (tile_m, head dim, stages).
    dS is (tile_m, tile_n, stages) with neighbouring queries side by side, as the accumulators of its transpose hold it;
    with roles they hold P of two steps.
    """
    scores = (WGMMA_M, config.tile_m)
    k = key_layout(config, dtype)
    v = sm90.make_smem_layout_a(ROW_MAJOR, (config.tile_n, config.tile_m, config.head_dim_v), dtype, 1)
    q = sm90.make_smem_layout_b(ROW_MAJOR, (*scores, config.head_dim), dtype, config.stages)
    do = sm90.make_smem_layout_b(ROW_MAJOR, (*scores, config.head_dim_v), dtype, config.do_stages)
    ds_tile = (config.tile_m, config.dq_columns, config.tile_n)
    ds = sm90.make_smem_layout_a(COL_MAJOR, ds_tile, dtype, config.score_stages)
    return k, v, q, do, ds


def row_layout(config: BackwardConfig):
    """Layout of the row statistics, (1, row_floats, stages): one row of global memory a step."""
    return cute.make_layout((1, config.row_floats, config.stages), stride=(0, 1, config.row_floats))


def key_layout(config: BackwardConfig, dtype):
    """K's layout, (tile_n, head_dim, 1): pieces of dQ take whole swizzle atoms of its columns."""
    kinds = wgmma.SmemLayoutAtomKind
    piece = config.dq_columns if config.sums else config.head_dim
    kind = kinds.K_SW128 if piece % 64 == 0 else kinds.K_SW64 if piece % 32 == 0 else kinds.K_SW32
    atom = wgmma.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (config.tile_n, config.head_dim, 1), order=(0, 1, 2))


def backward_storage(config: BackwardConfig, dtype, fields: int):
    """The struct of a CTA's shared memory. ``fields``: numbers that tell a warp of a piece of work."""
    k_layout, v_layout, q_layout, do_layout, ds_layout = backward_layouts(config, dtype)

    @cute.struct
    class BackwardStorage:
        # full and empty barriers, one pair a stage
        k_barriers: cute.struct.MemRange[cutlass.Int64, 2]
        v_barriers: cute.struct.MemRange[cutlass.Int64, 2]
        q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * config.stages]
        do_barriers: cute.struct.MemRange[cutlass.Int64, 2 * config.do_stages]
        p_barriers: cute.struct.MemRange[cutlass.Int64, 2 * config.score_stages if config.roles else 0]
        queue_barriers: cute.struct.MemRange[cutlass.Int64, 2 * SLOTS]
        queue_slots: cute.struct.MemRange[cutlass.Int32, fields * SLOTS]
        rows: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, config.stages * config.row_floats], 128]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(k_layout)], SHARED_ALIGNMENT]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(v_layout)], SHARED_ALIGNMENT]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_layout)], SHARED_ALIGNMENT]
        do: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(do_layout)], SHARED_ALIGNMENT]
        ds: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(ds_layout)], SHARED_ALIGNMENT]
        dq: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, staged_floats(config)], SHARED_ALIGNMENT]

    return BackwardStorage


def staged_floats(config: BackwardConfig):
    """Floats of dQ's pieces in shared memory."""
    return config.consumer_warpgroups * config.piece_floats // config.sum_rounds if config.sums else 0

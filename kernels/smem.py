"""Shared-memory layouts of the forward kernel."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.tensor_utils import LayoutEnum

from .config import SHARED_ALIGNMENT, WGMMA_M, ForwardConfig
from .schedule import SLOTS

ROW_MAJOR = LayoutEnum.ROW_MAJOR


def forward_layouts(config: ForwardConfig, dtype):
    """``(q, k, v, o, p)``: swizzled layouts. Q is (64, head dim, consumer warpgroups), O (64, head dim, 1) and P (64,
    tile_n, 1): each warpgroup owns one piece of its own, so that it can give Q back, and send O off, without waiting
    for the others. K and V are (tile_n, head dim, stages). The swizzle is the widest of 128, 64 and 32 bytes that
    divides a row: for P 32 at tile_n 112 and 144; stmatrix has no bank conflicts in any of them.
    """
    tile_qk = (WGMMA_M, config.tile_n, config.head_dim)
    tile_pv = (WGMMA_M, config.tile_n, config.head_dim_v)
    q = sm90.make_smem_layout_a(ROW_MAJOR, tile_qk, dtype, config.consumer_warpgroups)
    k = sm90.make_smem_layout_b(ROW_MAJOR, tile_qk, dtype, config.stages)
    v = sm90.make_smem_layout_b(ROW_MAJOR, tile_pv, dtype, config.stages)
    o = sm90.make_smem_layout_epi(dtype, ROW_MAJOR, (WGMMA_M, config.head_dim_v), 1)
    # A of P V: what is the width of a block in Q Kᵀ is the depth here
    p = sm90.make_smem_layout_a(ROW_MAJOR, (WGMMA_M, config.head_dim_v, config.tile_n), dtype, 1)
    return q, k, v, o, p


def forward_storage(config: ForwardConfig, dtype, slots: int):
    """The struct of a CTA's shared memory. ``slots``: numbers in the slots of the tile queue."""
    q_layout, k_layout, v_layout, _, _ = forward_layouts(config, dtype)
    output_elements = config.consumer_warpgroups * WGMMA_M * config.output_columns if config.staged_output else 0

    @cute.struct
    class ForwardStorage:
        # full and empty barriers: one pair a stage, and one pair a warpgroup for Q
        q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * config.consumer_warpgroups]
        k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * config.stages]
        v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * config.stages]
        queue_barriers: cute.struct.MemRange[cutlass.Int64, 2 * SLOTS]
        queue_slots: cute.struct.MemRange[cutlass.Int32, slots]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_layout)], SHARED_ALIGNMENT]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(k_layout)], SHARED_ALIGNMENT]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(v_layout)], SHARED_ALIGNMENT]
        # Empty where O leaves straight from registers. With shared_p each warpgroup's piece is P's first. O takes it
        # after the tile's last P V; the next tile's P waits until the store has read O.
        o: cute.struct.Align[cute.struct.MemRange[dtype, output_elements], SHARED_ALIGNMENT]

    return ForwardStorage

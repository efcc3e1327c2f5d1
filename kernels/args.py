"""Bundles of device values that cross the boundary from the host function into a kernel."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync


class TiledTensor(NamedTuple):
    """A global tensor (length, head_dim, heads, batch) and the TMA atom that moves its tiles."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


@cute.jit
def partition(tiled: TiledTensor, shared: cute.Tensor, tiles: cute.Tensor):
    """``(shared, tiles)`` as the atom copies them: the two modes of a box become one."""
    return cpasync.tma_partition(
        tiled.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )


class RunTime(NamedTuple):
    """Scalars known at launch only."""

    scale_log2: Float32  # softmax scale times log2(e), so that exp2 does the softmax; never 0
    right: Int32 | tuple  # right bound of the band, as it takes it; not read where the configuration has none
    left: Int32 | tuple | None  # left bound of the band; None where the configuration has none
    section: Int32 | None  # heads (over the batch) scheduled together: schedule.py; None: a table of tiles says it
    fills_idle_sms: Int32  # may_begin_early
    # None where the configuration has none:
    cap_factor: Float32 | None = None  # of products, for score.Softcap; scale_log2 is that of its results then
    slopes: cute.Tensor | None = None  # (batch, heads)
    sink: cute.Tensor | None = None  # (heads)
    polynomial: tuple | None = None  # fused.Polynomial


class BackwardRunTime(NamedTuple):
    """Scalars of a backward known at launch only."""

    scale_log2: Float32  # softmax scale times log2(e); never 0
    scale: Float32  # softmax scale, a factor of dQ and dK
    right: Int32 | tuple  # right bound of the band, as it takes it; not read where the configuration has none
    left: Int32 | tuple | None  # left bound of the band; None where the configuration has none
    section: Int32 | None  # heads (over the batch) scheduled together: schedule.py; None: a table of tiles says it
    head_parts: Int32  # K/V heads times the parts into which each one's query heads are split
    # Where the tail is split: backward_work.py
    whole_tiles: Int32  # the first tiles, which are not cut
    parts: Int32  # of each other tile
    fills_idle_sms: Int32  # may_begin_early
    # None where the configuration has none:
    cap_factor: Float32 | None = None  # as in RunTime
    slopes: cute.Tensor | None = None  # (batch, heads)

    @cute.jit
    def heads_of(self, part: Int32, heads: Int32, heads_k: Int32):
        """``(head_k, first, last)``: the K/V head of a part, and its query heads [first, last)."""
        group, parts = heads // heads_k, self.head_parts // heads_k
        head_k = part // parts
        span = (group + parts - 1) // parts
        first = (part - head_k * parts) * span
        last = cutlass.min(first + span, group)
        return head_k, head_k * group + first, head_k * group + last


@cute.jit
def may_begin_early(run):
    """Programmatic dependent launch: from here on the next launch's CTAs may set themselves up on SMs that this one
    leaves idle, and wait there for its end. Not where they are left idle for others: ``run.fills_idle_sms`` is 0 then.
    """
    if run.fills_idle_sms != 0:
        cute.arch.griddepcontrol_launch_dependents()

"""Bundles of device values that cross the boundary from the host function into a kernel."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32


class TiledTensor(NamedTuple):
    """A global tensor (length, head_dim, heads, batch) and the TMA atom that moves its tiles."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class RunTime(NamedTuple):
    """Scalars known at launch only."""

    scale_log2: Float32  # softmax scale times log2(e), so that exp2 does the softmax; never 0
    right: Int32  # right bound of the band; not read where the configuration has none
    section: Int32  # heads (over the batch) that are scheduled together: schedule.py

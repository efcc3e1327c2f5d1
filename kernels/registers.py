"""What a warp knows about itself, in registers.

Thread and lane numbers are special registers. The compiler takes a value that it can compute from them for cheap, and
computes it again in every step of a loop; but to read one takes as long as ten instructions.
"""

from dataclasses import replace

import cutlass.cute as cute
from cutlass import const_expr

from .config import WARPGROUP_THREADS
from .softmax import QUAD


def kept(value):
    """The same value, of which the compiler does not know where it comes from: through a shuffle."""
    return cute.arch.shuffle_sync(value, cute.arch.lane_idx())


def released_by_first_lane(pipes):
    """The pipelines. A warp's first lane gives their stages back, as in their own way, but which one it is is kept."""
    first = kept(cute.arch.lane_idx()) == 0
    return tuple(replace(pipe, is_signaling_thread=first) for pipe in pipes)


@cute.jit
def row_between_tiles(band, thread):
    """The first of a thread's two rows of a WGMMA accumulator. ``thread``: of the warpgroup, kept. Where a sequence's
    place takes registers (``band.packed``) it is computed from the special register, which is cheaper between tiles
    than to spill.
    """
    if const_expr(band.packed):
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    return thread // QUAD // 8 * 16 + thread // QUAD % 8

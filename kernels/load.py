"""The producer warp: moves Q, K and V tiles to shared memory by TMA."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from .args import TiledTensor


class Source(NamedTuple):
    """The tiles of one head and where they go: ``tiles[None, i]`` in global, ``stages[None, s]`` in shared memory."""

    atom: cute.CopyAtom
    tiles: cute.Tensor
    stages: cute.Tensor


@cute.jit
def tile_source(
    operand: TiledTensor, shared: cute.Tensor, shape: cutlass.Constexpr, head: Int32, batch: Int32
) -> Source:
    """Cut one head of a global tensor (length, head_dim, heads, batch) into tiles of ``shape``."""
    of_head = operand.tensor[None, None, head, batch]
    tiles = cute.local_tile(of_head, shape, (None, 0))
    stages, tiles = cpasync.tma_partition(
        operand.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return Source(operand.atom, tiles, stages)


@cute.jit
def load_tile(source: Source, pipe, state, tile: Int32):
    """Wait until the stage is free, start the copy of one tile, and advance the state."""
    pipe.producer_acquire(state)
    barrier = pipe.producer_get_barrier(state)
    cute.copy(source.atom, source.tiles[None, tile], source.stages[None, state.index], tma_bar_ptr=barrier)
    pipe.producer_commit(state)
    state.advance()
    return state

"""Float32 sums in global memory, in the order of a warpgroup's registers.

A piece is one warpgroup's accumulator: 64 rows, some columns. Vector ``v`` of thread ``t``, its registers 4 v to 4 v +
3, lies at element 512 v + 4 t: whole lines a warp, no shared memory, and any kernel with the same accumulator can read
it back.
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .config import WARPGROUP_THREADS

VECTOR = 4  # floats that one instruction moves
STRIDE = VECTOR * WARPGROUP_THREADS


@cute.jit
def write_piece(memory: cute.Tensor, accumulator: cute.Tensor, piece: Int32, thread: Int32 | None = None):
    """Write a thread's share to shared or global memory (one dimension, pieces of equal size). ``thread``: of the
    warpgroup, where it is at hand.
    """
    for own, there in zip(*shares(memory, accumulator, piece, thread), strict=True):
        cute.copy(vector_copy(), own, there)


@cute.jit
def read_piece(memory: cute.Tensor, accumulator: cute.Tensor, piece: Int32, thread: Int32 | None = None):
    """The thread's share of a piece."""
    for own, there in zip(*shares(memory, accumulator, piece, thread), strict=True):
        cute.copy(vector_copy(), there, own)


def vector_copy():
    return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)


def shares(memory, accumulator, piece, thread=None):
    """A thread's vectors: (registers, where they lie in memory)."""
    size = cute.size(accumulator)
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS if thread is None else thread
    # align() computes: once, not for each vector
    pointer = (memory.iterator + (piece * size * WARPGROUP_THREADS + VECTOR * thread)).align(16)
    layout, vectors = cute.make_layout(VECTOR), range(size // VECTOR)
    own = [cute.make_tensor(accumulator.iterator + VECTOR * vector, layout) for vector in vectors]
    return own, [cute.make_tensor(pointer + STRIDE * vector, layout) for vector in vectors]


@cute.jit
def add_shared(memory: cute.Tensor, shared: cute.Tensor):
    """One thread: start adding a piece in shared memory to ``memory``; both of one dimension."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[memory.iterator, shared.iterator, Int32(cute.size(shared) * Float32.width // 8)],
    )
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def add_or_store_shared(memory: cute.Tensor, shared: cute.Tensor, begins: Boolean):
    """The same; where it ``begins`` the sum, ``memory`` holds nothing yet. Without a branch: registers."""
    cute.arch.inline_ptx(
        "{ .reg .pred begins; setp.ne.s32 begins, {$r3}, 0;"
        " @begins cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};"
        " @!begins cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2}; }",
        read_only_args=[
            memory.iterator,
            shared.iterator,
            Int32(cute.size(shared) * Float32.width // 8),
            Int32(begins),
        ],
    )
    cute.arch.cp_async_bulk_commit_group()

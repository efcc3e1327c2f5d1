"""Float32 sums in global memory, in the order of a warpgroup's registers.

A piece is one warpgroup's accumulator: 64 rows, some columns. Vector ``v`` of thread ``t``, its registers 4 v to 4 v +
3, lies at element 512 v + 4 t: whole lines a warp, no shared memory, and any kernel with the same accumulator can read
it back.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .config import WARPGROUP_THREADS

VECTOR = 4  # floats that one instruction adds or moves
STRIDE = VECTOR * WARPGROUP_THREADS


@cute.jit
def add_piece(memory: cute.Tensor, accumulator: cute.Tensor, piece: Int32):
    """Add a thread's share to ``memory`` (one dimension, pieces of equal size), atomically."""
    size = cute.size(accumulator)
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    pointer = memory.iterator + (piece * size * WARPGROUP_THREADS + VECTOR * thread)
    values = cute.make_tensor(accumulator.iterator, cute.make_layout(size))
    for vector in cutlass.range_constexpr(size // VECTOR):
        cute.arch.inline_ptx(
            f"red.relaxed.gpu.global.add.v4.f32 [{{$r0}}+{4 * STRIDE * vector}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
            read_only_args=[pointer, *(values[VECTOR * vector + index] for index in range(VECTOR))],
        )


@cute.jit
def read_piece(memory: cute.Tensor, accumulator: cute.Tensor, piece: Int32):
    """The thread's share of a piece that add_piece or write_piece filled."""
    size = cute.size(accumulator)
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
    pointer = memory.iterator + (piece * size * WARPGROUP_THREADS + VECTOR * thread)
    for vector in cutlass.range_constexpr(size // VECTOR):
        source = cute.make_tensor((pointer + STRIDE * vector).align(16), cute.make_layout(VECTOR))
        target = cute.make_tensor(accumulator.iterator + VECTOR * vector, cute.make_layout(VECTOR))
        cute.copy(copy, source, target)

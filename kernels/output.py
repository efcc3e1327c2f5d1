"""How O leaves a consumer warpgroup: staged in shared memory for a TMA store, or straight from registers.

Both are given the normalised accumulator. Neither touches Q's memory, so that the next tile's Q loads meanwhile.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from .args import TiledTensor, partition
from .barriers import sync_warpgroup
from .config import WGMMA_M
from .cut_rows import CutRows
from .products import convert, store_copy
from .sequence import Sequence
from .softmax import QUAD, ROWS

GROUP = 8  # neighbouring columns that a quad holds of a row, two a thread: 16 bytes
# Steps that transpose QUAD groups of a row among the lanes of a quad: (distance of the lanes that swap, (low, high)
# groups between which they do). The lower lane gives its high group for the upper lane's low one.
TRANSPOSE = ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3))))


class Piece(NamedTuple):
    """The 64 rows of O that one warpgroup holds, and which of them are this thread's."""

    index: Int32  # among the pieces of a head
    head: Int32
    batch: Int32
    warpgroup: Int32
    thread: Int32  # of the warpgroup
    in_store_warp: Boolean  # the warp that speaks to TMA for its warpgroup
    first_row: Int32  # of the head, this thread's first; the second lies 8 below
    first_column: Int32 | int = 0  # DirectOutput: where the accumulator's columns begin; whole groups
    sequence: Sequence | None = None  # whose rows they are; None: ``out`` is its rows already


@cute.jit
def wait_output_free(warpgroup: Int32, in_store_warp: Boolean):
    """Return when the warpgroup may write its O buffer: the last store has read it, and no warp still reads P from
    it.
    """
    if in_store_warp:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    sync_warpgroup(warpgroup)


@dataclass(frozen=True)
class StagedOutput:
    """Through shared memory of the warpgroup's own; the TMA store runs on under the next tile."""

    dtype: type
    head_dim_v: int
    cut: bool = False  # rows may end before the tensor does, where the next sequence's begin

    @property
    def boxes(self):
        return CutRows(WGMMA_M, self.head_dim_v)

    @cute.jit
    def target(self, out: cute.Tensor, layout: cute.ComposedLayout) -> TiledTensor:
        """What the kernel takes for ``out`` (length, head_dim_v, heads, batch)."""
        out = self.boxes.view(out) if const_expr(self.cut) else out
        tile = (WGMMA_M, self.head_dim_v)
        store = cpasync.CopyBulkTensorTileS2GOp()
        return TiledTensor(*cpasync.make_tiled_tma_atom(store, out, cute.slice_(layout, (None, None, 0)), tile))

    @cute.jit
    def prefetch(self, out: TiledTensor):
        cpasync.prefetch_descriptor(out.atom)

    @cute.jit
    def store(self, out: TiledTensor, shared: cute.Tensor, acc_o: cute.Tensor, pv_mma: cute.TiledMma, piece: Piece):
        """Write O to shared memory (stmatrix) and start its TMA store, which clips what lies outside the tensor."""
        wait_output_free(piece.warpgroup, piece.in_store_warp)
        # Write, and make it visible to TMA
        converted = convert(acc_o, self.dtype)
        copy = store_copy(pv_mma, self.dtype, piece.thread)
        cute.copy(copy, copy.retile(converted), copy.partition_D(shared))
        cute.arch.fence_view_async_shared()
        sync_warpgroup(piece.warpgroup)
        # Start the store
        if piece.in_store_warp:
            source, target = partition(out, shared, self.box(out, piece))
            cute.copy(out.atom, source, target)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def box(self, out: TiledTensor, piece: Piece):
        """Where the piece lies in ``out``."""
        if const_expr(self.cut):
            first, sequence = piece.index * WGMMA_M, piece.sequence
            valid = cutlass.min(cutlass.max(sequence.seqlen_q - first, 0), WGMMA_M)
            rows = out.tensor[None, None, None, piece.head, piece.batch]
            found = self.boxes.box(rows, sequence.offset_q + first, valid)
        else:
            rows = out.tensor[None, None, piece.head, piece.batch]
            found = cute.local_tile(rows, (WGMMA_M, self.head_dim_v), (piece.index, 0))
        return found

    @cute.jit
    def finish(self, in_store_warp: Boolean):
        """Shared memory must live until the last store has read it."""
        if in_store_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@dataclass(frozen=True)
class DirectOutput:
    """From registers to global memory, where shared memory has no room beside Q, K and V.

    A quad holds 8 columns of a row in 16 bytes, two in each lane. It transposes four such groups, so that each lane has
    one whole: one 16-byte store a lane writes 64 neighbouring bytes of 8 rows a warp.
    """

    dtype: type
    head_dim_v: int
    predicated: bool = False  # no branch around a store: the exchanges of all groups overlap

    def target(self, out: cute.Tensor, layout: cute.ComposedLayout) -> cute.Tensor:
        return out

    def prefetch(self, out: cute.Tensor):
        """There is no descriptor."""

    @cute.jit
    def store(self, out: cute.Tensor, shared: None, acc_o: cute.Tensor, pv_mma: cute.TiledMma, piece: Piece):
        """Write this thread's share of ``out`` (length, head_dim_v, heads, batch); rows and columns past its end are
        not written.
        """
        out = out if const_expr(piece.sequence is None) else piece.sequence.queries_of(out)
        seqlen_q, head_dim_v, _, _ = out.shape
        lane = cute.arch.lane_idx() % QUAD
        groups = self.head_dim_v // GROUP
        # Two columns of one row in each register
        registers = cute.recast_ptr(convert(acc_o, self.dtype).iterator, dtype=Int32)
        pairs = cute.make_tensor(registers, cute.make_layout((ROWS, groups), stride=(1, ROWS)))
        store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
        for index in cutlass.range_constexpr(ROWS):
            row = piece.first_row + 8 * index
            columns = out[row, None, piece.head, piece.batch]
            # How many columns there are from this lane's first one on
            present = cutlass.select_(row < seqlen_q, head_dim_v, Int32(0)) - piece.first_column - GROUP * lane
            own_columns = columns.iterator + (piece.first_column + GROUP * lane)
            for first in cutlass.range_constexpr(0, groups, QUAD):
                # Of the last groups there may be fewer than lanes
                given = [pairs[index, first + group] if first + group < groups else Int32(0) for group in range(QUAD)]
                own = transpose(given, lane)
                whole = cute.make_rmem_tensor(QUAD, Int32)
                for word in cutlass.range_constexpr(QUAD):
                    whole[word] = own[word]
                has_group = Boolean(True) if first + QUAD <= groups else lane < groups - first
                if const_expr(self.predicated):
                    store_words(own_columns + GROUP * first, own, has_group & (GROUP * first < present))
                elif has_group and GROUP * first < present:
                    target = cute.local_tile(columns, (GROUP,), (piece.first_column // GROUP + first + lane,))
                    cute.copy(store, cute.recast_tensor(whole, self.dtype), target)

    def finish(self, in_store_warp: Boolean):
        """A CTA's writes to global memory outlive it."""


def store_words(pointer, words, wanted):
    """The QUAD ``words`` to global memory, where ``wanted``."""
    places = ", ".join(f"{{$r{1 + index}}}" for index in range(QUAD))
    cute.arch.inline_ptx(
        f"st.global.v4.b32 [{{$r0}}], {{{places}}};", read_only_args=[pointer, *words], predicate=wanted
    )


def transpose(words, lane):
    """The QUAD registers of one group, in the order of its columns: lane ``i`` of the quad gets group ``i``.
    ``words``: this lane's registers of QUAD groups.
    """
    words = list(words)
    for distance, swaps in TRANSPOSE:
        upper = (lane & distance) != 0
        for low, high in swaps:
            given = cutlass.select_(upper, words[low], words[high])
            taken = cute.arch.shuffle_sync_bfly(given, offset=distance)
            words[low] = cutlass.select_(upper, taken, words[low])
            words[high] = cutlass.select_(upper, words[high], taken)
    return words

"""The warps of the backward kernel that add dQ to global memory, one a consumer warpgroup.

Sums of floats depend on their order. Where gradients shall be bit-equal (``deterministic``), each piece of dQ takes its
K/V tiles in the order in which CTAs take these (``WorkSchedule.ordered``), so that whoever is waited for runs already;
a counter a piece says whose turn it is. The first one stores, so that nobody has to zero these sums beforehand.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr, pipeline

from .args import BackwardRunTime
from .backward_work import WorkSchedule
from .barriers import BackwardBarrier
from .blocks import Band
from .config import WARP_THREADS, WARPGROUP_THREADS, BackwardConfig
from .phases import Phase, begin
from .schedule import SLOTS, TileQueue
from .workspace import add_or_store_shared, add_shared


@cute.jit
def sums_barrier(barrier: cutlass.Constexpr, warpgroup: Int32, arrive: cutlass.Constexpr[bool]):
    """A consumer warpgroup and its store warp: one side arrives, the other waits for it."""
    threads = WARPGROUP_THREADS + WARP_THREADS
    if cutlass.const_expr(arrive):
        cute.arch.barrier_arrive(barrier_id=int(barrier) + warpgroup, number_of_threads=threads)
    else:
        cute.arch.barrier(barrier_id=int(barrier) + warpgroup, number_of_threads=threads)


@cute.jit
def read_turn(turn: cute.Pointer) -> Int32:
    """One thread: how many tiles have had their turn at a piece, and added to it."""
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[turn]
    )


@cute.jit
def give_turn(turn: cute.Pointer):
    """The same thread, after its tile has been added: let the next one go on."""
    cute.arch.inline_ptx(
        "fence.proxy.async.global; red.release.gpu.global.add.s32 [{$r0}], {$r1};", read_only_args=[turn, Int32(1)]
    )


@dataclass(frozen=True)
class SumStore:
    config: BackwardConfig
    band: Band
    schedule: WorkSchedule

    @cute.jit
    def run(
        self,
        lengths: tuple,
        sums: cute.Tensor,
        turns: cute.Tensor | None,
        s_dq: cute.Tensor,
        queue: TileQueue,
        run: BackwardRunTime,
        warpgroup: Int32,
    ):
        """All steps of all tiles of this CTA: bulk copies add the piece of one consumer warpgroup. turns: (batch,
        heads, blocks, pieces), how many K/V tiles a piece has taken.
        """
        config = self.config
        queue_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        shared = cute.local_tile(s_dq, (config.piece_floats // config.sum_rounds,), (warpgroup,))
        sums_barrier(BackwardBarrier.SUMS_FREE, warpgroup, arrive=True)
        work = self.schedule.receive_work(queue, queue_state)
        while work.n_block >= 0:
            head = work.head
            seqlen_q, seqlen_k = work.lengths(lengths)
            if const_expr(self.band.unseen_tiles):
                lengths_and_bounds = seqlen_q, seqlen_k, run.right, run.left
                blocks = self.band.query_blocks(work.n_block, config.tile_m, *lengths_and_bounds)
                head = self.band.first_head(work, blocks)
            while head < work.last_head:
                work = self.schedule.work_again(queue, queue_state, work)
                seqlen_q, seqlen_k = work.lengths(lengths)
                head_turns = work.lines_of(turns[work.batch, head, None, None]) if const_expr(config.turns) else None
                head_sums = work.lines_of(sums[work.batch, head, None, None])
                self.add_head(head_sums, head_turns, shared, work, head, seqlen_q, seqlen_k, run, warpgroup)
                head += 1
            queue_state = self.schedule.give_back(queue, queue_state)
            begin(Phase.WAIT_TILE)
            work = self.schedule.receive_work(queue, queue_state)
        self.schedule.give_back(queue, queue_state)
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
        begin(Phase.EXIT)

    @cute.jit
    def add_head(
        self,
        sums: cute.Tensor,
        turns: cute.Tensor | None,
        shared: cute.Tensor,
        work: NamedTuple,
        head: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        run: BackwardRunTime,
        warpgroup: Int32,
    ):
        """All steps of one query head."""
        config, n_block = self.config, work.n_block
        blocks = self.band.query_blocks(n_block, config.tile_m, seqlen_q, seqlen_k, run.right, run.left)
        first, *_, end = work.blocks_of(head, blocks)
        for block in cutlass.range(first, end, unroll=1):
            begins = None
            if const_expr(config.turns):
                expected = self.band.turn(n_block, block, config.tile_m, seqlen_q, seqlen_k, run.right)
                self.change_turns(turns, block, expected, block > first, warpgroup)
                begins = expected == 0
            piece = cute.local_tile(sums[block, None], (config.piece_floats,), (warpgroup,))
            self.add_piece(piece, shared, warpgroup, begins)
        if const_expr(config.turns):
            if cute.arch.lane_idx() == 0:
                self.finish_turn(turns, end - 1, warpgroup)

    @cute.jit
    def change_turns(self, turns: cute.Tensor, block: Int32, expected: Int32, follows: Boolean, warpgroup: Int32):
        """Wait until ``expected`` tiles have had their turns at a piece of ``block``; where this ``follows`` another
        block, end the turn there.

        Both are ways to L2 and back: one counter is read while the last sum is on its way, and all that under the
        consumers' work.
        """
        if cute.arch.lane_idx() == 0:
            begin(Phase.WAIT_TURN)
            turn = turns[block, None].iterator + warpgroup
            taken = read_turn(turn)
            if follows:
                self.finish_turn(turns, block - 1, warpgroup)
            while taken != expected:
                taken = read_turn(turn)
            # The counter was read as ordinary memory, the sum is added by the asynchronous proxy: behind it
            cute.arch.inline_ptx("fence.proxy.async.global;")

    @cute.jit
    def finish_turn(self, turns: cute.Tensor, block: Int32, warpgroup: Int32):
        """One thread: end its turn when its sum is complete."""
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        give_turn(turns[block, None].iterator + warpgroup)

    @cute.jit
    def add_piece(self, piece: cute.Tensor, shared: cute.Tensor, warpgroup: Int32, begins: Boolean | None):
        """One step's piece, in as many parts as it is staged. ``begins``: where sums have turns, whether this is the
        first, before which nobody has zeroed the memory.
        """
        for part in cutlass.range_constexpr(self.config.sum_rounds):
            begin(Phase.WAIT_SUMS)
            sums_barrier(BackwardBarrier.SUMS_FULL, warpgroup, arrive=False)
            # The fence between the consumers' writes and the bulk copy stands on this side: there it would cost the
            # consumers' time
            cute.arch.fence_view_async_shared()
            if cute.arch.lane_idx() == 0:
                begin(Phase.ADD_SUMS)
                target = cute.local_tile(piece, (cute.size(shared),), (part,))
                if const_expr(begins is None):
                    add_shared(target, shared)
                else:
                    add_or_store_shared(target, shared, begins)
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            sums_barrier(BackwardBarrier.SUMS_FREE, warpgroup, arrive=True)

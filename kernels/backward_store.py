"""The warps of the backward kernel that add dQ to global memory, one a consumer warpgroup."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline

from .args import BackwardRunTime
from .barriers import BackwardBarrier
from .blocks import Band
from .config import WARPGROUP_THREADS, BackwardConfig
from .phases import Phase, begin
from .schedule import SLOTS, Schedule, TileQueue
from .workspace import add_shared

WARP_THREADS = 32


@cute.jit
def sums_barrier(barrier: cutlass.Constexpr, warpgroup: Int32, arrive: cutlass.Constexpr[bool]):
    """A consumer warpgroup and its store warp: one side arrives, the other waits for it."""
    threads = WARPGROUP_THREADS + WARP_THREADS
    if cutlass.const_expr(arrive):
        cute.arch.barrier_arrive(barrier_id=int(barrier) + warpgroup, number_of_threads=threads)
    else:
        cute.arch.barrier(barrier_id=int(barrier) + warpgroup, number_of_threads=threads)


@dataclass(frozen=True)
class SumStore:
    config: BackwardConfig
    band: Band
    schedule: Schedule

    @cute.jit
    def run(
        self, lengths: tuple, sums: cute.Tensor, s_dq: cute.Tensor, queue: TileQueue, run: BackwardRunTime, warpgroup: Int32
    ):
        """All steps of all tiles of this CTA: a bulk copy adds the piece of one consumer warpgroup."""
        config = self.config
        seqlen_q, seqlen_k, heads, heads_k, batch = lengths
        queue_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        floats = config.piece_floats // config.sum_rounds
        shared = cute.local_tile(s_dq, (floats,), (warpgroup,))
        index, tiles = self.schedule.first(), self.schedule.count(seqlen_k, run.head_parts, batch)
        while index < tiles:
            n_block, part, batch_index = self.schedule.coordinates(index, seqlen_k, run.head_parts, batch, run.section)
            _, head, last_head = run.heads_of(part, heads, heads_k)
            first, _, end = self.band.query_blocks(n_block, config.tile_m, seqlen_q, seqlen_k, run.right)
            while head < last_head:
                for step in cutlass.range(first * config.sum_rounds, end * config.sum_rounds, unroll=1):
                    block, part_index = step // config.sum_rounds, step % config.sum_rounds
                    begin(Phase.WAIT_SUMS)
                    sums_barrier(BackwardBarrier.SUMS_FREE, warpgroup, arrive=True)
                    sums_barrier(BackwardBarrier.SUMS_FULL, warpgroup, arrive=False)
                    begin(Phase.ADD_SUMS)
                    if cute.arch.lane_idx() == 0:
                        piece = warpgroup * config.sum_rounds + part_index
                        add_shared(cute.local_tile(sums[batch_index, head, block, None], (floats,), (piece,)), shared)
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.sync_warp()
                head += 1
            begin(Phase.WAIT_TILE)
            index, queue_state = self.schedule.receive(queue, queue_state, index)
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
        begin(Phase.EXIT)

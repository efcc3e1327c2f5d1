"""The producer warp of the backward kernel: moves K, V, Q, dO and the row statistics to shared memory by TMA."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import const_expr, pipeline

from .args import BackwardRunTime
from .backward_work import WorkSchedule
from .blocks import Band
from .config import BackwardConfig
from .load import head_tiles, load
from .phases import Phase, begin
from .schedule import SLOTS, TileQueue


@dataclass(frozen=True)
class BackwardProducer:
    config: BackwardConfig
    band: Band
    schedule: WorkSchedule
    boxes: type  # WholeBoxes or SequenceBoxes

    @cute.jit
    def run(self, tensors: tuple, lengths: tuple, shared: tuple, pipes: tuple, queue: TileQueue, run: BackwardRunTime):
        """All tiles of this CTA: the first Q, K, the first dO, V, then Q and dO of each step, head by head."""
        config = self.config
        tiled_k, tiled_v, tiled_q, tiled_do, tiled_rows = tensors
        s_k, s_v, s_q, s_do, s_rows = shared
        k_pipe, v_pipe, q_pipe, do_pipe = pipes
        k_boxes, v_boxes, q_boxes, do_boxes = (
            self.boxes(rows, columns)
            for rows in (config.tile_n, config.tile_m)
            for columns in (config.head_dim, config.head_dim_v)
        )
        producer = pipeline.PipelineUserType.Producer
        k_state, v_state = (pipeline.make_pipeline_state(producer, 1) for _ in range(2))
        q_state = pipeline.make_pipeline_state(producer, config.stages)
        do_state = pipeline.make_pipeline_state(producer, config.do_stages)
        queue_state = pipeline.make_pipeline_state(producer, SLOTS)
        begin(Phase.TAKE_TILE)
        work, queue_state = self.schedule.hand_out(queue, queue_state, lengths, run, first=True)
        while work.n_block >= 0:
            n_block, head_k, batch_index, head, last_head = (
                work.n_block, work.head_k, work.batch, work.head, work.last_head
            )  # fmt: skip
            seqlen_q, seqlen_k = work.lengths(lengths)
            offset_q, offset_k = work.offset_q, work.offset_k
            blocks = self.band.query_blocks(n_block, config.tile_m, seqlen_q, seqlen_k, run.right, run.left)
            # Where no query sees any of the tile's keys, K and V are loaded all the same: each tile begins with a wait
            visited = self.band.first_head(work, blocks) < last_head if const_expr(self.band.unseen_tiles) else True
            first, *_, end = work.blocks_of(head, blocks)
            k_tiles, k_stages = k_boxes.of_head(tiled_k, s_k, head_k, batch_index, offset_k)
            v_tiles, v_stages = v_boxes.of_head(tiled_v, s_v, head_k, batch_index, offset_k)
            q_tiles, q_stages = q_boxes.of_head(tiled_q, s_q, head, batch_index, offset_q)
            do_tiles, do_stages = do_boxes.of_head(tiled_do, s_do, head, batch_index, offset_q)
            rows, row_stages = head_tiles(
                tiled_rows, s_rows, (1, config.row_floats), head, batch_index, work.first_line
            )
            if const_expr(config.prefetch_keys):
                cute.prefetch(tiled_k.atom, k_boxes.box(tiled_k, s_k, k_tiles, n_block, seqlen_k))
                cute.prefetch(tiled_v.atom, v_boxes.box(tiled_v, s_v, v_tiles, n_block, seqlen_k))
            q_tile = q_boxes.box(tiled_q, s_q, q_tiles, first, seqlen_q)
            sources, stages = (q_tile, rows[None, first]), (q_stages, row_stages)
            if visited:
                q_state = self.load_queries((tiled_q, tiled_rows), sources, stages, q_pipe, q_state)
            k_tile = k_boxes.box(tiled_k, s_k, k_tiles, n_block, seqlen_k)
            # In the order in which they are needed, or in which the tile before gives back what they take
            if const_expr(not config.early_release):
                k_state = load(Phase.LOAD_K, tiled_k.atom, k_tile, k_stages, k_pipe, k_state)
            if visited:
                do_tile = do_boxes.box(tiled_do, s_do, do_tiles, first, seqlen_q)
                do_state = load(Phase.LOAD_DO, tiled_do.atom, do_tile, do_stages, do_pipe, do_state)
            v_tile = v_boxes.box(tiled_v, s_v, v_tiles, n_block, seqlen_k)
            v_state = load(Phase.LOAD_V, tiled_v.atom, v_tile, v_stages, v_pipe, v_state)
            if const_expr(config.early_release):
                k_state = load(Phase.LOAD_K, tiled_k.atom, k_tile, k_stages, k_pipe, k_state)
            first += 1
            head = self.band.first_head(work, blocks)
            while head < last_head:
                q_tiles, q_stages = q_boxes.of_head(tiled_q, s_q, head, batch_index, offset_q)
                do_tiles, do_stages = do_boxes.of_head(tiled_do, s_do, head, batch_index, offset_q)
                rows, row_stages = head_tiles(
                    tiled_rows, s_rows, (1, config.row_floats), head, batch_index, work.first_line
                )
                for block in cutlass.range(first, end, unroll=1):
                    q_tile = q_boxes.box(tiled_q, s_q, q_tiles, block, seqlen_q)
                    sources, stages = (q_tile, rows[None, block]), (q_stages, row_stages)
                    q_state = self.load_queries((tiled_q, tiled_rows), sources, stages, q_pipe, q_state)
                    do_tile = do_boxes.box(tiled_do, s_do, do_tiles, block, seqlen_q)
                    do_state = load(Phase.LOAD_DO, tiled_do.atom, do_tile, do_stages, do_pipe, do_state)
                head += 1
                first, *_, end = work.blocks_of(head, blocks)
            # Late, so that whoever ends first gets the next tile
            begin(Phase.TAKE_TILE)
            work, queue_state = self.schedule.hand_out(queue, queue_state, lengths, run)
        begin(Phase.TAKE_TILE)
        self.schedule.finish(queue)
        begin(Phase.EXIT)

    @cute.jit
    def load_queries(self, tensors: tuple, sources: tuple, stages: tuple, q_pipe, q_state):
        """One Q tile and its row statistics on one barrier."""
        begin(Phase.WAIT_FREE)
        q_pipe.producer_acquire(q_state)
        begin(Phase.LOAD_Q)
        barrier = q_pipe.producer_get_barrier(q_state)
        for tiled, source, stage in zip(tensors, sources, stages, strict=True):
            cute.copy(tiled.atom, source, stage[None, q_state.index], tma_bar_ptr=barrier)
        q_pipe.producer_commit(q_state)
        q_state.advance()
        return q_state

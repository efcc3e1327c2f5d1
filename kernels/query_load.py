"""The producer warp of the kernel that computes dQ by itself."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import pipeline

from .args import RunTime
from .blocks import Band
from .config import WGMMA_M
from .load import head_tiles, load
from .phases import Phase, begin
from .query_config import QueryConfig
from .schedule import SLOTS, Schedule, TileQueue


@dataclass(frozen=True)
class QueryProducer:
    config: QueryConfig
    band: Band
    schedule: Schedule
    boxes: type  # of K and V: WholeBoxes or SequenceBoxes

    @cute.jit
    def run(self, tensors: tuple, shared: tuple, pipes: tuple, queue: TileQueue, run: RunTime):
        """All tiles of this CTA: Q and dO, a piece a warpgroup, then K and V from the last block to the first."""
        config = self.config
        tiled_q, tiled_do, tiled_k, tiled_v = tensors
        s_q, s_do, s_k, s_v = shared
        q_pipe, k_pipe, v_pipe = pipes
        seqlen_q, _, heads, batch = tiled_q.tensor.shape
        seqlen_k, heads_k = tiled_k.tensor.shape[0], tiled_k.tensor.shape[-2]
        k_boxes, v_boxes = (self.boxes(config.tile_n, columns) for columns in (config.head_dim, config.head_dim_v))
        producer = pipeline.PipelineUserType.Producer
        q_state = pipeline.make_pipeline_state(producer, config.consumer_warpgroups)
        k_state = pipeline.make_pipeline_state(producer, config.stages)
        v_state = pipeline.make_pipeline_state(producer, config.value_stages)
        queue_state = pipeline.make_pipeline_state(producer, SLOTS)
        lengths = seqlen_q, seqlen_k, heads, batch
        tile, tiles, queue_state = self.schedule.begin(queue, queue_state, lengths, run)
        while self.schedule.exists(tile, tiles):
            begin(Phase.TAKE_TILE)
            m_block, head, batch_index, sequence, _ = self.schedule.place(tile, lengths, run)
            first_query = m_block * config.tile_m
            origin = self.band.origin(first_query, *sequence[:2], run.left)
            end = self.band.blocks(first_query, config.tile_m, *sequence[:2], run.right, run.left, origin).end
            head_k = head // (heads // heads_k)
            q_box, do_box = (WGMMA_M, config.head_dim), (WGMMA_M, config.head_dim_v)
            q_tiles, q_stages = head_tiles(tiled_q, s_q, q_box, head, batch_index, sequence.query_row(0))
            do_tiles, do_stages = head_tiles(tiled_do, s_do, do_box, head, batch_index, sequence.query_row(0))
            first_key, keys = sequence.key_row(origin), sequence.seqlen_k - origin
            k_tiles, k_stages = k_boxes.of_head(tiled_k, s_k, head_k, batch_index, first_key)
            v_tiles, v_stages = v_boxes.of_head(tiled_v, s_v, head_k, batch_index, first_key)
            # Also for a tile that sees no key: the turn of Q's buffer stays the same for all. Not unrolled where
            # sequences are packed: their places need this warp's few registers
            pieces = config.consumer_warpgroups
            for piece in cutlass.range(pieces, unroll=1 if self.band.packed else pieces):
                index_of_piece = m_block * config.consumer_warpgroups + piece
                begin(Phase.WAIT_FREE)
                q_pipe.producer_acquire(q_state)
                begin(Phase.LOAD_Q)
                barrier = q_pipe.producer_get_barrier(q_state)
                cute.copy(
                    tiled_q.atom, q_tiles[None, index_of_piece], q_stages[None, q_state.index], tma_bar_ptr=barrier
                )
                cute.copy(
                    tiled_do.atom, do_tiles[None, index_of_piece], do_stages[None, q_state.index], tma_bar_ptr=barrier
                )
                q_pipe.producer_commit(q_state)
                q_state.advance()
            for block in cutlass.range(end - 1, -1, -1, unroll=1):
                k_tile = k_boxes.box(tiled_k, s_k, k_tiles, block, keys)
                k_state = load(Phase.LOAD_K, tiled_k.atom, k_tile, k_stages, k_pipe, k_state)
                v_tile = v_boxes.box(tiled_v, s_v, v_tiles, block, keys)
                v_state = load(Phase.LOAD_V, tiled_v.atom, v_tile, v_stages, v_pipe, v_state)
            # Late, so that whoever ends first gets the longest tile left
            begin(Phase.TAKE_TILE)
            tile, queue_state = self.schedule.fetch(queue, queue_state, tile, lengths, run)
        begin(Phase.TAKE_TILE)
        self.schedule.finish(queue)
        begin(Phase.EXIT)

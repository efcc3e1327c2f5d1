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

    @cute.jit
    def run(self, tensors: tuple, shared: tuple, pipes: tuple, queue: TileQueue, run: RunTime):
        """All tiles of this CTA: Q and dO, a piece a warpgroup, then K and V from the last block to the first."""
        config = self.config
        tiled_q, tiled_do, tiled_k, tiled_v = tensors
        s_q, s_do, s_k, s_v = shared
        q_pipe, k_pipe, v_pipe = pipes
        seqlen_q, _, heads, batch = tiled_q.tensor.shape
        seqlen_k, _, heads_k, _ = tiled_k.tensor.shape
        producer = pipeline.PipelineUserType.Producer
        q_state = pipeline.make_pipeline_state(producer, config.consumer_warpgroups)
        k_state = pipeline.make_pipeline_state(producer, config.stages)
        v_state = pipeline.make_pipeline_state(producer, config.value_stages)
        queue_state = pipeline.make_pipeline_state(producer, SLOTS)
        index, tiles = self.schedule.first(), self.schedule.count(seqlen_q, heads, batch)
        while index < tiles:
            begin(Phase.TAKE_TILE)
            m_block, head, batch_index = self.schedule.coordinates(index, seqlen_q, heads, batch, run.section)
            first_query = m_block * config.tile_m
            origin = self.band.origin(first_query, seqlen_q, seqlen_k, run.left)
            place = seqlen_q, seqlen_k, run.right, run.left, origin
            end = self.band.blocks(first_query, config.tile_m, *place).end
            head_k = head // (heads // heads_k)
            q_tiles, q_stages = head_tiles(tiled_q, s_q, (WGMMA_M, config.head_dim), head, batch_index)
            do_tiles, do_stages = head_tiles(tiled_do, s_do, (WGMMA_M, config.head_dim_v), head, batch_index)
            place = head_k, batch_index, origin
            k_tiles, k_stages = head_tiles(tiled_k, s_k, (config.tile_n, config.head_dim), *place)
            v_tiles, v_stages = head_tiles(tiled_v, s_v, (config.tile_n, config.head_dim_v), *place)
            # Also for a tile that sees no key: the turn of Q's buffer stays the same for all
            for piece in cutlass.range_constexpr(config.consumer_warpgroups):
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
                k_state = load(Phase.LOAD_K, tiled_k.atom, k_tiles[None, block], k_stages, k_pipe, k_state)
                v_state = load(Phase.LOAD_V, tiled_v.atom, v_tiles[None, block], v_stages, v_pipe, v_state)
            # Late, so that whoever ends first gets the longest tile left
            begin(Phase.TAKE_TILE)
            index, queue_state = self.schedule.fetch(queue, queue_state, index)
        begin(Phase.TAKE_TILE)
        self.schedule.finish(queue)
        begin(Phase.EXIT)

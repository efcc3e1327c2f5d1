"""The producer warp: moves Q, K and V tiles to shared memory by TMA."""

from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline

from .args import RunTime, TiledTensor, partition
from .blocks import Band
from .config import WGMMA_M, ForwardConfig
from .cut_rows import CutRows
from .kv_source import DenseValues
from .phases import Phase, begin
from .schedule import SLOTS, Schedule, TileQueue


def tma_pipe(barriers, stages, consumer_warps, tile_bytes):
    """Full and empty barriers of tiles that one thread loads and ``consumer_warps`` warps give back."""
    group = partial(pipeline.CooperativeGroup, pipeline.Agent.Thread)
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=stages,
        producer_group=group(1),
        consumer_group=group(consumer_warps),
        tx_count=tile_bytes,
        defer_sync=True,
    )


@cute.jit
def head_tiles(tiled: TiledTensor, shared: cute.Tensor, box: cutlass.Constexpr, head: Int32, batch: Int32, origin=0):
    """``(tiles, stages)`` of one head: a global tensor (length, head_dim, heads, batch) cut into boxes from row
    ``origin`` on, and their stages.
    """
    rows = cute.domain_offset((origin, 0), tiled.tensor[None, None, head, batch])
    tiles = cute.local_tile(rows, box, (None, 0))
    stages, tiles = partition(tiled, shared, tiles)
    return tiles, stages


@dataclass(frozen=True)
class WholeBoxes:
    """Boxes of a tensor in which a head's rows are all its own."""

    rows: int
    columns: int

    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        """(length, columns, heads, batch) as TMA shall see it."""
        return tensor

    def of_head(self, tiled: TiledTensor, shared: cute.Tensor, head: Int32, batch: Int32, origin=0):
        """``(tiles, stages)``: what box() takes, of boxes from row ``origin`` on, and their stages in ``shared``."""
        return head_tiles(tiled, shared, (self.rows, self.columns), head, batch, origin)

    def box(self, tiled: TiledTensor, shared: cute.Tensor, tiles: cute.Tensor, block: Int32, length: Int32):
        """One of them, the source of a copy."""
        return tiles[None, block]


@dataclass(frozen=True)
class SequenceBoxes:
    """The same of a tensor with several sequences: a box ends where its sequence does. What follows may hold NaN."""

    rows: int
    columns: int

    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        return CutRows(self.rows, self.columns).view(tensor)

    @cute.jit
    def of_head(self, tiled: TiledTensor, shared: cute.Tensor, head: Int32, batch: Int32, origin: Int32):
        tiles = cute.domain_offset((0, 0, origin), tiled.tensor[None, None, None, head, batch])
        stages, _ = partition(tiled, shared, cute.local_tile(tiles[None, None, 0], (self.rows, self.columns), (0, 0)))
        return tiles, stages

    @cute.jit
    def box(self, tiled: TiledTensor, shared: cute.Tensor, tiles: cute.Tensor, block: Int32, length: Int32):
        """``length``: from the origin to the sequence's end, which lies behind the box's first row."""
        first = block * self.rows
        valid = cutlass.min(length - first, self.rows)
        _, source = partition(tiled, shared, CutRows(self.rows, self.columns).box(tiles, first, valid))
        return source


@cute.jit
def load(phase: cutlass.Constexpr, atom: cute.CopyAtom, source: cute.Tensor, stages: cute.Tensor, pipe, state):
    """Wait until the stage is free, start the copy of one tile, and advance the state."""
    begin(Phase.WAIT_FREE)
    pipe.producer_acquire(state)
    begin(phase)
    cute.copy(atom, source, stages[None, state.index], tma_bar_ptr=pipe.producer_get_barrier(state))
    pipe.producer_commit(state)
    state.advance()
    return state


@dataclass(frozen=True)
class Producer:
    config: ForwardConfig
    band: Band
    values: DenseValues
    schedule: Schedule

    @cute.jit
    def run(self, tensors: tuple, shared: tuple, pipes: tuple, queue: TileQueue, run: RunTime):
        """All tiles of this CTA: K of the last block, Q, then K one block ahead of V, from the last block to the
        first, or as DiagonalFirst says.
        """
        config = self.config
        tiled_q, tiled_k, tiled_v = tensors
        s_q, s_k, s_v = shared
        q_pipe, k_pipe, v_pipe = pipes
        seqlen_q, _, heads, batch = tiled_q.tensor.shape
        seqlen_k, _, heads_k, _ = tiled_k.tensor.shape
        producer = pipeline.PipelineUserType.Producer
        q_state = pipeline.make_pipeline_state(producer, config.consumer_warpgroups)
        k_state = pipeline.make_pipeline_state(producer, config.stages)
        v_state = pipeline.make_pipeline_state(producer, config.stages)
        queue_state = pipeline.make_pipeline_state(producer, SLOTS)
        lengths = seqlen_q, seqlen_k, heads, batch
        tile, tiles, queue_state = self.schedule.begin(queue, queue_state, lengths, run)
        while self.schedule.exists(tile, tiles):
            begin(Phase.TAKE_TILE)
            m_block, head, batch_index, sequence, _ = self.schedule.place(tile, lengths, run)
            first_query = m_block * config.tile_m
            origin = self.band.origin(first_query, *sequence[:2], run.left)
            *_, end, keys = self.band.blocks(first_query, config.tile_m, *sequence[:2], run.right, run.left, origin)
            first_key = sequence.key_row(origin)
            head_k = head // (heads // heads_k)
            q_box, k_box = (WGMMA_M, config.head_dim), (config.tile_n, config.head_dim)
            q_tiles, q_stages = head_tiles(tiled_q, s_q, q_box, head, batch_index, sequence.query_row(0))
            k_tiles, k_stages = head_tiles(tiled_k, s_k, k_box, head_k, batch_index, first_key)
            order = None
            if const_expr(config.from_diagonal):
                order = self.band.diagonal_first(first_query, config.tile_m, first_query, *sequence[:2], end)
            if end > 0:
                last = order.block(Int32(0)) if const_expr(config.from_diagonal) else end - 1
                k_state = load(Phase.LOAD_K, tiled_k.atom, k_tiles[None, last], k_stages, k_pipe, k_state)
            # Also for a tile that sees no key: the turn of Q's buffer stays the same for all
            for piece in cutlass.range_constexpr(config.consumer_warpgroups):
                q_tile = q_tiles[None, m_block * config.consumer_warpgroups + piece]
                q_state = load(Phase.LOAD_Q, tiled_q.atom, q_tile, q_stages, q_pipe, q_state)
            for block in cutlass.range(end - 1, 0, -1, unroll=1):
                after = block - 1
                if const_expr(config.from_diagonal):
                    block, after = order.block(end - 1 - block), order.block(end - block)
                k_state = load(Phase.LOAD_K, tiled_k.atom, k_tiles[None, after], k_stages, k_pipe, k_state)
                v_tile, v_stages = self.values.tile(tiled_v, s_v, block, first_key, keys, head_k, batch_index)
                v_state = load(Phase.LOAD_V, tiled_v.atom, v_tile, v_stages, v_pipe, v_state)
            # Two blocks before the consumers are done: late enough that whoever ends first gets the longest tile left,
            # early enough for the way to the counter and back
            begin(Phase.TAKE_TILE)
            tile, queue_state = self.schedule.fetch(queue, queue_state, tile, lengths, run)
            if end > 0:
                last = order.block(end - 1) if const_expr(config.from_diagonal) else Int32(0)
                v_tile, v_stages = self.values.tile(tiled_v, s_v, last, first_key, keys, head_k, batch_index)
                v_state = load(Phase.LOAD_V, tiled_v.atom, v_tile, v_stages, v_pipe, v_state)
        begin(Phase.TAKE_TILE)
        self.schedule.finish(queue)
        begin(Phase.EXIT)

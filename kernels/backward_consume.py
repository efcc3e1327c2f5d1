"""The consumer warpgroups of the backward kernel: S and dP again, dV, dK and dQ."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup as wgmma

from .args import BackwardRunTime
from .backward_products import BackwardProducts, issue, make_backward_products, transposed
from .barriers import Barrier
from .blocks import Band
from .config import WARPGROUP_THREADS, WARPS_PER_WARPGROUP, WGMMA_M, BackwardConfig
from .output import DirectOutput, Piece
from .phases import Phase, begin
from .products import convert, new_accumulator, new_left_operand, rows_and_columns, store_copy
from .schedule import SLOTS, Schedule, TileQueue
from .softmax import QUAD, ROWS
from .workspace import add_piece


class Tile(NamedTuple):
    """What one thread carries through the steps of a K/V tile."""

    dk: cute.Tensor
    dv: cute.Tensor
    first_queries: cute.Tensor  # first query that sees each of the thread's keys


@dataclass(frozen=True)
class BackwardConsumer:
    config: BackwardConfig
    dtype: type
    band: Band
    schedule: Schedule

    @cute.jit
    def run(
        self,
        tensors: tuple,
        dq: cute.Tensor,
        outputs: tuple,
        shared: tuple,
        pipes: tuple,
        queue: TileQueue,
        run: BackwardRunTime,
    ):
        """All tiles of this CTA; one warpgroup's 64 keys of each. ``shared``: K, V, Q, dO, the row statistics and dS."""
        config = self.config
        tiled_k, _, tiled_q, _ = tensors
        s_k, s_v, s_q, s_do, s_rows, s_ds = shared
        k_pipe, v_pipe, q_pipe, do_pipe = pipes
        seqlen_q, _, heads, batch = tiled_q.tensor.shape
        seqlen_k, _, heads_k, _ = tiled_k.tensor.shape
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = warp // WARPS_PER_WARPGROUP - 1
        warpgroup = cutlass.min(cutlass.max(warpgroup, 0), 1)
        products = make_backward_products(config, self.dtype, (s_k, s_v, s_q, s_do, s_ds), warpgroup)
        consumer = pipeline.PipelineUserType.Consumer
        k_state, v_state = (pipeline.make_pipeline_state(consumer, 1) for _ in range(2))
        q_state, do_state = (pipeline.make_pipeline_state(consumer, config.stages) for _ in range(2))
        queue_state = pipeline.make_pipeline_state(consumer, SLOTS)
        first_key = warpgroup * WGMMA_M + thread // QUAD // 8 * 16 + thread // QUAD % 8
        index, tiles = self.schedule.first(), self.schedule.count(seqlen_k, run.head_parts, batch)
        while index < tiles:
            n_block, part, batch_index = self.schedule.coordinates(index, seqlen_k, run.head_parts, batch, run.section)
            head_k, head, last_head = run.heads_of(part, heads, heads_k)
            first, unmasked, end = self.band.query_blocks(n_block, config.tile_m, seqlen_q, seqlen_k, run.right)
            tile = self.start(products, n_block * config.tile_n + first_key, seqlen_q, seqlen_k, run)
            k_pipe.consumer_wait(k_state)
            v_pipe.consumer_wait(v_state)
            while head < last_head:
                dq_head = dq[batch_index, head, None, None]
                q_state, do_state = self.head(products, pipes, q_state, do_state, tile, s_rows, s_ds, dq_head, warpgroup, first, unmasked, end, run)
                head += 1
            k_pipe.consumer_release(k_state)
            v_pipe.consumer_release(v_state)
            k_state.advance()
            v_state.advance()
            # dK and dV leave
            begin(Phase.EPILOGUE)
            for element in cutlass.range(cute.size(tile.dk), unroll_full=True):
                tile.dk[element] = tile.dk[element] * run.scale
            first_row = n_block * config.tile_n + first_key
            piece = Piece(n_block, head_k, batch_index, warpgroup, thread, False, first_row)
            out_dk, out_dv = outputs
            DirectOutput(self.dtype, config.head_dim).store(out_dk, None, tile.dk, None, piece)
            DirectOutput(self.dtype, config.head_dim_v).store(out_dv, None, tile.dv, None, piece)
            begin(Phase.WAIT_TILE)
            index, queue_state = self.schedule.receive(queue, queue_state, index)
        begin(Phase.EXIT)

    @cute.jit
    def start(self, products: BackwardProducts, first_key: Int32, seqlen_q: Int32, seqlen_k: Int32, run) -> Tile:
        config = self.config
        dk = new_accumulator(products.dk_add, (WGMMA_M, config.head_dim))
        dv = new_accumulator(products.dv_add, (WGMMA_M, config.head_dim_v))
        dk.fill(0.0)
        dv.fill(0.0)
        first_queries = cute.make_rmem_tensor(ROWS, Int32)
        for row in cutlass.range_constexpr(ROWS):
            first_queries[row] = self.band.first_query(first_key + 8 * row, seqlen_q, seqlen_k, run.right)
        return Tile(dk, dv, first_queries)

    @cute.jit
    def head(self, products, pipes, q_state, do_state, tile: Tile, s_rows, s_ds, dq: cute.Tensor, warpgroup: Int32, first: Int32, unmasked: Int32, end: Int32, run):
        """All steps of one query head."""
        _, _, q_pipe, do_pipe = pipes
        p = self.new_operand(products)
        q_pipe.consumer_wait(q_state)
        scores = self.issue_scores(products, q_state)
        wgmma.wait_group(0)
        self.probabilities(tile, scores, p, s_rows[None, q_state.index], first, run, masked=True)
        do_pipe.consumer_wait(do_state)
        buffer = Int32(0)
        for block in cutlass.range(first + 1, unmasked, unroll=1):
            q_state, do_state = self.step(products, pipes, q_state, do_state, tile, p, s_rows, s_ds, dq, warpgroup, block, buffer, run, masked=True)
            buffer ^= 1
        for block in cutlass.range(cutlass.max(first + 1, unmasked), end, unroll=1):
            q_state, do_state = self.step(products, pipes, q_state, do_state, tile, p, s_rows, s_ds, dq, warpgroup, block, buffer, run, masked=False)
            buffer ^= 1
        # Last step: nothing follows
        self.key_products(products, q_state, do_state, tile, p, s_rows[None, q_state.index], s_ds, warpgroup, buffer)
        self.meet()
        dq_sums = self.issue_dq(products, buffer)
        wgmma.wait_group(0)
        q_pipe.consumer_release(q_state)
        do_pipe.consumer_release(do_state)
        q_state.advance()
        do_state.advance()
        add_piece(dq[end - 1, None], dq_sums, warpgroup)
        return q_state, do_state

    @cute.jit
    def step(self, products, pipes, q_state, do_state, tile: Tile, p, s_rows, s_ds, dq, warpgroup, block, buffer, run, masked: cutlass.Constexpr[bool]):
        """dV, dK and dQ of the block before ``block``; scores and P of ``block``."""
        _, _, q_pipe, do_pipe = pipes
        self.key_products(products, q_state, do_state, tile, p, s_rows[None, q_state.index], s_ds, warpgroup, buffer)
        q_next = q_state.clone()
        q_next.advance()
        q_pipe.consumer_wait(q_next)
        scores = self.issue_scores(products, q_next)
        wgmma.wait_group(2)
        do_pipe.consumer_release(do_state)
        self.meet()
        wgmma.wait_group(1)
        q_pipe.consumer_release(q_state)
        dq_sums = self.issue_dq(products, buffer)
        wgmma.wait_group(1)
        self.probabilities(tile, scores, p, s_rows[None, q_next.index], block, run, masked=masked)
        # The wait on a barrier is a branch, which holds the wait for dQ behind the exponentials
        do_state.advance()
        do_pipe.consumer_wait(do_state)
        wgmma.wait_group(0)
        add_piece(dq[block - 1, None], dq_sums, warpgroup)
        return q_next, do_state

    def new_operand(self, products):
        return new_left_operand(new_accumulator(products.scores_first, (WGMMA_M, self.config.tile_m)), self.dtype)

    @cute.jit
    def issue_scores(self, products, q_state):
        scores = new_accumulator(products.scores_first, (WGMMA_M, self.config.tile_m))
        wgmma.fence()
        issue(products.scores_first, products.scores_add, scores, products.k, products.q[None, None, None, q_state.index])
        return scores

    @cute.jit
    def issue_dq(self, products, buffer):
        dq_sums = new_accumulator(products.dq_first, (WGMMA_M, self.config.dq_columns))
        wgmma.fence()
        issue(products.dq_first, products.dq_add, dq_sums, products.ds[None, None, None, buffer], products.k_transposed)
        return dq_sums

    @cute.jit
    def key_products(self, products, q_state, do_state, tile: Tile, p, rows, s_ds, warpgroup, buffer):
        """dV += Pᵀ dO; dS to shared memory; dK += dSᵀ Q, in flight on return."""
        dp = new_accumulator(products.scores_first, (WGMMA_M, self.config.tile_m))
        wgmma.fence()
        issue(products.scores_first, products.scores_add, dp, products.v, products.do[None, None, None, do_state.index])
        issue(products.dv_add, products.dv_add, tile.dv, p, products.do_transposed[None, None, None, do_state.index])
        wgmma.wait_group(1)
        self.score_gradients(p, dp, rows)
        ds_operand = self.new_operand(products)
        convert(dp, self.dtype, target=ds_operand)
        keys = cute.local_tile(transposed(s_ds)[None, None, buffer], (WGMMA_M, self.config.tile_m), (warpgroup, 0))
        copy = store_copy(products.scores_first, self.dtype, cute.arch.thread_idx()[0] % WARPGROUP_THREADS)
        converted = cute.make_tensor(ds_operand.iterator, dp.layout)
        cute.copy(copy, copy.retile(converted), copy.partition_D(keys))
        wgmma.fence()
        issue(products.dk_add, products.dk_add, tile.dk, ds_operand, products.q_transposed[None, None, None, q_state.index])

    @cute.jit
    def meet(self):
        """All consumer warpgroups have written their keys of dS."""
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=int(Barrier.SCORES), number_of_threads=WARPGROUP_THREADS * self.config.consumer_warpgroups)

    @cute.jit
    def probabilities(self, tile: Tile, accumulator, p_operand, rows: cute.Tensor, block: Int32, run, masked: cutlass.Constexpr[bool]):
        """Pᵀ = exp2(Sᵀ scale - LSE) in place."""
        scores = rows_and_columns(accumulator)
        quad = cute.arch.lane_idx() % QUAD
        limits = cute.make_rmem_tensor(ROWS, Int32)
        for row in cutlass.range_constexpr(ROWS):
            limits[row] = tile.first_queries[row] - block * self.config.tile_m - 2 * quad
        for group in cutlass.range_constexpr(self.config.tile_m // 16):
            lse = row_statistics(rows, 16 * group + 4 * quad)
            for element in cutlass.range_constexpr(4):
                column = 4 * group + element
                for row in cutlass.range_constexpr(ROWS):
                    exponent = scores[row, column] * run.scale_log2 - lse[element]
                    if const_expr(masked):
                        visible = Int32(8 * (column // 2) + column % 2) >= limits[row]
                        exponent = cutlass.select_(visible, exponent, Float32(-float("inf")))
                    scores[row, column] = cute.math.exp2(exponent, fastmath=True)
        convert(accumulator, self.dtype, target=p_operand)

    @cute.jit
    def score_gradients(self, p_operand, accumulator, rows: cute.Tensor):
        """dSᵀ = Pᵀ (dPᵀ - delta) in place of dPᵀ."""
        p = rows_and_columns(cute.make_tensor(p_operand.iterator, accumulator.layout))
        dp = rows_and_columns(accumulator)
        quad = cute.arch.lane_idx() % QUAD
        for group in cutlass.range_constexpr(self.config.tile_m // 16):
            delta = row_statistics(rows, self.config.tile_m + 16 * group + 4 * quad)
            for element in cutlass.range_constexpr(4):
                column = 4 * group + element
                for row in cutlass.range_constexpr(ROWS):
                    dp[row, column] = p[row, column].to(Float32) * (dp[row, column] - delta[element])


@cute.jit
def row_statistics(rows: cute.Tensor, first: Int32):
    """Four values that a thread needs, which lie side by side: backward_edges.py says in which order."""
    values = cute.make_rmem_tensor(4, Float32)
    source = cute.make_tensor((rows.iterator + first).align(16), cute.make_layout(4))
    cute.autovec_copy(source, values)
    return values

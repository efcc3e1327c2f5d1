"""The consumer warpgroups of the forward kernel: S = Q Kᵀ, online softmax, O += P V."""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup as wgmma

from .args import RunTime
from .barriers import Turns
from .block_softmax import FusedSoftmax, InPlaceSoftmax, Rows
from .blocks import LEFT, NO_SIDE, Band, DiagonalFirst, KeyBlocks, Sides
from .config import WARPGROUP_THREADS, WARPS_PER_WARPGROUP, WGMMA_M, ForwardConfig
from .epilogue import normalise, store_lse
from .output import DirectOutput, Piece, StagedOutput
from .phases import Phase, begin
from .probabilities import RegisterP, SharedP
from .products import (
    Products,
    issue_output,
    issue_scores,
    make_products,
    new_accumulator,
    rows_and_columns,
)
from .registers import kept
from .schedule import SLOTS, Place, Schedule, TileQueue
from .score import Pairs, ScoreHook
from .sequence import rows_of
from .softmax import QUAD, ROWS, Softmax


@dataclass(frozen=True)
class Consumer:
    config: ForwardConfig
    dtype: type
    band: Band
    schedule: Schedule
    turns: Turns
    softmax: Softmax
    probabilities: RegisterP | SharedP
    output: StagedOutput | DirectOutput
    hook: ScoreHook
    in_place: InPlaceSoftmax
    fused: FusedSoftmax

    @cute.jit
    def run(
        self,
        tensors: tuple,
        shared: tuple,
        out,
        shared_output,
        lse: cute.Tensor,
        pipes: tuple,
        queue: TileQueue,
        run: RunTime,
    ):
        """All tiles of this CTA; one warpgroup's 64 rows of each. ``shared``: Q, K, V of the CTA and this warpgroup's
        P, or None; ``out``: what ``self.output`` made of it; ``shared_output``: this warpgroup's shared memory for O,
        or None.
        """
        config = self.config
        tiled_q, tiled_k, _ = tensors
        q_pipe, _, v_pipe = pipes
        seqlen_q, _, heads, batch = tiled_q.tensor.shape
        seqlen_k = tiled_k.tensor.shape[0]
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = warp // WARPS_PER_WARPGROUP - 1
        if const_expr(config.consumer_warpgroups == 2):
            # Changes nothing, but tells the compiler the range: 20 to 50 instructions less for Q's descriptors in the
            # loop. With three warpgroups it costs a few.
            warpgroup = cutlass.min(cutlass.max(warpgroup, 0), 1)
        is_store_warp = warp % WARPS_PER_WARPGROUP == 0
        s_q, s_k, s_v, s_p = shared
        products = make_products(config, self.dtype, (s_q, s_k, s_v), self.probabilities.source, warpgroup)
        consumer = pipeline.PipelineUserType.Consumer
        k_state = pipeline.make_pipeline_state(consumer, config.stages)
        v_state = pipeline.make_pipeline_state(consumer, config.stages)
        queue_state = pipeline.make_pipeline_state(consumer, SLOTS)
        q_state = pipeline.PipelineState(config.consumer_warpgroups, Int32(0), warpgroup, Int32(0))
        self.turns.open(warpgroup)
        lengths = seqlen_q, seqlen_k, heads, batch
        tile, tiles = self.schedule.begin_receiving(queue, queue_state, lengths)
        while self.schedule.exists(tile, tiles):
            place = self.schedule.place(tile, lengths, run)
            first_query = place.block * config.tile_m
            origin = self.band.origin(first_query, *place.sequence[:2], run.left)
            bounds = *place.sequence[:2], run.right, run.left, origin
            tile_end = self.band.blocks(first_query, config.tile_m, *bounds).end
            tile_query = first_query
            first_query += warpgroup * WGMMA_M
            order = None
            if const_expr(config.from_diagonal):
                of_sequence = *place.sequence[:2], tile_end
                order = self.band.diagonal_first(tile_query, config.tile_m, first_query, *of_sequence)
            own = self.band.blocks(first_query, WGMMA_M, *bounds)
            first, *_, end, _ = own
            first_row = first_query + thread // QUAD // 8 * 16 + thread // QUAD % 8
            begin(Phase.WAIT_Q)
            slope = self.hook.slope(run, place.batch_entry, place.head)
            pairs = Pairs(place.batch_entry, place.head, first_row, origin) if self.hook.of_pairs else None
            rows = self.start_rows(products, s_p, first_row, *place.sequence[:2], run, origin, slope, pairs)
            for _ in cutlass.range(tile_end - end, unroll=1):
                k_state, v_state = self.skip(pipes, k_state, v_state, warpgroup)
            # Main loop
            q_pipe.consumer_wait(q_state)
            if end > 0:
                k_state, v_state = self.tile(
                    products, pipes, k_state, v_state, rows, warpgroup, is_store_warp, own, order, run
                )
            q_pipe.consumer_release(q_state)
            if end > 0:
                v_state = self.last_output(products, v_pipe, v_state, rows, warpgroup)
            if const_expr(self.band.left_bound):
                # Before the epilogue: the other warpgroups' next blocks wait for these
                for _ in cutlass.range(first, unroll=1):
                    k_state, v_state = self.skip(pipes, k_state, v_state, warpgroup)
            # O and LSE leave
            begin(Phase.EPILOGUE)
            sink = self.sink_of(queue, queue_state, place, run) if config.sink else None
            constant = self.hook.constant(run.scale_log2)
            inverse, row_lse = self.softmax.finish(rows.shift, rows.sum, sink, constant)
            hidden_rows = self.softmax.blind_rows
            normalise(rows_and_columns(rows.acc_o), inverse, row_lse, rows.keys, self.band, sink, hidden_rows)
            m_block, head, batch_index, sequence, _ = self.schedule.place_again(queue, queue_state, place)
            own_lse = rows_of(lse, sequence.offset_q, sequence.seqlen_q, mode=2)
            store_lse(own_lse, row_lse, first_row, head, batch_index)
            piece_index = m_block * config.consumer_warpgroups + warpgroup
            piece = Piece(piece_index, head, batch_index, warpgroup, thread, is_store_warp, first_row, 0, sequence)
            self.output.store(out, shared_output, rows.acc_o, products.pv_add, piece)
            # Q has one stage a warpgroup: the next tile finds the same stage in the other phase
            q_state = pipeline.PipelineState(config.consumer_warpgroups, Int32(0), warpgroup, q_state.phase ^ 1)
            begin(Phase.WAIT_TILE)
            tile, queue_state = self.schedule.receive(queue, queue_state, tile)
        self.schedule.end_receiving(queue, queue_state)
        begin(Phase.EPILOGUE)
        self.turns.close(warpgroup)
        self.output.finish(is_store_warp)
        begin(Phase.EXIT)

    def sink_of(self, queue: TileQueue, queue_state, place: Place, run: RunTime) -> Float32:
        """The sink of a tile's head. Rows of no sequence have none."""
        place = self.schedule.place_again(queue, queue_state, place)
        sink = run.sink[place.head]
        if not self.config.packed:
            return sink
        return cutlass.select_(place.sequence.seqlen_k < 0, Float32(-math.inf), sink)

    @cute.jit
    def tile(
        self,
        products: Products,
        pipes: tuple,
        k_state,
        v_state,
        rows: Rows,
        warpgroup: Int32,
        is_store_warp: Boolean,
        own: KeyBlocks,
        order: DiagonalFirst | None,
        run: RunTime,
    ):
        """A warpgroup's ``own`` blocks, from the last to the first or in ``order``; P V of the last one visited is yet
        to come.
        """
        _, inner, full, end, _ = own
        _, k_pipe, _ = pipes
        masked, block = self.band.end_is_masked(inner, full, end), end - 1
        if const_expr(order is not None):
            masked, block = full <= order.pivot, order.pivot
        k_state = self.first_block(products, k_pipe, k_state, rows, warpgroup, is_store_warp, masked, block, run)
        if const_expr(order is not None):
            for behind in cutlass.range(2, unroll=1):
                blocks = order.side(behind, own)
                # Else all of the order is computed again in each step: 18 of 492 instructions at head_dim 128
                inner, full, end = map(cute.arch.make_warp_uniform, (blocks.inner, blocks.full, blocks.end))
                blocks = blocks._replace(inner=inner, full=full, end=end)
                k_state, v_state = self.other_blocks(products, pipes, k_state, v_state, rows, warpgroup, blocks, run)
        else:
            k_state, v_state = self.other_blocks(products, pipes, k_state, v_state, rows, warpgroup, own, run)
        return k_state, v_state

    @cute.jit
    def other_blocks(
        self, products: Products, pipes: tuple, k_state, v_state, rows: Rows, warpgroup: Int32, own: KeyBlocks, run
    ):
        """All of these blocks but the last one, which has been the first."""
        first, inner, full, end, _ = own
        full = cutlass.min(full, end - 1)
        for block in cutlass.range(end - 2, full - 1, -1, unroll=1):
            k_state, v_state = self.block(
                products, pipes, k_state, v_state, rows, warpgroup, run, block, self.band.sides
            )
        inner = cutlass.min(inner, full)
        for block in cutlass.range(full - 1, inner - 1, -1, unroll=1):
            k_state, v_state = self.block(products, pipes, k_state, v_state, rows, warpgroup, run, block, NO_SIDE)
        if const_expr(self.band.left_bound):
            for block in cutlass.range(inner - 1, first - 1, -1, unroll=1):
                k_state, v_state = self.block(products, pipes, k_state, v_state, rows, warpgroup, run, block, LEFT)
        return k_state, v_state

    @cute.jit
    def skip(self, pipes: tuple, k_state, v_state, warpgroup: Int32):
        """Let a block pass that other warpgroups of the CTA need and this one does not: give back its K and V, and the
        turn.
        """
        _, k_pipe, v_pipe = pipes
        self.turns.wait(warpgroup)
        self.turns.give(warpgroup)
        k_pipe.consumer_wait(k_state)
        k_pipe.consumer_release(k_state)
        v_pipe.consumer_wait(v_state)
        v_pipe.consumer_release(v_state)
        k_state.advance()
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def start_rows(
        self,
        products: Products,
        s_p,
        first_row: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        run: RunTime,
        origin: Int32,
        slope: Float32 | None,
        pairs: Pairs | None,
    ) -> Rows:
        """Fresh registers for a tile: O = 0, no key seen."""
        config = self.config
        acc_o = new_accumulator(products.pv_add, (WGMMA_M, config.head_dim_v))
        acc_o.fill(0.0)
        scores = new_accumulator(products.qk_first, (WGMMA_M, config.tile_n))
        shift, row_sum = self.softmax.start()
        keys = self.band.row_keys(first_row, seqlen_q, seqlen_k, run, origin)
        diagonal = None
        if const_expr(slope is not None):
            diagonal = kept(first_row + seqlen_k - seqlen_q - origin - self.in_place.first_column(Int32(0)))
        probabilities = self.probabilities.start(products, scores, s_p)
        return Rows(acc_o, probabilities, shift, row_sum, keys, slope, diagonal, pairs)

    @cute.jit
    def first_block(
        self,
        products: Products,
        k_pipe,
        k_state,
        rows: Rows,
        warpgroup: Int32,
        is_store_warp: Boolean,
        masked: Boolean,
        block: Int32,
        run: RunTime,
    ):
        """Scores and softmax of the block that is visited first: its P V comes with the next block."""
        scores = new_accumulator(products.qk_first, (WGMMA_M, self.config.tile_n))
        begin(Phase.WAIT_K)
        k_pipe.consumer_wait(k_state)
        begin(Phase.WAIT_TURN)
        self.turns.wait(warpgroup)
        begin(Phase.ISSUE_QK)
        wgmma.fence()
        issue_scores(products, scores, k_state.index)
        self.turns.give(warpgroup)
        begin(Phase.WAIT_QK)
        wgmma.wait_group(0)
        begin(Phase.MASK)
        k_pipe.consumer_release(k_state)
        k_state.advance()
        sums = cute.make_rmem_tensor(ROWS, Float32)
        self.in_place.first(scores, sums, rows, masked, block, run)
        self.probabilities.claim(warpgroup, is_store_warp)
        self.softmax.add(rows.sum, sums)
        self.probabilities.keep(products, rows.probabilities, scores)
        return k_state

    @cute.jit
    def block(
        self,
        products: Products,
        pipes: tuple,
        k_state,
        v_state,
        rows: Rows,
        warpgroup: Int32,
        run: RunTime,
        block: Int32,
        sides: cutlass.Constexpr[Sides],
    ):
        """Scores of ``block`` and P V of the block visited before it, in flight together; softmax runs under the
        latter.
        """
        config = self.config
        _, k_pipe, v_pipe = pipes
        scores = new_accumulator(products.qk_first, (WGMMA_M, config.tile_n))
        # Issue both products in this warpgroup's turn
        begin(Phase.WAIT_K)
        k_pipe.consumer_wait(k_state)
        begin(Phase.WAIT_TURN)
        self.turns.wait(warpgroup)
        begin(Phase.ISSUE_QK)
        wgmma.fence()
        issue_scores(products, scores, k_state.index)
        begin(Phase.WAIT_V)
        v_pipe.consumer_wait(v_state)
        begin(Phase.ISSUE_PV)
        self.probabilities.meet(warpgroup, in_turn=self.turns.enabled)
        issue_output(products, rows.acc_o, rows.probabilities.operand, v_state.index)
        self.turns.give(warpgroup)
        # P V runs on under the softmax here and the other warpgroups'; without overlap both products end first
        begin(Phase.WAIT_QK)
        wgmma.wait_group(1 if config.overlap else 0)
        softmax = self.fused if config.fused and sides == NO_SIDE else self.in_place
        softmax.prepare(scores, rows, block, sides, run)
        if const_expr(config.early_p):
            self.end_output(v_pipe, v_state)
        sums = cute.make_rmem_tensor(ROWS, Float32)
        softmax.exponentiate(products, k_state.index, scores, sums, rows, warpgroup, block, sides, run)
        k_pipe.consumer_release(k_state)
        if const_expr(not config.early_p):
            self.end_output(v_pipe, v_state)
            self.probabilities.keep(products, rows.probabilities, scores)
        self.softmax.add(rows.sum, sums)
        k_state.advance()
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def end_output(self, v_pipe, v_state):
        """Wait for P V in flight and give V back."""
        begin(Phase.WAIT_PV)
        wgmma.wait_group(0)
        v_pipe.consumer_release(v_state)

    @cute.jit
    def last_output(self, products: Products, v_pipe, v_state, rows: Rows, warpgroup: Int32):
        """P V of the last visited block."""
        begin(Phase.WAIT_V)
        v_pipe.consumer_wait(v_state)
        begin(Phase.ISSUE_PV)
        self.probabilities.meet(warpgroup, in_turn=False)
        wgmma.fence()
        issue_output(products, rows.acc_o, rows.probabilities.operand, v_state.index)
        self.end_output(v_pipe, v_state)
        v_state.advance()
        return v_state

"""The consumer warpgroups of the backward kernel: S and dP again, dV, dK and dQ."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup as wgmma

from .args import BackwardRunTime
from .backward_output import store_gradients
from .backward_products import (
    BackwardProducts,
    first_columns,
    issue,
    make_backward_products,
    new_total,
    transposed,
)
from .backward_scores import (
    OwnKeys,
    bias_of,
    differentiate,
    exponentiate,
    own_keys,
    own_statistics,
    pairs_of,
    query_limits,
    release_queries,
    write_scores,
)
from .backward_store import sums_barrier
from .backward_work import WorkSchedule
from .barriers import BackwardBarrier
from .blocks import LEFT, NO_SIDE, Band, Sides
from .config import WARPGROUP_THREADS, WARPS_PER_WARPGROUP, WGMMA_M, BackwardConfig
from .phases import Phase, begin
from .products import convert, new_accumulator, new_left_operand
from .registers import kept, released_by_first_lane, row_between_tiles
from .schedule import SLOTS, TileQueue
from .score import ScoreHook
from .workspace import write_piece

LSE, DELTA = range(2)  # row statistics, in their order


class Memory(NamedTuple):
    """Shared memory, and the pipelines that say what of it is full."""

    q_pipe: pipeline.PipelineTmaAsync
    do_pipe: pipeline.PipelineTmaAsync
    rows: cute.Tensor  # (LSE and delta of a step, stages)
    ds: cute.Tensor  # (tile_m, tile_n, stages)
    dq: cute.Tensor  # pieces of dQ
    thread: Int32  # of the warpgroup


class Tile(NamedTuple):
    """What one thread carries through the steps of a K/V tile, in registers."""

    dk: cute.Tensor
    dv: cute.Tensor
    p: cute.Tensor  # Pᵀ of a step in 16 bit, A of dV
    factors: cute.Tensor | None  # with what dP - delta is multiplied unless with P, likewise
    keys: OwnKeys
    dq: cute.Tensor | None  # piece of a head's last step, where a tile's last one is staged behind dK and dV


class Keys(NamedTuple):
    """K and V of a tile, while a head takes its steps, where they are given back early."""

    k_pipe: pipeline.PipelineTmaAsync
    v_pipe: pipeline.PipelineTmaAsync
    k_state: pipeline.PipelineState
    v_state: pipeline.PipelineState
    last: Boolean  # no other head follows


class State(NamedTuple):
    """Where a warpgroup stands in the pipelines."""

    q: pipeline.PipelineState
    do: pipeline.PipelineState
    ds: pipeline.PipelineState
    parity: Int32  # of the step: which barriers say that its dS is there


@dataclass(frozen=True)
class BackwardConsumer:
    """Two warpgroups with 64 keys each. They share only dS, which each needs whole for its piece of dQ: a step's dQ is
    computed in the next step, so that neither waits for the other and one's pointwise work falls under the other's
    products. ``step`` and ``last_step`` are in backward_steps.py.
    """

    config: BackwardConfig
    dtype: type
    band: Band
    schedule: WorkSchedule

    @property
    def hook(self):
        return ScoreHook.of(self.config)

    @cute.jit
    def run(self, lengths: tuple, outputs: tuple, shared: tuple, pipes: tuple, queue: TileQueue, run: BackwardRunTime):
        """All tiles of this CTA; one warpgroup's 64 keys of each. ``shared``: K, V, Q, dO, the row statistics, dS and
        dQ.
        """
        config = self.config
        s_k, s_v, s_q, s_do, s_rows, s_ds, s_dq = shared
        thread = kept(cute.arch.thread_idx()[0] % WARPGROUP_THREADS)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # The bounds change nothing, but tell the compiler the range
        warpgroup = cutlass.min(cutlass.max(warp // WARPS_PER_WARPGROUP - 1, 0), config.consumer_warpgroups - 1)
        k_pipe, v_pipe, q_pipe, do_pipe = released_by_first_lane(pipes)
        products = make_backward_products(config, self.dtype, (s_k, s_v, s_q, s_do, s_ds), warpgroup)
        memory = Memory(q_pipe, do_pipe, s_rows, s_ds, s_dq, thread)
        consumer = pipeline.PipelineUserType.Consumer
        k_state, v_state = (pipeline.make_pipeline_state(consumer, 1) for _ in range(2))
        q_state = pipeline.make_pipeline_state(consumer, config.stages)
        do_state = pipeline.make_pipeline_state(consumer, config.do_stages)
        ds_state = pipeline.make_pipeline_state(consumer, config.score_stages)
        state = State(q_state, do_state, ds_state, Int32(0))
        queue_state = pipeline.make_pipeline_state(consumer, SLOTS)
        own_key = warpgroup * WGMMA_M + row_between_tiles(self.band, thread)
        work = self.schedule.receive_work(queue, queue_state)
        while work.n_block >= 0:
            seqlen_q, seqlen_k = work.lengths(lengths)
            lengths_and_bounds = seqlen_q, seqlen_k, run.right, run.left
            blocks = self.band.query_blocks(work.n_block, config.tile_m, *lengths_and_bounds)
            head = self.band.first_head(work, blocks)
            first_key = work.n_block * config.tile_n + own_key
            tile = self.start(products, first_key, seqlen_q, seqlen_k, run)
            # Where no query sees a key, nobody gives K and V back early
            whole = head >= work.last_head if const_expr(config.early_release) else True
            if whole:
                k_pipe.consumer_wait(k_state)
                v_pipe.consumer_wait(v_state)
            while head < work.last_head:
                tile.keys.begin_head(self.hook, run, self.schedule.batch_entry(queue, queue_state, work), head)
                keys = Keys(k_pipe, v_pipe, k_state, v_state, head + 1 == work.last_head)
                state = self.head(products, memory, state, tile, keys, work.blocks_of(head, blocks), warpgroup, run)
                head += 1
            if whole:
                k_pipe.consumer_release(k_state)
                v_pipe.consumer_release(v_state)
            k_state.advance()
            v_state.advance()
            begin(Phase.EPILOGUE)
            work = self.schedule.read_work(queue, queue_state)
            queue_state = self.schedule.give_back(queue, queue_state)
            totals = tile.dk, tile.dv
            store_gradients(config, self.dtype, outputs, totals, work, warpgroup, first_key, run.scale)
            if const_expr(config.early_release):
                self.stage_last_dq(memory, tile.dq, whole, warpgroup)
            begin(Phase.WAIT_TILE)
            work = self.schedule.receive_work(queue, queue_state)
        self.schedule.give_back(queue, queue_state)
        # No barrier is left half full
        sums_barrier(BackwardBarrier.SUMS_FREE, warpgroup, arrive=False)
        begin(Phase.EXIT)

    @cute.jit
    def start(self, products: BackwardProducts, first_key: Int32, seqlen_q: Int32, seqlen_k: Int32, run) -> Tile:
        """Fresh registers for a K/V tile."""
        config = self.config
        # Whole: columns that no product writes stay zero, cost no registers, and are clipped where dK and dV leave
        dk, dv = new_total(config.head_dim), new_total(config.head_dim_v)
        dk.fill(0.0)
        dv.fill(0.0)
        keys = own_keys(self.band, self.hook, first_key, seqlen_q, seqlen_k, run)
        scores = new_accumulator(products.scores_first, (WGMMA_M, config.tile_m))
        p = new_left_operand(scores, self.dtype)
        factors = new_left_operand(scores, self.dtype) if const_expr(config.factors) else None
        dq = new_accumulator(products.dq_first, (WGMMA_M, config.dq_columns)) if config.early_release else None
        return Tile(dk, dv, p, factors, keys, dq)

    @cute.jit
    def head(
        self,
        products: BackwardProducts,
        memory: Memory,
        state: State,
        tile: Tile,
        keys: Keys,
        blocks: tuple,
        warpgroup: Int32,
        run: BackwardRunTime,
    ) -> State:
        """All steps of one query head."""
        first, unmasked, left, end = blocks
        memory.q_pipe.consumer_wait(state.q)
        if const_expr(self.config.early_release):
            keys.k_pipe.consumer_wait(keys.k_state)
        lse = self.statistics(memory, state.q, LSE)
        scores = self.issue_scores(products, state.q)
        wgmma.wait_group(0)
        self.probabilities(tile, scores, lse, first, run, self.band.sides)
        memory.do_pipe.consumer_wait(state.do)
        if const_expr(self.config.early_release):
            keys.v_pipe.consumer_wait(keys.v_state)
        # The step before the second block has no dQ of another to compute
        second, begin = first + 1, first + 1
        if const_expr(self.own_second_step):
            begin += 1
            # A loop, of one round at most, rather than a branch
            for block in cutlass.range(second, cutlass.min(begin, end), unroll=1):
                state = self.step(products, memory, state, tile, block, warpgroup, run, self.band.sides, False)
        for block in cutlass.range(begin, cutlass.min(unmasked, end), unroll=1):
            follows = True if self.own_second_step else block > second
            state = self.step(products, memory, state, tile, block, warpgroup, run, self.band.sides, follows)
        begin = cutlass.max(begin, unmasked)
        for block in cutlass.range(begin, left, unroll=1):
            follows = True if self.own_second_step else block > second
            state = self.step(products, memory, state, tile, block, warpgroup, run, NO_SIDE, follows)
        if const_expr(self.band.left_bound):
            for block in cutlass.range(cutlass.max(begin, left), end, unroll=1):
                follows = True if self.own_second_step else block > second
                state = self.step(products, memory, state, tile, block, warpgroup, run, LEFT, follows)
        return self.last_step(products, memory, state, tile, keys, warpgroup, second < end)

    @cute.jit
    def release(self, pipe, state, keys: Keys):
        """Give K or V back, of which no other product of the tile reads."""
        if const_expr(self.config.early_release):
            if keys.last:
                pipe.consumer_release(state)

    @cute.jit
    def issue_last_dq(self, products: BackwardProducts, state: State, tile: Tile, warpgroup: Int32):
        """Start dQ of a head's last step: there is no next step for it."""
        self.wait_scores(warpgroup, state.parity)
        return self.issue_dq(products, state.ds.index, tile.dq)

    @cute.jit
    def last_dq(
        self,
        products: BackwardProducts,
        memory: Memory,
        state: State,
        tile: Tile,
        keys: Keys,
        warpgroup: Int32,
        dq: cute.Tensor | None = None,
    ) -> State:
        """The end of a head's last step, of which dV and dK are in flight, or ``dq`` of issue_last_dq() as well."""
        wgmma.wait_group(1 if dq is None else 2)
        memory.do_pipe.consumer_release(state.do)
        if const_expr(dq is None):
            dq = self.issue_last_dq(products, state, tile, warpgroup)
        wgmma.wait_group(0)
        self.release(keys.k_pipe, keys.k_state, keys)
        release_queries(memory.q_pipe, state.q)
        self.stage_last_dq(memory, dq, keys.last if const_expr(self.config.early_release) else False, warpgroup)
        state.q.advance()
        state.do.advance()
        state.ds.advance()
        return State(state.q, state.do, state.ds, state.parity ^ 1)

    @cute.jit
    def issue_scores(self, products: BackwardProducts, q_state):
        """Start Sᵀ = K Qᵀ."""
        scores = new_accumulator(products.scores_first, (WGMMA_M, self.config.tile_m))
        q = products.q[None, None, None, q_state.index]
        wgmma.fence()
        issue(products.scores_first, products.scores_add, scores, products.k, q, self.config.columns)
        return scores

    @cute.jit
    def issue_dp(self, products: BackwardProducts, state: State):
        """Start dPᵀ = V dOᵀ."""
        dp = new_accumulator(products.scores_first, (WGMMA_M, self.config.tile_m))
        do = products.do[None, None, None, state.do.index]
        wgmma.fence()
        issue(products.scores_first, products.scores_add, dp, products.v, do, self.config.columns_v)
        return dp

    @cute.jit
    def issue_dv(self, products: BackwardProducts, state: State, tile: Tile):
        """Start dV += Pᵀ dO."""
        do_transposed = products.do_transposed[None, None, None, state.do.index]
        wgmma.fence()
        dv = first_columns(tile.dv, self.config.columns_v)
        issue(products.dv_add, products.dv_add, dv, tile.p, do_transposed)

    @cute.jit
    def issue_dq_before(self, products: BackwardProducts, state: State):
        """Start dQ of the step before this one."""
        stages = self.config.score_stages
        before = cutlass.select_(state.ds.index == 0, Int32(stages - 1), state.ds.index - 1)
        return self.issue_dq(products, before)

    @cute.jit
    def issue_dq(self, products: BackwardProducts, stage: Int32, dq: cute.Tensor | None = None):
        """Start dQ = dS K, this warpgroup's piece, in registers of its own or in ``dq``."""
        if const_expr(dq is None):
            dq = new_accumulator(products.dq_first, (WGMMA_M, self.config.dq_columns))
        ds = products.ds[None, None, None, stage]
        wgmma.fence()
        issue(products.dq_first, products.dq_add, dq, ds, products.k_transposed)
        return dq

    @cute.jit
    def issue_dk(self, products: BackwardProducts, state: State, tile: Tile, ds: cute.Tensor):
        """Start dK += dSᵀ Q."""
        wgmma.fence()
        q_transposed = products.q_transposed[None, None, None, state.q.index]
        dk = first_columns(tile.dk, self.config.columns)
        issue(products.dk_add, products.dk_add, dk, ds, q_transposed)

    @cute.jit
    def scores_written(self, warpgroup: Int32, parity: Int32):
        """This warpgroup has written its part of a step's dS."""
        barrier = int(BackwardBarrier.SCORES) + 2 * parity + warpgroup
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP_THREADS)

    @cute.jit
    def wait_scores(self, warpgroup: Int32, parity: Int32):
        """Wait for the other warpgroup's part, and make both visible to WGMMA. This fence waits for all that the
        thread has written to shared memory: here, but for a head's last step, dS was written a step ago.
        """
        barrier = int(BackwardBarrier.SCORES) + 2 * parity + 1 - warpgroup
        cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARPGROUP_THREADS)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def stage_dq(self, memory: Memory, dq: cute.Tensor, warpgroup: Int32):
        """Hand this warpgroup's piece of dQ to the store warp, whose fence makes it visible to the bulk copy."""
        sums_barrier(BackwardBarrier.SUMS_FREE, warpgroup, arrive=False)
        write_piece(memory.dq, dq, warpgroup, memory.thread)
        sums_barrier(BackwardBarrier.SUMS_FULL, warpgroup, arrive=True)

    @cute.jit
    def stage_last_dq(self, memory: Memory, dq: cute.Tensor, elsewhere: Boolean, warpgroup: Int32):
        """The piece of a head's last step, unless it is staged ``elsewhere``: a tile's last one, for whose memory its
        warpgroup would wait, behind dK and dV.
        """
        if not elsewhere:
            self.stage_dq(memory, dq, warpgroup)

    def statistics(self, memory: Memory, q_state, kind: int):
        """This thread's share of a step's LSE or delta. Loaded before the products that come first are issued: behind
        their reads of shared memory it would wait.
        """
        return own_statistics(memory.rows[None, q_state.index], kind * self.config.tile_m, self.config.tile_m)

    @cute.jit
    def probabilities(
        self,
        tile: Tile,
        accumulator: cute.Tensor,
        lse: cute.Tensor,
        block: Int32,
        run: BackwardRunTime,
        sides: cutlass.Constexpr[Sides],
    ):
        """Pᵀ = exp2(Sᵀ scale - LSE), in place and in 16 bit."""
        first = block * self.config.tile_m
        limits = query_limits(tile.keys.first_queries, first)
        bias = bias_of(self.hook, tile.keys, first, accumulator, run)
        hook = self.hook, bias, pairs_of(self.hook, tile.keys, first, accumulator), tile.factors
        polynomials, width = self.config.polynomial_columns, self.band.width(run)
        by_bits = True
        exponentiate(accumulator, lse, limits, run, sides, width, *hook, polynomials, self.dtype, by_bits)
        convert(accumulator, self.dtype, target=tile.p)

    @cute.jit
    def score_gradients(self, tile: Tile, dp: cute.Tensor, delta: cute.Tensor):
        """dSᵀ = Pᵀ (dPᵀ - delta) in 16 bit. P is taken as dV takes it, in 16 bit."""
        differentiate(dp, tile.p if const_expr(tile.factors is None) else tile.factors, delta)
        ds = new_left_operand(dp, self.dtype)
        convert(dp, self.dtype, target=ds)
        return ds

    @cute.jit
    def write_scores(
        self,
        products: BackwardProducts,
        memory: Memory,
        state: State,
        ds: cute.Tensor,
        layout: cutlass.Constexpr,
        warpgroup: Int32,
    ):
        """A step's dS to shared memory, for both warpgroups' dQ. ``layout``: of its accumulator."""
        buffer = transposed(memory.ds)[None, None, state.ds.index]
        target = cute.local_tile(buffer, (WGMMA_M, self.config.tile_m), (warpgroup, 0))
        write_scores(products.scores_first, ds, layout, target, memory.thread)
        self.scores_written(warpgroup, state.parity)

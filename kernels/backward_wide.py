"""The consumer warpgroups of the backward kernel for heads beside whose dK and dV few registers are left.

As in backward_consume.py each has dK and dV of 64 keys. But scores, dP and dQ are in registers one after the other, and
little of one warpgroup's work is in flight under its own arithmetic: it is the other warpgroup that fills the tensor
cores then. A step's dQ is issued in the next step, so that neither waits for the other's dS of the same step. One
barrier a step is enough. A warpgroup arrives when it has written dS of step j and read all of step j - 1's; the other
waits for that before it writes dS of j + 1, over that of j - 1, and reads that of j.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup as wgmma

from .args import BackwardRunTime
from .backward_output import store_gradients
from .backward_products import BackwardProducts, issue, make_backward_products, make_dk_from_shared, piece, transposed
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
from .barriers import BackwardBarrier, WideBarrier
from .blocks import LEFT, NO_SIDE, Band, Sides
from .config import WARPGROUP_THREADS, WARPS_PER_WARPGROUP, WGMMA_M, BackwardConfig
from .phases import Phase, begin
from .products import convert, new_accumulator, new_left_operand
from .registers import kept, released_by_first_lane
from .schedule import SLOTS, TileQueue
from .score import ScoreHook
from .softmax import QUAD
from .workspace import write_piece


class Memory(NamedTuple):
    """Shared memory, and the pipelines that say what of it is full."""

    q_pipe: pipeline.PipelineTmaAsync
    do_pipe: pipeline.PipelineTmaAsync
    rows: cute.Tensor  # (LSE and delta of a step, stages)
    ds: cute.Tensor  # this warpgroup's part: (64 keys, tile_m, 2)
    dq: cute.Tensor  # a part of each warpgroup's piece of dQ
    thread: Int32  # of the warpgroup


class Tile(NamedTuple):
    """What one thread carries through the steps of a K/V tile, in registers."""

    dk: cute.Tensor
    dv: cute.Tensor
    scores: cute.Tensor
    keys: OwnKeys


class State(NamedTuple):
    """Where a warpgroup stands."""

    q: pipeline.PipelineState
    do: pipeline.PipelineState
    parity: Int32  # of the step: which buffer of dS and which barriers it uses


@dataclass(frozen=True)
class WideConsumer:
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
        k_pipe, v_pipe, q_pipe, do_pipe = released_by_first_lane(pipes)
        thread = kept(cute.arch.thread_idx()[0] % WARPGROUP_THREADS)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # The bounds change nothing, but tell the compiler the range
        warpgroup = cutlass.min(cutlass.max(warp // WARPS_PER_WARPGROUP - 1, 0), config.consumer_warpgroups - 1)
        products = make_backward_products(config, self.dtype, (s_k, s_v, s_q, s_do, s_ds), warpgroup)
        dk = make_dk_from_shared(config, self.dtype, s_ds, warpgroup)
        memory = Memory(q_pipe, do_pipe, s_rows, piece(transposed(s_ds), WGMMA_M, warpgroup), s_dq, thread)
        consumer = pipeline.PipelineUserType.Consumer
        k_state, v_state = (pipeline.make_pipeline_state(consumer, 1) for _ in range(2))
        q_state = pipeline.make_pipeline_state(consumer, config.stages)
        do_state = pipeline.make_pipeline_state(consumer, config.do_stages)
        state = State(q_state, do_state, Int32(0))
        queue_state = pipeline.make_pipeline_state(consumer, SLOTS)
        own_key = warpgroup * WGMMA_M + thread // QUAD // 8 * 16 + thread // QUAD % 8
        work = self.schedule.receive_work(queue, queue_state)
        self.arrive(warpgroup, Int32(1))
        while work.n_block >= 0:
            seqlen_q, seqlen_k = work.lengths(lengths)
            lengths_and_bounds = seqlen_q, seqlen_k, run.right, run.left
            blocks = self.band.query_blocks(work.n_block, config.tile_m, *lengths_and_bounds)
            head = self.band.first_head(work, blocks)
            first_key = work.n_block * config.tile_n + own_key
            tile = Tile(
                new_accumulator(products.dk_add, (WGMMA_M, config.head_dim)),
                new_accumulator(products.dv_add, (WGMMA_M, config.head_dim_v)),
                new_accumulator(products.scores_first, (WGMMA_M, config.tile_m)),
                own_keys(self.band, self.hook, first_key, seqlen_q, seqlen_k, run),
            )
            tile.dk.fill(0.0)
            tile.dv.fill(0.0)
            k_pipe.consumer_wait(k_state)
            v_pipe.consumer_wait(v_state)
            while head < work.last_head:
                tile.keys.begin_head(self.hook, run, self.schedule.batch_entry(queue, queue_state, work), head)
                state = self.head(products, dk, memory, state, tile, work.blocks_of(head, blocks), warpgroup, run)
                head += 1
            k_pipe.consumer_release(k_state)
            v_pipe.consumer_release(v_state)
            k_state.advance()
            v_state.advance()
            begin(Phase.EPILOGUE)
            work = self.schedule.read_work(queue, queue_state)
            queue_state = self.schedule.give_back(queue, queue_state)
            totals = tile.dk, tile.dv
            store_gradients(config, self.dtype, outputs, totals, work, warpgroup, first_key, run.scale)
            begin(Phase.WAIT_TILE)
            work = self.schedule.receive_work(queue, queue_state)
        self.schedule.give_back(queue, queue_state)
        # No barrier is left half full
        self.wait(warpgroup, state.parity ^ 1)
        sums_barrier(BackwardBarrier.SUMS_FREE, warpgroup, arrive=False)
        begin(Phase.EXIT)

    @cute.jit
    def head(
        self, products, dk: tuple, memory: Memory, state: State, tile: Tile, blocks: tuple, warpgroup: Int32, run
    ) -> State:
        """All steps of one query head."""
        first, unmasked, left, end = blocks
        memory.q_pipe.consumer_wait(state.q)
        self.issue_scores(products, tile.scores, state.q)
        wgmma.wait_group(0)
        for block in cutlass.range(first, cutlass.min(unmasked, end - 1), unroll=1):
            state = self.step(products, dk, memory, state, tile, (first, block), warpgroup, run, self.band.sides)
        begin, before_last = cutlass.max(first, unmasked), end - 1
        if const_expr(self.band.left_bound):
            before_last = cutlass.min(left, before_last)
        for block in cutlass.range(begin, before_last, unroll=1):
            state = self.step(products, dk, memory, state, tile, (first, block), warpgroup, run, NO_SIDE)
        if const_expr(self.band.left_bound):
            for block in cutlass.range(cutlass.max(begin, left), end - 1, unroll=1):
                state = self.step(products, dk, memory, state, tile, (first, block), warpgroup, run, LEFT)
        self.step(products, dk, memory, state, tile, (first, end - 1), warpgroup, run, self.band.sides, last=True)
        # One more step, in which there is only dQ of the last one
        state.q.advance()
        state.do.advance()
        parity = state.parity
        self.wait(warpgroup, parity)
        dq = self.issue_dq(products, parity)
        wgmma.wait_group(0)
        self.arrive(warpgroup, parity ^ 1)
        self.store_dq(memory, dq, warpgroup)
        return State(state.q, state.do, parity)

    @cute.jit
    def step(
        self,
        products: BackwardProducts,
        dk: tuple,
        memory: Memory,
        state: State,
        tile: Tile,
        blocks: tuple,
        warpgroup: Int32,
        run: BackwardRunTime,
        sides: cutlass.Constexpr[Sides],
        last: cutlass.Constexpr[bool] = False,
    ) -> State:
        """P, dP, dS, dV and dK of a step, dQ of the step before it, where there is one, and S of the next one."""
        first, block = blocks
        # P, and dS under dV
        rows = memory.rows[None, state.q.index]
        first_query = block * self.config.tile_m
        limits = query_limits(tile.keys.first_queries, first_query)
        bias = bias_of(self.hook, tile.keys, first_query, tile.scores, run)
        pairs = pairs_of(self.hook, tile.keys, first_query, tile.scores)
        factors = new_left_operand(tile.scores, self.dtype) if const_expr(self.config.factors) else None
        lse, delta = (own_statistics(rows, kind * self.config.tile_m, self.config.tile_m) for kind in range(2))
        exponentiate(tile.scores, lse, limits, run, sides, self.band.width(run), self.hook, bias, pairs, factors)
        p = convert(tile.scores, self.dtype, target=new_left_operand(tile.scores, self.dtype))
        memory.do_pipe.consumer_wait(state.do)
        dp = new_accumulator(products.scores_first, (WGMMA_M, self.config.tile_m))
        do, do_transposed = (x[None, None, None, state.do.index] for x in (products.do, products.do_transposed))
        wgmma.fence()
        issue(products.scores_first, products.scores_add, dp, products.v, do)
        issue(products.dv_add, products.dv_add, tile.dv, p, do_transposed)
        wgmma.wait_group(1)
        differentiate(dp, p if const_expr(factors is None) else factors, delta)
        ds = convert(dp, self.dtype)
        self.wait(warpgroup, state.parity ^ 1)
        write_scores(products.scores_first, ds, dp.layout, memory.ds[None, None, state.parity], memory.thread)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=int(WideBarrier.OWN) + warpgroup, number_of_threads=WARPGROUP_THREADS)
        wgmma.wait_group(0)
        memory.do_pipe.consumer_release(state.do)
        # dQ of the step before, which leaves under dK
        dq = self.issue_dq(products, state.parity ^ 1)
        dk_add, own_ds = dk
        q_transposed = products.q_transposed[None, None, None, state.q.index]
        issue(dk_add, dk_add, tile.dk, own_ds[None, None, None, state.parity], q_transposed)
        wgmma.wait_group(1)
        self.arrive(warpgroup, state.parity)
        if block > first:
            self.store_dq(memory, dq, warpgroup)
        if const_expr(last):
            wgmma.wait_group(0)
            release_queries(memory.q_pipe, state.q)
            return state
        following = state.q.clone()
        following.advance()
        memory.q_pipe.consumer_wait(following)
        self.issue_scores(products, tile.scores, following)
        wgmma.wait_group(1)
        release_queries(memory.q_pipe, state.q)
        wgmma.wait_group(0)
        state.do.advance()
        return State(following, state.do, state.parity ^ 1)

    @cute.jit
    def issue_scores(self, products: BackwardProducts, scores: cute.Tensor, q_state):
        """Start Sᵀ = K Qᵀ."""
        wgmma.fence()
        q = products.q[None, None, None, q_state.index]
        issue(products.scores_first, products.scores_add, scores, products.k, q)

    @cute.jit
    def issue_dq(self, products: BackwardProducts, parity: Int32):
        """Start dQ = dS K, this warpgroup's piece."""
        dq = new_accumulator(products.dq_first, (WGMMA_M, self.config.dq_columns))
        wgmma.fence()
        issue(products.dq_first, products.dq_add, dq, products.ds[None, None, None, parity], products.k_transposed)
        return dq

    @cute.jit
    def arrive(self, warpgroup: Int32, parity: Int32):
        """This warpgroup has written a step's dS, and no longer reads the one before."""
        barrier = int(WideBarrier.STEP) + 2 * parity + warpgroup
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP_THREADS)

    @cute.jit
    def wait(self, warpgroup: Int32, parity: Int32):
        """Wait until the other warpgroup has."""
        barrier = int(WideBarrier.STEP) + 2 * parity + 1 - warpgroup
        cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARPGROUP_THREADS)

    @cute.jit
    def store_dq(self, memory: Memory, dq: cute.Tensor, warpgroup: Int32):
        """Hand this warpgroup's piece of dQ, in parts, to its store warp."""
        size = cute.size(dq) // self.config.sum_rounds
        for part in cutlass.range_constexpr(self.config.sum_rounds):
            sums_barrier(BackwardBarrier.SUMS_FREE, warpgroup, arrive=False)
            own = cute.make_tensor(dq.iterator + part * size, cute.make_layout(size))
            write_piece(memory.dq, own, warpgroup, memory.thread)
            sums_barrier(BackwardBarrier.SUMS_FULL, warpgroup, arrive=True)

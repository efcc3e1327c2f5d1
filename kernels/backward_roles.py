"""The consumer warpgroups of the backward kernel for wide heads, where registers hold dK and dV of 64 keys only.

One warpgroup, ProbabilityRole, computes P and owns dV; the other, GradientRole, computes dS and owns dK. Each computes
half of dQ's columns. They exchange P and dS, in 16 bit, through two buffers each, by the parity of the step, and need
no barrier that says "free":

- ProbabilityRole writes P of step j + 1 over P of step j - 1 after it has waited for dS of j - 1, which was made from
  that P.
- GradientRole writes dS of step j over dS of step j - 2 after it has waited for P of j, which ProbabilityRole hands
  over after its dQ of j - 2 is done; its own dQ of j - 2 is, too.

The same two facts keep anybody from arriving at a barrier twice before the other has passed it once.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup as wgmma

from .args import BackwardRunTime
from .backward_products import issue, transposed
from .backward_role_products import RoleProducts, make_role_products
from .backward_scores import differentiate, exponentiate, first_queries_of, query_limits, write_scores
from .backward_store import sums_barrier
from .barriers import BackwardBarrier, RoleBarrier
from .blocks import Band
from .config import OTHER_REGISTERS, WARPGROUP_THREADS, WGMMA_M, BackwardConfig
from .output import DirectOutput, Piece
from .phases import Phase, begin
from .products import convert, new_accumulator, new_left_operand
from .schedule import SLOTS, Schedule, TileQueue
from .softmax import QUAD
from .workspace import read_piece, write_piece


class Memory(NamedTuple):
    """Shared memory, and the pipelines that say what of it is full."""

    q_pipe: pipeline.PipelineTmaAsync
    do_pipe: pipeline.PipelineTmaAsync
    rows: cute.Tensor  # (LSE and delta of a step, stages)
    ds: cute.Tensor  # (tile_m, tile_n, stages)
    dq: cute.Tensor  # a part of each warpgroup's piece of dQ
    p: cute.Tensor  # two steps' P in the order of registers


class State(NamedTuple):
    """Where a warpgroup stands."""

    q: pipeline.PipelineState
    do: pipeline.PipelineState
    parity: Int32  # of the step: which buffers and barriers it uses


@dataclass(frozen=True)
class Role:
    """What both have in common. ``head`` and ``columns`` (of what they own) are theirs."""

    config: BackwardConfig
    dtype: type
    band: Band
    schedule: Schedule

    @cute.jit
    def run(
        self, lengths: tuple, output: cute.Tensor, shared: tuple, pipes: tuple, queue: TileQueue, run: BackwardRunTime
    ):
        """All tiles of this CTA. ``output``: dV or dK; ``shared``: K, V, Q, dO, the row statistics, dS, dQ and P."""
        config = self.config
        seqlen_q, seqlen_k, heads, heads_k, batch = lengths
        *_, s_rows, s_ds, s_dq, s_p = shared
        k_pipe, v_pipe, q_pipe, do_pipe = pipes
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        products = self.products(shared)
        memory = Memory(q_pipe, do_pipe, s_rows, s_ds, s_dq, s_p)
        consumer = pipeline.PipelineUserType.Consumer
        k_state, v_state = (pipeline.make_pipeline_state(consumer, 1) for _ in range(2))
        q_state = pipeline.make_pipeline_state(consumer, config.stages)
        do_state = pipeline.make_pipeline_state(consumer, config.do_stages)
        state = State(q_state, do_state, Int32(0))
        queue_state = pipeline.make_pipeline_state(consumer, SLOTS)
        own_key = thread // QUAD // 8 * 16 + thread // QUAD % 8
        index, tiles = self.schedule.first(), self.schedule.count(seqlen_k, run.head_parts, batch)
        while index < tiles:
            n_block, part, batch_index = self.schedule.coordinates(index, seqlen_k, run.head_parts, batch, run.section)
            head_k, head, last_head = run.heads_of(part, heads, heads_k)
            blocks = self.band.query_blocks(n_block, config.tile_m, seqlen_q, seqlen_k, run.right)
            first_key = n_block * config.tile_n + own_key
            first_queries = first_queries_of(self.band, first_key, seqlen_q, seqlen_k, run.right)
            total = new_accumulator(products.total_add, (WGMMA_M, self.columns))
            total.fill(0.0)
            scores = self.new_scores(products)
            operand = new_left_operand(scores, self.dtype)
            k_pipe.consumer_wait(k_state)
            v_pipe.consumer_wait(v_state)
            while head < last_head:
                state = self.head(products, memory, state, total, (scores, operand, first_queries), blocks, run)
                head += 1
            k_pipe.consumer_release(k_state)
            v_pipe.consumer_release(v_state)
            k_state.advance()
            v_state.advance()
            begin(Phase.EPILOGUE)
            if const_expr(self.scaled):
                for element in cutlass.range(cute.size(total), unroll_full=True):
                    total[element] = total[element] * run.scale
            piece = Piece(n_block, head_k, batch_index, Int32(self.warpgroup), thread, Boolean(False), first_key)
            DirectOutput(self.dtype, self.columns).store(output, None, total, None, piece)
            begin(Phase.WAIT_TILE)
            index, queue_state = self.schedule.receive(queue, queue_state, index)
        begin(Phase.EXIT)

    @property
    def early_scores(self):
        """Whether registers hold dQ's piece beside scores and a 16-bit operand, so that all three products are in
        flight together.
        """
        held = self.columns // 2 + self.config.dq_columns // 2
        return held + self.config.tile_m // 2 + self.config.tile_m // 4 <= self.config.registers[1] - OTHER_REGISTERS

    @property
    def all_parts(self):
        return 0, self.config.sum_rounds

    @property
    def first_parts(self):
        """Parts of dQ that leave before the next scores are made: the first one, where that makes room for them."""
        room = self.config.dq_columns // self.config.sum_rounds >= self.config.tile_m
        return (0, 1) if room else self.all_parts

    @property
    def other_parts(self):
        return self.first_parts[1], self.config.sum_rounds

    def new_scores(self, products):
        return new_accumulator(products.scores_first, (WGMMA_M, self.config.tile_m))

    @cute.jit
    def meet(self):
        """All threads of this warpgroup."""
        cute.arch.barrier(barrier_id=int(RoleBarrier.OWN) + self.warpgroup, number_of_threads=WARPGROUP_THREADS)

    @cute.jit
    def issue_scores(self, products: RoleProducts, scores: cute.Tensor, stage: Int32):
        """Start Sᵀ = K Qᵀ, or dPᵀ = V dOᵀ."""
        wgmma.fence()
        queries = products.queries[None, None, None, stage]
        issue(products.scores_first, products.scores_add, scores, products.keys, queries)

    @cute.jit
    def issue_total(self, products: RoleProducts, total: cute.Tensor, operand: cute.Tensor, stage: Int32):
        """Start dV += Pᵀ dO, or dK += dSᵀ Q."""
        wgmma.fence()
        issue(products.total_add, products.total_add, total, operand, products.rows[None, None, None, stage])

    @cute.jit
    def issue_dq(self, products: RoleProducts, parity: Int32):
        """Start dQ = dS K, this warpgroup's piece."""
        dq = new_accumulator(products.dq_first, (WGMMA_M, self.config.dq_columns))
        wgmma.fence()
        issue(products.dq_first, products.dq_add, dq, products.ds[None, None, None, parity], products.k_transposed)
        return dq

    @cute.jit
    def store_dq(self, memory: Memory, dq: cute.Tensor, parts: cutlass.Constexpr):
        """Hand parts of this warpgroup's piece of dQ to its store warp."""
        for part in cutlass.range_constexpr(parts[0], parts[1]):
            size = cute.size(dq) // self.config.sum_rounds
            own = cute.make_tensor(dq.iterator + part * size, cute.make_layout(size))
            sums_barrier(BackwardBarrier.SUMS_FREE, Int32(self.warpgroup), arrive=False)
            write_piece(memory.dq, own, Int32(self.warpgroup))
            cute.arch.fence_view_async_shared()
            sums_barrier(BackwardBarrier.SUMS_FULL, Int32(self.warpgroup), arrive=True)


def words_of(operand):
    """Registers of 16-bit scores, two to a word. No arithmetic is done with these: the type only suits workspace.py."""
    return cute.make_tensor(cute.recast_ptr(operand.iterator, dtype=Float32), cute.make_layout(cute.size(operand) // 2))


def arrive(barrier, parity):
    """The other warpgroup may go on."""
    cute.arch.barrier_arrive(barrier_id=int(barrier) + parity, number_of_threads=2 * WARPGROUP_THREADS)


def wait(barrier, parity):
    """Wait for the other warpgroup."""
    cute.arch.barrier(barrier_id=int(barrier) + parity, number_of_threads=2 * WARPGROUP_THREADS)


@dataclass(frozen=True)
class ProbabilityRole(Role):
    """S and P, one step ahead of the other role; dV; dQ's left columns, of the step before."""

    warpgroup = 0
    scaled = False

    @property
    def columns(self):
        return self.config.head_dim_v

    @cute.jit
    def products(self, shared: tuple):
        s_k, _, s_q, s_do, _, s_ds, *_ = shared
        return make_role_products(self.config, self.dtype, (s_k, s_q), (s_do, self.columns), (s_ds, s_k), self.warpgroup)

    @cute.jit
    def head(self, products, memory: Memory, state: State, total, registers: tuple, blocks: tuple, run) -> State:
        """All steps of one query head."""
        _, operand, first_queries = registers
        first, unmasked, end = blocks
        memory.q_pipe.consumer_wait(state.q)
        scores = self.new_scores(products)
        self.issue_scores(products, scores, state.q.index)
        wgmma.wait_group(0)
        limits = query_limits(first_queries, first * self.config.tile_m)
        exponentiate(scores, memory.rows[None, state.q.index], limits, run.scale_log2, masked=True)
        memory.q_pipe.consumer_release(state.q)
        state = self.hand_over(memory, state, scores, operand)
        for block in cutlass.range(first + 1, unmasked, unroll=1):
            state = self.step(products, memory, state, total, operand, first_queries, (first, block), run, masked=True)
        for block in cutlass.range(cutlass.max(first + 1, unmasked), end, unroll=1):
            state = self.step(products, memory, state, total, operand, first_queries, (first, block), run, masked=False)
        return self.last_step(products, memory, state, total, operand, end - 1 > first)

    @cute.jit
    def step(
        self,
        products: RoleProducts,
        memory: Memory,
        state: State,
        total: cute.Tensor,
        operand: cute.Tensor,
        first_queries: cute.Tensor,
        blocks: tuple,
        run: BackwardRunTime,
        masked: cutlass.Constexpr[bool],
    ) -> State:
        """P of ``block``; dV of the step before it, and dQ of the one before that, where there is one."""
        first, block = blocks
        follows = block > first + 1
        scores = self.new_scores(products)
        if follows:
            wait(RoleBarrier.GRADIENTS, state.parity)
        dq = self.issue_dq(products, state.parity)
        if const_expr(self.early_scores):
            memory.q_pipe.consumer_wait(state.q)
            self.issue_scores(products, scores, state.q.index)
            memory.do_pipe.consumer_wait(state.do)
            self.issue_total(products, total, operand, state.do.index)
            wgmma.wait_group(2)
            if follows:
                self.store_dq(memory, dq, self.all_parts)
            wgmma.wait_group(1)
        else:
            memory.do_pipe.consumer_wait(state.do)
            self.issue_total(products, total, operand, state.do.index)
            wgmma.wait_group(1)
            if follows:
                self.store_dq(memory, dq, self.first_parts)
            memory.q_pipe.consumer_wait(state.q)
            self.issue_scores(products, scores, state.q.index)
            if follows:
                self.store_dq(memory, dq, self.other_parts)
            wgmma.wait_group(1)
            memory.do_pipe.consumer_release(state.do)
            wgmma.wait_group(0)
        limits = query_limits(first_queries, block * self.config.tile_m)
        exponentiate(scores, memory.rows[None, state.q.index], limits, run.scale_log2, masked=masked)
        memory.q_pipe.consumer_release(state.q)
        # Registers that a product in flight reads cannot take the next P before that product is done: it comes back
        # from shared memory.
        state = self.hand_over(memory, state, scores, None if const_expr(self.early_scores) else operand)
        if const_expr(self.early_scores):
            wgmma.wait_group(0)
            memory.do_pipe.consumer_release(state.do)
            read_piece(memory.p, words_of(operand), state.parity ^ 1)
        state.do.advance()
        return state

    @cute.jit
    def last_step(
        self, products: RoleProducts, memory: Memory, state: State, total: cute.Tensor, operand: cute.Tensor, follows
    ) -> State:
        """dV of a head's last step, and dQ of its last two."""
        if follows:
            wait(RoleBarrier.GRADIENTS, state.parity)
        dq = self.issue_dq(products, state.parity)
        memory.do_pipe.consumer_wait(state.do)
        self.issue_total(products, total, operand, state.do.index)
        wgmma.wait_group(1)
        if follows:
            self.store_dq(memory, dq, self.all_parts)
        wait(RoleBarrier.GRADIENTS, state.parity ^ 1)
        dq = self.issue_dq(products, state.parity ^ 1)
        wgmma.wait_group(0)
        memory.do_pipe.consumer_release(state.do)
        self.store_dq(memory, dq, self.all_parts)
        state.do.advance()
        return state

    @cute.jit
    def hand_over(self, memory: Memory, state: State, scores: cute.Tensor, operand) -> State:
        """P in 16 bit to the other role, and to ``operand`` where that is not None; ``state`` then stands at the next
        step's Q and parity.
        """
        converted = convert(scores, self.dtype, target=operand)
        write_piece(memory.p, words_of(converted), state.parity)
        arrive(RoleBarrier.PROBABILITIES, state.parity)
        state.q.advance()
        return State(state.q, state.do, state.parity ^ 1)


@dataclass(frozen=True)
class GradientRole(Role):
    """dP and dS; dK; dQ's right columns."""

    warpgroup = 1
    scaled = True

    @property
    def columns(self):
        return self.config.head_dim

    @cute.jit
    def products(self, shared: tuple):
        s_k, s_v, s_q, s_do, _, s_ds, *_ = shared
        return make_role_products(self.config, self.dtype, (s_v, s_do), (s_q, self.columns), (s_ds, s_k), self.warpgroup)

    @cute.jit
    def head(self, products, memory: Memory, state: State, total, registers: tuple, blocks: tuple, run) -> State:
        """All steps of one query head."""
        dp, operand, _ = registers
        first, _, end = blocks
        memory.do_pipe.consumer_wait(state.do)
        self.issue_scores(products, dp, state.do.index)
        wgmma.wait_group(0)
        memory.do_pipe.consumer_release(state.do)
        state.do.advance()
        for _ in cutlass.range(first, end - 1, unroll=1):
            state = self.step(products, memory, state, total, dp, operand, last=False)
        return self.step(products, memory, state, total, dp, operand, last=True)

    @cute.jit
    def step(
        self,
        products: RoleProducts,
        memory: Memory,
        state: State,
        total: cute.Tensor,
        dp: cute.Tensor,
        operand: cute.Tensor,
        last: cutlass.Constexpr[bool],
    ) -> State:
        """dK and dQ of a step, and dP of the next one, where there is one."""
        early = self.early_scores and not last
        self.score_gradients(products, memory, state, dp, operand)
        dq = self.issue_dq(products, state.parity)
        self.issue_total(products, total, operand, state.q.index)
        if const_expr(early):
            memory.do_pipe.consumer_wait(state.do)
            self.issue_scores(products, dp, state.do.index)
            wgmma.wait_group(2)
        else:
            wgmma.wait_group(1)
        self.store_dq(memory, dq, self.first_parts)
        if const_expr(not early and not last):
            memory.do_pipe.consumer_wait(state.do)
            self.issue_scores(products, dp, state.do.index)
        self.store_dq(memory, dq, self.other_parts)
        if const_expr(not last):
            wgmma.wait_group(1)
            memory.q_pipe.consumer_release(state.q)
            wgmma.wait_group(0)
            memory.do_pipe.consumer_release(state.do)
            state.do.advance()
        else:
            wgmma.wait_group(0)
            memory.q_pipe.consumer_release(state.q)
        state.q.advance()
        return State(state.q, state.do, state.parity ^ 1)

    @cute.jit
    def score_gradients(
        self, products: RoleProducts, memory: Memory, state: State, dp: cute.Tensor, operand: cute.Tensor
    ):
        """dSᵀ = Pᵀ (dPᵀ - delta) in 16 bit, in registers and in shared memory. P is taken as dV takes it: in 16 bit."""
        memory.q_pipe.consumer_wait(state.q)
        wait(RoleBarrier.PROBABILITIES, state.parity)
        p = new_left_operand(dp, self.dtype)
        read_piece(memory.p, words_of(p), state.parity)
        differentiate(dp, p, memory.rows[None, state.q.index], self.config.tile_m)
        convert(dp, self.dtype, target=operand)
        write_scores(products.scores_first, operand, dp.layout, transposed(memory.ds)[None, None, state.parity])
        arrive(RoleBarrier.GRADIENTS, state.parity)
        self.meet()

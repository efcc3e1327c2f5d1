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

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import warpgroup as wgmma

from .args import BackwardRunTime
from .backward_products import transposed
from .backward_role import Memory, Role, State, arrive, wait, words_of
from .backward_role_products import RoleProducts, make_role_products
from .backward_scores import differentiate, exponentiate, query_limits, release_queries, write_scores
from .barriers import RoleBarrier
from .config import WARPGROUP_THREADS
from .products import convert, new_left_operand
from .workspace import read_piece, write_piece


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
        return make_role_products(
            self.config, self.dtype, (s_k, s_q), (s_do, self.columns), (s_ds, s_k), self.warpgroup
        )

    @cute.jit
    def head(self, products, memory: Memory, state: State, total, registers: tuple, blocks: tuple, run) -> State:
        """All steps of one query head."""
        _, operand, first_queries = registers
        first, unmasked, end = blocks
        memory.q_pipe.consumer_wait(state.q)
        scores = self.new_scores(products)
        self.issue_scores(products, scores, state.q.index)
        lse = self.statistics(memory, state)
        wgmma.wait_group(0)
        limits = query_limits(first_queries, first * self.config.tile_m)
        exponentiate(scores, lse, limits, run.scale_log2, masked=True)
        release_queries(memory.q_pipe, state.q)
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
            lse = self.statistics(memory, state)
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
            lse = self.statistics(memory, state)
            wgmma.wait_group(0)
        limits = query_limits(first_queries, block * self.config.tile_m)
        exponentiate(scores, lse, limits, run.scale_log2, masked=masked)
        release_queries(memory.q_pipe, state.q)
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
        return make_role_products(
            self.config, self.dtype, (s_v, s_do), (s_q, self.columns), (s_ds, s_k), self.warpgroup
        )

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
            release_queries(memory.q_pipe, state.q)
            wgmma.wait_group(0)
            memory.do_pipe.consumer_release(state.do)
            state.do.advance()
        else:
            wgmma.wait_group(0)
            release_queries(memory.q_pipe, state.q)
        state.q.advance()
        return State(state.q, state.do, state.parity ^ 1)

    @cute.jit
    def score_gradients(
        self, products: RoleProducts, memory: Memory, state: State, dp: cute.Tensor, operand: cute.Tensor
    ):
        """dSᵀ = Pᵀ (dPᵀ - delta) in 16 bit, in registers and in shared memory. P is taken as dV takes it: in 16 bit."""
        memory.q_pipe.consumer_wait(state.q)
        delta = self.statistics(memory, state)
        wait(RoleBarrier.PROBABILITIES, state.parity)
        p = new_left_operand(dp, self.dtype)
        read_piece(memory.p, words_of(p), state.parity)
        differentiate(dp, p, delta)
        convert(dp, self.dtype, target=operand)
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        write_scores(products.scores_first, operand, dp.layout, transposed(memory.ds)[None, None, state.parity], thread)
        cute.arch.fence_view_async_shared()
        arrive(RoleBarrier.GRADIENTS, state.parity)
        self.meet()

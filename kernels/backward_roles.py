"""The consumer warpgroups of the backward kernel for wide heads, where registers hold dK and dV of 64 keys only.

One warpgroup, ProbabilityRole, computes P and owns dV; the other, GradientRole, computes dS and owns dK. P passes
between them in 16 bit through two buffers. A step's dV and dK are issued in the next step, behind that one's S and dP,
so that pointwise work runs under them.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup as wgmma

from .args import BackwardRunTime
from .backward_role import Memory, Role, State, words_of
from .backward_role_products import RoleProducts, make_role_products
from .backward_scores import OwnKeys, bias_of, differentiate, exponentiate, pairs_of, query_limits, release_queries
from .barriers import sync_warpgroup
from .blocks import LEFT, NO_SIDE, Sides
from .products import convert, new_left_operand
from .workspace import read_piece, write_piece


@dataclass(frozen=True)
class ProbabilityRole(Role):
    """S and P, up to two steps ahead of the other role; dV."""

    warpgroup = 0
    scaled = False
    end_of_p = pipeline.PipelineUserType.Producer

    @property
    def columns(self):
        return self.config.head_dim_v

    def products(self, shared: tuple):
        s_k, _, s_q, s_do, *_ = shared
        return make_role_products(self.config, self.dtype, (s_k, s_q), (s_do, self.columns))

    @cute.jit
    def head(self, products, memory: Memory, state: State, total, operand, keys, blocks: tuple, run) -> State:
        """All steps of one query head."""
        first, unmasked, left, end = blocks
        common = (products, memory, total, operand, keys, run)
        state = self.step(state, *common, first, True, self.band.sides)
        for block in cutlass.range(first + 1, unmasked, unroll=1):
            state = self.step(state, *common, block, False, self.band.sides)
        begin = cutlass.max(first + 1, unmasked)
        for block in cutlass.range(begin, left, unroll=1):
            state = self.step(state, *common, block, False, NO_SIDE)
        if const_expr(self.band.left_bound):
            for block in cutlass.range(cutlass.max(begin, left), end, unroll=1):
                state = self.step(state, *common, block, False, LEFT)
        # dV of the last step
        memory.do_pipe.consumer_wait(state.do)
        self.issue_total(products, total, operand, state.do.index)
        wgmma.wait_group(0)
        memory.do_pipe.consumer_release(state.do)
        state.do.advance()
        return state

    @cute.jit
    def step(
        self,
        state: State,
        products: RoleProducts,
        memory: Memory,
        total: cute.Tensor,
        operand: cute.Tensor,
        keys: OwnKeys,
        run: BackwardRunTime,
        block: Int32,
        first: cutlass.Constexpr[bool],
        sides: cutlass.Constexpr[Sides],
    ) -> State:
        """P of ``block``, and dV of the step before it."""
        memory.q_pipe.consumer_wait(state.q)
        lse = self.statistics(memory, state.q)
        scores = self.issue_scores(products, state.q.index)
        if const_expr(first):
            wgmma.wait_group(0)
        else:
            memory.do_pipe.consumer_wait(state.do)
            self.issue_total(products, total, operand, state.do.index)
            wgmma.wait_group(1)
        release_queries(memory.q_pipe, state.q)
        state.q.advance()
        # Under dV
        first_query = block * self.config.tile_m
        limits = query_limits(keys.first_queries, first_query)
        bias = bias_of(self.hook, keys, first_query, scores, run)
        pairs = pairs_of(self.hook, keys, first_query, scores)
        factors = new_left_operand(scores, self.dtype) if const_expr(self.config.factors) else None
        exponentiate(scores, lse, limits, run, sides, self.band.width(run), self.hook, bias, pairs, factors)
        # dV in flight reads the operand's registers: until it is done they cannot take the next P
        memory.p_pipe.producer_acquire(state.p)
        if const_expr(not first):
            wgmma.wait_group(0)
            memory.do_pipe.consumer_release(state.do)
            state.do.advance()
        convert(scores, self.dtype, target=operand)
        # The other role needs P for dS only
        passed = operand if const_expr(factors is None) else factors
        write_piece(memory.p, words_of(passed), state.p.index, memory.thread)
        memory.p_pipe.producer_commit(state.p)
        state.p.advance()
        return state


@dataclass(frozen=True)
class GradientRole(Role):
    """dP and dS; dK."""

    warpgroup = 1
    scaled = True
    end_of_p = pipeline.PipelineUserType.Consumer

    @property
    def columns(self):
        return self.config.head_dim

    def products(self, shared: tuple):
        _, s_v, s_q, s_do, *_ = shared
        return make_role_products(self.config, self.dtype, (s_v, s_do), (s_q, self.columns))

    @cute.jit
    def head(self, products, memory: Memory, state: State, total, operand, keys, blocks: tuple, run) -> State:
        """All steps of one query head."""
        first, *_, end = blocks
        state = self.step(state, products, memory, total, operand, first=True)
        for _ in cutlass.range(first + 1, end, unroll=1):
            state = self.step(state, products, memory, total, operand, first=False)
        # dK of the last step
        self.issue_total(products, total, operand, state.q.index)
        wgmma.wait_group(0)
        release_queries(memory.q_pipe, state.q)
        state.q.advance()
        return state

    @cute.jit
    def step(
        self,
        state: State,
        products: RoleProducts,
        memory: Memory,
        total: cute.Tensor,
        operand: cute.Tensor,
        first: cutlass.Constexpr[bool],
    ) -> State:
        """dS of a step, and dK of the one before it. ``state.q`` stands at the step whose dK comes next."""
        memory.do_pipe.consumer_wait(state.do)
        dp = self.issue_scores(products, state.do.index)
        q_state = state.q.clone()
        if const_expr(not first):
            self.issue_total(products, total, operand, state.q.index)
            q_state.advance()
        memory.q_pipe.consumer_wait(q_state)
        delta = self.statistics(memory, q_state)
        memory.p_pipe.consumer_wait(state.p)
        p = new_left_operand(dp, self.dtype)
        read_piece(memory.p, words_of(p), state.p.index, memory.thread)
        memory.p_pipe.consumer_release(state.p)
        state.p.advance()
        if const_expr(first):
            wgmma.wait_group(0)
        else:
            wgmma.wait_group(1)
        memory.do_pipe.consumer_release(state.do)
        # Under dK: the barrier holds the wait for it behind this
        differentiate(dp, p, delta)
        state.do.advance()
        if const_expr(not first):
            sync_warpgroup(Int32(self.warpgroup))
            wgmma.wait_group(0)
            release_queries(memory.q_pipe, state.q)
        convert(dp, self.dtype, target=operand)
        return State(q_state, state.do, state.p)

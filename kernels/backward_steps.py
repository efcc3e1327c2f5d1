"""The two orders in which a consumer warpgroup of the backward kernel takes the products of a step.

A step has five products, each as long as the other's, and two chains of pointwise work: exponentials behind S, dS
behind dP. A warpgroup issues products where it has the registers for their results, and works while they run.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup as wgmma

from .args import BackwardRunTime
from .backward_consume import DELTA, LSE, BackwardConsumer, Keys, Memory, State, Tile
from .backward_products import BackwardProducts
from .backward_scores import release_queries
from .blocks import Sides


@dataclass(frozen=True)
class EarlySums(BackwardConsumer):
    """dQ of the step before beside dP and dV, under which dS is made; then S of the next step and dK, under which its
    exponentials are. Registers must hold dP, P and a piece of dQ beside dK and dV.
    """

    own_second_step = False  # a third copy of the step costs each 34 instructions more, for descriptors

    @cute.jit
    def step(
        self,
        products: BackwardProducts,
        memory: Memory,
        state: State,
        tile: Tile,
        block: Int32,
        warpgroup: Int32,
        run: BackwardRunTime,
        sides: cutlass.Constexpr[Sides],
        follows,
    ) -> State:
        """dV and dK of the step before ``block``; dQ of the one before that, if it ``follows`` one of its head; P of
        ``block``.
        """
        ds = self.gradients(products, memory, state, tile, warpgroup, follows)
        following = state.q.clone()
        following.advance()
        memory.q_pipe.consumer_wait(following)
        lse = self.statistics(memory, following, LSE)
        scores = self.issue_scores(products, following)
        self.issue_dk(products, state, tile, ds)
        wgmma.wait_group(1)
        memory.do_pipe.consumer_release(state.do)
        # Under dK
        self.probabilities(tile, scores, lse, block, run, sides)
        state.do.advance()
        # The wait on a barrier is a branch, which holds the wait for dK behind the exponentials
        memory.do_pipe.consumer_wait(state.do)
        wgmma.wait_group(0)
        release_queries(memory.q_pipe, state.q)
        state.ds.advance()
        return State(following, state.do, state.ds, state.parity ^ 1)

    @cute.jit
    def last_step(
        self,
        products: BackwardProducts,
        memory: Memory,
        state: State,
        tile: Tile,
        keys: Keys,
        warpgroup: Int32,
        follows: Boolean,
    ) -> State:
        """A head's last step, with its own dQ. ``follows``: it is not the only one."""
        ds = self.gradients(products, memory, state, tile, warpgroup, follows)
        self.release(keys.v_pipe, keys.v_state, keys)
        self.issue_dk(products, state, tile, ds)
        return self.last_dq(products, memory, state, tile, keys, warpgroup)

    @cute.jit
    def gradients(
        self, products: BackwardProducts, memory: Memory, state: State, tile: Tile, warpgroup: Int32, follows
    ):
        """dS of a step, and dQ of the one before, or of no step where none is; dV is left in flight."""
        delta = self.statistics(memory, state.q, DELTA)
        if follows:
            self.wait_scores(warpgroup, state.parity ^ 1)
        dp = self.issue_dp(products, state)
        dq = self.issue_dq_before(products, state)
        self.issue_dv(products, state, tile)
        wgmma.wait_group(2)
        ds = self.score_gradients(tile, dp, delta)
        self.write_scores(products, memory, state, ds, dp.layout, warpgroup)
        wgmma.wait_group(1)
        if follows:
            self.stage_dq(memory, dq, warpgroup)
        return ds


@dataclass(frozen=True)
class LateSums(BackwardConsumer):
    """dP and dV, under which dS is made; then dQ of the step before and dK, under which dQ leaves; then S of the next
    step. Where a piece of dQ and dP are not in registers together.
    """

    own_second_step = True

    @cute.jit
    def step(
        self,
        products: BackwardProducts,
        memory: Memory,
        state: State,
        tile: Tile,
        block: Int32,
        warpgroup: Int32,
        run: BackwardRunTime,
        sides: cutlass.Constexpr[Sides],
        follows,
    ) -> State:
        """dV and dK of the step before ``block``; dQ of the one before that, if it ``follows`` one of its head; P of
        ``block``.
        """
        ds = self.gradients(products, memory, state, tile, warpgroup, follows)
        dq = None
        following = state.q.clone()
        following.advance()
        if const_expr(follows):
            dq = self.issue_dq_before(products, state)
        self.issue_dk(products, state, tile, ds)
        # Before dQ is staged: behind that, even to look at the barrier would wait for the writes
        memory.q_pipe.consumer_wait(following)
        wgmma.wait_group(1)
        memory.do_pipe.consumer_release(state.do)
        if const_expr(follows):
            self.stage_dq(memory, dq, warpgroup)
        lse = self.statistics(memory, following, LSE)
        scores = self.issue_scores(products, following)
        wgmma.wait_group(0)
        self.probabilities(tile, scores, lse, block, run, sides)
        state.do.advance()
        memory.do_pipe.consumer_wait(state.do)
        release_queries(memory.q_pipe, state.q)
        state.ds.advance()
        return State(following, state.do, state.ds, state.parity ^ 1)

    @cute.jit
    def last_step(
        self,
        products: BackwardProducts,
        memory: Memory,
        state: State,
        tile: Tile,
        keys: Keys,
        warpgroup: Int32,
        follows: Boolean,
    ) -> State:
        """A head's last step, with its own dQ. ``follows``: it is not the only one."""
        ds = self.gradients(products, memory, state, tile, warpgroup, follows)
        self.release(keys.v_pipe, keys.v_state, keys)
        # Of no step, and not stored, if this is the only one: there are no branches around WGMMAs
        before = self.issue_dq_before(products, state)
        self.issue_dk(products, state, tile, ds)
        dq = self.issue_last_dq(products, state, tile, warpgroup) if const_expr(self.config.early_release) else None
        wgmma.wait_group(1 if dq is None else 2)
        if follows:
            self.stage_dq(memory, before, warpgroup)
        return self.last_dq(products, memory, state, tile, keys, warpgroup, dq)

    @cute.jit
    def gradients(
        self, products: BackwardProducts, memory: Memory, state: State, tile: Tile, warpgroup: Int32, follows
    ):
        """dS of a step; dV is left in flight."""
        delta = self.statistics(memory, state.q, DELTA)
        dp = self.issue_dp(products, state)
        self.issue_dv(products, state, tile)
        wgmma.wait_group(1)
        ds = self.score_gradients(tile, dp, delta)
        if follows:
            self.wait_scores(warpgroup, state.parity ^ 1)
        self.write_scores(products, memory, state, ds, dp.layout, warpgroup)
        return ds

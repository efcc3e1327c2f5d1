"""Named barriers and the order in which consumer warpgroups use the tensor cores."""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from .config import WARPGROUP_THREADS


class Barrier(IntEnum):
    """Hardware barrier ids. 0 is the barrier of the whole CTA; each name stands for one id per consumer warpgroup."""

    TURN = 1  # 1, 2, 3
    OUTPUT = 4  # 4, 5, 6
    VOTE = 7  # 7, 8, 9


class BackwardBarrier(IntEnum):
    """The same for the backward kernel."""

    SCORES = 1  # a warpgroup has written its part of dS: 1 to 4, one id per parity of the step and warpgroup
    SUMS_FREE = 5  # a warpgroup's shared memory for dQ has been read: 5, 6
    SUMS_FULL = 7  # ... holds a step's dQ: 7, 8


class WideBarrier(IntEnum):
    """Those of the backward kernel for wide heads without roles, beside SUMS_FREE and SUMS_FULL."""

    STEP = 1  # a warpgroup has written a step's dS and read the one before: 1 to 4, by parity of the step and warpgroup
    OWN = 9  # all threads of one warpgroup are here: 9, 10


@dataclass(frozen=True)
class Turns:
    """Ping-pong: a warpgroup issues its matrix products only in its turn, so one's softmax runs under the others'
    products.
    """

    warpgroups: int
    enabled: bool

    @cute.jit
    def open(self, warpgroup: Int32):
        """Give warpgroup 0 the first turn: the last one in the cycle arrives once for it."""
        if const_expr(self.enabled):
            if warpgroup == self.warpgroups - 1:
                cute.arch.barrier_arrive(barrier_id=int(Barrier.TURN), number_of_threads=2 * WARPGROUP_THREADS)

    @cute.jit
    def wait(self, warpgroup: Int32):
        if const_expr(self.enabled):
            cute.arch.barrier(barrier_id=int(Barrier.TURN) + warpgroup, number_of_threads=2 * WARPGROUP_THREADS)

    @cute.jit
    def give(self, warpgroup: Int32):
        """Hand the turn to the next warpgroup."""
        if const_expr(self.enabled):
            following = cutlass.select_(warpgroup == self.warpgroups - 1, Int32(0), warpgroup + 1)
            cute.arch.barrier_arrive(barrier_id=int(Barrier.TURN) + following, number_of_threads=2 * WARPGROUP_THREADS)

    @cute.jit
    def close(self, warpgroup: Int32):
        """Take the turn that is still given out, so that no barrier is left half full."""
        if const_expr(self.enabled):
            if warpgroup == 0:
                cute.arch.barrier(barrier_id=int(Barrier.TURN), number_of_threads=2 * WARPGROUP_THREADS)


@cute.jit
def sync_warpgroup(warpgroup: Int32):
    """All 128 threads of one consumer warpgroup meet."""
    cute.arch.barrier(barrier_id=int(Barrier.OUTPUT) + warpgroup, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def any_of_warpgroup(warpgroup: Int32, predicate: Boolean) -> Boolean:
    """Whether ``predicate`` holds in any of the 128 threads of one consumer warpgroup; all of them get the answer."""
    found = cute.arch.inline_ptx(
        "{ .reg .pred own, any; setp.ne.s32 own, {$r0}, 0; "
        "barrier.cta.red.or.pred any, {$r1}, {$r2}, own; selp.s32 {$w0}, 1, 0, any; }",
        write_only_types=[Int32],
        read_only_args=[Int32(predicate), int(Barrier.VOTE) + warpgroup, Int32(WARPGROUP_THREADS)],
    )
    # The vote changes nothing, but tells ptxas that a warp does not diverge here: else it would serialise WGMMAs whose
    # registers are written behind a branch on the answer.
    return cute.arch.vote_any_sync(found != 0)

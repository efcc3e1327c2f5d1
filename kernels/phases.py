"""What a warp is doing at each moment, for the timeline of profiling/timeline.py.

`begin` marks the moment at which a warp enters a phase; the phase lasts until the warp's next mark. The marks are
events of the DSL's in-kernel tracing (IKET): a normal compilation drops them, and the machine code is the same as
without them.
"""

from enum import Enum

from cutlass.cute.experimental import iket


class Phase(Enum):
    """At most 31: the trace keeps the number of a mark in the five lowest bits of its time stamp."""

    SETUP = "set up"
    # Producer warp
    TAKE_TILE = "take a tile"
    WAIT_FREE = "wait: stage free"
    LOAD_Q = "load Q"
    LOAD_K = "load K"
    LOAD_V = "load V"
    LOAD_DO = "load dO"
    # Store warps
    WAIT_SUMS = "wait: dQ"
    ADD_SUMS = "add dQ"
    # Consumer warps
    WAIT_TILE = "wait: tile"
    WAIT_Q = "wait: Q loaded"
    WAIT_K = "wait: K loaded"
    WAIT_TURN = "wait: turn"
    ISSUE_QK = "issue QKᵀ"
    WAIT_V = "wait: V loaded"
    ISSUE_PV = "issue PV"
    WAIT_QK = "wait: QKᵀ done"
    MASK = "mask"
    ROW_MAXIMUM = "row maximum"
    WAIT_PV = "wait: PV done"
    EXPONENTIALS = "exponentials"
    CATCH_UP = "catch up"
    EPILOGUE = "epilogue"
    EXIT = "exit"


def begin(phase: Phase):
    """Mark, once a warp, that it enters ``phase``."""
    iket.mark(phase.name)

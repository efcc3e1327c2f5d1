"""The one timer: interleaved rounds over several callables; kernel time by CUDA events or graph replay, and host time.

All callables of a comparison run in one process and take turns, so that a GPU that warms up or lowers its clock does so
for each of them. A clock is an object with ``seconds(launch, launches)``: CUDA events or the host's clock here, a fake
one in tests.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

GRAPH_LAUNCHES = 20
MIN_LAUNCHES, MAX_LAUNCHES = 3, 1000


class Launch(NamedTuple):
    """Something to time: ``call`` does the work ``repeats`` times; ``context()`` is entered around many calls."""

    call: Callable
    context: Callable = contextlib.nullcontext
    repeats: int = 1


class Timing(NamedTuple):
    """Seconds per piece of work, one value a round."""

    rounds: tuple

    @property
    def median(self):
        return statistics.median(self.rounds)

    @property
    def spread(self):
        """(slowest - fastest) / median of the rounds: differences between medians mean something beyond this."""
        return (max(self.rounds) - min(self.rounds)) / self.median


class EventClock:
    """GPU time between two CUDA events on the current stream, with all launches queued between them."""

    def __init__(self):
        import torch  # here, so that the statistics can be used and tested without a GPU's torch

        self.cuda = torch.cuda

    def seconds(self, launch, launches):
        start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        with launch.context():
            self.cuda.synchronize()
            start.record()
            for _ in range(launches):
                launch.call()
            end.record()
            self.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3


class HostClock:
    """Time that the host spends in the calls; ``synchronize`` empties the GPU's queue before the clock starts."""

    def __init__(self, synchronize):
        self.synchronize = synchronize

    def seconds(self, launch, launches):
        with launch.context():
            self.synchronize()
            start = time.perf_counter()
            for _ in range(launches):
                launch.call()
            passed = time.perf_counter() - start
            self.synchronize()
        return passed


def interleaved(launches, clock, *, rounds=7, seconds_per_round=0.04, warm_up=3):
    """Time each of ``launches`` (name -> Launch) in ``rounds`` turns; returns name -> Timing.

    Each is first called ``warm_up`` times untimed (compilation, caches), then twice timed to see how many launches fill
    ``seconds_per_round``. Every round runs all of them in an order of its own (:func:`turns`), and each runs half its
    launches untimed before the timed ones: near the power limit a GPU's clock follows what ran tens of milliseconds
    before. With a fixed order and no lead the kernel behind the matrix product measured 10 to 20 % slow on an H200.
    With the lead and shuffled orders one kernel, twice in a cell behind different ones, still differed by up to 9 %.
    """
    counts = {}
    for name, launch in launches.items():
        clock.seconds(launch, warm_up)
        counts[name] = launches_for(clock.seconds(launch, 2) / 2, seconds_per_round)
    values, names = {name: [] for name in launches}, list(launches)
    for order in itertools.islice(itertools.cycle(turns(len(names))), rounds):
        for name in (names[position] for position in order):
            launch = launches[name]
            clock.seconds(launch, max(1, counts[name] // 2))
            values[name].append(clock.seconds(launch, counts[name]) / (counts[name] * launch.repeats))
    return {name: Timing(tuple(seconds)) for name, seconds in values.items()}


def turns(count):
    """Orders of ``count`` things such that over all of them each stands right behind every other equally often.

    Balanced Latin squares (Williams 1949, "Experimental designs balanced for the estimation of residual effects of
    treatments"): the zigzag 0, 1, -1, 2, -2, ... shifted by each number; for an odd count each also backwards.
    """
    zigzag = [(step + 1) // 2 * (1 if step % 2 else -1) for step in range(count)]
    square = [[(position + shift) % count for position in zigzag] for shift in range(count)]
    if count % 2 == 0:
        return square
    return [order for row in square for order in (row, row[::-1])]


def launches_for(seconds_per_call, seconds_per_round):
    """How many calls fill a round, within MIN_LAUNCHES and MAX_LAUNCHES."""
    if seconds_per_call <= 0:
        return MAX_LAUNCHES
    return min(MAX_LAUNCHES, max(MIN_LAUNCHES, round(seconds_per_round / seconds_per_call)))


def graph(launch, repeats=GRAPH_LAUNCHES, stream=None):
    """``repeats`` launches captured as one CUDA graph: replaying is one host call, which hides no kernel time.

    They are captured on ``stream``, one that torch makes where it is None.
    """
    import torch

    with launch.context():
        launch.call()  # compiles and loads what capture must not
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            for _ in range(repeats):
                launch.call()

    def replay(kept=launch):
        """``kept`` is held, not called: the tensors that it holds are what the graph reads and writes."""
        captured.replay()

    return Launch(replay, repeats=repeats * launch.repeats)

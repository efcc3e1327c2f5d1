"""A simulation in which the kernels' own source runs on the CPU, to find faults of their protocols without a GPU.

Every warp is an agent, one runs at a time, and chance decides which goes on at each step that others could see. What
the hardware does on its own (TMA, WGMMA, bulk copies) happens later, in its legal order, as late as chance wills. So a
wait that is missing or too weak shows in some runs as a deadlock, a barrier that overflows, registers used in flight or
wrong values: whatever is not there yet is NaN. A seed fixes a whole run.

Not simulated: fences between proxies, bytes of transactions, the layout of registers. A warp's products read its own
rows of A only, so a barrier that is there for the other warps' rows of the same warpgroup is not missed.
"""

import random
import threading
from collections import Counter, deque

WARP_THREADS = 32
SPEEDS = (0.01, 0.05, 0.3, 1.0, 1.0, 5.0)  # how often an agent or a stream goes on, relative to others
# Of loads: where some are always slow, all else is done before they land, and faults elsewhere do not show
LOAD_SPEEDS = (SPEEDS, (1.0,), (5.0,))


class ProtocolError(Exception):
    """What the kernels must never do."""


class Abandoned(BaseException):
    """Ends the agents that are left behind an error; no ``except Exception`` may hold it."""


class Agent:
    """A warp, in a thread of its own that waits for its turns."""

    def __init__(self, simulation, cta, warp, body):
        self.simulation, self.cta, self.warp, self.body = simulation, cta, warp, body
        self.speed = simulation.chance.choice(SPEEDS)
        # A bulk copy first reads shared memory, then adds to global memory
        self.products, self.reads, self.sums = (Stream(simulation, kind) for kind in ("products", "reads", "sums"))
        self.ready, self.waits_for, self.done = None, "", False
        self.turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self.live, daemon=True)
        self.thread.start()

    @property
    def rows(self):
        """Of the 64 rows of its warpgroup, those that this warp holds."""
        return slice(16 * (self.warp % 4), 16 * (self.warp % 4) + 16)

    def live(self):
        self.turn.acquire()
        try:
            if self.simulation.error is None:
                self.body()
        except Abandoned:
            pass
        except Exception as error:
            self.simulation.error = self.simulation.error or error
        self.done = True
        self.simulation.turn.release()

    def can_go_on(self):
        return not self.done and (self.ready is None or self.ready())


class Stream:
    """What hardware does on its own, one thing behind the other: the WGMMA groups of a warp, its bulk copies, or
    ``once`` a TMA load, which others may overtake.
    """

    def __init__(self, simulation, kind, speeds=SPEEDS, once=False):
        self.simulation, self.kind, self.once, self.waiting = simulation, kind, once, deque()
        self.speed = simulation.chance.choice(speeds)
        simulation.streams.append(self)

    def proceed(self):
        if self.once:
            self.simulation.streams.remove(self)
        self.waiting.popleft()()


class Simulation:
    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.load_speeds = self.chance.choice(LOAD_SPEEDS)
        self.agents, self.streams, self.ctas = [], [], []
        self.turn, self.current, self.error = threading.Semaphore(0), None, None

    def load(self, land):
        """A TMA load under way; ``land`` ends it."""
        Stream(self, "load", self.load_speeds, once=True).waiting.append(land)

    def add_warp(self, cta, warp, body):
        self.agents.append(Agent(self, cta, warp, body))

    def point(self, ready=None, waits_for=""):
        """The running agent: a step that others could see, where they may go on first. ``ready``: what it needs."""
        agent = self.current
        if ready is None and self.chance.random() < 0.5:
            return
        agent.ready, agent.waits_for = ready, waits_for
        self.turn.release()
        agent.turn.acquire()
        if self.error is not None:
            raise Abandoned

    def run(self):
        """All agents to their ends; raises the first error."""
        while self.error is None and not all(agent.done for agent in self.agents):
            self.step()
        for agent in self.agents:
            while not agent.done:
                self.give_turn(agent)
            agent.thread.join()
        if self.error is not None:
            raise self.error
        for stream in list(self.streams):
            while stream.waiting:
                stream.proceed()
        for cta in self.ctas:
            cta.check_end()

    def step(self):
        agents = [agent for agent in self.agents if agent.can_go_on()]
        streams = [stream for stream in self.streams if stream.waiting]
        if not agents and not streams:
            stuck = "; ".join(f"{a.cta.index}.{a.warp}: {a.waits_for}" for a in self.agents if not a.done)
            self.error = ProtocolError(f"deadlock: {stuck}")
            return
        able = agents + streams
        (chosen,) = self.chance.choices(able, [each.speed for each in able])
        if isinstance(chosen, Agent):
            self.give_turn(chosen)
        else:
            chosen.proceed()

    def give_turn(self, agent):
        agent.ready, self.current = None, agent
        agent.turn.release()
        self.turn.acquire()

    def wait_until_left(self, stream, groups):
        """All but the last ``groups`` of a stream are done."""
        self.point()
        self.point(lambda: len(stream.waiting) <= groups, f"{stream.kind} done but {groups}")


def require(holds, message):
    if not holds:
        raise ProtocolError(message)


class Cta:
    """One CTA: its named barriers and its pipelines."""

    def __init__(self, simulation, index):
        self.simulation, self.index = simulation, index
        self.arrived, self.generation, self.sizes, self.pipes = {}, Counter(), {}, []
        simulation.ctas.append(self)

    def arrive(self, barrier, threads):
        """The current warp at a named barrier; returns the generation to which it belongs."""
        simulation = self.simulation
        simulation.point()
        warp, warps = simulation.current.warp, self.arrived.setdefault(barrier, set())
        require(warp not in warps, f"warp {warp} twice at barrier {barrier}")
        require(not warps or self.sizes[barrier] == threads, f"barrier {barrier} of two sizes")
        warps.add(warp)
        generation, self.sizes[barrier] = self.generation[barrier], threads
        if WARP_THREADS * len(warps) == threads:
            warps.clear()
            self.generation[barrier] += 1
        return generation

    def wait(self, barrier, threads):
        generation = self.arrive(barrier, threads)
        self.simulation.point(lambda: self.generation[barrier] > generation, f"barrier {barrier}")

    def check_end(self):
        """A barrier that is left half full makes the next use of the same shared memory wrong."""
        require(not any(self.arrived.values()), f"barriers left half full: {self.arrived}")
        for pipe in self.pipes:
            require(all(barrier.fresh for barrier in pipe.full + pipe.empty), f"{pipe.name} left half full")


class MemoryBarrier:
    """An mbarrier: its phase ends when all have arrived and all copies that they announced have landed."""

    def __init__(self, arrivals):
        self.arrivals = self.missing = arrivals
        self.phase, self.copies = 0, 0

    @property
    def fresh(self):
        return self.missing == self.arrivals and self.copies == 0

    def arrive(self, copies=0):
        require(self.missing > 0, "too many arrivals")
        self.missing -= 1
        self.land(-copies)

    def land(self, copies=1):
        self.copies -= copies
        if self.missing == 0 and self.copies == 0:
            self.phase, self.missing = self.phase ^ 1, self.arrivals

    def passed(self, parity):
        return self.phase != parity


class Pipe:
    """As cutlass.pipeline's: by TMA where a stage takes ``copies`` of them, else by arrivals alone. All of its
    ``writers`` and ``readers`` are warps.
    """

    def __init__(self, cta, name, stages, readers, copies=1, writers=1):
        self.simulation, self.name, self.copies = cta.simulation, name, copies
        self.full = [MemoryBarrier(writers) for _ in range(stages)]
        self.empty = [MemoryBarrier(readers) for _ in range(stages)]
        cta.pipes.append(self)

    def wait(self, barrier, state, what):
        phase = state.phase
        self.simulation.point(lambda: barrier.passed(phase), f"{self.name} {what}")

    def producer_acquire(self, state):
        self.wait(self.empty[state.index], state, "free")
        if self.copies:
            self.full[state.index].arrive(self.copies)

    def producer_get_barrier(self, state):
        return self.full[state.index]

    def producer_commit(self, state):
        if not self.copies:
            self.full[state.index].arrive()
        self.simulation.point()

    def consumer_wait(self, state):
        self.wait(self.full[state.index], state, "full")

    def consumer_release(self, state):
        self.simulation.point()
        self.empty[state.index].arrive()
        self.simulation.point()

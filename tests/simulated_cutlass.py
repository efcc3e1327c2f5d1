"""Stand-ins for cutlass on a simulation of simulated_dsl.py, and the kernels' modules that see them.

The modules are executed again for each simulation, under an import of their own: ``sys.modules`` stays as it is, and
other tests compile the real kernels in the same process.
"""

import builtins
import functools
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
from simulated_dsl import WARP_THREADS

KERNELS = Path(__file__).parents[1] / "kernels"


def smaller(a, b):
    return np.minimum(a, b) if isinstance(a, np.ndarray) else min(a, b)


class PipelineState:
    def __init__(self, stages, index, phase):
        self.stages, self.index, self.phase = stages, index, phase

    def clone(self):
        return PipelineState(self.stages, self.index, self.phase)

    def advance(self):
        self.index += 1
        if self.index == self.stages:
            self.index, self.phase = 0, self.phase ^ 1


class Unused:
    """Whatever the simulated code names but does not need: annotations, decorators, marks."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Unused()

    def __call__(self, *arguments, **options):
        return Unused()

    def __getitem__(self, place):
        return Unused()

    def __or__(self, other):
        return self


class StandIn(Unused):
    def __init__(self, **known):
        self.__dict__.update(known)


def identity(value, *_, **__):
    return value


def select(condition, true, false):
    return np.where(condition, true, false) if isinstance(condition, np.ndarray) else (true if condition else false)


def make_cutlass(simulation, cute):
    """The stand-in for cutlass. ``cute``: what its tensors need; the simulated memory is not this file's."""

    def agent():
        return simulation.current

    def atomic_add(pointer, value, **_):
        simulation.point()
        return pointer.add(value)

    def wait_copies(groups, read):
        simulation.wait_until_left(agent().reads, groups)
        if not read:
            simulation.wait_until_left(agent().sums, groups)

    arch = StandIn(
        thread_idx=lambda: (WARP_THREADS * agent().warp, 0, 0),
        warp_idx=lambda: agent().warp,
        lane_idx=lambda: 0,
        block_idx=lambda: (agent().cta.index, 0, 0),
        grid_dim=lambda: (len(simulation.ctas), 1, 1),
        make_warp_uniform=identity,
        shuffle_sync=identity,
        barrier=lambda barrier_id, number_of_threads: agent().cta.wait(barrier_id, number_of_threads),
        barrier_arrive=lambda barrier_id, number_of_threads: agent().cta.arrive(barrier_id, number_of_threads),
        atomic_add=atomic_add,
        cp_async_bulk_wait_group=wait_copies,
    )
    wgmma = StandIn(wait_group=lambda groups: simulation.wait_until_left(agent().products, groups))
    user = SimpleNamespace(Producer=1, Consumer=0)
    pipeline = StandIn(
        PipelineUserType=user, make_pipeline_state=lambda first_phase, stages: PipelineState(stages, 0, first_phase)
    )
    numbers = dict.fromkeys(("range", "range_constexpr"), lambda *bounds, **_: range(*bounds))
    cute = StandIn(jit=identity, kernel=identity, arch=arch, nvgpu=StandIn(warpgroup=wgmma), **cute)
    return StandIn(
        cute=cute, pipeline=pipeline, Int32=int, Float32=float, Boolean=bool, const_expr=identity, min=smaller, max=max,
        select_=select, **numbers,
    )  # fmt: skip


@functools.cache
def compiled(name, edits):
    source = (KERNELS / f"{name}.py").read_text()
    for old, new in edits:
        if source.count(old) != 1:
            raise ValueError(f"{name}.py holds {source.count(old)} times, not once: {old}")
        source = source.replace(old, new)
    return compile(source, str(KERNELS / f"{name}.py"), "exec")


class Kernels:
    """The modules of kernels/, as they are but for ``edits`` {module: ((old text, new text), ...)} and
    ``replacements`` {module: {name: value}} of what is below the protocols, such as the layout of tensors.
    """

    def __init__(self, cutlass, replacements, edits=()):
        self.cutlass, self.replacements, self.edits = cutlass, replacements, dict(edits)
        self.modules = {}

    def __getitem__(self, name):
        if name not in self.modules:
            module = self.modules[name] = ModuleType(f"simulated_{name}")
            module.__builtins__ = {**vars(builtins), "__import__": self.find}
            exec(compiled(name, self.edits.get(name, ())), module.__dict__)
            module.__dict__.update(self.replacements.get(name, {}))
        return self.modules[name]

    def find(self, name, variables=None, local=None, names=(), level=0):
        """As __import__: a package's root where no ``names`` are taken from it."""
        if level:
            return self[name] if name else SimpleNamespace(**{each: self[each] for each in names})
        root, *path = name.split(".")
        if root not in ("cutlass", "cuda"):
            return builtins.__import__(name, variables, local, names, level)
        return functools.reduce(getattr, path if names else (), self.cutlass)

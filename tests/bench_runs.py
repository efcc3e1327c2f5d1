"""Runs of the benchmark that need no GPU: small inputs on the CPU, and a clock by which every launch takes 1 ms."""

import io
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import bench
import environment
from progress import Progress
from timing import Launch


def cases_of(*words):
    options = bench.parser().parse_args(words)
    return bench.SUITES[options.suite[0]].cases(options)


def run_of(*words, peers=()):
    """A Bench without a GPU; what it says is in ``progress.stream``."""
    options = bench.parser().parse_args(words)
    return bench.Bench(options, peers, environment.Clocks(), Progress(1, io.StringIO()))


def small_tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 24, 2, 16, generator=generator).to(dtype) for _ in range(3))


class SmallInputs:
    def views(self, case):
        return small_tensors(torch.bfloat16)


class FakeClock:
    def seconds(self, launch, launches):
        launch.call()
        return 0.001 * launches


def on_a_cpu(monkeypatch, *words, peers):
    """A run that needs no GPU: fake clocks, and a ceiling that does nothing."""
    monkeypatch.setattr(bench, "EventClock", FakeClock)
    monkeypatch.setattr(bench, "HostClock", lambda synchronize: FakeClock())
    run = run_of("--rounds", "1", *words, peers=peers)
    run.ceiling = Launch(lambda: None)
    return run

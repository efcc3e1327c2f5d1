"""`make ablation`: what ping-pong and the overlap inside a warpgroup bring, each taken out of our kernel in turn.

All versions of a case have the tiles of the plan table and are timed in the rounds of one run, "full" twice: what the
two differ by is noise.
"""

import argparse
import statistics
import sys
import time
from typing import NamedTuple

import cost
import environment
import plots
import selection
import tables
import torch
from bench import AGREEMENT
from progress import Progress, say
from suites import apart, ours_kernel
from timing import EventClock, interleaved

from hopper_fa3 import plan as planning
from hopper_fa3.problem import Problem

CASES = "d128-causal,d128-dense,d64-dense,d64-causal"
VERSIONS = {
    "full": {"pingpong": True, "overlap": True},
    "no ping-pong": {"pingpong": False, "overlap": True},
    "no overlap": {"pingpong": True, "overlap": False},
    "neither": {"pingpong": False, "overlap": False},
}
AGAIN = "full again"
LOOKS = {
    "full": plots.STYLES["ours"],
    "no ping-pong": plots.Style("no ping-pong", "#2166ac", "", "", "//"),
    "no overlap": plots.Style("no overlap in a warpgroup", "#e08214", "", "", "xx"),
    "neither": plots.Style("neither", "#7f7f7f", "", "", ".."),
    AGAIN: plots.Style("full again: the noise", "#f4a582", "", "", ""),
}
NO_ROW = (
    "No version without warp specialisation: the kernel has no form in which the warps that compute also load, so "
    "there is nothing to time."
)
PAPER = (
    "The paper's own ablation (Shah et al., FlashAttention-3, 2024, table 2: H100, fp16, dense, batch 4, length 8448, "
    'heads 16, head_dim 128): full 661 TFLOP/s; without GEMM-softmax pipelining, which is "no overlap" here, 582 '
    "(0.88); with it but without warp specialisation 570 (0.86). Its section 3.1 gives ping-pong as 570 to 620–640 "
    "TFLOP/s (fp16, head_dim 128, length 8192)."
)


class Version(NamedTuple):
    """One version of one case."""

    case: str
    version: str
    in_use: bool  # the plan that the table chooses
    tile_m: int
    tile_n: int
    stages: int
    microseconds: float  # median of the rounds
    spread: float  # (slowest - fastest) / median
    teraflops: float
    slowest: float  # TFLOP/s of the slowest and of the fastest round
    fastest: float
    of_full: float  # speed in units of full's: the median over the rounds, each against full in the same round
    sm_clock: float | None  # MHz, median while the case was measured
    power: float | None  # W


def parser():
    root = argparse.ArgumentParser(prog="make ablation ARGS=...", description=__doc__.splitlines()[0])
    what = f"words as in {selection.FORM}, of which only d is needed, separated by commas (default: %(default)s)"
    root.add_argument("--case", "--cases", dest="cases", metavar="CASE,...", default=CASES, help=what)
    root.add_argument("--rounds", type=int, default=11)
    tables.output_options(root)
    return root


def plans(static):
    """``(version -> Plan, version -> why no kernel can be built)`` for a problem's static part."""
    chosen, refused = {}, {}
    table = planning.choose(static)
    for name, changes in VERSIONS.items():
        plan = table._replace(**changes)
        broken = planning.forward_config(static, plan).broken_rule()
        if broken is None:
            chosen[name] = plan
        else:
            refused[name] = broken
    return chosen, refused


class Candidate(NamedTuple):
    """A case with its compiled versions."""

    case: selection.Case
    table: planning.Plan
    plans: dict  # version -> Plan
    launches: dict  # version -> Launch


def compile_all(cases, progress):
    """All versions of all cases: compiling comes before timing, so that no pause cools the GPU between rounds."""
    found = []
    for case in cases:
        q, k, v = case.inputs("cuda")
        static = Problem.from_tensors(q, k, v, causal=case.causal).static
        chosen, refused = plans(static)
        for name, why in refused.items():
            progress.note(f"{selection.slug(case)} without {name}: {why}")
        launches = {}
        for name in VERSIONS:
            progress.begin(f"compiling {selection.slug(case)}, {name}")
            if name in chosen:
                launches[name] = ours_kernel(q, k, v, case.causal, plan=chosen[name])
            progress.end(f"compiled {selection.slug(case)}, {name}")
        found.append(Candidate(case, planning.choose(static), chosen, launches))
    return found


def disagreements(candidate):
    """version -> words, for versions whose output is not that of full: they must not be timed."""
    wrong = {}
    for name, launch in candidate.launches.items():
        found = apart(launch, candidate.launches["full"])
        if not found <= AGREEMENT:  # NaN included
            wrong[name] = (
                f"{selection.slug(candidate.case)}, {name}: differs from full by {found:.3g} of its largest value"
            )
    return wrong


def rows_of(candidate, times, clock):
    """The Versions of a case from its timings; ``clock`` is (MHz, W)."""
    rows = []
    for name, timing in times.items():
        plan = candidate.plans["full" if name == AGAIN else name]
        paired = zip(times["full"].rounds, timing.rounds, strict=True)
        rate = [cost.teraflops(candidate.case, one) for one in (timing.median, max(timing.rounds), min(timing.rounds))]
        ratio = statistics.median(full / mine for full, mine in paired)
        tiles = (plan.tile_m, plan.tile_n, plan.stages)
        used = plan == candidate.table and name != AGAIN
        what = (selection.slug(candidate.case), name, used, *tiles)
        rows.append(Version(*what, timing.median * 1e6, timing.spread, *rate, ratio, *clock))
    return rows


def measure(candidates, rounds, clocks, progress):
    """``(rows, what was wrong)`` of all cases that can be compared."""
    rows, wrong = [], []
    for candidate in candidates:
        name = selection.slug(candidate.case)
        progress.begin(f"timing {name}")
        if "full" not in candidate.launches:
            progress.end(f"{name}: nothing to compare with")
            continue
        differing = disagreements(candidate)
        wrong += differing.values()
        launches = {key: launch for key, launch in candidate.launches.items() if key not in differing}
        launches |= {AGAIN: candidate.launches["full"]}
        if "full" in differing:  # NaN
            progress.end(f"{name}: full is wrong")
            continue
        start = time.monotonic()
        times = interleaved(launches, EventClock(), rounds=rounds)
        found = rows_of(candidate, times, clocks.since(start))
        rows += found
        progress.end(f"{name}: " + ", ".join(f"{row.version} {row.teraflops:.0f}" for row in found) + " TFLOP/s")
    return rows, wrong


def noise(rows):
    """The largest difference of the two timings of full among the cases, as a share."""
    return max(abs(row.of_full - 1) for row in rows if row.version == AGAIN)


def markdown(rows):
    """The table, what its differences mean, and the paper's figures."""
    floor = noise(rows)
    head = ("case", "tiles", "version", "TFLOP/s", "spread", "of full", "difference", "SM MHz", "W")
    lines = []
    for row in rows:
        clock, power = ("" if value is None else f"{value:.0f}" for value in (row.sm_clock, row.power))
        version = f"{row.version} (in use)" if row.in_use else row.version
        tiles = f"{row.tile_m} × {row.tile_n}, {row.stages} stages"
        figures = (f"{row.teraflops:.0f}", f"{row.spread:.1%}", f"{row.of_full:.3f}", meaning(row, floor))
        lines.append((row.case, tiles, version, *figures, clock, power))
    text = [
        "### ablation, TFLOP/s",
        "",
        *tables.grid(head, lines),
        "",
        f"Noise: timed twice, full differed from itself by up to {floor:.1%}. A smaller difference means nothing.",
    ]
    return "\n".join([*text, "", NO_ROW, "", PAPER, ""])


def meaning(row, floor):
    if row.version == "full":
        return ""
    if row.version == AGAIN:
        return "noise"
    return "within noise" if abs(row.of_full - 1) <= floor else f"{row.of_full - 1:+.1%}"


def bars(rows, facts):
    """The figure: a group of bars a case, a bar a version, from its slowest to its fastest round."""
    names = list(dict.fromkeys(row.version for row in rows))
    groups = list(dict.fromkeys(row.case for row in rows))
    figure, axes = plots.canvas(size=(3 + 2.3 * len(groups), 5))
    axis, width = axes[0, 0], 0.84 / len(names)
    for i, name in enumerate(names):
        style, mine = LOOKS[name], [row for row in rows if row.version == name]
        places = [groups.index(row.case) + (i - (len(names) - 1) / 2) * width for row in mine]
        heights = [row.teraflops for row in mine]
        reach = [[row.teraflops - row.slowest for row in mine], [row.fastest - row.teraflops for row in mine]]
        look = {"color": style.color, "hatch": style.hatch, "edgecolor": "white", "capsize": 3}
        axis.bar(places, heights, width, yerr=reach, label="full" if name == "full" else style.label, **look)
        for place, row in zip(places, mine, strict=True):
            words = f"{row.teraflops:.0f}" if name == "full" else f"× {row.of_full:.3f}"
            axis.annotate(words, (place, row.fastest), (0, 5), textcoords="offset points", ha="center", va="bottom",
                          rotation=90, fontsize=8)  # fmt: skip
    axis.set_xticks(range(len(groups)), groups)
    axis.grid(False, axis="x")
    axis.set_ylabel("TFLOP/s: median, slowest and fastest round")
    axis.set_ylim(0, 1.2 * max(row.fastest for row in rows))
    plots.legend(figure, axes)
    plots.title(
        figure, f"Ablation of our forward: TFLOP/s of full, the others against it; noise {noise(rows):.1%}", facts
    )
    return figure


def main(words=None):
    options = parser().parse_args(words)
    if options.source:
        return tables.redraw("ablation", options, markdown, bars, Version)
    try:
        cases = [selection.case(word) for word in options.cases.split(",")]
    except ValueError as error:
        say(f"ablation: {error}")
        return 2
    folder = options.out or environment.RESULTS
    obstacle = environment.obstacle("ablation", folder)
    if obstacle:
        say(obstacle)
        return 2
    progress = Progress(len(cases) * (len(VERSIONS) + 1))
    with torch.no_grad(), environment.Clocks() as clocks:
        rows, wrong = measure(compile_all(cases, progress), options.rounds, clocks, progress)
    progress.close()
    for line in wrong:
        say(f"WRONG: {line}")
    if not rows:
        say("ablation: none of the cases could be measured")
        return 1
    facts = environment.describe({}, options.commit) | {"rounds": options.rounds}
    print(markdown(rows))
    stem = environment.stem("ablation", facts)
    for path in tables.write(folder, stem, facts, rows, markdown(rows)):
        say(f"wrote {path}")
    plots.draw(folder / f"{stem}.png", bars, rows, facts)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

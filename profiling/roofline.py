"""`make roofline`: where attention stands between a machine's memory and its matrix units, on a Hopper GPU.

Times standard attention, ours and the peers beside the matrix product in interleaved rounds of one run, and draws two
pictures: rate against arithmetic intensity under the measured roofs, and the ladder of generations against the matrix
product. Intensities are those of each algorithm (hopper_fa3/roofline.py), rates are measured. With --from nothing is
measured: the pictures and tables of a result file are made again.
"""

import argparse
import functools
import re
import sys
import time

import cost
import environment
import plots
import roofline_view as view
import selection
import tables
import torch
from bench import AGREEMENT, available, pace
from peers import PEERS, refusal
from peers import versions as peer_versions
from progress import say
from suites import OURS, Inputs, apart, ceiling_facts, ceiling_rates, ceilings, results
from timing import EventClock, Launch, interleaved

from hopper_fa3.info import hopper_missing

RIVALS = tuple(name for name in view.LADDER if name in PEERS)
CASES, SEQLENS = ("d128-causal", "d64-dense"), (1024, 4096, 8192)  # at 8192 the scores of 32 heads take 8 GiB


def parser():
    root = argparse.ArgumentParser(prog="make roofline ARGS=...", description=__doc__.splitlines()[0])
    root.add_argument(
        "--case",
        action="append",
        metavar="CASE",
        help=f"as {selection.FORM}; may come again (default: {', '.join(CASES)})",
    )
    root.add_argument(
        "--seqlens", default=",".join(map(str, SEQLENS)), metavar="S,...", help="where a case names none (%(default)s)"
    )
    root.add_argument("--peers", default=",".join(RIVALS), help="of %(default)s")
    root.add_argument("--rounds", type=int, default=7)
    root.add_argument("--budget", type=float, default=75, help="seconds: rounds get shorter, then cases are left out")
    tables.output_options(root)
    return root


def cases(options):
    """The Cases to measure; ValueError where a word is wrong."""
    found = []
    for text in options.case or CASES:
        if re.search(r"(^|-)s\d", text):
            found.append(selection.case(text))
        else:
            found += [selection.case(f"{text}-s{int(seqlen)}") for seqlen in options.seqlens.split(",")]
    return found


class Run:
    """One run: the peers, the points measured so far, and what was left out or wrong."""

    def __init__(self, options, names, clocks):
        self.options, self.clocks = options, clocks
        self.started = time.monotonic()
        self.points, self.disagreements, self.left_out = [], [], []
        self.peers, absent = available(names)
        self.left_out += [f"{name}: {why}" for name, why in absent]

    def without(self, name, why):
        if f"{name}: {why}" not in self.left_out:
            self.left_out.append(f"{name}: {why}")
            say(f"without {name}: {why}")

    def left(self):
        return self.options.budget - (time.monotonic() - self.started)

    def launches(self, case, tensors):
        """name -> Launch of ours and of the peers that take these inputs; outputs that differ are remembered."""
        found = {"ours": OURS.kernel(*tensors)}
        for peer in self.peers:
            why = peer.refuses(*tensors) or refusal(Launch(functools.partial(tried, peer, tensors)))
            if why:
                self.without(f"{peer.name} at {selection.slug(case)}", why)
                continue
            found[peer.name] = peer.kernel(*tensors)
            difference = apart(found["ours"], found[peer.name])
            if not difference <= AGREEMENT:  # NaN included
                self.disagreements.append(f"{selection.slug(case)}: ours differs from {peer.name} by {difference:.3g}")
        return found

    def measure(self, case, inputs, product, cases_left):
        """Time one case with the matrix product among them."""
        tensors = (*inputs.views(case), case.causal)
        launches = self.launches(case, tensors) | {"matmul": product}
        seconds = pace(self.left(), cases_left, len(launches), self.options.rounds)
        start = time.monotonic()
        times = interleaved(launches, EventClock(), rounds=self.options.rounds, seconds_per_round=seconds)
        clock = self.clocks.since(start)
        for name, timing in times.items():
            self.points.append(point(case, name, timing, clock))
        rates = ", ".join(f"{one.name} {one.teraflops:.0f}" for one in self.points[-len(times) :])
        say(f"{selection.slug(case)}: {rates} TFLOP/s ({time.monotonic() - self.started:.0f} s)")

    def everything(self, wanted):
        """All cases; returns the measured roofs."""
        roofs = ceilings()
        times = interleaved(roofs, EventClock(), rounds=self.options.rounds)
        inputs = Inputs(wanted)
        for number, case in enumerate(wanted):
            if number and self.left() < 0:  # the first case is measured in any case
                self.without(selection.slug(case), f"the budget of {self.options.budget:.0f} s is spent")
                continue
            self.measure(case, inputs, roofs["matmul"], len(wanted) - number)
        return ceiling_facts(times)


def tried(peer, tensors):
    """Makes the peer's launch and runs it once: either may say that it does not take these inputs."""
    return results(peer.kernel(*tensors))


def point(case, name, timing, clock):
    seconds = timing.median
    rate = ceiling_rates(name, seconds)[0] if name == "matmul" else cost.teraflops(case, seconds)
    shape = (case.head_dim, case.head_dim_v, case.seqlen_q, case.causal, case.batch, case.heads, case.heads_k)
    return view.Point("kernel", name, *shape, case.dtype, seconds * 1e6, timing.spread, rate, *clock)


def main(words=None):
    options = parser().parse_args(words)
    if options.source:
        return redraw(options)
    names = [name for name in options.peers.split(",") if name]
    folder = options.out or environment.RESULTS
    complaint = wrong(options, names) or needs_a_gpu() or environment.unwritable(folder)
    if complaint:
        say(complaint)
        return 2
    with torch.no_grad(), environment.Clocks() as clocks:
        run = Run(options, names, clocks)
        roofs = run.everything(cases(options))
    facts = environment.describe(peer_versions(), options.commit) | roofs | {"rounds": options.rounds}
    facts["left out"] = "; ".join(run.left_out) or "nothing"
    document = folder / f"{environment.stem('roofline', facts)}.json"
    tables.write_json(document, facts, run.points)
    present(run.points, facts, document)
    for line in run.disagreements:
        say(f"WRONG: {line}")
    return 1 if run.disagreements else 0


def wrong(options, names):
    """What is wrong with the options, or None."""
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        return f"roofline knows the peers {', '.join(RIVALS)}, got {', '.join(unknown)}"
    try:
        cases(options)
    except ValueError as error:
        return str(error)
    return None


def needs_a_gpu():
    missing = hopper_missing()
    return missing and f"roofline needs an sm_90 GPU (H100, H200): {missing}; --from FILE.json draws without one"


def redraw(options):
    """Tables and pictures of a result file, again."""
    found = tables.reopened("roofline", options, view.Point, needed=("matmul_tflops", "copy_tb_per_s"))
    if found is None:
        return 2
    facts, points, folder = found
    present(points, facts, folder / options.source.name)
    return 0


def present(points, facts, document):
    """The table to stdout; CSV, Markdown and both pictures beside the JSON file ``document``."""
    found = view.records(points, facts)
    print(view.markdown(found))
    for path in view.write_tables(document, facts, found):
        say(f"wrote {path}")
    plots.draw(document.with_suffix(".png"), view.roofline, points, facts)
    ladder = document.with_name(document.name.replace("roofline", "ladder", 1)).with_suffix(".png")
    plots.draw(ladder, view.ladder, points, facts)


if __name__ == "__main__":
    sys.exit(main())

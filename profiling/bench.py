"""`make bench`: our attention beside PyTorch's backends, FlashAttention-4 and the machine's ceilings, on random data.

Four suites: the forward, the backward, training (a forward and its backward in one launch) and decoding (one query a
head). Every cell (head dim, length, mask) times all of them in interleaved rounds. ``--others`` adds cells beside the
grid: other head dims, grouped heads, for the forward fp16 (suites.OTHERS, BACKWARD_OTHERS). Kinds of rows: "kernel"
(events over many launches of the shortest way to each kernel), "public" (the same through the functions that people
call), "autograd" (the same for torch.autograd.grad over a kept graph), "deterministic" (that with gradients that are
bit-equal each time), "training" (forward, then torch.autograd.grad), "graph" (replayed launches, for short problems
whose host time would hide the kernel) and "host" (the time that a warm call spends on the host).
"""

import argparse
import sys
import time

import environment
import plots
import tables
import torch
from peers import PEERS, REFUSALS, refusal
from peers import versions as peer_versions
from progress import Progress, say
from selection import TOKENS, WIDTH
from suites import OURS, SUITES, Inputs, apart, ceiling_facts, ceiling_rates, ceilings, other_cases, shapes
from timing import EventClock, HostClock, Launch, interleaved

from hopper_fa3.kernels.config import SHORT_DTYPES

HOST_SECONDS = 0.005
LONGEST_ROUND, SHORTEST_ROUND = 0.04, 0.004  # seconds a callable gets in one round
AGREEMENT = 0.02  # of the largest output: two bf16 kernels differ by their rounding, far less than this
COMPARED = "deterministic"  # of this kind outputs are compared as well as of a suite's first
UNBOUND = ("public", COMPARED)  # kinds without the ceiling: it shares their rounds in the suite's first kind
SHAPES = ("head_dims", "seqlens", "causal", "tokens", "width", "group", "others")  # options that decoding does not take


def numbers(text):
    return [int(word) for word in text.split(",")]


def words(text):
    return list(dict.fromkeys(text.split(",")))


def parser():
    root = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__.splitlines()[0])
    root.add_argument(
        "--suite",
        type=words,
        default=["forward"],
        metavar="NAME,...",
        help=f"of {', '.join(SUITES)}; backward,training: both in each cell of the first (default: forward)",
    )
    own = "(default: the suite's own)"
    root.add_argument("--head-dims", type=numbers, metavar="D,...", help=own)
    root.add_argument("--seqlens", type=numbers, metavar="S,...", help=own)
    root.add_argument("--causal", choices=("both", "yes", "no"), default="both")
    root.add_argument("--tokens", type=int, default=TOKENS, help="batch * length (default: %(default)s)")
    root.add_argument("--width", type=int, default=WIDTH, help="heads * head_dim (default: %(default)s)")
    root.add_argument("--group", type=int, default=1, help="query heads per K/V head (default: %(default)s)")
    root.add_argument(
        "--others",
        type=words,
        nargs="?",
        const=[],
        metavar="CASE,...",
        help="after the grid also these, as in d192_128-s4096-h16, each dense and causal; without words the suite's: "
        "other head dims, 32/4 heads, for the forward fp16",
    )
    root.add_argument(
        "--deterministic", action="store_true", help="also gradients that are bit-equal each time (backward)"
    )
    root.add_argument("--peers", default=",".join(PEERS), help="of %(default)s")
    root.add_argument("--rounds", type=int, default=7)
    root.add_argument("--graph", action="store_true", help="also replay CUDA graphs of the first suite's short cells")
    root.add_argument("--host", action="store_true", help="also time the host side of warm calls (first suite)")
    root.add_argument("--budget", type=float, default=270, help="seconds: rounds get shorter, then cells are left out")
    tables.output_options(root)
    return root


def wrong(options):
    """What is wrong with the options, or None."""
    for what, names, known in (("peers", words(options.peers), PEERS), ("suites", options.suite, SUITES)):
        unknown = set(names) - set(known) - ({""} if known is PEERS else set())
        if unknown:
            return f"bench knows the {what} {', '.join(known)}, got {', '.join(sorted(unknown))}"
    if options.rounds < 1:
        return "bench needs --rounds of at least 1"
    suites = [SUITES[name] for name in options.suite]
    if options.deterministic and not suites[0].deterministic:
        return f"only the backward suite has deterministic gradients of its own, got --suite {suites[0].name}"
    if all(suite.shapes for suite in suites):
        return wrong_shapes(options)
    set_here = [name for name in SHAPES if getattr(options, name) != parser().get_default(name)]
    if len(suites) > 1 or set_here:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in set_here) or f"--suite {','.join(options.suite)}"
        return f"the decode suite has shapes of its own, got {given}"
    return None


def wrong_shapes(options):
    head_dims, seqlens, _ = shapes(options)
    if min(options.group, *head_dims, *seqlens) < 1:
        return "bench needs --group, --head-dims and --seqlens of at least 1"
    if options.tokens < max(seqlens) or options.width < options.group * max(head_dims):
        return (
            "bench needs --tokens for the longest of --seqlens, --width for --group heads of the largest of --head-dims"
        )
    try:
        other_cases(options)
    except ValueError as error:
        return f"bench --others: {error}"
    return None


def pace(seconds_left, cells_left, callables, rounds):
    """Seconds of one callable in one round such that the remaining cells fit.

    The timer's lead adds half to a round; warming up takes three rounds' worth.
    """
    share = seconds_left / max(1, cells_left) / (callables * (1.5 * rounds + 3))
    return min(LONGEST_ROUND, max(SHORTEST_ROUND, share))


class Bench:
    """One run: what is compared, the clock samples, and the rows measured so far."""

    def __init__(self, options, peers, clocks, progress):
        self.options, self.clocks, self.progress = options, clocks, progress
        self.suites, self.entrants = [SUITES[name] for name in options.suite], [OURS, *peers]
        self.suite = self.suites[0]  # the others take part in its cells
        self.started = time.monotonic()
        self.rows, self.disagreements = [], []
        self.fresh = 0  # rows before the last cell's
        self.others = frozenset(other_cases(options))
        self.refusals = {}  # (entrant, why) -> None: said once, in order
        self.ceiling = None

    def left(self):
        return self.options.budget - (time.monotonic() - self.started)

    def ceilings(self):
        """Time both ceilings; that of the suite then also takes part in every cell."""
        launches = ceilings()
        times = interleaved(launches, EventClock(), rounds=self.options.rounds)
        self.ceiling = launches[self.suite.ceiling]
        return ceiling_facts(times)

    def made(self, entrant, tensors, make, what=""):
        """``make(entrant, tensors)``, kind -> Launch, each called once; {} where the entrant does not take these
        inputs, which is said with its reason (and of ``what``).

        From ours only "not built yet" is a reason: all else is a fault and is raised.
        """
        found = {}

        def attempt():
            found.update(make(entrant, tensors))
            for one in found.values():
                with one.context():
                    one.call()

        errors = NotImplementedError if entrant is OURS else REFUSALS
        why = entrant.refuses(*tensors) or refusal(Launch(attempt), errors)
        name = entrant.name + what
        if why and (name, why) not in self.refusals:
            self.refusals[name, why] = None
            self.progress.note(f"  where it does not run, without {name}: {why}")
        return {} if why else found

    def cell(self, case, inputs, cells_left, suite=None):
        """Measure one case in every kind of row of a suite (of the first where none is named)."""
        suite, self.fresh = suite or self.suite, len(self.rows)
        launches = self.launches(suite, case, (*inputs.views(case), case.causal))
        if not launches:
            return
        kinds = list(dict.fromkeys(kind for kind, _ in launches))
        launches = {key: launches[key] for kind in kinds for key in launches if key[0] == kind}
        for kind in (kinds[0], COMPARED):
            wrong = self.compare(case, kind, {name: one for (made, name), one in launches.items() if made == kind})
            launches = {key: one for key, one in launches.items() if key[1] not in wrong}
        launches |= {(kind, suite.ceiling): self.ceiling for kind in kinds if kind not in UNBOUND}
        seconds = pace(self.left(), cells_left, len(launches), self.options.rounds)
        start = time.monotonic()
        times = interleaved(launches, EventClock(), rounds=self.options.rounds, seconds_per_round=seconds)
        self.record(suite, case, times, self.clocks.since(start))

    def launches(self, suite, case, tensors):
        """(kind, name) -> Launch: all that shares a cell's rounds."""
        found = {}
        for entrant in self.entrants:
            mine = self.made(entrant, tensors, suite.kinds)
            if mine and self.replays(suite, case):
                mine |= self.made(entrant, tensors, lambda *asked: {"graph": suite.replay(*asked)}, ", graph")
            if mine and self.options.deterministic and suite.deterministic and entrant.deterministic:
                mine |= self.made(entrant, tensors, suite.deterministic, ", deterministic")
            found |= {(kind, entrant.name): one for kind, one in mine.items()}
        return found

    def replays(self, suite, case):
        asked = self.options.graph and suite is self.suite
        return asked and (suite.replayed is None or case.seqlen_k in suite.replayed)

    def compare(self, case, kind, launches):
        """The peers whose outputs are wrong, which are left out and named: a fast wrong kernel must not look like a
        result. Wrong is who differs from ours where no more do than agree with it; else the case is remembered.
        """
        others = [name for name in launches if name != "ours"] if "ours" in launches else []
        found = {name: apart(launches["ours"], launches[name]) for name in others}
        wrong = {name: f"{value:.3g} of its largest value" for name, value in found.items() if not value <= AGREEMENT}
        if len(others) - len(wrong) < len(wrong):
            self.disagreements += [f"{case.name}, {kind}: ours differs from {name} by {wrong[name]}" for name in wrong]
            return ()
        right = ", ".join(name for name in others if name not in wrong)
        for name, apart_by in wrong.items():
            why = f"wrong in {case.name}, {kind}: {apart_by} from ours, which is that of {right}"
            self.refusals[name, why] = None
            self.progress.note(f"  without {name}, {why}")
        return tuple(wrong)

    def record(self, suite, case, times, clock):
        for (kind, name), timing in times.items():
            seconds = timing.median
            rates = ceiling_rates(name, seconds) if name == suite.ceiling else suite.rates(case, seconds)
            flops, bandwidth = (None, None) if kind == "host" else rates
            *shape, head_dim_v, dtype = tables.Cell.of(kind, case)
            figures = (seconds * 1e6, timing.spread, flops, *clock, bandwidth)
            self.rows.append(tables.Row(*shape, name, *figures, head_dim_v, dtype, case in self.others))

    def host(self, inputs):
        """Host time of warm calls on a small problem, in the first suite."""
        case = self.suite.host_case
        tensors = (*inputs.views(case), case.causal)
        launches = {}
        for entrant in self.entrants:
            found = self.made(entrant, tensors, lambda *asked: {"host": self.suite.host(*asked)}, ", host")
            launches |= {(kind, entrant.name): one for kind, one in found.items()}
        clock = HostClock(torch.cuda.synchronize)
        times = interleaved(launches, clock, rounds=self.options.rounds, seconds_per_round=HOST_SECONDS, warm_up=20)
        self.record(self.suite, case, times, (None, None))

    def measured(self, case):
        """A case's rows of the kind that the last cell measured first, in words."""
        shape, rows = tables.Cell.of("", case)[1:], self.rows[self.fresh :]
        found = [cell for key, cell in tables.cells(rows).items() if key.kind != "host" and key[1:] == shape]
        return f"{label(case)}: {tables.summary(found[0]) if found else 'nothing runs here'}"


def label(case):
    """A cell as progress names it."""
    if case.seqlen_q == 1:
        return f"D {case.head_dim} batch {case.batch} length {case.seqlen_k}"
    heads = "" if case.heads == case.heads_k else f" heads {tables.heads(case)}"
    dtype = "" if case.dtype == "bfloat16" else f" {SHORT_DTYPES[case.dtype]}"
    return f"D {tables.dims(case)}{heads} length {case.seqlen_k} {tables.mask(case)}{dtype}"


def measure(bench, cases):
    """All cells, then the host rows; returns the ceilings."""
    progress = bench.progress
    progress.note("measuring the ceilings: an 8192 x 8192 bf16 matrix product and a device-to-device copy")
    found = bench.ceilings()
    progress.note(f"  {found['matmul_tflops']} TFLOP/s, {found['copy_tb_per_s']} TB/s")
    inputs = Inputs([*cases, bench.suite.host_case])
    if bench.options.host:
        bench.host(inputs)
    cells = [(case, suite) for case in cases for suite in bench.suites]
    for number, (case, suite) in enumerate(cells, 1):
        left = len(cells) - number + 1
        if number > 1 and bench.left() < 0:
            progress.note(f"budget of {bench.options.budget:.0f} s is spent: {left} cells are left out")
            break
        named = "" if suite is bench.suite else f"{suite.name} "
        progress.begin(f"{named}{label(case)}")
        bench.cell(case, inputs, left, suite)
        progress.end(f"{named}{bench.measured(case)}")
    progress.close()
    return found


def available(names):
    """The peers that can run here, and (name, why) of the others, which is also said."""
    chosen, absent = [], {}
    for name in names:
        why = PEERS[name].missing()
        if why is None:
            chosen.append(PEERS[name])
        else:
            absent[name, why] = None
            say(f"without {name}: {why}")
    return chosen, absent


def facts_of(options, found, left_out):
    """All that must stand beside the figures."""
    facts = environment.describe(peer_versions(), options.commit) | found
    facts |= {"suite": ",".join(options.suite), "rounds": options.rounds}
    if SUITES[options.suite[0]].shapes:
        facts |= {"tokens": options.tokens, "width": options.width, "group": options.group}
    if options.others is not None:
        facts["others"] = ", ".join(shapes(options).others)
    return facts | {"left out": "; ".join(f"{name}: {why}" for name, why in left_out) or "nothing"}


def main(arguments=None):
    options = parser().parse_args(arguments)
    if options.source:
        return tables.redraw("bench", options, tables.markdown, plots.rates)
    folder = options.out or environment.RESULTS
    complaint = wrong(options) or environment.obstacle("bench", folder)
    if complaint:
        say(complaint)
        return 2
    peers, absent = available([name for name in words(options.peers) if name])
    cases = SUITES[options.suite[0]].cases(options)
    with torch.no_grad(), environment.Clocks() as clocks:
        bench = Bench(options, peers, clocks, Progress(len(cases) * len(options.suite)))
        found = measure(bench, cases)
    if not any(row.kind != "host" for row in bench.rows):
        say("bench: neither ours nor a peer runs any of these cases")
        return 1
    facts = facts_of(options, found, [*absent, *bench.refusals])
    print(tables.markdown(bench.rows))
    stem = environment.stem(options.suite[0], facts)
    for path in tables.write(folder, stem, facts, bench.rows):
        say(f"wrote {path}")
    plots.draw(folder / f"{stem}.png", plots.rates, bench.rows, facts)
    for line in bench.disagreements:
        say(f"WRONG: {line}")
    return 1 if bench.disagreements else 0


if __name__ == "__main__":
    sys.exit(main())

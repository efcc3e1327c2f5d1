"""`make bench`: our attention beside PyTorch's backends, FlashAttention-4 and the machine's ceilings, on random data.

Suites: the forward, the backward, training (a forward and its backward in one launch) and decoding (one query a head);
with their gradients also sliding windows, packed sequences, and scores changed by a softcap, a sink or ALiBi slopes
(suites_windows.py, suites_packed.py, suites_scores.py), beside ours without them (suites.Yardstick). Every cell (head
dim, length, mask) times all of them in interleaved rounds. ``--others`` adds cells beside the grid: other head dims,
grouped heads, for the forward fp16 (suites.OTHERS, BACKWARD_OTHERS). Kinds of rows: "kernel" (events over many launches
of the shortest way to each kernel), "public" (the same through the functions that people call), "autograd" (the same
for torch.autograd.grad over a kept graph), "deterministic" (that with gradients that are bit-equal each time),
"training" (forward, then torch.autograd.grad), "graph" (replayed launches, for short problems whose host time would
hide the kernel; "autograd graph" for gradients beside forwards) and "host" (the time that a warm call spends on the
host).
"""

import argparse
import math
import sys
import time

import environment
import plots
import plots_features
import suites
import tables
import torch
from peers import PEERS, REFUSALS, refusal
from peers import versions as peer_versions
from progress import Progress, say
from selection import TOKENS, WIDTH
from suites import OURS, Inputs, apart, ceiling_facts, ceiling_rates, ceilings, other_cases, plain, shapes
from suites_packed import PACKED
from suites_scores import SCORES
from suites_windows import WINDOWS
from timing import EventClock, HostClock, Launch, interleaved

from hopper_fa3.kernels.config import SHORT_DTYPES

SUITES = suites.SUITES | {suite.name: suite for suite in (WINDOWS, PACKED, SCORES)}
HOST_SECONDS = 0.005
LONGEST_ROUND, SHORTEST_ROUND = 0.04, 0.004  # seconds a callable gets in one round, where --round sets no others
AGREEMENT = 0.02  # of the largest output: two bf16 kernels differ by their rounding, far less than this
COMPARED = "deterministic"  # of this kind outputs are compared as well as of a suite's first
UNBOUND = ("public", COMPARED)  # kinds without the ceiling: it shares their rounds in the suite's first kind
SHAPES = (
    "head_dims",
    "seqlens",
    "causal",
    "tokens",
    "width",
    "group",
    "others",
)  # options that suites with cases of their own do not take


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
    root.add_argument(
        "--round",
        type=float,
        default=LONGEST_ROUND,
        metavar="SECONDS",
        help="that each gets in a round at most, as --budget allows (default: %(default)s). From 0.25 on each has "
        "its own clock and power: in short rounds a softcap looked up to 8 %% faster beside plain scores than it is",
    )
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
    if not SHORTEST_ROUND <= options.round < math.inf:
        return f"bench needs --round of at least {SHORTEST_ROUND} s"
    chosen = [SUITES[name] for name in options.suite]
    if options.deterministic and not chosen[0].deterministic:
        return f"only the backward suite has deterministic gradients of its own, got --suite {chosen[0].name}"
    special = next((suite for suite in chosen if suite.shapes is None), None)
    if special is None:
        return wrong_shapes(options)
    if options.head_dims and min(options.head_dims) < 1:
        return "bench needs --head-dims of at least 1"
    set_here = [name for name in SHAPES if getattr(options, name) != parser().get_default(name)]
    set_here = [name for name in set_here if name not in special.takes]
    if len(chosen) > 1 or set_here:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in set_here) or f"--suite {','.join(options.suite)}"
        return f"the {special.name} suite has shapes of its own, got {given}"
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


def pace(seconds_left, cells_left, callables, rounds, longest=LONGEST_ROUND):
    """Seconds of one callable in one round such that the remaining cells fit, ``longest`` at most.

    The timer's lead adds half to a round; warming up takes three rounds' worth.
    """
    share = seconds_left / max(1, cells_left) / (callables * (1.5 * rounds + 3))
    return min(longest, max(SHORTEST_ROUND, share))


class Bench:
    """One run: what is compared, the clock samples, and the rows measured so far."""

    def __init__(self, options, peers, clocks, progress):
        self.options, self.clocks, self.progress = options, clocks, progress
        self.suites = [one for name in options.suite for one in (SUITES[name], *SUITES[name].also)]
        self.suite = self.suites[0]  # the others take part in its cells
        self.entrants = [self.suite.ours, *peers]
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

        From ours and its yardsticks only "not built yet" is a reason: all else is a fault and is raised.
        """
        found = {}

        def attempt():
            found.update(make(entrant, tensors))
            for one in found.values():
                with one.context():
                    one.call()

        errors = NotImplementedError if entrant.name.startswith(OURS.name) else REFUSALS
        why = entrant.refuses(*tensors) or refusal(Launch(attempt), errors)
        name = entrant.name + what
        if why and (name, why) not in self.refusals:
            self.refusals[name, why] = None
            self.progress.note(f"  where it does not run, without {name}: {why}")
        return {} if why else found

    def cell(self, case, inputs, cells_left, suite=None):
        """Measure one case in every kind of row of a suite (of the first where none is named)."""
        suite, self.fresh = suite or self.suite, len(self.rows)
        launches = self.launches(suite, case, suite.arguments(inputs, case))
        if not launches:
            return
        kinds = list(dict.fromkeys(kind for kind, _ in launches))
        launches = {key: launches[key] for kind in kinds for key in launches if key[0] == kind}
        own = self.yardsticks(suite, case, inputs) if (kinds[0], "ours") in launches else {}
        for kind in (kinds[0], COMPARED):
            wrong = self.compare(case, kind, {name: one for (made, name), one in launches.items() if made == kind})
            launches = {key: one for key, one in launches.items() if key[1] not in wrong}
        launches |= own
        launches |= {(kind, suite.ceiling): self.ceiling for kind in kinds if kind not in UNBOUND or kind == kinds[0]}
        seconds = pace(self.left(), cells_left, len(launches), self.options.rounds, self.options.round)
        start = time.monotonic()
        times = interleaved(launches, EventClock(), rounds=self.options.rounds, seconds_per_round=seconds)
        self.record(suite, case, times, self.clocks.since(start))

    def launches(self, suite, case, tensors):
        """(kind, name) -> Launch: all that shares a cell's rounds."""
        found = {}
        for entrant in self.entrants:
            mine = self.made(entrant, tensors, suite.kinds)
            if mine and self.replays(suite, case):
                mine |= self.made(entrant, tensors, suite.replays, f", {suite.graph_kind}")
            if mine and self.options.deterministic and suite.deterministic and entrant.deterministic:
                mine |= self.made(entrant, tensors, suite.deterministic, ", deterministic")
            found |= {(kind, entrant.name): one for kind, one in mine.items()}
        return found

    def yardsticks(self, suite, case, inputs):
        """(kind, name) -> Launch of ours in the cases that it is measured by. Their results are other ones."""
        found = {}
        for name, of in suite.yardsticks:
            made = self.made(OURS._replace(name=name), plain(inputs, of(case)), suite.kinds)
            found |= {(kind, name): one for kind, one in list(made.items())[:1]}
        return found

    def replays(self, suite, case):
        return self.options.graph and suite in (self.suite, *self.suite.also) and suite.replayed(case)

    def compare(self, case, kind, launches):
        """The peers whose outputs are wrong, which are left out and named: a fast wrong kernel must not look like a
        result. Wrong is who differs from ours where no more do than agree with it; else the case is remembered.
        """
        others = [name for name in launches if name != "ours"] if "ours" in launches else []
        found = {name: apart(launches["ours"], launches[name]) for name in others}
        wrong = {name: f"{value:.3g} of its largest value" for name, value in found.items() if not value <= AGREEMENT}
        if len(others) - len(wrong) < len(wrong):
            where = f"{self.name(case)}, {kind}"
            self.disagreements += [f"{where}: ours differs from {name} by {wrong[name]}" for name in wrong]
            return ()
        right = ", ".join(name for name in others if name not in wrong)
        for name, apart_by in wrong.items():
            why = f"wrong in {self.name(case)}, {kind}: {apart_by} from ours, which is that of {right}"
            self.refusals[name, why] = None
            self.progress.note(f"  without {name}, {why}")
        return tuple(wrong)

    def name(self, case):
        feature = self.suite.feature(case)
        return f"{case.name}-{feature.replace(' ', '-')}" if feature else case.name

    def record(self, suite, case, times, clock):
        counted = {OURS.name: case} | {name: of(case) for name, of in suite.yardsticks}
        for (kind, name), timing in times.items():
            seconds = timing.median
            counts = counted.get(name, case)
            rates = ceiling_rates(name, seconds) if name == suite.ceiling else suite.rates(counts, seconds)
            flops, bandwidth = (None, None) if kind == "host" else rates
            *shape, head_dim_v, dtype, feature = tables.Cell.of(kind, case, suite.feature(case))
            figures = (seconds * 1e6, timing.spread, flops, *clock, bandwidth)
            work = suite.work(counts) if name in counted and kind != "host" else None
            also = (case in self.others, feature, work)
            self.rows.append(tables.Row(*shape, name, *figures, head_dim_v, dtype, *also))

    def host(self, inputs):
        """Host time of warm calls on a small problem, in the first suite."""
        case = self.suite.host_case
        tensors = self.suite.arguments(inputs, case)
        launches = {}
        for entrant in self.entrants:
            found = self.made(entrant, tensors, lambda *asked: {"host": self.suite.host(*asked)}, ", host")
            launches |= {(kind, entrant.name): one for kind, one in found.items()}
        clock = HostClock(torch.cuda.synchronize)
        times = interleaved(launches, clock, rounds=self.options.rounds, seconds_per_round=HOST_SECONDS, warm_up=20)
        self.record(self.suite, case, times, (None, None))

    def label(self, case):
        return " ".join(word for word in (label(case), self.suite.feature(case)) if word)

    def measured(self, case):
        """A case's rows of the kind that the last cell measured first, in words."""
        shape, rows = tables.Cell.of("", case, self.suite.feature(case))[1:], self.rows[self.fresh :]
        found = [cell for key, cell in tables.cells(rows).items() if key.kind != "host" and key[1:] == shape]
        return f"{self.label(case)}: {tables.summary(found[0]) if found else 'nothing runs here'}"


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
    own = [of(case) for suite in bench.suites for _, of in suite.yardsticks for case in cases]
    inputs = Inputs([*cases, *own, bench.suite.host_case])
    if bench.options.host:
        bench.host(inputs)
    cells = [(case, suite) for case in cases for suite in bench.suites]
    for number, (case, suite) in enumerate(cells, 1):
        left = len(cells) - number + 1
        if number > 1 and bench.left() < 0:
            progress.note(f"budget of {bench.options.budget:.0f} s is spent: {left} cells are left out")
            break
        named = "" if suite is bench.suite else f"{suite.name} "
        progress.begin(f"{named}{bench.label(case)}")
        bench.cell(case, inputs, left, suite)
        progress.end(f"{named}{bench.measured(case)}")
    progress.close()
    return found


def available(names, known):
    """The peers (name -> Peer) that can run here, and (name, why) of the others, which is also said."""
    chosen, absent = [], {}
    for name in names:
        why = known[name].missing()
        if why is None:
            chosen.append(known[name])
        else:
            absent[name, why] = None
            say(f"without {name}: {why}")
    return chosen, absent


def facts_of(options, found, left_out):
    """All that must stand beside the figures."""
    facts = environment.describe(peer_versions(), options.commit) | found
    suite = SUITES[options.suite[0]]
    facts |= {"suite": ",".join(options.suite), "rounds": options.rounds, "seconds a round, at most": options.round}
    facts |= dict(suite.facts)
    if suite.shapes:
        facts |= {"tokens": options.tokens, "width": options.width, "group": options.group}
    if options.others is not None:
        facts["others"] = ", ".join(shapes(options).others)
    return facts | {"left out": "; ".join(f"{name}: {why}" for name, why in left_out) or "nothing"}


def picture(rows, facts):
    return (plots_features.bars if any(row.feature for row in rows) else plots.rates)(rows, facts)


def part(options):
    """What a file's name says of a run that took a part of a suite's own cases, so that the parts lie side by side."""
    if SUITES[options.suite[0]].shapes or not options.head_dims:
        return ""
    return "-d" + "_".join(map(str, options.head_dims))


def main(arguments=None):
    options = parser().parse_args(arguments)
    if options.source:
        return tables.redraw("bench", options, tables.markdown, picture)
    folder = options.out or environment.RESULTS
    complaint = wrong(options) or environment.obstacle("bench", folder)
    if complaint:
        say(complaint)
        return 2
    suite = SUITES[options.suite[0]]
    peers, absent = available([name for name in words(options.peers) if name], suite.peers)
    cases = suite.cases(options)
    with torch.no_grad(), environment.Clocks() as clocks:
        bench = Bench(options, peers, clocks, Progress(len(cases) * (len(options.suite) + len(suite.also))))
        found = measure(bench, cases)
    if not any(row.kind != "host" for row in bench.rows):
        say("bench: neither ours nor a peer runs any of these cases")
        return 1
    facts = facts_of(options, found, [*absent, *bench.refusals])
    print(tables.markdown(bench.rows))
    stem = environment.stem(suite.name + part(options), facts)
    for path in tables.write(folder, stem, facts, bench.rows):
        say(f"wrote {path}")
    plots.draw(folder / f"{stem}.png", picture, bench.rows, facts)
    for line in bench.disagreements:
        say(f"WRONG: {line}")
    return 1 if bench.disagreements else 0


if __name__ == "__main__":
    sys.exit(main())

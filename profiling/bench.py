"""`make bench`: our attention beside PyTorch's backends, FlashAttention-4 and the machine's ceilings, on random data.

Three suites: the forward, the backward, and decoding (one query a head). Every cell (head dim, length, mask) times all
of them in interleaved rounds. ``--others`` adds cells beside the grid: head dims 80, 96, 192 and 192/128, grouped
heads and fp16 (suites.OTHERS). Kinds of rows: "kernel" (events over many launches of the shortest way to each kernel),
"public" (the same through the functions that people call), "autograd" (the same for torch.autograd.grad over a kept
graph), "graph" (replayed launches, for short problems whose host time would hide the kernel) and "host" (the time that
a warm call spends on the host).
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
from suites import OTHERS, OURS, SHORT, SUITES, Inputs, apart, ceiling_facts, ceiling_rates, ceilings, other_cases
from timing import EventClock, HostClock, Launch, interleaved

from hopper_fa3.kernels.config import SHORT_DTYPES

HOST_SECONDS = 0.005
LONGEST_ROUND, SHORTEST_ROUND = 0.04, 0.004  # seconds a callable gets in one round
AGREEMENT = 0.02  # of the largest output: two bf16 kernels differ by their rounding, far less than this
SHAPES = ("head_dims", "seqlens", "causal", "tokens", "width", "group", "others")  # options that decoding does not take


def numbers(text):
    return [int(word) for word in text.split(",")]


def parser():
    root = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__.splitlines()[0])
    root.add_argument("--suite", choices=SUITES, default="forward")
    root.add_argument("--head-dims", type=numbers, default=[64, 128, 256], metavar="D,...")
    root.add_argument("--seqlens", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384], metavar="S,...")
    root.add_argument("--causal", choices=("both", "yes", "no"), default="both")
    root.add_argument("--tokens", type=int, default=TOKENS, help="batch * length (default: %(default)s)")
    root.add_argument("--width", type=int, default=WIDTH, help="heads * head_dim (default: %(default)s)")
    root.add_argument("--group", type=int, default=1, help="query heads per K/V head (default: %(default)s)")
    root.add_argument(
        "--others",
        action="store_true",
        help="after the grid also: head dims 80, 96, 192 and 192/128, 32/4 heads, and head_dim 128 in fp16",
    )
    root.add_argument("--peers", default=",".join(PEERS), help="of %(default)s")
    root.add_argument("--rounds", type=int, default=7)
    root.add_argument("--graph", action="store_true", help=f"also replay CUDA graphs: lengths {SHORT}, all of decode")
    root.add_argument("--host", action="store_true", help="also time the host side of warm calls")
    root.add_argument("--budget", type=float, default=270, help="seconds: rounds get shorter, then cells are left out")
    tables.output_options(root)
    return root


def wrong(options):
    """What is wrong with the options, or None."""
    unknown = set(options.peers.split(",")) - set(PEERS) - {""}
    if unknown:
        return f"bench knows the peers {', '.join(PEERS)}, got {', '.join(sorted(unknown))}"
    set_here = [name for name in SHAPES if getattr(options, name) != parser().get_default(name)]
    if options.suite == "decode" and set_here:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in set_here)
        return f"the decode suite has shapes of its own, got {words}"
    if min(options.rounds, options.group, *options.head_dims, *options.seqlens) < 1:
        return "bench needs --rounds, --group, --head-dims and --seqlens of at least 1"
    if options.tokens < max(options.seqlens) or options.width < options.group * max(options.head_dims):
        return (
            "bench needs --tokens for the longest of --seqlens, --width for --group heads of the largest of --head-dims"
        )
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
        self.suite, self.entrants = SUITES[options.suite], [OURS, *peers]
        self.started = time.monotonic()
        self.rows, self.disagreements = [], []
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

    def cell(self, case, inputs, cells_left):
        """Measure one case in every kind of row."""
        tensors = (*inputs.views(case), case.causal)
        launches = {}  # all kinds share the rounds: (kind, name) -> Launch
        for entrant in self.entrants:
            found = self.made(entrant, tensors, self.suite.kinds)
            if found and self.replays(case):
                found |= self.made(entrant, tensors, lambda *asked: {"graph": self.suite.replay(*asked)}, ", graph")
            launches |= {(kind, entrant.name): one for kind, one in found.items()}
        if not launches:
            return
        kinds = list(dict.fromkeys(kind for kind, _ in launches))
        launches = {key: launches[key] for kind in kinds for key in launches if key[0] == kind}
        self.compare(case, {name: one for (kind, name), one in launches.items() if kind == kinds[0]})
        launches |= {(kind, self.suite.ceiling): self.ceiling for kind in kinds if kind != "public"}
        seconds = pace(self.left(), cells_left, len(launches), self.options.rounds)
        start = time.monotonic()
        times = interleaved(launches, EventClock(), rounds=self.options.rounds, seconds_per_round=seconds)
        self.record(case, times, self.clocks.since(start))

    def replays(self, case):
        lengths = self.suite.replayed
        return self.options.graph and (lengths is None or case.seqlen_k in lengths)

    def compare(self, case, launches):
        """Remember a case whose outputs differ: a fast wrong kernel must not look like a result."""
        others = [name for name in launches if name != "ours"]
        if "ours" not in launches or not others:
            return
        found = apart(launches["ours"], launches[others[0]])
        if not found <= AGREEMENT:  # NaN included
            self.disagreements.append(f"{case.name}: ours differs from {others[0]} by {found:.3g} of its largest value")

    def record(self, case, times, clock):
        for (kind, name), timing in times.items():
            seconds = timing.median
            rates = ceiling_rates(name, seconds) if name == self.suite.ceiling else self.suite.rates(case, seconds)
            flops, bandwidth = (None, None) if kind == "host" else rates
            *shape, head_dim_v, dtype = tables.Cell.of(kind, case)
            figures = (seconds * 1e6, timing.spread, flops, *clock, bandwidth)
            self.rows.append(tables.Row(*shape, name, *figures, head_dim_v, dtype, case in self.others))

    def host(self, inputs):
        """Host time of warm calls on a small problem."""
        case = self.suite.host_case
        tensors = (*inputs.views(case), case.causal)
        launches = {}
        for entrant in self.entrants:
            found = self.made(entrant, tensors, lambda *asked: {"host": self.suite.host(*asked)}, ", host")
            launches |= {(kind, entrant.name): one for kind, one in found.items()}
        clock = HostClock(torch.cuda.synchronize)
        times = interleaved(launches, clock, rounds=self.options.rounds, seconds_per_round=HOST_SECONDS, warm_up=20)
        self.record(case, times, (None, None))

    def measured(self, case):
        """A case's rows of the suite's first kind, in words."""
        shape = tables.Cell.of("", case)[1:]
        found = [cell for key, cell in tables.cells(self.rows).items() if key.kind != "host" and key[1:] == shape]
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
    for number, case in enumerate(cases, 1):
        left = len(cases) - number + 1
        if number > 1 and bench.left() < 0:
            progress.note(f"budget of {bench.options.budget:.0f} s is spent: {left} cells are left out")
            break
        progress.begin(label(case))
        bench.cell(case, inputs, left)
        progress.end(bench.measured(case))
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
    facts |= {"suite": options.suite, "rounds": options.rounds}
    if options.suite != "decode":
        facts |= {"tokens": options.tokens, "width": options.width, "group": options.group}
    if options.others:
        facts["others"] = ", ".join(OTHERS)
    return facts | {"left out": "; ".join(f"{name}: {why}" for name, why in left_out) or "nothing"}


def main(words=None):
    options = parser().parse_args(words)
    if options.source:
        return tables.redraw("bench", options, tables.markdown, plots.rates)
    folder = options.out or environment.RESULTS
    complaint = wrong(options) or environment.obstacle("bench", folder)
    if complaint:
        say(complaint)
        return 2
    peers, absent = available([name for name in options.peers.split(",") if name])
    cases = SUITES[options.suite].cases(options)
    with torch.no_grad(), environment.Clocks() as clocks:
        bench = Bench(options, peers, clocks, Progress(len(cases)))
        found = measure(bench, cases)
    if not any(row.kind != "host" for row in bench.rows):
        say("bench: neither ours nor a peer runs any of these cases")
        return 1
    facts = facts_of(options, found, [*absent, *bench.refusals])
    print(tables.markdown(bench.rows))
    stem = environment.stem(options.suite, facts)
    for path in tables.write(folder, stem, facts, bench.rows):
        say(f"wrote {path}")
    plots.draw(folder / f"{stem}.png", plots.rates, bench.rows, facts)
    for line in bench.disagreements:
        say(f"WRONG: {line}")
    return 1 if bench.disagreements else 0


if __name__ == "__main__":
    sys.exit(main())

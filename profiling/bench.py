"""`make bench`: our forward beside PyTorch's backends, FlashAttention-4 and the machine's ceilings, on random data.

Every cell (head dim, length, mask) times all of them in interleaved rounds. Four kinds of rows: "kernel" (events over
many launches of the shortest way to each kernel), "public" (the same through the functions that people call), "graph"
(replayed launches, for short problems whose host time would hide the kernel) and "host" (the time that a warm public
call spends on the host).
"""

import argparse
import sys
import time
from pathlib import Path

import cost
import environment
import tables
import torch
from peers import PEERS, refusal
from peers import versions as peer_versions
from timing import EventClock, HostClock, Launch, graph, interleaved

from hopper_fa3 import flash_attn_func, launch
from hopper_fa3.info import hopper_missing
from hopper_fa3.problem import Problem

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from cases import Case  # noqa: E402  (the same cases as the tests: found by the line above)

GRAPH_SEQLENS = (512, 1024)
HOST_CASE = Case(1, 128, 128, 16, 16, 128, 128)  # small: the GPU is done long before the host
HOST_SECONDS = 0.005
LONGEST_ROUND, SHORTEST_ROUND = 0.04, 0.004  # seconds a callable gets in one round
AGREEMENT = 0.02  # of the largest output: two bf16 kernels differ by their rounding, far less than this


def numbers(text):
    return [int(word) for word in text.split(",")]


def parser():
    root = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__.splitlines()[0])
    root.add_argument("--head-dims", type=numbers, default=[64, 128, 256], metavar="D,...")
    root.add_argument("--seqlens", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384], metavar="S,...")
    root.add_argument("--causal", choices=("both", "yes", "no"), default="both")
    root.add_argument("--tokens", type=int, default=16384, help="batch * length (default: %(default)s)")
    root.add_argument("--width", type=int, default=2048, help="heads * head_dim (default: %(default)s)")
    root.add_argument("--group", type=int, default=1, help="query heads per K/V head (default: %(default)s)")
    root.add_argument("--peers", default=",".join(PEERS), help="of %(default)s")
    root.add_argument("--rounds", type=int, default=7)
    root.add_argument("--graph", action="store_true", help=f"also replay CUDA graphs, at lengths {GRAPH_SEQLENS}")
    root.add_argument("--host", action="store_true", help="also time the host side of warm public calls")
    root.add_argument("--budget", type=float, default=270, help="seconds: rounds get shorter, then cells are left out")
    root.add_argument("--out", type=Path, default=ROOT / "profiling" / "results", help="folder of the result files")
    root.add_argument("--commit", help="recorded where this is no git checkout")
    return root


def say(text):
    print(text, file=sys.stderr, flush=True)


def grid(options):
    """The cases in the order they are measured."""
    masks = {"both": (False, True), "yes": (True,), "no": (False,)}[options.causal]
    return [
        Case(options.tokens // seqlen, seqlen, seqlen, heads := options.width // head_dim, heads // options.group,
             head_dim, head_dim, causal=causal)
        for head_dim in options.head_dims for causal in masks for seqlen in options.seqlens
    ]  # fmt: skip


def pace(seconds_left, cells_left, callables, rounds):
    """Seconds of one callable in one round such that the remaining cells fit.

    The timer's lead adds half to a round; warming up takes three rounds' worth.
    """
    share = seconds_left / max(1, cells_left) / (callables * (1.5 * rounds + 3))
    return min(LONGEST_ROUND, max(SHORTEST_ROUND, share))


def ours_kernel(q, k, v, causal):
    """The launch alone, into an output allocated once: validation, planning and the lookup happened before."""
    recipe = launch.prepare(Problem.from_tensors(q, k, v, causal=causal), q, k, v)
    out = torch.empty_like(recipe.out)
    return Launch(lambda: launch.execute(recipe, q, k, v, out)[0])


def ours_public(q, k, v, causal):
    return Launch(lambda: flash_attn_func(q, k, v, causal=causal))


class Inputs:
    """Random q, k, v of any case, as views of three buffers drawn once: drawing takes longer than timing."""

    def __init__(self, cases):
        generator = torch.Generator("cuda").manual_seed(0)
        sizes = [max(self.sizes(case)[i] for case in cases) for i in range(3)]
        self.buffers = [torch.randn(size, device="cuda", generator=generator).bfloat16() for size in sizes]

    @staticmethod
    def sizes(case):
        queries, keys = case.batch * case.seqlen_q * case.heads, case.batch * case.seqlen_k * case.heads_k
        return queries * case.head_dim, keys * case.head_dim, keys * case.head_dim_v

    def views(self, case):
        shapes = (
            (case.batch, case.seqlen_q, case.heads, case.head_dim),
            (case.batch, case.seqlen_k, case.heads_k, case.head_dim),
            (case.batch, case.seqlen_k, case.heads_k, case.head_dim_v),
        )
        sized = zip(self.buffers, self.sizes(case), shapes, strict=True)
        return tuple(buffer[:size].view(shape) for buffer, size, shape in sized)


def ceilings():
    """Launches of the matrix product and the copy."""
    size = cost.MATMUL_SIZE
    left, right = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    product = torch.empty(size, size, device="cuda", dtype=torch.bfloat16)
    source, target = (torch.empty(cost.COPY_BYTES, device="cuda", dtype=torch.uint8) for _ in range(2))
    return {
        "matmul": Launch(lambda: torch.matmul(left, right, out=product)),
        "copy": Launch(lambda: target.copy_(source)),
    }


def available(names):
    """The peers that can run here, saying why the others cannot."""
    chosen = []
    for name in names:
        why = PEERS[name].missing()
        if why is None:
            chosen.append(PEERS[name])
        else:
            say(f"without {name}: {why}")
    return chosen


class Bench:
    """One run: what is compared, the clock samples, and the rows measured so far."""

    def __init__(self, options, peers, clocks):
        self.options, self.peers, self.clocks = options, peers, clocks
        self.started = time.monotonic()
        self.rows, self.disagreements = [], []
        self.refusals = set()  # (peer, why): said once
        self.matmul = None

    def left(self):
        return self.options.budget - (time.monotonic() - self.started)

    def ceilings(self):
        """Time both ceilings; the matrix product then also takes part in every cell."""
        launches = ceilings()
        times = interleaved(launches, EventClock(), rounds=self.options.rounds)
        self.matmul = launches["matmul"]
        return {
            "matmul_tflops": round(cost.matmul_flops() / times["matmul"].median * 1e-12, 1),
            "copy_tb_per_s": round(cost.copy_traffic() / times["copy"].median * 1e-12, 3),
        }

    def cell(self, case, inputs, cells_left):
        """Measure one case in every kind of row; returns what to say about it."""
        tensors = (*inputs.views(case), case.causal)
        peers = [peer for peer in self.peers if self.takes(peer, tensors)]
        kernels = {"ours": ours_kernel(*tensors)} | {peer.name: peer.kernel(*tensors) for peer in peers}
        self.compare(case, kernels)
        public = {"ours": ours_public(*tensors)}
        public |= {peer.name: peer.public(*tensors) for peer in peers if peer.public is not peer.kernel}
        groups = {"kernel": kernels, "public": public}
        if self.options.graph and case.seqlen_q in GRAPH_SEQLENS:
            groups["graph"] = {name: graph(one) for name, one in kernels.items()}
        # All kinds share the rounds too: (kind, name) -> Launch
        launches = {(kind, name): one for kind, group in groups.items() for name, one in group.items()}
        launches |= {(kind, "matmul"): self.matmul for kind in groups if kind != "public"}
        seconds = pace(self.left(), cells_left, len(launches), self.options.rounds)
        start = time.monotonic()
        times = interleaved(launches, EventClock(), rounds=self.options.rounds, seconds_per_round=seconds)
        self.record(case, times, self.clocks.since(start))

    def takes(self, peer, tensors):
        why = peer.refuses(*tensors) or refusal(peer.kernel(*tensors))
        if why and (peer.name, why) not in self.refusals:
            self.refusals.add((peer.name, why))
            say(f"  where it does not run, without {peer.name}: {why}")
        return not why

    def compare(self, case, kernels):
        """Remember a case whose outputs differ: a fast wrong kernel must not look like a result."""
        others = [name for name in kernels if name != "ours"]
        if not others:
            return
        ours, theirs = kernels["ours"].call().float(), kernels[others[0]].call().float()
        apart = (ours - theirs).abs().max().item() / theirs.abs().max().item()
        if not apart <= AGREEMENT:  # NaN included
            self.disagreements.append(f"{case.name}: ours differs from {others[0]} by {apart:.3g} of its largest value")

    def record(self, case, times, clock):
        for (kind, name), timing in times.items():
            seconds = timing.median
            if kind == "host":
                rate = None
            elif name == "matmul":
                rate = cost.matmul_flops() / seconds * 1e-12
            else:
                rate = cost.teraflops(case, seconds)
            shape = (case.head_dim, case.seqlen_q, case.causal, case.batch, case.heads, case.heads_k)
            self.rows.append(tables.Row(kind, *shape, name, seconds * 1e6, timing.spread, rate, *clock))

    def host(self, inputs):
        """Host time of warm public calls on a small problem."""
        tensors = (*inputs.views(HOST_CASE), HOST_CASE.causal)
        launches = {("host", "ours"): ours_public(*tensors)}
        launches |= {("host", peer.name): peer.public(*tensors) for peer in self.peers if self.takes(peer, tensors)}
        clock = HostClock(torch.cuda.synchronize)
        times = interleaved(launches, clock, rounds=self.options.rounds, seconds_per_round=HOST_SECONDS, warm_up=20)
        self.record(HOST_CASE, times, (None, None))


def progress(bench, case, number, total):
    cell = tables.cells(bench.rows)[("kernel", case.head_dim, case.seqlen_q, case.causal)]
    ratios = ((name, tables.speed_ratio(cell, name)) for name in tables.RATIOS)
    shares = ", ".join(f"{share:.2f} x {name}" for name, share in ratios if share is not None)
    mask = "causal" if case.causal else "dense"
    spent = time.monotonic() - bench.started
    say(
        f"[{number}/{total}] D {case.head_dim} length {case.seqlen_q} {mask}: "
        f"ours {cell['ours'].teraflops:.0f} TFLOP/s, {shares} ({spent:.0f} s)"
    )


def measure(bench, cases):
    """All cells, then the host rows; returns the ceilings."""
    say("measuring the ceilings: an 8192 x 8192 bf16 matrix product and a device-to-device copy")
    found = bench.ceilings()
    say(f"  {found['matmul_tflops']} TFLOP/s, {found['copy_tb_per_s']} TB/s")
    inputs = Inputs([*cases, HOST_CASE])
    if bench.options.host:
        bench.host(inputs)
    for number, case in enumerate(cases, 1):
        if bench.left() < 0:
            say(f"budget of {bench.options.budget:.0f} s is spent: {len(cases) - number + 1} cells are left out")
            break
        bench.cell(case, inputs, len(cases) - number + 1)
        progress(bench, case, number, len(cases))
    return found


def main(words=None):
    options = parser().parse_args(words)
    unknown = set(options.peers.split(",")) - set(PEERS) - {""}
    if unknown:
        say(f"bench knows the peers {', '.join(PEERS)}, got {', '.join(sorted(unknown))}")
        return 2
    missing = hopper_missing()
    if missing:
        say(f"bench needs an sm_90 GPU (H100, H200): {missing}")
        return 2
    peers = available([name for name in options.peers.split(",") if name])
    with torch.no_grad(), environment.Clocks() as clocks:
        bench = Bench(options, peers, clocks)
        found = measure(bench, grid(options))
    facts = environment.describe(peer_versions(), options.commit) | found
    facts |= {"rounds": options.rounds, "tokens": options.tokens, "width": options.width, "group": options.group}
    print(tables.markdown(bench.rows))
    for path in tables.write(options.out, environment.stem("forward", facts), facts, bench.rows):
        say(f"wrote {path}")
    for line in bench.disagreements:
        say(f"WRONG: {line}")
    return 1 if bench.disagreements else 0


if __name__ == "__main__":
    sys.exit(main())

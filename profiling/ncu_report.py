"""One page about one profiled launch: what `profiling/ncu.py` measured, beside the least that the case needs."""

import re
from collections import Counter
from typing import NamedTuple

import cost
import ncu_pages
import ncu_roles
import selection
import torch
from cases import bounds
from tables import grid

from hopper_fa3 import plan
from hopper_fa3.band import Band, blocks
from hopper_fa3.kernels.config import ELEMENT_BYTES
from hopper_fa3.problem import Problem

# What can bound a launch: our word -> what it is called on the page. All in % of the elapsed time at the peak rate.
BOUNDS = {
    "tensor": "tensor cores (WGMMA)",
    "mufu": "MUFU (exponentials; the XU pipe)",
    "issue": "issue slots",
    "fma": "FMA pipe",
    "alu": "ALU pipe",
    "uniform": "uniform datapath",
    "shared": "shared memory's data pipe",
    "l2_out": "links from L2 to the SMs",
    "l2": "L2 (its busiest part)",
    "dram": "DRAM",
}
BUSY = 60  # %: below it, ncu's own rules look for latency instead of throughput
SHOWN_LINES, SHOWN_SHARE = 12, 1.5  # lines of Python; % of a role's samples from which a reason has a row
TILE = re.compile(r"_(\d+)x(\d+)")


class Least(NamedTuple):
    """The least that a case needs with these tiles."""

    l2_bytes: int  # from L2 to the SMs: each Q tile once, and K and V of every block that it visits, in whole tiles
    dram_bytes: int  # cost.floor_bytes: q, k, v read once, out and LSE written once
    flops: int  # matrix work of the visible pairs
    tile_flops: int  # the same of whole blocks, which the tensor cores compute


def least(case, tile_m, tile_n):
    """Least of a Case computed in tiles of ``tile_m`` queries and ``tile_n`` keys, which TMA copies whole."""
    band = Band(case.seqlen_q, case.seqlen_k, *bounds(case.causal, case.window_size))
    tiles = blocks(range(case.seqlen_q), tile_m)
    seen = [band.keys(queries) for queries in tiles]
    visited = sum(-(-keys.stop // tile_n) - keys.start // tile_n for keys in seen if keys)
    head_dim, head_dim_v = plan.tile_class(case.head_dim), plan.tile_class(case.head_dim_v)
    heads = case.batch * case.heads
    copied = visited * tile_n * (head_dim + head_dim_v) + len(tiles) * tile_m * head_dim
    tile_flops = 2 * visited * tile_m * tile_n * (head_dim + head_dim_v)
    return Least(heads * copied * ELEMENT_BYTES, cost.floor_bytes(case), case.flops, heads * tile_flops)


def tile(case, kernel):
    """(tile_m, tile_n) from a kernel's name; ValueError where it is not the kernel that answers the case."""
    found = TILE.search(kernel)
    if found is None:
        raise ValueError(f"the profiled kernel's name must tell its tile, got {kernel}")
    tile_m, tile_n = int(found[1]), int(found[2])
    shapes = ((case.seqlen_q, case.heads, case.head_dim), (case.seqlen_k, case.heads_k, case.head_dim),
              (case.seqlen_k, case.heads_k, case.head_dim_v))  # fmt: skip
    element = torch.empty(1, dtype=getattr(torch, case.dtype))
    problem = Problem.from_tensors(*(element.expand(case.batch, *shape) for shape in shapes), **case.options)
    expected = TILE.sub("", plan.forward_config(problem.static, plan.Plan(tile_m, tile_n)).name)
    if not kernel.startswith(expected):
        raise ValueError(f"case {selection.slug(case)} must be computed by {expected}, got a profile of {kernel}")
    return tile_m, tile_n


def read(folder, case, facts):
    """All figures of a launch, ready for JSON, from ncu's CSV pages in a folder; ValueError where they are unusable.

    ``facts``: what environment.describe() found on the machine that profiled it; may be empty.
    """
    kernel, gpu, metrics = ncu_pages.metrics(folder / "raw.csv")
    sampled = ncu_pages.source(folder / "source.csv")
    of_role = ncu_roles.roles(sampled)
    places = ncu_pages.lines(folder / "lines.csv") if (folder / "lines.csv").exists() else {}
    unknown = [row for row in sampled if row.instruction.address not in places]
    if places and unknown:
        raise ValueError(f"lines.csv is of other machine code: it lacks {len(unknown)} instructions of source.csv")
    return {
        "case": selection.slug(case),
        "environment": {"gpu": gpu} | ncu_pages.session(folder / "session.csv") | facts,
        "kernel": kernel,
        "metrics": metrics,
        "least": least(case, *tile(case, kernel))._asdict(),
        "teraflops": cost.teraflops(case, metrics["nanoseconds"] * 1e-9),
        "registers_by_role": ncu_roles.register_budget(sampled),
        "roles": {role: dict(counts) for role, counts in ncu_roles.by_role(sampled, of_role).items()},
        "lines": [
            {"place": f"{place.path}:{place.line}", "text": place.text, "samples": total,
             "reason": why.most_common(1)[0][0] if why else "selected", "role": role.most_common(1)[0][0]}
            for place, (total, why, role) in list(ncu_roles.by_line(sampled, of_role, places).items())[:SHOWN_LINES]
        ],
    }  # fmt: skip


def markdown(figures):
    """The page."""
    facts = figures["environment"]
    told = " · ".join(f"{key} {facts[key]}" for key in ("commit", "ncu", "driver", "power_limit") if facts.get(key))
    return "\n".join([
        f"# Nsight Compute: {figures['case']} on {facts['gpu']}, {facts['date'][:10]}",
        "",
        f"`{figures['kernel']}`, one launch after warm-up, clocks as they come" + (f" · {told}" if told else ""),
        "",
        *_launch(figures),
        "",
        "## How busy each unit was",
        "",
        *grid(("unit", "% of the elapsed time at its peak"),
                [(name, f"{figures['metrics'][word]:.1f}") for word, name in BOUNDS.items()]),
        "",
        "## Traffic against the least",
        "",
        *_traffic(figures),
        "",
        "## What warps wait for, by role",
        "",
        *_stalls(figures),
        "",
        "## The hottest lines",
        "",
        *_lines(figures),
        "",
        "## Reading",
        "",
        " ".join(reading(figures)),
        "",
    ])  # fmt: skip


def reading(figures):
    """Sentences that the figures imply: the nearest bound, the room up to it, where consumers wait, memory's part."""
    metrics, needed = figures["metrics"], figures["least"]
    ranked = sorted(BOUNDS, key=lambda word: -metrics[word])
    first, second = ranked[:2]
    near = (
        "Nearest bound"
        if metrics[first] >= BUSY
        else f"Nothing is busy {BUSY} % of the time, so waiting bounds it; busiest"
    )
    yield f"{near}: {BOUNDS[first]}, {metrics[first]:.0f} % busy; next {BOUNDS[second]}, {metrics[second]:.0f} %."
    taken, room = metrics["nanoseconds"] * 1e-6, 100 / metrics[first]
    useful = _share(needed["flops"], needed["tile_flops"])
    yield (
        f"Always busy there, the launch would take {taken / room:.3f} instead of {taken:.3f} ms at this clock "
        f"({room:.2f} times as fast); {useful} of its matrix work is on visible pairs."
    )
    together = metrics["tensor"] + metrics["mufu"]
    if together > 100:
        overlap = f"{together - 100:.0f} % of the time"
        yield f"Tensor cores and MUFU add up to {together:.0f} %: they work at once for at least {overlap}."
    main = Counter(figures["roles"][ncu_roles.MAIN])
    issuing, total = main.pop("selected", 0), max(1, sum(figures["roles"][ncu_roles.MAIN].values()))
    worst = ", ".join(f"{reason} {_share(count, total)}" for reason, count in main.most_common(3))
    yield f"In the main loop a consumer warp issues in {_share(issuing, total)} of its samples; most others: {worst}."
    dram = (metrics["dram_read_bytes"] + metrics["dram_write_bytes"]) / needed["dram_bytes"]
    l2 = metrics["l2_read_bytes"] / needed["l2_bytes"]
    verdict = "does not bound" if metrics["dram"] < BUSY else "may bound"
    traffic = f"DRAM moves {dram:.2f} times the least, L2 {l2:.2f} times"
    yield f"{traffic}; DRAM, {metrics['dram']:.0f} % busy, {verdict} this launch."


def _launch(figures):
    metrics, (producer, consumer) = figures["metrics"], figures["registers_by_role"]
    taken, kib = metrics["nanoseconds"] * 1e-6, metrics["shared_bytes"] / 1024
    hertz, largest = metrics["sm_hz"] * 1e-6, metrics["largest_khz"] * 1e-3
    conflicts, wavefronts = metrics["conflicts"], metrics["wavefronts"]
    active, least_active = (
        _share(metrics[word], metrics["cycles"]) for word in ("active_cycles", "least_active_cycles")
    )
    spills = metrics["local_loads"] + metrics["local_stores"]
    return [
        f"- **{taken:.3f} ms, {figures['teraflops']:.0f} TFLOP/s** by the usual count. ncu launches the kernel alone, "
        "pass by pass, each with empty caches: compare with other profiles, not with `make bench`.",
        f"- SM clock {hertz:.0f} of at most {largest:.0f} MHz. The SMs were active in {active} of the elapsed cycles, "
        f"the least active one in {least_active}.",
        f"- {metrics['ctas']:.0f} CTAs of {metrics['threads']:.0f} threads on {metrics['sms']:.0f} SMs. Registers a "
        f"thread: {metrics['registers']:.0f} at launch, then {producer} for the producer and {consumer} for consumers; "
        f"{spills:.0f} instructions executed on local memory (spills).",
        f"- Shared memory {kib:.0f} KiB a CTA. Occupancy {metrics['occupancy']:.1f} %: {metrics['active_warps']:.1f} "
        f"warps an SM on average, of {metrics['launched_warps']:.0f} launched (all but one of the producer's warpgroup "
        "leave at once).",
        f"- Bank conflicts: {conflicts:,.0f} of {wavefronts:,.0f} wavefronts in shared memory "
        f"({_share(conflicts, wavefronts)}); by the addresses of the instructions, "
        f"{metrics['excessive_wavefronts']:,.0f} wavefronts more than ideal.",
    ]


def _traffic(figures):
    metrics, needed = figures["metrics"], figures["least"]
    dram = metrics["dram_read_bytes"] + metrics["dram_write_bytes"]
    seconds = metrics["nanoseconds"] * 1e-9

    def row(name, measured, floor, note):
        return (
            name,
            f"{measured / 1e6:.1f}",
            f"{floor / 1e6:.1f}",
            f"{measured / floor:.3f}",
            f"{measured / seconds / 1e12:.2f}",
            note,
        )

    read, written = metrics["dram_read_bytes"] / 1e6, metrics["dram_write_bytes"] / 1e6
    table = grid(
        ("", "MB", "least, MB", "ratio", "TB/s", "counted how"),
        [
            row("L2 to SMs", metrics["l2_read_bytes"], needed["l2_bytes"],
                "least: every Q tile, and K and V of each block it visits, once, in whole tiles"),
            row("DRAM", dram, needed["dram_bytes"],
                f"{read:.1f} read, {written:.1f} written; least: q, k, v, out and LSE once"),
        ],
    )  # fmt: skip
    note = f"L2 hit rate {metrics['l2_hit']:.1f} %. Output that still lies in L2 at the end has not reached DRAM."
    return [*table, "", note]


def _stalls(figures):
    """Table of the roles that have samples: share of each reason in the role's samples."""
    roles = {role: counts for role, counts in figures["roles"].items() if counts and role != ncu_roles.SETUP}
    idle = [_whose(role) for role, counts in figures["roles"].items() if not counts]
    totals = {role: sum(counts.values()) for role, counts in roles.items()}
    reasons = sum((Counter(counts) for counts in roles.values()), Counter())
    rows = []
    for reason, _ in reasons.most_common():
        shares = [100 * counts.get(reason, 0) / totals[role] for role, counts in roles.items()]
        if max(shares) >= SHOWN_SHARE:
            rows.append((reason, *(f"{share:.1f}" for share in shares), _meant(reason)))
    everything = sum(sum(counts.values()) for counts in figures["roles"].values())
    sizes = [f"{totals[role]:,} ({_share(totals[role], everything)})" for role in roles]
    unseen = f" No sample fell on: {'; '.join(idle)}." if idle else ""
    return [
        "% of the role's samples. All consumer warpgroups run the same code, so these are their sums." + unseen,
        "",
        *grid(("reason", *map(_whose, roles), "the warp …"), [("samples", *sizes, ""), *rows]),
    ]


def _lines(figures):
    if not figures["lines"]:
        return ["The report carries no line information: profile with CUTE_DSL_LINEINFO=1 set for the workload."]
    everything = sum(sum(counts.values()) for counts in figures["roles"].values())
    rows = [
        (f"{line['place']}", _share(line["samples"], everything), line["reason"], line["role"], _code(line["text"]))
        for line in figures["lines"]
    ]
    return [
        *grid(("line", "samples", "most wait", "mostly in", ""), rows),
        "",
        "The DSL attributes some instructions to the blank lines behind the function that they are from.",
    ]


def _whose(role):
    return f"consumers, {role}" if role in ncu_roles.CONSUMERS else role


def _meant(reason):
    return ncu_roles.MEANING.get(reason, f"ncu's {reason}")


def _share(part, whole):
    return f"{100 * part / whole:.1f} %"


def _code(text):
    """A line of code for a table's cell, cut to what keeps the page readable."""
    text = text if len(text) <= 72 else text[:71] + "…"
    return f"`{text}`".replace("|", "\\|") if text else ""

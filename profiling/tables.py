"""Writes benchmark rows as a table for people, CSV for spreadsheets and JSON for programs."""

import csv
import json
from typing import NamedTuple

RATIOS = ("fa4", "cudnn", "matmul")  # ours against these, where they were measured


class Row(NamedTuple):
    """One measured callable in one cell of the table."""

    kind: str  # kernel | public: events over many launches; graph: replayed launches; host: time spent in the call
    head_dim: int
    seqlen: int
    causal: bool
    batch: int
    heads: int
    heads_k: int
    name: str
    microseconds: float  # median of the rounds
    spread: float  # (slowest - fastest) / median
    teraflops: float | None  # None for kind host
    sm_clock: float | None  # MHz, median while the cell was measured
    power: float | None  # W, likewise


def cells(rows):
    """The rows of each (kind, head_dim, seqlen, causal), as name -> Row, in the order of measurement."""
    found = {}
    for row in rows:
        found.setdefault((row.kind, row.head_dim, row.seqlen, row.causal), {})[row.name] = row
    return found


def speed_ratio(cell, name):
    """How many times faster ours is than ``name`` (rates for the matrix product, times otherwise), or None."""
    if "ours" not in cell or name not in cell:
        return None
    ours, other = cell["ours"], cell[name]
    if ours.teraflops is None:
        return other.microseconds / ours.microseconds
    return ours.teraflops / other.teraflops


def markdown(rows):
    """One table per kind: TFLOP/s (microseconds for host) of each callable, then the ratios and the clock."""
    text = []
    for kind in dict.fromkeys(row.kind for row in rows):
        mine = {key: cell for key, cell in cells(rows).items() if key[0] == kind}
        names = list(dict.fromkeys(name for cell in mine.values() for name in cell))
        ratios = [name for name in RATIOS if name in names]
        unit = "µs" if kind == "host" else "TFLOP/s"
        head = ["D", "length", "mask", *names, *(f"ours / {name}" for name in ratios), "spread of ours", "SM MHz", "W"]
        text += [f"### {kind}, {unit}", "", _line(head), _line(["---"] * len(head))]
        text += [_line(_cells(key, cell, names, ratios)) for key, cell in mine.items()]
        text.append("")
    return "\n".join(text)


def _cells(key, cell, names, ratios):
    _, head_dim, seqlen, causal = key
    some = next(iter(cell.values()))
    values = [cell.get(name) for name in names]
    figures = ["" if row is None else _figure(row) for row in values]
    shares = ["" if share is None else f"{share:.2f}" for share in (speed_ratio(cell, name) for name in ratios)]
    spread = f"{cell['ours'].spread:.1%}" if "ours" in cell else ""
    clock, power = ("" if value is None else f"{value:.0f}" for value in (some.sm_clock, some.power))
    return [head_dim, seqlen, "causal" if causal else "dense", *figures, *shares, spread, clock, power]


def _figure(row):
    return f"{row.microseconds:.1f}" if row.teraflops is None else f"{row.teraflops:.0f}"


def _line(values):
    return f"| {' | '.join(str(value) for value in values)} |"


def write(folder, stem, environment, rows):
    """Write ``stem``.md, .csv and .json into ``folder``; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.{ending}" for ending in ("md", "csv", "json")]
    facts = "\n".join(f"- {key}: {value}" for key, value in environment.items())
    paths[0].write_text(f"# {environment['gpu']}, {environment['date']}\n\n{facts}\n\n{markdown(rows)}")
    with paths[1].open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)
    document = {"environment": environment, "rows": [row._asdict() for row in rows]}
    paths[2].write_text(json.dumps(document, indent=1) + "\n")
    return paths

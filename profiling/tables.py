"""Result files: rows as a table for people, CSV for spreadsheets, and JSON for programs, which is drawn again."""

import csv
import json
import statistics
from pathlib import Path
from typing import NamedTuple

import environment
import goals
import plots
import yardsticks
from progress import say

from hopper_fa3.kernels.config import SHORT_DTYPES
from hopper_fa3.roofline import L2_BYTES

SDPA = ("cudnn", "flash", "efficient", "math")  # torch's own backends; in training a cell also has the fastest of them
BEST = "best SDPA"
RIVALS = ("fa4", "cudnn")  # a line under each table sums up ours against these
RATIOS = (*RIVALS, "matmul", "copy")  # ours against these, where they were measured
# Where a kind of rows is compared with others than these.
RIVALS_OF = {"training": ("fa4", BEST)}
RATIOS_OF = {"training": ("fa4", BEST, "matmul")}
GRADIENTS = ("autograd", "deterministic", "training")  # kinds whose mean names its head dims: goals are for D 64, 128
LONG = 2048  # from this length on a cell counts in the mean: shorter ones measure launches and last waves as well


class Row(NamedTuple):
    """One measured callable in one cell of the table."""

    # kernel, public, autograd, deterministic, training: events over many launches; graph: replayed; host: in the call
    kind: str
    head_dim: int
    seqlen: int  # of the keys
    causal: bool
    batch: int
    heads: int
    heads_k: int
    name: str
    microseconds: float  # median of the rounds
    spread: float  # (slowest - fastest) / median
    teraflops: float | None  # None for kind host, and where bytes are what counts
    sm_clock: float | None  # MHz, median while the cell was measured
    power: float | None  # W, likewise
    tb_per_s: float | None = None  # decoding: K and V over the time; the copy: what it read and wrote
    head_dim_v: int | None = None  # None, in older files: head_dim
    dtype: str = "bfloat16"
    other: bool = False  # beside the grid: not in its picture and mean
    feature: str = ""  # what tells the cell from one of plain attention: a window, packed lengths, changed scores
    # Rows of ours: what their time should be proportional to, where that is not FLOPs: the share of all blocks visited
    work: float | None = None

    @property
    def cell(self):
        shape = self[: Row._fields.index("name")]
        return Cell(*shape, self.head_dim_v or self.head_dim, self.dtype, self.feature)

    @property
    def rate(self):
        return self.tb_per_s if self.teraflops is None else self.teraflops


class Cell(NamedTuple):
    kind: str
    head_dim: int
    seqlen: int
    causal: bool
    batch: int
    heads: int
    heads_k: int
    head_dim_v: int
    dtype: str
    feature: str = ""

    @classmethod
    def of(cls, kind, case, feature=""):
        sizes = (case.head_dim, case.seqlen_k, case.causal, case.batch, case.heads, case.heads_k, case.head_dim_v)
        return cls(kind, *sizes, case.dtype, feature)


def dims(shape):
    """Head dims in words, of whatever has them: a Cell, a Case, another script's row. So below."""
    return str(shape.head_dim) if shape.head_dim == shape.head_dim_v else f"{shape.head_dim}/{shape.head_dim_v}"


def heads(shape):
    return str(shape.heads) if shape.heads == shape.heads_k else f"{shape.heads}/{shape.heads_k}"


def mask(shape):
    return "causal" if shape.causal else "dense"


def cells(rows):
    """The rows of each Cell, as name -> Row, in the order of measurement; last in training the row of torch's fastest
    backend, once more.
    """
    found = {}
    for row in rows:
        found.setdefault(row.cell, {})[row.name] = row
    for key, cell in found.items():
        backends = [cell[name] for name in SDPA if name in cell]
        if key.kind == "training" and backends:
            cell[BEST] = min(backends, key=lambda row: row.microseconds)
    return found


def speed_ratio(cell, name):
    """How many times faster ours is than ``name`` (rates for the ceilings, times otherwise), or None."""
    if "ours" not in cell or name not in cell:
        return None
    ours, other = cell["ours"], cell[name]
    if ours.rate is None:
        return other.microseconds / ours.microseconds
    return ours.rate / other.rate


def summary(cell):
    """One cell in a few words: ours and its ratios, or all that was measured where ours does not run."""
    if "ours" not in cell:
        return ", ".join(f"{name} {_figure(row)}" for name, row in cell.items()) + f" {_unit(cell.values())}"
    ratios = ((name, speed_ratio(cell, name)) for name in (RATIOS_OF["training"] if BEST in cell else RATIOS))
    shares = [f"{share:.2f} x {name}" for name, share in ratios if share is not None]
    own = yardsticks.share(cell, cell)
    shares += [f"{own.value:.2f} x {own.name} {yardsticks.OWN[own.name]}"] if own else []
    return ", ".join([f"ours {_figure(cell['ours'])} {_unit(cell.values())}", *shares])


def markdown(rows):
    """One table per kind: rate or time of each callable, then the ratios, what they were to be, the spread and the
    clock; below it what the ratios come to.
    """
    text, measured = [], cells(rows)
    for kind in dict.fromkeys(row.kind for row in rows):
        mine = {key: cell for key, cell in measured.items() if key.kind == kind}
        names = list(dict.fromkeys(name for cell in mine.values() for name in cell))
        names.sort(key=lambda name: name == BEST)  # last
        ratios = [name for name in RATIOS_OF.get(kind, RATIOS) if name in names and "ours" in names]
        shape = _shape_columns(mine)
        beside = {key: (speed_ratio(cell, "fa4"), _place(key, shape)) for key, cell in mine.items()}
        own, kept = yardsticks.columns(mine, measured, beside)
        added, judged = goals.columns(mine, measured, beside)
        added = own | added
        spread = "spread of ours" if "ours" in names else "largest spread"
        head = [*shape, *names, *(f"ours / {name}" for name in ratios), *added, spread, "SM MHz", "W"]
        unit = _unit(row for cell in mine.values() for row in cell.values())
        lines = [
            _cells(key, cell, names, ratios, shape, [column[key] for column in added.values()])
            for key, cell in mine.items()
        ]
        below = [*_totals(mine, shape), *kept, *judged, *_cached(mine)]
        text += [f"### {kind}, {unit}", "", *grid(head, lines), "", *below]
    return "\n".join(text)


def _share(value):
    return "" if value is None else f"{value:.2f}"


def _shape_columns(mine):
    """What tells the cells apart: batches do where a length comes in several, heads and dtype beside the grid, features
    and where they do not say it the mask.
    """
    if any(key.feature for key in mine):
        return ["D", "case", "mask"] if len({key.causal for key in mine}) > 1 else ["D", "case"]
    if any(map(_other, mine.values())):
        return ["D", "heads", "dtype", "length", "mask"]
    batches = len({key.batch for key in mine}) > 1 and len({key._replace(batch=0) for key in mine}) < len(mine)
    return ["D", "batch", "length", "mask"] if batches else ["D", "length", "mask"]


def _other(cell):
    return next(iter(cell.values())).other


def _totals(mine, shape):
    """A line a rival: the mean of our ratios over the grid's long cells, and the smallest of all."""
    lines, kind = [], next(iter(mine)).kind
    for rival in RIVALS_OF.get(kind, RIVALS):
        ratios = {key: ratio for key, cell in mine.items() if (ratio := speed_ratio(cell, rival)) is not None}
        if len(ratios) < 2:
            continue
        counted = [key for key in ratios if key.feature or (key.seqlen >= LONG and not _other(mine[key]))]
        least = min(ratios, key=ratios.get)
        text = f"least ours / {rival}:"
        if counted:
            lengths = "the grid's lengths" if "heads" in shape else "lengths"
            if kind in GRADIENTS:
                sizes = sorted({key.head_dim for key in counted})
                lengths = f"D {', '.join(map(str, sizes))} and {lengths}"
            mean = statistics.geometric_mean([ratios[key] for key in counted])
            where = "all cells" if "case" in shape else f"{lengths} >= {LONG}"
            text = f"geometric mean of ours / {rival} over {where}: {mean:.2f}; least"
        lines.append(f"- {text} {ratios[least]:.2f} ({_place(least, shape)})")
    return [*lines, ""] if lines else []


def _place(key, shape):
    """A cell in as many words as its table needs."""
    dtype = f" {SHORT_DTYPES[key.dtype]}" if "dtype" in shape and key.dtype != "bfloat16" else ""
    grouped = f", {heads(key)} heads" if "heads" in shape and key.heads != key.heads_k else ""
    batch = f", batch {key.batch}" if "batch" in shape else ""
    if key.feature:
        return f"D {dims(key)}, {key.feature}" + (f", {mask(key)}" if "mask" in shape else "")
    return f"D {dims(key)}{dtype} {mask(key)}{grouped}{batch}, {key.seqlen}"


def _cells(key, cell, names, ratios, shape, added):
    some = next(iter(cell.values()))
    known = {
        "D": dims(key),
        "heads": heads(key),
        "dtype": SHORT_DTYPES[key.dtype],
        "batch": key.batch,
        "length": key.seqlen,
        "case": key.feature,
        "mask": mask(key),
    }
    values = [cell.get(name) for name in names]
    figures = ["" if row is None else _figure(row) for row in values]
    if BEST in names:
        figures[names.index(BEST)] = cell[BEST].name if BEST in cell else ""
    shares = [_share(speed_ratio(cell, name)) for name in ratios]
    if "ours" in cell:
        spread = f"{cell['ours'].spread:.1%}"
    else:
        spread = "" if ratios else f"{max(row.spread for row in cell.values()):.1%}"
    clock, power = ("" if value is None else f"{value:.0f}" for value in (some.sm_clock, some.power))
    return [*(known[column] for column in shape), *figures, *shares, *added, spread, clock, power]


def _figure(row):
    if row.teraflops is not None:
        return f"{row.teraflops:.0f}"
    return f"{row.microseconds:.1f}" + ("" if row.tb_per_s is None else f" ({row.tb_per_s:.2f})")


def _unit(rows):
    rows = list(rows)
    if any(row.tb_per_s is not None for row in rows):
        return "µs (TB/s)"
    return "TFLOP/s" if any(row.teraflops is not None for row in rows) else "µs"


def _cached(mine):
    """A line where K and V are so small that the TB/s are not those of the memory."""
    small = []
    for key, cell in mine.items():
        sizes = [row.tb_per_s * row.microseconds for row in cell.values() if row.tb_per_s and row.name != "copy"]
        if sizes and sizes[0] * 1e6 < L2_BYTES:
            small.append(f"batch {key.batch}, length {key.seqlen} ({sizes[0]:.0f} MB)")
    if not small:
        return []
    return [
        f"K and V of {'; '.join(small)} fit the L2 cache ({L2_BYTES / 1e6:.0f} MB): repeated launches need not "
        "read them from memory.",
        "",
    ]


def grid(head, lines, column="---"):
    """The lines of a Markdown table; ``column`` is the mark of all columns but the first ("---:" aligns right)."""
    marks = ["---", *[column] * (len(head) - 1)]
    return [f"| {' | '.join(str(value) for value in line)} |" for line in (head, marks, *lines)]


def write_text(path, facts, body):
    """The page for people: GPU and date, all facts, then ``body``."""
    lines = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    path.write_text(f"# {facts['gpu']}, {facts['date']}\n\n{lines}\n\n{body}")
    return path


def write(folder, stem, facts, rows, body=None):
    """Write ``stem``.md (``body``, or the tables of Rows), .csv and .json into ``folder``; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.{ending}" for ending in ("md", "csv", "json")]
    write_text(paths[0], facts, markdown(rows) if body is None else body)
    with paths[1].open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((type(rows[0]) if rows else Row)._fields)
        writer.writerows(rows)
    write_json(paths[2], facts, rows)
    return paths


def write_json(path, facts, rows):
    document = {"environment": facts, "rows": [row._asdict() for row in rows]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def read(path, row=Row, needed=()):
    """``(facts, rows)`` of a JSON file that ``write`` wrote. ValueError where it holds something else, no row, or not
    the ``needed`` facts.
    """
    try:
        document = json.loads(path.read_text())
        facts, rows = document["environment"], [row(**line) for line in document["rows"]]
        absent = [name for name in ("gpu", "date", "commit", *needed) if name not in facts]
        if absent or not rows:
            raise KeyError(f"no {', '.join(absent) or 'row'}")
        return facts, rows
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"a result file must hold rows of {', '.join(row._fields)}, got {path} ({error})") from error


def output_options(parser):
    """--out, --commit and --from, as the scripts take them that measure and draw."""
    parser.add_argument("--out", type=Path, help="folder of the result files (default: profiling/results, or FILE's)")
    parser.add_argument("--commit", help="recorded where this is no git checkout")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE.json", help="measure nothing: draw these again"
    )


def reopened(verb, options, row=Row, needed=()):
    """``(facts, rows, folder)`` of the result file that --from names; None where it cannot be read or drawn again,
    which is said.
    """
    try:
        facts, rows = read(options.source, row, needed)
    except (OSError, ValueError) as error:
        say(f"{verb} cannot read {options.source}: {error}")
        return None
    folder = options.out or options.source.parent
    unwritable = environment.unwritable(folder)
    if unwritable:
        say(f"{verb}: {unwritable}")
        return None
    return facts, rows, folder


def redraw(verb, options, page, picture, row=Row):
    """``page(rows)`` and ``picture(rows, facts)`` of the result file that --from names, again; the exit code."""
    found = reopened(verb, options, row)
    if found is None:
        return 2
    facts, rows, folder = found
    print(page(rows))
    say(f"wrote {write_text(folder / f'{options.source.stem}.md', facts, page(rows))}")
    plots.draw(folder / f"{options.source.stem}.png", picture, rows, facts)
    return 0

"""The picture of a run over windows, packed sequences or changed scores: bars, forwards above their gradients."""

import itertools

import plots
import tables
import yardsticks

FORWARDS, GRADIENTS = ("kernel", "public"), ("autograd",)  # the first that was measured is drawn
REPLAYED = {"kernel": "graph", "autograd": "autograd graph"}  # drawn instead, where measured: no host time hides in it
WHAT = {"windows": "Sliding windows", "varlen": "Packed sequences", "scores": "Softcap, sink, ALiBi slopes"}
LINE = "matmul"


def bars(rows, facts):
    """TFLOP/s in a group of bars a case: a column a head dim, a row for the forward and one for gradients. On the bars
    of ours stands the share that they keep of the speed of a plain call (yardsticks.Share).
    """
    known = {row.kind for row in rows}
    kinds = [next((kind for kind in kinds if kind in known), None) for kinds in (FORWARDS, GRADIENTS)]
    kinds = [kind for kind in kinds if kind]
    head_dims = sorted({row.head_dim for row in rows if row.kind in kinds})
    groups = {head_dim: _groups(rows, head_dim) for head_dim in head_dims}
    names = [name for name in dict.fromkeys(row.name for row in rows if row.kind in kinds) if name != LINE]
    widths = [max(2, len(groups[head_dim])) for head_dim in head_dims]
    size = (2.5 + 0.32 * len(names) * sum(widths), 1.6 + 3 * len(kinds))
    shape = {"sharey": "row", "gridspec_kw": {"width_ratios": widths}}
    figure, axes = plots.canvas(len(kinds), len(head_dims), size, **shape)
    for (i, kind), (j, head_dim) in itertools.product(enumerate(kinds), enumerate(head_dims)):
        panel = [row for row in _drawn(rows, kind) if row.head_dim == head_dim]
        _panel(axes[i, j], panel, groups[head_dim], names, tables.cells(rows))
        axes[i, j].set_title(f"head_dim {head_dim}, {'gradients' if kind in GRADIENTS else 'forward'}", fontsize=10)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
        axis.set_ylim(top=1.13 * axis.dataLim.ymax)  # room for the words on the highest bars
    plots.legend(figure, axes)
    how = yardsticks.OWN.get(next((name for name in names if name in yardsticks.OWN), None))
    noted = f"; on ours: share of the speed of {_own(names)}, {how}" if how else ""
    plots.title(figure, f"{WHAT[plots.first_suite(facts)]}, bf16{noted}", facts)
    return figure


def _drawn(rows, kind):
    """Rows of a kind, or in their place those of replayed graphs."""
    graphs = [row for row in rows if row.kind == REPLAYED.get(kind)]
    replayed = {(row.cell._replace(kind=kind), row.name): row for row in graphs}
    return [replayed.get((row.cell, row.name), row) for row in rows if row.kind == kind]


def _own(names):
    return plots.STYLES[next(name for name in names if name in yardsticks.OWN)].label


def _groups(rows, head_dim):
    """(feature, causal) of the cells with this head dim, in the order of measurement."""
    return list(dict.fromkeys((row.feature, row.causal) for row in rows if row.head_dim == head_dim and row.feature))


def _panel(axis, rows, groups, names, measured):
    width = 0.86 / len(names)
    shares = {row.cell: yardsticks.share_of(row.cell, measured) for row in rows}
    for i, name in enumerate(names):
        style = plots.STYLES[name]
        mine = [row for row in rows if row.name == name]
        places = [groups.index((row.feature, row.causal)) + (i - (len(names) - 1) / 2) * width for row in mine]
        look = {"color": style.color, "hatch": style.hatch, "edgecolor": "white", "label": style.label}
        drawn = axis.bar(places, [row.teraflops for row in mine], width, **look)
        if name == "ours":
            words = ["" if shares[row.cell] is None else f"{shares[row.cell].value:.2f}" for row in mine]
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # a word may stand on the ceiling's line
            axis.bar_label(drawn, words, rotation=90, padding=3, fontsize=8, bbox=box)
    ceiling = [row.teraflops for row in rows if row.name == LINE]
    if ceiling:
        style = plots.STYLES[LINE]
        axis.axhline(sum(ceiling) / len(ceiling), color=style.color, label=style.label)
    both = len({causal for _, causal in groups}) > 1
    labels = [feature + (f"\n{'causal' if causal else 'dense'}" if both else "") for feature, causal in groups]
    axis.set_xticks(range(len(groups)), labels)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(False, axis="x")

"""How our pictures look: one style a name (colour, marker, dash, hatch: told apart in grey print), titles and files."""

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

from hopper_fa3.roofline import L2_BYTES


class Style(NamedTuple):
    label: str
    color: str  # also of different brightness, for grey print
    marker: str
    dash: str
    hatch: str


STYLES = {
    "ours": Style("hopper_fa3", "#b2182b", "o", "-", ""),
    "ours dense": Style("hopper_fa3, dense", "#f4a582", "<", "--", "\\\\\\"),
    "ours causal": Style("hopper_fa3, causal", "#fddbc7", ">", ":", "///"),
    "ours batched": Style("hopper_fa3, equal lengths", "#f4a582", "h", "--", "||"),
    "ours plain": Style("hopper_fa3, plain scores", "#f4a582", "d", "--", "|"),
    "fa4": Style("FlashAttention-4", "#2166ac", "s", "--", "//"),
    "cudnn": Style("cuDNN", "#1b7837", "^", "-.", "\\\\"),
    "flash": Style("FlashAttention-2 (torch)", "#e08214", "v", ":", "xx"),
    "efficient": Style("memory-efficient (torch)", "#8073ac", "D", "--", ".."),
    "xformers": Style("xFormers", "#35978f", "P", "-.", "++"),
    "standard": Style("standard (torch, unfused)", "#7f7f7f", "X", ":", "oo"),
    "math": Style("math backend (torch)", "#bdbdbd", "*", ":", "--"),
    "matmul": Style("matrix product 8192³", "#000000", "", "-", ""),
    "copy": Style("device-to-device copy", "#000000", "", "-", ""),
}
# The kinds of a benchmark's rows that are drawn: the first that was measured. A step of decoding may take less time
# than its launch, which only a replayed graph hides; elsewhere graphs are replayed at a few lengths only.
DRAWN_KINDS = {
    "decode": ("graph", "kernel"), "forward": ("kernel",), "backward": ("autograd",), "training": ("training",)
}  # fmt: skip
KINDS = {"graph": "replayed CUDA graphs", "kernel": "launches one by one"}
TITLES = {
    "forward": "Attention forward",
    "backward": "Attention backward",
    "training": "Attention forward and backward",
    "decode": "Decoding: one query a head",
}


def canvas(rows=1, columns=1, size=(9, 5), **options):
    """``(figure, axes)`` of matplotlib, drawn without a display; axes is always a 2-D array. ImportError without
    matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {"font.size": 10, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3, "figure.dpi": 110}
    )
    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)


def close(figure):
    """Pyplot keeps a figure until it is told that nobody needs it."""
    from matplotlib import pyplot

    pyplot.close(figure)


def reduce_colours(path):
    """A PNG in 256 colours: a third of its size, and to the eye the same. Pictures stay in the history for good."""
    from PIL import Image  # with matplotlib, which needs it

    with Image.open(path) as image:
        reduced = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)


def title(figure, text, facts):
    """The headline, and under it what the figures were measured on (facts: environment.describe)."""
    figure.suptitle(f"{text}\n{facts['gpu']}, {facts['date'][:10]}, commit {facts['commit']}", fontsize=11)


def draw(path, make, *arguments):
    """Save ``make(*arguments)``, a figure, as a PNG; says so, or in one line why there is no picture. Returns the path
    or None.
    """
    try:
        figure = make(*arguments)
    except ImportError:
        print(f"matplotlib is not installed: no {Path(path).name}; --from draws it later", file=sys.stderr)
        return None
    figure.savefig(path)
    close(figure)
    reduce_colours(path)
    print(f"wrote {path}", file=sys.stderr)
    return path


def rates(rows, facts):
    """The figure of a benchmark's rows (tables.Row): TFLOP/s against length, or for decoding TB/s. Others than the
    grid's are left out: they are single lengths.
    """
    rows = [row for row in rows if not row.other]
    suite, measured = first_suite(facts), {row.kind for row in rows}
    kind = next(kind for kind in DRAWN_KINDS[suite] if kind in measured)
    drawn = [row for row in rows if row.kind == kind]
    return decoding(drawn, facts) if suite == "decode" else lengths(drawn, facts)


def first_suite(facts):
    """The suite whose picture a run's is: a run may measure several in the same cells."""
    return facts.get("suite", "forward").split(",")[0]


def lengths(rows, facts):
    """TFLOP/s against length: a column a head dim, a row a mask; the matrix product of the same rounds on top."""
    columns, masks = sorted({row.head_dim for row in rows}), sorted({row.causal for row in rows})
    size = (2.2 + 3.6 * len(columns), 1.6 + 3.2 * len(masks))
    figure, axes = canvas(len(masks), len(columns), size, sharex=True, sharey=True)
    for (i, causal), (j, head_dim) in itertools.product(enumerate(masks), enumerate(columns)):
        panel = [row for row in rows if row.causal == causal and row.head_dim == head_dim]
        _length_panel(axes[i, j], panel)
        axes[i, j].set_title(f"head_dim {head_dim}, {'causal' if causal else 'dense'}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("length (queries = keys)")
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    axes[0, 0].set_ylim(0, 1.05 * max(row.teraflops for row in rows))
    legend(figure, axes)
    what = TITLES[first_suite(facts)]
    group = "" if facts["group"] == 1 else f", {facts['group']} query heads per K/V head"
    shape = f"batch × length = {facts['tokens']} tokens, heads × head_dim = {facts['width']}{group}"
    title(figure, f"{what}, bf16, {shape}", facts)
    return figure


def _length_panel(axis, rows):
    for name in dict.fromkeys(row.name for row in rows):
        style = STYLES[name]
        points = sorted((row.seqlen, row.teraflops) for row in rows if row.name == name)
        look = {"color": style.color, "marker": style.marker, "linestyle": style.dash}
        front = 3 if name == "ours" else 2
        axis.plot(*zip(*points, strict=True), **look, label=style.label, markersize=5, linewidth=1.5, zorder=front)
    seqlens = sorted({row.seqlen for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(seqlens, [short(seqlen) for seqlen in seqlens])
    axis.minorticks_off()


def decoding(rows, facts):
    """A group of bars a (batch, length): TB/s of K and V, the time written on each; the copy as a line."""
    names = [name for name in dict.fromkeys(row.name for row in rows) if name != "copy"]
    groups = list(dict.fromkeys((row.batch, row.seqlen) for row in rows))
    figure, axes = canvas(size=(3 + 2.4 * len(groups), 5))
    axis, width = axes[0, 0], 0.84 / len(names)
    for i, name in enumerate(names):
        style = STYLES[name]
        mine = {(row.batch, row.seqlen): row for row in rows if row.name == name}
        places = [(groups.index(group) + (i - (len(names) - 1) / 2) * width, row) for group, row in mine.items()]
        look = {"color": style.color, "hatch": style.hatch, "edgecolor": "white", "label": style.label}
        bars = axis.bar([place for place, _ in places], [row.tb_per_s for _, row in places], width, **look)
        words = [f"{row.microseconds:.0f} µs" for _, row in places]
        back = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # readable on the line
        axis.bar_label(bars, words, rotation=90, padding=3, fontsize=8, bbox=back, zorder=4)
    copy = facts["copy_tb_per_s"]
    axis.axhline(copy, color=STYLES["copy"].color, label=f"{STYLES['copy'].label}, {copy:.2f} TB/s")
    axis.set_xticks(range(len(groups)), [_step(rows, *group) for group in groups])
    axis.grid(False, axis="x")
    axis.set_ylabel("K and V over the time, TB/s")
    axis.set_ylim(0, 1.3 * max(copy, *(row.tb_per_s for row in rows)))
    legend(figure, axes)
    some = rows[0]
    what = f"{TITLES['decode']}, bf16, {some.heads}/{some.heads_k} heads, head_dim {some.head_dim}; {KINDS[some.kind]}"
    title(figure, what, facts)
    return figure


def _step(rows, batch, seqlen):
    """Which step of decoding a group of bars is, and whether its K and V stay in the cache between launches."""
    (key_values, *_) = (row.tb_per_s * row.microseconds * 1e6 for row in rows
                        if (row.batch, row.seqlen) == (batch, seqlen) and row.name != "copy")  # fmt: skip
    return f"batch {batch}\n{short(seqlen)} keys" + ("\n(fit the L2 cache)" if key_values < L2_BYTES else "")


def short(seqlen):
    """A length as people say it: 512, 8k."""
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def legend(figure, axes):
    """One legend for all panels, below them."""
    found = {}
    for axis in axes.flat:
        found |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = -(-len(found) // -(-len(found) // 4))  # at most four, and as many in each line
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, frameon=False)

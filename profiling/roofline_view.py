"""What a roofline run found: its points, what the arithmetic says about them, tables, files and the two pictures."""

import csv
import math
from typing import NamedTuple

import plots
import tables

from hopper_fa3 import roofline as arithmetic
from hopper_fa3.kernels.config import SHORT_DTYPES

# The ladder, oldest way first. The math backend is not on it: it casts and scales its scores as it likes, so that no
# byte count here is its own.
LADDER = ("standard", "efficient", "flash", "xformers", "cudnn", "fa4", "ours")


class Point(NamedTuple):
    """One measured callable in one case; ``name`` is ours, a peer or matmul. Names shared with tables.Row agree."""

    kind: str  # kernel
    name: str
    head_dim: int
    head_dim_v: int
    seqlen: int
    causal: bool
    batch: int
    heads: int
    heads_k: int
    dtype: str
    microseconds: float  # median of the rounds
    spread: float  # (slowest - fastest) / median
    teraflops: float
    sm_clock: float | None  # MHz, median while the case was measured
    power: float | None  # W, likewise

    @property
    def shape(self):
        return arithmetic.Shape(
            self.batch, self.seqlen, self.seqlen, self.heads, self.heads_k, self.head_dim, self.head_dim_v, self.causal,
            self.dtype,
        )  # fmt: skip

    @property
    def passes(self):
        return arithmetic.standard(self.shape) if self.name == "standard" else arithmetic.fused(self.shape)

    @property
    def intensity(self):
        """FLOP per HBM byte."""
        return arithmetic.intensity(self.shape, self.passes)

    @property
    def panel(self):
        """What is drawn in one panel: everything but name and length."""
        words = (f"head_dim {tables.dims(self)}", tables.mask(self), f"{tables.heads(self)} heads")
        return ", ".join((*words, SHORT_DTYPES[self.dtype]))


def roofs_of(facts):
    return arithmetic.Roofs(facts["matmul_tflops"], facts["copy_tb_per_s"])


def cells(points):
    """(panel, length) -> name -> Point, in the order of measurement."""
    found = {}
    for one in points:
        found.setdefault((one.panel, one.seqlen), {})[one.name] = one
    return found


def records(points, facts):
    """A dictionary an attention point: the point, and what the roofline says about it."""
    roofs, found = roofs_of(facts), []
    for cell in cells(points).values():
        for name in (name for name in LADDER if name in cell):
            one, product = cell[name], cell["matmul"].teraflops
            found.append(
                one._asdict()
                | {
                    "flops": arithmetic.flops(one.shape),
                    "bytes": arithmetic.traffic(one.passes),
                    "intensity": one.intensity,
                    "bound": roofs.bound(one.intensity),
                    "roof_teraflops": roofs.attainable(one.intensity),
                    "share_of_roof": one.teraflops / roofs.attainable(one.intensity),
                    "matmul_teraflops": product,
                    "share_of_matmul": one.teraflops / product,
                }
            )
    return found


def markdown(found):
    """The records as a table."""
    lines = [
        "| D | mask | length | | TFLOP/s | FLOP/byte | bound by | of the roof | of the matrix product | spread |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        mask = "causal" if row["causal"] else "dense"
        lines.append(
            f"| {row['head_dim']} | {mask} | {row['seqlen']} | {row['name']} | {row['teraflops']:.0f} | "
            f"{row['intensity']:.0f} | {row['bound']} | {row['share_of_roof']:.0%} | {row['share_of_matmul']:.0%} | "
            f"{row['spread']:.1%} |"
        )
    return "\n".join(lines)


def write_tables(path, facts, found):
    """Markdown and CSV beside the JSON file ``path``; returns their paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = path.with_suffix(".md"), path.with_suffix(".csv")
    tables.write_text(paths[0], facts, f"{markdown(found)}\n")
    with paths[1].open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0])
        writer.writeheader()
        writer.writerows(found)
    return paths


def panels(points):
    """panel -> its points, in the order of measurement."""
    found = {}
    for one in points:
        found.setdefault(one.panel, []).append(one)
    return found


def roofline(points, facts):
    """The figure of rate against intensity, a panel a case, with the two measured roofs; both axes logarithmic."""
    split = panels(points)
    figure, axes = plots.canvas(1, len(split), (6.4 * len(split), 5.6))
    for axis, (panel, mine) in zip(axes[0], split.items(), strict=True):
        draw_roofs(axis, roofs_of(facts), [one.intensity for one in points if one.name != "matmul"])
        for name in (name for name in LADDER if any(one.name == name for one in mine)):
            draw_points(axis, sorted((one for one in mine if one.name == name), key=lambda one: one.seqlen))
        axis.set_title(panel, fontsize=10)
        axis.tick_params(labelleft=axis is axes[0, 0])  # all panels have the same limits
        axis.set_xlabel("arithmetic intensity, FLOP per byte of HBM traffic")
    axes[0, 0].set_ylabel("TFLOP/s")
    plots.legend(figure, axes)
    plots.title(figure, "Attention forward under the roofline (intensity by arithmetic, rates measured)", facts)
    return figure


def draw_roofs(axis, roofs, intensities):
    """The roofs from half the least to twice the greatest intensity, and where they meet."""
    low, high = min(intensities) / 2, max(intensities) * 2
    ends = [low, roofs.ridge, high]
    axis.plot(ends, [roofs.attainable(x) for x in ends], color="black", linewidth=1.8)
    axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(roofs.attainable(low) / 2, 1.6 * roofs.teraflops))
    place = {"fontsize": 8, "ha": "left"}
    axis.text(1.15 * roofs.ridge, 1.06 * roofs.teraflops, f"matrix product {roofs.teraflops:.0f} TFLOP/s", **place)
    slope = math.degrees(math.atan(roofs.terabytes))  # of the roof in data units: the text lies along it
    slanted = {"rotation": slope, "rotation_mode": "anchor", "transform_rotates_text": True, "va": "bottom"}
    axis.text(2.5 * low, 1.06 * roofs.attainable(2.5 * low), f"copy {roofs.terabytes:.2f} TB/s", **slanted, **place)
    axis.axvline(roofs.ridge, color="black", linewidth=0.8, linestyle=":")
    axis.text(1.05 * roofs.ridge, roofs.attainable(low) / 1.85, f"ridge {roofs.ridge:.0f} FLOP/byte", **place)
    axis.minorticks_off()
    steps = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
    for place, (least, most) in ((axis.set_xticks, axis.get_xlim()), (axis.set_yticks, axis.get_ylim())):
        ticks = [step for step in steps if least <= step <= most]
        place(ticks, [str(tick) for tick in ticks])


def draw_points(axis, mine):
    """One callable's points over the lengths; hollow but for ours, so that what lies beneath shows."""
    name, style = mine[0].name, plots.STYLES[mine[0].name]
    x, y = [one.intensity for one in mine], [one.teraflops for one in mine]
    look = {"color": style.color, "marker": style.marker, "linestyle": style.dash, "linewidth": 1.2, "markersize": 7}
    if name != "ours":
        look["markerfacecolor"] = "none"
    axis.plot(x, y, label=style.label, zorder=3 if name == "ours" else 2, **look)
    if name in ("ours", "standard"):
        # Standard attention's points lie close together: the first and the last say which way the lengths run.
        named = mine if name == "ours" else dict.fromkeys((mine[0], mine[-1]))
        for one in named:
            look = {"textcoords": "offset points", "fontsize": 8, "color": style.color}
            offset = (-4, 8) if name == "ours" else (8, -3)
            axis.annotate(plots.short(one.seqlen), (one.intensity, one.teraflops), xytext=offset, **look)


def ladder(points, facts):
    """The figure of bars a generation at each case's greatest length, with the matrix product of the same rounds."""
    split = panels(points)
    figure, axes = plots.canvas(1, len(split), (6.4 * len(split), 5.2), sharey=True)
    for axis, (panel, mine) in zip(axes[0], split.items(), strict=True):
        longest = max(one.seqlen for one in mine)
        draw_ladder(axis, {one.name: one for one in mine if one.seqlen == longest})
        axis.set_title(f"{panel}, length {longest}", fontsize=10)
    axes[0, 0].set_ylabel("TFLOP/s (and share of the matrix product)")
    plots.title(figure, "The ladder of generations, attention forward", facts)
    return figure


def draw_ladder(axis, cell):
    names = [name for name in LADDER if name in cell]
    styles = [plots.STYLES[name] for name in names]
    rates, product = [cell[name].teraflops for name in names], cell["matmul"].teraflops
    axis.set_axisbelow(True)
    bars = axis.bar(range(len(names)), rates, 0.75, color=[style.color for style in styles], edgecolor="black")
    for bar, style in zip(bars, styles, strict=True):
        bar.set_hatch(style.hatch)
    labels = [f"{rate:.0f}\n{rate / product:.0%}" for rate in rates]
    axis.bar_label(bars, labels, padding=3, fontsize=9)
    axis.axhline(product, color="black", linewidth=1.5)
    axis.text(-0.4, product * 1.015, f"matrix product {product:.0f}", fontsize=8)
    axis.set_xticks(range(len(names)), [style.label.replace(" (", "\n(") for style in styles], rotation=30, ha="right")
    axis.grid(False, axis="x")
    axis.set_ylim(0, 1.15 * max(product, *rates))

"""How our pictures look: one style a name (colour, marker, dash, hatch: told apart in grey print), titles and files."""

import sys
from pathlib import Path
from typing import NamedTuple


class Style(NamedTuple):
    label: str
    color: str  # also of different brightness, for grey print
    marker: str
    dash: str
    hatch: str


STYLES = {
    "ours": Style("hopper_fa3", "#b2182b", "o", "-", ""),
    "fa4": Style("FlashAttention-4", "#2166ac", "s", "--", "//"),
    "cudnn": Style("cuDNN", "#1b7837", "^", "-.", "\\\\"),
    "flash": Style("FlashAttention-2 (torch)", "#e08214", "v", ":", "xx"),
    "efficient": Style("memory-efficient (torch)", "#8073ac", "D", "--", ".."),
    "xformers": Style("xFormers", "#35978f", "P", "-.", "++"),
    "standard": Style("standard (torch, unfused)", "#7f7f7f", "X", ":", "oo"),
    "math": Style("math backend (torch)", "#bdbdbd", "*", ":", "--"),
    "matmul": Style("matrix product 8192³", "#000000", "", "-", ""),
}


def canvas(rows=1, columns=1, size=(9, 5), **options):
    """``(figure, axes)`` of matplotlib, drawn without a display; axes is always a 2-D array. ImportError without
    matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 110})
    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)


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
    print(f"wrote {path}", file=sys.stderr)
    return path

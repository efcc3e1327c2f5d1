"""What cells are to reach beside FlashAttention-4 and beside ours of the same run, and if they do: a part of
tables.markdown.
"""

import statistics
from typing import NamedTuple

import yardsticks

LEAST = 1.0  # ours / fa4 in every cell, also of the deterministic gradients
KEPT = 0.9  # deterministic: of the speed of ours that is not
# (head_dim, causal) -> length -> ours / fa4
GRID = {
    (64, False): {2048: 1.08, 8192: 1.12, 16384: 1.08},
    (64, True): {2048: 1.10, 8192: 1.16, 16384: 1.16},
    (128, False): {2048: 1.07, 8192: 1.09, 16384: 1.04},
    (128, True): {2048: 1.09, 8192: 1.12, 16384: 1.10},
}
DIMS = {(256, 256): 1.3, (192, 128): 1.1, (80, 80): 1.05, (96, 96): 1.05, (192, 192): 1.05}  # at every length
GROUPED = 1.05  # 32/4 heads at head_dim 128


class Goal(NamedTuple):
    asked: float | None  # ours / fa4
    least: float | None  # likewise; None: nothing less than the goal will do
    kept: float | None = None  # share of the speed of ours without the feature, or not deterministic

    def __str__(self):
        kept = [] if self.kept is None else [f"{self.kept:.2f} kept"]
        asked = [] if self.asked is None else [f"{self.asked:.2f}"]
        return ", ".join(kept + asked) + ("" if self.least is None else f"; {self.least:.2f}")


WINDOW = 1 / 1.15  # a window's time is at most 1.15 times that of its share of the dense call's blocks
# Features (tables.Cell.feature), at every head dim, in kernel time
FEATURES = {
    "window 128": Goal(1.4, LEAST, WINDOW),
    "window 1024": Goal(None, LEAST, WINDOW),
    "window 4096": Goal(None, LEAST, WINDOW),
    "16 x 1024": Goal(1.15, LEAST, 0.97),
    "64 lognormal": Goal(1.15, LEAST, 0.97),
}
# feature -> head_dim -> share of the speed of plain scores, through the public function
SOFTCAP = {128: 0.85, 256: 0.85}
SCORES = {"softcap 50": SOFTCAP, "softcap 15": SOFTCAP, "sink": {128: 0.98}, "ALiBi": {128: 0.95}}


def goal(cell):
    """The Goal of a cell (tables.Cell), or None where there is none."""
    if cell.dtype != "bfloat16":
        return None
    if cell.feature:
        return _feature_goal(cell)
    if cell.kind == "deterministic":
        return Goal(None, LEAST, KEPT)
    if cell.kind != "autograd":
        return None
    dims = (cell.head_dim, cell.head_dim_v)
    if cell.heads != cell.heads_k:
        asked = GROUPED if (dims, cell.heads, cell.heads_k) == ((128, 128), 32, 4) else None
    elif dims in DIMS:
        asked = DIMS[dims]
    else:
        asked = GRID.get((cell.head_dim, cell.causal), {}).get(cell.seqlen) if dims[0] == dims[1] else None
    return asked and Goal(asked, LEAST)


def _feature_goal(cell):
    if cell.feature in SCORES:
        kept = SCORES[cell.feature].get(cell.head_dim) if cell.kind in ("public", "autograd") else None
        return kept and Goal(None, None, kept)
    return FEATURES.get(cell.feature) if cell.kind in ("kernel", "graph", "autograd", "autograd graph") else None


def met(asked, ratio, kept):
    """ "goal", "least" or "neither": what ours / fa4 and the share kept (None where unknown), unrounded, reach. ""
    where there is no fa4 to say so.
    """
    if asked.least is not None and ratio is None:
        return ""
    if asked.least is not None and ratio < asked.least:
        return "neither"
    pairs = ((asked.asked, ratio), (asked.kept, kept))
    if all(value is not None and value >= limit for limit, value in pairs if limit is not None):
        return "goal"
    return "neither" if asked.least is None else "least"


def columns(mine, measured, beside):
    """``(columns, lines)`` that only tables of gradients and features have. Columns: head -> Cell -> words.

    mine: the table's cells; measured: all cells (tables.cells); beside: Cell -> (ours / fa4 or None, the cell in
    words).
    """
    kept = {key: _kept(key, cell, measured) for key, cell in mine.items() if key.kind == "deterministic"}
    found, lines = {}, []
    for name in dict.fromkeys(name for shares in kept.values() for name in shares):
        share = {key: shares[name] for key, shares in kept.items() if name in shares}
        found[f"{name} / not deterministic"] = {key: f"{share[key]:.2f}" if key in share else "" for key in mine}
        least, mean = min(share, key=share.get), statistics.geometric_mean(share.values())
        where = f"{share[least]:.2f} ({beside[least][1]})"
        lines.append(f"- geometric mean of {name} / {name} not deterministic: {mean:.2f}; least {where}")
    asked = {key: one for key in mine if (one := goal(key)) and "ours" in mine[key]}
    if asked:
        own = {key: kept.get(key, {}).get("ours") or _own(key, measured) for key in asked}
        reached = {key: met(one, beside[key][0], own[key]) for key, one in asked.items()}
        found["goal; least"] = {key: str(asked.get(key, "")) for key in mine}
        found["met"] = {key: reached.get(key, "") for key in mine}
        lines += _count({key: word for key, word in reached.items() if word}, own, beside)
    return found, [*lines, ""] if lines else []


def _kept(key, cell, measured):
    """name -> the speed of deterministic gradients as a share of that of the others, which shared their rounds."""
    others = measured.get(key._replace(kind="autograd"), {})
    return {name: others[name].microseconds / row.microseconds for name, row in cell.items() if name in others}


def _own(key, measured):
    found = yardsticks.share_of(key, measured)
    return found and found.value


def _count(reached, own, beside):
    """A line on how many cells meet their goal, and which do not even meet the least."""
    if not reached:
        return []
    counts = {word: list(reached.values()).count(word) for word in ("goal", "least", "neither")}
    missed = {key: beside[key][0] for key, word in reached.items() if word == "neither"}
    missed |= {key: own[key] for key in missed if goal(key).least is None}
    below = [beside[key][1] + ("" if value is None else f": {value:.3f}") for key, value in missed.items()]
    text = f"{counts['goal']} of {len(reached)} cells meet the goal, {counts['least']} only the least"
    return [f"- goals, unrounded: {text}, {counts['neither']} neither" + (f" ({'; '.join(below)})" if below else "")]

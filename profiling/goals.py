"""What gradients are to reach beside FlashAttention-4's of the same run, and if they do: a part of tables.markdown."""

import statistics
from typing import NamedTuple

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
    """``asked`` is ours / fa4, or where ``kept`` the share of its speed that ours keeps when it is deterministic."""

    asked: float
    least: float  # ours / fa4
    kept: bool = False

    def __str__(self):
        return f"{self.asked:.2f}{' kept' if self.kept else ''}; {self.least:.2f}"


def goal(cell):
    """The Goal of a cell (tables.Cell), or None where there is none."""
    if cell.dtype != "bfloat16":
        return None
    if cell.kind == "deterministic":
        return Goal(KEPT, LEAST, kept=True)
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


def met(asked, ratio, kept):
    """ "goal", "least" or "neither": what ours / fa4 and the share kept (None where unknown), unrounded, reach."""
    if ratio < asked.least:
        return "neither"
    value = kept if asked.kept else ratio
    return "goal" if value is not None and value >= asked.asked else "least"


def columns(mine, measured, beside):
    """``(columns, lines)`` that only tables of gradients have. Columns: head -> Cell -> words.

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
        ratios = {key: beside[key][0] for key in asked if beside[key][0] is not None}
        reached = {key: met(asked[key], ratio, kept.get(key, {}).get("ours")) for key, ratio in ratios.items()}
        found["goal; least"] = {key: str(asked.get(key, "")) for key in mine}
        found["met"] = {key: reached.get(key, "") for key in mine}
        lines += _count(reached, beside)
    return found, [*lines, ""] if lines else []


def _kept(key, cell, measured):
    """name -> the speed of deterministic gradients as a share of that of the others, which shared their rounds."""
    others = measured.get(key._replace(kind="autograd"), {})
    return {name: others[name].microseconds / row.microseconds for name, row in cell.items() if name in others}


def _count(reached, beside):
    """A line on how many cells meet their goal, and which do not even meet the least."""
    if not reached:
        return []
    counts = {word: list(reached.values()).count(word) for word in ("goal", "least", "neither")}
    below = [f"{beside[key][1]}: {beside[key][0]:.3f}" for key, word in reached.items() if word == "neither"]
    text = f"{counts['goal']} of {len(reached)} cells meet the goal, {counts['least']} only the least"
    return [f"- goals, unrounded: {text}, {counts['neither']} neither" + (f" ({'; '.join(below)})" if below else "")]

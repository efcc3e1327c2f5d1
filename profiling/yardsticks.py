"""Ours beside ours: how much of the speed of a plain call a window, packed sequences or changed scores keep; a part of
tables.markdown.
"""

import statistics
from typing import NamedTuple

# The row that ours is measured by, in order of choice, and how: see suites.Yardstick
OWN = {"ours dense": "by blocks", "ours batched": "at equal work", "ours plain": "at equal work"}
# Kinds of rows without yardsticks of their own -> the kind that shared their rounds and has them
BASE = {"graph": "kernel", "public": "kernel", "autograd graph": "autograd"}


class Share(NamedTuple):
    """``value`` of the speed of the row ``name`` is kept."""

    name: str
    value: float


def speed(row):
    """By the work that our kernel's time should be proportional to; FLOPs, where no other is known."""
    return row.rate if row.work is None else row.work / row.microseconds


def share(cell, base):
    """The Share of ours in a cell (name -> tables.Row), by a yardstick in ``base``, another or the same; or None."""
    name = next((name for name in OWN if name in base), None)
    if name is None or "ours" not in cell or cell["ours"].rate is None:
        return None
    return Share(name, speed(cell["ours"]) / speed(base[name]))


def share_of(key, measured):
    """The Share of ours in the cell with this key, of all cells (tables.cells), or None."""
    cell = measured[key]
    return share(cell, cell) or share(cell, measured.get(key._replace(kind=BASE.get(key.kind, key.kind)), {}))


def columns(mine, measured, beside):
    """``(columns, lines)`` that only tables with yardsticks have. Columns: head -> Cell -> words.

    mine: the table's cells; measured: all cells (tables.cells); beside: Cell -> (ours / fa4 or None, the cell in
    words).
    """
    found, lines = {}, []
    visited = {key: cell["ours"].work for key, cell in mine.items() if "ours" in cell}
    if any(visited.values()):
        found["blocks visited"] = {key: f"{visited[key]:.2%}" if visited.get(key) else "" for key in mine}
    shares = {key: one for key in mine if (one := share_of(key, measured))}
    for name in dict.fromkeys(one.name for one in shares.values()):
        values = {key: one.value for key, one in shares.items() if one.name == name}
        head = f"ours / {name} {OWN[name]}"
        found[head] = {key: f"{values[key]:.2f}" if key in values else "" for key in mine}
        least, mean = min(values, key=values.get), statistics.geometric_mean(values.values())
        lines.append(f"- geometric mean of {head}: {mean:.2f}; least {values[least]:.2f} ({beside[least][1]})")
    return found, [*lines, ""] if lines else []

"""What the warps of one CTA did over time, read from a trace of the kernel's phases (kernels/phases.py).

Times are nanoseconds since the first warp of the launch started, in steps of the GPU's global timer (32 ns on an H200).
"""

from typing import NamedTuple

from hopper_fa3.kernels.config import WARPS_PER_WARPGROUP

SOFTMAX = ("MASK", "ROW_MAXIMUM", "EXPONENTIALS", "CATCH_UP")
# A matrix product is in flight from the moment its issue begins until the warp has waited for it: (first, last phase)
PRODUCTS = {"QKᵀ": ("ISSUE_QK", "WAIT_QK"), "PV": ("ISSUE_PV", "WAIT_PV")}


class Interval(NamedTuple):
    start: int
    end: int
    name: str  # a phase, or a product


class Warp(NamedTuple):
    """One warp's lifetime and the phases that it marked."""

    number: int  # within the CTA
    start: int
    end: int
    marks: tuple  # (time, phase), in order

    @property
    def role(self):
        warpgroup = self.number // WARPS_PER_WARPGROUP
        return "producer" if warpgroup == 0 else f"consumer {warpgroup - 1}"

    @property
    def phases(self):
        """Intervals from each mark to the next; the last mark says that the work is done."""
        following = [time for time, _ in self.marks[1:]]
        return [
            Interval(time, end, name) for (time, name), end in zip(self.marks, following, strict=False) if end > time
        ]

    @property
    def products(self):
        """Intervals in which a matrix product of this warpgroup was in flight, at the longest: a product may end
        before the wait for it returns.
        """
        found, begun = [], {}
        for (time, phase), (following, _) in zip(self.marks, self.marks[1:], strict=False):
            for name, (first, last) in PRODUCTS.items():
                if phase == first:
                    begun[name] = time
                elif phase == last and name in begun:
                    found.append(Interval(begun.pop(name), following, name))
        return sorted(found)

    @property
    def coverage(self):
        """Share of the warp's lifetime that its phases cover."""
        return sum(phase.end - phase.start for phase in self.phases) / (self.end - self.start)


class Cta(NamedTuple):
    """Lifetime of one CTA: from its first warp's start to its last warp's end."""

    number: int
    sm: int
    start: int
    end: int


def read(trace, cta=0):
    """``(kernel name, ctas, warps)`` of the last launch of a decoded IKET trace (a dict): the lifetimes of all CTAs,
    and the marks of each warpgroup's leading warp in one CTA. ValueError where the trace holds no such launch.
    """
    if not trace.get("launches"):
        raise ValueError("a trace must hold a launch, got none")
    launch, places, names = trace["launches"][-1], trace["locationTable"], trace["stringTable"]
    lives = [(places[life["locIdx"]], life["startTs"], life["endTs"]) for life in launch["warpLifetimes"]]
    if not lives:
        raise ValueError("a trace must hold the lifetimes of warps, got none")
    zero = min(start for _, start, _ in lives)
    ctas = {}
    for place, start, end in lives:
        number = place["ctaId"][0]
        known = ctas.get(number, Cta(number, place["smId"], start - zero, end - zero))
        ctas[number] = known._replace(start=min(known.start, start - zero), end=max(known.end, end - zero))
    marks = {}
    for mark in launch["markers"]:
        place = places[mark["locIdx"]]
        if place["ctaId"][0] == cta and place["warpId"] % WARPS_PER_WARPGROUP == 0:
            marks.setdefault(place["warpId"], []).append((mark["timestamp"] - zero, names[mark["markerNameIdx"]]))
    if not marks:
        raise ValueError(f"a trace must hold marks of CTA {cta}, got none")
    warps = [
        # Marks within one step of the timer have equal times: a stable sort keeps the order of recording
        Warp(place["warpId"], start - zero, end - zero, tuple(sorted(marks[place["warpId"]], key=lambda mark: mark[0])))
        for place, start, end in lives
        if place["ctaId"][0] == cta and place["warpId"] in marks
    ]
    return launch["kernelName"], sorted(ctas.values()), sorted(warps)


def union(intervals):
    """The same stretches of time without overlaps: sorted (start, end) pairs."""
    merged = []
    for start, end in sorted((interval[0], interval[1]) for interval in intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals):
    return sum(end - start for start, end in union(intervals))


def overlap(some, others):
    """Time in both of two sets of intervals."""
    return length(some) + length(others) - length([*some, *others])


def softmax(warp):
    return [phase for phase in warp.phases if phase.name in SOFTMAX]


def hidden(warp, others):
    """Share of a consumer's softmax during which one of ``others`` had a matrix product in flight."""
    mine = softmax(warp)
    return overlap(mine, [product for other in others for product in other.products]) / length(mine)


def steady(warp, blocks):
    """(start, end) of that many blocks of keys, one after the other without a tile's end between them, nearest to the
    middle of the warp's life; of fewer where no tile has as many.
    """
    runs, run = [], []
    for time, phase in warp.marks:
        if phase == "EPILOGUE" and run:
            runs.append(run)
            run = []
        elif phase == "WAIT_K":
            run.append(time)
    if not runs:
        raise ValueError(f"{warp.role} must have visited a block of keys, got none")
    blocks = min(blocks, max(len(run) for run in runs) - 1)
    middle = (warp.start + warp.end) / 2
    windows = [(run[i], run[i + blocks]) for run in runs for i in range(len(run) - blocks)]
    return min(windows, key=lambda window: abs(sum(window) / 2 - middle))


def span(ctas):
    """Time from the first CTA's start to the last one's end."""
    return max(cta.end for cta in ctas) - min(cta.start for cta in ctas)


def shares(warp):
    """Share of the warp's lifetime by phase, in order of first appearance."""
    found = {}
    for phase in warp.phases:
        found[phase.name] = found.get(phase.name, 0) + phase.end - phase.start
    return {name: time / (warp.end - warp.start) for name, time in found.items()}


def perfetto(kernel, sm, warps, names):
    """The CTA as a dict in the Trace Event Format, which ui.perfetto.dev opens: a row a warp for its phases, and
    below it a row a product: what overlaps in one row would not be shown. ``names``: phase -> what people read.
    """
    events = [{"ph": "M", "pid": sm, "name": "process_name", "args": {"name": f"{kernel}, SM {sm}"}}]
    for warp in warps:
        rows = {warp.number: (warp.role, [phase._replace(name=names[phase.name]) for phase in warp.phases])}
        for below, product in enumerate(PRODUCTS, 1):
            found = [one for one in warp.products if one.name == product]
            if found:
                rows[warp.number + below] = (f"{warp.role}: {product} in flight", found)
        for row, (name, intervals) in rows.items():
            events.append({"ph": "M", "pid": sm, "tid": row, "name": "thread_name", "args": {"name": name}})
            events += [
                {"ph": "X", "pid": sm, "tid": row, "name": i.name, "ts": i.start / 1e3, "dur": (i.end - i.start) / 1e3}
                for i in intervals
            ]
    return {"displayTimeUnit": "ns", "traceEvents": events}

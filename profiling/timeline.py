"""`make timeline CASE=d128-causal`: what each warpgroup of one CTA does over time: a picture, Perfetto, numbers.

The kernel's marks (kernels/phases.py) are recorded by run-iket, the tracer that comes with the CuTe DSL: it compiles
the kernel once more with the marks kept in. They cost some time, which the report
cannot tell from that of other clocks: it gives the time with and without them.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import environment
import plots
import selection
import tables
import torch
import warps as reading
from progress import say
from suites import ours_kernel
from timing import EventClock, interleaved

from hopper_fa3 import plan
from hopper_fa3.info import hopper_missing
from hopper_fa3.problem import Problem

CASE = "d128-causal-s4096-b1"  # about four tiles a CTA: long enough for a steady state, a trace of some 100 MB
LAUNCHES = 2  # under the tracer; the last one is read
TRACER_SECONDS = 180
TRACER = "import sys; from iket.cli.main import entrypoint; sys.argv[0] = 'run-iket'; entrypoint()"
ZOOM = 6  # blocks of the main loop that the enlarged part shows

COLORS = {
    "set up": "#cccccc", "take a tile": "#8c6bb1", "load Q": "#6a51a3", "load K": "#54278f", "load V": "#9e9ac8",
    "issue QKᵀ": "#08519c", "issue PV": "#6baed6", "mask": "#fdae6b", "row maximum": "#fd8d3c",
    "exponentials": "#a63603", "catch up": "#d7301f", "epilogue": "#238b45", "QKᵀ": "#08519c", "PV": "#6baed6",
}  # fmt: skip
WAITING = "#f0f0f0"
DOCUMENT = {"environment", "case", "kernel", "plan", "phases", "kernel_ns", "cta", "ctas", "warps"}  # of measure()
BARS = {"QKᵀ": (-0.4, 0.4), "PV": (0.0, 0.4)}  # both are in flight together: above and below in one row


def parser():
    root = argparse.ArgumentParser(prog="make timeline", description=__doc__.splitlines()[0])
    root.add_argument("--case", default=CASE, help=f"words as in {selection.FORM} (default: %(default)s)")
    root.add_argument("--cta", type=int, default=0, help="the CTA whose warps are shown (default: %(default)s)")
    root.add_argument("--no-pingpong", action="store_true", help="trace the kernel without turns")
    root.add_argument("--no-overlap", action="store_true", help="trace it without overlap inside a warpgroup")
    tables.output_options(root)
    root.add_argument("--workload", action="store_true", help=argparse.SUPPRESS)  # what runs under the tracer
    return root


def asked(chosen, options):
    """The Plan of the table without what the options take out."""
    return chosen._replace(
        pingpong=chosen.pingpong and not options.no_pingpong, overlap=chosen.overlap and not options.no_overlap
    )


def launched(options, case):
    """The case's kernel as a Launch."""
    q, k, v = case.inputs("cuda")
    chosen = asked(plan.choose(Problem.from_tensors(q, k, v, causal=case.causal).static), options)
    return ours_kernel(q, k, v, case.causal, plan=chosen), chosen


def workload(options, case):
    call, _ = launched(options, case)
    with torch.no_grad():
        for _ in range(LAUNCHES):
            call.call()
            torch.cuda.synchronize()  # else the next one's CTAs would start under this one, and wait


def traced(options):
    """The decoded trace of the workload, run under the tracer; RuntimeError with its last words where that fails."""
    own = [word for word in ("--no-pingpong", "--no-overlap") if getattr(options, word[2:].replace("-", "_"))]
    work = [sys.executable, __file__, "--workload", "--case", options.case, *own]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "trace")
        words = ["-o", str(out), "--clobber", "profile", "--postprocess", "json", "--", *work]
        command = [sys.executable, "-c", TRACER, *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TRACER_SECONDS, cwd=folder)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"run-iket was not done after {TRACER_SECONDS} s") from None
        files = sorted(out.glob("*.json"), key=lambda file: file.stat().st_size)
        if done.returncode or not files:
            words = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
            raise RuntimeError(f"run-iket failed (exit code {done.returncode}): {words[-1]}")
        return json.loads(files[-1].read_text())


def measure(options, case):
    """The result document: facts, the kernel's plain duration, all CTAs' lifetimes, one CTA's warps."""
    say("timing the kernel without marks ...")
    call, chosen = launched(options, case)
    with torch.no_grad():
        duration = interleaved({"ours": call}, EventClock())["ours"].median
    say("tracing it: run-iket compiles and runs it twice ...")
    from hopper_fa3.kernels.phases import Phase  # imports the DSL, which drawing an earlier result does without

    kernel, ctas, warps = reading.read(traced(options), options.cta)
    return {
        "environment": environment.describe({}, options.commit),
        "case": selection.slug(case),
        "kernel": kernel.removesuffix("_0"),  # the DSL numbers its kernels
        "plan": chosen._asdict(),
        "phases": {phase.name: phase.value for phase in Phase},
        "kernel_ns": round(duration * 1e9),
        "cta": options.cta,
        "ctas": ctas,
        "warps": warps,
    }


def loaded(path):
    """A result document as measure() made it; ValueError where the file is something else."""
    document = json.loads(path.read_text())
    if not isinstance(document, dict) or not document.keys() >= DOCUMENT:
        raise ValueError(f"{path} must be a timeline's JSON")
    document["ctas"] = [reading.Cta(*values) for values in document["ctas"]]
    document["warps"] = [
        reading.Warp(number, start, end, tuple(tuple(mark) for mark in marks))
        for number, start, end, marks in document["warps"]
    ]
    return document


def report(document):
    """The numbers, as Markdown."""
    warps, span = document["warps"], reading.span(document["ctas"])
    consumers = [warp for warp in warps if warp.role != "producer"]
    facts, chosen = document["environment"], document["plan"]
    lines = [
        f"# Timeline of {document['case']}, {facts['gpu']}, {facts['date']}",
        "",
        f"`{document['kernel']}`, commit {facts['commit']}; ping-pong {_on(chosen['pingpong'])}, overlap inside a "
        f"warpgroup {_on(chosen['overlap'])}. {len(document['ctas'])} CTAs; shown are the warps of number "
        f"{document['cta']}, on SM {_shown(document).sm}.",
        "",
        f"- CTA lifetimes span {span / 1e3:.1f} µs with the marks; without them the kernel takes "
        f"{document['kernel_ns'] / 1e3:.1f} µs ({span / document['kernel_ns'] - 1:+.1%}).",
    ]
    for warp in consumers:
        others = [other for other in consumers if other is not warp]
        blocks = sum(phase == "WAIT_K" for _, phase in warp.marks)
        each = (warp.end - warp.start) / blocks / 1e3
        hidden = f"softmax hidden under a product in flight {reading.hidden(warp, consumers):.0%}"
        if others:
            hidden += f", under another warpgroup's {reading.hidden(warp, others):.0%}"
        lines.append(f"- {warp.role}: {blocks} blocks of keys, {each:.2f} µs each; {hidden}.")
    found = [reading.shares(warp) for warp in warps]
    lines += ["", "Share of the lifetime (the leading warp of each warpgroup):", ""]
    lines += [f"| phase | {' | '.join(warp.role for warp in warps)} |", f"|---{'|---' * len(warps)}|"]
    for phase, name in document["phases"].items():
        if any(phase in share for share in found):
            figures = (f"{share[phase]:.1%}" if phase in share else "" for share in found)
            lines.append(f"| {name} | {' | '.join(figures)} |")
    lines.append(f"| **all phases** | {' | '.join(f'{warp.coverage:.1%}' for warp in warps)} |")
    lines += [
        "",
        "The kernel without marks is timed over many launches, where the SM clock falls towards the power limit; the "
        "traced launch stands alone.",
        "",
        "A product counts as in flight from the start of its issue until the wait for it returns: it may end earlier, "
        "so the shares of hidden softmax are upper bounds.",
        "",
    ]
    return "\n".join(lines)


def _on(flag):
    return "on" if flag else "off"


def _shown(document):
    return next(cta for cta in document["ctas"] if cta.number == document["cta"])


def picture(document):
    """The whole CTA, some blocks of it enlarged, and the lifetimes of all CTAs."""
    from matplotlib.patches import Patch

    names, warps = document["phases"], document["warps"]
    figure, axes = plots.canvas(3, 1, size=(13, 11), height_ratios=(2, 3, 2))
    whole, enlarged, lives = axes[:, 0]
    rows = []
    for warp in warps:
        rows.append((warp.role, [i._replace(name=names[i.name]) for i in warp.phases]))
        if warp.products:
            rows.append(("QKᵀ, PV in flight", warp.products))
    for axis in (whole, enlarged):
        for height, (_, intervals) in enumerate(rows):
            for name in dict.fromkeys(i.name for i in intervals):
                mine = [(i.start / 1e3, (i.end - i.start) / 1e3) for i in intervals if i.name == name]
                bottom, thickness = BARS.get(name, (-0.4, 0.8))
                axis.broken_barh(mine, (height + bottom, thickness), facecolor=_color(name), linewidth=0)
        axis.set_yticks(range(len(rows)), [name for name, _ in rows])
        axis.invert_yaxis()
        axis.grid(False)
    start, end = (time / 1e3 for time in reading.steady(warps[-1], ZOOM))
    enlarged.set_xlim(start, end)
    whole.set_xlim(0, max(warp.end for warp in warps) / 1e3)
    whole.axvspan(start, end, fill=False, edgecolor="black", linewidth=1.5)
    whole.set_title("one CTA, from start to end (framed: enlarged below)", fontsize=10)
    enlarged.set_title("some blocks of keys in the main loop", fontsize=10)
    ordered = sorted(document["ctas"], key=lambda cta: cta.sm)
    lives.barh([cta.sm for cta in ordered], [(cta.end - cta.start) / 1e3 for cta in ordered],
               left=[cta.start / 1e3 for cta in ordered], height=1, color="#6baed6")  # fmt: skip
    lives.axvline(document["kernel_ns"] / 1e3, color="black", linestyle="--")
    lives.set_xlim(0, 1.03e-3 * max(document["kernel_ns"], *(cta.end for cta in ordered)))  # the line not on the frame
    lives.set_title("lifetimes of all CTAs (dashed: duration of the kernel without marks)", fontsize=10)
    lives.set_ylabel("SM")
    for axis in (whole, enlarged, lives):
        axis.set_xlabel("time since the first warp's start [µs]")
    used = list(dict.fromkeys(i.name for _, intervals in rows for i in intervals if not i.name.startswith("wait")))
    handles = [Patch(color=_color(name), label=name) for name in used if name not in reading.PRODUCTS]
    handles.append(Patch(facecolor=WAITING, edgecolor="#999999", label="waits"))
    figure.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=9)
    plots.title(figure, f"{document['kernel']}, {document['case']}", document["environment"])
    return figure


def _color(name):
    return WAITING if name.startswith("wait") else COLORS[name]


def write(folder, document):
    """The document, the trace for Perfetto, the report and the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = document["plan"]
    variant = "".join(f"-no-{word}" for word in ("pingpong", "overlap") if not chosen[word])
    stem = environment.stem(f"timeline-{document['case']}{variant}", document["environment"])
    perfetto = reading.perfetto(document["kernel"], _shown(document).sm, document["warps"], document["phases"])
    files = {
        "json": f"{json.dumps(document, separators=(',', ':'))}\n".encode(),
        # Perfetto reads it as it is; without a time in it, equal traces are equal files
        "perfetto.json.gz": gzip.compress(json.dumps(perfetto, separators=(",", ":")).encode(), mtime=0),
        "md": report(document).encode(),
    }
    for ending, content in files.items():
        (folder / f"{stem}.{ending}").write_bytes(content)
        say(f"wrote {folder / stem}.{ending}")
    plots.draw(folder / f"{stem}.png", picture, document)


def main(words=None):
    options = parser().parse_args(words)
    try:
        case = selection.case(options.case)
        document = loaded(options.source) if options.source else None
    except (ValueError, OSError) as error:
        say(f"timeline: {error}")
        return 2
    missing = None if document else hopper_missing()
    if missing:
        say(f"timeline needs an sm_90 GPU (H100, H200): {missing}")
        return 2
    if options.workload:
        return workload(options, case)
    folder = options.out or (options.source.parent if options.source else environment.RESULTS)
    unwritable = environment.unwritable(folder)
    if unwritable:
        say(f"timeline: {unwritable}")
        return 2
    try:
        document = document or measure(options, case)
    except (RuntimeError, ValueError) as error:
        say(f"timeline: {error}")
        return 2
    write(folder, document)
    print(report(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())

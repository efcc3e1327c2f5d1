"""`make profile CASE=d128-causal`: Nsight Compute on one launch of our kernel, and a one-page report read from it.

Profiling needs a Hopper GPU, ncu, and the right to read performance counters. It leaves ncu's own report (.ncu-rep,
for its viewer) and its pages as CSV in the reports folder, which git ignores, and Markdown with a small JSON beside it
in the results folder. --from makes the latter two again out of the CSV, or the Markdown out of the JSON, without a GPU.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import environment
import ncu_report
import selection

from hopper_fa3 import flash_attn_func
from hopper_fa3.info import hopper_missing

WARM_UP = 2  # launches before the profiled one: the first compiles, the second finds everything in place
TIMEOUT = 400  # seconds; ncu replays the launch about 40 times, and the kernel is compiled first
INSTALLED = "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu"  # where ncu is when PATH does not name it
# Name of our CSV -> which page of ncu's report, and which view of it
PAGES = {
    "raw": ["raw"],
    "source": ["source"],
    "lines": ["source", "--print-source", "sass,cuda"],
    "session": ["session"],
}
FIGURES = {"case", "environment", "kernel", "metrics", "least", "teraflops", "registers_by_role", "roles", "lines"}
PERMISSION = "ERR_NVGPUCTRPERM"


class Unavailable(RuntimeError):
    """Profiling is not possible on this machine."""


class Parser(argparse.ArgumentParser):
    """Wrong words are answered in one line."""

    def error(self, message):
        self.exit(2, f"profile: {message} (--help explains)\n")


def described(words):
    """selection.case, its complaint in argparse's words."""
    try:
        return selection.case(words)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parser():
    root = Parser(
        prog="make profile CASE=... ARGS=...", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root.add_argument("--case", type=described, metavar="WORDS", help=f"such as d128-causal or {selection.FORM}")
    root.add_argument(
        "--from", dest="source", type=Path, metavar="FILE",
        help="no GPU needed: the JSON of an earlier run, or a folder of CSV pages (with --case)",
    )  # fmt: skip
    root.add_argument("--out", type=Path, help="folder of Markdown and JSON (default: profiling/results, or FILE's)")
    root.add_argument(
        "--reports", type=Path, default=environment.ROOT / "build" / "ncu", help="folder of ncu's report and CSV pages"
    )
    root.add_argument("--commit", help="recorded where this is no git checkout")
    root.add_argument("--workload", action="store_true", help="be the profiled program: launch the case a few times")
    return root


def workload(case):
    """Launch the kernel ``WARM_UP`` + 1 times: what ncu runs."""
    import torch

    inputs = case.inputs("cuda")
    for _ in range(WARM_UP + 1):
        flash_attn_func(*inputs, **case.options)
    torch.cuda.synchronize()


def find_ncu():
    """Path of ncu: on PATH, else the last of the usual places; Unavailable where there is none."""
    found = shutil.which("ncu") or next(
        (str(path) for pattern in INSTALLED for path in sorted(Path("/").glob(pattern[1:]), reverse=True)), None
    )
    if found is None:
        raise Unavailable("ncu (Nsight Compute) is neither on PATH nor in /opt/nvidia/nsight-compute")
    return found


def command(ncu, report, case):
    """The command that profiles one launch of a case into ``report``.

    Line information costs no instruction, but only this process needs it.
    """
    return [
        "env", "CUTE_DSL_LINEINFO=1", ncu, "--clock-control", "none", "--kernel-name", "regex:hopper_fa3",
        "--launch-skip", str(WARM_UP), "--launch-count", "1", "--set", "full", "--import-source", "yes",
        "--force-overwrite", "--export", str(report),
        sys.executable, str(Path(__file__).resolve()), "--workload", "--case", selection.slug(case),
    ]  # fmt: skip


def profile(ncu, folder, case):
    """Profile a case into ``folder``/report.ncu-rep and export its pages beside it; Unavailable where ncu fails."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.ncu-rep"
    report.unlink(missing_ok=True)
    done = run(command(ncu, report.with_suffix(""), case))
    if not report.exists():
        raise Unavailable(complaint(done))
    for name, page in PAGES.items():
        done = run([ncu, "--import", str(report), "--csv", "--print-units", "base", "--page", *page])
        if done.returncode:
            raise Unavailable(complaint(done))
        (folder / f"{name}.csv").write_text(done.stdout)
    return report


def run(words):
    """The finished process of a command; Unavailable where it does not end in time."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"ncu did not end within {TIMEOUT} s: {' '.join(words)}") from error


def complaint(done):
    """One line out of what ncu and the workload printed before they gave up."""
    said = f"{done.stdout}\n{done.stderr}".split("\n")
    if any(PERMISSION in line for line in said):
        allow = "run as root, or set NVreg_RestrictProfilingToAdminUsers=0"
        return f"ncu may not read performance counters ({PERMISSION}): {allow}"
    said = [line.strip() for line in said if line.strip()]
    errors = [line for line in said if "Error" in line or "==ERROR==" in line]
    return f"ncu failed: {(errors or said or ['it printed nothing'])[-1]}"


def measure(options, results):
    """Figures of a fresh profile, for the folder ``results``."""
    missing = hopper_missing()
    if missing is not None:
        raise Unavailable(f"profiling needs a Hopper GPU: {missing}")
    ncu, unwritable = find_ncu(), environment.unwritable(results)
    if unwritable:
        raise Unavailable(unwritable)
    folder = options.reports / selection.slug(options.case)
    print(f"profiling {selection.slug(options.case)} with {ncu}", file=sys.stderr, flush=True)
    report = profile(ncu, folder, options.case)
    facts = environment.describe({}, options.commit)
    (folder / "environment.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"for ncu-ui: {report}")
    return ncu_report.read(folder, options.case, facts)


def reread(options):
    """Figures of an earlier profile: its JSON, or its CSV pages."""
    if options.source.is_file():
        figures = json.loads(options.source.read_text())
        if not isinstance(figures, dict) or not figures.keys() >= FIGURES:
            raise ValueError(f"{options.source} must be a profile's JSON")
        return figures
    facts = options.source / "environment.json"
    known = json.loads(facts.read_text()) if facts.exists() else {"commit": options.commit}
    return ncu_report.read(options.source, options.case, known)


def write(folder, figures):
    """Write the page and its JSON; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = environment.stem(f"profile-{figures['case']}", figures["environment"])
    page, data = folder / f"{stem}.md", folder / f"{stem}.json"
    page.write_text(ncu_report.markdown(figures))
    data.write_text(json.dumps(figures, indent=1) + "\n")
    return page, data


def main(arguments=None):
    options = parser().parse_args(arguments)
    from_json = options.source is not None and options.source.is_file()
    if options.source is not None and not options.source.exists():
        parser().error(f"--from must name a file or a folder, got {options.source}")
    if options.case is None and not from_json:
        parser().error("--case is needed, as in --case d128-causal")
    if options.workload:
        workload(options.case)
        return 0
    folder = options.out or (options.source.parent if from_json else environment.RESULTS)
    try:
        figures = measure(options, folder) if options.source is None else reread(options)
        written = write(folder, figures)
    except (Unavailable, ValueError, OSError) as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

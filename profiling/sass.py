"""What our kernels are compiled into, without a GPU: `make sass`.

Without arguments: every kernel of plan.TABLE and main ones of the gradients, compiled to sm_90a: registers, spills,
instructions of an iteration of the main loops, and the clocks that they need at least. With cubin files: one line a
kernel. With --diff: the difference to another commit, whatever registers and addresses ptxas chose.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import sass_diff
import table_kernels
from loops import MainLoops, main_loops
from sass_figures import BASELINE, as_json, figures, markdown, versions

from hopper_fa3.machine_code import ToolMissing, disassemble, instructions, main_kernel, parse

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("HGMMA", "UTMALDG", "UTMASTG", "MUFU", "USETMAXREG", "STL", "LDL")


def line(resources, listing):
    """One line about any kernel: name, resources, counts of the whole code, and its main loops where it has them."""
    code = parse(resources, listing)
    counts = "  ".join(f"{family} {code.counts.get(family, 0)}" for family in SHOWN)
    memory = f"registers {code.registers}  stack {code.stack}  local {code.local}  static shared {code.shared}"
    try:
        sizes = zip(MainLoops._fields, main_loops(instructions(listing)), strict=True)
        loops = "  ".join(f"{name} {len(loop)}" for name, loop in sizes)
    except ValueError as error:
        loops = f"not found, {error}"
    return f"{code.name}: {memory}  {counts}  instructions {sum(code.counts.values())}  loops: {loops}"


def report(kernels):
    """{"versions": ..., "kernels": {name: figures}} of {name: Static or BackwardStatic}, compiled here."""
    made, found = None, {}
    for key, cubin in table_kernels.compiled(kernels):
        made = versions(cubin)
        try:
            found[key] = figures(kernels[key], *main_kernel(disassemble(cubin)))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    return {"versions": made, "kernels": found}


def print_difference(revision, cases, root=ROOT):
    """Print the diffs to a revision of the checkout ``root``, then a summary line for each kernel."""
    summaries = []
    with sass_diff.checkout(root, revision) as path, tempfile.TemporaryDirectory() as folder:
        other = sass_diff.start(path, folder, cases)
        try:
            now = dict(table_kernels.compiled(table_kernels.chosen(cases)))
            print(f"waiting for the kernels of {revision} ...", file=sys.stderr)
            before = sass_diff.finish(other, folder, revision)
        finally:
            other.kill()
            other.wait()
    for key in [*now, *(before.keys() - now.keys())]:
        text, summary = sass_diff.compare(key, before.get(key), now.get(key))
        print(text, end="")
        summaries.append(summary)
    print("\n".join(summaries))


def arguments(words):
    parser = argparse.ArgumentParser(prog="sass.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.cubin", help="report these files, compile nothing")
    parser.add_argument(
        "--case", action="append", default=[], help="only this kernel, as d128-causal-backward; may be repeated"
    )
    parser.add_argument("--out", type=Path, help="write sass.md and sass.json into this folder as well")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--diff", metavar="REV", help="how the machine code differs from that of this commit")
    other.add_argument(
        "--update-baseline", action="store_true", help=f"write {BASELINE.name}, which a test holds us to"
    )
    found = parser.parse_args(words)
    if found.files and (found.case or found.out or found.diff or found.update_baseline):
        parser.error("cubin files take no options")
    if found.update_baseline and found.case:
        parser.error("the baseline is of all kernels: no --case")
    if found.diff and found.out:
        parser.error("--diff only prints: no --out")
    return found


def run(chosen):
    if chosen.files:
        for path in chosen.files:
            try:
                print("\n".join(line(*texts) for texts in disassemble(path.read_bytes())))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        return
    if chosen.diff:
        print_difference(chosen.diff, chosen.case)
        return
    found = report(table_kernels.chosen(chosen.case))
    print(markdown(found), end="")
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "sass.md").write_text(markdown(found))
        (chosen.out / "sass.json").write_text(as_json(found))
    if chosen.update_baseline:
        BASELINE.write_text(as_json(found))
        print(f"wrote {BASELINE}", file=sys.stderr)


def main(words):
    chosen = arguments(words)
    try:
        run(chosen)
    except (ImportError, OSError, ValueError, ToolMissing, sass_diff.OtherCommit) as error:
        print(f"sass: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sass_diff.end_in_order()
    sys.exit(main(sys.argv[1:]))

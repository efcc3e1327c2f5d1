"""How the machine code of our kernels differs from another commit's, whatever registers and addresses ptxas chose."""

import contextlib
import itertools
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from loops import main_loops
from sass_figures import changes, iteration

from hopper_fa3.machine_code import disassemble, instructions, main_kernel

FOLDER = Path(__file__).resolve().parent
# In another process, because two packages of one name do not live in one
OTHER = "import sys; sys.path[:0] = sys.argv[1:3]; import table_kernels; table_kernels.main(*sys.argv[3:])"
REGISTERS = re.compile(r"\b(R|UR|P|UP)\d+\b")  # RZ, PT and barriers have no such number, or keep it


class OtherCommit(RuntimeError):
    """The other commit's kernels cannot be had."""


def normalised(lines):
    """Text of Instructions without what only says where things are kept: registers, predicates, addresses, labels.

    Labels that something jumps to stay as a line "label:"; barriers and constants keep their numbers.
    """
    targets = {line.target for line in lines if line.target}
    # A return address is loaded before a call, as a plain number
    returns = {hex(after.address) for call, after in itertools.pairwise(lines) if call.family == "CALL"}
    found = []
    for line in lines:
        found += ["label:"] if targets.intersection(line.labels) else []
        text = re.sub(r"`\([^)]+\)", "(label)", line.text.replace(".reuse", ""))
        text = REGISTERS.sub(r"\1", text)
        last = text.split()[-1]
        found.append(text.replace(last, "return") if line.family == "MOV" and last in returns else text)
    while found and found[-1] == "NOP":  # fills the last 128 bytes
        found.pop()
    return found


def compare(name, before, now):
    """(unified diff, summary in one line) of the main kernels of two cubins, of which one may be None."""
    if before is None or now is None:
        return "", f"{name}: only {'here' if before is None else 'in the other commit'}"
    before, now = (instructions(main_kernel(disassemble(cubin))[1]) for cubin in (before, now))
    return compare_lines(name, before, now)


def compare_lines(name, before, now):
    """As compare, of Instructions."""
    text = unified(name, normalised(before), normalised(now))
    if not text:
        return "", f"{name}: same"
    # The first lines of git's output name the two files
    changed = [line for line in text.split("\n@@", 1)[1].splitlines() if line[1:] != "label:"]
    added, removed = (sum(line.startswith(sign) for line in changed) for sign in "+-")
    return text, f"{name}: +{added}/-{removed} instructions, {loop_change(before, now)}"


def loop_change(before, now):
    """What became of the unmasked loop, in words."""
    try:
        before, now = (iteration(main_loops(lines).unmasked) for lines in (before, now))
    except ValueError as error:
        return f"loops not found: {error}"
    if before == now:
        return f"loop {now['instructions']} as before"
    return f"loop {before['instructions']} -> {now['instructions']} ({changes(before, now)})"


def unified(name, before, now):
    """A unified diff by git, which is fast where many lines are equal; "" for equal texts."""
    with tempfile.TemporaryDirectory() as folder:
        for side, lines in (("before", before), ("now", now)):
            path = Path(folder, side, f"{name}.sass")
            path.parent.mkdir()
            path.write_text("\n".join(lines) + "\n")
        command = ["git", "diff", "--no-index", "--no-color", "--no-ext-diff", "--no-prefix", "--minimal"]
        paths = [f"{side}/{name}.sass" for side in ("before", "now")]
        done = subprocess.run([*command, *paths], cwd=folder, capture_output=True, text=True)
        if done.returncode > 1:
            raise OtherCommit(f"git diff failed: {_last_line(done.stderr)}")
        return done.stdout


@contextlib.contextmanager
def checkout(root, revision):
    """The path of a temporary checkout of a revision; OtherCommit where there is none or it cannot compile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkout")
        _git(root, "worktree", "add", "--quiet", "--detach", str(path), revision)
        try:
            source = path / "hopper_fa3" / "compile.py"
            if not source.is_file() or "\ndef cubin(" not in source.read_text():
                raise OtherCommit(f"{revision} has no hopper_fa3.compile.cubin")
            link = path / "hopper_fa3" / "kernels"
            if not link.exists():  # before d9dc6f7: an installed hopper_fa3.kernels would be taken, of another commit
                link.symlink_to("../kernels")
            yield path
        finally:
            _git(root, "worktree", "remove", "--force", str(path))


def start(path, folder, names):
    """Start compiling the kernels of a checkout into ``folder``, in a process of its own; names as for `--case`."""
    command = [sys.executable, "-c", OTHER, str(path), str(FOLDER), str(folder), *names]
    with Path(folder, "errors").open("w") as errors:
        return subprocess.Popen(command, cwd=path, stdout=subprocess.DEVNULL, stderr=errors)


def finish(process, folder, revision):
    """{name: cubin} once the process has ended; OtherCommit, with its last words, where it failed."""
    if process.wait():
        raise OtherCommit(f"{revision} does not compile: {_last_line(Path(folder, 'errors').read_text())}")
    return {path.stem: path.read_bytes() for path in Path(folder).glob("*.cubin")}


def end_in_order():
    """Let SIGTERM, as Ctrl-C does, pass through what stands behind ``finally``, where the temporary checkout goes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _git(root, *arguments):
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OtherCommit(f"git {arguments[0]}: {_last_line(done.stderr)}")


def _last_line(text):
    return (text.strip().splitlines() or ["nothing said"])[-1]

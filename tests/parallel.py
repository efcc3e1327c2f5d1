"""Runs the tests in several processes at once: `python tests/parallel.py JOBS [pytest's arguments]`.

Most of the time of GPU tests goes into compiling kernels, one CPU core each. Each process runs a part of the tests
(conftest.py's --part). Prints what each says last and, where something failed, what; exit status 0 only if all passed.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

NO_TESTS = 5  # pytest's exit status of a part that happens to be empty
SUMMARY = re.compile(r"(\d+) (passed|failed|skipped|xfailed|xpassed|errors?)\b")


def main(jobs, arguments):
    """Exit status of ``jobs`` pytest processes with these ``arguments``."""
    started = time.monotonic()
    totals, worst = Counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{index}.log") for index in range(jobs)]
        processes = [start(log, index, jobs, arguments) for index, log in enumerate(logs)]
        for index, (process, log) in enumerate(zip(processes, logs, strict=True)):
            status, text = process.wait(), log.read_text(errors="replace")
            last = text.rstrip().rpartition("\n")[2]
            print(f"part {index + 1} of {jobs}: {last}", flush=True)
            counted = [(word, int(count)) for count, word in SUMMARY.findall(last)]
            totals.update(dict(counted))
            if status not in (0, NO_TESTS):
                worst = status
                print(text, flush=True)
    words = ", ".join(f"{count} {word}" for word, count in totals.items()) or "no tests"
    print(f"{words} in {time.monotonic() - started:.0f} s, {jobs} processes")
    return worst or (0 if totals else NO_TESTS)


def start(log, index, jobs, arguments):
    command = [sys.executable, "-m", "pytest", f"--part={index}/{jobs}", "-q", "-p", "no:cacheprovider", *arguments]
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1].isdigit() or int(sys.argv[1]) < 1:
        sys.exit(f"usage: python tests/parallel.py JOBS [arguments of pytest], JOBS at least 1, got {sys.argv[1:]}")
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

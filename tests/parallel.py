"""Runs the tests in several processes at once: `python tests/parallel.py JOBS [pytest's arguments]`.

Most of the time of GPU tests goes into compiling kernels, one CPU core each. Each process takes a group of tests, runs
it and takes the next (conftest.py's --claims), so all end at about the same time. Says every 20 s how far they are,
prints what each says last and, where something failed or was interrupted, all that it said, and which tests did not
run; exit status 0 only if all passed and each test ran once.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

NO_TESTS = 5  # pytest's exit status where it finds none
INTERRUPTED = 130  # a shell's status of a program ended by Ctrl-C
POLL_SECONDS, REPORT_SECONDS = 0.1, 20
NAMED = 10  # tests that a complaint names
SUMMARY = re.compile(r"(\d+) (passed|failed|skipped|xfailed|xpassed|errors?)\b")
PROGRESS = re.compile(r"^([.FEsxX]+)(?: +\[ *\d+%\])?$", re.MULTILINE)  # pytest's, a character a test


def main(jobs, arguments):
    """Exit status of ``jobs`` pytest processes with these ``arguments``."""
    started = time.monotonic()
    # As Ctrl-C: what the processes said so far is worth more than a silent end
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{index}.log") for index in range(jobs)]
        running = {index: start(log, jobs, arguments) for index, log in enumerate(logs)}
        try:
            statuses = wait(running, logs, started)
        except KeyboardInterrupt:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # timeout(1) may send another to the whole group
            for process in running.values():
                process.terminate()
            for index, process in running.items():
                process.wait()
                print(f"process {index + 1} of {jobs}, interrupted:\n{text_of(logs[index])}", flush=True)
            print("\n".join(miscounted(Path(folder), told=sys.maxsize)), flush=True)
            return INTERRUPTED
        totals = Counter()
        for log in logs:
            totals.update({word: int(count) for count, word in SUMMARY.findall(last_line(log))})
        complaints = list(miscounted(Path(folder), sum(totals.values())))
    words = ", ".join(f"{count} {word}" for word, count in totals.items()) or "no tests"
    print(f"{words} in {time.monotonic() - started:.0f} s, {jobs} processes")
    for complaint in complaints:
        print(complaint)
    bad = [status for status in statuses if status]
    if bad or complaints:
        return bad[0] if bad else 1
    return 0 if totals else NO_TESTS


def start(log, jobs, arguments):
    ours = [f"--claims={log.parent}", "-p", "no:cacheprovider"]
    # Last and not as -q, which adds up: an argument's second -q would take away the summaries that are counted here
    command = [sys.executable, "-m", "pytest", *ours, *arguments, "--verbosity=-1"]
    with log.open("w") as file:
        # Each takes its share of the cores: by default each would start as many threads as there are
        threads = str(max(1, os.cpu_count() // jobs))
        environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)


def wait(running, logs, started):
    """The processes' exit statuses. ``running`` {index: process} loses those that have ended, which are reported."""
    statuses, reported = [], started
    while running:
        for index in [index for index, process in running.items() if process.poll() is not None]:
            status = running.pop(index).returncode
            statuses.append(status)
            ended = f", status {status}" if status else ""
            print(f"process {index + 1} of {len(logs)}{ended}: {last_line(logs[index])}", flush=True)
            if status:
                print(text_of(logs[index]), flush=True)
        if running and time.monotonic() - reported >= REPORT_SECONDS:
            reported = time.monotonic()
            results = "".join("".join(PROGRESS.findall(text_of(log))) for log in logs)
            wrong = results.count("F") + results.count("E")
            print(f"{reported - started:.0f} s: {len(results)} tests, {wrong} failed, {len(running)} processes run")
            sys.stdout.flush()
        time.sleep(POLL_SECONDS)
    return statuses


def miscounted(folder, told):
    """What is wrong with how often tests ran, in sentences, by what the processes' conftest.py left in the folder.

    ``told`` is the number of results in the processes' summaries.
    """
    collected, ran = Counter(), Counter()
    for file in folder.glob("*.collected"):
        collected |= Counter(text_of(file).splitlines())
    for file in folder.glob("*.ran"):
        ran += Counter(text_of(file).splitlines())
    for tests, fault in ((collected - ran, "did not run to their end"), (ran - collected, "ran more than once")):
        if tests:
            names = sorted(tests)[:NAMED] + ["..."] * (len(tests) > NAMED)
            yield f"{len(tests)} of {len(collected)} tests {fault}: {', '.join(names)}"
    if told < sum(ran.values()):
        yield f"{sum(ran.values()) - told} results are not in these totals: a process ended without its summary"


def text_of(log):
    return log.read_text(errors="replace")


def last_line(log):
    return text_of(log).rstrip().rpartition("\n")[2]


if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1].isdigit() or int(sys.argv[1]) < 1:
        sys.exit(f"usage: python tests/parallel.py JOBS [arguments of pytest], JOBS at least 1, got {sys.argv[1:]}")
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

"""compute-sanitizer finds no error in the kernels: memory, shared-memory races, barriers."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sanitizer_target import TARGETS

FOUND = 9  # exit status of the tool when it has found something
LIMIT = 400  # seconds, for all: more processes than cores may be waiting
TOOLS = ("memcheck", "racecheck", "synccheck")
LAUNCHES = {what: len(cases) for what, (_, cases) in TARGETS.items()}
RUNS = [(tool, what) for tool in TOOLS for what in LAUNCHES] + [("memcheck", "plant")]
CLEAN = re.compile(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards")

pytestmark = [pytest.mark.gpu(limit=LIMIT + 30), pytest.mark.sanitizer]


@pytest.fixture(scope="module")
def sanitizer_runs(tmp_path_factory):
    """All runs at once, each a process of its own: most of their time is start and compilation, on the CPU."""
    tool = shutil.which("compute-sanitizer", path=os.environ["PATH"] + os.pathsep + "/usr/local/cuda/bin")
    if tool is None:
        pytest.skip("compute-sanitizer is not on PATH")
    target = str(Path(__file__).with_name("sanitizer_target.py"))
    # Without torch's caching allocator every tensor is an allocation of its own, whose ends memcheck knows.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    logs, processes = tmp_path_factory.mktemp("sanitizer"), {}
    for checker, what in RUNS:
        options = ["--tool", checker, "--error-exitcode", str(FOUND), "--print-limit", "5"]
        command = [tool, *options, sys.executable, target, what]
        with open(logs / f"{checker}-{what}", "w") as log:
            processes[checker, what] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    started = time.monotonic()

    def result(checker, what):
        try:
            status = processes[checker, what].wait(timeout=max(1, LIMIT - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            status = f"no end within {LIMIT} s"
        return status, (logs / f"{checker}-{what}").read_text()

    yield result
    for process in processes.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("what", LAUNCHES)
@pytest.mark.parametrize("tool", TOOLS)
def test_no_error_is_found(tool, what, sanitizer_runs):
    status, log = sanitizer_runs(tool, what)
    assert status == 0, f"{tool}: {status}\n{log[-6000:]}"
    assert CLEAN.search(log) and log.count("right: ") == LAUNCHES[what], log[-6000:]


def test_memcheck_finds_a_planted_write_past_the_end(sanitizer_runs):
    status, log = sanitizer_runs("memcheck", "plant")
    assert status == FOUND and "Invalid __global__ write" in log, f"{status}\n{log[-6000:]}"

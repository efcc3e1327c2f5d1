"""Tests in several processes: each runs once, and a failure anywhere is a failure."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import part_of
from parallel import PROGRESS

HERE = Path(__file__).parent


@pytest.fixture
def run(tmp_path):
    """Run parallel.py over a file of tests, here with conftest.py; its result."""

    def result(jobs, text, *arguments):
        tests = tmp_path / "test_some.py"
        tests.write_text(text)
        (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())
        command = [sys.executable, HERE / "parallel.py", str(jobs), tests, "-c", "/dev/null", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    return result


def test_every_test_runs_once(run):
    text = "import pytest\n@pytest.mark.parametrize('x', range(20))\ndef test(x): open(f'{x}.ran', 'x')\n"
    done = run(3, text)
    assert done.returncode == 0 and "20 passed in" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("part ") == 3


def test_a_failure_is_shown_and_fails(run):
    text = "def test_right(): pass\ndef test_wrong(): assert False, 'as it should'\ndef test_fine(): pass\n"
    done = run(2, text)
    assert done.returncode == 1 and "as it should" in done.stdout and "2 passed" in done.stdout
    assert "1 failed" in done.stdout


def test_no_test_at_all_fails(run):
    assert run(2, "", "-k", "nothing").returncode == 5


def test_an_interrupted_run_says_what_it_knows(tmp_path):
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())
    tests, started = tmp_path / "test_some.py", tmp_path / "started"
    tests.write_text(
        "import pathlib, time\ndef test_right(): pass\n"
        f"def test_slow():\n    pathlib.Path({str(started)!r}).touch()\n    time.sleep(60)\n"
    )
    command = [sys.executable, HERE / "parallel.py", "1", tests, "-c", "/dev/null"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "part 1 of 1, interrupted:\n." in said


def test_progress_counts_tests():
    said = "..F.s                                     [ 50%]\nE.\n1 failed\n"
    assert "".join(PROGRESS.findall(said)) == "..F.sE."


def test_a_number_of_processes_must_be_given():
    for given in ([], ["0"], ["-q"]):
        done = subprocess.run([sys.executable, HERE / "parallel.py", *given], capture_output=True, text=True)
        assert done.returncode == 1 and "JOBS at least 1" in done.stderr


def test_cases_of_one_pair_of_head_dims_stay_together():
    names = [f"tests/a.py::test[bf16-b{batch}-d96_128-causal]" for batch in range(9)]
    assert len({part_of(name, 7) for name in names}) == 1
    others = [f"tests/a.py::test[bf16-b1-d{width}_{width}-causal]" for width in range(8, 257, 8)]
    assert len({part_of(name, 7) for name in others}) > 4

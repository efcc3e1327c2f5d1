"""Tests in several processes: each runs once, whoever is free takes the next, and a failure anywhere is a failure."""

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import claimed, groups
from parallel import NAMED, PROGRESS, miscounted

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
    assert done.stdout.count("process ") == 3


@pytest.mark.parametrize("argument", ["-q", "-qq", "-v", "--durations=2"])
def test_the_summary_stands_whatever_the_verbosity(argument, run):
    done = run(2, "def test_one(): pass\ndef test_other(): pass\n", argument)
    assert done.returncode == 0 and "2 passed in" in done.stdout, done.stdout + done.stderr


def test_who_is_free_takes_the_next_test(run):
    """One process is held by the first test until all others have run: of shares dealt before, its own never would."""
    text = """
        import pathlib, time, pytest
        def test_slow():
            end = time.monotonic() + 60
            while len(list(pathlib.Path().glob("*.ran"))) < 20:
                assert time.monotonic() < end
                time.sleep(0.05)
        @pytest.mark.parametrize("x", range(20))
        def test(x): open(f"{x}.ran", "x")
    """
    done = run(2, textwrap.dedent(text))
    assert done.returncode == 0 and "21 passed in" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_fixture_serves_a_group_and_ends_with_it(jobs, run):
    text = """
        import pathlib, pytest
        @pytest.fixture(scope="module")
        def runs():
            open("begun", "x")  # only once, in whichever process
            yield
            open("ended", "x")
        @pytest.mark.sanitizer
        @pytest.mark.parametrize("x", range(3))
        def test(x, runs): assert not pathlib.Path("ended").exists()
        @pytest.mark.parametrize("case", ["a-d8_8-b", "c-d8_8-d"])
        def test_behind(case): assert JOBS > 1 or pathlib.Path("ended").exists()
    """
    done = run(jobs, textwrap.dedent(text).replace("JOBS", str(jobs)))
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout + done.stderr


def test_a_failure_is_shown_and_fails(run):
    text = "def test_right(): pass\ndef test_wrong(): assert False, 'as it should'\ndef test_fine(): pass\n"
    done = run(2, text)
    assert done.returncode == 1 and "as it should" in done.stdout and "2 passed" in done.stdout
    assert "1 failed" in done.stdout


@pytest.mark.parametrize(("end", "status"), [("os._exit(0)", 1), ("os.kill(os.getpid(), 9)", 247)])
def test_a_process_that_dies_is_told(end, status, run):
    done = run(2, f"import os\ndef test_fine(): pass\ndef test_dies(): {end}\ndef test_right(): pass\n")
    assert done.returncode == status, done.stdout + done.stderr
    assert "1 of 3 tests did not run to their end: test_some.py::test_dies" in done.stdout
    assert status == 1 or "status -9" in done.stdout


def test_results_that_died_with_their_process_are_told(run):
    done = run(1, "import os\ndef test_fine(): pass\ndef test_dies(): os._exit(0)\n")
    assert done.returncode == 1 and "no tests in" in done.stdout
    assert "1 of 2 tests did not run to their end" in done.stdout and "1 results are not" in done.stdout


def test_a_test_that_runs_twice_is_told(run):
    text = """
        import pathlib
        def test_again(request):  # by what it writes
            folder = request.config.getoption("--claims")
            pathlib.Path(folder, "other.ran").write_text(request.node.nodeid)
    """
    done = run(1, textwrap.dedent(text))
    assert done.returncode == 1 and "1 passed" in done.stdout
    assert "1 of 1 tests ran more than once: test_some.py::test_again" in done.stdout


def test_the_first_failure_ends_a_process_if_asked(run):
    done = run(1, "def test_wrong(): assert False\ndef test_next(): pass\n", "-x")
    assert done.returncode == 1 and "1 failed in" in done.stdout and "passed" not in done.stdout
    assert "1 of 2 tests did not run to their end: test_some.py::test_next" in done.stdout


def test_an_error_of_collection_fails(run):
    done = run(2, "def test_right(): pass\nimport nothing_of_this_name\n")
    assert done.returncode == 2 and "nothing_of_this_name" in done.stdout


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
    for _ in range(2):
        process.terminate()
        time.sleep(0.05)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "process 1 of 1, interrupted:\n." in said
    assert re.search(r"1 of 2 tests did not run to their end: \S*test_slow", said)


def test_progress_counts_tests():
    said = "..F.s                                     [ 50%]\nE.\n1 failed\n"
    assert "".join(PROGRESS.findall(said)) == "..F.sE."


def test_a_number_of_processes_must_be_given():
    for given in ([], ["0"], ["-q"]):
        done = subprocess.run([sys.executable, HERE / "parallel.py", *given], capture_output=True, text=True)
        assert done.returncode == 1 and "JOBS at least 1" in done.stderr


def named(name, *marks, **arguments):
    marks = {mark: SimpleNamespace(args=()) for mark in marks} | {
        mark: SimpleNamespace(args=(argument,)) for mark, argument in arguments.items()
    }
    return SimpleNamespace(nodeid=name, get_closest_marker=marks.get)


def test_groups_share_kernels_or_a_fixture_and_what_takes_long_comes_first():
    some = [named(f"a.py::test[bf16-b{batch}-d96_128-causal]") for batch in range(3)]
    more = [named(f"a.py::test_{name}[b1-d96_96-causal]") for name in "abcd"]
    other = named("b.py::test[bf16-b1-d96_128-causal]")
    dense = named("a.py::test[bf16-b1-d96_96-dense]")  # another mask
    alone = [named("a.py::test[x]"), named("a.py::test[y]")]
    checked = [named(f"c.py::test[{tool}]", "sanitizer") for tool in "xy"]
    mixed = [some[0], alone[0], more[0], *some[1:], other, *more[1:], *checked, alone[1], dense]
    assert groups(mixed) == [checked, more, some, [alone[0]], [other], [alone[1]], [dense]]


def test_a_mark_says_which_kernels_where_a_name_does_not():
    marked = [named(f"a.py::test_{name}", kernels="8_8") for name in "xyz"]
    spoken, elsewhere = named("a.py::test[-d8_8-]", kernels="8_8"), named("b.py::test_x", kernels="8_8")
    assert groups([spoken, elsewhere, *marked]) == [marked, [spoken], [elsewhere]]


def test_a_group_is_claimed_as_late_as_possible_and_once(tmp_path):
    a, b, c, d = tests = [named(f"a.py::test_{name}") for name in ("x[-d8_8-]", "y[-d8_8-]", "z", "w")]
    one, other = claimed(tests, tmp_path), claimed(tests, tmp_path)
    assert next(one) == (a, b) and next(other) == (c, None)
    assert next(one) == (b, None) and next(other) == (d, None)
    assert [*one, *other] == []


def test_complaints_name_tests_that_ran_never_or_twice(tmp_path):
    names = [f"a.py::test_{index:02}" for index in range(40)]
    (tmp_path / "1.collected").write_text("\n".join(names[:30]))
    (tmp_path / "2.collected").write_text("\n".join(names))
    (tmp_path / "1.ran").write_text("\n".join(names[:30]))
    (tmp_path / "2.ran").write_text("\n".join(names[30:]))
    assert list(miscounted(tmp_path, 40)) == []
    assert list(miscounted(tmp_path, 41)) == []  # a test that fails and whose fixture fails after it is two results
    (lost,) = miscounted(tmp_path, 38)
    assert lost.startswith("2 results are not in these totals")
    (tmp_path / "2.ran").write_text(names[3])
    never, twice = miscounted(tmp_path, 31)
    assert never == f"10 of 40 tests did not run to their end: {', '.join(names[30:])}" and NAMED == 10
    assert twice == f"1 of 40 tests ran more than once: {names[3]}"
    (tmp_path / "1.ran").unlink()
    assert next(miscounted(tmp_path, 1)).endswith(f"{names[10]}, ...")

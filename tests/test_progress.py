"""The progress of a measurement: a line per step, or on a terminal one line that is written anew."""

import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
from progress import WIDTH, Progress, clock


class Terminal(io.StringIO):
    def isatty(self):
        return True


def ticking(stream, total=4):
    seconds = iter(range(0, 1000, 10))  # ten more at every look
    return Progress(total, stream, lambda: next(seconds))


def test_without_a_terminal_each_step_leaves_its_result():
    stream = io.StringIO()
    progress = ticking(stream)
    progress.begin("a")
    progress.note("without fa4")
    progress.end("a: 500 TFLOP/s")
    progress.close()
    assert stream.getvalue() == "without fa4\n[1/4] a: 500 TFLOP/s (10 s)\n"


def test_a_terminal_sees_bar_step_and_expected_time_in_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    progress = ticking(stream)
    progress.begin("first")
    progress.end("first: 500 TFLOP/s")
    progress.begin("second")
    shown = stream.getvalue().split("\r\x1b[K")[1:]
    assert shown[0] == f"[{'.' * WIDTH}] 1/4 first  0:10 / ?"
    assert shown[1] == f"[{'#' * (WIDTH // 4)}{'.' * (WIDTH * 3 // 4)}] 2/4 second  0:20 / 1:20"
    progress.note("without fa4")
    assert stream.getvalue().endswith(f"\r\x1b[Kwithout fa4\n{shown[1]}")  # the note stands above the line
    progress.close()
    assert stream.getvalue().endswith(f"{shown[1]}\n")


def test_clock():
    assert [clock(seconds) for seconds in (0, 59.9, 60, 725)] == ["0:00", "0:59", "1:00", "12:05"]

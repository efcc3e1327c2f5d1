"""What is said on stderr: single lines, and how far a measurement is (one updating line on a terminal, else a line a
step).
"""

import shutil
import sys
import time

WIDTH = 24  # characters of the bar


def say(text):
    print(text, file=sys.stderr, flush=True)


def clock(seconds):
    """``"2:05"`` for 125 seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """Counts ``total`` steps. ``note`` says something in a line of its own at any time."""

    def __init__(self, total, stream=None, now=time.monotonic):
        self.total, self.stream, self.now = total, stream or sys.stderr, now
        self.started, self.done = now(), 0
        self.live = self.stream.isatty()
        self.shown = ""

    def spent(self):
        return self.now() - self.started

    def begin(self, label):
        """A step starts: shown on a terminal only."""
        if self.live:
            self._show(label)

    def end(self, text):
        """A step is done; ``text`` says with what result where there is no terminal."""
        self.done += 1
        if not self.live:
            self._print(f"[{self.done}/{self.total}] {text} ({self.spent():.0f} s)")

    def close(self):
        """Leaves the updating line behind."""
        if self.shown:
            self.shown = ""
            self._print("")

    def note(self, text):
        if self.shown:
            self.stream.write("\r\x1b[K")
        self._print(text)
        if self.shown:
            self.stream.write(self.shown)
            self.stream.flush()

    def line(self, label):
        """Bar, step, and time elapsed of what the steps so far let expect."""
        full = WIDTH * self.done // self.total
        spent = self.spent()
        expected = clock(spent * self.total / self.done) if self.done else "?"
        step = min(self.done + 1, self.total)
        return f"[{'#' * full}{'.' * (WIDTH - full)}] {step}/{self.total} {label}  {clock(spent)} / {expected}"

    def _show(self, label):
        self.shown = self.line(label)[: shutil.get_terminal_size().columns - 1]
        self.stream.write(f"\r\x1b[K{self.shown}")
        self.stream.flush()

    def _print(self, text):
        print(text, file=self.stream, flush=True)

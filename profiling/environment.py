"""What a measurement was taken on: GPU, driver, clocks, versions, commit, date; and the SM clock while it runs."""

import datetime
import platform
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import torch

from hopper_fa3.info import SHOWN_PACKAGES, hopper_missing, smi, version

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "profiling" / "results"
SMI_FIELDS = {
    "driver": "driver_version",
    "power_limit": "power.limit",
    "max_sm_clock": "clocks.max.sm",
    "memory_clock": "clocks.mem",
    "temperature": "temperature.gpu",
}


def commit():
    """The checked-out commit, with "-dirty" where tracked files differ from it; None outside a git checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def describe(peer_versions, at_commit=None):
    """A flat dictionary of all that must stand beside a figure. ``at_commit`` names the commit where git cannot."""
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": at_commit or commit(),
        "gpu": torch.cuda.get_device_name(),
        "sms": torch.cuda.get_device_properties(0).multi_processor_count,
        **dict(zip(SMI_FIELDS, smi(*SMI_FIELDS.values()), strict=True)),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }
    packages = {package: version(package) for package in SHOWN_PACKAGES if package not in ("torch", "hopper-fa3")}
    return found | packages | peer_versions


def stem(what, facts):
    """Name of a result file without its ending: what was measured, on which GPU, on which day."""
    return f"{what}-{facts['gpu'].replace(' ', '-').lower()}-{facts['date'][:10]}"


def unwritable(folder):
    """Why no result can be written into a folder, which is made, or None. Asked first: measuring takes minutes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder} cannot take the results: {error.strerror}"


def obstacle(verb, folder):
    """Why ``verb`` cannot measure into a folder here, in one line, or None."""
    missing = hopper_missing()
    if missing:
        return f"{verb} needs an sm_90 GPU (H100, H200): {missing}"
    why = unwritable(folder)
    return why and f"{verb}: {why}"


class Clocks:
    """Samples SM clock (MHz) and power (W) with nvidia-smi in the background, five times a second, while it is held."""

    def __init__(self):
        self.samples = []  # (time.monotonic(), MHz, W)
        self.process = None

    def __enter__(self):
        query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
        command = ["nvidia-smi", *query, "-lms", "200", "--id=0"]
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return self  # no nvidia-smi: figures then stand without clocks
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self):
        for line in self.process.stdout:
            try:
                clock, power = (float(value) for value in line.split(","))
            except ValueError:
                continue  # "[N/A]"
            self.samples.append((time.monotonic(), clock, power))

    def __exit__(self, *failure):
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def since(self, start):
        """(median MHz, median W) of the samples after ``start`` (time.monotonic()); Nones where there are none."""
        taken = [sample for sample in list(self.samples) if sample[0] >= start]
        if not taken:
            return None, None
        return statistics.median(sample[1] for sample in taken), statistics.median(sample[2] for sample in taken)

"""Reads compiled kernels: registers, memory and instruction counts of a cubin. Needs no GPU, no torch and no cutlass.

The figures come from NVIDIA's own disassemblers, which `make setup` installs from the packages nvidia-cuda-cuobjdump
and nvidia-cuda-nvdisasm; executables of a CUDA toolkit on PATH serve as well.
"""

import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

PACKAGES = {"cuobjdump": "nvidia-cuda-cuobjdump", "nvdisasm": "nvidia-cuda-nvdisasm"}

RESOURCES = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
# "/*0a40*/   @!P0 HGMMA.64x128x16.F32.BF16 R24, ..." : address, an optional predicate, the opcode with its modifiers
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(\S*)", re.MULTILINE)


class ToolMissing(RuntimeError):
    """A disassembler is not installed."""


class MachineCode(NamedTuple):
    """What one compiled kernel asks of an SM, and the instructions that it consists of."""

    name: str
    registers: int  # per thread at launch; setmaxnreg moves them between warpgroups afterwards
    stack: int  # bytes per thread
    shared: int  # bytes of shared memory fixed at compile time; the tiles are requested at launch and not in here
    local: int  # bytes of local memory per thread
    counts: dict  # opcode family (HGMMA, UTMALDG, MUFU, ...) -> instructions in the code, not executions

    @property
    def spills(self):
        """Instructions that move registers to local memory and back, wherever they come from."""
        return self.counts.get("STL", 0) + self.counts.get("LDL", 0)


def report(cubin):
    """MachineCode of a cubin (bytes) that holds one kernel.

    Raises ToolMissing (a RuntimeError) where cuobjdump or nvdisasm is not installed, ValueError where ``cubin`` is not
    the machine code of exactly one kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        resources = _run("cuobjdump", "-res-usage", path)
        listing = _run("nvdisasm", "-c", path)
    return parse(resources, listing)


def parse(resources, listing):
    """MachineCode from the text of ``cuobjdump -res-usage`` and of ``nvdisasm -c``; ValueError as in report()."""
    kernels = RESOURCES.findall(resources)
    if len(kernels) != 1:
        names = ", ".join(kernel[0] for kernel in kernels) or "none"
        raise ValueError(f"cubin must hold exactly one kernel, got {names}")
    name, *numbers = kernels[0]
    counts = Counter(family for family, _ in INSTRUCTION.findall(listing))
    if not counts:
        raise ValueError("cubin must hold instructions, got none in the disassembly")
    return MachineCode(name, *map(int, numbers), dict(counts))


def disassembler(tool):
    """Path of ``cuobjdump`` or ``nvdisasm``: from its pip package, else from PATH; else ToolMissing."""
    try:
        files = importlib.metadata.files(PACKAGES[tool]) or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for file in files:
        if file.name == tool and Path(file.locate()).is_file():
            return str(Path(file.locate()).resolve())
    found = shutil.which(tool)
    if found is None:
        raise ToolMissing(f"{tool} is not installed: run `make setup`, or `pip install {PACKAGES[tool]}`")
    return found


def _run(tool, option, path):
    done = subprocess.run([disassembler(tool), option, str(path)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{tool} cannot read this cubin: {(done.stderr or done.stdout).strip()}")
    return done.stdout

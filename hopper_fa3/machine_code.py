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
# "/*0a40*/   @!P0 HGMMA.64x128x16.F32.BF16 R24, ... ;": address, an optional predicate, opcode with modifiers, operands
INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(([A-Z][A-Z0-9_]*)[^\s;]*)\s*([^;]*?)\s*;?\s*$"
)
LABEL = re.compile(r"^([.$\w]+):\s*$")
REFERENCE = re.compile(r"`\(([^)]+)\)")
SECTION = re.compile(r"^//-+ \.text\.(\S+) -+$", re.MULTILINE)  # what nvdisasm writes above a kernel
PTXAS = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")


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


class Instruction(NamedTuple):
    """One line of a disassembly."""

    address: int  # bytes from the start of the kernel
    labels: tuple  # names that stand in front of it
    predicate: str  # "P0", "!UP1", or "" where it always runs
    opcode: str  # with its modifiers: HGMMA.64x128x16.F32.BF16
    family: str  # without them: HGMMA
    operands: str

    @property
    def target(self):
        """The label that it names (where a branch goes), or None."""
        found = REFERENCE.search(self.operands)
        return found and found[1]

    @property
    def text(self):
        """The instruction as the disassembler writes it, without its address."""
        predicate = f"@{self.predicate} " if self.predicate else ""
        return f"{predicate}{self.opcode} {self.operands}".rstrip()


def report(cubin):
    """MachineCode of a cubin (bytes) that holds one kernel.

    Raises ToolMissing (a RuntimeError) where cuobjdump or nvdisasm is not installed, ValueError where ``cubin`` is not
    the machine code of exactly one kernel.
    """
    found = reports(cubin)
    if len(found) != 1:
        raise ValueError(f"cubin must hold exactly one kernel, got {', '.join(code.name for code in found)}")
    return found[0]


def reports(cubin):
    """MachineCode of each kernel of a cubin (bytes), in the order of launch; errors as in disassemble()."""
    return [parse(*texts) for texts in disassemble(cubin)]


def disassemble(cubin):
    """For each kernel of a cubin (bytes), in the order of launch: the texts of ``cuobjdump -res-usage`` and ``nvdisasm
    -c`` about it. Raises ToolMissing as report() does, ValueError where ``cubin`` is no machine code of a kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return split(_run("cuobjdump", "-res-usage", path), _run("nvdisasm", "-c", path))


def split(resources, listing):
    """The two disassemblers' texts about a whole cubin as pairs of texts about one kernel, in the order of launch: the
    DSL numbers kernels by it, at the end of their names.
    """
    _, *parts = SECTION.split(listing)
    listings = dict(zip(parts[::2], parts[1::2], strict=True))
    found = {match[1]: match[0] for match in RESOURCES.finditer(resources)}
    if not found or found.keys() != listings.keys():
        known, shown = (", ".join(sorted(names)) or "none" for names in (found, listings))
        raise ValueError(f"both disassemblers must show the same kernels, got {known} and {shown}")
    return [(found[name], listings[name]) for name in sorted(found, key=_launch_number)]


def main_kernel(kernels):
    """Of the pairs of disassemble(), the first with matrix products: a backward's cubin holds a kernel before it and
    others behind, of which one may have products too (dQ by itself). ValueError where none has them.
    """
    found = (texts for texts in kernels if re.search(r"\bHGMMA\b", texts[1]))
    main = next(found, None)
    if main is None:
        raise ValueError(f"a kernel must have HGMMA, got none of {len(kernels)}")
    return main


def parse(resources, listing):
    """MachineCode from a kernel's pair of texts, see disassemble(); ValueError where they are not of exactly one."""
    kernels = RESOURCES.findall(resources)
    if len(kernels) != 1:
        names = ", ".join(kernel[0] for kernel in kernels) or "none"
        raise ValueError(f"cubin must hold exactly one kernel, got {names}")
    name, *numbers = kernels[0]
    counts = Counter(instruction.family for instruction in instructions(listing))
    return MachineCode(name, *map(int, numbers), dict(counts))


def instructions(listing):
    """The Instructions of an ``nvdisasm -c`` text, in order; ValueError where it holds none."""
    found, labels = [], ()
    for line in listing.splitlines():
        label, instruction = LABEL.match(line), INSTRUCTION.match(line)
        if label:
            labels += (label[1],)
        elif instruction:
            address, predicate, opcode, family, operands = instruction.groups()
            found.append(Instruction(int(address, 16), labels, predicate or "", opcode, family, operands))
            labels = ()
    if not found:
        raise ValueError("cubin must hold instructions, got none in the disassembly")
    return found


def ptxas_version(cubin):
    """The version of ptxas that a cubin (bytes) records, as "13.4.59"; None where it records none."""
    found = PTXAS.search(cubin)
    return found and found[1].decode()


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


def _launch_number(name):
    found = re.search(r"_(\d+)$", name)
    return int(found[1]) if found else 0  # not made by the DSL


def _run(tool, option, path):
    done = subprocess.run([disassembler(tool), option, str(path)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{tool} cannot read this cubin: {(done.stderr or done.stdout).strip()}")
    return done.stdout

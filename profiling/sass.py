"""Prints the machine-code report of cubin files, one line each: `python profiling/sass.py FILE.cubin ...`."""

import sys
from pathlib import Path

from hopper_fa3.machine_code import report

SHOWN = ("HGMMA", "UTMALDG", "UTMASTG", "MUFU", "USETMAXREG", "STL", "LDL")


def line(code):
    """One line of a report: name, resources, the counts that decide speed, and the number of all instructions."""
    counts = "  ".join(f"{family} {code.counts.get(family, 0)}" for family in SHOWN)
    memory = f"registers {code.registers}  stack {code.stack}  local {code.local}  static shared {code.shared}"
    return f"{code.name}: {memory}  {counts}  instructions {sum(code.counts.values())}"


def main(paths):
    if not paths:
        print("usage: python profiling/sass.py FILE.cubin ...", file=sys.stderr)
        return 2
    for path in paths:
        print(line(report(Path(path).read_bytes())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The figures of a compiled kernel that decide its speed, as a table for people, as JSON, and against the baseline."""

import json
import re
from collections import Counter
from pathlib import Path

import table_kernels
from issue_slots import clocks, tensor_share
from loops import MainLoops, main_loops
from tables import grid

from hopper_fa3.info import version
from hopper_fa3.kernels.config import BackwardConfig
from hopper_fa3.machine_code import instructions, parse, ptxas_version

BASELINE = Path(__file__).with_name("sass_baseline.json")
MEMORY = ("spills", "stack", "local")
CONSUMER_LOOPS = ("unmasked", "masked")
FAMILIES = ("HGMMA", "MUFU", "FMUL", "FFMA", "FADD", "FMNMX", "F2FP", "SHFL", "BAR", "SYNCS", "UTMALDG")
SETMAXREG = re.compile(r"USETMAXREG\.(DEALLOC|TRY_ALLOC)\S* .*?(0x[0-9a-f]+)$")
NOTES = """
Registers: per thread at launch, then of the producer and of a consumer warpgroup after setmaxnreg. Spills: STL and LDL
instructions. Stack and local: bytes a thread. Shared memory: bytes a CTA asks for at launch.

Loops: instructions that one warp issues for one block of K and V; in the gradients' kernels ("backward") for one step,
a block of queries (the tile: queries a step x keys). Conditional parts count as if taken (the producer's
K tile); polling a barrier a second time does not count, nor does making a block's scores again, which is rare. Masked
blocks are those that the diagonal or the end of the keys cuts.

Clocks: what a block needs of an SM in the unmasked loop, all consumer warpgroups together. tensor: 4096 bf16 FLOP a
clock. issue: four schedulers, one instruction a clock each; the producer's warp adds its own to one of them. MUFU: 16
results a clock. FP32: 128 results of FADD, FMUL and FFMA a clock. FMNMX, F2FP and SHFL count as issue slots only.
Clocks of shared memory, of which the gradients need many, are not counted.

Matrix share: tensor clocks over the largest of the four. It is an upper bound, reached only if everything overlaps
perfectly: 100 % says that none of these resources forbids the tensor cores' peak, not that the kernel comes near it.
Slots: issue clocks over the largest of the four.
"""


def figures(kernel, resources, listing):
    """What is reported of a kernel (a Static or a BackwardStatic), as plain values, from the texts of its main one:
    machine_code.main_kernel.

    ValueError where the machine code has not the loops of such a kernel, or one iteration not the products of one
    block or step (unrolled, say).
    """
    config, code, lines = table_kernels.config(kernel), parse(resources, listing), instructions(listing)
    if isinstance(config, BackwardConfig) and config.roles:
        raise ValueError(f"{config.name} has a loop a role, which these figures do not know")
    found = dict(zip(MainLoops._fields, (iteration(loop) for loop in main_loops(lines)), strict=True))
    products = step_products(config)
    issued = found["unmasked"]["counts"]["HGMMA"]
    if issued != products:
        raise ValueError(f"an iteration must issue {products} HGMMA for one block, got {issued}")
    needed = clocks(config, found["unmasked"]["counts"])
    return {
        "kernel": config.name,
        "tile": f"{config.tile_m}x{config.tile_n}",
        "consumer_warpgroups": config.consumer_warpgroups,
        "registers": {"launch": code.registers, **registers(lines)},
        "spills": code.spills,
        "stack": code.stack,
        "local": code.local,
        "shared_memory": config.smem_bytes(),
        **found,
        "clocks": needed,
        "tensor_share": round(tensor_share(needed), 4),
    }


def step_products(config):
    """HGMMA instructions of a warpgroup for one block or step, each 16 deep."""
    if isinstance(config, BackwardConfig):  # S and dP; dV and dK; dQ
        depth = config.head_dim + config.head_dim_v + 2 * config.tile_m + config.tile_n
    else:
        depth = config.head_dim + config.tile_n
    return depth // 16


def iteration(loop):
    return {"instructions": len(loop), "counts": dict(sorted(Counter(i.family for i in loop).items()))}


def registers(lines):
    """Registers per thread of producer and consumer after setmaxnreg; ValueError where not each sets them once."""
    found = [match.groups() for line in lines if (match := SETMAXREG.search(line.text))]
    given = {direction: int(number, 16) for direction, number in found}
    if len(found) != 2 or len(given) != 2:
        raise ValueError(f"producer and consumer must set their registers once each, got {found or 'none'}")
    return {"producer": given["DEALLOC"], "consumer": given["TRY_ALLOC"]}


def versions(cubin):
    """What made the machine code. Figures of different compilers are not comparable."""
    return {"nvidia-cutlass-dsl": version("nvidia-cutlass-dsl"), "ptxas": ptxas_version(cubin)}


def table(header, rows):
    """Markdown; columns after the first one to the right."""
    return "\n".join(grid(header, rows, "---:")) + "\n"


def markdown(report):
    """The page that people read. ``report``: {"versions": ..., "kernels": {name: figures}}."""
    kernels = report["kernels"].items()
    made = ", ".join(f"{tool} {number}" for tool, number in report["versions"].items())
    resources, issued, needed = [], [], []
    for key, found in kernels:
        kept = " / ".join(str(number) for number in found["registers"].values())
        memory = [found[name] for name in MEMORY]
        resources.append([key, found["tile"], found["consumer_warpgroups"], kept, *memory, found["shared_memory"]])
        for loop in MainLoops._fields:
            counts = [found[loop]["counts"].get(family, 0) for family in FAMILIES]
            issued.append([f"{key}, {loop}", *counts, found[loop]["instructions"]])
        spent = found["clocks"]
        slots = spent["issue"] / max(spent.values())
        shares = [max(spent, key=spent.get), f"{found['tensor_share']:.0%}", f"{slots:.0%}"]
        needed.append([key, *(f"{number:.0f}" for number in spent.values()), *shares])
    return (
        f"# Machine code of the kernels, sm_90a\n\n{made}. Made by `make sass`, which needs no GPU.\n\n"
        + table(["kernel", "tile", "consumer warpgroups", "registers", *MEMORY, "shared memory"], resources)
        + "\nInstructions of one iteration:\n\n"
        + table(["loop", *FAMILIES, "all"], issued)
        + "\nClocks of one block:\n\n"
        + table(["kernel", "tensor", "issue", "MUFU", "FP32", "largest", "matrix share", "slots"], needed)
        + NOTES
    )


def as_json(report):
    """JSON with the innermost objects on one line each, so that a changed loop is a changed line."""
    text = json.dumps(report, indent=2)
    return re.sub(r"\{[^{}]*\}", lambda inner: " ".join(inner[0].split()), text) + "\n"


def memory_faults(found, baseline):
    """Where a kernel keeps more in local memory than its baseline (both figures of one kernel)."""
    return [f"{name} grew from {baseline[name]} to {found[name]}" for name in MEMORY if found[name] > baseline[name]]


def loop_faults(found, baseline):
    """Where a consumer loop issues more instructions than in the baseline, likewise, or cannot be compared."""
    if found["tile"] != baseline["tile"]:
        return [
            f"the tile is {found['tile']}, in the baseline {baseline['tile']}: loops of other blocks do not compare"
        ]
    return [
        f"the {loop} loop grew from {before['instructions']} to {now['instructions']} instructions "
        f"({changes(before, now)})"
        for loop in CONSUMER_LOOPS
        for before, now in [(baseline[loop], found[loop])]
        if now["instructions"] > before["instructions"]
    ]


def changes(before, now):
    """What an iteration has more and less: "FMUL +2, UMOV -8"."""
    families = sorted(before["counts"].keys() | now["counts"].keys())
    moved = {family: now["counts"].get(family, 0) - before["counts"].get(family, 0) for family in families}
    return ", ".join(f"{family} {number:+}" for family, number in moved.items() if number) or "the same ones"

"""Reads the pages that Nsight Compute exports as CSV: metrics, machine code with its stall samples, lines, session."""

import csv
import datetime
import re
from collections import Counter
from typing import NamedTuple

from hopper_fa3.machine_code import Instruction

# Our word -> ncu's metric. Percentages are of what the unit could do in the elapsed time of the launch.
METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    "sm_hz": "sm__cycles_elapsed.avg.per_second",
    "largest_khz": "device__attribute_max_gpu_frequency_khz",
    "sms": "launch__sm_count",
    "cycles": "sm__cycles_elapsed.avg",
    "active_cycles": "sm__cycles_active.avg",
    "least_active_cycles": "sm__cycles_active.min",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "mufu": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "fma": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "alu": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "uniform": "sm__inst_executed_pipe_uniform.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
    "shared": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "l2_out": "lts__lts2xbar_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_read_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "l2_write_bytes": "l1tex__m_l1tex2xbar_write_bytes.sum",
    "l2_hit": "lts__t_sector_hit_rate.pct",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "excessive_wavefronts": "derived__memory_l1_wavefronts_shared_excessive",
    "registers": "launch__registers_per_thread",
    "threads": "launch__block_size",
    "ctas": "launch__grid_size",
    "shared_bytes": "launch__shared_mem_per_block_dynamic",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "active_warps": "sm__warps_active.avg.per_cycle_active",
    "launched_warps": "sm__maximum_warps_avg_per_active_cycle",
    "local_loads": "smsp__sass_inst_executed_op_local_ld.sum",
    "local_stores": "smsp__sass_inst_executed_op_local_st.sum",
}
HIDDEN_STALL = "warpgroup_arrive"  # sampled, but without a column of its own in the source page of ncu 2025.3
ADDRESS = re.compile(r"\b(0x[0-9a-f]{9,})\b")  # 64-bit addresses of code: immediates have at most 8 digits
SASS = re.compile(r"^\s*(?:@(!?U?P\w+)\s+)?(([A-Z][A-Z0-9_]*)\S*)\s*(.*?)\s*$")


class Sampled(NamedTuple):
    """One instruction, how often warps executed it, and how often the sampler found a warp there."""

    instruction: Instruction
    executed: int
    stalls: Counter  # ncu's word for the stall (barrier, long_sb, ..., selected where it issued) -> samples


class Place(NamedTuple):
    """A line of Python that machine code comes from."""

    path: str  # "kernels/softmax.py"
    line: int
    text: str


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def number(text):
    return float(text.replace(",", ""))


def metrics(path):
    """(kernel name, GPU name, METRICS in base units) of the raw page; ValueError where it lacks one of them."""
    table = rows(path)
    if len(table) != 3:
        raise ValueError(f"{path} must hold names, units and the values of one launch, got {len(table)} rows")
    values = dict(zip(table[0], table[2], strict=True))
    absent = [name for name in METRICS.values() if not values.get(name)]
    if absent:
        raise ValueError(f"{path} lacks {', '.join(absent)}: other versions of ncu name them differently")
    found = {word: number(values[name]) for word, name in METRICS.items()}
    return values["Kernel Name"], values["device__attribute_display_name"], found


def source(path):
    """The Sampled instructions of the source page (view sass), in the order of their addresses."""
    table = rows(path)
    head = next((i for i, row in enumerate(table) if row[:2] == ["Address", "Source"]), None)
    if head is None:
        raise ValueError(f"{path} must hold a table of machine code, got none")
    columns = {name: i for i, name in enumerate(table[head])}
    stalls = {
        name.removeprefix("stall_"): i
        for name, i in columns.items()
        if name.startswith("stall_") and not name.endswith("(Not Issued)")
    }
    found = []
    for row in table[head + 1 :]:
        counts = Counter({name: int(row[i]) for name, i in stalls.items() if row[i] != "0"})
        hidden = int(row[columns["# Samples"]]) - counts.total()
        found.append(
            Sampled(
                instruction(row[columns["Address"]], row[columns["Source"]]),
                int(row[columns["Instructions Executed"]]),
                counts + Counter({HIDDEN_STALL: hidden}),
            )
        )
    return found


def instruction(address, text):
    """A line of the source page as hopper_fa3.machine_code's Instruction: addresses serve as labels."""
    found = SASS.match(text)
    if found is None:
        raise ValueError(f"machine code must be an opcode and its operands, got {text!r}")
    predicate, opcode, family, operands = found.groups()
    operands = ADDRESS.sub(r"`(\1)", operands)
    return Instruction(int(address, 16), (address,), predicate or "", opcode, family, operands)


def lines(path):
    """Address -> Place, from the source page (view sass,cuda); empty where the kernel has no line information."""
    found, file, place = {}, "", None
    for row in rows(path):
        if row[:1] == ["File Path"]:
            file = short(row[1])
        elif len(row) > 3 and row[0].isdigit():
            place = Place(file, int(row[0]), row[1].strip())
        elif len(row) > 3 and row[2].startswith("0x"):
            found[int(row[2], 16)] = place
    return found


def short(path):
    """The path of a source file within the repository where it is a kernel's, else its last two parts."""
    parts = path.replace("\\", "/").split("/")
    return "/".join(parts[parts.index("kernels") :] if "kernels" in parts else parts[-2:])


def session(path):
    """{"date", "ncu"} of the session page: when the launch was profiled and by which version."""
    values = {row[0]: row[1] for row in rows(path) if len(row) == 2}
    created = datetime.datetime.strptime(values["Created"], "%Y-%b-%d %H:%M:%S")
    return {"date": f"{created:%Y-%m-%d %H:%M}", "ncu": values["Nsight Compute Target"].split(" ")[0]}

"""Says what this machine offers and what will run on it. Looks, and changes nothing."""

import importlib.metadata
import importlib.util
import platform
import subprocess

from .machine_code import PACKAGES, ToolMissing, disassembler

SHOWN_PACKAGES = (
    "hopper-fa3",
    "torch",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "torch-c-dlpack-ext",
    "cuda-python",
)


def version(package):
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def smi(*fields):
    """A string per field of nvidia-smi's first GPU (``driver_version``, ...), None where it cannot tell."""
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return [None] * len(fields)
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")] if done.stdout.strip() else []
    return values if done.returncode == 0 and len(values) == len(fields) else [None] * len(fields)


def hopper_missing():
    """Why no kernel can run on the current device, or None where it is an sm_90 GPU."""
    import torch  # seconds: only where somebody asks for the GPU

    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"{torch.cuda.get_device_name()} is sm_{major}{minor}, not sm_90"


def gpus():
    """One line per CUDA device."""
    import torch

    lines = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = device.total_memory / 2**30
        lines.append(
            f"cuda:{index}  {device.name}, sm_{device.major}{device.minor}, "
            f"{device.multi_processor_count} SMs, {memory:.0f} GiB"
        )
    return lines


def tool(name):
    """Where a disassembler was found, or what to do about its absence."""
    try:
        return disassembler(name)
    except ToolMissing as error:
        return str(error)


def report():
    """The lines that `python -m hopper_fa3 info` prints."""
    missing = hopper_missing()
    compiler = importlib.util.find_spec("cutlass") is not None
    devices = gpus() or [f"none ({missing})"]
    yield "Machine"
    yield f"  Python      {platform.python_version()} on {platform.system()} {platform.machine()}"
    for line in devices:
        yield f"  GPU         {line}"
    yield f"  driver      {smi('driver_version')[0] or 'none found'}"
    yield "Packages"
    for package in SHOWN_PACKAGES:
        yield f"  {package:<20} {version(package) or 'not installed'}"
    for name in PACKAGES:
        yield f"  {name:<20} {tool(name)}"
    yield "What will run"
    yield "  CPU tensors     blockwise attention in PyTorch: the same values, slowly"
    yield f"  CUDA tensors    {'our sm_90a kernels' if missing is None else f'nothing: {missing}'}"
    yield f"  compiling       {'to sm_90a, no GPU needed' if compiler else 'no: nvidia-cutlass-dsl is not installed'}"
    yield "  compiled code   kept in memory by each process; there is no cache folder yet"

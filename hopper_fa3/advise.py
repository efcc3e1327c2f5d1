"""`python -m hopper_fa3 advise`: what standard attention costs at a shape, what ours does, and whether to switch.

Forward pass only. Works without a GPU: sizes and traffic are arithmetic (roofline.py), rates were measured on the GPU
that measured.py names, and where nothing was measured the answer says that it is a model.
"""

import math
import re
import sys
from typing import NamedTuple

from . import measured, plan, roofline
from .info import hopper_missing
from .kernels.config import SHORT_DTYPES

DTYPES = {short: name for name, short in SHORT_DTYPES.items()}
UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?([MGT]i?B)", re.IGNORECASE)
DEFAULT_MEMORY = "80GB"  # an H100; where there is a GPU, its own
LONGEST = 2**30 - 1  # what the kernel takes (problem.py)
# Two runs of the same code differ by a few per cent near the power limit, and the rounds of one run spread by 4 to 16 %
# from length 2048 on (profiling/results): a smaller gain can hardly be told from noise.
WORTH = 0.05
ROOFS = roofline.Roofs(measured.MATMUL_TERAFLOPS, measured.COPY_TERABYTES)
LABELS = {"ours": "hopper_fa3", "standard": "standard attention", "cudnn": "torch SDPA (cuDNN)", "fa4": "flash-attn-4"}


class Expected(NamedTuple):
    """Time of one call and where it comes from."""

    seconds: float
    source: str
    measured: bool


class Machine(NamedTuple):
    """What the answer is for: a line about the GPU, memory in bytes and where that size comes from, and why our kernel
    does not run on this GPU (None where it does, or where there is none).
    """

    line: str
    memory: int
    source: str
    missing: str | None = None


def memory_bytes(text):
    """Bytes of a size such as 80GB (10^9) or 96GiB (2^30); ValueError for anything else."""
    found = MEMORY.fullmatch(text.strip())
    size = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    if size <= 0:
        raise ValueError(f"--memory must be positive, with MB, GB, TB, MiB, GiB or TiB, as in 80GB, got {text!r}")
    return size


def shape_of(arguments):
    """The roofline.Shape that the arguments describe; ValueError with the rule that one of them breaks."""
    heads_k = arguments.heads if arguments.heads_k is None else arguments.heads_k
    counts = {"--batch": arguments.batch, "--heads": arguments.heads, "--heads-k": heads_k}
    for word, count in counts.items():
        if count < 1:
            raise ValueError(f"{word} must be at least 1, got {count}")
    if not 1 <= arguments.seqlen <= LONGEST:
        raise ValueError(f"--seqlen must be from 1 to {LONGEST}, got {arguments.seqlen}")
    if arguments.head_dim not in range(8, 257, 8):
        raise ValueError(f"--head-dim must be a multiple of 8 from 8 to 256, got {arguments.head_dim}")
    if arguments.heads % heads_k:
        raise ValueError(f"--heads must be a multiple of --heads-k, got {arguments.heads} and {heads_k}")
    if arguments.dtype not in DTYPES:
        raise ValueError(f"--dtype must be {' or '.join(DTYPES)}, got {arguments.dtype!r}")
    if arguments.share is not None and not 0 < arguments.share <= 1:
        raise ValueError(f"--share must be more than 0 and at most 1, got {arguments.share}")
    dims = 2 * (arguments.head_dim,)
    lengths = 2 * (arguments.seqlen,)
    return roofline.Shape(
        arguments.batch, *lengths, arguments.heads, heads_k, *dims, arguments.causal, DTYPES[arguments.dtype]
    )


def machine(memory):
    """The Machine here; ``memory`` is the text of --memory or None."""
    import torch

    here, rates, missing = torch.cuda.is_available(), f"an {measured.GPU} ({measured.DATE})", hopper_missing()
    name = torch.cuda.get_device_name() if here else None
    if memory is not None:
        size, source = memory_bytes(memory), "--memory"
    elif here:
        size, source = torch.cuda.get_device_properties(0).total_memory, "this GPU"
    else:
        size, source = memory_bytes(DEFAULT_MEMORY), "assumed: --memory"
    if name == measured.GPU:
        line = f"{name}, the kind of GPU that was measured ({measured.DATE})"
    elif here:
        line = f"{name}, of which nothing was measured: the rates are those of {rates}"
    else:
        line = f"no GPU here: the rates are those of {rates}"
    return Machine(line, size, source, missing if here else None)


def nearest(lengths, seqlen):
    """The measured length nearest by ratio."""
    return min(lengths, key=lambda length: abs(math.log(length / seqlen)))


def tiles(shape):
    """Number of query tiles of our kernel: what the SMs share among them."""
    from .problem import Static

    dims = 2 * (plan.tile_class(shape.head_dim),)
    return plan.tiles(shape, plan.choose(Static(shape.dtype, *dims, shape.causal, False, False)))


def expected(shape, name, rates=measured.RATES):
    """Expected of one call of ``name`` (ours, a peer or standard): measured where its head dim and mask were, else the
    model; None for a peer without a measurement.
    """
    cell = rates.get((shape.head_dim, shape.causal, name))
    if name == "standard":
        busy, passes = 1.0, roofline.standard(shape)  # cuBLAS and elementwise kernels cut the work as they need
    else:
        busy, passes = min(1.0, tiles(shape) / measured.SMS), roofline.fused(shape)
    scaled = f", scaled: {tiles(shape)} tiles of queries for {measured.SMS} SMs" if busy < 1 else ""
    if cell is not None:
        length = nearest(cell, shape.seqlen_q)
        source = f"measured: {cell[length]:.0f} TFLOP/s at length {length}{scaled}"
        return Expected(roofline.flops(shape) / (cell[length] * 1e12 * busy), source, True)
    if name not in ("ours", "standard"):
        return None
    return Expected(roofline.seconds(passes, ROOFS) / busy, model_source(shape, name, rates) + scaled, False)


def model_source(shape, name, rates):
    """What the model assumes, and how near to it measured kernels come."""
    if name == "standard":
        return "model, not measured: every pass at its roof"
    cells = [cell for (_, causal, other), cell in rates.items() if (causal, other) == (shape.causal, "ours")]
    reached = sorted(cell[nearest(cell, shape.seqlen_q)] for cell in cells)
    return f"model: {ROOFS.teraflops:.0f} TFLOP/s; measured head dims reach {reached[0]:.0f} to {reached[-1]:.0f}"


def size(count):
    """Bytes in words, decimal units."""
    for unit in ("TB", "GB", "MB"):
        if count >= UNITS[unit]:
            return f"{count / UNITS[unit]:,.1f} {unit}"
    return f"{count:,} bytes"


def duration(seconds):
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.2f} {unit}"
    return f"{seconds * 1e6:.1f} µs"


def percent(factor):
    """What an end-to-end factor gains, in per cent."""
    return "without limit" if math.isinf(factor) else f"{100 * (factor - 1):+.1f} %"


def work(flops):
    return f"{flops * 1e-12:,.2f} TFLOP" if flops >= 1e12 else f"{flops * 1e-9:,.2f} GFLOP"


def row(label, text):
    return f"  {label:<29}{text}"


def fits(shape, here):
    return roofline.standard_memory(shape) <= here.memory


def heading_lines(shape, here):
    mask, dtype = "causal" if shape.causal else "dense", SHORT_DTYPES[shape.dtype]
    yield (
        f"Attention, forward pass: batch {shape.batch}, length {shape.seqlen_q}, {shape.heads} heads, "
        f"{shape.heads_k} K/V heads, head_dim {shape.head_dim}, {mask}, {dtype}"
    )
    yield f"Machine: {here.line}"


def memory_lines(shape, here):
    matrix, element = roofline.score_bytes(shape), roofline.ELEMENT_BYTES[shape.dtype]
    one_head = size(matrix // (shape.batch * shape.heads))
    yield "Memory (weights and other activations come on top)"
    yield row("score matrix", f"{size(matrix)}: batch x heads x length x length x {element} bytes ({one_head} a head)")
    total, fused = size(roofline.standard_memory(shape)), size(roofline.fused_memory(shape))
    yield row("standard attention", f"{total}: scores, probabilities, q, k, v")
    yield row("fused", f"{fused}: q, k, v, out, LSE; no score is stored")
    answer = "yes" if fits(shape, here) else "NO"
    yield row("does the standard way fit?", f"{answer}, in {size(here.memory)} ({here.source})")
    if roofline.fused_memory(shape) > here.memory:
        yield row("does a fused kernel fit?", "NO: its inputs and output alone are more")


def traffic_lines(shape):
    ways = {"standard attention": roofline.standard(shape), "fused": roofline.fused(shape)}
    credited = " (causal: half of the dense work)" if shape.causal else ""
    yield f"HBM traffic and arithmetic intensity, for {work(roofline.flops(shape))}{credited}"
    for name, passes in ways.items():
        x, names = roofline.intensity(shape, passes), ", ".join(one.name for one in passes)
        yield row(name, f"{size(roofline.traffic(passes))} ({names}), {x:,.0f} FLOP/byte: bound by {ROOFS.bound(x)}")
    less = roofline.traffic(ways["standard attention"]) / roofline.traffic(ways["fused"])
    yield row("", f"fused moves {less:,.0f} times fewer bytes")
    roofs = f"matrix product {ROOFS.teraflops} TFLOP/s, copy {ROOFS.terabytes} TB/s"
    yield row("ridge between the bounds", f"{ROOFS.ridge:.0f} FLOP/byte ({roofs})")
    if roofline.score_bytes(shape) < roofline.L2_BYTES:
        cache = size(roofline.L2_BYTES)
        yield row("", f"the scores may stay in the {cache} of L2: traffic and time of the standard way are then less")


def hosted(times):
    """Whether a call's kernel takes less time than its host side."""
    return times["ours"].seconds * 1e6 < measured.HOST_MICROSECONDS["ours"]


def time_lines(times):
    yield f"Expected time of one call, on an {measured.GPU} (kernels; measured in bf16 without grouped heads)"
    for name, time in times.items():
        yield row(LABELS[name], f"{duration(time.seconds)} ({time.source})")
    if hosted(times):
        host = measured.HOST_MICROSECONDS["ours"]
        yield row("", f"less than the host time of a call ({host} µs): without a CUDA graph the host decides")


def gain_lines(shape, here, share, speedups):
    """The end-to-end gains; without a share, the shares that a gain of WORTH needs."""
    if share is None:
        yield f"Share of the model's time in attention from which switching gains {percent(1 + WORTH)} (yours: --share)"
    else:
        yield f"Gain end to end where attention takes {100 * share:g} % (Amdahl: 1 / (1 - share + share / speedup))"
    for name, speedup in speedups.items():
        faster = f"at {speedup:.2f} times its speed"
        if name == "standard" and not fits(shape, here):
            faster += ", if it fitted"
        if share is None:
            needed = roofline.share_needed(WORTH, speedup)
            yield row(f"against {LABELS[name]}", f"{'none' if needed is None else f'{100 * needed:.0f} %'} {faster}")
        else:
            yield row(f"against {LABELS[name]}", f"{percent(roofline.amdahl(share, speedup))} {faster}")
    if share is not None:
        yield row("at twice the speed", judged(share, 2.0))
        yield row("if attention took no time", judged(share, math.inf))


def judged(share, speedup):
    """The verdict on one speedup, in words."""
    if speedup <= 1:
        return "not worth it: no faster"
    if share is None:
        needed = roofline.share_needed(WORTH, speedup)
        return "not worth it at any share" if needed is None else f"worth it from a share of {100 * needed:.0f} % on"
    factor = roofline.amdahl(share, speedup)
    return f"{percent(factor)}, {'worth it' if factor >= 1 + WORTH else 'not worth it'}"


def verdict_lines(shape, here, share, times, speedups):
    yield f"Verdict (worth it from {percent(1 + WORTH)} end to end: two runs of one model differ by a few per cent)"
    if here.missing:
        yield row("on this machine", f"our kernel does not run: {here.missing}")
    if roofline.fused_memory(shape) > here.memory:
        yield row("at this shape", f"neither way fits in {size(here.memory)}: a smaller batch, or several GPUs")
        return
    if hosted(times):
        yield row("at this size", "of kernels alone, as inside a CUDA graph: elsewhere the host decides (above)")
    for name, speedup in speedups.items():
        text = judged(share, speedup)
        if not times[name].measured and speedup <= 1:
            text = "unknown: its time is the model's, the least possible, and not above ours"
        elif not times[name].measured:
            text += " (its time is the model's)"
        if name == "standard" and not fits(shape, here):
            text = f"it does not fit in {size(here.memory)}: the question is not speed, only a fused kernel runs"
        yield row(f"from {LABELS[name]}", text)


def answer(shape, here, share, rates=measured.RATES):
    """All lines of the answer; ``share`` is None where it is not known."""
    found = {name: expected(shape, name, rates) for name in LABELS}
    times = {name: time for name, time in found.items() if time is not None}
    speedups = {name: time.seconds / times["ours"].seconds for name, time in times.items() if name != "ours"}
    yield from heading_lines(shape, here)
    yield from memory_lines(shape, here)
    yield from traffic_lines(shape)
    yield from time_lines(times)
    yield from gain_lines(shape, here, share, speedups)
    yield from verdict_lines(shape, here, share, times, speedups)


def run(arguments):
    """Print the answer; returns the exit status: 2 and one line on stderr where an argument is wrong."""
    try:
        shape, here = shape_of(arguments), machine(arguments.memory)
    except ValueError as error:
        print(f"python -m hopper_fa3 advise: {error}", file=sys.stderr)
        return 2
    print("\n".join(answer(shape, here, arguments.share)))
    return 0

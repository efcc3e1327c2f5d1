"""`make demo`: causal attention over a real text: its error, its memory or speed, and the machine code behind it."""

import ctypes
import importlib.util
import sys
import threading
import time
from pathlib import Path

import torch

from . import flash_attn_func, plan
from .info import hopper_missing
from .kernels.config import SHARED_MEMORY_LIMIT
from .machine_code import ToolMissing, report
from .problem import Static
from .reference import standard

HEADS, HEADS_K, HEAD_DIM = 16, 2, 128  # grouped-query attention, 8 query heads per K/V head
MODEL_DIM = 512
TELL_SECONDS = 4
TEXT = """\
Attention compares every word of a text with every word before it. Written down as it is defined,
that is a square table with one row and one column per word: a text twice as long needs four times
the memory, and moving that table to and from memory takes far longer than computing it. The way out
is an old trick of patient bookkeepers. Do not keep the table; walk along the row in blocks, and
carry three things with you: the largest score seen so far, the sum of the exponentials relative to
it, and the weighted sum of the values. When a larger score turns up, the two sums are scaled down
to match, and the walk goes on. At the end of the row one division gives exactly what the whole
table would have given. What is left to do on a graphics processor is to keep its matrix units busy:
one warp fetches the next block while two groups of warps take turns, one multiplying while the
other takes exponentials, and neither waits for the other longer than it must.
"""


def say(text=""):
    print(text, flush=True)


def inputs(tokens):
    """q, k, v of one attention layer over the text's bytes: seeded embeddings and projections, rotary positions.

    bfloat16, shapes (1, tokens, 16, 128) for q and (1, tokens, 2, 128) for k and v; the text starts over where it ends.
    """
    generator = torch.Generator().manual_seed(0)
    letters = torch.tensor(list(TEXT.encode())).repeat(-(-tokens // len(TEXT.encode())))[:tokens]
    embedding = torch.randn(256, MODEL_DIM, generator=generator)
    hidden = embedding[letters]

    def project(heads):
        weight = torch.randn(MODEL_DIM, heads * HEAD_DIM, generator=generator) * MODEL_DIM**-0.5
        return (hidden @ weight).view(1, tokens, heads, HEAD_DIM)

    q, k, v = project(HEADS), project(HEADS_K), project(HEADS_K)
    return tuple(tensor.bfloat16() for tensor in (rotate(q), rotate(k), v))


def rotate(tensor):
    """Rotary positions (Su et al. 2021, equation 34): each pair of entries turns by position times its frequency."""
    half = HEAD_DIM // 2
    frequency = 10000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(tensor.shape[1])[:, None] * frequency
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = tensor[..., :half], tensor[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def timed(function):
    """(result, seconds) of a call, the GPU's work included; says every few seconds that it is still running."""
    finished = threading.Event()
    start = time.perf_counter()

    def tell():
        while not finished.wait(TELL_SECONDS):
            say(f"      ... {time.perf_counter() - start:.0f} s")

    threading.Thread(target=tell, daemon=True).start()
    try:
        result = function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    finally:
        finished.set()
    return result, time.perf_counter() - start


class PeakMemory:
    """Measures how far resident memory rises while it is held: ``bytes``, None where the system does not say."""

    def __enter__(self):
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that is still resident would hide new memory
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts over from here
        except OSError:  # a sandbox without it
            self.before = None
        else:
            self.before = self._peak()
        return self

    def __exit__(self, *failure):
        self.bytes = None if self.before is None else max(0, self._peak() - self.before)

    @staticmethod
    def _peak():
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024


def errors(out, q, k, v):
    """(ours, plain PyTorch's in the same dtype): largest difference from attention computed in float32."""
    true, _ = standard(q, k, v, right=0, compute_dtype=torch.float32)
    same, _ = standard(q, k, v, right=0)
    return tuple((tensor.float() - true).abs().max().item() for tensor in (out, same))


def say_error(ours, plain):
    say(f"      largest error against float32: {ours:.2e}; plain PyTorch in bfloat16: {plain:.2e}")
    if not ours <= 2 * plain:  # the bound that the tests use; NaN included
        raise SystemExit("      this is more than twice plain PyTorch's error: WRONG")


def mebibytes(count):
    return f"{count / 2**20:,.0f} MiB"


def flops(tokens):
    """Of the causal forward pass: two matrix products, half of the pairs."""
    return 2 * HEADS * tokens * tokens * HEAD_DIM


def on_cpu(q, k, v):
    tokens = q.shape[1]
    say("[2/4] Attention on the CPU: PyTorch, block by block, the score matrix never exists ...")
    flash_attn_func(*(tensor[:, :256] for tensor in (q, k, v)), causal=True)  # PyTorch's one-time buffers and threads
    with PeakMemory() as memory:
        out, seconds = timed(lambda: flash_attn_func(q, k, v, causal=True))
    rise = "was not measured" if memory.bytes is None else f"rose by {mebibytes(memory.bytes)}"
    say(f"      {seconds:.1f} s; memory {rise}, {mebibytes(out.nbytes)} of it the result")
    scores = HEADS * tokens * tokens * 4
    say(f"      the standard way's score matrix alone: {mebibytes(scores)} in float32 (and as much again for softmax)")
    say("[3/4] Computing the same the standard way in float32, head by head, to compare ...")
    (ours, plain), _ = timed(lambda: errors(out, q, k, v))
    say_error(ours, plain)
    machine_code()


def machine_code():
    """Compile the kernel that a Hopper GPU would run here, and show what came out."""
    say("[4/4] Compiling the kernel that a Hopper GPU would run on this input, for sm_90a ...")
    try:
        from .compile import cubin
    except ImportError as error:
        say(f"      not here: {error}")
        return
    static = Static("bfloat16", HEAD_DIM, HEAD_DIM, True, False, False)
    chosen = plan.choose(static)
    code, seconds = timed(lambda: cubin(static, chosen))
    config = plan.forward_config(static, chosen)
    say(f"      {config.name}: {len(code):,} bytes of machine code in {seconds:.1f} s")
    try:
        found = report(code)
    except ToolMissing as error:
        say(f"      no report: {error}")
        return
    counts = found.counts
    producer, consumer = config.registers
    rows = (
        ("matrix products (WGMMA)", f"{counts.get('HGMMA', 0)} HGMMA instructions"),
        ("tile loads, stores (TMA)", f"{counts.get('UTMALDG', 0)} UTMALDG, {counts.get('UTMASTG', 0)} UTMASTG"),
        ("exponentials", f"{counts.get('MUFU', 0)} MUFU"),
        ("tile", f"{config.tile_m} queries x {config.tile_n} keys, {config.stages} stages"),
        ("threads", f"{config.threads}: 1 producer and {config.consumer_warpgroups} consumer warpgroups of 128"),
        ("registers per thread", f"{found.registers} at launch, then {producer} producer, {consumer} consumer"),
        ("spilled", f"{found.spills} instructions, {found.stack} bytes of stack"),
        ("shared memory", f"{config.smem_bytes():,} bytes of {SHARED_MEMORY_LIMIT:,}"),
    )
    for name, value in rows:
        say(f"      {name:<26}{value}")


def timer():
    """The module profiling/timing.py of this checkout, None in an install without one: there is only this one timer."""
    path = Path(__file__).resolve().parent.parent / "profiling" / "timing.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location("hopper_fa3_timing", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_hopper(q, k, v):
    q, k, v = (tensor.cuda() for tensor in (q, k, v))
    say(f"[2/4] Attention on {torch.cuda.get_device_name()}; the first call compiles the kernel ...")
    out, seconds = timed(lambda: flash_attn_func(q, k, v, causal=True))
    _, again = timed(lambda: flash_attn_func(q, k, v, causal=True))
    say(f"      first call {seconds:.1f} s, second call {again * 1e6:.0f} µs")
    say("[3/4] Computing the same the standard way in float32, to compare ...")
    (ours, plain), _ = timed(lambda: errors(out, q, k, v))
    say_error(ours, plain)
    say("[4/4] Timing, in turns, with the largest matrix product's speed beside it ...")
    timing = timer()
    if timing is None:
        say("      only in a checkout of the repository: the timer is profiling/timing.py")
        return
    size = 8192
    left, right = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    swapped = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    work = {
        "hopper_fa3": (lambda: flash_attn_func(q, k, v, causal=True), flops(q.shape[1])),
        "torch SDPA": (lambda: sdpa(*swapped, is_causal=True, enable_gqa=True), flops(q.shape[1])),
        "matrix product": (lambda: left @ right, 2 * size**3),
    }
    launches = {name: timing.Launch(call) for name, (call, _) in work.items()}
    times = timing.interleaved(launches, timing.EventClock())
    for name, (_, count) in work.items():
        seconds = times[name].median
        say(f"      {name:<16}{count / seconds * 1e-12:6.0f} TFLOP/s   {seconds * 1e6:8.1f} µs")


def run(tokens=4096):
    """The whole demonstration; returns the exit status."""
    start = time.perf_counter()
    missing = hopper_missing()
    say(f"[1/4] A text of {tokens} bytes as q ({HEADS} heads), k and v ({HEADS_K} heads) of dimension {HEAD_DIM} ...")
    q, k, v = inputs(tokens)
    if missing is None:
        on_hopper(q, k, v)
    else:
        say(f"      no Hopper GPU here ({missing}): the same call runs on the CPU")
        on_cpu(q, k, v)
    say(f"Done in {time.perf_counter() - start:.0f} s. Next: README.md, or `{sys.executable} -m hopper_fa3 info`.")
    return 0

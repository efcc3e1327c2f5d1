"""Compiles kernels to sm_90a, with or without a GPU, and finds them again in memory. The only module that imports
cutlass.
"""

import os
import tempfile
import threading
from pathlib import Path

# Settings: read and set here only. The DSL takes its target from the environment; no GPU is needed to compile for
# sm_90a.
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cutlass
import cutlass.cute as cute

from .kernels.backward import BackwardKernel
from .kernels.forward import DTYPES, ForwardKernel
from .kernels.packed_backward import PackedBackwardKernel
from .kernels.packed_forward import PackedForwardKernel
from .kernels.query_kernel import QueryKernel
from .kernels.table_size import ENTRY_WORDS
from .plan import BackwardPlan, backward_config, forward_config

if os.environ["CUTE_DSL_ARCH"] != "sm_90a":
    raise RuntimeError(f"CUTE_DSL_ARCH must be sm_90a or unset, got {os.environ['CUTE_DSL_ARCH']}")

_compiled = {}
_lock = threading.RLock()  # the DSL's tracer and the kernel's name are global state


def compiled(static, plan, options=()):
    """The launchable kernel for ``(static, plan)``: traced at the first request, found in memory afterwards.

    ``static`` and ``plan``: a Static with a Plan, or a BackwardStatic with a BackwardPlan. The callable takes ``(q, k,
    v, out, lse, counter, scale_log2, right, left, section, ctas, fills_idle_sms)`` positionally, or what the other
    kernels say (BackwardKernel, PackedForwardKernel, PackedBackwardKernel), torch tensors as they are, and launches on
    torch's current stream of the tensors' device. ``left`` is None where the static part has no left bound. ``options``
    are further options of the DSL's compiler.
    """
    key = (static, plan, options)
    function = _compiled.get(key)
    if function is None:
        with _lock:
            function = _compiled.get(key)
            if function is None:
                function = _compiled[key] = _trace(static, plan, options)
    return function


def cubin(static, plan, options=()):
    """Machine code (sm_90a cubin, bytes) of the kernel for ``(static, plan)``; needs no GPU. ``options``: see above."""
    with tempfile.TemporaryDirectory() as folder, _lock:
        _trace(static, plan, ("--keep-cubin", f"--dump-dir={folder}", *options))
        (file,) = Path(folder).glob("*.cubin")
        return file.read_bytes()


def cached():
    """Number of kernels in memory."""
    return len(_compiled)


def _trace(static, plan, options):
    if isinstance(plan, BackwardPlan) and static.packed is not None:
        kernel = PackedBackwardKernel(backward_config(static, plan))
        name, main = kernel.config.name, kernel.main
        names = {
            PackedBackwardKernel.list_tiles: f"{name}_tables",
            PackedBackwardKernel.before: f"{name}_before",
            BackwardKernel.kernel: name,
            PackedBackwardKernel.behind: f"{name}_behind",
        }
        if main.queries is not None:
            names[QueryKernel.kernel] = main.queries.config.name
        arguments = _packed_backward_arguments(static, kernel.config)
    elif isinstance(plan, BackwardPlan):
        kernel = BackwardKernel(backward_config(static, plan))
        names = {
            BackwardKernel.before: f"{kernel.config.name}_before",
            BackwardKernel.kernel: kernel.config.name,
            BackwardKernel.add: f"{kernel.config.name}_add",
            BackwardKernel.behind: f"{kernel.config.name}_behind",
        }
        if kernel.queries is not None:
            names[QueryKernel.kernel] = kernel.queries.config.name
        arguments = _backward_arguments(static, kernel.config)
    elif static.packed is not None:
        kernel = PackedForwardKernel(forward_config(static, plan))
        names = {
            PackedForwardKernel.list_tiles: f"{kernel.config.name}_table",
            ForwardKernel.kernel: kernel.config.name,
        }
        arguments = _packed_arguments(static)
    else:
        kernel = ForwardKernel(forward_config(static, plan))
        names = {ForwardKernel.kernel: kernel.config.name}
        arguments = _arguments(static, kernel.config)
    for each, name in names.items():
        # Without the mangled Python name: profilers then show one readable word.
        each.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    function = cute.compile(kernel, *arguments, options=" ".join(("--enable-tvm-ffi", *options)))
    # Positional calls of the function under the keyword wrapper cost half as much host time. The wrapper is kept
    # alive with it.
    return getattr(function, "_tvm_ffi_function", function)


def _tensor(dtype, *shape, divisibility=8, align=16):
    """A fake tensor whose last stride is 1. TMA reads rows that start at multiples of 16 bytes: 8 elements."""
    strides = (*(cute.sym_int64(divisibility=divisibility) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=align)


def _arguments(static, config):
    """Fake arguments of symbolic lengths and strides: one kernel serves them all."""
    dtype = DTYPES[static.dtype]
    batch, seqlen_q, seqlen_k, heads, heads_k = (cute.sym_int() for _ in range(5))
    head_dim, head_dim_v = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)
    q = _tensor(dtype, batch, seqlen_q, heads, head_dim)
    k = _tensor(dtype, batch, seqlen_k, heads_k, head_dim)
    v = _tensor(dtype, batch, seqlen_k, heads_k, head_dim_v)
    out = _tensor(dtype, batch, seqlen_q, heads, head_dim_v)
    lse = _tensor(cutlass.Float32, batch, heads, seqlen_q, divisibility=1, align=4)
    sink, slopes = _per_head(static.sink, heads), _per_head(static.alibi, batch, heads)
    scalars = (*_scales(static, 1), *_bounds(static), *(cutlass.Int32(1) for _ in range(3)))
    return q, k, v, out, lse, sink, slopes, _counter() if config.dynamic else None, *scalars, _stream()


def _packed_arguments(static):
    """The same for packed sequences."""
    dtype = DTYPES[static.dtype]
    total_q, total_k, heads, heads_k = (cute.sym_int() for _ in range(4))
    head_dim, head_dim_v = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)
    q = _tensor(dtype, total_q, heads, head_dim)
    k = _tensor(dtype, total_k, heads_k, head_dim)
    v = _tensor(dtype, total_k, heads_k, head_dim_v)
    out = _tensor(dtype, total_q, heads, head_dim_v)
    lse = _tensor(cutlass.Float32, heads, total_q, divisibility=1, align=4)
    sink, slopes = _per_head(static.sink, heads), _per_head(static.alibi, cute.sym_int(), heads)
    scalars = (*_scales(static, 1), *_bounds(static), *(cutlass.Int32(1) for _ in range(4)))
    return q, k, v, out, lse, sink, slopes, *_sequences(static), _table(), _counter(), *scalars, _stream()


def _sequences(static):
    """cu_seqlens of q and of k, and what is used of the sequences."""
    batch, ends = cute.sym_int(), cute.sym_int()
    used = (_words(batch) if given else None for given in static.packed)
    return _words(ends), _words(ends), *used


def _table():
    """Tiles of packed sequences."""
    return cute.runtime.make_fake_compact_tensor(
        cutlass.Int32, (cute.sym_int(), ENTRY_WORDS), stride_order=(1, 0), assumed_align=16
    )


def _backward_arguments(static, config):
    """The same for the gradients."""
    dtype, wide = DTYPES[static.dtype], cutlass.Float32
    batch, seqlen_q, seqlen_k, heads, heads_k, blocks = (cute.sym_int() for _ in range(6))
    head_dim, head_dim_v = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)
    q, dq = (_tensor(dtype, batch, seqlen_q, heads, head_dim) for _ in range(2))
    k, dk = (_tensor(dtype, batch, seqlen_k, heads_k, head_dim) for _ in range(2))
    v, dv = (_tensor(dtype, batch, seqlen_k, heads_k, head_dim_v) for _ in range(2))
    out, do = (_tensor(dtype, batch, seqlen_q, heads, head_dim_v) for _ in range(2))
    lse = _tensor(wide, batch, heads, seqlen_q, divisibility=1, align=4)
    dlse = _tensor(wide, batch, heads, seqlen_q, divisibility=1, align=4) if static.lse_gradient else None
    slopes = _per_head(static.alibi, batch, heads)
    rows = _tensor(wide, batch, heads, blocks, config.row_floats)
    sums = _tensor(wide, batch, heads, blocks, config.tile_m * config.head_dim) if config.sums else None
    pieces = config.consumer_warpgroups
    parts = (None, None)
    if config.split_heads:
        places = (batch, heads_k, cute.sym_int(), cute.sym_int())
    elif config.split_tail:
        places = (cute.sym_int(),)
    if config.key_parts:
        widths = (config.tile_n * dim for dim in (config.head_dim, config.head_dim_v))
        parts = (_tensor(wide, *places, width) for width in widths)
    turns = _tensor(cutlass.Int32, batch, heads, blocks, pieces, divisibility=1, align=4) if config.turns else None
    scalars = (*_scales(static, 2), *_bounds(static), *(cutlass.Int32(1) for _ in range(8)))
    return q, k, v, out, lse, do, dlse, slopes, dq, dk, dv, rows, sums, turns, *parts, _counter(), *scalars, _stream()


def _per_head(present, *shape):
    """A fake tensor of a float32 a head, of any strides, or None."""
    if not present:
        return None
    strides = tuple(cute.sym_int64() for _ in shape)
    return cute.runtime.make_fake_tensor(cutlass.Float32, shape, strides, assumed_align=4)


def _scales(static, count):
    """``count`` scales, and the factor of softcap."""
    return *(cutlass.Float32(1.0) for _ in range(count)), cutlass.Float32(1.0) if static.softcap else None


def _packed_backward_arguments(static, config):
    """The same for the gradients of packed sequences."""
    dtype, wide = DTYPES[static.dtype], cutlass.Float32
    total_q, total_k, heads, heads_k, lines = (cute.sym_int() for _ in range(5))
    head_dim, head_dim_v = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)
    q, dq = (_tensor(dtype, total_q, heads, head_dim) for _ in range(2))
    k, dk = (_tensor(dtype, total_k, heads_k, head_dim) for _ in range(2))
    v, dv = (_tensor(dtype, total_k, heads_k, head_dim_v) for _ in range(2))
    out, do = (_tensor(dtype, total_q, heads, head_dim_v) for _ in range(2))
    lse, dlse = (_tensor(wide, heads, total_q, divisibility=1, align=4) for _ in range(2))
    rows = _tensor(wide, heads, lines, config.row_floats)
    sums = _tensor(wide, heads, lines, config.tile_m * config.head_dim) if config.sums else None
    pieces = config.consumer_warpgroups
    turns = _tensor(cutlass.Int32, heads, lines, pieces, divisibility=1, align=4) if config.turns else None
    tables = _table(), _table(), None if config.sums else _table()
    slopes = _per_head(static.alibi, cute.sym_int(), heads)
    scalars = (*_scales(static, 2), *_bounds(static), *(cutlass.Int32(1) for _ in range(7)))
    tensors = q, k, v, out, lse, do, dlse if static.lse_gradient else None, slopes, dq, dk, dv
    return *tensors, *_sequences(static), rows, sums, turns, *tables, _counter(), *scalars, _stream()


def _bounds(static):
    """``(right, left, chunk)`` of the band."""
    return cutlass.Int32(1), *(cutlass.Int32(1) if present else None for present in (static.left_bound, static.chunked))


def _counter():
    """The tile counter."""
    return _words(2)


def _words(count):
    """So many numbers in int32, side by side."""
    return cute.runtime.make_fake_compact_tensor(cutlass.Int32, (count,), assumed_align=4)


def _stream():
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)

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

from .kernels.forward import DTYPES, ForwardKernel
from .plan import forward_config

if os.environ["CUTE_DSL_ARCH"] != "sm_90a":
    raise RuntimeError(f"CUTE_DSL_ARCH must be sm_90a or unset, got {os.environ['CUTE_DSL_ARCH']}")

_compiled = {}
_lock = threading.RLock()  # the DSL's tracer and the kernel's name are global state


def compiled(static, plan, options=()):
    """The launchable kernel for ``(static, plan)``: traced at the first request, found in memory afterwards.

    The callable takes ``(q, k, v, out, lse, counter, scale_log2, right, section, ctas)`` positionally, torch tensors
    as they are, and launches on torch's current stream of the tensors' device. ``options`` are further options of the
    DSL's compiler.
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
    kernel = ForwardKernel(forward_config(static, plan))
    # Without the mangled Python name: profilers then show one readable word.
    ForwardKernel.kernel.set_name_prefix(kernel.config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    function = cute.compile(kernel, *_arguments(static), options=" ".join(("--enable-tvm-ffi", *options)))
    # Positional calls of the function under the keyword wrapper cost half as much host time. The wrapper is kept
    # alive with it.
    return getattr(function, "_tvm_ffi_function", function)


def _arguments(static):
    """Fake arguments of symbolic lengths and strides: one kernel serves them all."""
    dtype = DTYPES[static.dtype]
    batch, seqlen_q, seqlen_k, heads, heads_k = (cute.sym_int() for _ in range(5))
    head_dim, head_dim_v = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)

    def tensor(*shape):
        # TMA reads rows that start at multiples of 16 bytes: 8 elements
        strides = (*(cute.sym_int64(divisibility=8) for _ in shape[1:]), 1)
        return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=16)

    q = tensor(batch, seqlen_q, heads, head_dim)
    k = tensor(batch, seqlen_k, heads_k, head_dim)
    v = tensor(batch, seqlen_k, heads_k, head_dim_v)
    out = tensor(batch, seqlen_q, heads, head_dim_v)
    lse = cute.runtime.make_fake_tensor(
        cutlass.Float32, (batch, heads, seqlen_q), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4
    )
    counter = (
        cute.runtime.make_fake_compact_tensor(cutlass.Int32, (2,), assumed_align=4) if static.right_bound else None
    )
    scalars = (cutlass.Float32(1.0), cutlass.Int32(0), cutlass.Int32(1), cutlass.Int32(1))
    return q, k, v, out, lse, counter, *scalars, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)

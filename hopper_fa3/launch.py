"""Allocates the results, prepares the arguments and launches. It validates nothing: problem.py did."""

import math
from typing import NamedTuple

import torch

from . import plan as planning
from .checks import recorded
from .kernels.config import CAP_UNITS
from .problem import Problem, multiprocessors

# Below the smallest normal float32 a scale would be flushed to 0, and 0 times a masked score of -inf is NaN.
SMALLEST_SCALE = 1.1754943508222875e-38
TMA_ALIGNMENT = 16  # bytes: base address and strides of what TMA reads and writes
# Elements. A dimension of size 1 may carry any stride, but a descriptor holds only 40 bits of one, and V's shifted base
# (kv_source.py) must stay an address. Longer strides of other dimensions are those of real memory.
FARTHEST_ALONE = 2**31
# Beyond, a factor is inf in float32, and NaN times a product of 0
LARGEST_FACTOR = 2.0**126
UNREAD_ROWS = 2**18  # 1 MiB a device

_unread = {}  # device -> memory for LSEs that nobody reads
_counters = {}  # (device index, stream) -> two int32


class GradientRecipe(NamedTuple):
    """What the gradients need besides the tensors that autograd keeps."""

    problem: Problem
    deterministic: bool
    sm_margin: int
    launches: dict  # filled by launch_backward.py: by whether a gradient of the LSE arrives


class Recipe(NamedTuple):
    """All that a launch needs besides the tensors; the same for every call of equal shapes, strides, dtypes and
    options.
    """

    function: object  # None: there is no work
    dynamic: bool  # the kernel takes its tiles from a counter
    scalars: tuple  # scale_log2, cap_factor, right, left, section, ctas, fills_idle_sms
    out: torch.Tensor  # one element expanded to the result's shape: empty_like takes half the host time of empty
    lse: torch.Tensor
    unread_lse: torch.Tensor | None  # where the LSE goes that nobody asked for; None: allocate it
    fits: bool  # TMA takes q, k, v and out as they are
    gradients: GradientRecipe | None  # where autograd records the call


def prepare(problem, q, k, v, *, sink=None, out=None, plan=None, sm_margin=0, deterministic=False):
    """The recipe for calls like this one, of a validated CUDA problem; compiles the kernel where it is new.

    ``deterministic``: of the gradients.
    """
    function, dynamic, scalars = None, False, ()
    if problem.batch and problem.heads and problem.seqlen_q and problem.seqlen_k:
        from .compile import compiled  # imports the DSL (seconds): only where a kernel is launched

        static = problem.static
        plan = plan or planning.choose(static)
        function, dynamic = compiled(static, plan), planning.forward_config(static, plan).dynamic
        ctas = min(planning.tiles(problem, plan), multiprocessors(problem.device) - sm_margin)
        section = planning.heads_per_section(problem)
        scalars = (*scales(problem), *problem.kernel_bounds, section, ctas, int(sm_margin == 0))
    # Not q.new_empty: where q is of a subclass, results of all later calls would be
    one_of_out, one_of_lse = (torch.empty(1, dtype=dtype, device=q.device) for dtype in (q.dtype, torch.float32))
    lse_shape = (problem.batch, problem.heads, problem.seqlen_q)
    return Recipe(
        function,
        dynamic,
        scalars,
        one_of_out.expand(problem.out_shape),
        one_of_lse.expand(lse_shape),
        unread_rows(problem.device, lse_shape),
        all(tma_reads(tensor) for tensor in (q, k, v, out) if tensor is not None),
        GradientRecipe(problem, deterministic, sm_margin, {}) if recorded(q, k, v, sink) else None,
    )


def execute(recipe, q, k, v, out=None, *, sink=None, alibi_slopes=None, want_lse=True):
    """Launch on torch's current stream of q's device; ``(out, lse)``. Writes to ``out`` where it is given.

    Without ``want_lse`` the second result must not be used.
    """
    if out is None:
        out = torch.empty_like(recipe.out)
    lse = torch.empty_like(recipe.lse) if want_lse or recipe.unread_lse is None else recipe.unread_lse
    if recipe.function is None:  # no query: nothing to write; no key: every row sees none
        out.zero_()
        if want_lse:  # memory for unread LSEs may be an inference tensor, which PyTorch would refuse to fill
            lse.copy_(sink[:, None]) if sink is not None else lse.fill_(-math.inf)
        return out, lse
    hook = hook_tensors(sink, alibi_slopes, recipe.out.shape[0], recipe.out.shape[2])
    counter = tile_counter(q.device) if recipe.dynamic else None
    if recipe.fits:
        recipe.function(q, k, v, out, lse, *hook, counter, *recipe.scalars)
    else:
        target = writable(out)
        recipe.function(readable(q), readable(k), readable(v), target, lse, *hook, counter, *recipe.scalars)
        if target.data_ptr() != out.data_ptr():
            out.copy_(target)
    return out, lse


def unread_rows(device, shape):
    """A view in the shape of an LSE of memory that is written and never read, shared by all calls on a device.

    Saves a tenth to a fifth of the host time. It lives as long as the process: captured graphs keep its address. None
    for large problems: their host time is hidden, and the memory need not be held.
    """
    rows = math.prod(shape)
    if rows > UNREAD_ROWS:
        return None
    memory = _unread.get(device)
    if memory is None:
        memory = _unread[device] = torch.empty(UNREAD_ROWS, dtype=torch.float32, device=device)
    return memory[:rows].view(shape)


def tile_counter(device):
    """The kernel's tile counter: zero between launches, because the last CTA of a launch resets it.

    Launches on one stream follow each other and share one; launches on different streams must not. A captured graph
    gets its own, zeroed inside the graph: it may be replayed on any stream.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    # torch.cuda.current_stream() builds a Stream object around the same number: 3 us of a 20 us call
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return counter


def hook_tensors(sink, alibi_slopes, batch, heads):
    """``(sink, slopes)`` as kernels take them: float32 ``(heads,)`` and ``(batch, heads)``, any strides; or None."""
    sink = None if sink is None else sink.float()
    slopes = None if alibi_slopes is None else alibi_slopes.expand(batch, heads)
    return sink, slopes


def scales(problem):
    """``(scale_log2, cap_factor)`` of the kernels: kernels/score.py."""
    if not problem.softcap:
        return scale_log2(problem.softmax_scale), None
    factor = CAP_UNITS * problem.softmax_scale / problem.softcap
    factor = min(max(factor, -LARGEST_FACTOR), LARGEST_FACTOR)
    return -2 * math.log2(math.e) * problem.softcap, factor


def scale_log2(softmax_scale):
    """Softmax scale in base 2, never 0; its sign is part of the compiled kernel, to which -0.0 is not negative."""
    magnitude = max(abs(softmax_scale) * math.log2(math.e), SMALLEST_SCALE)
    return -magnitude if softmax_scale < 0 else magnitude


def tma_reads(tensor):
    """True where TMA can address the tensor as it is: 16-byte aligned base and strides, contiguous last dimension."""
    elements = TMA_ALIGNMENT // tensor.element_size()
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % TMA_ALIGNMENT == 0
        and all(stride % elements == 0 and (size > 1 or stride < FARTHEST_ALONE) for size, stride in outer)
    )


def canonical(tensor):
    """The same view with plain strides for dimensions of size 1, whose stride means nothing; with the next dimension's
    where a plain one would be too long for a descriptor.
    """
    strides, plain = [], 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size == 1:
            stride = plain if plain < FARTHEST_ALONE else strides[-1]
        strides.append(stride)
        plain *= size
    return tensor.as_strided(tensor.shape, strides[::-1])


def readable(tensor):
    """A tensor that TMA can read: itself, itself with canonical strides, or a copy."""
    if tma_reads(tensor):
        return tensor
    view = canonical(tensor)
    return view if tma_reads(view) else tensor.clone(memory_format=torch.contiguous_format)


def writable(out):
    """A tensor that TMA can write and whose content belongs into ``out``."""
    if tma_reads(out):
        return out
    view = canonical(out)
    return view if tma_reads(view) else torch.empty_like(out, memory_format=torch.contiguous_format)

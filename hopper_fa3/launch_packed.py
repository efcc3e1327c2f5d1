"""Allocates the results and gradients of packed sequences and launches. It validates nothing: problem_packed.py did."""

import math
from typing import NamedTuple

import torch

from . import plan as planning
from . import reference_backward
from .checks import recorded
from .kernels.query_config import QueryConfig
from .kernels.table_size import ENTRY_WORDS, table_lines, workspace_lines
from .launch import (
    GradientRecipe,
    hook_tensors,
    readable,
    scales,
    tile_counter,
    tma_reads,
    unread_rows,
    writable,
)
from .launch_backward import sink_gradient
from .problem import multiprocessors


class PackedRecipe(NamedTuple):
    """All that a launch needs besides the tensors: see launch.Recipe."""

    function: object  # None: no row of q has a key
    scalars: tuple  # scale_log2, cap_factor, right, left, chunk, section_rows, section_tiles, ctas, fills_idle_sms
    out: torch.Tensor
    lse: torch.Tensor
    unread_lse: torch.Tensor | None
    table: torch.Tensor | None  # one element expanded to the table's shape
    fits: bool
    gradients: GradientRecipe | None


class PackedLaunch(NamedTuple):
    """All that a launch of the gradients needs besides the tensors."""

    function: object
    workspace: tuple  # (shape, dtype), or None for what the kernels do without
    scalars: tuple


def prepare(problem, q, k, v, *, sink=None, out=None, plan=None, sm_margin=0, deterministic=False):
    """The recipe for calls like this one, of a validated CUDA problem; compiles the kernels where they are new.

    ``deterministic``: of the gradients.
    """
    one_of_out, one_of_lse, one_of_table = (
        torch.empty(1, dtype=dtype, device=q.device) for dtype in (q.dtype, torch.float32, torch.int32)
    )
    function, scalars, table = None, (), None
    if has_work(problem):
        from .compile import compiled  # imports the DSL (seconds): only where a kernel is launched

        static = problem.static
        plan = plan or planning.choose(static)
        function, sms = compiled(static, plan), multiprocessors(problem.device) - sm_margin
        lines = table_lines(problem.total_q, plan.tile_m, problem.batch, problem.has_seqused_q)
        table = one_of_table.expand(lines, ENTRY_WORDS)
        sections, ctas = planning.packed_sections(problem, sms), min(lines * problem.heads, sms)
        scalars = (*scales(problem), *problem.kernel_bounds, *sections, ctas, int(sm_margin == 0))
    lse_shape = (problem.heads, problem.total_q)
    return PackedRecipe(
        function,
        scalars,
        one_of_out.expand(problem.out_shape),
        one_of_lse.expand(lse_shape),
        unread_rows(problem.device, lse_shape),
        table,
        all(tma_reads(tensor) for tensor in (q, k, v, out) if tensor is not None),
        GradientRecipe(problem, deterministic, sm_margin, {}) if recorded(q, k, v, sink) else None,
    )


def has_work(problem):
    """False where no row of q can have a key."""
    return bool(problem.batch and problem.heads and problem.total_q and problem.total_k)


def execute(recipe, q, k, v, lengths, out=None, *, sink=None, alibi_slopes=None, want_lse=True):
    """Launch on torch's current stream of q's device; ``(out, lse)``. Writes to ``out`` where it is given.

    ``lengths``: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k. Without ``want_lse`` the second result must not be
    used.
    """
    if out is None:
        out = torch.empty_like(recipe.out)
    lse = torch.empty_like(recipe.lse) if want_lse or recipe.unread_lse is None else recipe.unread_lse
    if recipe.function is None:
        out.zero_()
        if want_lse:  # memory for unread LSEs may be an inference tensor, which PyTorch would refuse to fill
            lse.fill_(-math.inf)
            if sink is not None:  # the LSE of rows that sequences without keys use
                lse.copy_(torch.where(used_queries(lengths, lse.shape[1]), sink[:, None].to(lse.dtype), lse))
        return out, lse
    hook = hook_tensors(sink, alibi_slopes, len(lengths[0]) - 1, q.shape[1])
    table, counter = torch.empty_like(recipe.table), tile_counter(q.device)
    if recipe.fits:
        recipe.function(q, k, v, out, lse, *hook, *lengths, table, counter, *recipe.scalars)
    else:
        target = writable(out)
        tensors = map(readable, (q, k, v))
        recipe.function(*tensors, target, lse, *hook, *lengths, table, counter, *recipe.scalars)
        if target.data_ptr() != out.data_ptr():
            out.copy_(target)
    return out, lse


def used_queries(lengths, total_q):
    """Bool (total_q,): which rows of q sequences use. Reads nothing from the device."""
    cu_seqlens_q, _, used, _ = lengths
    rows = torch.arange(total_q, dtype=torch.int32, device=cu_seqlens_q.device)
    batch = len(cu_seqlens_q) - 1
    if batch == 0:
        return torch.zeros_like(rows, dtype=torch.bool)
    owner = torch.searchsorted(cu_seqlens_q[1:], rows, right=True)  # of those behind all sequences: batch
    within = rows - cu_seqlens_q[owner]
    used = cu_seqlens_q.diff() if used is None else used
    return (owner < batch) & (within >= 0) & (within < used[owner.clamp_max(batch - 1)])


def execute_backward(recipe, q, k, v, out, lse, lengths, dout, dlse, *, sink=None, alibi_slopes=None):
    """``(dq, dk, dv, dsink)`` of a CUDA problem, on torch's current stream of q's device; dsink None without ``sink``.

    ``recipe``: a launch.GradientRecipe; ``lengths``: as in execute(). dout like out, or None: zeros; dlse (heads,
    total_q) float32 or None.
    """
    problem = recipe.problem
    dq, dk, dv = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
    if not has_work(problem):
        return dq.zero_(), dk.zero_(), dv.zero_(), keyless_sink_gradient(sink, out, lse, dout, dlse)
    launch = recipe.launches.get(dlse is not None)
    if launch is None:
        launch = recipe.launches[dlse is not None] = prepare_backward(recipe, dlse is not None)
    dout = torch.zeros_like(out) if dout is None else dout
    # A hook on saved tensors may have changed the LSE's strides
    lse, dlse = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (lse, dlse))
    rows, *others = (
        None if each is None else torch.empty(each[0], dtype=each[1], device=q.device) for each in launch.workspace
    )
    if sink is not None:
        rows.fill_(math.inf)  # an LSE of no weight, where no sequence is
    _, slopes = hook_tensors(None, alibi_slopes, problem.batch, problem.heads)
    tensors, counter = (readable(tensor) for tensor in (q, k, v, out)), tile_counter(q.device)
    given = slopes, dq, dk, dv, *lengths, rows, *others, counter
    launch.function(*tensors, lse, readable(dout), dlse, *given, *launch.scalars)
    return dq, dk, dv, None if sink is None else sink_gradient(sink, rows[None], problem)


def keyless_sink_gradient(sink, out, lse, dout, dlse):
    """That of the sink where no row has a key; rows of no sequence, whose LSE is -inf, count for nothing."""
    if sink is None:
        return None
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    given = (None if each is None else each[None] for each in (out, lse, dout, dlse))
    return reference_backward.sink_gradient(sink, *given)


def prepare_backward(recipe, lse_gradient):
    """The PackedLaunch for calls of this recipe; compiles the kernels where they are new."""
    from .compile import compiled  # imports the DSL: only where a kernel is launched

    problem, sms = recipe.problem, multiprocessors(recipe.problem.device) - recipe.sm_margin
    asked = problem.backward_static(lse_gradient, bool(recipe.deterministic))
    static, plan = planning.backward_choice(asked, problem)
    unused, unused_v = planning.unused_columns(problem, planning.backward_config(static, plan))
    plan = plan._replace(unused=unused, unused_v=unused_v)
    function, config = compiled(static, plan), planning.backward_config(static, plan)
    *memory, tables = workspace(problem, config)
    base_2, cap_factor = scales(problem)
    key_tiles, _, query_tiles = (0 if table is None else table[0][0] for table in tables)
    scalars = (
        base_2,
        problem.softmax_scale,
        cap_factor,
        *problem.kernel_bounds,
        *planning.packed_backward_sections(problem, config, sms),
        min(key_tiles * problem.heads_k, sms),
        *planning.packed_sections(problem, sms),
        min(query_tiles * problem.heads, sms),
        int(recipe.sm_margin == 0),
    )
    return PackedLaunch(function, (*memory, *tables), scalars)


def workspace(problem, config):
    """Shapes and dtypes of ``(rows, sums, turns, tables)`` as PackedBackwardKernel describes them."""
    lines = (problem.heads, workspace_lines(problem.total_q, config.tile_m, problem.batch))
    sums = ((*lines, config.tile_m * config.head_dim), torch.float32) if config.sums else None
    turns = ((*lines, config.consumer_warpgroups), torch.int32) if config.turns else None

    def table(rows, tile, used):
        return (table_lines(rows, tile, problem.batch, used), ENTRY_WORDS), torch.int32

    tables = (
        table(problem.total_k, config.tile_n, problem.has_seqused_k),
        table(problem.total_q, config.tile_m, problem.has_seqused_q),
        None if config.sums else table(problem.total_q, QueryConfig.tile_m, problem.has_seqused_q),
    )
    return ((*lines, config.row_floats), torch.float32), sums, turns, tables

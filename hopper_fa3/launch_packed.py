"""Allocates the results and gradients of packed sequences and launches. It validates nothing: problem_packed.py did."""

import math
from typing import NamedTuple

import torch

from . import plan as planning
from .kernels.query_config import QueryConfig
from .kernels.table_size import ENTRY_WORDS, table_lines, workspace_lines
from .launch import GradientRecipe, readable, scale_log2, tile_counter, tma_reads, unread_rows, writable
from .problem import multiprocessors


class PackedRecipe(NamedTuple):
    """All that a launch needs besides the tensors: see launch.Recipe."""

    function: object  # None: no row of q has a key
    scalars: tuple  # scale_log2, right, left, section, ctas, fills_idle_sms
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


def prepare(problem, q, k, v, *, out=None, plan=None, sm_margin=0, deterministic=False):
    """The recipe for calls like this one, of a validated CUDA problem; compiles the kernels where they are new.

    ``deterministic``: of the gradients.
    """
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
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
        section, ctas = planning.packed_section(problem, plan.tile_m, sms), min(lines * problem.heads, sms)
        scalars = (scale_log2(problem.softmax_scale), *problem.kernel_bounds[:2], section, ctas, int(sm_margin == 0))
    lse_shape = (problem.heads, problem.total_q)
    return PackedRecipe(
        function,
        scalars,
        one_of_out.expand(problem.out_shape),
        one_of_lse.expand(lse_shape),
        unread_rows(problem.device, lse_shape),
        table,
        all(tma_reads(tensor) for tensor in (q, k, v, out) if tensor is not None),
        GradientRecipe(problem, deterministic, sm_margin, {}) if recorded else None,
    )


def has_work(problem):
    """False where no row of q can have a key."""
    return bool(problem.batch and problem.heads and problem.total_q and problem.total_k)


def execute(recipe, q, k, v, lengths, out=None, *, want_lse=True):
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
        return out, lse
    table, counter = torch.empty_like(recipe.table), tile_counter(q.device)
    if recipe.fits:
        recipe.function(q, k, v, out, lse, *lengths, table, counter, *recipe.scalars)
    else:
        target = writable(out)
        tensors = map(readable, (q, k, v))
        recipe.function(*tensors, target, lse, *lengths, table, counter, *recipe.scalars)
        if target.data_ptr() != out.data_ptr():
            out.copy_(target)
    return out, lse


def execute_backward(recipe, q, k, v, out, lse, lengths, dout, dlse):
    """``(dq, dk, dv)`` of a CUDA problem, on torch's current stream of q's device.

    ``recipe``: a launch.GradientRecipe; ``lengths``: as in execute(). dout like out, or None: zeros; dlse (heads,
    total_q) float32 or None.
    """
    dq, dk, dv = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
    if not has_work(recipe.problem):
        return dq.zero_(), dk.zero_(), dv.zero_()
    launch = recipe.launches.get(dlse is not None)
    if launch is None:
        launch = recipe.launches[dlse is not None] = prepare_backward(recipe, dlse is not None)
    dout = torch.zeros_like(out) if dout is None else dout
    # A hook on saved tensors may have changed the LSE's strides
    lse, dlse = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (lse, dlse))
    workspace = (
        None if each is None else torch.empty(each[0], dtype=each[1], device=q.device) for each in launch.workspace
    )
    tensors, counter = (readable(tensor) for tensor in (q, k, v, out)), tile_counter(q.device)
    given = dq, dk, dv, *lengths, *workspace, counter
    launch.function(*tensors, lse, readable(dout), dlse, *given, *launch.scalars)
    return dq, dk, dv


def prepare_backward(recipe, lse_gradient):
    """The PackedLaunch for calls of this recipe; compiles the kernels where they are new."""
    from .compile import compiled  # imports the DSL: only where a kernel is launched

    problem, sms = recipe.problem, multiprocessors(recipe.problem.device) - recipe.sm_margin
    static = problem.backward_static(lse_gradient, bool(recipe.deterministic))
    plan = planning.choose_backward(static)
    config = planning.backward_config(static, plan)
    static = static._replace(deterministic=config.turns)  # kernels without sums are the same for both
    unused, unused_v = planning.unused_columns(problem, config)
    plan = plan._replace(unused=unused, unused_v=unused_v)
    function, config = compiled(static, plan), planning.backward_config(static, plan)
    *memory, tables = workspace(problem, config)
    key_tiles, _, query_tiles = (0 if table is None else table[0][0] for table in tables)
    scalars = (
        scale_log2(problem.softmax_scale),
        problem.softmax_scale,
        *problem.kernel_bounds[:2],
        planning.packed_backward_section(problem, config, sms),
        min(key_tiles * problem.heads_k, sms),
        planning.packed_section(problem, QueryConfig.tile_m, sms),
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

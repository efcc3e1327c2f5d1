"""Allocates gradients and workspace and launches the kernels of the backward. It validates nothing."""

import math
from typing import NamedTuple

import torch

from . import plan as planning
from . import reference_backward
from .kernels.query_config import QueryConfig
from .launch import hook_tensors, readable, scales, tile_counter
from .problem import multiprocessors


class Launch(NamedTuple):
    """All that a launch needs besides the tensors."""

    function: object
    workspace: tuple  # (shape, dtype), or None for what the kernels do without
    scalars: tuple


def execute(recipe, q, k, v, out, lse, dout, dlse, *, sink=None, alibi_slopes=None):
    """``(dq, dk, dv, dsink)`` of a CUDA problem, on torch's current stream of q's device; dsink None without ``sink``.

    ``recipe``: a launch.GradientRecipe. dout like out, or None: zeros; dlse (batch, heads, seqlen_q) float32 or None.
    """
    problem = recipe.problem
    dq, dk, dv = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
    if not (problem.batch and problem.heads and problem.seqlen_q and problem.seqlen_k):
        dsink = None if sink is None else reference_backward.sink_gradient(sink, out, lse, dout, dlse)
        return dq.zero_(), dk.zero_(), dv.zero_(), dsink
    launch = recipe.launches.get(dlse is not None)
    if launch is None:
        launch = recipe.launches[dlse is not None] = prepare(recipe, dlse is not None)
    dout = torch.zeros_like(out) if dout is None else dout
    # A hook on saved tensors may have changed the LSE's strides
    lse, dlse = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (lse, dlse))
    rows, *others = (
        None if each is None else torch.empty(each[0], dtype=each[1], device=q.device) for each in launch.workspace
    )
    tensors = (readable(tensor) for tensor in (q, k, v, out))
    _, slopes = hook_tensors(None, alibi_slopes, problem.batch, problem.heads)
    counter = tile_counter(q.device)
    launch.function(*tensors, lse, readable(dout), dlse, slopes, dq, dk, dv, rows, *others, counter, *launch.scalars)
    return dq, dk, dv, None if sink is None else sink_gradient(sink, rows, problem)


def sink_gradient(sink, rows, problem):
    """``-sum over batch and queries of exp(sink - LSE) * delta`` in the sink's dtype, from the row statistics that the
    kernels leave: see reference_backward.sink_gradient.
    """
    lse, delta = rows.unflatten(-1, (2, -1)).unbind(-2)
    # Of scores in base 2, which with softcap lack a constant: kernels/score.py
    constant = problem.softcap if problem.score is None else 0.0
    logits = (sink.float() - constant) * math.log2(math.e)
    weights = torch.exp2(logits[:, None, None] - lse)
    return (weights * delta).masked_fill_(weights == 0, 0).sum((0, 2, 3)).neg_().to(sink.dtype)


def prepare(recipe, lse_gradient):
    """The Launch for calls of this recipe; compiles the kernels where they are new."""
    from .compile import compiled  # imports the DSL: only where a kernel is launched

    problem = recipe.problem
    sms = multiprocessors(problem.device) - recipe.sm_margin
    asked = problem.backward_static(lse_gradient, bool(recipe.deterministic))
    static, plan = planning.backward_choice(asked, problem)
    config = planning.backward_config(static, plan)
    parts = planning.head_parts(problem, config, sms)
    unused, unused_v = planning.unused_columns(problem, config)
    plan = plan._replace(split_heads=parts > 1, unused=unused, unused_v=unused_v)
    tail = planning.split_tail(problem, planning.backward_config(static, plan), sms)
    plan = plan._replace(split_tail=tail is not None)
    function, config = compiled(static, plan), planning.backward_config(static, plan)
    tiles = planning.key_tiles(problem, config) * parts
    tail = tail or planning.Tail(tiles, 1)
    query_tiles = problem.batch * problem.heads * -(-problem.seqlen_q // QueryConfig.tile_m)
    base_2, cap_factor = scales(problem)
    scalars = (
        base_2,
        problem.softmax_scale,
        cap_factor,
        *problem.kernel_bounds,
        planning.backward_heads_per_section(problem, config, parts, sms) * parts,
        problem.heads_k * parts,
        *tail,
        min(tail.indices(tiles), sms),
        planning.heads_per_section(problem),
        min(query_tiles, sms),
        int(recipe.sm_margin == 0),
    )
    return Launch(function, workspace(problem, config, parts, tail.slots(tiles)), scalars)


def workspace(problem, config, parts, slots):
    """Shapes and dtypes of ``(rows, sums, turns, dk_parts, dv_parts)`` as BackwardKernel describes them; linear in
    length. ``slots``: of the tail's parts, no more however long it is.
    """
    steps = (problem.batch, problem.heads, -(-problem.seqlen_q // config.tile_m))
    sums = ((*steps, config.tile_m * config.head_dim), torch.float32) if config.sums else None
    turns = ((*steps, config.consumer_warpgroups), torch.int32) if config.turns else None
    key_parts = (None, None)
    if config.key_parts:
        tiles = (problem.batch, problem.heads_k, parts, -(-problem.seqlen_k // config.tile_n))
        places = tiles if config.split_heads else (slots,)
        key_parts = (((*places, config.tile_n * dim), torch.float32) for dim in (config.head_dim, config.head_dim_v))
    return ((*steps, config.row_floats), torch.float32), sums, turns, *key_parts

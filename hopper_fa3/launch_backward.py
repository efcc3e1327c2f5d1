"""Allocates gradients and workspace and launches the three kernels of the backward. It validates nothing."""

import torch

from . import plan as planning
from .kernels.query_config import QueryConfig
from .launch import readable, scale_log2, tile_counter
from .problem import multiprocessors


def execute(recipe, q, k, v, out, lse, dout, dlse):
    """``(dq, dk, dv)`` of a CUDA problem, on torch's current stream of q's device.

    ``recipe``: a launch.GradientRecipe. dout like out, or None: zeros; dlse (batch, heads, seqlen_q) float32 or None.
    """
    problem = recipe.problem
    dq, dk, dv = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
    if not (problem.batch and problem.heads and problem.seqlen_q and problem.seqlen_k):
        return dq.zero_(), dk.zero_(), dv.zero_()
    from .compile import compiled  # imports the DSL: only where a kernel is launched

    sms = multiprocessors(problem.device) - recipe.sm_margin
    static = problem.backward_static(dlse is not None, bool(recipe.deterministic))
    plan = planning.choose_backward(static)
    config = planning.backward_config(static, plan)
    static = static._replace(deterministic=config.turns)  # kernels without sums are the same for both
    parts = planning.head_parts(problem, config, sms)
    plan = plan._replace(split_heads=parts > 1)
    function, config = compiled(static, plan), planning.backward_config(static, plan)
    dout = torch.zeros_like(out) if dout is None else dout
    if dlse is not None and dlse.stride(-1) != 1:
        dlse = dlse.contiguous()
    tiles = problem.batch * problem.heads_k * parts * -(-problem.seqlen_k // config.tile_n)
    query_tiles = problem.batch * problem.heads * -(-problem.seqlen_q // QueryConfig.tile_m)
    scalars = (
        scale_log2(problem.softmax_scale),
        problem.softmax_scale,
        0 if problem.right is None else problem.right,
        planning.backward_heads_per_section(problem, static.deterministic) * parts,
        problem.heads_k * parts,
        # Where the order of the sums counts, a tile is a CTA: the hardware starts them in order
        tiles if static.deterministic else min(tiles, sms),
        planning.heads_per_section(problem),
        min(query_tiles, sms),
    )
    counter = tile_counter(q.device) if config.dynamic else None
    tensors = (readable(tensor) for tensor in (q, k, v, out))
    function(*tensors, lse, readable(dout), dlse, dq, dk, dv, *workspace(problem, config, parts), counter, *scalars)
    return dq, dk, dv


def workspace(problem, config, parts):
    """``(rows, sums, turns, dk_parts, dv_parts)`` as BackwardKernel describes them, uninitialised; linear in length."""

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=problem.device)

    steps = (problem.batch, problem.heads, -(-problem.seqlen_q // config.tile_m))
    sums = empty(*steps, config.tile_m * config.key_columns) if config.sums else None
    turns = empty(*steps, config.consumer_warpgroups, dtype=torch.int32) if config.turns else None
    key_parts = (None, None)
    if config.split_heads:
        tiles = (problem.batch, problem.heads_k, parts, -(-problem.seqlen_k // config.tile_n))
        key_parts = (empty(*tiles, config.tile_n * dim) for dim in (config.head_dim, config.head_dim_v))
    return empty(*steps, config.row_floats), sums, turns, *key_parts

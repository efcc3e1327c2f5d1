"""Allocates gradients and workspace and launches the three kernels of the backward. It validates nothing."""

import torch

from . import plan as planning
from .launch import readable, scale_log2, tile_counter
from .problem import multiprocessors


def execute(recipe, q, k, v, out, lse, dout, dlse):
    """``(dq, dk, dv)`` of a CUDA problem, on torch's current stream of q's device.

    ``recipe``: a launch.GradientRecipe. dout like out, or None: zeros; dlse (batch, heads, seqlen_q) float32 or None.
    """
    problem = recipe.problem
    dq, dk, dv = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
    if not (problem.batch and problem.seqlen_q and problem.seqlen_k):
        return dq.zero_(), dk.zero_(), dv.zero_()
    from .compile import compiled  # imports the DSL: only where a kernel is launched

    static = problem.backward_static(dlse is not None, bool(recipe.deterministic))
    plan = planning.choose_backward(static)
    function, config = compiled(static, plan), planning.backward_config(static, plan)
    dout = torch.zeros_like(out) if dout is None else dout
    if dlse is not None and dlse.stride(-1) != 1:
        dlse = dlse.contiguous()
    blocks = -(-problem.seqlen_q // config.tile_m)
    rows, sums = (
        torch.empty(
            (problem.batch, problem.heads, blocks, floats), dtype=torch.float32, device=problem.device
        )
        for floats in (config.row_floats, config.tile_m * config.key_columns)
    )
    head_parts = problem.heads_k
    tiles = problem.batch * head_parts * -(-problem.seqlen_k // config.tile_n)
    ctas = min(tiles, multiprocessors(problem.device) - recipe.sm_margin)
    scalars = (
        scale_log2(problem.softmax_scale),
        problem.softmax_scale,
        0 if problem.right is None else problem.right,
        planning.backward_heads_per_section(problem),
        head_parts,
        ctas,
    )
    counter = tile_counter(q.device) if config.dynamic else None
    tensors = (readable(tensor) for tensor in (q, k, v, out))
    function(*tensors, lse, readable(dout), dlse, dq, dk, dv, rows, sums, counter, *scalars)
    return dq, dk, dv

"""Attention over packed sequences in plain PyTorch: each by itself, the standard way (the oracle) or blockwise.

Rows that no sequence uses are never read; as queries they yield 0 and LSE -inf, and their gradients are 0.
"""

import math
from typing import NamedTuple

import torch

from .problem import Problem
from .problem_packed import used_rows
from .reference import blockwise, standard
from .reference_backward import blockwise_backward
from .tiles import arithmetic_dtype


class Lengths(NamedTuple):
    """Where the sequences are: int32 tensors on the CPU as flash_attn_varlen_func takes them."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None

    @property
    def rows(self):
        """``(queries, keys)`` of each sequence, ranges of rows."""
        queries = used_rows(self.cu_seqlens_q, self.seqused_q)
        return list(zip(queries, used_rows(self.cu_seqlens_k, self.seqused_k), strict=True))


def standard_packed(q, k, v, lengths, *, softmax_scale=None, left=None, right=None, compute_dtype=None):
    """standard() of each sequence: the oracle. q, k, v as flash_attn_varlen_func takes them; ``lengths``: a Lengths.

    Returns out ``(total_q, heads, head_dim_v)`` and the LSE ``(heads, total_q)`` as standard() does. Differentiable.
    """
    dtype = compute_dtype or q.dtype
    nothing = sum(x[:0].sum().to(dtype) for x in (q, k, v))  # where no sequence is, all gradients are 0
    out = torch.zeros((*q.shape[:2], v.shape[-1]), dtype=dtype, device=q.device) + nothing
    lse = torch.full(q.shape[1::-1], -math.inf, dtype=arithmetic_dtype(dtype), device=q.device) + nothing
    for queries, keys in lengths.rows:
        rows, key_rows = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        out[None, rows], lse[None, :, rows] = standard(
            q[None, rows], k[None, key_rows], v[None, key_rows], softmax_scale=softmax_scale, left=left, right=right,
            compute_dtype=compute_dtype,
        )  # fmt: skip
    return out, lse


def blockwise_packed(problem, q, k, v, lengths, *, out=None):
    """blockwise() of each sequence: the path of CPU tensors, in memory linear in length.

    Takes a PackedProblem, its tensors and a Lengths; results as flash_attn_varlen_func returns them, out written to
    ``out`` where given. Once differentiable; autograd keeps q, k, v, out, the LSE and the lengths.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return PackedAttention.apply(q, k, v, *lengths, problem)
    return _forward(problem, q, k, v, lengths, out)


class PackedAttention(torch.autograd.Function):
    """blockwise_packed() as one node of the graph."""

    @staticmethod
    def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, problem):
        return _forward(problem, q, k, v, Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k))

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.problem = inputs
        ctx.save_for_backward(*output, *tensors)
        ctx.set_materialize_grads(False)  # a result that no loss used arrives as None and costs nothing

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 8
        gradients = PackedGradients.apply(ctx.problem, ctx.needs_input_grad[:3], dout, dlse, *ctx.saved_tensors)
        return *gradients, None, None, None, None, None


class PackedGradients(torch.autograd.Function):
    """The backward as a node, so that under create_graph a second derivative is refused (see BlockwiseGradients)."""

    @staticmethod
    def forward(problem, wanted, dout, dlse, out, lse, q, k, v, *lengths):
        return _backward(problem, q, k, v, Lengths(*lengths), out, lse, dout, dlse, wanted)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("attention can be differentiated once only (second derivatives are not built)")


class Sequence(NamedTuple):
    """One sequence that has queries and keys."""

    problem: Problem
    queries: slice  # rows of q
    keys: slice


def _sequences(problem, lengths):
    """Those that have something to compute. Each by itself, as a call of its own would be computed: products of several
    at once may round otherwise, and a sequence's bits would depend on its neighbours.
    """
    problems = {}
    for queries, keys in lengths.rows:
        if queries and keys:
            both = len(queries), len(keys)
            if both not in problems:
                problems[both] = problem.of_sequence(*both)
            yield Sequence(problems[both], slice(queries.start, queries.stop), slice(keys.start, keys.stop))


def _forward(problem, q, k, v, lengths, out=None):
    if out is None:
        out = torch.empty(problem.out_shape, dtype=q.dtype, device=q.device)
    out.zero_()
    lse = torch.full((problem.heads, problem.total_q), -math.inf, dtype=arithmetic_dtype(q.dtype), device=q.device)
    for one, queries, keys in _sequences(problem, lengths):
        tensors = q[None, queries], k[None, keys], v[None, keys]
        _, lse[None, :, queries] = blockwise(one, *tensors, out=out[None, queries])
    return out, lse


def _backward(problem, q, k, v, lengths, out, lse, dout, dlse, wanted):
    gradients = [
        torch.zeros(x.shape, dtype=x.dtype, device=x.device) if asked else None
        for x, asked in zip((q, k, v), wanted, strict=True)
    ]
    for one, queries, keys in _sequences(problem, lengths):
        arrived = (
            None if dout is None else dout[None, queries],
            None if dlse is None else dlse[None, :, queries],
        )
        tensors = q[None, queries], k[None, keys], v[None, keys], out[None, queries], lse[None, :, queries]
        found = blockwise_backward(one, *tensors, *arrived, wanted=wanted)
        for whole, rows, part in zip(gradients, (queries, keys, keys), found, strict=True):
            if whole is not None:
                whole[None, rows] = part
    return tuple(gradients)

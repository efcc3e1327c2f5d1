"""Attention over packed sequences in plain PyTorch: each by itself, the standard way (the oracle) or blockwise.

Rows that no sequence uses are never read; as queries they yield 0 and LSE -inf, and their gradients are 0.
"""

import math
from typing import NamedTuple

import torch

from .band import blocks
from .checks import recorded
from .problem import Problem
from .problem_packed import used_rows
from .reference import blockwise, standard
from .reference_backward import blockwise_backward, sink_gradient
from .tiles import arithmetic_dtype

# Short sequences of equal lengths are computed together, up to so many rows of Q or of K. 80,000 sequences of 16 with 2
# heads of 64 take 1 s on two cores so, one by one 20 s; 4096 rows gain nothing more.
SHARED_ROWS = 2048


class Lengths(NamedTuple):
    """Where the sequences are: int32 tensors as flash_attn_varlen_func takes them."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None

    @property
    def rows(self):
        """``(queries, keys)`` of each sequence, ranges of rows. Reads the tensors: on the CPU only."""
        queries = used_rows(self.cu_seqlens_q, self.seqused_q)
        return list(zip(queries, used_rows(self.cu_seqlens_k, self.seqused_k), strict=True))


def standard_packed(
    q, k, v, lengths, *, softmax_scale=None, left=None, right=None, attention_chunk=0, softcap=0.0, sink=None,
    alibi_slopes=None, score=None, mask=None, compute_dtype=None,
):  # fmt: skip
    """standard() of each sequence: the oracle. q, k, v as flash_attn_varlen_func takes them; ``lengths``: a Lengths.

    Options as standard() takes them, a sequence as a batch entry. Returns out ``(total_q, heads, head_dim_v)`` and the
    LSE ``(heads, total_q)`` as standard() does. Differentiable.
    """
    dtype, heads = compute_dtype or q.dtype, q.shape[1]
    inputs = [x for x in (q, k, v, sink) if x is not None]
    nothing = sum(x[:0].sum().to(dtype) for x in inputs)  # where no sequence is, all gradients are 0
    slopes = None if alibi_slopes is None else alibi_slopes.expand(len(lengths.rows), heads)
    out = torch.zeros((*q.shape[:2], v.shape[-1]), dtype=dtype, device=q.device) + nothing
    lse = torch.full(q.shape[1::-1], -math.inf, dtype=arithmetic_dtype(dtype), device=q.device) + nothing
    for number, (queries, keys) in enumerate(lengths.rows):
        this = torch.tensor([number], device=q.device)
        rows, key_rows = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        out[None, rows], lse[None, :, rows] = standard(
            q[None, rows], k[None, key_rows], v[None, key_rows], softmax_scale=softmax_scale, left=left, right=right,
            attention_chunk=attention_chunk, softcap=softcap, sink=sink, compute_dtype=compute_dtype,
            alibi_slopes=None if slopes is None else slopes[number],
            score=None if score is None else score.side_by_side(this, heads),
            mask=None if mask is None else mask.side_by_side(this, heads),
        )  # fmt: skip
    return out, lse


def blockwise_packed(problem, q, k, v, lengths, *, sink=None, alibi_slopes=None, out=None):
    """blockwise() of each sequence: the path of CPU tensors, in memory linear in length.

    Takes a PackedProblem, its tensors and a Lengths; results as flash_attn_varlen_func returns them, out written to
    ``out`` where given. Once differentiable; autograd keeps these tensors, out and the LSE.
    """
    if problem.score is not None and torch.is_grad_enabled():
        problem.score.refuse_gradients_of_its_own(arithmetic_dtype(q.dtype))
    if recorded(q, k, v, sink):
        return PackedAttention.apply(q, k, v, sink, alibi_slopes, *lengths, problem)
    return _forward(problem, q, k, v, sink, alibi_slopes, lengths, out)


class PackedAttention(torch.autograd.Function):
    """blockwise_packed() as one node of the graph."""

    @staticmethod
    def forward(q, k, v, sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, problem):
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        return _forward(problem, q, k, v, sink, alibi_slopes, lengths)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.problem = inputs
        ctx.save_for_backward(*output, *tensors)
        ctx.set_materialize_grads(False)  # a result that no loss used arrives as None and costs nothing

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 10
        gradients = PackedGradients.apply(ctx.problem, ctx.needs_input_grad[:4], dout, dlse, *ctx.saved_tensors)
        return *gradients, None, None, None, None, None, None


class PackedGradients(torch.autograd.Function):
    """The backward as a node, so that under create_graph a second derivative is refused (see BlockwiseGradients)."""

    @staticmethod
    def forward(problem, wanted, dout, dlse, out, lse, q, k, v, sink, alibi_slopes, *lengths):
        return _backward(problem, q, k, v, sink, alibi_slopes, Lengths(*lengths), out, lse, dout, dlse, wanted)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("attention can be differentiated once only (second derivatives are not built)")


class Alike(NamedTuple):
    """Sequences of equal used lengths, computed as one whose heads are the heads of them all: products then read memory
    in the order of one sequence's. BLAS may still sum otherwise than for one alone: by alignment, number of products.
    """

    problem: Problem
    queries: torch.Tensor  # (seqlen_q, count): which rows of q
    keys: torch.Tensor  # (seqlen_k, count)
    sink: torch.Tensor | None  # (count * heads,), in the arithmetic's dtype: its gradient is a sum over the groups
    alibi_slopes: torch.Tensor | None  # (count * heads,)


def _alike(problem, lengths, sink, alibi_slopes):
    """All sequences that have queries and keys, in groups; with a sink those without keys, too: the LSE is the sink.
    Without heads there is nothing to compute.
    """
    if not problem.heads:
        return
    starts = {}
    for number, (queries, keys) in enumerate(lengths.rows):
        if queries and (keys or problem.has_sink):
            starts.setdefault((len(queries), len(keys)), []).append((number, queries.start, keys.start))
    sink = None if sink is None else sink.to(arithmetic_dtype(problem.dtype))
    slopes = None if alibi_slopes is None else alibi_slopes.expand(problem.batch, problem.heads)
    for (seqlen_q, seqlen_k), all_starts in starts.items():
        for part in blocks(range(len(all_starts)), max(SHARED_ROWS // max(seqlen_q, seqlen_k), 1)):
            numbers, first_q, first_k = torch.tensor(all_starts[part.start : part.stop]).unbind(1)
            queries, keys = (
                torch.arange(length)[:, None] + first for length, first in ((seqlen_q, first_q), (seqlen_k, first_k))
            )
            yield Alike(
                problem.side_by_side(numbers, seqlen_q, seqlen_k), queries, keys,
                None if sink is None else sink.repeat(len(part)),
                None if slopes is None else slopes[numbers].flatten(),
            )  # fmt: skip


def _gathered(x, rows):
    """(total, heads, n) -> (1, length, count * heads, n)"""
    return x[rows].flatten(1, 2)[None]


def _gathered_lse(lse, rows):
    """(heads, total) -> (1, count * heads, length)"""
    return lse[:, rows].permute(2, 0, 1).flatten(0, 1)[None]


def _forward(problem, q, k, v, sink, alibi_slopes, lengths, out=None):
    if out is None:
        out = torch.empty(problem.out_shape, dtype=q.dtype, device=q.device)
    out.zero_()
    lse = torch.full((problem.heads, problem.total_q), -math.inf, dtype=arithmetic_dtype(q.dtype), device=q.device)
    for alike, queries, keys, logits, slopes in _alike(problem, lengths, sink, alibi_slopes):
        found, found_lse = blockwise(
            alike, _gathered(q, queries), _gathered(k, keys), _gathered(v, keys), sink=logits, alibi_slopes=slopes
        )
        out[queries] = found[0].unflatten(1, (-1, problem.heads))
        lse[:, queries] = found_lse[0].unflatten(0, (-1, problem.heads)).permute(1, 2, 0)
    return out, lse


def _backward(problem, q, k, v, sink, alibi_slopes, lengths, out, lse, dout, dlse, wanted):
    *gradients, dsink = (
        torch.zeros(x.shape, dtype=dtype, device=q.device) if asked else None
        for x, dtype, asked in zip((q, k, v, sink), (*[q.dtype] * 3, lse.dtype), wanted, strict=True)
    )
    for alike, queries, keys, logits, slopes in _alike(problem, lengths, sink, alibi_slopes):
        results = (
            _gathered(out, queries),
            _gathered_lse(lse, queries),
            None if dout is None else _gathered(dout, queries),
            None if dlse is None else _gathered_lse(dlse, queries),
        )
        inputs = (_gathered(x, rows) for x, rows in ((q, queries), (k, keys), (v, keys)))
        found = blockwise_backward(alike, *inputs, *results, alibi_slopes=slopes, wanted=wanted[:3])
        for whole, rows, part in zip(gradients, (queries, keys, keys), found, strict=True):
            if whole is not None:
                whole[rows] = part[0].unflatten(1, (-1, whole.shape[1]))
        if dsink is not None:
            dsink += sink_gradient(logits, *results).view(-1, problem.heads).sum(0)
    return *gradients, None if dsink is None else dsink.to(sink.dtype)

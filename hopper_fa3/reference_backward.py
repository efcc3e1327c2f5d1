"""Gradients of attention in plain PyTorch, tile by tile: P is computed again from Q, K and the LSE in O(length) memory.

A key of weight P = 0 (hidden, of score -inf, or too far below the others) gives nothing and takes nothing, not even a
NaN: the forward's rule, carried on. All else follows IEEE arithmetic, so a NaN reaches what depends on it.
"""

import math
from typing import NamedTuple

import torch

from .band import Band, blocks
from .scores import ScoreRule
from .tiles import (
    BLOCK_K,
    BLOCK_Q,
    Traffic,
    all_finite,
    arithmetic_dtype,
    by_head,
    hide,
    product,
    stacked,
    stacked_rows,
    unstacked,
    weighted_sum,
)


class Finite(NamedTuple):
    """Which of the tensors that are summed with weights hold neither NaN nor inf."""

    q: bool
    k: bool
    dout: bool


class Queries(NamedTuple):
    """What one tile of queries brings to all its keys, heads stacked: (batch, heads_k, group * rows, ...)."""

    q: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor | None
    delta: torch.Tensor  # rowsum(dO * O) - dLSE


class Sums(NamedTuple):
    """Gradients of a tile of queries and a block of keys, to be added to; None where not wanted."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None


def blockwise_backward(
    problem, q, k, v, out, lse, dout, dlse, *, alibi_slopes=None, wanted=(True, True, True), block_q=BLOCK_Q,
    block_k=BLOCK_K, traffic=None,
):  # fmt: skip
    """Gradients ``(dq, dk, dv)`` of attention from its inputs, its results and their gradients (Dao 2023, algorithm 2).

    With X = scale Q K^T, S the scores that ScoreRule makes of X, P = exp(S - LSE) and dP = dO V^T::

        delta = rowsum(dO * O) - dLSE        dX = P * (dP - delta) * (1 - tanh(X / softcap)^2, where there is a softcap)
        dV = P^T dO        dK = scale dX^T Q        dQ = scale dX K

    q, k, v, out, lse: as blockwise() takes and returns them. dout: like out; dlse: like lse; None where no loss used
    the result. ``wanted``: which gradients to compute; the others are None. Gradients have their input's shape and
    dtype; arithmetic in float32 (float64 for float64). A query that sees no key gives none: its dout and dlse are not
    used. A sink is in the LSE, and so in P; its own gradient is sink_gradient().

    Tiles of queries stand outside, unlike in the paper, so that what is summed in slow memory are dK and dV, which GQA
    makes smaller than dQ. Memory beyond the gradients: dK and dV in float32, and a few tiles. ``traffic`` counts the
    elements moved, with N' the queries of tiles that see a key and T the sum over tiles of visible keys::

        read    = B H N' (d + 2 d_v + 1) + 2 B H_k (d + d_v) T    (Q, O, dO, LSE; K, V, dK, dV), B H N' more for dLSE
        written = B H N' d + B H_k (d + d_v) (T + M)              (dQ; dK and dV, zeros at first)
    """
    if not any(wanted):
        return None, None, None
    traffic, band, dtype = Traffic() if traffic is None else traffic, Band.of(problem), arithmetic_dtype(q.dtype)
    rule = ScoreRule.of(problem, alibi_slopes, dtype)
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if wanted[0] else None
    dk, dv = (
        torch.zeros(tensor.shape, dtype=dtype, device=q.device) if asked else None
        for tensor, asked in zip((k, v), wanted[1:], strict=True)
    )
    traffic.store(*(tensor for tensor in (dk, dv) if tensor is not None))
    finite = Finite(dk is None or all_finite(q), dq is None or all_finite(k), dout is None or all_finite(dout))
    for rows in blocks(range(problem.seqlen_q), block_q):
        key_blocks = blocks(band.keys(rows), block_k)
        if not key_blocks:
            continue
        queries = _queries(problem, q, out, lse, dout, dlse, rows, traffic)
        tile = None if dq is None else torch.zeros_like(queries.q)
        for keys in key_blocks:
            part = slice(keys.start, keys.stop)
            sums = Sums(tile, *(None if whole is None else whole[:, part] for whole in (dk, dv)))
            _add(sums, rule, queries, k[:, part], v[:, part], rows, keys, finite, traffic)
        if dq is not None:
            dq[:, rows.start : rows.stop] = unstacked(tile.mul_(problem.softmax_scale), problem, rows)
            traffic.store(tile)
    if dk is not None:
        dk = dk.mul_(problem.softmax_scale).to(k.dtype)
    return dq, dk, None if dv is None else dv.to(v.dtype)


def sink_gradient(sink, out, lse, dout, dlse, *, block_q=BLOCK_Q, traffic=None):
    """Gradient ``(heads,)`` of the sink, in its dtype: ``-sum over batch and queries of exp(sink - LSE) * delta``.

    exp(sink - LSE) is the weight of the sink in the softmax. Its value is 0, so to out it matters as what the others
    lose, -weight * O, and to the LSE as any score, by its weight; delta as in blockwise_backward(), whose arguments
    these are. A sink of no weight gets nothing, not even from a NaN.
    """
    traffic, logits = Traffic() if traffic is None else traffic, sink.to(lse.dtype)[:, None]
    gradient = torch.zeros_like(logits[:, 0])
    for rows in blocks(range(out.shape[1]), block_q):
        part = slice(rows.start, rows.stop)
        (tile_lse,) = traffic.load(lse[:, :, part])
        delta = torch.zeros_like(tile_lse)
        if dout is not None:
            tile_out, tile_dout = (x.to(lse.dtype) for x in traffic.load(out[:, part], dout[:, part]))
            delta = (tile_out * tile_dout).sum(-1).mT
        if dlse is not None:
            (tile_dlse,) = traffic.load(dlse[:, :, part])
            delta = delta - tile_dlse
        weights = torch.exp(logits - tile_lse).masked_fill(logits == -math.inf, 0)  # -inf - -inf: no sink, no key
        gradient -= (weights * delta).masked_fill(weights == 0, 0).sum((0, 2))
    return gradient.to(sink.dtype)


def _queries(problem, q, out, lse, dout, dlse, rows, traffic):
    """A tile of queries with all that belongs to its rows. Reads of out, dout and dlse what there is a gradient for."""
    dtype, part = arithmetic_dtype(q.dtype), slice(rows.start, rows.stop)
    tile = stacked(*traffic.load(q[:, part]), problem, dtype)
    tile_lse = stacked_rows(*traffic.load(lse[:, :, part]), problem, dtype)
    delta, tile_dout = torch.zeros_like(tile_lse), None
    if dout is not None:
        tile_out, tile_dout = (stacked(x, problem, dtype) for x in traffic.load(out[:, part], dout[:, part]))
        delta = (tile_out * tile_dout).sum(-1)
    if dlse is not None:
        delta = delta - stacked_rows(*traffic.load(dlse[:, :, part]), problem, dtype)
    return Queries(tile, tile_lse, tile_dout, delta)


def _add(sums, rule, queries, k_block, v_block, rows, keys, finite, traffic):
    """Add to ``sums`` what a tile of queries and a block of keys give each other; dk and dv lie as k_block, v_block."""
    dtype = queries.q.dtype
    k_block = by_head(*traffic.load(k_block), dtype)
    tile = rule.linearised(queries.q, k_block, rows, keys)
    hidden = Band.of(rule.problem).hidden(rows, keys, k_block.device)
    weights = tile.scores.sub_(queries.lse[..., None]).exp_()
    hide(weights, hidden, rule.problem, 0)  # not the scores: the LSE of rows that see no key is -inf, too
    traffic.store(*traffic.load(*(tensor for tensor in (sums.dk, sums.dv) if tensor is not None)))
    if sums.dv is not None and queries.dout is not None:
        by_head(sums.dv, dtype).add_(weighted_sum(weights.mT, queries.dout, finite.dout))
    if sums.dq is None and sums.dk is None:
        return
    slope = -queries.delta[..., None]
    if queries.dout is not None:
        slope = product(queries.dout, by_head(*traffic.load(v_block), dtype).mT).add_(slope)
    unused = weights == 0
    dscores = rule.gradient(tile, weights.mul_(slope)).masked_fill_(unused, 0)
    if sums.dq is not None:
        sums.dq.add_(weighted_sum(dscores, k_block, finite.k))
    if sums.dk is not None:
        by_head(sums.dk, dtype).add_(weighted_sum(dscores.mT, queries.q, finite.q))

"""Attention in plain PyTorch: the standard way (the oracle), and the blockwise way in the loop orders of FA-1 and FA-2.

Both blockwise orders are exact, use memory of O(length) beyond inputs and results, and can count the elements that they
move. The FA-2 order is the path of CPU tensors, with its gradients in reference_backward.py. Device-independent; the
same rules for NaN, inf and blind rows hold everywhere: a query that sees no key yields 0 and LSE -inf; one that
sees only scores of -inf yields NaN and -inf; with a sink above -inf both yield 0 and the sink; a score of NaN or +inf
makes out and LSE of its query NaN; a key of weight 0 takes nothing from V, not even a NaN.
"""

import itertools
import math
from typing import NamedTuple

import torch

from .band import Band, blocks
from .checks import recorded
from .hooks import indices_of
from .reference_backward import blockwise_backward, sink_gradient
from .scores import ScoreRule, hide
from .tiles import (
    BLOCK_K,
    BLOCK_Q,
    Traffic,
    all_finite,
    arithmetic_dtype,
    by_head,
    product,
    stacked,
    stacked_rows,
    unstacked,
    weighted_sum,
)


def standard(
    q, k, v, *, softmax_scale=None, left=None, right=None, attention_chunk=0, softcap=0.0, sink=None, alibi_slopes=None,
    score=None, mask=None, compute_dtype=None,
):  # fmt: skip
    """Standard attention with its whole score matrix, ``softmax(scale * Q K^T) V`` (Vaswani et al. 2017, equation 1).

    q ``(batch, seqlen_q, heads, head_dim)``, k and v ``(batch, seqlen_k, heads_k, head_dim or head_dim_v)``; returns
    out ``(batch, seqlen_q, heads, head_dim_v)`` and the natural-log LSE ``(batch, heads, seqlen_q)`` in float32
    (float64 where the arithmetic is). ``left``, ``right`` and ``attention_chunk`` are the bounds of Band, None for an
    open side; the others are those of flash_attn_func. With ``compute_dtype`` None the arithmetic is what PyTorch users
    write in q's dtype: both products in it, the softmax between them in float32. float32 or float64 makes it the
    oracle: inputs are converted first and out stays in that dtype. Differentiable. One head at a time, so the extra
    memory is that of seqlen_q x seqlen_k scores.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    dtype = compute_dtype or q.dtype
    band, rows, keys = Band(seqlen_q, seqlen_k, left, right, attention_chunk), range(seqlen_q), range(seqlen_k)
    in_band, distance = band.hidden(rows, keys, q.device), band.distance(rows, keys, q.device).abs()
    out, lse = _results(q, k, v, dtype, sink=sink)
    finite = all_finite(v)
    for entry, head in itertools.product(range(batch), range(heads)):
        queries, head_keys, values = (
            tensor[entry, :, index].to(dtype).contiguous()
            for tensor, index in ((q, head), (k, head // group), (v, head // group))
        )
        scores = (product(queries, head_keys.mT) * scale).to(lse.dtype)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.expand(batch, heads)[entry, head].to(lse.dtype) * distance
        indices = indices_of(range(entry, entry + 1), range(head, head + 1), rows, keys, q.device)
        if score is not None:
            scores = score.scores(scores[None, None], indices)[0, 0]
        hidden = _hidden(in_band, mask, indices, scores)
        scores = scores.masked_fill(hidden, -math.inf)
        # A sink of -inf is none: in a row without keys, its derivative would come out as NaN.
        if sink is not None and sink[head] != -math.inf:
            scores = torch.cat((scores, sink[head].to(lse.dtype).expand(seqlen_q, 1)), 1)
        total = torch.logsumexp(scores, -1)
        weights = torch.softmax(scores, -1)[:, :seqlen_k]
        blind = hidden.all(-1) & (total == -math.inf)
        weights = weights.masked_fill(blind[:, None], 0)  # softmax of a row without keys is NaN
        out[entry, :, head] = weighted_sum(weights.to(dtype), values, finite)
        lse[entry, head] = total.masked_fill(total == math.inf, math.nan)
    return out, lse


def blockwise(
    problem, q, k, v, *, sink=None, alibi_slopes=None, out=None, block_q=BLOCK_Q, block_k=BLOCK_K, traffic=None
):
    """Exact attention in FA-2's order: tiles of queries outside, blocks of keys inside (Dao 2023, algorithm 1).

    Takes a Problem and its tensors; returns out (written to ``out`` where given, which Problem allows only without
    gradients) in q's dtype and the LSE, shapes as in standard(). Arithmetic in float32 (float64 for float64). Blocks
    that no query of a tile sees are never read. Once differentiable, by blockwise_backward() and sink_gradient().
    ``traffic`` counts the elements moved (see traffic_q_outer), those of the backward pass too; sink and slopes, one
    number a head, are not counted.
    """
    traffic = Traffic() if traffic is None else traffic
    if problem.score is not None and torch.is_grad_enabled():
        problem.score.refuse_gradients_of_its_own(arithmetic_dtype(q.dtype))
    if recorded(q, k, v, sink):
        return BlockwiseAttention.apply(q, k, v, sink, alibi_slopes, problem, block_q, block_k, traffic)
    return _forward(problem, q, k, v, sink, alibi_slopes, out, block_q, block_k, traffic)


class BlockwiseAttention(torch.autograd.Function):
    """blockwise() as one node of the graph, which keeps inputs, out and the LSE: nothing of seqlen_q x seqlen_k."""

    @staticmethod
    def forward(q, k, v, sink, alibi_slopes, problem, block_q, block_k, traffic):
        return _forward(problem, q, k, v, sink, alibi_slopes, None, block_q, block_k, traffic)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, problem, block_q, block_k, traffic = inputs
        ctx.options = problem, block_q, block_k, traffic
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)  # a result that no loss used arrives as None and costs nothing

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 9
        wanted = ctx.needs_input_grad[:4]
        gradients = BlockwiseGradients.apply(*ctx.saved_tensors, dout, dlse, wanted, *ctx.options)
        return *gradients, None, None, None, None, None


class BlockwiseGradients(torch.autograd.Function):
    """The gradients as a node, so that under create_graph a second derivative is refused.

    torch's once_differentiable refuses it only where dout or dlse requires grad. After ``out.sum()`` neither does, and
    what the gradients owe to q, k and v would silently be missing.
    """

    @staticmethod
    def forward(q, k, v, sink, alibi_slopes, out, lse, dout, dlse, wanted, problem, block_q, block_k, traffic):
        gradients = blockwise_backward(
            problem, q, k, v, out, lse, dout, dlse, alibi_slopes=alibi_slopes, wanted=wanted[:3], block_q=block_q,
            block_k=block_k, traffic=traffic,
        )  # fmt: skip
        dsink = sink_gradient(sink, out, lse, dout, dlse, block_q=block_q, traffic=traffic) if wanted[3] else None
        return *gradients, dsink

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("attention can be differentiated once only (second derivatives are not built)")


@torch.no_grad()
def blockwise_kv_outer(problem, q, k, v, *, block_q=BLOCK_Q, block_k=BLOCK_K, traffic=None):
    """Exact attention in FA-1's order: blocks of keys outside, tiles of queries inside (Dao et al. 2022, algorithm 1).

    Arguments and results as blockwise(), but without gradients, and of the options of scores and masks only windows,
    chunks and softcap. O and the running maximum and sum of every query live in slow memory: each block of keys reads
    and writes them again, which is what FA-2's order saves. O stays unscaled until the last pass.
    """
    if problem.has_sink or problem.has_alibi or problem.score is not None or problem.mask is not None:
        raise NotImplementedError("the order of FlashAttention-1 has no sink, ALiBi slopes and hooks")
    traffic = Traffic() if traffic is None else traffic
    out, lse = _results(q, k, v, q.dtype)
    finite = all_finite(v)
    band, rule = Band.of(problem), ScoreRule.of(problem, None, lse.dtype)
    shape = (problem.batch, problem.heads_k, problem.group, problem.seqlen_q)
    memory = _fresh(shape, problem.head_dim_v, q)
    traffic.store(*memory)
    for keys in blocks(range(problem.seqlen_k), block_k):
        k_block, v_block = traffic.load(k[:, keys.start : keys.stop], v[:, keys.start : keys.stop])
        k_block, v_block = by_head(k_block, lse.dtype), by_head(v_block, lse.dtype)
        for rows in blocks(band.queries(keys), block_q):
            (queries,) = traffic.load(q[:, rows.start : rows.stop])
            held = traffic.load(*(tensor[:, :, :, rows.start : rows.stop] for tensor in memory))
            scores = rule.scores(stacked(queries, problem, lse.dtype), k_block, rows, keys)
            hide(scores, band.hidden(rows, keys, q.device), problem, rows, -math.inf)
            states = _absorb(Rows(*(tensor.flatten(2, 3) for tensor in held)), scores, v_block, finite)
            for place, state in zip(held, states, strict=True):
                place.copy_(state.reshape(place.shape))
            traffic.store(*held)
    for rows in blocks(range(problem.seqlen_q), block_q):
        held = traffic.load(*(tensor[:, :, :, rows.start : rows.stop] for tensor in memory))
        blind = _first(len(rows), band.blind - rows.start, q.device).repeat(problem.group)
        tile, tile_lse = _finish(Rows(*(tensor.flatten(2, 3) for tensor in held)), problem, rows, blind)
        out[:, rows.start : rows.stop] = tile
        lse[:, :, rows.start : rows.stop] = tile_lse
        traffic.store(tile, tile_lse)
    return out, lse


def traffic_standard(problem):
    """Elements that the standard way moves (Dao et al. 2022, algorithm 0): O(N d + N^2), theorem 2.

    Products and softmax each pass through slow memory, masked or not. With B batch, H heads, H_k K/V heads, N queries,
    M keys::

        read    = B H N d + B H_k M (d + d_v) + 2 B H N M        (Q, K, V, and S and P once each)
        written = 2 B H N M + B H N (d_v + 1)                    (S and P, then O and the LSE)
    """
    scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    return Traffic(
        read=_query_elements(problem) + _key_elements(problem, problem.seqlen_k) + 2 * scores,
        written=2 * scores + _result_elements(problem),
    )


def traffic_q_outer(problem, block_q=BLOCK_Q):
    """Elements that blockwise() moves: theorem 2 of Dao et al. 2022 in the order of FA-2 (Dao 2023, section 3.1).

    Each tile of block_q queries reads its Q once and the keys that it sees once; O and LSE are written once::

        read    = B H N d + B H_k (d + d_v) sum over tiles of visible keys
        written = B H N (d_v + 1)

    Without a mask the sum is ceil(N / block_q) M; causal with N = M a multiple of block_q, M (M / block_q + 1) / 2. A
    tile that fills a fast memory of Z elements has block_q of order Z / d, so this is O(N M d^2 / Z), against O(N M)
    for the standard way.
    """
    visible = sum(len(Band.of(problem).keys(rows)) for rows in blocks(range(problem.seqlen_q), block_q))
    return Traffic(read=_query_elements(problem) + _key_elements(problem, visible), written=_result_elements(problem))


def traffic_kv_outer(problem, block_k=BLOCK_K):
    """Elements that blockwise_kv_outer() moves: theorem 2 of Dao et al. 2022, counted for its algorithm 1.

    K and V are read once. For each of the blocks of block_k keys, every query that sees it reads Q, O and its maximum
    and sum and writes the last three again; they are written once before the first block and read once after the last::

        visits  = sum over blocks of queries that see the block
        read    = B H_k M (d + d_v) + B H visits (d + d_v + 2) + B H N (d_v + 2)
        written = B H N (d_v + 2) + B H visits (d_v + 2) + B H N (d_v + 1)

    Without a mask visits is ceil(M / block_k) N; causal with N = M a multiple of block_k, N (N / block_k + 1) / 2.
    """
    rows = problem.batch * problem.heads
    visits = rows * sum(len(Band.of(problem).queries(keys)) for keys in blocks(range(problem.seqlen_k), block_k))
    state = problem.head_dim_v + 2
    all_states = rows * problem.seqlen_q * state
    return Traffic(
        read=_key_elements(problem, problem.seqlen_k) + visits * (problem.head_dim + state) + all_states,
        written=all_states + visits * state + _result_elements(problem),
    )


def merge(out_a, lse_a, out_b, lse_b):
    """``(out, lse)`` over the union of two disjoint sets of keys, from the results over each (see merge_states)."""
    dtype = arithmetic_dtype(torch.promote_types(lse_a.dtype, lse_b.dtype))
    lse_a, lse_b = lse_a.to(dtype), lse_b.to(dtype)
    top = torch.maximum(lse_a, lse_b).detach()
    empty = top == -math.inf
    shift = top.masked_fill(empty, 0)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = (weight_a + weight_b).masked_fill(empty, 1)
    out = 0
    for part, part_lse, weight in ((out_a, lse_a, weight_a), (out_b, lse_b, weight_b)):
        # Where both are empty the weights are 0: zeros stay 0, and the NaN of rows with only scores of -inf stays NaN.
        unused = (part_lse == -math.inf) & ~empty
        out = out + part.to(dtype).masked_fill(_beside(unused), 0) * _beside(weight / total)
    return out.to(out_a.dtype), (shift + torch.log(total)).masked_fill(empty, -math.inf)


class Rows(NamedTuple):
    """State of the online softmax (Milakov and Gimelshein 2018) of each query."""

    top: torch.Tensor  # (..., rows): largest score so far
    total: torch.Tensor  # (..., rows): sum of exp(score - top)
    mixed: torch.Tensor  # (..., rows, head_dim_v): the same sum of weights times V


def _fresh(shape, head_dim_v, like):
    options = {"dtype": arithmetic_dtype(like.dtype), "device": like.device}
    top = torch.full(shape, -math.inf, **options)
    return Rows(top, torch.zeros(shape, **options), torch.zeros((*shape, head_dim_v), **options))


def _absorb(state, scores, v_block, finite):
    """The state after one more block of keys (Dao 2023, equation of section 3.1.1). Overwrites ``scores``."""
    top = torch.maximum(state.top, scores.amax(-1))
    shift = top.masked_fill(top == -math.inf, 0)  # no -inf - -inf while nothing has been seen
    keep = torch.exp(state.top - shift)
    weights = scores.sub_(shift[..., None]).exp_()
    mixed = state.mixed * keep[..., None] + weighted_sum(weights, v_block, finite)
    return Rows(top, state.total * keep + weights.sum(-1), mixed)


def _absorb_sink(state, sink, problem, rows):
    """The state after one more key for each head, of this score, whose value is 0."""
    logits = sink[None, :, None].expand(problem.batch, problem.heads, len(rows))
    logits = stacked_rows(logits, problem, state.top.dtype)
    top = torch.maximum(state.top, logits)
    shift = top.masked_fill(top == -math.inf, 0)
    keep = torch.exp(state.top - shift)
    return Rows(top, state.total * keep + torch.exp(logits - shift), state.mixed * keep[..., None])


def _finish(state, problem, rows, blind):
    """Results of a tile of queries, (batch, rows, heads, head_dim_v) and (batch, heads, rows), from its final state.

    ``blind``: bool that broadcasts to the state's rows, True for those that see no key.
    """
    total = state.total.masked_fill(blind, 1)  # 0 / 1 = 0 and -inf + log(1) = -inf
    out = unstacked(state.mixed / total[..., None], problem, rows)
    lse = (state.top + torch.log(total)).reshape(problem.batch, problem.heads, len(rows))
    return out.to(problem.dtype), lse


def _forward(problem, q, k, v, sink, alibi_slopes, out, block_q, block_k, traffic):
    out, lse = _results(q, k, v, q.dtype, out)
    finite, rule = all_finite(v), ScoreRule.of(problem, alibi_slopes, lse.dtype)
    for rows in blocks(range(problem.seqlen_q), block_q):
        state, blind = _query_tile(rule, q, k, v, rows, block_k, finite, traffic)
        if sink is not None:
            state = _absorb_sink(state, sink, problem, rows)
        tile, tile_lse = _finish(state, problem, rows, blind)
        out[:, rows.start : rows.stop] = tile
        lse[:, :, rows.start : rows.stop] = tile_lse
        traffic.store(tile, tile_lse)
    return out, lse


def _query_tile(rule, q, k, v, rows, block_k, finite, traffic):
    """One tile of queries after all blocks of keys that it sees, first to last: its state, and which rows see none."""
    problem, dtype = rule.problem, arithmetic_dtype(q.dtype)
    band = Band.of(problem)
    queries = stacked(*traffic.load(q[:, rows.start : rows.stop]), problem, dtype)
    state = _fresh(queries.shape[:-1], problem.head_dim_v, q)
    blind = torch.ones((problem.batch, problem.heads, len(rows)), dtype=torch.bool, device=q.device)
    for keys in blocks(band.keys(rows), block_k):
        k_block, v_block = traffic.load(k[:, keys.start : keys.stop], v[:, keys.start : keys.stop])
        scores = rule.scores(queries, by_head(k_block, dtype), rows, keys)
        hidden = rule.hidden(rows, keys, q.device)
        hide(scores, hidden, problem, rows, -math.inf)
        state = _absorb(state, scores, by_head(v_block, dtype), finite)
        blind &= False if hidden is None else hidden.expand(*hidden.shape[:-1], len(keys)).all(-1)
    return state, blind.view(state.top.shape)


def _results(q, k, v, dtype, out=None, sink=None):
    """Zeros for out (unless given) and -inf for the LSE, with a gradient of 0 to the inputs where they ask for one."""
    batch, seqlen_q, heads, _ = q.shape
    if out is None:
        out = torch.zeros((batch, seqlen_q, heads, v.shape[-1]), dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, seqlen_q), -math.inf, dtype=arithmetic_dtype(dtype), device=q.device)
    inputs = [tensor for tensor in (q, k, v, sink) if tensor is not None]
    if recorded(*inputs):
        nothing = sum(tensor[:0].sum() for tensor in inputs)
        out, lse = out + nothing.to(dtype), lse + nothing.to(lse.dtype)
    return out, lse


def _hidden(in_band, mask, indices, scores):
    """Bool of the scores' shape, True for a key that is not seen: by the band (None: none) or by a hook."""
    hidden = torch.zeros_like(scores, dtype=torch.bool) if in_band is None else in_band
    return hidden if mask is None else hidden | mask.hidden(indices).expand(1, 1, *scores.shape)[0, 0]


def _first(length, count, device):
    """Bool (length,), True in the first ``count`` places (none where it is negative)."""
    return torch.arange(length, device=device) < count


def _beside(rows):
    """(..., heads, rows) -> (..., rows, heads, 1): a factor for out"""
    return rows.transpose(-1, -2)[..., None]


def _query_elements(problem):
    return problem.batch * problem.seqlen_q * problem.heads * problem.head_dim


def _key_elements(problem, keys):
    """Elements of K and V for a number of keys, counted with repetition."""
    return problem.batch * keys * problem.heads_k * (problem.head_dim + problem.head_dim_v)


def _result_elements(problem):
    return problem.batch * problem.seqlen_q * problem.heads * (problem.head_dim_v + 1)

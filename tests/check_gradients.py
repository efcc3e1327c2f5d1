"""The one error bound for gradients: runs forward and backward with NaN in freed memory, then the references, compares.

dQ, dK and dV, against the oracle, the formulas of attention's gradients in float32:
    |ours - oracle| <= 2 * |same-dtype PyTorch - oracle| + |oracle rounded to the dtype - oracle| + what delta may do,
the first two in the maximum norm of each (batch, head of the gradient); same-dtype PyTorch is autograd through
attention as it is written in that dtype. No tolerance is set by hand.

The last term is that of an element, and derived (``delta_error``). It covers what PyTorch's error cannot bound:
autograd has no delta = rowsum(dO * O), it finds that sum from dP and P. Where a query sees one key, PyTorch finds
dS = 0 exactly and a kernel the difference of two float32 sums; where it sees two or three, the error of one number,
PyTorch's dS, would have to bound that of another. Among hundreds of keys the term is a few hundredths of the others.
"""

import itertools
import math
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from cases import bounds
from check import largest, same_places

from hopper_fa3 import flash_attn_func
from hopper_fa3.band import Band
from hopper_fa3.hooks import indices_of
from hopper_fa3.reference import standard

NAN_BITS = 0x7FFF  # NaN in bfloat16 and float16, and in float32 twice in a row
SPOILED = 2**29  # elements of q, k and v together: a few GiB of NaN
NOTHING = MappingProxyType({})  # a default that nobody can change
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # a kernel may take this for a scale of 0


class Oracle(NamedTuple):
    """Gradients in float32, and how far the error of delta may move each of their elements."""

    gradients: tuple  # dq, dk, dv
    moved: tuple


def arriving(q, v, seed=1):
    """Random gradients of out and of the LSE, drawn on the device: ``(batch, seqlen_q, heads, head_dim_v)`` in q's
    dtype, ``(batch, heads, seqlen_q)`` in float32.
    """
    batch, seqlen_q, heads, _ = q.shape
    options = {"device": q.device, "generator": torch.Generator(q.device).manual_seed(seed)}
    dout = torch.randn((batch, seqlen_q, heads, v.shape[-1]), **options).to(q.dtype)
    return dout, torch.randn((batch, heads, seqlen_q), **options)


def tensors_of(case, device):
    """q, k, v and dO of a case in a list, so that a test can lay out one of them anew."""
    q, k, v = case.inputs(device)
    return [q, k, v, arriving(q, v)[0]]


def spoil_free_memory(q, k, v):
    """NaN into the memory that gradients and float32 workspace of their sizes are likely to get next. Inputs of more
    than SPOILED elements get fresh memory anyway.
    """
    if q.numel() + k.numel() + v.numel() > SPOILED:
        return
    queries, heads = q.shape[0] * q.shape[1] * q.shape[2], q.shape[2] // k.shape[2]
    sizes = [x.numel() * width for x in (q, k, v) for width in (1, 2)]
    sizes += [x.numel() * heads * 2 for x in (k, v)] + [queries * 2] * 2
    held = [torch.full((size,), NAN_BITS, dtype=torch.int16, device=q.device) for size in sizes]
    held.clear()


def backward(results, leaves, arrived):
    """Gradients of the leaves that require one, None for the others; ``results`` and ``arrived`` are pairs for out and
    the LSE, with None for what takes no part.
    """
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    parts = [place for place, gradient in enumerate(arrived) if gradient is not None]
    spoil_free_memory(*leaves)
    got = iter(torch.autograd.grad([results[place] for place in parts], asked, [arrived[place] for place in parts]))
    return tuple(next(got) if leaf.requires_grad else None for leaf in leaves)


def leaves_of(q, k, v, wanted="qkv"):
    """The same views as leaves of a graph; those in ``wanted`` require a gradient."""
    return tuple(x.detach().requires_grad_(name in wanted) for name, x in zip("qkv", (q, k, v), strict=True))


def run(q, k, v, *, dout=None, dlse=None, wanted="qkv", attention=flash_attn_func, **options):
    """``(dq, dk, dv)`` by torch.autograd.grad through ``attention``; None for inputs that are not ``wanted``.

    Gradients flow from out where ``dout`` is given, from the LSE where ``dlse`` is. To be called before any reference:
    a reference leaves right answers in freed memory, where a gradient that the kernel never writes would find them.
    """
    leaves = leaves_of(q, k, v, wanted)
    if dlse is None:
        return backward((attention(*leaves, **options), None), leaves, (dout, None))
    return backward(attention(*leaves, return_attn_probs=True, **options), leaves, (dout, dlse))


def check(q, k, v, *, dout=None, dlse=None, wanted="qkv", attention=flash_attn_func, how=NOTHING, **options):
    """Run, then compare; returns the gradients. Where neither dout nor dlse is given, a random dout is. ``how``:
    further options of ``attention``, which change no value.
    """
    if dout is None and dlse is None:
        dout, _ = arriving(q, v)
    got = run(q, k, v, dout=dout, dlse=dlse, wanted=wanted, attention=attention, **options, **how)
    assert [x is not None for x in got] == [name in wanted for name in "qkv"]
    compare(got, q, k, v, dout=dout, dlse=dlse, **options)
    return got


def compare(
    gradients, q, k, v, *, dout=None, dlse=None, softmax_scale=None, causal=False, window_size=(-1, -1), **hook
):  # fmt: skip
    """AssertionError where (dq, dk, dv), of which any may be None, are not the gradients within this file's bound.
    ``hook``: softcap, sink, alibi_slopes, attention_chunk, score, mask.
    """
    for name, ours, x in zip(("dq", "dk", "dv"), gradients, (q, k, v), strict=True):
        place = ours is None or (ours.dtype, ours.shape, ours.device) == (x.dtype, x.shape, x.device)
        assert place, f"{name}: {ours.dtype} {tuple(ours.shape)}, expected {x.dtype} {tuple(x.shape)}"
    left, right = bounds(causal, window_size)
    blind = Band(q.shape[1], k.shape[1], left, right, hook.get("attention_chunk", 0)).blind
    assert gradients[0] is None or not gradients[0][:, :blind].any(), "dq: a row that sees no key must be exactly 0"
    if 0 in (q.shape[0], q.shape[1], k.shape[1]):
        assert not any(x is not None and x.any() for x in gradients), "no pair: gradients must be exactly 0"
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    dout = q.new_zeros((*q.shape[:3], v.shape[-1])) if dout is None else dout
    same, out = yardstick(q, k, v, dout, dlse, scale, left, right, **hook)
    true = oracle(q, k, v, dout, dlse, scale, left, right, same_out=out, **hook)
    for name, *these in zip(("dq", "dk", "dv"), gradients, same, true.gradients, true.moved, strict=True):
        if these[0] is not None:
            within(name, *these)


def within(name, ours, same, true, moved):
    """AssertionError where one gradient leaves the bound."""
    same_places(name, ours, true)
    norm = 2 * largest(same.float() - true, (1, 3)) + largest(true.to(ours.dtype).float() - true, (1, 3))
    bound = norm[:, None, :, None] + moved
    error = (ours.float() - true).abs()
    worst = torch.unravel_index((error - bound).argmax(), error.shape)
    place = "[batch, row, head, column] " + str([int(index) for index in worst])
    assert error[worst] <= bound[worst], f"{name}: error {error[worst]:.3e} > bound {bound[worst]:.3e} in {place}"


def yardstick(
    q, k, v, dout, dlse, scale, left, right, *, sink=None, alibi_slopes=None, score=None, mask=None, **hook
):  # fmt: skip
    """``((dq, dk, dv), out)`` of plain PyTorch in the inputs' dtype: autograd through reference.standard.

    One K/V head at a time with the query heads that read it: autograd keeps the scores of all heads it has seen.
    """
    heads_k, group = k.shape[2], q.shape[2] // k.shape[2]
    found, out = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)), dout.clone()
    for entry, head in itertools.product(range(q.shape[0]), range(heads_k)):
        batch, mine = slice(entry, entry + 1), (slice(head * group, (head + 1) * group), *[slice(head, head + 1)] * 2)
        leaves = leaves_of(*(x[batch, :, one] for x, one in zip((q, k, v), mine, strict=True)))
        of_head = {
            "sink": None if sink is None else sink[mine[0]],
            "alibi_slopes": None if alibi_slopes is None else slopes_of(alibi_slopes, q)[batch, mine[0]],
            "score": None if score is None else from_head(score, entry, head * group),
            "mask": None if mask is None else from_head(mask, entry, head * group),
        }
        results = standard(*leaves, softmax_scale=scale, left=left, right=right, **of_head, **hook)
        arrived = [dout[batch, :, mine[0]], None if dlse is None else dlse[batch, mine[0]]]
        used = slice(None, 1 if dlse is None else None)
        got = torch.autograd.grad(results[used], leaves, arrived[used])
        out[batch, :, mine[0]] = results[0].detach()
        for whole, one, part in zip(found, mine, got, strict=True):
            whole[batch, :, one] = part
    return found, out


def from_head(hook, entry, head):
    """A hook for tensors whose first batch entry and head are these."""

    def shifted(function, *given):
        *before, batch, own_head, query, key = given
        return function(*before, batch + entry, own_head + head, query, key)

    functions = {name: getattr(hook, name, None) for name in ("cpu", "cpu_backward")}
    return replace(hook, **{name: partial(shifted, each) for name, each in functions.items() if each is not None})


def slopes_of(alibi_slopes, q):
    """(batch, heads)"""
    return alibi_slopes.expand(q.shape[0], q.shape[2])


def oracle(
    q, k, v, dout, dlse, scale, left, right, *, same_out, dtype=torch.float32, attention_chunk=0, softcap=0.0,
    sink=None, alibi_slopes=None, score=None, mask=None,
):  # fmt: skip
    """The Oracle: gradients of softmax(scale * Q K^T) V and its LSE, by their formulas in ``dtype``.

    With P = softmax(S), O = P V and delta = rowsum(dO * O) - dLSE: dV = P^T dO, dS = P * (dO V^T - delta), dQ = scale
    dS K, dK = scale dS^T Q (Dao et al. 2022, appendix B.2). Heads of a group add their dK and dV. With softcap, dS
    times 1 - tanh^2; with a score hook, times its derivative.
    """
    group, band = q.shape[2] // k.shape[2], Band(q.shape[1], k.shape[1], left, right, attention_chunk)
    distance = band.distance(range(q.shape[1]), range(k.shape[1]), q.device).abs().to(dtype)
    hidden = band.hidden(range(q.shape[1]), range(k.shape[1]), q.device)
    found, moved = (tuple(torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (q, k, v)) for _ in range(2))
    for entry, head in itertools.product(range(q.shape[0]), range(q.shape[2])):
        at, at_k = (entry, slice(None), head), (entry, slice(None), head // group)
        queries, gradient, keys, values = (
            x[place].to(dtype).contiguous() for x, place in ((q, at), (dout, at), (k, at_k), (v, at_k))
        )
        scores, factor = queries @ keys.mT * scale, 1.0
        if softcap:
            capped = torch.tanh(scores / softcap)
            scores, factor = softcap * capped, 1 - capped**2
        if alibi_slopes is not None:
            scores = scores - slopes_of(alibi_slopes, q)[entry, head].to(dtype) * distance
        indices = indices_of(range(entry, entry + 1), range(head, head + 1), *map(range, scores.shape), q.device)
        if score is not None:
            before = scores[None, None]
            scores = score.scores(before, indices)[0, 0]
            factor = factor * score.gradient(torch.ones_like(before), before, indices)[0, 0]
        unseen = torch.zeros_like(scores, dtype=torch.bool) if hidden is None else hidden
        if mask is not None:
            unseen = unseen | mask.hidden(indices).expand(1, 1, *scores.shape)[0, 0]
        scores = scores.masked_fill(unseen, -math.inf)
        logits = scores if sink is None else torch.cat((scores, sink[head].to(dtype).expand(len(scores), 1)), 1)
        weights = torch.softmax(logits, -1)[:, : scores.shape[1]]
        weights[unseen.all(-1)] = 0  # softmax of a row without keys is NaN
        out = weights @ values
        from_lse = torch.zeros_like(out[:, :1]) if dlse is None else dlse[entry, head, :, None].to(dtype)
        delta = (gradient * out).sum(-1, keepdim=True) - from_lse
        inner = weights * (gradient @ values.mT - delta) * factor
        found[0][at] = scale * (inner @ keys)
        found[1][at_k] += scale * (inner.mT @ queries)
        found[2][at_k] += weights.mT @ gradient
        stored, summed = delta_error(gradient, out, same_out[at].to(dtype), values, from_lse)
        of_rows = (weights.mT**2 @ (stored * queries) ** 2).sqrt()
        moved[0][at] = abs(scale) * (stored * (weights @ keys).abs() + summed * (weights @ keys.abs()))
        moved[1][at_k] += abs(scale) * (of_rows + weights.mT @ (summed * queries.abs()))
        if abs(scale) < SMALLEST_SCALE:
            moved[0][at] += SMALLEST_SCALE * (inner.abs() @ keys.abs())
            moved[1][at_k] += SMALLEST_SCALE * (inner.abs().mT @ queries.abs())
    return Oracle(found, moved)


def delta_error(gradient, out, same_out, values, from_lse):
    """How far dP - delta of each query of one head may be off beyond what it is in PyTorch: two columns, each
    ``(seqlen_q, 1)``.

    - By the stored O, from which delta comes. Its elements are off by their rounding to 16 bits and by what went
      before; PyTorch's O in the same dtype shows how far, and as elsewhere ours may be off twice as far: 2 sum_c |dO_c|
      |error of O_c|. It is one number a query: dQ moves by scale * that * |sum_j P_ij K_j|, and in dK, where the errors
      of different queries are independent, their squares add.
    - By float32 (unit roundoff u = 2^-24). dP and rowsum(dO * O) are sums of head_dim_v exact terms, each off by at
      most head_dim_v * 2u * |dO| |v|: Cauchy-Schwarz; 2u for tensor cores that truncate; |O| is at most the largest
      |v|. Eight more roundings cover the subtractions. This one is of each pair, so magnitudes add.
    """
    stored = 2 * (gradient.abs() * (same_out - out).abs()).sum(-1, keepdim=True)
    length = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True) * torch.linalg.vector_norm(values, dim=-1).max()
    return stored, 2.0**-24 * (4 * (values.shape[-1] + 8) * length + 8 * from_lse.abs())

"""Attention by its definition, one query and one key at a time in Python floats: what reference.py must compute."""

import itertools
import math

import torch


def sees(i, j, seqlen_q, seqlen_k, left=None, right=None, attention_chunk=0):
    """True where query i sees key j."""
    place = i + seqlen_k - seqlen_q
    near = left is None or place - left <= j
    far = right is None or j <= place + right
    return near and far and (attention_chunk == 0 or math.floor(place / attention_chunk) == j // attention_chunk)


def defined(q, k, v, *, softmax_scale, softcap=0.0, sink=None, alibi_slopes=None, **mask):
    """``(out, lse)`` in float64; ``mask``: left, right and attention_chunk of sees()."""
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    out = torch.zeros(batch, seqlen_q, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, seqlen_q), -math.inf, dtype=torch.float64)
    for b, i, h in itertools.product(range(batch), range(seqlen_q), range(heads)):
        seen = [j for j in range(seqlen_k) if sees(i, j, seqlen_q, seqlen_k, **mask)]
        scores = []
        for j in seen:
            x = softmax_scale * sum(a * c for a, c in zip(q[b, i, h].tolist(), k[b, j, h // group].tolist()))  # noqa: B905
            x = softcap * math.tanh(x / softcap) if softcap else x
            if alibi_slopes is not None:
                slope = alibi_slopes[h] if alibi_slopes.dim() == 1 else alibi_slopes[b, h]
                x -= slope.item() * abs(i + seqlen_k - seqlen_q - j)
            scores.append(x)
        logits = scores if sink is None else [*scores, sink[h].item()]
        largest = max(logits, default=-math.inf)
        if largest == -math.inf:
            continue
        total = sum(math.exp(x - largest) for x in logits)
        lse[b, h, i] = largest + math.log(total)
        for j, x in zip(seen, scores, strict=True):
            out[b, i, h] += math.exp(x - largest) / total * v[b, j, h // group].double()
    return out, lse

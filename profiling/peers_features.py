"""What we compare windows, packed sequences and changed scores with: FlashAttention-4, and torch's packed
FlashAttention-2 where it has the feature. All other peers say why they are left out.
"""

import functools
import itertools
from typing import NamedTuple

import torch
from peers import PEERS, Peer, fa4_kernel, fa4_missing, fa4_public, first, flash_attention_4, never
from timing import Launch

ONLY_MASKED = "torch's SDPA takes it as a mask over all scores at most, which is not the same work"
NOT_MEASURED = "not measured beside this suite"
OPEN = (-1, -1)


def others(**known):
    """All of PEERS by name: the known ones as given, the others missing for a reason."""
    missing = {name: NOT_MEASURED if name == "xformers" else ONLY_MASKED for name in PEERS}
    absent = {name: PEERS[name]._replace(missing=lambda why=why: why) for name, why in missing.items()}
    return absent | known


class Packing(NamedTuple):
    """Where the sequences of packed queries, and as many keys, stand."""

    offsets: torch.Tensor  # int32 (sequences + 1), on the device
    longest: int


def packing(lengths, device):
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    return Packing(offsets, max(lengths))


def both(where):
    """Offsets of the queries and of the keys, then the longest of each."""
    return where.offsets, where.offsets, where.longest, where.longest


def torch_packed_missing():
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401  (is it there?)
    except ImportError as error:
        return f"this torch has no varlen_attn: {error}"
    return None


def torch_packed(q, k, v, causal, where):
    """torch.nn.attention.varlen.varlen_attn: FlashAttention-2, aligned to the bottom right."""
    return torch_banded(q, k, v, where, (-1, 0) if causal else OPEN)


def torch_banded(q, k, v, where, window_size):
    from torch.nn.attention.varlen import varlen_attn

    return Launch(lambda: varlen_attn(q, k, v, *both(where), window_size=window_size))


def torch_window(q, k, v, causal, window_size):
    """The same over a batch of equal lengths, as packed sequences: torch has no other function with a window."""
    batch, seqlen = q.shape[:2]
    left, right = window_size
    where = packing(batch * (seqlen,), q.device)
    packed = torch_banded(*(x.flatten(0, 1) for x in (q, k, v)), where, (left, 0 if causal else right))
    return Launch(lambda: packed.call().unflatten(0, (batch, seqlen)))


def fa4_window_kernel(q, k, v, causal, window_size):
    left, right = (None if side == -1 else side for side in window_size)
    return fa4_kernel(q, k, v, causal, window_size_left=left, window_size_right=right)


def fa4_window(q, k, v, causal, window_size):
    sides = tuple(None if side == -1 else side for side in window_size)
    return fa4_public(q, k, v, causal, window_size=sides)


WINDOWED = others(
    fa4=Peer("fa4", fa4_missing, never, fa4_window_kernel, fa4_window),
    flash=Peer("flash", torch_packed_missing, never, torch_window, torch_window),
)


def fa4_packed_kernel(q, k, v, causal, where):
    return fa4_kernel(q, k, v, causal, **_fa4_lengths(where))


def fa4_packed(q, k, v, causal, where):
    function = functools.partial(flash_attention_4().flash_attn_varlen_func, **_fa4_lengths(where))
    return Launch(lambda: first(function(q, k, v, causal=causal)))


def _fa4_lengths(where):
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, both(where), strict=True))


PACKED = others(
    fa4=Peer("fa4", fa4_missing, never, fa4_packed_kernel, fa4_packed),
    flash=Peer("flash", torch_packed_missing, never, torch_packed, torch_packed),
)


def fa4_scores(q, k, v, causal, keywords, sink):
    return fa4_public(q, k, v, causal, learnable_sink=sink, **keywords)


def fa4_refuses(q, k, v, causal, keywords, sink):
    return "FlashAttention-4 has no ALiBi slopes" if "alibi_slopes" in keywords else None


SCORED = others(fa4=Peer("fa4", fa4_missing, fa4_refuses, fa4_scores, fa4_scores))

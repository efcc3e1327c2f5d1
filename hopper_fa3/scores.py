"""Scores of one tile on the CPU, from the products to what the softmax sees, and the way back to the products.

With ``p = i + seqlen_k - seqlen_q`` the key on query i's diagonal (as FlashAttention-2's ALiBi)::

    score = softcap * tanh(softmax_scale * q.k / softcap) - slope * |p - j|

Softcap: Gemma 2 (2024), section 2; ALiBi: Press et al. 2022, section 3. A score hook comes last, masks behind it.
"""

from typing import NamedTuple

import torch

from .band import Band
from .hooks import indices_of
from .tiles import product


class Linearised(NamedTuple):
    """Scores of a tile, and what their gradient needs."""

    scores: torch.Tensor
    factor: torch.Tensor | None  # derivative of the capped product by the product: 1 - tanh^2; None: 1
    unhooked: torch.Tensor | None  # scores before the hook, (batch, heads, rows, keys)


class ScoreRule(NamedTuple):
    """How products become scores in one problem."""

    problem: object
    slopes: torch.Tensor | None  # ([batch,] heads, 1, 1), in the arithmetic's dtype

    @classmethod
    def of(cls, problem, alibi_slopes, dtype):
        """The rule of a Problem and the slopes that belong to it."""
        return cls(problem, None if alibi_slopes is None else alibi_slopes.to(dtype)[..., None, None])

    def scores(self, queries, k_block, rows, keys):
        """Scores of stacked queries, not masked: (batch, heads_k, group * rows, keys)."""
        return self._hooked(self._biased(self._capped(queries, k_block), rows, keys), rows, keys)

    def linearised(self, queries, k_block, rows, keys):
        """scores(), with what gradient() needs."""
        capped, factor, unhooked = self._capped(queries, k_block), None, None
        if self.problem.softcap:
            factor = (capped / self.problem.softcap).square_().neg_().add_(1)
        scores = self._biased(capped, rows, keys)
        if self.problem.score is not None:
            unhooked = by_query_head(scores, self.problem, rows)
        return Linearised(self._hooked(scores, rows, keys), factor, unhooked)

    def gradient(self, tile, dscores, rows, keys):
        """Gradient at scale * Q K^T from that at the scores of a linearised tile. May overwrite ``dscores``."""
        if tile.unhooked is not None:
            given = by_query_head(dscores, self.problem, rows)
            given = self.problem.score.gradient(given, tile.unhooked, self._indices(rows, keys, dscores.device))
            dscores = _own(given, dscores.shape)
        return dscores if tile.factor is None else dscores.mul_(tile.factor)

    def hidden(self, rows, keys, device):
        """Bool that broadcasts to (batch, heads, rows, keys), True for a key that is not seen; None: all see all."""
        hidden, mask = Band.of(self.problem).hidden(rows, keys, device), self.problem.mask
        if mask is None:
            return hidden
        by_hook = mask.hidden(self._indices(rows, keys, device))
        return by_hook if hidden is None else by_hook | hidden

    def _capped(self, queries, k_block):
        # Scaled after the product: that of 16-bit inputs is exact in float32, a scaled query is not.
        products, softcap = product(queries, k_block.mT).mul_(self.problem.softmax_scale), self.problem.softcap
        return products.div_(softcap).tanh_().mul_(softcap) if softcap else products

    def _biased(self, scores, rows, keys):
        if self.slopes is not None:
            distance = Band.of(self.problem).distance(rows, keys, scores.device).abs_().to(scores.dtype)
            by_query_head(scores, self.problem, rows).addcmul_(self.slopes, distance, value=-1)
        return scores

    def _hooked(self, scores, rows, keys):
        if self.problem.score is None:
            return scores
        given = by_query_head(scores, self.problem, rows)
        return _own(self.problem.score.scores(given, self._indices(rows, keys, scores.device)), scores.shape)

    def _indices(self, rows, keys, device):
        return indices_of(range(self.problem.batch), range(self.problem.heads), rows, keys, device)


def _own(tile, shape):
    """A copy of what a hook returned, which may be a tensor that it keeps: tiles are overwritten"""
    return tile.reshape(shape).clone(memory_format=torch.contiguous_format)


def by_query_head(scores, problem, rows):
    """(batch, heads_k, group * rows, keys) as (batch, heads, rows, keys): a view"""
    return scores.view(problem.batch, problem.heads, len(rows), scores.shape[-1])


def hide(scores, hidden, problem, rows, value):
    """Writes ``value`` where ``hidden``, of Band.hidden() or ScoreRule.hidden(), is True; returns the scores."""
    if hidden is not None:
        by_query_head(scores, problem, rows).masked_fill_(hidden, value)
    return scores

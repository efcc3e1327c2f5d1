"""Scores of one tile on the CPU, from the products to what the softmax sees, and the way back to the products.

With ``p = i + seqlen_k - seqlen_q`` the key on query i's diagonal (as FlashAttention-2's ALiBi)::

    score = softcap * tanh(softmax_scale * q.k / softcap) - slope * |p - j|

Softcap: Gemma 2 (2024), section 2; ALiBi: Press et al. 2022, section 3. Masks come after it.
"""

from typing import NamedTuple

import torch

from .band import Band
from .tiles import product


class Linearised(NamedTuple):
    """Scores of a tile, and what their gradient needs."""

    scores: torch.Tensor
    factor: torch.Tensor | None  # derivative of the capped product by the product: 1 - tanh^2; None: 1


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
        return self._biased(self._capped(queries, k_block), rows, keys)

    def linearised(self, queries, k_block, rows, keys):
        """scores(), with what gradient() needs."""
        capped, factor = self._capped(queries, k_block), None
        if self.problem.softcap:
            factor = (capped / self.problem.softcap).square_().neg_().add_(1)
        return Linearised(self._biased(capped, rows, keys), factor)

    def gradient(self, tile, dscores):
        """Gradient at scale * Q K^T from that at the scores of a linearised tile. May overwrite ``dscores``."""
        return dscores if tile.factor is None else dscores.mul_(tile.factor)

    def _capped(self, queries, k_block):
        # Scaled after the product: that of 16-bit inputs is exact in float32, a scaled query is not.
        products, softcap = product(queries, k_block.mT).mul_(self.problem.softmax_scale), self.problem.softcap
        return products.div_(softcap).tanh_().mul_(softcap) if softcap else products

    def _biased(self, scores, rows, keys):
        if self.slopes is not None:
            distance = Band.of(self.problem).distance(rows, keys, scores.device).abs_().to(scores.dtype)
            by_query_head(scores, self.problem, rows).addcmul_(self.slopes, distance, value=-1)
        return scores


def by_query_head(scores, problem, rows):
    """(batch, heads_k, group * rows, keys) as (batch, heads, rows, keys): a view"""
    return scores.view(problem.batch, problem.heads, len(rows), scores.shape[-1])

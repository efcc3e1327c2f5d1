"""Which keys a query sees, on the host: the counterpart of kernels/blocks.py for reference.py."""

from typing import NamedTuple

import torch


class Band(NamedTuple):
    """Which keys a query sees: key j iff ``-left <= j - (i + seqlen_k - seqlen_q) <= right``, None for an open side."""

    seqlen_q: int
    seqlen_k: int
    left: int | None
    right: int | None

    @classmethod
    def of(cls, problem):
        """The band of a Problem."""
        return cls(problem.seqlen_q, problem.seqlen_k, problem.left, problem.right)

    @property
    def shift(self):
        """Key on the diagonal of query 0: masks align to the bottom right."""
        return self.seqlen_k - self.seqlen_q

    @property
    def blind(self):
        """Number of queries that see no key: always the first ones."""
        if self.seqlen_k == 0:
            return self.seqlen_q
        return 0 if self.right is None else min(max(-self.shift - self.right, 0), self.seqlen_q)

    def keys(self, queries):
        """Range of the keys that at least one of a range of queries sees."""
        first = 0 if self.left is None else max(queries.start + self.shift - self.left, 0)
        last = self.seqlen_k if self.right is None else min(queries.stop + self.shift + self.right, self.seqlen_k)
        return range(first, max(first, last))

    def queries(self, keys):
        """Range of the queries that see at least one of a range of keys."""
        first = 0 if self.right is None else max(keys.start - self.shift - self.right, 0)
        last = self.seqlen_q if self.left is None else min(keys.stop - self.shift + self.left, self.seqlen_q)
        return range(first, max(first, last))

    def hidden(self, queries, keys, device):
        """Bool (queries, keys), True where a query does not see a key; None where all see all."""
        nearest, farthest = keys.start - (queries.stop - 1 + self.shift), keys.stop - 1 - (queries.start + self.shift)
        left_open = self.left is None or nearest >= -self.left
        right_open = self.right is None or farthest <= self.right
        if left_open and right_open:
            return None
        diagonal = torch.arange(queries.start, queries.stop, device=device)[:, None] + self.shift
        distance = torch.arange(keys.start, keys.stop, device=device) - diagonal
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if not left_open:
            hidden |= distance < -self.left
        if not right_open:
            hidden |= distance > self.right
        return hidden


def blocks(whole, size):
    """Consecutive parts of a range; the last one may be shorter."""
    return [range(start, min(start + size, whole.stop)) for start in range(whole.start, whole.stop, size)]

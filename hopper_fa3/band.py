"""Which keys a query sees, on the host: the counterpart of kernels/blocks.py for reference.py."""

from typing import NamedTuple

import torch


class Band(NamedTuple):
    """Which keys a query sees: key j iff ``-left <= j - p <= right`` with ``p = i + seqlen_k - seqlen_q``, None for an
    open side; and where chunk is not 0, only keys with ``j // chunk == p // chunk``.

    Beside a chunk, left and right are at least 0, so that a query's own key is seen if there is one.
    """

    seqlen_q: int
    seqlen_k: int
    left: int | None
    right: int | None
    chunk: int = 0

    @classmethod
    def of(cls, problem):
        """The band of a Problem."""
        return cls(problem.seqlen_q, problem.seqlen_k, problem.left, problem.right, problem.attention_chunk)

    @property
    def shift(self):
        """Key on the diagonal of query 0: masks align to the bottom right."""
        return self.seqlen_k - self.seqlen_q

    @property
    def blind(self):
        """Number of queries that see no key: always the first ones."""
        if self.seqlen_k == 0:
            return self.seqlen_q
        nearest = 0 if self.chunk else self.right  # key past the diagonal that a query before all keys may see
        return 0 if nearest is None else min(max(-self.shift - nearest, 0), self.seqlen_q)

    def keys(self, queries):
        """Range of the keys that at least one of a range of queries sees."""
        places = range(queries.start + self.shift, queries.stop + self.shift)
        return self._around(places, self.left, self.right, range(self.seqlen_k))

    def queries(self, keys):
        """Range of the queries that see at least one of a range of keys."""
        places = self._around(keys, self.right, self.left, range(self.shift, self.seqlen_k))
        return range(places.start - self.shift, places.stop - self.shift)

    def _around(self, places, before, after, whole):
        """Part of ``whole`` up to ``before`` places before and ``after`` places past at least one of ``places``, in the
        same chunk.
        """
        first = whole.start if before is None else places.start - before
        stop = whole.stop if after is None else places.stop + after
        if self.chunk:
            first = max(first, places.start // self.chunk * self.chunk)
            stop = min(stop, ((places.stop - 1) // self.chunk + 1) * self.chunk)
        first = max(first, whole.start)
        return range(first, max(first, min(stop, whole.stop)))

    def hidden(self, queries, keys, device):
        """Bool (queries, keys), True where a query does not see a key; None where all see all."""
        near, far = queries.start + self.shift, queries.stop - 1 + self.shift
        left_open = self.left is None or keys.start - far >= -self.left
        right_open = self.right is None or keys.stop - 1 - near <= self.right
        ends = (near, far, keys.start, keys.stop - 1)
        one_chunk = self.chunk == 0 or len({place // self.chunk for place in ends}) == 1
        if left_open and right_open and one_chunk:
            return None
        distance = self.distance(queries, keys, device)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if not left_open:
            hidden |= distance < -self.left
        if not right_open:
            hidden |= distance > self.right
        if not one_chunk:
            places, diagonal = self._places(queries, keys, device)
            hidden |= places // self.chunk != diagonal // self.chunk
        return hidden

    def distance(self, queries, keys, device):
        """Int (queries, keys): how far a key stands behind the one on the query's diagonal."""
        places, diagonal = self._places(queries, keys, device)
        return places - diagonal

    def _places(self, queries, keys, device):
        """(keys,) and (queries, 1): each key, and the one on each query's diagonal"""
        places = torch.arange(keys.start, keys.stop, device=device)
        return places, torch.arange(queries.start, queries.stop, device=device)[:, None] + self.shift


def blocks(whole, size):
    """Consecutive parts of a range; the last one may be shorter."""
    return [range(start, min(start + size, whole.stop)) for start in range(whole.start, whole.stop, size)]

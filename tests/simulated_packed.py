"""Packed sequences on the simulation: inputs with NaN around them, tables of tiles in any legal order, and what the
kernels must leave where no sequence is.
"""

import numpy as np
from simulated_launch import HEAD_DIM, HEAD_DIM_V, Problem
from simulated_memory import Memory


class PackedProblem:
    """Sequences of a Shape's batch, of ``lengths``, (queries, keys) each, in one tensor with ``gaps`` of unused rows
    before, between and behind them. ``shape``: with all rows as its lengths.
    """

    packed = True
    kind = Problem  # of one sequence
    inputs = (("q", 0, HEAD_DIM), ("do", 0, HEAD_DIM_V), ("k", 1, HEAD_DIM), ("v", 1, HEAD_DIM_V))

    def __init__(self, shape, lengths, seed, gap=5):
        chance = np.random.default_rng(seed)
        self.sequences, self.lengths, offsets = [], lengths, [0, 0]
        self.gaps = chance.integers(0, gap, size=(len(lengths) + 1, 2))
        self.offsets = []
        for index, (queries, keys) in enumerate(lengths):
            offsets = [int(x) for x in offsets + self.gaps[index]]
            self.offsets.append(tuple(offsets))
            one = shape(batch=1, seqlen_q=queries, seqlen_k=keys)
            self.sequences.append(self.kind(one, seed + index) if queries and keys else None)
            offsets = [offsets[0] + queries, offsets[1] + keys]
        totals = [int(x) + 1 for x in offsets + self.gaps[-1]]
        self.shape = shape(batch=1, seqlen_q=totals[0], seqlen_k=totals[1])
        heads = self.shape.heads, self.shape.heads_k
        for name, side, columns in self.inputs:
            setattr(self, name, self.joined(name, side, (1, totals[side], heads[side], columns), np.nan))

    def joined(self, name, side, shape, elsewhere):
        """All sequences' rows of something, with ``elsewhere`` around them."""
        whole = np.full(shape, elsewhere, dtype=float)
        for sequence, offsets, lengths in zip(self.sequences, self.offsets, self.lengths, strict=True):
            if sequence is not None:
                whole[:, offsets[side] : offsets[side] + lengths[side]] = getattr(sequence, name)
        return whole

    def first_lines(self, queries):
        """Of each sequence's part of the workspace."""
        return [offset // queries + index for index, (offset, _) in enumerate(self.offsets)]

    def lines(self, queries):
        return self.shape.seqlen_q // queries + len(self.lengths) + 1

    def statistics(self, queries):
        """(1, lines, heads, LSE and delta); NaN where nobody may read."""
        whole = np.full((1, self.lines(queries), self.shape.heads, 2 * queries), np.nan)
        for sequence, first in zip(self.sequences, self.first_lines(queries), strict=True):
            if sequence is not None:
                own = sequence.statistics(queries)
                whole[:, first : first + own.shape[1]] = own
        return whole

    def rows_in_lines(self, rows, queries):
        """As Problem's; 0 where no sequence is, as the kernel behind writes it."""
        whole = np.zeros((1, self.shape.seqlen_q, *rows.shape[2:]))
        for (offset, _), (length, keys), first in zip(
            self.offsets, self.lengths, self.first_lines(queries), strict=True
        ):
            if keys:
                whole[:, offset : offset + length] = rows[:, first * queries :][:, :length]
        return whole

    def table(self, config, chance, keys, together=False, descending=False, line=64, other=0):
        """Tiles of all rows, by chance or by sequences. ``keys``: of K/V; ``other``: the other side's length in rows of
        no sequence.
        """
        side, tile = int(keys), config.tile_n if keys else config.tile_m
        groups, covered = [], 0
        for index, (offsets, lengths) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            groups.append(self.gap(side, covered, offsets[side], tile, other))
            blocks = range(-(-lengths[side] // tile))
            first = self.first_lines(line)[index]
            groups.append(
                [(block, *lengths, *offsets, first, index) for block in (blocks[::-1] if descending else blocks)]
            )
            covered = offsets[side] + lengths[side]
        total = (self.shape.seqlen_q, self.shape.seqlen_k)[side]
        groups.append(self.gap(side, covered, total, tile, other))
        chance.shuffle(groups)
        entries = [entry for group in groups for entry in group]
        if not together:
            chance.shuffle(entries)
        table = np.full((len(entries) + 4, 8), -(2**20))
        table[0, :2] = len(entries), self.shape.section
        for line, entry in enumerate(entries, 1):
            table[line, : len(entry)] = entry
        return Memory(table)

    def gap(self, side, begin, end, tile, other):
        """Entries of rows that no sequence uses."""
        lengths, offsets = [other, other], [0, 0]
        lengths[side], offsets[side] = end - begin, begin
        return [(block, *lengths, *offsets, 0, 0) for block in range(-(-(end - begin) // tile))]

    def check(self, **gradients):
        for name, found in gradients.items():
            side = 0 if name == "dq" else 1
            expected = self.joined(name, side, found.shape, 0.0)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9, err_msg=name)

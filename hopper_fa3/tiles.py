"""What the passes of reference.py and reference_backward.py share: one tile of queries against one block of keys."""

import math
from dataclasses import dataclass

import torch

# Tile of the blockwise orders. 128 x 512 float32 scores (256 KB a head) stay in a CPU's L2, and the products run at
# full speed.
BLOCK_Q, BLOCK_K = 128, 512


@dataclass
class Traffic:
    """Counts elements moved between slow memory (whole tensors) and fast memory (the tile being computed)."""

    read: int = 0
    written: int = 0

    def load(self, *tensors):
        """Count tensors as read; returns them."""
        self.read += sum(tensor.numel() for tensor in tensors)
        return tensors

    def store(self, *tensors):
        """Count tensors as written."""
        self.written += sum(tensor.numel() for tensor in tensors)


def arithmetic_dtype(dtype):
    """Dtype of the arithmetic on tensors of a dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stacked(queries, problem, dtype):
    """(batch, rows, heads, n) -> (batch, heads_k, group * rows, n): heads of a group share one product."""
    queries = queries.unflatten(2, (problem.heads_k, problem.group)).permute(0, 2, 3, 1, 4)
    return queries.flatten(2, 3).to(dtype)


def stacked_rows(values, problem, dtype):
    """(batch, heads, rows) -> (batch, heads_k, group * rows): one value a query, such as its LSE."""
    return values.unflatten(1, (problem.heads_k, problem.group)).flatten(2, 3).to(dtype)


def unstacked(tile, problem, rows):
    """(batch, heads_k, group * rows, n) -> (batch, rows, heads, n): the way back from stacked()"""
    tile = tile.unflatten(2, (problem.group, len(rows))).permute(0, 3, 1, 2, 4)
    return tile.reshape(problem.batch, len(rows), problem.heads, tile.shape[-1])


def by_head(block, dtype):
    """(batch, keys, heads_k, n) -> (batch, heads_k, keys, n); a view where the dtype is the block's."""
    return block.transpose(1, 2).to(dtype)


def hide(scores, hidden, problem, value):
    """Writes ``value`` where ``hidden``, of Band.hidden(), is True; returns the scores."""
    return scores if hidden is None else scores.masked_fill_(hidden.repeat(problem.group, 1), value)


def weighted_sum(weights, values, finite):
    """``weights @ values`` where a weight of 0 takes nothing, not even from NaN or inf.

    ``finite``: the values hold neither. Weights that meet an inf must be positive or NaN.
    """
    if finite:
        return product(weights, values)
    result = product(weights, values.masked_fill(~values.isfinite(), 0))
    taken = (weights != 0).to(values.dtype)
    for places, value in ((values == math.inf, math.inf), (values == -math.inf, -math.inf), (values.isnan(), math.nan)):
        result = result + torch.zeros_like(result).masked_fill(product(taken, places.to(values.dtype)) > 0, value)
    return result


def product(a, b):
    """``a @ b`` in the operands' dtype, also where autocast would round them to 16 bits."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def all_finite(tensor):
    """True where no element is NaN or inf; allocates nothing of the tensor's size."""
    return tensor.numel() == 0 or all(bound.isfinite().item() for bound in torch.aminmax(tensor.detach()))

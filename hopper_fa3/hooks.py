"""Hooks: functions of a user's own that change the score of a pair or hide it, as objects with a key.

A hook is written twice: for the kernels as CuTe functions of one pair, and for CPU tensors as PyTorch functions of a
tile. A hook of which one side is missing works on the other; the missing side raises NotImplementedError.

Order: the score hook is given what softmax_scale, softcap and alibi_slopes made of the product, in natural units; then
come causal, window_size, attention_chunk and the mask hook, of which each can hide a pair; then the softmax with the
sink. All indices count from 0: batch entry, query head, query and key, the last two as they lie in q and k (the key on
the query's diagonal is ``query + seqlen_k - seqlen_q``). Of packed sequences each is a batch entry, whose queries and
keys count from its own first ones, and seqlen_q and seqlen_k are the lengths that it uses.

The CuTe functions are plain Python functions, or ``@cute.jit`` ones, that a kernel's tracer calls for each element:

- ``score`` and ``gradient`` are Float32 in natural units, the indices Int32. A score hook's functions return a float, a
  mask hook's a Boolean (``&`` and ``|``, not ``and`` and ``or``; ``if`` on a value only in a ``@cute.jit`` function,
  ``cutlass.select_(condition, a, b)`` anywhere). Of arithmetic only, a function may serve tensors as well.
- They must have no effects, and hold Python constants only: the kernel is compiled once for a key.
- They are called for all elements of the blocks that causal, window_size and attention_chunk leave, also where these
  hide a pair, where the mask hook does, and past the ends of queries and keys. What they return there is not used.
  Blocks that only a mask hook hides are computed as others are: the time is that of the call without it. A NaN or inf
  in V of a hidden key may reach the other queries of its tile, as elsewhere.
- ``backward`` must be linear in ``gradient``, as the gradient of one score is: kernels hand it a probability, and
  multiply what it returns with the rest.
- A row that a mask hook leaves without keys yields 0 and LSE -inf, or the sink.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True)
class ScoreHook:
    """Changes scores, each by itself: the score of a pair may depend on that pair's alone.

    ``key``: names what the hook does; hooks of equal keys are taken for equal, and share compiled kernels. Whoever
    changes a function, or a value that it holds, changes the key.

    ``forward(score, batch, head, query, key) -> score`` and ``backward(gradient, score, batch, head, query, key) ->
    gradient`` are CuTe functions of one pair; ``score`` is that before the hook.

    ``cpu(scores, batch, head, query, key) -> scores`` and ``cpu_backward(gradient, scores, batch, head, query, key) ->
    gradient`` are PyTorch functions of a tile. ``scores`` is ``(batch entries, heads, queries, keys)``, float32 or
    float64, and may hold anything, NaN too, where a pair is hidden; the indices are int64 tensors that broadcast to its
    shape (times a Python float they are float32, as everywhere in PyTorch). Results have the scores' shape; arguments
    are not written to. Without ``cpu_backward`` the gradient is that of torch.autograd through ``cpu``. Tensors that
    the functions hold must not require grad.
    """

    key: str
    forward: Callable | None = field(compare=False)
    backward: Callable | None = field(default=None, compare=False)
    cpu: Callable | None = field(default=None, compare=False)
    cpu_backward: Callable | None = field(default=None, compare=False)

    def __post_init__(self):
        _check_key(self.key)

    def scores(self, scores, indices):
        """The scores of a tile behind the hook."""
        return _of_shape(self.cpu(scores, *indices), scores, "cpu")

    def gradient(self, dscores, scores, indices):
        """Gradient at the scores before the hook, from that behind it."""
        if self.cpu_backward is not None:
            return _of_shape(self.cpu_backward(dscores, scores, *indices), scores, "cpu_backward")
        with torch.enable_grad():
            before = scores.detach().requires_grad_()
            behind = self.scores(before, indices)
        if not behind.requires_grad:  # a constant
            return torch.zeros_like(dscores)
        return torch.autograd.grad(behind, before, dscores)[0]

    def side_by_side(self, sequences, heads):
        """The same hook on the CPU where batch entries ``sequences``, int64 (count,), are the heads of one entry."""

        def cpu(scores, batch, head, query, key):
            return self.cpu(scores, sequences[head // heads], head % heads, query, key)

        def cpu_backward(gradient, scores, batch, head, query, key):
            return self.cpu_backward(gradient, scores, sequences[head // heads], head % heads, query, key)

        return replace(self, cpu=cpu, cpu_backward=None if self.cpu_backward is None else cpu_backward)

    def refuse_gradients_of_its_own(self, dtype):
        """Raise where a tensor that ``cpu`` holds requires grad: it would get none, and nobody would know."""
        with torch.enable_grad():
            found = self.scores(torch.zeros((1, 1, 1, 1), dtype=dtype), indices_of(*[range(1)] * 4, "cpu"))
        if found.requires_grad:
            raise NotImplementedError("tensors in a score hook must not require grad (their gradient is not built)")


@dataclass(frozen=True)
class MaskHook:
    """Hides pairs. ``key`` as in ScoreHook.

    ``visible(batch, head, query, key) -> bool`` is a CuTe function of one pair. ``cpu(batch, head, query, key)`` is a
    PyTorch function of a tile: from int64 tensors that broadcast to ``(batch entries, heads, queries, keys)`` to bool
    that does, True where a query sees a key.
    """

    key: str
    visible: Callable | None = field(compare=False)
    cpu: Callable | None = field(default=None, compare=False)

    def __post_init__(self):
        _check_key(self.key)

    def hidden(self, indices):
        """Bool, True where a query does not see a key; broadcasts to a tile's shape."""
        visible = self.cpu(*indices)
        if not (isinstance(visible, torch.Tensor) and visible.dtype == torch.bool):
            got = visible.dtype if isinstance(visible, torch.Tensor) else type(visible).__name__
            raise TypeError(f"cpu of a mask hook must return a bool tensor, got {got}")
        return ~visible

    def side_by_side(self, sequences, heads):
        """As ScoreHook's."""

        def cpu(batch, head, query, key):
            return self.cpu(sequences[head // heads], head % heads, query, key)

        return replace(self, cpu=cpu)


def indices_of(entries, heads, rows, keys, device):
    """Four int64 tensors of four dimensions each, for ranges of batch entries, query heads, queries and keys."""
    ranges = (entries, heads, rows, keys)
    return tuple(
        torch.arange(one.start, one.stop, device=device).view([-1 if i == dim else 1 for i in range(4)])
        for dim, one in enumerate(ranges)
    )


def _check_key(key):
    if not isinstance(key, str):
        raise TypeError(f"key of a hook must be a str, got {type(key).__name__}")
    if not key:
        raise ValueError("key of a hook must not be empty, got ''")


def _of_shape(result, scores, name):
    """The result of a hook's function in the scores' dtype; raises where it is no tensor of their shape."""
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"{name} of a score hook must return a torch.Tensor, got {type(result).__name__}")
    if result.shape != scores.shape:
        rule = f"{name} of a score hook must return the scores' shape, here {tuple(scores.shape)}"
        raise ValueError(f"{rule}, got {tuple(result.shape)}")
    return result.to(scores.dtype)

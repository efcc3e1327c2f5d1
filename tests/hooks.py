"""Hooks whose functions are the same for tensors and for CuTe's scalars, but for what has another name there."""

import torch

from hopper_fa3.hooks import MaskHook, ScoreHook


def distance(score, batch, head, query, key):
    """A bias of the distance, its slope of the head and batch entry."""
    return score - (query - key) * (head + 2 * batch + 1) * 0.0078125


def constant(gradient, *_):
    return gradient


def bent(score, batch, head, query, key):
    """Not linear: its derivative is of the score, and of the pair."""
    return score + score * score * (0.0625 + (key & 3) * 0.015625) + (query & 7) * 0.125


def bent_gradient(gradient, score, batch, head, query, key):
    return gradient * (1.0 + score * (0.125 + (key & 3) * 0.03125))


def documents(batch, head, query, key):
    """Pieces of 128, counted on the diagonal of a square; those of odd batch entries begin elsewhere."""
    shift = (batch & 1) * 40
    return (query + shift) >> 7 == (key + shift) >> 7


def scattered(batch, head, query, key):
    """A third of the pairs, others for each head; every 16th query sees none, nor is every 16th key seen."""
    seen = (query * 5 + key * 7 + head * 3 + batch) % 3 == 0
    return seen & ((query & 15) != 3) & ((key & 15) != 5)


DISTANCE = ScoreHook("distance", distance, constant, distance, constant)
BENT = ScoreHook("bent", bent, bent_gradient, bent, bent_gradient)
DOCUMENTS = MaskHook("documents of 128", documents, documents)
SCATTERED = MaskHook("scattered", scattered, scattered)


def never(batch, head, query, key):
    return (query < 0) & (key < 0)


NEVER = MaskHook("never", never, never)


def exploding(score, batch, head, query, key):
    """Grows without bound past 500 keys or queries: what lies beyond the ends must reach no result."""
    return score + (query >= 500) * 3.0e38 * 10.0 + (key >= 500) * 3.0e38 * 10.0


def exploding_tensors(score, *_):
    return score


EXPLODING = ScoreHook("exploding", exploding, constant, exploding_tensors, constant)


def same_gradient(hook, count=64):
    """Whether the hook's own gradient is autograd's, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn((2, 3, 4, count), generator=generator, dtype=torch.float64, requires_grad=True)
    indices = [torch.arange(size).view([-1 if at == dim else 1 for at in range(4)]) for dim, size in
               enumerate(scores.shape)]  # fmt: skip
    (expected,) = torch.autograd.grad(hook.cpu(scores, *indices).sum(), scores)
    got = hook.cpu_backward(torch.ones_like(scores), scores.detach(), *indices)
    return torch.allclose(got.expand_as(expected), expected, rtol=1e-12)

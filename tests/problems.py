"""Inputs of the blockwise orders' tests: small, float64 unless said."""

from dataclasses import replace

import torch

from hopper_fa3.problem import Problem

# heads, heads_k, head_dim, head_dim_v: ratios 1, 2, 5, 7, 8, odd head dims, head_dim_v on both sides of head_dim
HEADS = ((3, 3, 8, 8), (4, 2, 7, 5), (5, 1, 16, 24), (14, 2, 9, 8), (8, 1, 1, 3))
LENGTHS = (
    (0, 0), (0, 9), (9, 0), (1, 0), (1, 1), (1, 37), (37, 1), (2, 5), (5, 2), (16, 16), (17, 40), (40, 17), (33, 65),
    (64, 64),
)  # fmt: skip
EXACT = {"rtol": 1e-15, "atol": 1e-12}  # an LSE of thousands has a unit in the last place of 1e-12


def inputs(seqlen_q, seqlen_k, heads=4, heads_k=2, head_dim=8, head_dim_v=8, batch=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, heads_k, head_dim),
        (batch, seqlen_k, heads_k, head_dim_v),
    )
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def asked(q, k, v, left=None, **options):
    """The problem, with a left bound of any value, also one that hides nothing."""
    return replace(Problem.from_tensors(q, k, v, **options), left=left)


def leaves(tensors, dtype=None):
    """The same values as leaves of a graph."""
    return [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in tensors]


def arriving(results, through=("out", "lse")):
    """Gradients of out and the LSE to start from; None for a result that the loss does not use."""
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results)
    return [x if name in through else None for name, x in zip(("out", "lse"), drawn, strict=True)]


def derived(results, tensors, given):
    """Gradients of the tensors, from those that arrive at the results."""
    used = [pair for pair in zip(results, given, strict=True) if pair[1] is not None]
    results, given = zip(*used, strict=True)
    return torch.autograd.grad(results, tensors, given)


def agree(ours, expected, **tolerance):
    """AssertionError where gradients (dq, dk, dv) differ."""
    for name, a, b in zip(("dq", "dk", "dv"), ours, expected, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}", **tolerance)

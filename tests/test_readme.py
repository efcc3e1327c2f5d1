"""Code in the README runs as it stands."""

import re
from pathlib import Path

import torch
from problems import leaves

from hopper_fa3 import flash_attn_func
from hopper_fa3.reference import standard

README = Path(__file__).parents[1] / "README.md"


def test_the_example_of_hooks():
    """On the CPU; its result is that of the score and the mask written out."""
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "MaskHook(" in block)
    generator = torch.Generator().manual_seed(0)
    q, k, v = leaves([torch.randn((1, 300, heads, 16), generator=generator) for heads in (2, 1, 1)])
    names = {"flash_attn_func": flash_attn_func, "q": q, "k": k, "v": v}
    exec(code, names)
    distance = torch.arange(300)[:, None] - torch.arange(300)
    hidden = (distance < 0) | ((torch.arange(300)[:, None] // 256) != torch.arange(300) // 256)
    scores = torch.einsum("bqhd,bkgd->bhqk", q, k) / 4 - 0.01 * distance
    expected = torch.einsum("bhqk,bkgd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    torch.testing.assert_close(names["out"], expected)
    given = torch.randn(expected.shape, generator=generator)
    for ours, true in zip(*(torch.autograd.grad(x, (q, k, v), given) for x in (names["out"], expected)), strict=True):
        torch.testing.assert_close(ours, true)
    # The functions for kernels are those for tensors, here as elsewhere
    score, mask = names["penalty"], names["documents"]
    assert (score.forward, mask.visible) == (score.cpu, mask.cpu)
    torch.testing.assert_close(standard(q, k, v, right=0, score=score, mask=mask)[0], expected)

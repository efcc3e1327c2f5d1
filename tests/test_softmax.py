"""The arithmetic of kernels/softmax.py, in IEEE float32 on the CPU."""

import math

import torch

from hopper_fa3.kernels.softmax import LARGEST_EXPONENT


def test_the_first_extreme_stays_finite_in_the_exponent():
    """As Softmax.start and update compute it. An infinite one would make the exponent of a masked score inf - inf."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.exp2(torch.empty(2_000_000).uniform_(-126, 127.5, generator=generator))
    named = torch.tensor([1.1, 17.0, math.sqrt(96), 128**-0.5, 2.0**127]) * math.log2(math.e)
    scale = torch.cat((magnitudes, named))
    bound = -LARGEST_EXPONENT / scale.clamp(min=1)
    assert bound.dtype == torch.float32
    assert (bound * scale).isfinite().all() and (-bound * -scale).isfinite().all()
    # From a scale of 1 on it lies below every score whose exponent float32 holds; below 1, below every score.
    assert (bound * scale)[scale >= 1].max() < -0.999 * torch.finfo(torch.float32).max
    assert (bound[scale < 1] < -0.999 * torch.finfo(torch.float32).max).all()

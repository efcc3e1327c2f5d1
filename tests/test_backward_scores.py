"""The polynomial that stands for some exponentials of the backward kernels, in the arithmetic of its instructions."""

import pytest
import torch

from hopper_fa3.compile import DTYPES  # first: it also chooses the target of the DSL
from hopper_fa3.kernels.backward_scores import EXP2, ROUND


def exp2(exponent, coefficients):
    """Float32 throughout; an FMA rounds once."""
    x = torch.maximum(exponent, torch.tensor(-127.0))
    shifted = x + ROUND
    # The shift drops what is left of the power's eight bits
    power = (((shifted.view(torch.int32).long() << 23) + (127 << 23)) & 0xFFFFFFFF).to(torch.uint32).view(torch.float32)
    rest = (x - (shifted - ROUND)).double()
    total = torch.full_like(rest, coefficients[0])
    for each in (*coefficients[1:], 1.0):
        total = (total * rest + torch.tensor(each).double()).float().double()
    return total.float() * power


@pytest.mark.parametrize(("dtype", "digits"), [("bfloat16", 8), ("float16", 11)])
def test_error_is_below_half_a_unit_in_the_last_place(dtype, digits):
    exponent = torch.cat((torch.linspace(-126, 1, 1_000_003), -torch.logspace(-30, 0, 1000, base=2), torch.zeros(1)))
    true = torch.exp2(exponent.double())
    error = ((exp2(exponent, EXP2[DTYPES[dtype]]).double() - true) / true).abs().max().item()
    assert error < 2.0 ** -(digits + 1)


@pytest.mark.parametrize("coefficients", EXP2.values(), ids=len)
def test_limits(coefficients):
    exponent = torch.tensor([-float("inf"), -1e30, -127.0, 0.0, float("nan")])
    found = exp2(exponent, coefficients)
    assert found[:4].tolist() == [0, 0, 0, 1] and found[4].isnan()

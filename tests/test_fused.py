"""The polynomial of capped scores, in float32 as the kernels compute it, against tanh in float64."""

import hopper_fa3.compile  # noqa: F401  chooses the DSL's target, which cutlass takes when it is first imported

# isort: split
import pytest
import torch

from hopper_fa3.kernels import fused
from hopper_fa3.kernels.config import CAP_UNITS
from hopper_fa3.kernels.score import CAPPED, LOG2_E

ULP = 2.0**-24


def horner(coefficients, square):
    found = torch.full_like(square, coefficients[0])
    for coefficient in coefficients[1:]:
        found = found * square + coefficient
    return found


def test_the_polynomial_of_a_capped_score():
    """r = (1 - tanh(x / CAP_UNITS)) / 2 where |x| < 2."""
    x = torch.linspace(-2, 2, 200_001, dtype=torch.float64)[1:-1].float()
    found = horner(CAPPED, x * x) * x + 0.5
    expected = (1 - torch.tanh(x.double() / CAP_UNITS)) / 2
    assert (found - expected).abs().max() < 2.5 * ULP  # 1.7 where each step is a fused multiply-add


def numbers(cap, scale):
    """What a launch takes: cap_factor, scale_log2; as float32."""
    return torch.tensor([CAP_UNITS * scale / cap, -2 * LOG2_E * cap], dtype=torch.float32)


@pytest.mark.parametrize("cap", [0.5, 15.0, 50.0, 1024.0])
@pytest.mark.parametrize("scale", [0.125, -0.3, 2.0, 2.0**-3.5])
def test_exponents_of_small_products(cap, scale, monkeypatch):
    """x P(x^2) + cap_constant is the capped score in base 2 without cap log2(e); the limit is 0.35 caps."""
    small = made(*numbers(cap, scale), monkeypatch)
    limit = small.limit.sqrt().item()
    assert limit * abs(scale) == pytest.approx(0.35 * cap, rel=1e-6)
    x = torch.linspace(-limit, limit, 100_001, dtype=torch.float64)[1:-1].float()
    found = horner((small.highest, small.middle, small.constant), x * x) * x
    expected = LOG2_E * cap * torch.tanh(x.double() * scale / cap)
    assert (found - expected).abs().max() < 11 * ULP * LOG2_E * cap  # 8 of them the polynomial's, exact


@pytest.mark.parametrize(("cap", "scale"), [(2.0**-126, 1.0), (15.0, 0.0), (1024.0, 2.0**-40), (15.0, 2.0**40)])
def test_where_no_product_is_small(cap, scale, monkeypatch):
    """Powers of the factor leave float32's range."""
    factor, scale_log2 = numbers(cap, scale)
    small = made(factor.clamp(-(2.0**126), 2.0**126), scale_log2, monkeypatch)
    assert small.limit == 0


def made(factor, scale_log2, monkeypatch):
    """fused.polynomial on torch's float32 numbers."""
    monkeypatch.setattr(fused, "Float32", lambda number: torch.tensor(number, dtype=torch.float32))
    monkeypatch.setattr(fused.cutlass, "select_", torch.where)
    return fused.polynomial(factor, scale_log2)

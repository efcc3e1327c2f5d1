"""The polynomial of capped scores, in float32 as the kernels compute it, against tanh in float64; and which sums say
that it serves a row.
"""

import inspect
import math
from types import SimpleNamespace

import hopper_fa3.compile  # noqa: F401  chooses the DSL's target, which cutlass takes when it is first imported

# isort: split
import pytest
import torch

from hopper_fa3.kernels import fused, score
from hopper_fa3.kernels.config import CAP_UNITS, SMALLEST_CAP
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
    """x P(x^2) + cap_constant is the capped score in base 2 without cap log2(e); the limit is 0.4 caps."""
    small = made(*numbers(cap, scale), monkeypatch)
    limit = small.limit.sqrt().item()
    assert limit * abs(scale) == pytest.approx(0.4 * cap, rel=1e-6)
    x = torch.linspace(-limit, limit, 100_001, dtype=torch.float64)[1:-1].float()
    found = horner((small.highest, small.middle, small.constant), x * x) * x
    expected = LOG2_E * cap * torch.tanh(x.double() * scale / cap)
    assert (found - expected).abs().max() < 23 * ULP * LOG2_E * cap  # 21 of them the polynomial's, exact


@pytest.mark.parametrize(("cap", "scale"), [(1024.0, 2.0**-11), (30.0, 2.0**22), (30.0, -1.0)])
def test_powers_within_range(cap, scale, monkeypatch):
    """As far as scores are small with any scale that one would ask for."""
    small = made(*numbers(cap, scale), monkeypatch)
    assert small.limit.sqrt().item() * abs(scale) == pytest.approx(0.4 * cap, rel=1e-6)
    for coefficient in (small.highest, small.middle, small.constant):
        assert 2.0**-120 < abs(coefficient) < 2.0**120
    assert small.largest_sum == pytest.approx(fused.SLOPE * cap, rel=1e-6)


@pytest.mark.parametrize(("cap", "scale"), [(2.0**-126, 1.0), (15.0, 0.0), (1024.0, 2.0**-40), (15.0, 2.0**40)])
def test_where_no_product_is_small(cap, scale, monkeypatch):
    """Powers of the factor leave float32's range."""
    factor, scale_log2 = numbers(cap, scale)
    small = made(factor.clamp(-(2.0**126), 2.0**126), scale_log2, monkeypatch)
    assert small.limit < 0 and small.largest_sum == -math.inf
    assert not any(trusted(torch.tensor([0.0, 1.0, 32.0, 1e30, math.inf]), torch.zeros(5), 32, small, monkeypatch))


CAPS = (SMALLEST_CAP, 31.0, 35.0, 40.0, 50.0, 100.0, 300.0, 1024.0)


def exponents(u, cap):
    """``(found, expected)`` in base 2, of scores that are u caps, both in float64."""
    x = CAP_UNITS * u
    polynomial = -2 * horner(fused.CAPPED_SHORT, x * x) * x
    return LOG2_E * cap * polynomial, LOG2_E * cap * torch.tanh(u)


def test_probabilities_rise_with_the_polynomial():
    """So that a sum below the probability at the limit has no larger score: the derivative has no zero."""
    highest, middle, constant = fused.CAPPED_SHORT
    assert highest < 0 < middle and (3 * middle) ** 2 < 4 * 5 * highest * constant
    for cap in CAPS:
        at_limit = exponents(torch.tensor(0.4, dtype=torch.float64), cap)[0].item()
        assert fused.SLOPE * cap == pytest.approx(at_limit, rel=1e-5) and fused.SLOPE * cap <= at_limit


@pytest.mark.parametrize("cap", CAPS)
def test_what_the_polynomial_spoils_below_minus_the_limit(cap):
    """At most 1.2 ULP of the cap, of the smallest mean of a trusted row: 2.1e-6 at the smallest cap."""
    found, expected = exponents(-torch.linspace(0.4, 30, 300_001, dtype=torch.float64), cap)
    worst = (torch.exp2(found) - torch.exp2(expected)).abs().max()
    mean = fused.TRUSTED * 2.0 ** (-fused.SLOPE * (cap - SMALLEST_CAP))
    assert worst < 1.2 * ULP * cap * mean
    assert cap > SMALLEST_CAP or worst > 1.1 * ULP * cap * mean


def test_keys_to_which_sums_are_blind():
    """What the polynomial spoils by more than 16 bit do is a millionth of a score of 0, at the smallest cap."""
    u = -torch.linspace(0.4, 30, 300_001, dtype=torch.float64)
    for cap, largest in ((SMALLEST_CAP, 1.1e-6), (50.0, 3e-10), (15.0, 1e-3)):
        found, expected = exponents(u, cap)
        spoilt = torch.exp2(expected)[(torch.exp2(found - expected) - 1).abs() > 2.0**-9]
        assert 0.3 * largest < spoilt.max() < largest


@pytest.mark.parametrize("columns", [20, 28, 32, 44])
@pytest.mark.parametrize("cap", CAPS[:-2])
def test_trusted_sums(cap, columns, monkeypatch):
    """Whatever the scores are: a trusted sum is right, and those of scores that are small are trusted."""
    small = made(*numbers(cap, 1.0), monkeypatch)
    generator = torch.Generator().manual_seed(int(cap) + columns)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = 20_000
    u = normal(rows, 1) * 0.3 + normal(rows, columns) * torch.rand(rows, 1, generator=generator) * 0.5
    # Few are large, or small among large ones
    u += (torch.rand(rows, columns, generator=generator) < 0.05) * normal(rows, 1)
    found, expected = exponents(u, cap)
    added = normal(rows) * 20
    sums, right = (torch.exp2(each + added[:, None]).sum(1) for each in (found, expected))
    kept = trusted(sums.float(), added.float(), columns, small, monkeypatch)
    error = ((sums - right) / right).abs()
    assert error[kept].max() < 24 * ULP * cap and error[~kept].max() > 1e-3
    assert not kept[(u > 0.4001).any(1)].any() and 100 < kept.sum() < rows - 100
    within = torch.exp2(expected).sum(1) < 0.99 * 2.0 ** (fused.SLOPE * cap)
    assert kept[within & (u > -0.1).any(1) & (u.mean(1) > -0.1)].all()


def test_sums_that_say_nothing(monkeypatch):
    small = made(*numbers(30.0, 1.0), monkeypatch)
    sums = torch.tensor([0.0, math.inf, math.nan, 32.0])
    assert trusted(sums, torch.zeros(4), 32, small, monkeypatch).tolist() == [False, False, False, True]


def trusted(sums, added, columns, small, monkeypatch):
    """fused.trusted on torch's float32 numbers."""
    monkeypatch.setattr(fused, "Float32", lambda number: torch.tensor(number, dtype=torch.float32))
    cute = SimpleNamespace(
        math=SimpleNamespace(log2=lambda x, fastmath: torch.log2(x)), arch=SimpleNamespace(fmax=torch.fmax)
    )
    monkeypatch.setattr(fused, "cute", cute)
    return inspect.unwrap(fused.trusted)(sums, added, columns, small)


def made(factor, scale_log2, monkeypatch):
    """fused.polynomial on torch's float32 numbers."""
    monkeypatch.setattr(fused, "Float32", lambda number: torch.tensor(number, dtype=torch.float32))
    monkeypatch.setattr(score, "Float32", fused.Float32)
    monkeypatch.setattr(fused.cutlass, "select_", torch.where)
    return fused.polynomial(factor, scale_log2)

"""The gradients' kernels for wide heads compile to sm_90a without a GPU, into the products they were written for."""

import re

import pytest

from hopper_fa3 import compile as compiling
from hopper_fa3 import machine_code, plan
from hopper_fa3.kernels.query_config import QueryConfig
from hopper_fa3.problem import BackwardStatic

DEPTH = 16  # of one WGMMA


def loops_of(config):
    """The masked and the unmasked one, and with a left bound that of its side."""
    return 3 if config.left_bound else 2


def of_128_keys(config):
    """S before a head's first step, and in the loops; dP, dV, dK and dQ in these and in the last step; dQ once more
    behind it.
    """
    total, dq, rounds = config.tile_m // DEPTH, config.tile_n // DEPTH, 1 + loops_of(config)
    return rounds * (config.columns + config.columns_v) // DEPTH + rounds * (2 * total + dq) + dq


def of_roles(config):
    """One role: S likewise, dV in the loops and behind them. The other: dP in the first step and in the loop, dK there
    and behind it.
    """
    total, rounds = config.tile_m // DEPTH, 1 + loops_of(config)
    return rounds * (config.head_dim // DEPTH + total) + 2 * (config.head_dim_v // DEPTH + total)


def of_queries(config):
    """S and dP of the first block and in the loops, dQ in these and behind them."""
    return (1 + loops_of(config)) * (config.head_dim + config.head_dim_v + QueryConfig.tile_n) // DEPTH


DENSE, CAUSAL, WINDOW = (False, False), (True, False), (True, True)  # right, left


@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_dim_v", "bounds", "split_tail", "products"),
    [
        ("bfloat16", 192, 128, CAUSAL, False, of_128_keys),
        ("float16", 64, 256, DENSE, False, of_128_keys),
        ("bfloat16", 192, 128, DENSE, True, of_128_keys),
        ("bfloat16", 192, 192, DENSE, False, of_roles),
        ("float16", 256, 256, CAUSAL, False, of_roles),
        ("bfloat16", 256, 256, DENSE, True, of_roles),
        ("bfloat16", 192, 128, WINDOW, False, of_128_keys),
        ("bfloat16", 256, 256, WINDOW, False, of_roles),
    ],
)
def test_machine_code(dtype, head_dim, head_dim_v, bounds, split_tail, products):
    right_bound, left_bound = bounds
    static = BackwardStatic(dtype, head_dim, head_dim_v, right_bound, True, False, left_bound)
    chosen = plan.choose_backward(static)._replace(split_tail=split_tail)
    config = plan.backward_config(static, chosen)
    before, main, *add, last = machine_code.reports(compiling.cubin(static, chosen))
    # Fences before groups of WGMMAs and waits for them: twice as many as WGMMAs where ptxas serialises these
    assert (main.counts["HGMMA"], main.counts["WARPGROUP"] <= 12 + 10 * loops_of(config)) == (products(config), True)
    if config.roles:
        assert last.name == QueryConfig(dtype, head_dim, head_dim_v, *bounds).name + f"_{2 + split_tail}"
        assert (last.counts["HGMMA"], last.counts["WARPGROUP"] <= 10 * loops_of(config)) == (of_queries(config), True)
        assert last.registers == 168
    assert [kernel.name for kernel in add] == [f"{config.name}_add_2"] * split_tail
    for kernel in (before, main, *add, last):
        assert (kernel.stack, kernel.local, kernel.spills) == (0, 0, 0), kernel.name


@pytest.mark.parametrize(
    ("head_dims", "right_bound", "options"),
    [
        ((96, 96), False, {"split_tail": True, "unused": 16, "unused_v": 16}),
        ((96, 96), True, {"unused": 16, "unused_v": 16}),
        ((128, 96), True, {"split_heads": True, "unused": 16}),
        ((64, 128), False, {"unused_v": 16}),
    ],
)
def test_machine_code_without_unused_columns(head_dims, right_bound, options):
    static = BackwardStatic("bfloat16", *head_dims, right_bound, True, not options.get("split_tail", False))
    chosen = plan.choose_backward(static)._replace(**options)
    config = plan.backward_config(static, chosen)
    texts = machine_code.disassemble(compiling.cubin(static, chosen))
    main = machine_code.parse(*texts[1])
    assert main.name == f"{config.name}_1"
    assert (main.counts["HGMMA"], main.counts["WARPGROUP"] <= 32) == (of_128_keys(config), True)
    assert (main.stack, main.local, main.spills) == (0, 0, 0)
    # Of dK and dV; neither is as wide as S is, or as a piece of dQ
    widths = {f"HGMMA.64x{columns}x16" for columns in (config.columns, config.columns_v)}
    assert widths <= set(re.findall(r"HGMMA\.64x\d+x16", str(texts[1])))

"""The kernels of packed sequences compile to sm_90a without a GPU, into the products of those of one sequence."""

import pytest

from hopper_fa3 import compile as compiling
from hopper_fa3 import machine_code, plan
from hopper_fa3.problem import BackwardStatic, Packed, Static

PLAIN = Packed(used_q=False, used_k=False)
EDGES = ("_table", "_tables", "_before", "_behind")
FORWARD = [
    Static("bfloat16", 128, 128, True, False, False, Packed(used_q=False, used_k=False)),
    Static("float16", 64, 64, False, False, True, Packed(used_q=True, used_k=False)),
    Static("bfloat16", 256, 256, True, True, False, Packed(used_q=False, used_k=True)),
]
GRADIENTS = [
    # Both orders of a step's products, with turns and without; wide heads; roles, whose dQ has a kernel of its own
    BackwardStatic("bfloat16", 64, 64, False, False, True, packed=Packed(used_q=False, used_k=False)),
    BackwardStatic("bfloat16", 128, 128, True, True, False, packed=Packed(used_q=True, used_k=True)),
    BackwardStatic("float16", 192, 128, True, False, True, True, packed=Packed(used_q=False, used_k=False)),
    BackwardStatic("bfloat16", 256, 256, False, True, False, packed=Packed(used_q=False, used_k=True)),
]

# Beside what a kernel of wide heads holds, a slope, and what of a sequence is known from a tile's start to its end, are
# more than registers take; beside three warpgroups' P in registers a softcap's other way
SPILLS = 16
# A few: each row takes half a minute. The others are compiled by tests/test_packed_scores_gpu.py
HOOKS = [
    (Static("bfloat16", 64, 64, False, False, False, PLAIN, sink=True, softcap=True, by_sums=True), SPILLS),
    (Static("bfloat16", 256, 256, False, False, False, PLAIN, alibi="distance"), 0),
    (
        Static(
            "bfloat16", 128, 128, True, True, False, PLAIN, softcap=True, sink=True, alibi="distance", chunked=True
        ), 0
    ),
]  # fmt: skip
GRADIENT_HOOKS = [
    (BackwardStatic("bfloat16", 64, 64, True, False, False, packed=PLAIN, softcap=True, sink=True), 0),
    (BackwardStatic("bfloat16", 128, 128, True, False, True, packed=PLAIN, alibi="linear"), 0),
    (BackwardStatic("bfloat16", 192, 128, True, False, False, packed=PLAIN, alibi="linear"), SPILLS),
    (BackwardStatic("bfloat16", 64, 64, True, False, False, True, PLAIN, chunked=True), 0),
]


def reports(static):
    chosen = plan.choose_backward(static) if isinstance(static, BackwardStatic) else plan.choose(static)
    return machine_code.reports(compiling.cubin(static, chosen))


def main_kernels(found):
    """Those with products, and the others."""
    with_products = [each for each in found if "HGMMA" in each.counts]
    return with_products, [each for each in found if each not in with_products]


@pytest.mark.parametrize("static", [*FORWARD, *GRADIENTS], ids=str)
def test_machine_code(static):
    check(static, 0)


@pytest.mark.parametrize(("static", "spills"), HOOKS, ids=str)
def test_forwards_with_changed_scores(static, spills):
    check(static, spills)


@pytest.mark.parametrize(("static", "spills"), GRADIENT_HOOKS, ids=str)
def test_gradients_with_changed_scores(static, spills):
    check(static, spills)


def check(static, spills):
    """As the kernels of one sequence, and no more than so many ``spills``."""
    dense = static._replace(packed=None) if isinstance(static, Static) else static._replace(packed=None, sink=False)
    (found, edges), (alone, _) = (main_kernels(reports(each)) for each in (static, dense))
    for each in (*found, *edges):
        assert each.spills <= spills and (spills or (each.stack, each.local) == (0, 0)), each.name
        assert each.name.split("_packed_")[0] != each.name  # what a profiler shows
    assert len(found) == len(alone)
    for packed, dense in zip(found, alone, strict=True):
        # Neither other products nor serialised ones
        for family in ("HGMMA", "WARPGROUP", "USETMAXREG"):
            assert packed.counts[family] == dense.counts[family], packed.name
        assert packed.registers == dense.registers
        # Places of sequences are computed between tiles, by warps that load and store
        assert sum(packed.counts.values()) < 1.15 * sum(dense.counts.values()), packed.name
    assert all(each.name.rsplit("_", 1)[0].endswith(EDGES) for each in edges)


def test_the_table_is_listed_in_few_instructions():
    """One CTA lists all tiles before anything else can run: 5 us are 9,000 clocks."""
    table = reports(FORWARD[0])[0]
    assert table.name.endswith("_table_0") and sum(table.counts.values()) < 1000

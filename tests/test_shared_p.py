"""P through shared memory (Plan.shared_p): what its kernels compile to, without a GPU."""

import itertools
import sys
from pathlib import Path

import pytest
from compiled import code, texts

from hopper_fa3 import plan
from hopper_fa3.kernels.probabilities import SharedP
from hopper_fa3.machine_code import instructions
from hopper_fa3.problem import Static

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import loops


@pytest.mark.parametrize(("tile_n", "columns"), [(128, 64), (192, 64), (96, 32), (144, 16), (112, 16)])
def test_places_in_shared_memory(tile_n, columns):
    """Atoms of ``columns`` one behind the other, in each of which the swizzle adds, without carry, the address's bits
    from 7 on to those from 4 on: as many as number the 16 bytes of a row.
    """
    config = plan.forward_config(Static("bfloat16", 128, 128, False, False, False), plan.Plan(192, tile_n))
    assert config.p_columns == columns
    way, found = SharedP(None, columns), {}
    for row, column in itertools.product(range(64), range(0, tile_n, 8)):
        atom, inside = divmod(column, columns)
        address = 2 * (64 * columns * atom + columns * row + inside)
        expected = address ^ (address >> 7) % (columns // 8) << 4
        bits, more = way.offset(column // 16)
        found[row, column] = (way.place(row, column % 16 // 8) ^ bits) + more
        assert found[row, column] == expected
    assert sorted(found.values()) == list(range(0, 128 * tile_n, 16))


@pytest.mark.parametrize(
    ("head_dim", "right_bound", "given"),
    [
        (64, False, plan.Plan(192, 192, shared_p=True)),
        (96, False, plan.Plan(192, 144, shared_p=True)),
        (96, True, plan.Plan(192, 128, shared_p=True)),
        (128, False, plan.Plan(192, 128, shared_p=True)),
        (128, True, plan.Plan(192, 112, pingpong=False, shared_p=True)),
    ],
    ids=str,
)
def test_machine_code(head_dim, right_bound, given):
    static = Static("bfloat16", head_dim, head_dim, right_bound, False, False)
    found = code(static, given)
    assert (found.stack, found.local, found.spills) == (0, 0, 0)
    for loop in loops.main_loops(instructions(texts(static, given)[1]))[:2]:
        places = {family: [i for i, step in enumerate(loop) if step.family == family] for family in
                  ("HGMMA", "WARPGROUP", "STSM", "FENCE", "BAR")}  # fmt: skip
        assert len(places["HGMMA"]) == head_dim // 16 + given.tile_n // 16
        # No product takes A from registers: its first operand, after the accumulator, is a pair of descriptors
        assert all("gdesc[" in loop[i].operands.split(",")[1] for i in places["HGMMA"])
        # A 16 x 16 piece of a warp's rows an instruction, after the last wait for a product, then the proxy fence
        assert len(places["STSM"]) == given.tile_n // 16 and len(places["FENCE"]) == 1
        assert places["WARPGROUP"][-1] < places["STSM"][0] and places["STSM"][-1] < places["FENCE"][0]
        # The turn's barrier serves P as well; without turns the warpgroup meets at its own
        waits, arrivals = (sum(kind in loop[i].opcode for i in places["BAR"]) for kind in ("SYNC", "ARV"))
        assert (waits, arrivals) == (1, int(given.pingpong))
        first_pv = places["HGMMA"][head_dim // 16]
        assert next(i for i in places["BAR"] if "SYNC" in loop[i].opcode) < first_pv

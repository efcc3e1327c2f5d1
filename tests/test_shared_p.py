"""P through shared memory (Plan.shared_p): what its kernels compile to, without a GPU."""

import sys
from pathlib import Path

import pytest
from compiled import code, texts

from hopper_fa3 import plan
from hopper_fa3.machine_code import instructions
from hopper_fa3.problem import Static

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import loops


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

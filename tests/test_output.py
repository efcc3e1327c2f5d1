"""Both ways out for O: what they compile to, and which lane holds which columns in the one from registers."""

from types import SimpleNamespace

import pytest
import torch
from compiled import code, texts

from hopper_fa3 import plan
from hopper_fa3.kernels import output
from hopper_fa3.machine_code import instructions
from hopper_fa3.problem import Static

LANES = torch.arange(32)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "right_bound", "staged"),
    [
        (64, 64, False, True),
        (128, 128, True, True),
        (192, 128, True, False),
        (192, 192, False, False),
        (256, 256, True, False),
        (128, 256, True, False),
        (256, 96, False, False),
    ],
)
def test_machine_code(head_dim, head_dim_v, right_bound, staged):
    static = Static("bfloat16", head_dim, head_dim_v, right_bound, False, False)
    config = plan.forward_config(static, plan.choose(static))
    assert config.staged_output == staged
    found = code(static)
    assert (found.stack, found.local, found.spills) == (0, 0, 0)
    stores = sum(step.opcode.startswith("STG.E.128") for step in instructions(texts(static)[1]))
    # By TMA from shared memory, in boxes of 64 columns; or 16 bytes a lane, of each row 32 columns a quad
    written = (found.counts.get("STSM", 0), found.counts.get("UTMASTG", 0), stores)
    shared_p = 3 * config.tile_n // 16 if config.shared_p else 0  # the first block and both loops write theirs
    assert written == ((head_dim_v // 16 + shared_p, head_dim_v // 64, 0) if staged else (0, 0, 2 * head_dim_v // 32))


def shuffled(values, offset):
    """As shfl.bfly: each lane gets the value of the lane whose number differs in the bit ``offset``."""
    return values[LANES ^ offset]


def test_each_lane_ends_with_one_whole_group_of_columns(monkeypatch):
    """The kernel's own function, run on all lanes of a warp at once: a register is a tensor of 32 values."""
    monkeypatch.setattr(output, "cutlass", SimpleNamespace(select_=torch.where))
    monkeypatch.setattr(output, "cute", SimpleNamespace(arch=SimpleNamespace(shuffle_sync_bfly=shuffled)))
    row, lane = LANES // output.QUAD, LANES % output.QUAD

    def register(first_column):
        """Names two neighbouring columns of one row of the matrix."""
        return 1000 * row + first_column

    # PTX, wgmma's accumulator: the register pair of group g holds columns 8 g + 2 (lane % 4) and the one after it
    before = [register(output.GROUP * group + 2 * lane) for group in range(output.QUAD)]
    after = output.transpose(before, lane)
    # Lane i stores columns 8 i to 8 i + 7, as four registers in their order in memory
    expected = [register(output.GROUP * lane + 2 * word) for word in range(output.QUAD)]
    assert torch.equal(torch.stack(after), torch.stack(expected))

"""Which lane of a quad holds which columns of O before and after the transposition of kernels/output.py.

The function of the kernel itself runs here, on all lanes of a warp at once: a register is a tensor of 32 values.
"""

from types import SimpleNamespace

import torch

from hopper_fa3.kernels import output

LANES = torch.arange(32)


def shuffled(values, offset):
    """As shfl.bfly: each lane gets the value of the lane whose number differs in the bit ``offset``."""
    return values[LANES ^ offset]


def test_each_lane_ends_with_one_whole_group_of_columns(monkeypatch):
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

"""The order of packed sequences' tiles, dealt out on paper: what L2 holds, and how evenly a launch ends."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
from suites_packed import UNIFORM, long_tailed
from test_plan import dealt
from test_tile_table import Case, bounds_of, heads_of_section, listed, owner, table
from threads import ThreadCta, float_bits

from hopper_fa3 import plan
from hopper_fa3.kernels import table_size
from hopper_fa3.kernels import tile_table as real
from hopper_fa3.kernels.config import BackwardConfig

SMS = 132
THREADS = 128  # of the CTA: all sequences at once
TILE_STEPS = 3  # that a tile's beginning and end take
MIXES = {
    "16 x 1024": UNIFORM,
    "32 x 512": 32 * (512,),
    "64 lognormal": long_tailed(),
    "1 x 16384": (16384,),
    "1 x 8192, 64 x 128": (8192, *64 * (128,)),
}


def case_of(lengths):
    """Queries and keys of these lengths, without gaps."""
    case = Case(0, len(lengths), 2)
    case.sides = [(np.cumsum([0, *lengths]), np.array(lengths), sum(lengths))] * 2
    return case


def launched(lengths, keys, causal, heads, heads_k):
    """(sequence and K/V head, rows, steps) of each tile of K/V or of Q at head_dim 128, in the launch's order; bytes of
    a row.
    """
    asked = SimpleNamespace(head_dim=128, head_dim_v=128, bounded=causal, group=heads // heads_k)
    if keys:
        config = BackwardConfig("bfloat16", 128, 128, causal, 64, 2)
        sections, group, row_bytes = plan.packed_backward_sections(asked, config, SMS), 1, 1024 * asked.group
        tiles = table(128, 64, True, causal, level_end=causal, threads=THREADS)
    else:
        sections, group, row_bytes = plan.packed_sections(asked, SMS), asked.group, 512
        tiles = table(192, 128, False, causal, descending=causal, level_end=causal, threads=THREADS)
    case, bounds = case_of(lengths), bounds_of(0 if causal else None)
    found = listed(case, tiles, bounds, real.Sections(heads_k, group, *sections))
    entries = [tuple(int(word) for word in line[:6]) for line in found[table_size.HEADER :][: found[0, 0]]]
    section, steps = found[0, 1], [case.steps(tiles, *entry[:3], bounds) for entry in entries]
    order = []
    for first in range(0, heads_k * group, section):
        for entry, count in zip(entries, steps, strict=True):
            name, _, rows = owner(tiles, entry)
            for head in range(first, min(first + section, heads_k * group)):
                order.append(((name, head // group), rows, int(count) * (asked.group if keys else 1) + TILE_STEPS))
    return order, row_bytes


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_rows_stay_in_l2_and_the_launch_ends_evenly(mix, keys, causal):
    """What as many tiles as SMs touch is about the budget; the longest first, all would hardly end sooner."""
    for heads_k in (16, 4):
        order, row_bytes = launched(MIXES[mix], keys, causal, 16, heads_k)
        steps = [count for *_, count in order]
        assert dealt(steps, SMS) <= 1.03 * dealt(sorted(steps, reverse=True), SMS)
        if heads_k == 16:
            at_once = [
                sum({name: rows for name, rows, _ in order[first : first + SMS]}.values())
                for first in range(0, max(len(order) - SMS, 1), 16)
            ]
            assert np.mean(at_once) * row_bytes <= 1.5 * plan.L2_BUDGET_BYTES
            assert max(at_once) * row_bytes <= 2 * plan.L2_BUDGET_BYTES


def test_sections_are_even_and_have_enough_tiles():
    """8 MB of a head: 4 of them in L2, 4 sections of 16 heads, not 5 of 17; 8 heads where 4 have too few tiles."""
    cta = ThreadCta(32)
    kernels = cta.kernels({"tile_table": {"float_bits": float_bits}})["tile_table"]
    asked = table(128, 64, True, True)

    def section(heads, group, needed, tiles, rows):
        found = kernels.TileTable(**vars(asked)).section(real.Sections(heads, group, 32768, needed), tiles, rows)
        assert found == heads_of_section(real.Sections(heads, group, 32768, needed), tiles, rows)
        return found

    assert section(16, 1, 237, 64, 8192) == 4 and section(17, 1, 237, 64, 8192) == 4
    assert section(16, 1, 237, 8, 1024) == 16 and section(16, 2, 237, 30, 8192) == 8
    assert section(16, 1, 475, 64, 8192) == 8 and section(3, 4, 1, 1, 10**6) == 4
    assert section(33, 1, 100, 8, 1024) == 17 and section(5, 1, 237, 30, 0) == 5

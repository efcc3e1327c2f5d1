"""Kernels with softcap, sinks, ALiBi and chunks compile to sm_90a: products as they are, in registers."""

import itertools
import math

import pytest
from compiled import code, kernels

from hopper_fa3 import machine_code, plan
from hopper_fa3.problem import BackwardStatic, Static

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
BY_SUMS = {"softcap": True, "by_sums": True}
HOOKS = (BY_SUMS, {"sink": True}, {"alibi": "linear"}, {"alibi": "distance"}, {"chunked": True})
# In a backward that holds both, the derivative of softcap and a slope are more than registers take; and the ends of
# queries in chunks where the kernel without them has no register left. In a forward softcap takes a few outside of the
# loop, but none at head_dim 128.
SPILLS = 32
FORWARD = [
    (dims, right, left, hook)
    for (dims, hook), (right, left) in itertools.product(zip(DIMS, HOOKS, strict=True), ((True, True),))
] + [
    ((64, 64), False, False, BY_SUMS), ((64, 64), True, True, {"alibi": "distance"}),
    ((128, 128), False, False, BY_SUMS), ((128, 128), True, False, BY_SUMS),
    ((128, 128), False, False, {"softcap": True}), ((128, 128), True, False, {"alibi": "linear"}),
    ((128, 128), False, False, {"alibi": "distance"}), ((128, 128), True, False, {"sink": True}),
    ((128, 128), True, True, {"softcap": True, "sink": True, "alibi": "distance", "chunked": True}),
    ((256, 256), True, True, {"softcap": True, "sink": True, "alibi": "distance"}),
]  # fmt: skip
BACKWARD = [
    ((64, 64), True, False, {"softcap": True}, 0), ((64, 64), False, False, {"alibi": "distance"}, 0),
    ((64, 64), True, True, {"chunked": True}, 0), ((128, 128), False, False, {"softcap": True}, 0),
    ((128, 128), True, False, {"alibi": "linear"}, 0), ((128, 128), True, True, {"chunked": True}, SPILLS),
    ((128, 128), True, True, {"softcap": True, "alibi": "distance"}, SPILLS),
    ((192, 128), True, False, {"softcap": True}, 0), ((192, 128), True, False, {"alibi": "linear"}, 0),
    ((192, 128), True, True, {"chunked": True}, SPILLS), ((256, 256), False, False, {"softcap": True}, 0),
    ((256, 256), True, True, {"alibi": "linear"}, 0),
]  # fmt: skip


def ids(dims, right, left, hook, *_):
    return "-".join(map(str, (*dims, right, left, *hook.items())))


@pytest.mark.parametrize(("dims", "right", "left", "hook"), FORWARD, ids=[ids(*each) for each in FORWARD])
def test_forward(dims, right, left, hook):
    left = left or hook.get("chunked", False)
    static = Static("bfloat16", *dims, right, left, False)._replace(**hook)
    config, found = plan.forward_config(static, plan.choose(static)), code(static)
    assert found.name.startswith(config.name) and found.local == 0
    assert found.spills <= (SPILLS if config.softcap and config.fused and dims[0] != 128 else 0)
    # First block and loops, two or three, in each of which scores may be made again
    loops = 3 if left else 2
    scores, output = dims[0] // 16, config.tile_n // 16
    assert found.counts["HGMMA"] == (1 + 2 * loops) * scores + (1 + loops) * output
    assert found.counts["WARPGROUP"] <= 4 + 6 * loops
    # Exponentials of each place; softcap has one more, and a reciprocal, in the branch for large scores. The loop over
    # unmasked blocks has that branch where scores are made again, twice, with exponentials of its own.
    elements, places = config.tile_n // 2, 1 + 2 * loops
    special = (1 + loops) * elements
    if config.softcap:
        special += 2 * places * elements + (elements if config.fused else 0)
    assert special <= found.counts["MUFU"] <= special + 32


@pytest.mark.parametrize(("dims", "right", "left", "hook", "spills"), BACKWARD, ids=[ids(*each) for each in BACKWARD])
def test_backward(dims, right, left, hook, spills):
    static = BackwardStatic("bfloat16", *dims, right, True, False, left)._replace(**hook)
    found = [machine_code.parse(*texts) for texts in kernels(static)]
    config = plan.backward_config(static, plan.choose_backward(static))
    assert found[1].name.startswith(config.name)
    for kernel in found:
        assert kernel.spills <= spills and (spills or kernel.stack == 0), kernel.name
        assert kernel.counts.get("WARPGROUP", 0) <= 42  # twice as many as WGMMAs where these are serialised
    assert config.roles == (dims[0] == 256 or (dims[0] == 192 and config.softcap))
    assert not config.early_sums and math.isfinite(found[1].registers)

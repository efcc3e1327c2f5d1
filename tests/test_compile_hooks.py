"""Kernels with hooks of a user's own compile to sm_90a: in registers, products as they are."""

import pytest
from compiled import chosen, code, kernels
from hooks import BENT, DISTANCE, DOCUMENTS, EXPLODING, SCATTERED, same_gradient
from test_compile_packed import PLAIN, check

from hopper_fa3 import compile as compiling
from hopper_fa3 import machine_code, plan
from hopper_fa3.hooks import MaskHook, ScoreHook
from hopper_fa3.kernels.packed_backward import PackedBackwardKernel
from hopper_fa3.kernels.packed_forward import PackedForwardKernel
from hopper_fa3.problem import BackwardStatic, Static

BOTH = {"score": DISTANCE, "mask": DOCUMENTS}
# A few: each takes 10 to 20 s. The others are compiled by tests/test_hooks_gpu.py
FORWARD = [
    ((64, 64), True, True, BOTH), ((128, 128), False, False, {"mask": DOCUMENTS}), ((128, 128), True, True, BOTH),
    ((256, 256), True, True, BOTH), ((128, 128), True, False, {"score": BENT, "mask": SCATTERED}),
]  # fmt: skip
# A word at head_dim 128, in a kernel that has no register left as it is
SPILLS = 4
BACKWARD = [
    ((64, 64), True, True, BOTH, 0), ((128, 128), False, False, {"mask": DOCUMENTS}, 0),
    ((128, 128), True, False, BOTH, SPILLS), ((192, 128), False, False, BOTH, 0),
]  # fmt: skip
# Of packed sequences: four more there, before the first tile; at 256 two of the forward's producer warp, once a tile
PACKED_SPILLS = 8
PACKED = [
    ((64, 64), False, False, {"mask": DOCUMENTS}, 0), ((128, 128), True, True, BOTH, PACKED_SPILLS),
    ((256, 256), True, False, {"score": BENT}, PACKED_SPILLS),
]  # fmt: skip


def ids(dims, right, left, hooks, *_):
    return "-".join(map(str, (*dims, right, left, *hooks)))


@pytest.mark.parametrize(("dims", "right", "left", "hooks"), FORWARD, ids=[ids(*each) for each in FORWARD])
def test_forward(dims, right, left, hooks):
    static = Static("bfloat16", *dims, right, left, False, **hooks)
    config, found = plan.forward_config(static, plan.choose(static)), code(static)
    assert found.name.startswith(config.name) and (found.stack, found.local, found.spills) == (0, 0, 0)
    loops = 3 if left else 2
    scores, output = dims[0] // 16, config.tile_n // 16
    assert found.counts["HGMMA"] == (1 + 2 * loops) * scores + (1 + loops) * output
    assert found.counts["WARPGROUP"] <= 4 + 6 * loops


@pytest.mark.parametrize(("dims", "right", "left", "hooks", "spills"), BACKWARD, ids=[ids(*each) for each in BACKWARD])
def test_backward(dims, right, left, hooks, spills):
    static = BackwardStatic("bfloat16", *dims, right, True, False, left, **hooks)
    found = [machine_code.parse(*texts) for texts in kernels(static)]
    config = plan.backward_config(static, plan.choose_backward(static))
    assert found[1].name.startswith(config.name)
    for kernel in found:
        assert kernel.spills <= spills and (spills or kernel.stack == 0), kernel.name
        assert kernel.counts.get("WARPGROUP", 0) <= 42  # twice as many as WGMMAs where these are serialised


@pytest.mark.parametrize(("dims", "right", "left", "hooks", "spills"), PACKED, ids=[ids(*each) for each in PACKED])
def test_packed_sequences(dims, right, left, hooks, spills):
    check(Static("bfloat16", *dims, right, left, False, PLAIN, **hooks), spills)
    check(BackwardStatic("bfloat16", *dims, right, True, False, left, PLAIN, **hooks), spills)


@pytest.mark.parametrize("given", [{}, {"score": BENT}, {"mask": DOCUMENTS}, {"alibi": "distance"}, {"softcap": True}])
def test_kernels_know_a_tile_s_sequence_where_scores_depend_on_it(given):
    """The tables that say it, and all that read them."""
    numbered = any(name in given for name in ("score", "mask", "alibi"))
    for dims in ((128, 128), (256, 256)):
        static = Static("bfloat16", *dims, True, False, False, PLAIN, **given)
        forward = PackedForwardKernel(plan.forward_config(static, plan.choose(static)))
        static = BackwardStatic("bfloat16", *dims, True, True, False, packed=PLAIN, **given)
        backward = PackedBackwardKernel(plan.backward_config(static, plan.choose_backward(static)))
        of_steps = backward.tables.pop(1)
        found = [forward.table, forward.main.schedule, *backward.tables, backward.main.schedule]
        found += [] if backward.main.queries is None else [backward.main.queries.schedule]
        assert [each.numbered for each in found] == [numbered] * (4 if dims == (128, 128) else 6)
        assert not of_steps.numbered


def test_a_key_is_compiled_once(monkeypatch):
    traced = []
    monkeypatch.setattr(compiling, "_trace", lambda *given: traced.append(given) or len(traced))
    monkeypatch.setattr(compiling, "_compiled", {})

    def number(hook):
        static = Static("bfloat16", 64, 64, False, False, False, mask=hook)
        return compiling.compiled(static, chosen(static))

    assert [number(MaskHook(key, max)) for key in ("a", "a", "b", "a")] == [1, 1, 2, 1]
    # Nor are a score hook and a mask hook of one key the same
    static = Static("bfloat16", 64, 64, False, False, False, score=ScoreHook("a", max))
    assert compiling.compiled(static, chosen(static)) == 3


def test_the_functions_are_in_the_code():
    """Kernels of two masks differ, and by the constant that says so."""
    one, other = (
        MaskHook(f"{size}", lambda batch, head, query, key, size=size: query - key < size) for size in (1001, 1003)
    )
    found = []
    for mask in (one, other):
        static = Static("bfloat16", 64, 64, False, False, False, mask=mask)
        found.append(compiling.cubin(static, chosen(static)))
    assert found[0] != found[1]


@pytest.mark.parametrize("hook", [DISTANCE, BENT, EXPLODING], ids=lambda hook: hook.key)
def test_gradients_of_the_hooks_that_tests_use(hook):
    assert same_gradient(hook)

"""Every kind of kernel compiles to sm_90a without a GPU, into the instructions it was written for."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compiled import code, kernels
from guarded_softmax import GuardedSoftmax

from hopper_fa3 import compile as compiling
from hopper_fa3 import machine_code, plan
from hopper_fa3.kernels.softmax import LOWEST_SHIFT, SUM_LIMIT
from hopper_fa3.problem import BackwardStatic, Static

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import table_kernels

ROOT = Path(__file__).parent.parent
WINDOWS = [row[:2] for row in plan.TABLE if row[2]]
KINDS = [
    Static(dtype, *row, left_bound, negative_scale)
    for dtype, row, left_bound, negative_scale in (
        *((dtype, row, False, False) for row in plan.TABLE for dtype in ("bfloat16", "float16")),
        ("bfloat16", (64, 256, True), False, False),
        ("float16", (128, 128, True), False, True),
        *(("float16" if row[0] == 128 else "bfloat16", (*row, True), True, False) for row in WINDOWS),
        ("float16", (64, 64, True), True, True),
    )
]


def name(static):
    return plan.forward_config(static, plan.choose(static)).name


@pytest.mark.parametrize("static", KINDS, ids=name)
def test_machine_code(static):
    chosen = plan.choose(static)
    config, found = plan.forward_config(static, chosen), code(static)
    assert found.name.startswith(config.name)  # what a profiler shows
    # First block, masked loop, unmasked loop, with a left bound that of the left side, and in the loops again: Q Kᵀ in
    # steps of 16 head dims; P V in the loops and once at the end
    scores, output = static.head_dim // 16, config.tile_n // 16
    loops = 3 if static.left_bound else 2
    assert found.counts["HGMMA"] == (1 + 2 * loops) * scores + (1 + loops) * output
    # Three fences a loop before groups of WGMMAs and two more, and so many waits for them. Where ptxas cannot tell
    # which registers they use it serialises them: a fence and a wait for each.
    assert found.counts["WARPGROUP"] <= 6 * loops + 4
    assert found.counts["UTMALDG"] >= 3
    assert found.counts["USETMAXREG"] == 2
    assert (found.stack, found.local, found.spills) == (0, 0, 0)
    assert found.registers == 65536 // config.threads // 8 * 8  # setmaxnreg starts from an even split
    # One exponential a score in the first block and the loops, and a few for rescaling and the LSE
    exponentials = (1 + loops) * config.tile_n // 2
    assert exponentials <= found.counts["MUFU"] <= exponentials + 32


GRADIENTS = [
    (static, plan.choose_backward(static))
    for static in table_kernels.chosen().values()
    if isinstance(static, BackwardStatic)
]
# All that adds code at once: a gradient of the LSE, an order of the sums, parts of dK and dV
ALL_AT_ONCE = plan.BackwardPlan(tile_m=64, stages=2, split_heads=True)
GRADIENTS += [(BackwardStatic("float16", 96, 128, True, True, True, left), ALL_AT_ONCE) for left in (False, True)]
WINDOWS_OF_GRADIENTS = [BackwardStatic("bfloat16", dim, dim, True, True, dim == 128, True) for dim in (64, 128)]
GRADIENTS += [(static, plan.choose_backward(static)) for static in WINDOWS_OF_GRADIENTS]


@pytest.mark.parametrize(("static", "chosen"), GRADIENTS, ids=[plan.backward_config(*each).name for each in GRADIENTS])
def test_machine_code_of_gradients(static, chosen):
    config = plan.backward_config(static, chosen)
    before, found, *others = (machine_code.parse(*texts) for texts in kernels(static, chosen))
    # What a profiler shows, and the order of launch
    ends = ("_before", "", "_add", "_behind") if config.key_parts else ("_before", "", "_behind")
    names = [f"{config.name}{end}_{place}" for place, end in enumerate(ends)]
    assert [each.name for each in (before, found, *others)] == names
    for each in (before, found, *others):
        assert (each.stack, each.local, each.spills) == (0, 0, 0)
    assert not any(family in each.counts for each in (before, *others) for family in ("HGMMA", "UTMALDG"))
    # S in steps of 16 head dims; dP; dV and dK in steps of 16 queries; dQ in steps of 16 keys. A head's first S, the
    # masked loop, the unmasked loop, with a left bound one more, and the last step, which has no next S but also its
    # own dQ; in one of the two orders of products also the second step, which has no dQ.
    scores, dp, by_queries, dq = (x // 16 for x in (config.head_dim, config.head_dim_v, config.tile_m, config.tile_n))
    loop = scores + dp + 2 * by_queries + dq
    seconds, loops = int(not config.early_sums), 3 if static.left_bound else 2
    assert found.counts["HGMMA"] == scores + loops * loop + (loop - scores + dq) + seconds * (loop - dq)
    # A fence before each of the head's first S, the loops' five groups and the last step's five, and the waits: 1, 4 a
    # loop, 4. Where ptxas serialises WGMMAs there is a fence and a wait for each.
    assert found.counts["WARPGROUP"] <= 2 + loops * 9 + 9 + seconds * 8
    assert found.counts["UTMALDG"] >= 4
    assert found.counts["USETMAXREG"] == 2
    assert found.registers == 65536 // config.threads // 8 * 8
    # An exponential a score in three to five places but for the polynomials, in the unmasked loop or with a left bound
    # in all, and a few for the tile scheduler's divisions
    places = 1 + loops + seconds
    polynomials = (places if static.left_bound else 1) * config.polynomial_columns / 4
    exponentials = config.tile_m // 2 * (places - polynomials)
    assert exponentials <= found.counts["MUFU"] <= exponentials + 32


def test_unmasked_loop_has_no_mask_arithmetic():
    # Mask arithmetic selects each score once in the first block and twice in the masked loop, where it may be made
    # again, not a fourth time
    static = Static("bfloat16", 128, 128, False, False, False)
    elements = plan.choose(static).tile_n // 2
    assert 3 * elements <= code(static).counts["FSEL"] < 4 * elements


def test_the_first_shift_stays_finite():
    """An infinite one would make the exponent of a masked score inf - inf. From it every visible score is a growth."""
    lowest = torch.tensor(LOWEST_SHIFT)
    assert lowest.dtype == torch.float32 and lowest.isfinite() and lowest < 0.99 * torch.finfo(torch.float32).min
    assert torch.exp2(-(2.0**127) - lowest) > SUM_LIMIT and torch.exp2(-torch.tensor(torch.inf) - lowest) == 0


def test_the_emulation_has_the_limits_of_the_kernel():
    assert (GuardedSoftmax.limit, GuardedSoftmax.lowest) == (SUM_LIMIT, LOWEST_SHIFT)


def test_compiled_entry_is_found_again():
    static = Static("bfloat16", 64, 64, False, False, False)
    before = compiling.cached()
    first = compiling.compiled(static, plan.choose(static))
    assert compiling.cached() == before + 1
    assert compiling.compiled(Static(*static), plan.choose(static)) is first
    assert compiling.cached() == before + 1
    other = plan.choose(static)._replace(pingpong=False)
    assert compiling.compiled(static, other) is not first


def test_another_target_in_the_environment_is_refused():
    environment = os.environ | {"CUTE_DSL_ARCH": "sm_100a"}
    command = [sys.executable, "-c", "import hopper_fa3.compile"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode and "CUTE_DSL_ARCH must be sm_90a or unset, got sm_100a" in done.stderr


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def test_kernels_import_neither_torch_nor_the_host_side():
    found = {module for path in (ROOT / "kernels").glob("*.py") for module in imported_modules(path)}
    assert "cutlass" in found
    assert not found & {"torch", "hopper_fa3", "numpy"}


def test_tracing_needs_no_torch_in_kernels():
    script = (
        "import sys, importlib; sys.modules['torch'] = None\n"
        "sys.path.insert(0, sys.argv[1]); import kernels.config; kernels.config.ForwardConfig\n"
        "print('imported')"
    )
    done = subprocess.run([sys.executable, "-c", script, str(ROOT)], capture_output=True, text=True)
    assert done.stdout == "imported\n", done.stderr


def test_the_folder_kernels_is_not_importable_from_elsewhere(tmp_path):
    script = (
        "from importlib.util import find_spec as find\n"
        "print(find('hopper_fa3') and (find('kernels'), find('hopper_fa3.kernels') is not None))"
    )
    installed = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # not the checkout
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=installed)
    if done.stdout == "None\n":
        pytest.skip("hopper_fa3 is not installed for this interpreter: it runs from the checkout")
    assert done.stdout == "(None, True)\n", done.stderr

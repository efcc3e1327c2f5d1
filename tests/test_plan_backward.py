"""The plans of the gradients: every pair of head dims gives kernels that the hardware can hold."""

import itertools
from collections import defaultdict
from types import SimpleNamespace

import pytest
from cases import BACKWARD, bounds

from hopper_fa3 import plan
from hopper_fa3.kernels.barriers import BackwardBarrier, WideBarrier
from hopper_fa3.kernels.config import HEAD_DIM_CLASSES, BackwardConfig
from hopper_fa3.kernels.query_config import QueryConfig
from hopper_fa3.problem import BackwardStatic, Packed, Problem

GRID = [
    BackwardStatic(dtype, head_dim, head_dim_v, right_bound, lse_gradient, deterministic)
    for dtype, head_dim, head_dim_v, right_bound, lse_gradient, deterministic in itertools.product(
        ("bfloat16", "float16"), HEAD_DIM_CLASSES, HEAD_DIM_CLASSES, (False, True), (False, True), (False, True)
    )
]
WIDE = [pair for pair in itertools.product(HEAD_DIM_CLASSES, repeat=2) if max(pair) > 128]


def config_of(head_dim, head_dim_v, **changes):
    values = {"dtype": "bfloat16", "right_bound": False, "tile_m": 64, "stages": 2}
    return BackwardConfig(head_dim=head_dim, head_dim_v=head_dim_v, **{**values, **changes})


@pytest.mark.parametrize("static", GRID, ids=lambda static: "-".join(map(str, static)))
def test_every_plan_fits_the_hardware(static):
    config = plan.backward_config(static, plan.choose_backward(static))
    config.check()
    assert config.smem_bytes() <= 227 * 1024
    if not config.sums:
        # A consumer's accumulators and operand: dK or dV, scores, and these in 16 bit
        assert (max(static.head_dim, static.head_dim_v) + config.tile_m) // 2 + config.tile_m // 4 + 24 <= 240
        assert not config.turns
        return
    # dQ: equal pieces, one a warpgroup, that are the head and whole swizzle atoms of 64, 32 or 16 columns
    assert config.query_pieces * config.column_pieces == config.consumer_warpgroups
    assert static.head_dim == config.column_pieces * config.dq_columns
    assert config.dq_columns % 16 == 0 and config.dq_columns // 8 % config.sum_rounds == 0
    # A part of a piece is whole vectors of every thread, and a bulk copy's multiple of 16 bytes
    assert config.piece_floats // config.sum_rounds % 512 == 0
    # Each consumer's largest accumulators: dK and dV, and dQ's piece
    assert (static.head_dim + static.head_dim_v + config.dq_columns) // 2 + 24 <= config.registers[1]


WINDOW = {"left_bound": True, "right_bound": True}


@pytest.mark.parametrize(
    ("group", "window", "head_dim", "changes", "expected"),
    [
        (1, 4096, 64, WINDOW, True),
        (2, 128, 64, WINDOW, False),
        (1, 128, 64, {**WINDOW, "softcap": True}, False),
        (1, 256, 128, WINDOW, True),
        (1, 257, 128, WINDOW, False),
        (4, 128, 128, WINDOW, False),
        (1, 128, 96, WINDOW, False),
        (1, None, 64, {"packed": Packed(False, False)}, True),
        (1, None, 128, {"packed": Packed(False, False)}, False),
        (1, None, 64, {}, False),
        (4, None, 64, {"deterministic": True}, True),
        (1, None, 256, {"deterministic": True}, False),
    ],
    ids=str,
)
def test_sums_in_turns(group, window, head_dim, changes, expected):
    static = BackwardStatic("bfloat16", head_dim, head_dim, False, False, False)._replace(**changes)
    sizes = 1, 8192, 8192, 4 * group, 4, head_dim, head_dim
    problem = Problem(None, None, *sizes, softmax_scale=1.0, left=window, right=None if window is None else 0)
    static, chosen = plan.backward_choice(static, problem)
    assert static.deterministic == expected == plan.backward_config(static, chosen).turns


@pytest.mark.parametrize("pair", [pair for pair in WIDE if config_of(*pair).roles], ids=str)
def test_the_kernel_of_dq_fits_the_hardware(pair):
    config = QueryConfig("bfloat16", *pair, False)
    assert config.smem_bytes() <= 227 * 1024
    producer, consumer = config.registers
    assert 128 * (producer + config.consumer_warpgroups * consumer) <= 65536
    # dQ, S and dP, and dS in 16 bit
    assert pair[0] // 2 + config.tile_n + config.tile_n // 4 + 24 <= consumer
    # As many tiles of V as fit beside Q, dO and two of K
    both = 1024 + 2 * (128 * sum(pair) + 2 * 64 * sum(pair))
    assert (config.value_stages, config.smem_bytes()) == ((2, both) if both <= 232_448 else (1, both - 128 * pair[1]))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "tile_n", "do_stages", "sum_rounds", "smem"),
    [
        # K and V, two stages of Q and dO, three of dS, dQ, and barriers with row statistics
        (128, 128, 128, 2, 1, 65_536 + 65_536 + 49_152 + 32_768 + 2048),
        # Two of dS; dQ in halves
        (192, 128, 128, 2, 2, 81_920 + 81_920 + 32_768 + 24_576 + 2048),
        # 64 keys; P of two steps, and nothing for dQ
        (192, 192, 64, 2, 1, 49_152 + 98_304 + 16_384 + 2048),
        (256, 256, 64, 2, 1, 65_536 + 131_072 + 16_384 + 2048),
    ],
)
def test_shared_memory(head_dim, head_dim_v, tile_n, do_stages, sum_rounds, smem):
    config = config_of(head_dim, head_dim_v)
    assert (config.tile_n, config.do_stages, config.sum_rounds, config.smem_bytes()) == (
        tile_n,
        do_stages,
        sum_rounds,
        smem,
    )


def test_as_many_keys_as_registers_hold():
    """The more keys a tile has, the less often dQ goes to memory."""
    roles = {pair for pair in WIDE if config_of(*pair).roles}
    # Accumulators for 128 keys, and 48 registers for P and dP, or dQ's piece where that is more
    assert roles == {pair for pair in WIDE if sum(pair) // 2 + max(48, config_of(*pair).dq_columns // 2) > 216}
    assert {(192, 128), (64, 256)} <= set(WIDE) - roles and {(192, 192), (256, 64), (256, 256)} <= roles
    assert all(config_of(*pair).tile_n == (64 if pair in roles else 128) for pair in WIDE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 80}, "head_dim class must be one of"),
        ({"head_dim_v": 80}, "head_dim_v class must be one of"),
        ({"dtype": "float32"}, "dtype must be bfloat16 or float16, got float32"),
        ({"tile_m": 96}, "tile_m must be 64, or 128 at head dims up to 128, got 96"),
        ({"tile_m": 128}, "tile_m must be 64, or 128 at head dims up to 128, got 128"),
        ({"stages": 1}, "stages must be at least 2"),
        (
            {"unused": 16},
            "unused columns must be multiples of 16 below 64, none where a head dim is above 128, got 16 and 0",
        ),
        ({"unused_v": 8, "head_dim": 96, "head_dim_v": 96}, "unused columns must be multiples of 16 .* got 0 and 8"),
        ({"unused": 64, "head_dim": 128, "head_dim_v": 96}, "unused columns must be multiples of 16 .* got 64 and 0"),
        ({"split_tail": True, "right_bound": True}, "split_tail needs tiles of equal length"),
        ({"split_tail": True, "split_heads": True}, "split_tail needs tiles of equal length"),
        ({"split_tail": True, "deterministic": True, "head_dim": 64}, "split_tail needs tiles of equal length"),
        ({"stages": 3}, "shared memory must be at most 232448 bytes, got 280576"),
    ],
)
def test_illegal_configurations_name_the_rule(changes, message):
    config = config_of(**{"head_dim": 256, "head_dim_v": 256, **changes})
    with pytest.raises(ValueError, match=message):
        config.check()


@pytest.mark.parametrize(
    ("head_dims", "unused"),
    [
        ((128, 128), (0, 0)),
        ((112, 105), (16, 16)),
        ((104, 97), (16, 16)),
        ((96, 81), (0, 0)),
        ((80, 72), (16, 16)),
        ((65, 113), (16, 0)),
        # The smallest class, and heads for which the kernels cannot
        ((64, 40), (0, 0)),
        ((8, 80), (0, 16)),
        ((160, 160), (0, 0)),
        ((136, 80), (0, 0)),
    ],
)
def test_products_leave_out_columns_that_hold_nothing(head_dims, unused):
    classes = [plan.tile_class(dim) for dim in head_dims]
    found = plan.unused_columns(SimpleNamespace(head_dim=head_dims[0], head_dim_v=head_dims[1]), config_of(*classes))
    assert found == unused
    config = config_of(*classes, unused=found[0], unused_v=found[1])
    config.check()
    for columns, dim, whole in zip((config.columns, config.columns_v), head_dims, classes, strict=True):
        assert dim <= columns <= whole and columns % 16 == 0


def test_barriers_do_not_share_ids():
    """Hardware has 16; 0 is the whole CTA's. Each name stands for two ids but SCORES and STEP, which have four."""
    sums = {BackwardBarrier.SUMS_FREE: 2, BackwardBarrier.SUMS_FULL: 2}
    for own in ({BackwardBarrier.SCORES: 4}, {WideBarrier.STEP: 4, WideBarrier.OWN: 2}):
        ids = [int(name) + index for name, count in (*sums.items(), *own.items()) for index in range(count)]
        assert len(set(ids)) == len(ids) and min(ids) > 0 and max(ids) < 16


def test_cases_for_the_gpu_meet_whole_and_split_heads():
    """Of every kernel that they compile; a K/V head of one query head cannot be split."""
    found = defaultdict(set)
    for case in BACKWARD:
        if 0 in (case.seqlen_q, case.seqlen_k):
            continue
        dims = (plan.tile_class(case.head_dim), plan.tile_class(case.head_dim_v))
        left, right = bounds(case.causal, case.window_size)
        sizes = (case.batch, case.seqlen_q, case.seqlen_k, case.heads, case.heads_k, case.head_dim, case.head_dim_v)
        problem = Problem(None, None, *sizes, softmax_scale=1.0, left=left, right=right)
        static = BackwardStatic(case.dtype, *dims, problem.bounded, False, False)
        config = plan.backward_config(static, plan.choose_backward(static))
        kernel = static, plan.unused_columns(case, config)
        found[kernel].add(plan.head_parts(problem, config, 132) > 1)
    assert {kernel: kinds for kernel, kinds in found.items() if kinds != {False, True}} == {}

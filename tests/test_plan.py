"""The plan table: every row and every unusual pair of head dims gives a kernel that the hardware can hold."""

import itertools
from dataclasses import replace

import pytest
import torch

from hopper_fa3 import plan
from hopper_fa3.hooks import MaskHook, ScoreHook
from hopper_fa3.kernels.config import HEAD_DIM_CLASSES, REGISTERS, BackwardConfig, ForwardConfig
from hopper_fa3.problem import BackwardStatic, Packed, Problem, Static

BOUNDS = ((False, False), (True, False), (True, True))  # right, left
GRID = [
    Static(dtype, head_dim, head_dim_v, *bounds, negative_scale)
    for dtype, head_dim, head_dim_v, bounds, negative_scale in itertools.product(
        ("bfloat16", "float16"), HEAD_DIM_CLASSES, HEAD_DIM_CLASSES, BOUNDS, (False, True)
    )
]


def problem(**changes):
    """A causal problem of one section's order of size; only the fields that plan.py reads matter."""
    values = {
        "device": None,
        "dtype": None,
        "batch": 2,
        "seqlen_q": 1000,
        "seqlen_k": 8192,
        "heads": 16,
        "heads_k": 4,
        "head_dim": 128,
        "head_dim_v": 128,
        "softmax_scale": 1.0,
        "left": None,
        "right": 0,
    }
    return Problem(**{**values, **changes})


@pytest.mark.parametrize("static", GRID, ids=lambda s: plan.forward_config(s, plan.choose(s)).name)
def test_every_plan_fits_the_hardware(static):
    config = plan.forward_config(static, plan.choose(static))
    config.check()
    assert config.smem_bytes() <= 227 * 1024
    producer, consumer = config.registers
    assert 128 * (producer + config.consumer_warpgroups * consumer) <= 65536
    assert producer % 8 == consumer % 8 == 0 and consumer <= 256
    probabilities = 0 if config.shared_p else config.tile_n // 4
    assert config.tile_n // 2 + probabilities + static.head_dim_v // 2 < consumer
    assert config.tile_m == 64 * config.consumer_warpgroups and config.threads <= 1024
    assert config.tile_n % 16 == 0 and config.head_dim % 16 == 0
    assert config.stages >= 2


def test_the_table_covers_the_speed_table():
    pairs = {(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)}
    assert {key for key in plan.TABLE} == {(*pair, bound) for pair in pairs for bound in (False, True)}


def test_a_window_has_the_plan_of_a_causal_mask():
    for pair in itertools.product(HEAD_DIM_CLASSES, repeat=2):
        windowed, causal = (plan.choose(Static("bfloat16", *pair, True, left, False)) for left in (True, False))
        assert windowed == causal


def test_a_score_hook_has_registers_for_what_it_computes():
    """A mask hook has the plans of calls without one."""
    for static in GRID:
        score, mask = static._replace(score=ScoreHook("a", max)), static._replace(mask=MaskHook("a", max))
        config = plan.forward_config(score, plan.choose(score))
        assert (config.consumer_warpgroups, config.shared_p) == (2, False) and config.broken_rule() is None
        assert plan.choose(score._replace(softcap=True)) == plan.choose(score)
        assert plan.choose(mask) == plan.choose(static)
        assert "_score" in config.name and "_mask" in plan.forward_config(mask, plan.choose(mask)).name
    for static in BACKWARD_GRID:
        score, mask = static._replace(score=ScoreHook("a", max, max)), static._replace(mask=MaskHook("a", max))
        config, of_mask = (plan.backward_config(each, plan.choose_backward(each)) for each in (score, mask))
        assert (config.tile_m, config.early_sums, of_mask.early_sums) == (64, False, False)
        assert config.broken_rule() is None and of_mask.broken_rule() is None
        # Beside P there is its derivative: as with softcap
        softcap = static._replace(softcap=True)
        assert config.roles == plan.backward_config(softcap, plan.choose_backward(softcap)).roles
        assert "_score" in config.name and "_mask" in of_mask.name


def test_a_left_bound_needs_a_right_one():
    for config in (ForwardConfig, BackwardConfig):
        values = {name: 64 for name in ("head_dim", "head_dim_v", "tile_m", "tile_n") if name in config.__match_args__}
        values |= {"dtype": "bfloat16", "right_bound": False, "left_bound": True, "stages": 2}
        values |= dict.fromkeys({"negative_scale", "pingpong", "overlap"} & {*config.__match_args__}, False)
        with pytest.raises(ValueError, match="left_bound needs right_bound"):
            config(**values).check()


def test_a_plan_differs_only_by_what_is_static():
    a, b = (Static("bfloat16", 128, 128, True, False, sign) for sign in (False, True))
    assert plan.choose(a) == plan.choose(b)
    assert plan.forward_config(a, plan.choose(a)) != plan.forward_config(b, plan.choose(b))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_n": 120}, "tile_n must be a multiple of 16 up to 256, got 120"),
        ({"tile_n": 256}, "shared memory must be at most 232448 bytes, got"),
        ({"tile_m": 96}, "tile_m must be 64, 128 or 192, got 96"),
        ({"stages": 1}, "stages must be at least 2"),
        ({"tile_m": 64, "pingpong": True}, "pingpong needs two or three consumer warpgroups"),
        ({"head_dim": 80}, "head_dim class must be one of"),
        ({"head_dim_v": 80}, "head_dim_v class must be one of"),
        ({"dtype": "float32"}, "dtype must be bfloat16 or float16, got float32"),
        ({"tile_m": 192, "tile_n": 128}, "S, P and O must leave 24 of 160 registers, got 0"),
        ({"head_dim": 64, "head_dim_v": 256, "tile_n": 128, "stages": 3}, "shared memory must be at most 232448 bytes"),
        ({"tile_n": 160, "shared_p": True}, "shared memory must be at most 232448 bytes, got 238592"),
        ({"tile_m": 192, "tile_n": 144, "stages": 2, "shared_p": True}, "shared memory must be at most"),
        (
            {"tile_m": 192, "head_dim": 64, "head_dim_v": 192, "tile_n": 96, "shared_p": True},
            "24 of 160 registers, got 16",
        ),
        (
            {"tile_m": 192, "head_dim": 64, "head_dim_v": 64, "tile_n": 208, "shared_p": True},
            "208 columns needs more than",
        ),
        ({"tile_m": 192, "head_dim": 64, "head_dim_v": 256, "tile_n": 16, "shared_p": True}, "than the 128 registers"),
    ],
)
def test_illegal_configurations_name_the_rule(changes, message):
    values = {
        "dtype": "bfloat16",
        "head_dim": 128,
        "head_dim_v": 128,
        "right_bound": False,
        "negative_scale": False,
        "tile_m": 128,
        "tile_n": 128,
        "stages": 2,
        "pingpong": True,
        "overlap": True,
    }
    config = ForwardConfig(**{**values, **changes})
    with pytest.raises(ValueError, match=message):
        config.check()


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "staged"),
    [(128, 128, True), (192, 128, False), (192, 192, False), (256, 256, False), (128, 256, False), (256, 64, False)],
)
def test_output_is_staged_where_shared_memory_has_room(head_dim, head_dim_v, staged):
    static = Static("bfloat16", head_dim, head_dim_v, True, False, False)
    config = plan.forward_config(static, plan.choose(static))
    assert config.staged_output == staged
    queries, stage = config.tile_m * head_dim, config.tile_n * (head_dim + head_dim_v)
    with_output = 1024 + 2 * (queries + config.stages * stage + config.tile_m * head_dim_v)
    assert (with_output <= 227 * 1024) == staged
    assert config.smem_bytes() == with_output - (0 if staged else 2 * config.tile_m * head_dim_v)


@pytest.mark.parametrize(
    ("head_dim", "tile_n", "smem", "spare"),
    [
        # Q, two stages of K and V, P (at least as wide as O, which takes its place) and 1 KiB of barriers
        (64, 192, 24_576 + 98_304 + 73_728 + 1024, 160 - 24 - 96 - 32),
        (96, 144, 36_864 + 110_592 + 55_296 + 1024, 160 - 24 - 72 - 48),
        (128, 128, 49_152 + 131_072 + 49_152 + 1024, 160 - 24 - 64 - 64),
        (128, 96, 49_152 + 98_304 + 49_152 + 1024, 160 - 24 - 48 - 64),  # O is wider than P
    ],
)
def test_p_in_shared_memory_takes_room_there_and_no_registers(head_dim, tile_n, smem, spare):
    static = Static("bfloat16", head_dim, head_dim, False, False, False)
    config = plan.forward_config(static, plan.Plan(192, tile_n, shared_p=True))
    config.check()
    assert (config.smem_bytes(), config.spare_registers(), config.staged_output) == (smem, spare, True)
    assert config.name.endswith(f"192x{tile_n}_shared_p")
    if tile_n > 96:
        with pytest.raises(ValueError, match="registers"):
            plan.forward_config(static, plan.Plan(192, tile_n)).check()


def test_registers_are_those_of_setmaxnreg():
    assert all(producer + count * consumer <= 512 for count, (producer, consumer) in REGISTERS.items())


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_tile_class_is_the_smallest_that_holds_it(head_dim):
    found = plan.tile_class(head_dim)
    assert found >= head_dim
    assert not any(head_dim <= other < found for other in HEAD_DIM_CLASSES)


def test_tile_class_refuses_more_than_256():
    with pytest.raises(ValueError, match="at most 256, got 257"):
        plan.tile_class(257)


def test_sections_keep_keys_and_values_in_l2():
    # 8192 keys of 128 + 128 values of 2 bytes are 4 MiB a K/V head: 8 of them in 32 MiB, 4 query heads each
    assert plan.heads_per_section(problem()) == 32
    assert plan.heads_per_section(problem(seqlen_k=12_000)) == 16  # 5 K/V heads would fit: a power of two
    assert plan.heads_per_section(problem(seqlen_k=2**20)) == 4  # one K/V head, its whole group
    assert plan.heads_per_section(problem(seqlen_k=8)) == 32  # never more than there are
    assert plan.heads_per_section(problem(right=None)) == 1
    assert plan.heads_per_section(problem(right=None, left=100)) == 32


@pytest.mark.parametrize(("seqlen_q", "expected"), [(1, 32), (128, 32), (129, 64), (1000, 256)])
def test_tiles(seqlen_q, expected):
    assert plan.tiles(problem(seqlen_q=seqlen_q), plan.Plan(128, 128)) == expected


BACKWARD_GRID = [
    BackwardStatic(dtype, head_dim, head_dim_v, right_bound, False, deterministic)
    for dtype, head_dim, head_dim_v, right_bound, deterministic in itertools.product(
        ("bfloat16", "float16"), (64, 96, 128), (64, 96, 128), (False, True), (False, True)
    )
]


def backward_name(static):
    return plan.backward_config(static, plan.choose_backward(static)).name


@pytest.mark.parametrize("static", BACKWARD_GRID, ids=backward_name)
def test_every_plan_of_gradients_fits_the_hardware(static):
    config = plan.backward_config(static, plan.choose_backward(static))
    assert config.smem_bytes() <= 227 * 1024
    producer, consumer = config.registers
    assert 128 * (producer + config.consumer_warpgroups * consumer) <= 65536
    # dK and dV, dP and dQ's piece in float32, Pᵀ and dSᵀ in 16 bit: dP, P and dQ together, or one after the other
    accumulators = (config.head_dim + config.head_dim_v) // 2
    dp_and_p, dq, ds = config.tile_m // 2 + config.tile_m // 4, config.dq_columns // 2, config.tile_m // 4
    step = dp_and_p + dq if config.early_sums else max(dp_and_p, ds + dq)
    assert accumulators + step < consumer
    # Pieces of 64 queries by equal shares of K's columns, one a warpgroup
    assert config.query_pieces * config.column_pieces == config.consumer_warpgroups
    assert config.column_pieces * config.dq_columns == config.head_dim
    assert config.dq_columns % 16 == 0
    assert config.descending == (static.right_bound and static.deterministic)


def test_shared_memory_of_the_gradients_is_what_the_kernels_lay_out():
    """The struct's size as the DSL sees it; a host function, traced without a GPU."""
    cute = pytest.importorskip("cutlass.cute")

    from hopper_fa3.compile import DTYPES  # not from kernels: it also chooses the target of the DSL
    from hopper_fa3.kernels.backward import BackwardKernel
    from hopper_fa3.kernels.backward_smem import backward_storage

    packed = [static._replace(packed=Packed(used_q=True, used_k=True)) for static in BACKWARD_GRID[::3]]
    configs = [plan.backward_config(static, plan.choose_backward(static)) for static in (*BACKWARD_GRID, *packed)]
    fields = [BackwardKernel(config).schedule.fields for config in configs]
    sizes = []

    @cute.jit
    def measure():
        for config, count in zip(configs, fields, strict=True):
            sizes.append(backward_storage(config, DTYPES[config.dtype], count).size_in_bytes())

    cute.compile(measure)
    assert sizes == [config.smem_bytes() for config in configs]


GRADIENTS = plan.backward_config(BackwardStatic("bfloat16", 128, 128, False, False, False), plan.BackwardPlan(64))


def part_steps(asked, config, parts):
    """Steps of every CTA's work in the kernel's order, for each of a K/V head's parts in turn."""
    share = -(-asked.group // parts)
    heads = [len(range(first, min(first + share, asked.group))) for first in range(0, asked.group, share)]
    added = plan.PART_STEPS + plan.ADD_STEPS if parts > 1 else 0
    tiles = plan.tile_steps(asked, config)
    section = plan.backward_heads_per_section(asked, config, parts, 132)
    all_heads = asked.batch * asked.heads_k
    for first in range(0, all_heads, section):
        for steps in reversed(tiles) if config.descending else tiles:
            for _ in range(first, min(first + section, all_heads)):
                yield from (steps * count + added for count in heads)


@pytest.mark.parametrize("left", [None, 0, 63, 64, 300])
@pytest.mark.parametrize("right", [None, 0, 37, 700])
@pytest.mark.parametrize("seqlen_q", [1, 64, 500, 1000])
@pytest.mark.parametrize("seqlen_k", [1, 128, 200, 777, 1500])
def test_steps_are_the_blocks_of_queries_that_see_a_tile(seqlen_k, seqlen_q, right, left):
    asked = problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, right=right, left=left)
    found = plan.tile_steps(asked, GRADIENTS)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if right is not None:
        visible = visible.tril(seqlen_k - seqlen_q + right)
    if left is not None:
        visible = visible.triu(seqlen_k - seqlen_q - left)
    expected = []
    for key in range(0, seqlen_k, GRADIENTS.tile_n):
        seen_by = visible[:, key : key + GRADIENTS.tile_n].any(1)
        expected.append(sum(bool(block.any()) for block in seen_by.split(GRADIENTS.tile_m)))
    assert found == expected


@pytest.mark.parametrize("sms", [1, 4, 5, 16])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 12])
@pytest.mark.parametrize("seqlen_k", [1, 128, 200, 500, 2000])
def test_parts_of_query_heads_save_time_or_are_one(seqlen_k, group, sms):
    asked = problem(batch=1, heads_k=2, heads=2 * group, seqlen_k=seqlen_k, right=None)

    def waves(parts):
        """All as long as the longest, an SM's one after the other."""
        steps = list(part_steps(asked, GRADIENTS, parts))
        return max(steps) * -(-len(steps) // sms)

    parts = plan.head_parts(asked, GRADIENTS, sms)
    # Equal shares leave no part without a head
    share = -(-group // parts)
    assert 1 <= parts <= group and (parts - 1) * share < group
    whole, chosen = waves(1), waves(parts)
    best = min(waves(count) for count in range(1, group + 1))
    assert chosen <= plan.SPLIT_SLACK * best if parts > 1 else best >= plan.SPLIT_GAIN * whole / plan.SPLIT_SLACK
    assert parts == 1 or chosen < plan.SPLIT_GAIN * whole
    assert all(waves(fewer) > plan.SPLIT_SLACK * best for fewer in range(1, parts))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("group", [1, 2, 5, 8])
@pytest.mark.parametrize("heads_k", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("length", [500, 1024, 2048, 4096, 8192])
def test_parts_of_causal_heads_are_about_the_best(length, heads_k, group, deterministic):
    """By dealing the work of a launch to 132 SMs, whoever is done taking the next piece."""
    asked = problem(batch=1, heads_k=heads_k, heads=group * heads_k, seqlen_q=length, seqlen_k=length)
    config = replace(GRADIENTS, right_bound=True, deterministic=deterministic)

    def time(parts):
        return dealt(part_steps(asked, config, parts), 132)

    chosen = time(plan.head_parts(asked, config, 132))
    assert chosen <= 1.25 * min(map(time, {-(-group // -(-group // count)) for count in range(1, group + 1)}))
    assert chosen <= 1.02 * time(1)


@pytest.mark.parametrize("left", [0, 128, 450, 1000, 4000])
@pytest.mark.parametrize("group", [1, 2, 5, 8])
@pytest.mark.parametrize("heads_k", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("length", [500, 2048, 8192])
def test_parts_of_heads_with_a_window_are_about_the_best(length, heads_k, group, left):
    left = min(left, length - 2)
    asked = problem(batch=1, heads_k=heads_k, heads=group * heads_k, seqlen_q=length, seqlen_k=length, left=left)
    for deterministic in (False, True):
        config = replace(GRADIENTS, right_bound=True, left_bound=True, deterministic=deterministic)
        times = {
            parts: dealt(part_steps(asked, config, parts), 132)
            for parts in {-(-group // -(-group // count)) for count in range(1, group + 1)}
        }
        chosen = times[plan.head_parts(asked, config, 132)]
        # Where windows are nearly as long as the keys the estimate is coarse
        assert chosen <= (1.45 if left > length / 2 else 1.25) * min(times.values()) and chosen <= 1.02 * times[1]


@pytest.mark.parametrize(
    ("seqlen_k", "heads", "heads_k", "parts"),
    [
        (8192, 16, 16, 1),  # nothing to split
        (8192, 16, 2, 1),  # 128 K/V tiles occupy 132 SMs
        (4096, 8, 2, 2),  # 64 tiles leave half of them idle
        (1024, 32, 4, 4),  # 32 tiles of 8 heads: 128 CTAs of 2
        (128, 40, 1, 40),
        # 128 parts would need 677 steps, but 11 GiB for dK and dV; two need 704, where one needs 768
        (89_344, 128, 1, 1),
        (20_000, 32, 1, 4),
    ],
)
def test_parts_on_an_h200(seqlen_k, heads, heads_k, parts):
    asked = problem(batch=1, seqlen_k=seqlen_k, heads=heads, heads_k=heads_k, right=None)
    assert plan.head_parts(asked, GRADIENTS, 132) == parts


@pytest.mark.parametrize(
    ("length", "heads", "heads_k", "parts", "deterministic_parts"),
    [
        (8192, 16, 16, 1, 1),  # nothing to split
        # 256 tiles of up to 1024 steps, 988 an SM on average: from the longest to the shortest they fill the SMs, the
        # other way round the longest, which come last, are half of the time
        (8192, 32, 4, 1, 3),
        (4096, 32, 4, 2, 4),  # 128 tiles: the longest are twice the average
        (2048, 32, 4, 4, 4),
        (128, 40, 1, 40, 40),
    ],
)
def test_parts_of_causal_heads_on_an_h200(length, heads, heads_k, parts, deterministic_parts):
    asked = problem(batch=1, seqlen_q=length, seqlen_k=length, heads=heads, heads_k=heads_k)
    config = replace(GRADIENTS, right_bound=True)
    assert plan.head_parts(asked, config, 132) == parts
    assert plan.head_parts(asked, replace(config, deterministic=True), 132) == deterministic_parts


def dealt(pieces, sms):
    """Steps of the busiest SM, where whoever is done takes the next piece."""
    loads = [0] * sms
    for steps in pieces:
        loads[loads.index(min(loads))] += steps
    return max(loads)


@pytest.mark.parametrize("sms", [1, 4, 5, 16, 132])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("seqlen_q", [1, 64, 500, 3000, 20_000])
@pytest.mark.parametrize("seqlen_k", [1, 128, 200, 1000, 17_000])
def test_a_cut_tail_saves_time(seqlen_k, seqlen_q, group, sms):
    asked = problem(batch=1, heads_k=3, heads=3 * group, seqlen_k=seqlen_k, seqlen_q=seqlen_q, right=None)
    tail = plan.split_tail(asked, GRADIENTS, sms)
    tiles, steps = 3 * -(-seqlen_k // 128), -(-seqlen_q // 64) * group
    whole = dealt([steps] * tiles, sms)
    if tail is None:
        # No tail, tiles too short to cut, or no gain of cutting the last wave in two
        in_two = dealt([-(-steps // 2) + plan.PART_STEPS] * 2 * (tiles % sms), sms) + 2 * plan.ADD_STEPS
        short = steps < 2 * plan.SHORTEST_PART
        assert tiles % sms == 0 or short or tiles // sms * steps + in_two >= plan.TAIL_GAIN * whole
        return
    cut = tiles - tail.whole_tiles
    assert cut in (tiles % sms, tiles % sms + sms) and 0 < cut <= tiles
    assert 1 < tail.parts <= steps // plan.SHORTEST_PART
    assert tail.slots(tiles) == cut * tail.parts == tail.indices(tiles) - tail.whole_tiles
    bounds = [part * steps // tail.parts for part in range(tail.parts + 1)]
    parts = [end - first + plan.PART_STEPS for first, end in itertools.pairwise(bounds)]
    assert dealt([steps] * tail.whole_tiles + parts * cut, sms) + tail.parts < whole


@pytest.mark.parametrize(
    ("facts", "tail"),
    [
        # 4096 tiles of 64 steps: 31 waves and 4 tiles
        ({"heads": 32, "heads_k": 32, "seqlen_k": 8192}, plan.Tail(4092, 8)),
        # 2048: 68 tiles behind 15 waves, whose 204 parts are two waves of a third each; not of half as many steps
        ({"heads": 16, "heads_k": 16, "seqlen_k": 8192, "seqlen_q": 8192}, plan.Tail(1980, 3)),
        ({"heads": 16, "heads_k": 16, "seqlen_k": 8192}, None),
        # 512 tiles of 256 steps: 116 of them in the last wave leave few SMs idle
        ({"heads": 16, "heads_k": 4, "seqlen_k": 8192}, None),
        ({"heads": 1, "heads_k": 1, "seqlen_k": 1024}, plan.Tail(0, 8)),
        # 31 waves and 4 tiles of 16 steps: less than 1 %
        ({"heads": 32, "heads_k": 32, "seqlen_k": 8192, "seqlen_q": 1024}, None),
        # No tail; tiles of unequal length
        ({"heads": 33, "heads_k": 33, "seqlen_k": 8192}, None),
        ({"heads": 32, "heads_k": 32, "seqlen_k": 8192, "right": 0}, None),
        # Steps that 32 bits do not count
        ({"heads": 32, "heads_k": 32, "seqlen_k": 8192, "seqlen_q": 2**31}, None),
    ],
)
def test_tails_on_an_h200(facts, tail):
    asked = problem(**{"seqlen_q": 4096, "right": None, **facts})
    config = replace(GRADIENTS, right_bound=asked.right is not None)
    assert plan.split_tail(asked, config, 132) == tail
    assert plan.split_tail(asked, replace(config, deterministic=True), 132) is None
    assert plan.split_tail(asked, replace(config, split_heads=True), 132) is None


def test_sections_of_gradients_keep_queries_and_sums_in_l2():
    def sections(head_dim=128, deterministic=False, **facts):
        config = BackwardConfig("bfloat16", head_dim, head_dim, True, 64, 2, deterministic)
        return plan.backward_heads_per_section(problem(**facts), config, 1, 60)

    # A row of Q and dO in 2 bytes and of dQ's sums in 4: 1024 bytes at head_dim 128. 1000 of them in 4 query heads are
    # 4 MB a K/V head: 8 in 32 MiB
    assert sections() == 8
    assert sections(seqlen_q=1100) == 4  # 7 would fit: a power of two
    assert sections(seqlen_q=2**20) == 1
    assert sections(seqlen_q=1, batch=1) == 4  # never more than there are
    # With a window the queries that a tile visits: 19 steps, and 5
    assert sections(seqlen_q=2**16, seqlen_k=2**16, right=0, left=1000) == 4
    assert sections(seqlen_q=2**16, seqlen_k=2**16, right=0, left=128) == 8
    assert sections(right=None) == 1
    assert sections(right=None, deterministic=True) == 8
    # A kernel without sums: half the bytes, and no turns
    assert sections(head_dim=256, seqlen_q=2000) == 8 and sections(seqlen_q=2000) == 4
    assert sections(head_dim=256, right=None, deterministic=True) == 1

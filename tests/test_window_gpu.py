"""Sliding windows on the GPU, forward and backward: values, masks that they equal, and keys that nobody sees."""

import itertools
import math
from dataclasses import replace

import check_gradients
import pytest
import torch
from cases import SMALL, Case
from check import check, compare, run
from check_gradients import arriving

from hopper_fa3 import flash_attn_func, plan
from hopper_fa3.problem import Problem

pytestmark = pytest.mark.gpu

# (head_dim, head_dim_v, dtype): every row of the plan's table, dims that do not fill their class, and both dtypes
DIMS = (
    (8, 8, "bfloat16"), (64, 64, "bfloat16"), (80, 80, "bfloat16"), (96, 96, "float16"), (128, 128, "bfloat16"),
    (128, 128, "float16"), (192, 128, "bfloat16"), (192, 192, "bfloat16"), (256, 256, "bfloat16"),
    (248, 256, "float16"), (64, 256, "bfloat16"),
)  # fmt: skip
# Of gradients in a fixed order, which have kernels of their own
ORDERED_DIMS = [dims for dims in DIMS if dims[2] == "bfloat16" and dims[:2] not in ((8, 8), (192, 192))]
# Alone; on the left only; narrower than a block, a warpgroup's rows, a tile; whole blocks; wider than most lengths
WINDOWS = ((0, 0), (0, -1), (5, -1), (3, 2), (31, 70), (63, 0), (64, 64), (127, 0), (128, 1), (200, 0), (700, 300))
# More keys, more queries (of which the first see none), ragged and whole blocks, one query, one key
LENGTHS = (
    (1, 1), (1, 1000), (200, 1), (64, 64), (113, 255), (129, 32), (255, 113), (512, 512), (700, 129), (300, 1500),
    (1000, 1000),
)  # fmt: skip
GRADIENT_LENGTHS = ((1, 300), (129, 32), (113, 255), (255, 113), (512, 512), (700, 129), (150, 900))


def case_of(head_dim, head_dim_v, dtype, **changes):
    return replace(SMALL, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, **changes)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_values_and_lse(dims, seqlen_q, seqlen_k, device):
    q, k, v = case_of(*dims, seqlen_q=seqlen_q, seqlen_k=seqlen_k).inputs(device)
    for window_size in WINDOWS:
        check(q, k, v, window_size=window_size)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), GRADIENT_LENGTHS)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_gradients(dims, heads, seqlen_q, seqlen_k, device):
    """Of heads with K and V of their own, and of two that share them, which are split and leave in parts."""
    case = case_of(*dims, batch=1, heads=heads, heads_k=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    q, k, v = case.inputs(device)
    dout, dlse = arriving(q, v)
    for window_size in WINDOWS[::2]:
        check_gradients.check(q, k, v, dout=dout, dlse=dlse, window_size=window_size)


@pytest.mark.parametrize("window_size", [(63, 0), (200, 50)])
@pytest.mark.parametrize(("group", "heads_k"), [(1, 2), (5, 2), (7, 1), (8, 2)])
def test_groups_of_heads(group, heads_k, window_size, device):
    case = replace(SMALL, seqlen_q=255, seqlen_k=600, heads=group * heads_k, heads_k=heads_k)
    q, k, v = case.inputs(device)
    check(q, k, v, window_size=window_size)
    dout, dlse = arriving(q, v)
    check_gradients.check(q, k, v, dout=dout, dlse=dlse, window_size=window_size)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window_size", [(128, 0), (1000, 0), (300, 77)])
def test_many_tiles(window_size, head_dim, device):
    """More tiles than SMs, so that a CTA takes several; the last ones are ragged."""
    for case in (Case(3, 1000, 1000, 10, 5, head_dim, head_dim), Case(1, 4096, 4500, 8, 2, head_dim, head_dim)):
        q, k, v = case.inputs(device)
        check(q, k, v, window_size=window_size)
        dout, dlse = arriving(q, v)
        check_gradients.check(q, k, v, dout=dout, dlse=dlse, window_size=window_size)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_few_ctas_take_all_tiles(head_dim, device):
    q, k, v = case_of(head_dim, head_dim, "bfloat16", seqlen_q=1000, seqlen_k=1100, heads=4, heads_k=2).inputs(device)
    margin = torch.cuda.get_device_properties(device).multi_processor_count - 2
    dout, dlse = arriving(q, v)
    for window_size in ((40, 0), (150, 20)):
        compare(*run(q, k, v, window_size=window_size, sm_margin=margin), q, k, v, window_size=window_size)
        given = {"dout": dout, "dlse": dlse, "how": {"sm_margin": margin}, "window_size": window_size}
        check_gradients.check(q, k, v, **given)


# Masks that windows equal


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(255, 255), (113, 255), (255, 113)])
def test_line_20_windows_that_hide_nothing_on_the_left_are_causal(seqlen_q, seqlen_k, device):
    q, k, v = replace(SMALL, seqlen_q=seqlen_q, seqlen_k=seqlen_k).inputs(device)
    causal = check(q, k, v, causal=True)
    for window_size in ((seqlen_k - 1, 0), (-1, 0), (2**31 - 1, 0)):
        assert all(map(torch.equal, causal, run(q, k, v, window_size=window_size))), window_size
    # One less hides the first key from the last query only
    _, lse = check(q, k, v, window_size=(seqlen_k - 2, 0))
    assert not torch.equal(lse[:, :, -1], causal[1][:, :, -1])


def test_line_20_a_right_side_of_2_to_the_31_minus_1_is_open(device):
    q, k, v = replace(SMALL, seqlen_q=300, seqlen_k=300).inputs(device)
    open_right = check(q, k, v, window_size=(40, -1))
    assert all(map(torch.equal, open_right, check(q, k, v, window_size=(40, 2**31 - 1))))
    check_gradients.check(q, k, v, window_size=(40, 2**31 - 1))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lines_15_and_20_more_queries_than_the_window_reaches(head_dim, device):
    """The first 33 of 129 queries see none of 32 keys; whole tiles of 1000 see none of 129."""
    for lengths, window_size, blind in (((129, 32), (32, 64), 33), ((1000, 129), (40, 10), 861)):
        case = case_of(head_dim, head_dim, "bfloat16", seqlen_q=lengths[0], seqlen_k=lengths[1])
        q, k, v = case.inputs(device)
        out, lse = check(q, k, v, window_size=window_size)
        assert not out[:, :blind].any() and (lse[:, :, :blind] == -math.inf).all()
        assert lse[:, :, blind:].isfinite().all()
        dout, dlse = arriving(q, v)
        dq, *_ = check_gradients.check(q, k, v, dout=dout, dlse=dlse, window_size=window_size)
        assert not dq[:, :blind].any()


def test_causal_takes_the_right_side(device):
    q, k, v = SMALL.inputs(device)
    expected = check(q, k, v, window_size=(30, 0))
    assert all(map(torch.equal, expected, check(q, k, v, window_size=(30, 5), causal=True)))


# Rows and scores


@pytest.mark.parametrize("window_size", [(20, 40), (100, 0), (300, 3)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_line_1_a_row_whose_first_blocks_are_masked_and_logits_near_minus_200(dtype, window_size, device):
    q, k, v = Case(1, 188, 448, 14, 2, 128, 128, dtype=dtype).inputs(device)
    q, k = 4.2 + 0.1 * q, -4.2 + 0.1 * k
    _, lse = check(q, k, v, window_size=window_size)
    assert (lse > -210).all() and (lse < -180).all()
    check_gradients.check(q, k, v, window_size=window_size)


@pytest.mark.parametrize("scale", [0.0, -0.3, math.sqrt(120), 17.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_line_19_scales(head_dim, scale, device):
    q, k, v = case_of(head_dim, head_dim, "bfloat16", seqlen_q=300, seqlen_k=500).inputs(device)
    for window_size in ((70, 0), (10, 150)):
        check(q, k, v, softmax_scale=scale, window_size=window_size)
        check_gradients.check(q, k, v, softmax_scale=scale, window_size=window_size)


def test_rows_outgrow_their_shift_in_every_block(device):
    q, k, v = replace(SMALL, seqlen_q=700, seqlen_k=700).inputs(device)
    k = (k * torch.linspace(30, 0.1, 700, device=device)[:, None, None]).to(k.dtype)
    for window_size in ((600, 0), (250, 40)):
        check(q, k, v, window_size=window_size)


@pytest.mark.parametrize(
    ("head_dim", "given"),
    [
        (64, plan.Plan(64, 128, pingpong=False)),
        (64, plan.Plan(192, 128, stages=4)),
        (128, plan.Plan(128, 16)),
        (128, plan.Plan(128, 128)),
        (96, plan.Plan(192, 144, shared_p=True)),
    ],
    ids=str,
)
def test_plans_that_the_table_does_not_hold(head_dim, given, device):
    q, k, v = case_of(head_dim, head_dim, "bfloat16", seqlen_q=700, seqlen_k=650, heads=30, heads_k=15).inputs(device)
    for window_size in ((0, 0), (100, 0), (300, 40)):
        compare(*run(q, k, v, window_size=window_size, plan=given), q, k, v, window_size=window_size)


# NaN in keys and values that a row does not see

NAN = Case(2, 1000, 1000, 4, 2, 64, 64)
BATCH, KEY, HEAD_K, QUERY_HEADS, COLUMN = 1, 437, 1, slice(2, 4), 7


def tile_m(q, k, v, **options):
    static = Problem.from_tensors(q, k, v, **options).static
    return plan.forward_config(static, plan.choose(static)).tile_m


@pytest.mark.parametrize("window_size", [(100, 0), (90, 30), (700, 5), (50, -1)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_nan_reaches_the_rows_that_see_it_and_in_v_at_most_their_tiles(head_dim, window_size, device):
    q, k, v = replace(NAN, head_dim=head_dim, head_dim_v=head_dim).inputs(device)
    clean, clean_lse = check(q, k, v, window_size=window_size)
    left, right = window_size
    row = torch.arange(1000, device=device)
    sees = (row - left <= KEY) & (row + (right if right >= 0 else 1000) >= KEY)
    rows = tile_m(q, k, v, window_size=window_size)
    in_tile = torch.stack([tile.any() for tile in sees.split(rows)]).repeat_interleave(rows)[:1000]
    for name, reached in (("k", sees), ("v", in_tile)):
        spoiled = {"k": k.clone(), "v": v.clone()}
        spoiled[name][BATCH, KEY, HEAD_K, COLUMN] = math.nan
        out, lse = run(q, spoiled["k"], spoiled["v"], window_size=window_size)
        mine = out[BATCH, :, QUERY_HEADS]
        mine = mine if name == "k" else mine[..., COLUMN : COLUMN + 1]
        assert mine[sees].isnan().all(), name
        mine[reached] = 0
        untouched = clean.clone()
        other = untouched[BATCH, :, QUERY_HEADS]
        (other if name == "k" else other[..., COLUMN : COLUMN + 1])[reached] = 0
        assert torch.equal(out, untouched), name
        if name == "v":
            assert torch.equal(lse, clean_lse)


@pytest.mark.parametrize("dims", ORDERED_DIMS, ids=str)
def test_keys_that_no_query_sees_may_hold_nan(dims, device):
    """The forward reads none of them. A K/V tile that nobody sees has gradients of 0 and reaches no other's."""
    q, k, v = case_of(*dims, seqlen_q=100, seqlen_k=1000).inputs(device)
    window_size, unseen = (50, 10), 850
    clean = check(q, k, v, window_size=window_size)
    arrived = dict(zip(("dout", "dlse"), arriving(q, v), strict=True))
    how = {"window_size": window_size, "deterministic": True}
    gradients = check_gradients.run(q, k, v, **arrived, **how)
    check_gradients.compare(gradients, q, k, v, **arrived, window_size=window_size)
    k[:, :unseen], v[:, :unseen] = math.nan, math.nan
    assert all(map(torch.equal, clean, run(q, k, v, window_size=window_size)))
    # Tiles have at most 128 keys: those of the last one that holds unseen keys may not be NaN
    first = unseen // 128 * 128
    k[:, first:unseen], v[:, first:unseen] = 1, 1
    again = check_gradients.run(q, k, v, **arrived, **how)
    assert all(map(torch.equal, gradients, again))
    assert not any(x[:, :unseen].any() for x in again[1:])


# The same bits in every run


@pytest.mark.parametrize("window_size", [(0, 0), (100, 0), (700, 33), (130, -1)])
@pytest.mark.parametrize("dims", ORDERED_DIMS, ids=str)
def test_deterministic_gradients_are_bit_equal(dims, window_size, device):
    q, k, v = case_of(*dims, seqlen_q=1000, seqlen_k=1113, heads=8, heads_k=2).inputs(device)
    arrived = dict(zip(("dout", "dlse"), arriving(q, v), strict=True))
    how = {"window_size": window_size, "deterministic": True}
    first = check_gradients.run(q, k, v, **arrived, **how)
    for _ in range(10):
        again = check_gradients.run(q, k, v, **arrived, **how)
        assert all(map(torch.equal, first, again))
    check_gradients.compare(first, q, k, v, **arrived, window_size=window_size)


def test_deterministic_gradients_on_few_ctas_and_in_long_order(device):
    """Whoever waits for a turn waits for a tile that was taken before, also where one CTA takes all tiles."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    q, k, v = Case(1, 3000, 2500, 4, 2, 128, 128).inputs(device)
    for window_size, margin in itertools.product(((300, 0), (64, 200)), (sms - 1, sms - 3, 0)):
        how = {"deterministic": True, "sm_margin": margin}
        check_gradients.check(q, k, v, window_size=window_size, how=how)


def test_a_value_of_the_window_compiles_nothing(device):
    q, k, v = replace(SMALL, seqlen_q=500, seqlen_k=500).inputs(device)
    from hopper_fa3 import compile as compiling

    flash_attn_func(q, k, v, window_size=(10, 0))
    before = compiling.cached()
    for window_size in ((11, 0), (300, 7), (0, -1)):
        flash_attn_func(q, k, v, window_size=window_size)
    assert compiling.cached() == before

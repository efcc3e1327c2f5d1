"""Lazy rescaling: rows whose exponents pass their shift by little, by much, by exactly the tolerance, alone, or never.

Every input goes through the emulation in lazy_softmax.py too, on the CPU, which counts how often a row's shift moved
and shows that wrong versions of the algorithm fail here.
"""

import math

import lazy_softmax as lazy
import pytest
import torch
from cases import bounds
from check import check
from lazy_softmax import LazySoftmax, known_scores, staircase

from hopper_fa3 import flash_attn_func, plan
from hopper_fa3.problem import Problem
from hopper_fa3.reference import standard

BLOCKS, ROWS = 6, 400  # blocks of keys, the last one ragged; queries, several Q tiles
BF16, FP16 = torch.bfloat16, torch.float16
# (head_dim, dtype, causal): tiles of 192 x 128, 128 x 128 and 128 x 80; kernels that other test files compile as well
KERNELS = [
    (64, BF16, False), (64, FP16, True), (128, FP16, False), (128, BF16, True), (256, BF16, False), (256, FP16, True),
]  # fmt: skip
# Growth from block to block in natural units, and moves of the shift that it must take in BLOCKS blocks. 5.5 is 7.93 in
# base 2, 5.75 is 8.30, the tolerance is 8.
GROWTHS = {
    2.75: 2, 5.5: 3, 5.75: 6, 128: 6, 8192: 6, -5.5: 1, -5.75: 1, -128: 1, -8192: 1, 0: 1,
}  # fmt: skip
# Neighbours in a warp, and the two rows of a thread, differ: rows that grow, grow slower, shrink, stay.
FACTORS = (1, 0.5, 0, -1, 0.25)
LN2 = math.log(2)  # as the softmax scale: exponents are the scores themselves


def tile_n(head_dim, dtype, causal=False):
    x = torch.empty(1, 1, 1, head_dim, dtype=dtype)
    return plan.choose(Problem.from_tensors(x, x, x, causal=causal).static).tile_n


def keys_of(head_dim, dtype, causal=False):
    """(length, tile_n) of BLOCKS blocks."""
    width = tile_n(head_dim, dtype, causal)
    return BLOCKS * width - width // 3, width


def factors(rows=ROWS):
    return torch.tensor(FACTORS).repeat(-(-rows // len(FACTORS)))[:rows]


def growing(growth, head_dim, dtype, causal=False):
    return known_scores(
        (factors(), staircase(*keys_of(head_dim, dtype, causal), growth)), dtype=dtype, head_dim=head_dim
    )


def growing_in_base_2(growth, head_dim, dtype, causal=False):
    """Growth in exponents; no row factors, so that it is the growth of all rows."""
    length, width = keys_of(head_dim, dtype, causal)
    return known_scores((torch.ones(ROWS), staircase(length, width, growth)), dtype=dtype, head_dim=head_dim)


def stairs_of(growth, rows, keys):
    return known_scores((factors(rows), staircase(keys, 128, growth)), dtype=BF16, head_dim=64)


def check_closely(q, k, v, *, attention=flash_attn_func, **options):
    """check(), and the LSE within what an exact score leaves: 8 u |score| for the roundings of score * scale, of the
    shift, of their difference and of the result; 160 u for exp2, log2 (2^-22 of at most 26) and the sum.
    """
    out, lse = check(q, k, v, attention=attention, **options)
    scale = options.get("softmax_scale") or q.shape[-1] ** -0.5
    left, right = bounds(options.get("causal", False))
    _, true = standard(q, k, v, softmax_scale=scale, left=left, right=right, compute_dtype=torch.float64)
    largest = (scale * (q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1))).abs().max()
    seen = true.isfinite()
    assert ((lse - true).abs()[seen] <= 2.0**-24 * (8 * largest + 160)).all()
    return out, lse


def inputs_by_name(name, head_dim, dtype, causal=False):
    """(tensors, options) of the constructions that more than one test uses."""
    length, width = keys_of(head_dim, dtype, causal)
    make = {"dtype": dtype, "head_dim": head_dim}
    ones = torch.ones(ROWS)
    if isinstance(name, (int, float)):
        # Beyond 1000, rounding shift = score * scale moves P by more than fp16 resolves: with LN2 nothing is rounded.
        return growing(name, head_dim, dtype, causal), {"softmax_scale": LN2 if abs(name) > 1000 else 1.0}
    if name == "all columns at 2^7.9":
        high = 5.5 * (torch.arange(length) < (BLOCKS - 1) * width)
        values = torch.randn(1, length, 1, head_dim, generator=torch.Generator().manual_seed(3)).abs() * 10000
        return known_scores((ones, high), values=values, **make), {"softmax_scale": 1.0}
    if name == "far below 0":
        return known_scores((ones, staircase(length, width, 5.75) - 512), **make), {"softmax_scale": 1.0}
    if name == "one late row half":  # only rows of the lower half of each warp grow
        alone = (torch.arange(ROWS) % 16 >= 8).float()
        return known_scores((alone, staircase(length, width, 5.75)), **make), {"softmax_scale": 1.0}
    # Exponents of +-1.3e30, all of a row's the same or far apart; LN2 keeps the products exact. 16-bit PyTorch, the
    # yardstick, would overflow in fp16: +-4096.
    steps = staircase(length, width, 0).round() * (torch.arange(length) % 7 == 0)
    rows = torch.where(torch.arange(ROWS) % 2 == 0, 1.0, -1.0)
    tensors = known_scores((rows, 16 + steps * (name == "huge, apart")), **make)
    return tensors, {"softmax_scale": LN2 * (2.0**96 if dtype == BF16 else 2.0**8)}


NAMED = ["all columns at 2^7.9", "far below 0", "one late row half", "huge, equal", "huge, apart"]


def spoiled(place, head_dim, dtype, causal=False):
    """A key in the first, middle or last visited block whose score is +inf, -inf or NaN, by row."""
    length, _ = keys_of(head_dim, dtype, causal)
    q, k, v = growing(5.75, head_dim, dtype, causal)
    kinds = torch.tensor([1, -1, -1, 0, -1, 1, -1]).repeat(ROWS)[:ROWS]
    q[0, :, 0, -1] = kinds.to(dtype)
    key = {"first": length - 3, "middle": length // 2, "last": 2}[place]
    k[0, key, 0, -1] = math.inf
    wrong = (kinds >= 0) & (key <= torch.arange(ROWS) + length - ROWS if causal else torch.tensor(True))
    return (q, k, v), wrong


def neighbours(base, head_dim, dtype):
    """(quiet inputs, loud inputs, loud rows): the two differ in one row of each warp, at another place in each warp."""
    length, width = keys_of(head_dim, dtype)
    row, key = torch.arange(ROWS), torch.arange(length)
    loud = row % 16 == row // 16 % 16
    if base == "at the tolerance":
        count = 8
        firsts, seconds = lazy.at_the_tolerance(count)
        below = torch.randint(1, 3000, (length,), generator=torch.Generator().manual_seed(4)) * 2.0**-9
        below[key % width == 5] = 0
        is_first = key >= (BLOCKS - 1) * width
        quiet = [
            ((row % count == i) & ~loud, torch.where(is_first, firsts[i], seconds[i]).double() - below)
            for i in range(count)
        ]
    else:
        quiet = [(factors() * ~loud, staircase(length, width, base))]
    silent, noisy = (
        known_scores(*quiet, (loud * on, staircase(length, width, 8)), dtype=dtype, head_dim=head_dim) for on in (0, 1)
    )
    return silent, noisy, loud


BASES = [0, 6.25, "at the tolerance"]


def same_bits(attention, base, head_dim, dtype, device="cpu"):
    """Rows give the same bits whether or not a neighbour in the warp grows, which must show in the neighbour's own."""
    silent, noisy, loud = neighbours(base, head_dim, dtype)
    one, other = (
        check(*(x.to(device) for x in tensors), attention=attention, softmax_scale=LN2 * lazy.FACTOR_OF_PAIRS)
        for tensors in (silent, noisy)
    )
    for before, after in ((one[0][0, :, 0], other[0][0, :, 0]), (one[1][0, 0], other[1][0, 0])):
        assert torch.equal(before[~loud], after[~loud])
        assert not torch.equal(before[loud], after[loud])


# With the kernel


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype", "causal"), KERNELS)
@pytest.mark.parametrize("name", [*GROWTHS, *NAMED])
def test_known_scores(name, head_dim, dtype, causal, device):
    tensors, options = inputs_by_name(name, head_dim, dtype, causal)
    check_closely(*(x.to(device) for x in tensors), causal=causal, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype", "causal"), KERNELS)
@pytest.mark.parametrize("growth", [8, 8 + 1 / 16, 8 - 1 / 16])
def test_growth_by_exactly_the_tolerance_and_next_to_it(growth, head_dim, dtype, causal, device):
    tensors = growing_in_base_2(growth, head_dim, dtype, causal)
    check_closely(*(x.to(device) for x in tensors), causal=causal, softmax_scale=LN2)


@pytest.mark.gpu
@pytest.mark.parametrize("growth", [5.5, 5.75, 128, -128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [-1.0, 2.0**-100, 2.0**96, -(2.0**-100)])
def test_scales(scale, causal, growth, device):
    """The same exponents from scores of another sign or size: a negative scale has row minima."""
    q, k, v = growing(growth, 128, BF16, causal)
    check_closely(q.to(device), (k / scale).to(device), v.to(device), causal=causal, softmax_scale=scale)


@pytest.mark.gpu
def test_scale_0_flattens_any_growth(device):
    check(*(x.to(device) for x in growing(8192, 128, BF16)), softmax_scale=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype", "causal"), KERNELS)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_scores_that_are_not_finite(place, head_dim, dtype, causal, device):
    tensors, wrong = spoiled(place, head_dim, dtype, causal)
    _, lse = check(*(x.to(device) for x in tensors), causal=causal, softmax_scale=1.0)
    assert torch.equal(lse[0, 0].isnan().cpu(), wrong)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "keys"), [(600, 500), (192, 320), (500, 900)])
@pytest.mark.parametrize("growth", [5.5, 5.75, -5.75, 8192])
def test_first_blocks_that_a_row_does_not_see(growth, rows, keys, device):
    """192 rows over blocks of 128 keys: the upper rows of a tile see nothing of the one or two blocks visited first."""
    tensors = stairs_of(growth, rows, keys)
    check_closely(*(x.to(device) for x in tensors), causal=True, softmax_scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (128, FP16), (256, BF16)])
@pytest.mark.parametrize("base", BASES)
def test_a_row_does_not_depend_on_its_neighbours(base, head_dim, dtype, device):
    same_bits(flash_attn_func, base, head_dim, dtype, device)


@pytest.mark.gpu
def test_values_as_large_as_float32_leaves_room_for(device):
    """O sums P up to 2^8 times V before it is divided: 2^8 * 704 keys * 2^105 stays below 2^128."""
    q, k, v = (x.to(device) for x in inputs_by_name("all columns at 2^7.9", 128, BF16)[0])
    check(q, k, v * 2.0**90, softmax_scale=1.0)


# On the CPU: the inputs are what they are meant to be, and tests of them can fail


@pytest.mark.parametrize(("growth", "moves"), GROWTHS.items())
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (256, FP16)])
def test_growths_move_shifts_as_often_as_meant(growth, moves, head_dim, dtype, one_thread):
    emulation = LazySoftmax(tile_n(head_dim, dtype))
    tensors, options = inputs_by_name(growth, head_dim, dtype)
    check_closely(*tensors, attention=emulation, **options)
    assert (emulation.moves[factors() == 1] == moves).all() and (emulation.moves[factors() == 0] == 1).all()
    assert 7.9 < emulation.largest <= 8 or growth not in (5.5, -5.5)
    check(*tensors, **options)


@pytest.mark.parametrize(("growth", "moves"), [(8, 3), (8 + 1 / 16, 6), (8 - 1 / 16, 3)])
def test_the_tolerance_itself_is_not_passed(growth, moves, one_thread):
    emulation = LazySoftmax(tile_n(64, FP16))
    check_closely(*growing_in_base_2(growth, 64, FP16), attention=emulation, softmax_scale=LN2)
    assert (emulation.moves == moves).all()
    assert emulation.largest == (growth if growth <= 8 else 0)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("head_dim", "dtype", "causal"), KERNELS[:3])
def test_named_inputs_with_the_emulation(name, head_dim, dtype, causal, one_thread):
    emulation = LazySoftmax(tile_n(head_dim, dtype, causal))
    tensors, options = inputs_by_name(name, head_dim, dtype, causal)
    check_closely(*tensors, attention=emulation, causal=causal, **options)
    check(*tensors, causal=causal, **options)
    if name == "all columns at 2^7.9":
        assert 7.9 < emulation.largest < 8 and (emulation.moves <= 2).all()


@pytest.mark.parametrize("scale", [-1.0, 2.0**-100, 2.0**96, -(2.0**-100)])
def test_scales_with_the_emulation(scale, one_thread):
    emulation = LazySoftmax(128)
    q, k, v = growing(5.75, 128, BF16)
    check_closely(q, k / scale, v, attention=emulation, softmax_scale=scale)
    assert (emulation.moves[factors() == 1] == BLOCKS).all()


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_that_are_not_finite_with_the_emulation(causal, place, one_thread):
    tensors, wrong = spoiled(place, 64, FP16, causal)
    for attention in (LazySoftmax(tile_n(64, FP16, causal)), flash_attn_func):
        _, lse = check(*tensors, attention=attention, causal=causal, softmax_scale=1.0)
        assert torch.equal(lse[0, 0].isnan(), wrong) and wrong.any() and not wrong.all()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_neighbours_with_the_emulation(base, dtype, one_thread):
    emulation = LazySoftmax(tile_n(64, dtype))
    same_bits(emulation, base, 64, dtype)
    _, _, loud = neighbours(base, 64, dtype)
    assert (emulation.moves[loud] == BLOCKS).all() and (emulation.moves[~loud] < BLOCKS).all()


# Wrong versions and what must catch them, in fp16 at head_dim 64: a growth, a named input, first blocks not seen
# ("unseen"), or neighbours' bits (("bits", base)).
CAUGHT = [
    (lazy.OutputNotRescaled, 5.75), (lazy.OutputNotRescaled, 5.5), (lazy.OutputNotRescaled, 128),
    (lazy.SumNotRescaled, 5.75), (lazy.SumNotRescaled, 5.5), (lazy.SumNotRescaled, 128),
    (lazy.NeverMovesAgain, 5.5), (lazy.NeverMovesAgain, 8192), (lazy.Tolerance17, 5.75),
    (lazy.StartsAtZero, "far below 0"), (lazy.StartsAtMinusInfinity, "unseen"),
    (lazy.FollowsDownwards, -128), (lazy.UpperHalfVotes, "one late row half"),
    (lazy.LseOfAFollowingShift, 5.5), (lazy.LseOfAFollowingShift, "all columns at 2^7.9"),
    (lazy.WarpMoves, ("bits", 6.25)), (lazy.TwoRoundings, ("bits", "at the tolerance")),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "by"), CAUGHT, ids=str)
def test_wrong_versions_are_caught(wrong, by, one_thread):
    emulation = wrong(tile_n(64, FP16))
    with pytest.raises(AssertionError):
        if isinstance(by, tuple):
            same_bits(emulation, by[1], 64, FP16)
        elif by == "unseen":
            check(*stairs_of(5.75, 192, 320), attention=emulation, causal=True, softmax_scale=1.0)
        else:
            tensors, options = inputs_by_name(by, 64, FP16)
            check(*tensors, attention=emulation, **options)

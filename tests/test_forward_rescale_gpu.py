"""The guard of the softmax: rows that outgrow their shift by little, by much, in one column or in all, alone, or never.

Every input goes through the emulation in guarded_softmax.py too, on the CPU, which counts in how many blocks a row
outgrew its shift and shows that wrong versions of the algorithm fail here.
"""

import math

import guarded_softmax as guarded
import pytest
import torch
from cases import bounds
from check import check, compare, run
from guarded_softmax import GuardedSoftmax, known_scores, staircase

from hopper_fa3 import flash_attn_func, plan
from hopper_fa3.problem import Problem
from hopper_fa3.reference import standard

BLOCKS, ROWS = 6, 400  # blocks of keys, the last one ragged; queries, several Q tiles
BF16, FP16 = torch.bfloat16, torch.float16
# (head_dim, dtype, causal): blocks of 128 and 80 keys, two and three consumer warpgroups, P in registers and in shared
# memory; kernels that other test files compile as well
KERNELS = [
    (64, BF16, False), (64, FP16, True), (128, FP16, False), (128, BF16, True), (256, BF16, False), (256, FP16, True),
]  # fmt: skip
# Growth in base 2 of a block's largest score, one key that stands out, and in how many of the BLOCKS blocks a row
# outgrows its shift. The limit is 2^10.
ONE_KEY = {
    4.75: 1, 9.75: 2, 10.25: 5, 16.5: 5, 128: 5, 8192: 5, 0: 0, -10.25: 0, -128: 0, -8192: 0,
}  # fmt: skip
# The same where all keys of a block are as large: growth beside that at which the sum of a thread reaches the limit
LEVEL = {"under": 2, "at": 2, "over": 5}
# Growth of one key in natural units, for softmax scales that are powers of two: 6.75 is 9.74 in base 2, 7.25 is 10.46
NATURAL = {6.75: 2, 7.25: 5, 128: 5, -128: 0}
SCALES = [-1.0, 2.0**-100, 2.0**96, -(2.0**-100)]
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


def beside_the_limit(width):
    """The exponent, a multiple of 1/4, at which the sum of width / 4 equal columns is "under", "at", "over" 2^10."""
    exact = 4 * (10 - math.log2(width / 4))
    at = exact / 4 if exact == int(exact) else None
    return {"under": (math.ceil(exact) - 1) / 4, "at": at, "over": (math.floor(exact) + 1) / 4}


def stairs(growth, length, width):
    """A growth of ONE_KEY or LEVEL as scores."""
    if growth not in LEVEL:
        return staircase(length, width, growth)
    step = beside_the_limit(width)[growth]
    # Where no equal columns add up to 2^10, one at exactly 2^10 does, beside others that vanish
    return staircase(length, width, 10, gap=200) if step is None else staircase(length, width, step, gap=None)


def growing(growth, head_dim, dtype, causal=False):
    length, width = keys_of(head_dim, dtype, causal)
    return known_scores((factors(), stairs(growth, length, width)), dtype=dtype, head_dim=head_dim)


def stairs_of(growth, rows, keys):
    return known_scores((factors(rows), stairs(growth, keys, 128)), dtype=BF16, head_dim=64)


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
    if name in ONE_KEY or name in LEVEL:
        return growing(name, head_dim, dtype, causal), {"softmax_scale": LN2}
    length, width = keys_of(head_dim, dtype, causal)
    make, ones = {"dtype": dtype, "head_dim": head_dim}, torch.ones(ROWS)
    if name in LARGE_P:
        key = torch.arange(length)
        height = 9.75 * (key % width == 5) if name == "one column of 2^9.75" else beside_the_limit(width)["under"]
        values = torch.randn(1, length, 1, head_dim, generator=torch.Generator().manual_seed(3)).abs() * 10000
        high = height * (key < (BLOCKS - 1) * width)
        return known_scores((ones, high), values=values, **make), {"softmax_scale": LN2}
    if name == "far below 0":
        return known_scores((ones, staircase(length, width, 10.25) - 512), **make), {"softmax_scale": LN2}
    if name == "one late row half":  # only rows of the lower half of each warp grow
        alone = (torch.arange(ROWS) % 16 >= 8).float()
        return known_scores((alone, staircase(length, width, 10.25)), **make), {"softmax_scale": LN2}
    # Exponents of +-1.3e30, all of a row's the same or far apart; LN2 keeps the products exact. 16-bit PyTorch, the
    # yardstick, would overflow in fp16: +-4096.
    steps = staircase(length, width, 0, gap=1).round() * (torch.arange(length) % 7 == 0)
    rows = torch.where(torch.arange(ROWS) % 2 == 0, 1.0, -1.0)
    tensors = known_scores((rows, 16 + steps * (name == "huge, apart")), **make)
    return tensors, {"softmax_scale": LN2 * (2.0**96 if dtype == BF16 else 2.0**8)}


LARGE_P = ("one column of 2^9.75", "all columns under the limit")  # P that stay as they are, and large V
NAMED = [*LARGE_P, "far below 0", "one late row half", "huge, equal", "huge, apart"]


def spoiled(place, head_dim, dtype, causal=False):
    """(tensors, rows that must be NaN): a key in the first, middle or last visited block whose score is +inf, -inf or
    NaN, by row; or beside each growing row one of the same threads that is NaN.
    """
    length, _ = keys_of(head_dim, dtype, causal)
    q, k, v = growing(128 if place == "beside" else 10.25, head_dim, dtype, causal)
    if place == "beside":
        wrong = torch.arange(ROWS) % 16 < 8
        q[0, wrong] = math.nan
        return (q, k, v), wrong
    kinds = torch.tensor([1, -1, -1, 0, -1, 1, -1]).repeat(ROWS)[:ROWS]
    q[0, :, 0, -1] = kinds.to(dtype)
    key = {"first": length - 3, "middle": length // 2, "last": 2}[place]
    k[0, key, 0, -1] = math.inf
    wrong = (kinds >= 0) & (key <= torch.arange(ROWS) + length - ROWS if causal else torch.tensor(True))
    return (q, k, v), wrong


PLACES = ["first", "middle", "last", "beside"]


def neighbours(base, head_dim, dtype):
    """(quiet inputs, loud inputs, loud rows): the two differ in one row of two in three warpgroups, each in another
    place.
    """
    length, width = keys_of(head_dim, dtype)
    row = torch.arange(ROWS)
    group = row // 64
    loud = (row % 64 == (21 * group + 5) % 64) & (group % 3 < 2)
    quiet = (factors() * ~loud, stairs(base, length, width))
    silent, noisy = (
        known_scores(quiet, (loud * on, staircase(length, width, 20)), dtype=dtype, head_dim=head_dim) for on in (0, 1)
    )
    return silent, noisy, loud


BASES = [0, 9.75, "under", "at"]


def same_bits(attention, base, head_dim, dtype, device="cpu"):
    """Rows give the same bits whether or not a neighbour in the warpgroup grows, which must show in that one's own."""
    silent, noisy, loud = neighbours(base, head_dim, dtype)
    one, other = (
        check(*(x.to(device) for x in tensors), attention=attention, softmax_scale=LN2) for tensors in (silent, noisy)
    )
    for before, after in ((one[0][0, :, 0], other[0][0, :, 0]), (one[1][0, 0], other[1][0, 0])):
        assert torch.equal(before[~loud], after[~loud])
        assert not torch.equal(before[loud], after[loud])


def check_rounding(attention, head_dim, dtype, causal=False, device="cpu"):
    """Exponents of 2^27, where float32 holds multiples of 16: the shift, rounded, lies 8 below each of a row's equal
    exponents, so that P is 2^8 and passes the limit for ever. The output is that of equal scores of 0.
    """
    length, _ = keys_of(head_dim, dtype, causal)
    score, scale = 2.0**26 * 1.75 + 32, LN2 * 1.25
    half = torch.full((ROWS,), 2.0**12)  # of the score, so that both parts are fp16
    q, k, v = (
        x.to(device)
        for x in known_scores(
            (half, torch.full((length,), score / 2**12, dtype=torch.float64)), dtype=dtype, head_dim=head_dim
        )
    )
    out, lse = run(q, k, v, attention=attention, softmax_scale=scale, causal=causal)
    right = bounds(causal)[1]
    _, count = standard(q, k, v, softmax_scale=0.0, right=right, compute_dtype=torch.float64)
    assert ((lse - (score * scale + count)).abs() <= 8 * 2.0**-24 * score * scale).all()
    compare(out, count.float(), q, k, v, softmax_scale=0.0, causal=causal)


# With the kernel


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype", "causal"), KERNELS)
@pytest.mark.parametrize("name", [*ONE_KEY, *LEVEL, *NAMED])
def test_known_scores(name, head_dim, dtype, causal, device):
    tensors, options = inputs_by_name(name, head_dim, dtype, causal)
    check_closely(*(x.to(device) for x in tensors), causal=causal, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("growth", NATURAL)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_scales(scale, causal, growth, device):
    """The same exponents from scores of another sign or size: a negative scale has row minima."""
    q, k, v = growing(growth, 128, BF16, causal)
    check_closely(q.to(device), (k / scale).to(device), v.to(device), causal=causal, softmax_scale=scale)


@pytest.mark.gpu
def test_scale_0_flattens_any_growth(device):
    check(*(x.to(device) for x in growing(8192, 128, BF16)), softmax_scale=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype", "causal"), KERNELS)
@pytest.mark.parametrize("place", PLACES)
def test_scores_that_are_not_finite(place, head_dim, dtype, causal, device):
    tensors, wrong = spoiled(place, head_dim, dtype, causal)
    _, lse = check(*(x.to(device) for x in tensors), causal=causal, softmax_scale=LN2)
    assert torch.equal(lse[0, 0].isnan().cpu(), wrong)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "keys"), [(600, 500), (192, 320), (500, 900)])
@pytest.mark.parametrize("growth", [9.75, 10.25, -10.25, 8192, "under", "over"])
def test_first_blocks_that_a_row_does_not_see(growth, rows, keys, device):
    """192 rows over blocks of 128 keys: the upper rows of a tile see nothing of the one or two blocks visited first."""
    tensors = stairs_of(growth, rows, keys)
    check_closely(*(x.to(device) for x in tensors), causal=True, softmax_scale=LN2)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (128, FP16), (256, BF16)])
@pytest.mark.parametrize("base", BASES)
def test_a_row_does_not_depend_on_its_neighbours(base, head_dim, dtype, device):
    same_bits(flash_attn_func, base, head_dim, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype", "causal"), KERNELS)
def test_rounding_alone_passes_the_limit(head_dim, dtype, causal, device):
    check_rounding(flash_attn_func, head_dim, dtype, causal, device)


@pytest.mark.gpu
def test_values_as_large_as_float32_leaves_room_for(device):
    """O sums P V before it is divided: a row's P adds up to 2^12 a block; 5 blocks, V of 2^16 * 2^96: below 2^128."""
    q, k, v = (x.to(device) for x in inputs_by_name("all columns under the limit", 128, BF16)[0])
    check(q, k, v * 2.0**96, softmax_scale=LN2)


# On the CPU: the inputs are what they are meant to be, and tests of them can fail


@pytest.mark.parametrize(("growth", "blocks"), (ONE_KEY | LEVEL).items())
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (256, FP16)])
def test_rows_outgrow_their_shift_as_often_as_meant(growth, blocks, head_dim, dtype, one_thread):
    emulation = GuardedSoftmax(tile_n(head_dim, dtype))
    tensors, options = inputs_by_name(growth, head_dim, dtype)
    check_closely(*tensors, attention=emulation, **options)
    assert (emulation.moves[factors() == 1] == blocks).all() and (emulation.moves[factors() == 0] == 0).all()
    check(*tensors, **options)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("head_dim", "dtype", "causal"), KERNELS[:3])
def test_named_inputs_with_the_emulation(name, head_dim, dtype, causal, one_thread):
    emulation = GuardedSoftmax(tile_n(head_dim, dtype, causal))
    tensors, options = inputs_by_name(name, head_dim, dtype, causal)
    check_closely(*tensors, attention=emulation, causal=causal, **options)
    check(*tensors, causal=causal, **options)
    if name in LARGE_P and not causal:  # a causal row's first blocks may be later ones, as high as the others
        assert emulation.largest >= 4.75 and not emulation.moves.any()


@pytest.mark.parametrize("growth", NATURAL)
@pytest.mark.parametrize("scale", SCALES)
def test_scales_with_the_emulation(scale, growth, one_thread):
    emulation = GuardedSoftmax(128)
    q, k, v = growing(growth, 128, BF16)
    check_closely(q, k / scale, v, attention=emulation, softmax_scale=scale)
    assert (emulation.moves[factors() == 1] == NATURAL[growth]).all()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("causal", [False, True])
def test_scores_that_are_not_finite_with_the_emulation(causal, place, one_thread):
    tensors, wrong = spoiled(place, 64, FP16, causal)
    for attention in (GuardedSoftmax(tile_n(64, FP16, causal)), flash_attn_func):
        _, lse = check(*tensors, attention=attention, causal=causal, softmax_scale=LN2)
        assert torch.equal(lse[0, 0].isnan(), wrong) and wrong.any() and not wrong.all()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_neighbours_with_the_emulation(base, dtype, one_thread):
    emulation = GuardedSoftmax(tile_n(64, dtype))
    same_bits(emulation, base, 64, dtype)
    _, _, loud = neighbours(base, 64, dtype)
    assert loud.sum() == 5 and (emulation.moves[loud] == BLOCKS - 1).all() and (emulation.moves[~loud] < 3).all()


@pytest.mark.parametrize(("head_dim", "dtype", "causal"), KERNELS)
def test_rounding_with_the_emulation(head_dim, dtype, causal, one_thread):
    emulation = GuardedSoftmax(tile_n(head_dim, dtype, causal))
    check_rounding(emulation, head_dim, dtype, causal)
    assert emulation.largest == 8 and emulation.moves.max() == BLOCKS - 1


# Wrong versions and what must catch them, in fp16 at head_dim 64: known scores by name, first blocks not seen
# ("unseen", also where masked), neighbours' bits (("bits", base)), a NaN row beside each that grows, or rounding.
CAUGHT = [
    *((wrong, by) for wrong in (guarded.OutputNotRescaled, guarded.SumNotRescaled, guarded.ProductStillRuns,
                                guarded.SumsOfTheFirstPass, guarded.ScoresNotMadeAgain)
      for by in (9.75, 10.25, 128, "under", "over")),
    (guarded.NeverMovesAgain, 9.75), (guarded.NeverMovesAgain, 8192), (guarded.NeverMovesAgain, "over"),
    (guarded.NeverVotes, 9.75), (guarded.NeverVotes, 8192), (guarded.NeverVotes, "over"), (guarded.Limit17, 16.5),
    (guarded.StartsAtZero, "far below 0"), (guarded.StartsAtMinusInfinity, "unseen"),
    (guarded.NotMaskedAgain, "unseen"), (guarded.UntilItFits, "rounding"),
    (guarded.UpperHalfVotes, "one late row half"), (guarded.NaNSilencesItsThread, "beside"),
    (guarded.ThreadsDecideAlone, 10.25), (guarded.AllMove, 128), (guarded.AllMove, "unseen"),
    (guarded.AllMoveUpwards, ("bits", 9.75)), (guarded.AllMoveUpwards, ("bits", "under")),
    (guarded.DecidesByTheLargest, ("bits", 9.75)),
    (guarded.LseOfAFollowingShift, 9.75), (guarded.LseOfAFollowingShift, "one column of 2^9.75"),
    (guarded.LseOfAFollowingShift, "all columns under the limit"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "by"), CAUGHT, ids=str)
def test_wrong_versions_are_caught(wrong, by, one_thread):
    emulation = wrong(tile_n(64, FP16))
    with pytest.raises(AssertionError):
        if isinstance(by, tuple):
            same_bits(emulation, by[1], 64, FP16)
        elif by == "unseen":
            check(*stairs_of(10.25, 500, 900), attention=emulation, causal=True, softmax_scale=LN2)
        elif by == "beside":
            check(*spoiled(by, 64, FP16)[0], attention=emulation, softmax_scale=LN2)
        elif by == "rounding":
            check_rounding(emulation, 64, FP16)
        else:
            tensors, options = inputs_by_name(by, 64, FP16)
            check(*tensors, attention=emulation, **options)

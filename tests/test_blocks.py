"""Which keys a Q tile visits, which queries a K/V tile visits in the backward, in which order, and how query heads are
split: the kernels' own arithmetic, compiled for the CPU, against the visibility rule by brute force.
"""

import functools
import itertools
from dataclasses import dataclass, replace

import pytest
import torch

import hopper_fa3.compile  # noqa: F401  chooses the DSL's target, which cutlass takes when it is first imported

# isort: split
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

from hopper_fa3.kernels.args import BackwardRunTime, RunTime
from hopper_fa3.kernels.blocks import NO_QUERY, Band, KeyBlocks, QueryBlocks
from hopper_fa3.kernels.chunks import ChunkedBand, Reach
from hopper_fa3.kernels.schedule import Schedule

TILE_N = 8  # keys; small, so that few positions have every relation to it
ROWS = (4, 8)  # queries a step: half as many as keys and as many, as in the kernels
LENGTHS = [*itertools.product((1, 3, 4, 7, 8, 9, 13, 16, 21), (1, 5, 8, 9, 15, 16, 17, 24, 33))]


def evaluated(function, inputs, width):
    """Rows of ``function(*row)``, a tuple of ``width`` numbers, for rows of numbers; compiled, and run on the CPU."""

    @cute.jit
    def every(given: cute.Tensor, found: cute.Tensor):
        for row in range(given.shape[0]):
            values = function(*[given[row, column] for column in columns])
            for column in cutlass.range_constexpr(width):
                found[row, column] = values[column]

    columns = [*range(len(inputs[0]))]
    given, found = torch.tensor(inputs, dtype=torch.int32), torch.zeros(len(inputs), width, dtype=torch.int32)
    tensors = [from_dlpack(tensor).mark_layout_dynamic() for tensor in (given, found)]
    cute.compile(every, *tensors)(*tensors)
    return [tuple(row) for row in found.tolist()]


@dataclass(frozen=True)
class Chunks(ChunkedBand):
    """ChunkedBand of one chunk size, which takes bounds as Band does."""

    size: int = 1

    def key_limit(self, row, seqlen_q, seqlen_k, right):
        return ChunkedBand.key_limit(self, row, seqlen_q, seqlen_k, self.reach(right))

    def first_key(self, row, seqlen_q, seqlen_k, left):
        return ChunkedBand.first_key(self, row, seqlen_q, seqlen_k, self.reach(left))

    def first_query(self, key, seqlen_q, seqlen_k, right):
        return ChunkedBand.first_query(self, key, seqlen_q, seqlen_k, self.reach(right))

    def end_query(self, key, seqlen_q, seqlen_k, left):
        return ChunkedBand.end_query(self, key, seqlen_q, seqlen_k, self.reach(left))

    def reach(self, bound):
        return Reach(bound, cutlass.Int32(self.size))


BOUNDS = {"dense": (False, False), "causal": (True, False), "window": (True, True)}  # right, left
CHUNKS = {"chunks of 3": 3, "chunks of a block": 8, "chunks of 13": 13}


@pytest.fixture(params=[*BOUNDS, *CHUNKS])
def band(request):
    return band_of(request.param)


@functools.cache
def band_of(name):
    return Chunks(TILE_N, True, True, CHUNKS[name]) if name in CHUNKS else Band(TILE_N, *BOUNDS[name])


def problems(band):
    """(seqlen_q, seqlen_k, right, left) of Problem.kernel_bounds: a left bound hides a key of the last query, a right
    one a key of the first query, or nothing where there is a left one too.
    """
    for seqlen_q, seqlen_k in LENGTHS:
        if not band.left_bound:
            for right in range(seqlen_q - 1) if band.right_bound else [0]:
                yield seqlen_q, seqlen_k, right, 0
        else:
            rights = sorted({right for right in (0, 2, 7) if right < seqlen_q} | {seqlen_q - 1})
            for right, left in itertools.product(rights, range(seqlen_k - 1)):
                yield seqlen_q, seqlen_k, right, left


def visible(band, seqlen_q, seqlen_k, right, left):
    """Bool (seqlen_q, seqlen_k), by the visibility rule."""
    distance = torch.arange(seqlen_k)[None] - (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)
    seen = distance <= right if band.right_bound else torch.ones_like(distance, dtype=torch.bool)
    if band.chunked:
        keys = torch.arange(seqlen_k)
        behind = keys // band.size - (keys - distance) // band.size
        seen = seen & (behind == 0 if band.left_bound else behind <= 0)
    return seen & (distance >= -left) if band.left_bound else seen


@functools.cache
def visits(band, rows):
    """{(seqlen_q, seqlen_k, right, left): [QueryBlocks of each K/V tile]}"""

    def of_tile(n_block, seqlen_q, seqlen_k, right, left):
        return band.query_blocks(n_block, rows, seqlen_q, seqlen_k, right, left)

    asked = [(n, *each) for each in problems(band) for n in range(-(-each[1] // TILE_N))]
    found = {}
    for (_, *each), answer in zip(asked, evaluated(of_tile, asked, 4), strict=True):
        found.setdefault(tuple(each), []).append(QueryBlocks(*answer))
    return found


@pytest.mark.parametrize("rows", ROWS)
def test_a_tile_visits_the_queries_that_see_it(band, rows):
    """All of them and no block more, and only blocks in which every query sees every key go without a mask; those with
    a mask on the left only need no other.
    """
    for each, tiles in visits(band, rows).items():
        seen, right_only = visible(band, *each), visible(replace(band, left_bound=False), *each)
        for n_block, (first, unmasked, masked, end) in enumerate(tiles):
            keys = slice(n_block * TILE_N, (n_block + 1) * TILE_N)
            blocks = [block[:, keys].numpy() for block in seen.split(rows)]
            assert [b for b, block in enumerate(blocks) if block.any()] == [*range(first, end)], (each, n_block)
            whole = [b for b, block in enumerate(blocks) if block.shape[1] == TILE_N and block.all()]
            # A left bound may mask a ragged last block in vain
            extra = [b for b in whole if len(blocks[b]) < rows] if band.left_bound and masked < end else []
            assert whole == [*range(max(first, unmasked), masked), *extra], (each, n_block)
            left_only = [block[:, keys].numpy() for block in right_only.split(rows)][max(unmasked, masked) : end]
            assert all(block.shape[1] == TILE_N and block.all() for block in left_only), (each, n_block)


def test_the_queries_that_see_a_key(band):
    asked = [(key, *each) for each in problems(band) for key in range(-(-each[1] // TILE_N) * TILE_N)]

    def of_key(key, seqlen_q, seqlen_k, right, left):
        first = band.first_query(key, seqlen_q, seqlen_k, right)
        width = band.width(run_time(right, left))
        if width is None and band.left_bound:
            return first, band.end_query(key, seqlen_q, seqlen_k, left)
        return first, first + width if band.left_bound else cutlass.Int32(NO_QUERY)

    answers = evaluated(of_key, asked, 2)
    seen = {each: visible(band, *each).T.tolist() for each in problems(band)}
    for (key, *each), (first, end) in zip(asked, answers, strict=True):
        seqlen_q, seqlen_k, *_ = each
        if key >= seqlen_k:
            assert first > seqlen_q
        else:
            assert [first <= i < end for i in range(seqlen_q)] == seen[tuple(each)][key]


def run_time(right, left):
    return RunTime(None, right, left, None, None)


WARPGROUP_ROWS, WARPGROUPS = 4, 2


def test_a_query_tile_visits_the_keys_that_it_sees(band):
    """So do its warpgroups, in the tile's blocks: all blocks with a key that a row sees, none more; only blocks in
    which all rows see all keys go without a mask; with a left bound the first key is one that is seen.
    """
    rows = WARPGROUP_ROWS * WARPGROUPS

    def of_warpgroup(tile, warpgroup, seqlen_q, seqlen_k, right, left):
        place = seqlen_q, seqlen_k, right, left, band.origin(tile * rows, seqlen_q, seqlen_k, left)
        whole = band.blocks(tile * rows, cutlass.Int32(rows), *place)
        own = band.blocks(tile * rows + warpgroup * WARPGROUP_ROWS, cutlass.Int32(WARPGROUP_ROWS), *place)
        return (place[-1], *whole, *own, cutlass.Int32(band.end_is_masked(*own[1:4])))

    asked = [
        (tile, warpgroup, *each)
        for each in problems(band)
        for tile in range(-(-each[0] // rows))
        for warpgroup in range(WARPGROUPS)
    ]
    seen = {each: visible(band, *each).numpy() for each in problems(band)}
    for (tile, warpgroup, *each), answer in zip(asked, evaluated(of_warpgroup, asked, 12), strict=True):
        origin, whole, own, end_is_masked = answer[0], KeyBlocks(*answer[1:6]), KeyBlocks(*answer[6:11]), answer[11]
        first_row = tile * rows + warpgroup * WARPGROUP_ROWS
        of_tile = seen[tuple(each)][tile * rows : (tile + 1) * rows, origin:]
        of_warpgroup = seen[tuple(each)][first_row : min(first_row + WARPGROUP_ROWS, (tile + 1) * rows), origin:]
        assert not seen[tuple(each)][tile * rows : (tile + 1) * rows, :origin].any()
        assert origin == 0 or (band.left_bound and of_tile[:, 0].any())
        seen_keys = of_tile.any(0).nonzero()[0]
        assert whole.keys == (seen_keys[-1] + 1 if len(seen_keys) else 0)
        assert whole.first == 0 and (0 <= own.first < own.end <= whole.end or own.first == own.end == 0)
        for block in range(whole.end):
            keys = of_warpgroup[:, block * TILE_N : (block + 1) * TILE_N]
            assert keys.any() == (own.first <= block < own.end), (each, block)
            if keys.any():
                masked = not keys.all() or keys.shape[1] < TILE_N
                assert masked == (not own.inner <= block < own.full), (each, block)
                assert block < own.end - 1 or masked == end_is_masked
        assert not of_warpgroup[:, own.end * TILE_N :].any()


def test_blocks_from_the_diagonal_on():
    """The tile's last row's diagonal first, as near as there is a block; then all others once, from there to the first
    one and from the last one down. Those without a mask hold keys on one side of all diagonals of a warpgroup's rows.
    """
    band, rows = Band(TILE_N, False), WARPGROUP_ROWS * WARPGROUPS
    asked = [
        (tile * rows, warpgroup * WARPGROUP_ROWS, *lengths)
        for lengths in LENGTHS
        for tile in range(-(-lengths[0] // rows))
        for warpgroup in range(WARPGROUPS)
        if tile * rows + warpgroup * WARPGROUP_ROWS < lengths[0]
    ]
    most = -(-max(seqlen_k for *_, seqlen_k in asked) // TILE_N)

    def of_tile(row, own_row, seqlen_q, seqlen_k):
        bounds = seqlen_q, seqlen_k, None, None, cutlass.Int32(0)
        end = band.blocks(row, cutlass.Int32(rows), *bounds).end
        own = band.blocks(row + own_row, cutlass.Int32(WARPGROUP_ROWS), *bounds)
        order = band.diagonal_first(row, cutlass.Int32(rows), row + own_row, seqlen_q, seqlen_k, end)
        sides = (order.side(cutlass.Int32(behind), own)[1:4] for behind in range(2))
        return order.pivot, *(order.block(cutlass.Int32(step)) for step in range(most)), *itertools.chain(*sides)

    for (row, own_row, seqlen_q, seqlen_k), answer in zip(asked, evaluated(of_tile, asked, 1 + most + 6), strict=True):
        pivot, shift, blocks = answer[0], seqlen_k - seqlen_q, -(-seqlen_k // TILE_N)
        assert pivot == min(max(min(row + rows, seqlen_q) - 1 + shift, 0), seqlen_k - 1) // TILE_N
        taken = [*range(pivot, -1, -1), *range(blocks - 1, pivot, -1)]
        assert answer[1 : 1 + most][:blocks] == tuple(taken)
        found = [pivot]
        for inner, full, end in (answer[-6:-3], answer[-3:]):
            full = min(full, end - 1)  # as Consumer.other_blocks does
            found += range(end - 2, min(inner, full) - 1, -1)
            for block in range(min(inner, full), full):
                keys = range(block * TILE_N, (block + 1) * TILE_N)
                assert keys[-1] < seqlen_k
                own = [row + own_row + index + shift for index in range(WARPGROUP_ROWS)]
                assert keys[-1] <= own[0] or keys[0] >= min(own[-1], seqlen_q - 1 + shift)
        assert found == taken


def test_the_columns_of_a_row(band):
    """Those of both of a thread's rows, counted from its first key of a block; a side that is not masked has none."""
    asked = [(row, *each) for each in problems(band) for row in range(0, each[0] - 8, 3)]
    sides = band.sides

    def of_row(row, seqlen_q, seqlen_k, right, left):
        run, origin = run_time(right, left), band.origin(row, seqlen_q, seqlen_k, left)
        keys = band.row_keys(row, seqlen_q, seqlen_k, run, origin)
        firsts, limits = band.columns(keys, cutlass.Int32(TILE_N + 2), sides, run)
        firsts = firsts if sides.left else [cutlass.Int32(-NO_QUERY)] * 2
        blind = [cutlass.Int32(band.sees_none(keys, which)) for which in range(2)]
        return firsts[0], limits[0], blind[0], firsts[1], limits[1], blind[1], origin

    seen = {each: visible(band, *each).tolist() for each in problems(band)}
    for (row, *each), answer in zip(asked, evaluated(of_row, asked, 7), strict=True):
        for which, (first, limit, blind) in enumerate((answer[:3], answer[3:6])):
            of_row = seen[tuple(each)][row + 8 * which]
            start = answer[6] + TILE_N + 2
            assert [first <= key - start < limit for key in range(len(of_row))] == of_row, (row, each)
            assert bool(blind) == (not any(of_row))


@pytest.mark.parametrize("rows", ROWS)
def test_turns_follow_the_order_of_the_tiles(band, rows):
    """The tiles that visit a block have turns 0, 1, 2, ... in the order in which CTAs take them: whoever is waited for
    was taken before.
    """
    schedule = Schedule(TILE_N, dynamic=True, descending=band.right_bound)
    steps = [
        (n_block, block, *each)
        for each, tiles in visits(band, rows).items()
        for n_block, blocks in enumerate(tiles)
        for block in range(blocks.first, blocks.end)
    ]
    answers = evaluated(lambda n, b, *each: (band.turn(n, b, rows, *each[:3]),), steps, 1)
    turns = {step: turn for step, (turn,) in zip(steps, answers, strict=True)}
    order = {tiles: launched(schedule, tiles * TILE_N) for tiles in {-(-length // TILE_N) for _, length in LENGTHS}}
    for each, tiles in visits(band, rows).items():
        for block in range(-(-each[0] // rows)):
            visitors = [n for n in order[len(tiles)] if (n, block, *each) in turns]
            assert [turns[(n, block, *each)] for n in visitors] == [*range(len(visitors))], (each, block)


def launched(schedule, seqlen_k, heads=3, batch=2, section=4):
    """A head's K/V tiles in the order of their CTAs. Every tile of every head comes once, and in all heads in this
    order, also where a section ends inside a batch or is not full.
    """

    def of_tile(index, length):
        return schedule.coordinates(index, length, cutlass.Int32(heads), cutlass.Int32(batch), cutlass.Int32(section))

    tiles = -(-seqlen_k // TILE_N)
    found = evaluated(of_tile, [(index, seqlen_k) for index in range(tiles * heads * batch)], 3)
    orders = [[n for n, *at in found if at == [head, b]] for b in range(batch) for head in range(heads)]
    assert sorted(orders[0]) == [*range(tiles)] and all(order == orders[0] for order in orders)
    return orders[0]


@pytest.mark.parametrize("group", range(1, 13))
def test_every_query_head_belongs_to_one_part(group):
    """Of K/V heads split into any possible number of parts; none is empty: a CTA starts with a head's first step."""
    heads_k = 3
    asked = [
        (part, group * heads_k, heads_k, parts * heads_k)
        for parts in {-(-group // size) for size in range(1, group + 1)}
        for part in range(parts * heads_k)
    ]

    def of_part(part, heads, heads_k, head_parts):
        run = BackwardRunTime(*[None] * 5, head_parts, *[None] * 3)
        return run.heads_of(part, heads, heads_k)

    shares = {}
    for (*_, head_parts), (head_k, first, last) in zip(asked, evaluated(of_part, asked, 3), strict=True):
        assert head_k * group <= first < last <= (head_k + 1) * group
        shares.setdefault(head_parts, []).extend(range(first, last))
    assert all(heads == [*range(group * heads_k)] for heads in shares.values()) and shares

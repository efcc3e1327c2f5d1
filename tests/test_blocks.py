"""Which queries a K/V tile visits in the backward, in which order, and how query heads are split: the kernels' own
arithmetic, compiled for the CPU, against the visibility rule by brute force.
"""

import functools
import itertools

import pytest
import torch

import hopper_fa3.compile  # noqa: F401  chooses the DSL's target, which cutlass takes when it is first imported

# isort: split
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

from hopper_fa3.kernels.args import BackwardRunTime
from hopper_fa3.kernels.blocks import Band
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


def problems(right_bound):
    """(seqlen_q, seqlen_k, right) of problem.bounds: a right bound hides a key of the first query."""
    for seqlen_q, seqlen_k in LENGTHS:
        for right in range(seqlen_q - 1) if right_bound else [0]:
            yield seqlen_q, seqlen_k, right


def visible(seqlen_q, seqlen_k, right, right_bound):
    """Bool (seqlen_q, seqlen_k), by the visibility rule."""
    distance = torch.arange(seqlen_k)[None] - (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)
    return distance <= right if right_bound else torch.ones_like(distance, dtype=torch.bool)


@functools.cache
def visits(right_bound, rows):
    """{(seqlen_q, seqlen_k, right): [(first, unmasked, end) of each K/V tile]}"""
    band = Band(TILE_N, right_bound)

    def of_tile(n_block, seqlen_q, seqlen_k, right):
        return band.query_blocks(n_block, rows, seqlen_q, seqlen_k, right)

    asked = [(n, *each) for each in problems(right_bound) for n in range(-(-each[1] // TILE_N))]
    found = {}
    for (_, *each), answer in zip(asked, evaluated(of_tile, asked, 3), strict=True):
        found.setdefault(tuple(each), []).append(answer)
    return found


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("right_bound", [False, True])
def test_a_tile_visits_the_queries_that_see_it(right_bound, rows):
    """All of them and no block more, and only blocks in which every query sees every key go without a mask."""
    for each, tiles in visits(right_bound, rows).items():
        seen = visible(*each, right_bound)
        for n_block, (first, unmasked, end) in enumerate(tiles):
            blocks = [block[:, n_block * TILE_N : (n_block + 1) * TILE_N] for block in seen.split(rows)]
            assert [b for b, block in enumerate(blocks) if block.any()] == [*range(first, end)], (each, n_block)
            whole = [b for b, block in enumerate(blocks) if block.shape[1] == TILE_N and block.all()]
            assert whole == [*range(max(first, unmasked), end)], (each, n_block)


@pytest.mark.parametrize("right_bound", [False, True])
def test_the_first_query_that_sees_a_key(right_bound):
    band = Band(TILE_N, right_bound)
    asked = [(key, *each) for each in problems(right_bound) for key in range(-(-each[1] // TILE_N) * TILE_N)]
    answers = evaluated(lambda *given: (band.first_query(*given),), asked, 1)
    for (key, seqlen_q, seqlen_k, right), (first,) in zip(asked, answers, strict=True):
        if key >= seqlen_k:
            assert first > seqlen_q
        else:
            seen = visible(seqlen_q, seqlen_k, right, right_bound)[:, key]
            assert [i >= first for i in range(seqlen_q)] == seen.tolist()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("right_bound", [False, True])
def test_turns_follow_the_order_of_the_tiles(right_bound, rows):
    """The tiles that visit a block have turns 0, 1, 2, ... in the order in which CTAs take them: whoever is waited for
    was taken before.
    """
    band = Band(TILE_N, right_bound)
    schedule = Schedule(TILE_N, dynamic=True, descending=right_bound)
    steps = [
        (n_block, block, *each)
        for each, tiles in visits(right_bound, rows).items()
        for n_block, (first, _, end) in enumerate(tiles)
        for block in range(first, end)
    ]
    answers = evaluated(lambda n, b, *each: (band.turn(n, b, rows, *each),), steps, 1)
    turns = {step: turn for step, (turn,) in zip(steps, answers, strict=True)}
    order = {tiles: launched(schedule, tiles * TILE_N) for tiles in {-(-length // TILE_N) for _, length in LENGTHS}}
    for each, tiles in visits(right_bound, rows).items():
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
        run = BackwardRunTime(*[None] * 4, head_parts, *[None] * 3)
        return run.heads_of(part, heads, heads_k)

    shares = {}
    for (*_, head_parts), (head_k, first, last) in zip(asked, evaluated(of_part, asked, 3), strict=True):
        assert head_k * group <= first < last <= (head_k + 1) * group
        shares.setdefault(head_parts, []).extend(range(first, last))
    assert all(heads == [*range(group * heads_k)] for heads in shares.values()) and shares

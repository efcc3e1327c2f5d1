"""The table of packed sequences' tiles: the kernel's own source, run thread by thread on the CPU."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from simulated_memory import Memory
from threads import ThreadCta, float_bits, words

from hopper_fa3.kernels import table_size
from hopper_fa3.kernels import tile_table as real
from hopper_fa3.kernels.blocks import Band
from hopper_fa3.kernels.chunks import ChunkedBand

THREADS = 64  # of a CTA here: several rounds with few sequences
SECTIONS = real.Sections(heads=6, group=2, rows=1500, tiles=40)
TOLERANCE = 1 + 2.0**-real.LEADING_BITS  # of counts of steps that count as one


class Case:
    """Sequences, by their places and lengths."""

    def __init__(self, seed, batch, longest, used=(False, False), gaps=False):
        chance = random.Random(seed)
        self.batch, self.used = batch, used
        self.sides = []
        for has_used in used:
            lengths = [chance.choice((0, 1, chance.randrange(longest), longest)) for _ in range(batch)]
            ends = np.cumsum([chance.randrange(9) * gaps, *lengths])
            total = int(ends[-1]) + chance.randrange(200) * gaps
            counts = np.array([chance.randint(0, length) for length in lengths]) if has_used else np.array(lengths)
            self.sides.append((ends, counts, total))

    def expected(self, table, bounds):
        """{entry without its line: steps} that a table must list, by brute force."""
        found = {}
        own, other = (self.sides[1], self.sides[0]) if table.keys else self.sides
        for number, begin, length, other_begin, other_length in self.ranges(own, other):
            if number is None and table.marked:
                other_length = -1
            for block in range(-(-length // table.tile)):
                of_q, of_k = ((begin, length), (other_begin, other_length))[:: -1 if table.keys else 1]
                entry = (block, of_q[1], of_k[1], of_q[0], of_k[0])
                found[entry] = self.steps(table, block, of_q[1], of_k[1], bounds)
        return found

    def ranges(self, own, other):
        """(number, begin, length, the same of the other side): sequences, and rows that none uses."""
        (ends, counts, total), (other_ends, other_counts, _) = own, other
        for index in range(self.batch):
            unused = ends[index] + counts[index]
            yield index, int(ends[index]), int(counts[index]), int(other_ends[index]), int(other_counts[index])
            yield None, int(unused), int(ends[index + 1] - unused), None, 0
        yield None, 0, int(ends[0]), None, 0
        yield None, int(ends[-1]), total - int(ends[-1]), None, 0

    def steps(self, table, block, seqlen_q, seqlen_k, bounds):
        """Steps in which some row of the tile sees some row of the step."""
        if bounds.chunk:
            return self.steps_by_pairs(table, block, seqlen_q, seqlen_k, bounds)
        right = bounds.right if bounds.given else None
        first, steps = block * table.tile, 0
        length, other = (seqlen_k, seqlen_q) if table.keys else (seqlen_q, seqlen_k)
        last = min(first + table.tile, length) - 1
        for begin in range(0, other, table.step):
            end = min(begin + table.step, other) - 1
            query, key = (end, first) if table.keys else (last, begin)
            steps += right is None or key <= query + seqlen_k - seqlen_q + right
        return steps

    def steps_by_pairs(self, table, block, seqlen_q, seqlen_k, bounds):
        """The same in chunks, from all pairs; steps of a tile of queries begin with the first key that it sees."""
        queries, keys = np.arange(seqlen_q)[:, None], np.arange(max(seqlen_k, 0))[None]
        place = queries + seqlen_k - seqlen_q
        seen = (keys <= place + bounds.right) & (keys >= place - bounds.left)
        seen &= (place >= 0) & (keys // bounds.chunk == place // bounds.chunk)
        tiles = seen.T if table.keys else seen
        others = tiles[block * table.tile :][: table.tile].any(0).nonzero()[0]
        if not len(others):
            return 0
        begin = 0 if table.keys else others[0]
        return (others[-1] - begin) // table.step - (others[0] - begin) // table.step + 1


def listed(case, table, bounds, sections=SECTIONS):
    """The lines that the kernel writes."""
    threads = table.threads
    cta = ThreadCta(threads)
    kernels = cta.kernels({"tile_table": {"float_bits": float_bits}})
    module = kernels["tile_table"]
    sides = [
        module.Side(Memory(ends), Memory(counts) if used else None, total)
        for (ends, counts, total), used in zip(case.sides, case.used, strict=True)
    ]
    own = case.sides[table.keys]
    lines = table_size.table_lines(own[2], table.tile, case.batch, case.used[table.keys])
    memory = words(lines, table_size.ENTRY_WORDS)
    module.TileTable.shared = lambda _: cta.once(
        lambda: module.Shared(
            words(threads), words(len(real.Entry), threads), words(threads), words(len(real.Found)),
            words(real.BUCKETS), words(threads // 32),
        )
    )  # fmt: skip
    fields = {name: getattr(table, name) for name in table.__dataclass_fields__}
    kind = kernels["chunks"].ChunkedBand if table.band.chunked else kernels["blocks"].Band
    run = module.TileTable(**fields | {"band": kind(**vars(table.band))})
    if bounds.chunk:
        reach = kernels["chunks"].Reach
        bounds = SimpleNamespace(right=reach(bounds.right, bounds.chunk), left=reach(bounds.left, bounds.chunk))
    cta.run(lambda: run.run(*sides, memory, bounds, sections))
    return memory.array


def known(table, entry):
    """What an entry must say: where there are no rows of the other side, not at which they would begin."""
    block, seqlen_q, seqlen_k, offset_q, offset_k, *_ = entry
    if table.keys:
        return block, seqlen_q, seqlen_k, offset_q if seqlen_q else None, offset_k
    return block, seqlen_q, seqlen_k, offset_q, offset_k if seqlen_k > 0 else None


def bounds_of(right, left=None, chunk=0):
    return SimpleNamespace(right=right or 0, left=left, chunk=chunk, given=right is not None)


def check(case, table, right, *others):
    bounds = bounds_of(right, *others)
    found, expected = listed(case, table, bounds), case.expected(table, bounds)
    count = found[0, 0]
    assert count == len(expected) <= len(found) - table_size.HEADER
    entries = [tuple(int(word) for word in line[:6]) for line in found[table_size.HEADER : table_size.HEADER + count]]
    wanted = {known(table, entry): steps for entry, steps in expected.items()}
    assert {known(table, entry) for entry in entries} == set(wanted)
    check_order(case, table, entries, [wanted[known(table, entry)] for entry in entries], int(found[0, 1]))
    return entries


def check_order(case, table, entries, steps, section):
    """Sequences stand together, that of the longest tile (of three) first, and those at the end only by steps."""
    owners, tiles, rows = zip(*(owner(table, entry) for entry in entries), strict=True)
    longest = dict.fromkeys(owners, 0)
    for name, of_it, entry, count in zip(owners, tiles, entries, steps, strict=True):
        if entry[0] in (0, (of_it - 1) // 2, of_it - 1):
            longest[name] = max(longest[name], count)
    most = max(longest.values()) + 1
    assert section in {
        heads_of_section(SECTIONS, tiles[place], rows[place])
        for place, name in enumerate(owners)
        if (longest[name] + 1) * TOLERANCE >= most
    }
    end, place = len(entries), 0
    if table.level_end and (1 + case.used[table.keys]) * case.batch + 2 <= THREADS:
        end = max(end - -(-SECTIONS.tiles // section), 0)
    while place < len(entries) and place + tiles[place] <= end:
        blocks = [entry[0] for entry in entries[place : place + tiles[place]]]
        together = set(owners[place : place + tiles[place]]) == {owners[place]}
        if not together or blocks != list(range(tiles[place]))[:: -1 if table.descending else 1]:
            break
        assert (longest[owners[place]] + 1) <= most * TOLERANCE
        most, place = longest[owners[place]] + 1, place + tiles[place]
    assert place == end or (place < end < place + max(tiles[place:]))
    assert all((earlier + 1) * TOLERANCE >= later + 1 for earlier, later in itertools.pairwise(steps[place:]))


def owner(table, entry):
    """A tile's sequence, how many tiles that one has, and of how many rows."""
    name = known(table, entry)[1:]
    return name, -(-name[1 if table.keys else 0] // table.tile), name[0 if table.keys else 1]


def heads_of_section(sections, tiles, rows):
    """TileTable.section by trial: the fewest sections whose heads fit, if each has as many as are needed."""
    every = range(1, sections.heads + 1)
    fitting = max((n for n in every if n * rows <= sections.rows), default=1)
    needed = max((n for n in every if n * tiles * sections.group <= sections.tiles), default=1)
    counts = [count for count in every if sections.heads // count >= needed]
    count = min([count for count in counts if -(-sections.heads // count) <= fitting], default=max(counts))
    return -(-sections.heads // count) * sections.group


def table(tile, step, keys, right_bound, chunked=False, threads=THREADS, **options):
    band = (ChunkedBand if chunked else Band)(tile if keys else step, right_bound, chunked, packed=True)
    return real.TileTable(tile, step, keys, band, threads=threads, **options)


TABLES = {
    "queries": table(192, 128, False, False),
    "queries, causal": table(128, 80, False, True, descending=True, level_end=True),
    "keys, causal": table(128, 64, True, True, line_rows=64, level_end=True),
    "keys": table(64, 128, True, False, line_rows=128),
    "keys, in order": table(128, 64, True, True, line_rows=64, descending=True),
    "lines of queries": table(64, 128, False, False, line_rows=64),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("used", [(False, False), (True, False), (False, True), (True, True)])
def test_every_row_is_in_one_tile(name, used):
    table = TABLES[name]
    for seed in range(3):
        batch = (1, 7, 150)[seed]
        check(
            Case(seed, batch, (3000, 700, 300)[seed], used, gaps=seed > 0), table, 0 if table.band.right_bound else None
        )


CHUNKED = {
    "queries": table(128, 80, False, True, chunked=True, marked=True, numbered=True),
    "keys": table(64, 64, True, True, chunked=True, line_rows=64, numbered=True),
}


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize(
    ("right", "left", "chunk"), [(0, 2**20, 100), (700, 700, 64), (30, 90, 250), (0, 2**20, 2**30)]
)
def test_tiles_in_chunks(name, right, left, chunk):
    """As many steps as some pair is seen in."""
    for seed in range(2):
        case = Case(seed, (5, 100)[seed], (700, 300)[seed], (True, False), gaps=True)
        check(case, CHUNKED[name], right, left, chunk)


@pytest.mark.parametrize("name", CHUNKED)
def test_sequences_have_their_numbers(name):
    table, case = CHUNKED[name], Case(7, 90, 300, (True, False), gaps=True)
    found = listed(case, table, bounds_of(0, 2**20, 100))
    seen = set()
    for line in found[table_size.HEADER : table_size.HEADER + found[0, 0]]:
        _, seqlen_q, seqlen_k, offset_q, offset_k, _, number = (int(word) for word in line[:7])
        if seqlen_q > 0 and seqlen_k > 0:
            (ends_q, used_q, _), (ends_k, used_k, _) = case.sides
            assert (ends_q[number], used_q[number], ends_k[number], used_k[number]) == (
                offset_q, seqlen_q, offset_k, seqlen_k,
            )  # fmt: skip
            seen.add(number)
        assert 0 <= number < case.batch  # slopes are read by it, also where there is no key
    (_, used_q, _), (_, used_k, _) = case.sides
    assert seen == set(((used_q > 0) & (used_k > 0)).nonzero()[0])


def test_rows_of_no_sequence_are_marked():
    """A sink is that of sequences without keys, not of rows between them."""
    table, case = CHUNKED["queries"], Case(3, 60, 300, (True, True), gaps=True)
    lengths = [entry[2] for entry in check(case, table, 0, 2**20, 100)]
    assert {-1, 0} < set(lengths)


def test_lines_of_the_workspace_are_the_sequences_own():
    table, case = TABLES["lines of queries"], Case(5, 40, 500, (True, False), gaps=True)
    owners, lines = {}, table_size.workspace_lines(case.sides[0][2], table.tile, case.batch)
    for block, seqlen_q, seqlen_k, offset_q, _, first in check(case, table, None):
        assert first >= 0 and first + block < lines
        if seqlen_k:  # of others nobody writes
            assert owners.setdefault(first + block, (offset_q, seqlen_q, block)) == (offset_q, seqlen_q, block)
    of_keys = replace(TABLES["keys"], tile=128, step=64, line_rows=64)
    own = {entry[3]: entry[5] for entry in check(case, of_keys, None) if entry[1]}
    assert own and {offset: first for _, _, k, offset, _, first in check(case, table, None) if k and offset in own} == {
        offset: first for offset, first in own.items()
    }


@pytest.mark.parametrize("name", ["keys, causal", "keys, in order"])
def test_a_sequence_stands_together_in_the_order_of_turns(name):
    """Without turns not the last ones."""
    for seed in range(3):
        check(Case(seed, (3, 60, 130)[seed], 1000), TABLES[name], 0)


def test_an_unlawful_table_stays_within_its_memory():
    """Sequences that decrease or overlap are no lawful input, but must not write elsewhere."""
    case = Case(0, 4, 300)
    _, counts, total = case.sides[0]
    case.sides[0] = np.array([0, total, 0, total, -7]), counts, total
    found = listed(case, TABLES["queries"], bounds_of(None))
    assert 0 <= found[0, 0] <= len(found) - table_size.HEADER


@pytest.mark.parametrize(("tiles", "bits"), [(1, 127 << 23), (3, 0x40400000), (2**30 + 1, 157 << 23)])
def test_float_bits(tiles, bits):
    assert float_bits(tiles) == bits

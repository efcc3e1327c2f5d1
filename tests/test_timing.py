"""The timer's statistics and turns with fake clocks, and what the benchmark makes of its figures. Needs no GPU."""

import contextlib
import csv
import itertools
import json
import sys
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import tables
from timing import MAX_LAUNCHES, MIN_LAUNCHES, HostClock, Launch, Timing, graph, interleaved, launches_for, turns


class FakeClock:
    """Every call of a launch takes what the launch's own ``call`` returns; remembers who ran, and how often."""

    def __init__(self):
        self.ran = []

    def seconds(self, launch, launches):
        self.ran.append((launch.call, launches))
        return sum(launch.call() for _ in range(launches))


def constant(seconds, **kept):
    return Launch(lambda: seconds, **kept)


def test_median_and_spread():
    timing = Timing((4.0, 1.0, 2.0))
    assert timing.median == 2.0
    assert timing.spread == 1.5


def test_even_number_of_rounds_takes_the_middle():
    assert Timing((1.0, 2.0, 4.0, 8.0)).median == 3.0


def test_interleaved_reports_seconds_per_piece_of_work():
    launches = {"slow": constant(0.01), "fast": constant(0.001), "graph": constant(0.02, repeats=20)}
    times = interleaved(launches, FakeClock(), rounds=3)
    assert {name: timing.median for name, timing in times.items()} == pytest.approx(
        {"slow": 0.01, "fast": 0.001, "graph": 0.001}
    )
    assert all(len(timing.rounds) == 3 for timing in times.values())


def test_turns_change_their_order_and_lead_in_untimed():
    launches = {name: constant(0.001) for name in "abc"}
    clock = FakeClock()
    interleaved(launches, clock, rounds=12, seconds_per_round=0.05, warm_up=4)
    names = {launch.call: name for name, launch in launches.items()}
    ran = [(names[call], count) for call, count in clock.ran]
    assert ran[:6] == [("a", 4), ("a", 2), ("b", 4), ("b", 2), ("c", 4), ("c", 2)]
    leads, timed = ran[6::2], ran[7::2]
    assert [name for name, _ in leads] == [name for name, _ in timed]
    assert {count for _, count in leads} == {25} and {count for _, count in timed} == {50}
    rounds = ["".join(name for name, _ in timed[i : i + 3]) for i in range(0, 36, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    followers = Counter(pair for order in rounds for pair in itertools.pairwise(order))
    assert len(followers) == 6 and set(followers.values()) == {4}  # everyone follows everyone, equally often


@pytest.mark.parametrize("count", range(1, 12))
def test_each_follows_every_other_equally_often(count):
    orders = turns(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    followers = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(followers) == count * (count - 1) and len(set(followers.values())) <= 1
    few = [behind for order in orders[:7] for behind in itertools.pairwise(order)]  # the benchmark's rounds
    assert count % 2 or count < 7 or len(set(few)) == len(few)


def test_lead_in_is_not_in_the_figures():
    slow_then_fast = iter([0.001, *[0.001, 0.001], *([0.5] * 25 + [0.001] * 50) * 2])
    times = interleaved(
        {"one": Launch(lambda: next(slow_then_fast))}, FakeClock(), rounds=2, seconds_per_round=0.05, warm_up=1
    )
    assert times["one"].rounds == pytest.approx((0.001, 0.001))


def test_warm_up_calls_are_not_in_the_figures():
    left = iter([9.0] * 5)  # the first five calls compile
    times = interleaved({"late": Launch(lambda: next(left, 0.001))}, FakeClock(), rounds=3, warm_up=5)
    assert times["late"].rounds == pytest.approx((0.001,) * 3)


def test_launch_counts_stay_in_their_limits():
    assert launches_for(1.0, 0.04) == MIN_LAUNCHES
    assert launches_for(1e-9, 0.04) == launches_for(0.0, 0.04) == MAX_LAUNCHES
    assert launches_for(0.001, 0.04) == 40


def test_host_clock_leaves_out_the_context_and_the_queue():
    events = []

    @contextlib.contextmanager
    def context():
        events.append("enter")
        time.sleep(0.2)
        yield
        events.append("leave")

    def synchronize():
        events.append("synchronize")
        time.sleep(0.2)

    seconds = HostClock(synchronize).seconds(Launch(lambda: events.append("call"), context), 2)
    assert events == ["enter", "synchronize", "call", "call", "synchronize", "leave"]
    assert seconds < 0.2


def test_a_replayed_graph_keeps_the_memory_that_it_uses(monkeypatch):
    """Without a GPU: replays are counted by a stand-in for torch's graph."""
    import torch

    class Graph:
        replays = 0

        def replay(self):
            Graph.replays += 1

    class Memory:
        calls = 0

        def __call__(self):
            self.calls += 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda captured, stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    memory = Memory()
    alive, launch = weakref.ref(memory), graph(Launch(memory), repeats=4)
    assert (memory.calls, launch.repeats) == (5, 4)  # one to compile
    del memory
    launch.call()
    assert Graph.replays == 1
    assert alive() is not None and alive().calls == 5


def row(name, *, microseconds=100.0, teraflops=500.0, kind="kernel"):
    shape = {"head_dim": 128, "seqlen": 512, "causal": True, "batch": 32, "heads": 16, "heads_k": 16}
    rest = {"spread": 0.01, "teraflops": teraflops, "sm_clock": 1755.0, "power": None}
    return tables.Row(kind=kind, name=name, microseconds=microseconds, **shape, **rest)


ROWS = [
    row("ours", microseconds=80.0, teraflops=600.0),
    row("fa4"),
    row("matmul", microseconds=1500.0, teraflops=750.0),
    row("ours", microseconds=10.0, teraflops=None, kind="host"),
    row("cudnn", microseconds=26.0, teraflops=None, kind="host"),
]


def test_ratios_compare_rates_and_host_times():
    kernel, host = tables.cells(ROWS).values()
    assert tables.speed_ratio(kernel, "fa4") == pytest.approx(1.2)
    assert tables.speed_ratio(kernel, "matmul") == pytest.approx(0.8)  # of rates: its time is for other work
    assert tables.speed_ratio(kernel, "cudnn") is None
    assert tables.speed_ratio(host, "cudnn") == pytest.approx(2.6)


def test_written_results_hold_every_row(tmp_path):
    facts = {"gpu": "some", "date": "today", "commit": "abc"}
    markdown, table, document = tables.write(tmp_path / "new", "stem", facts, ROWS)
    text = markdown.read_text()
    assert "- gpu: some" in text
    assert "| 128 | 512 | causal | 600 | 500 | 750 | 1.20 | 0.80 | 1.0% | 1755 |  |" in text
    assert "| 128 | 512 | causal | 10.0 | 26.0 | 2.60 | 1.0% | 1755 |  |" in text
    with table.open() as file:
        assert [line["name"] for line in csv.DictReader(file)] == [one.name for one in ROWS]
    read = json.loads(document.read_text())
    assert read["environment"]["date"] == "today"
    assert tables.read(document) == (read["environment"], ROWS)


def test_decoding_shows_times_rates_and_what_the_cache_holds():
    copy = row("copy", microseconds=1000.0, teraflops=None)._replace(tb_per_s=4.25)
    sizes = {(1, 512): 34e6, (32, 512): 1074e6}  # bytes of K and V
    rows = []
    for (batch, seqlen), size in sizes.items():
        for name, taken in (("ours", 100.0), ("fa4", 200.0)):
            one = row(name, microseconds=taken, teraflops=None)
            rows.append(one._replace(batch=batch, seqlen=seqlen, tb_per_s=size / taken * 1e-6))
        rows.append(copy._replace(batch=batch, seqlen=seqlen))
    text = tables.markdown(rows)
    assert "### kernel, µs (TB/s)" in text
    assert "| 128 | 1 | 512 | causal | 100.0 (0.34) | 200.0 (0.17) | 1000.0 (4.25) | 2.00 | 0.08 |" in text
    assert "K and V of batch 1, length 512 (34 MB) fit the L2 cache (50 MB)" in text
    assert (
        tables.summary(next(iter(tables.cells(rows).values())))
        == "ours 100.0 (0.34) µs (TB/s), 2.00 x fa4, 0.08 x copy"
    )


def test_tables_without_ours_have_no_ratios():
    rows = [row("fa4", kind="autograd"), row("matmul", kind="autograd")]
    text = tables.markdown(rows)
    assert "| D | length | mask | fa4 | matmul | largest spread | SM MHz | W |" in text
    assert "| 128 | 512 | causal | 500 | 500 | 1.0% | 1755 |  |" in text
    assert tables.summary({one.name: one for one in rows}) == "fa4 500, matmul 500 TFLOP/s"

"""The timeline: reading a trace, its arithmetic, its files; and marks that cost a normal build nothing."""

import gzip
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hopper_fa3 import compile as compiling
from hopper_fa3 import machine_code, plan
from hopper_fa3.kernels import phases
from hopper_fa3.problem import Static

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "profiling"))
import timeline  # noqa: E402  (found by the line above)
import warps  # noqa: E402

# Two CTAs; of the first: the producer's warp 0 and the leading warps 4 and 8 of two consumer warpgroups, by hand. The
# second consumer's softmax lies half under the first one's P V.
PRODUCER = ((100, "SETUP"), (130, "TAKE_TILE"), (140, "LOAD_K"), (180, "WAIT_FREE"), (900, "EXIT"))
FIRST = (
    (100, "SETUP"), (200, "WAIT_K"), (210, "WAIT_TURN"), (210, "ISSUE_QK"), (220, "WAIT_V"), (230, "ISSUE_PV"),
    (260, "WAIT_QK"), (300, "CATCH_UP"), (350, "WAIT_PV"), (400, "EXPONENTIALS"), (600, "WAIT_K"),
    (700, "EPILOGUE"), (990, "EXIT"),
)  # fmt: skip
SECOND = (
    (100, "SETUP"), (150, "WAIT_K"), (150, "ISSUE_QK"), (250, "WAIT_QK"), (350, "MASK"), (400, "ROW_MAXIMUM"),
    (450, "WAIT_K"), (800, "EPILOGUE"), (990, "EXIT"),
)  # fmt: skip


def trace(zero=5000):
    """As the tracer's JSON decodes: tables of places and names, one list of marks in no useful order."""
    names = list(phases.Phase.__members__)
    places, marks, lives = [], [], []
    for cta, sm, warp, start, end, own in (
        (0, 7, 8, 60, 1000, SECOND), (0, 7, 0, 64, 920, PRODUCER),
        (0, 7, 4, 60, 1000, FIRST), (0, 7, 5, 60, 990, FIRST),
        (1, 3, 0, 0, 1100, PRODUCER), (1, 3, 4, 20, 1200, FIRST),
    ):  # fmt: skip
        places.append({"ctaId": [cta, 0, 0], "smId": sm, "warpId": warp, "gpcId": 0, "tpcId": 0})
        lives.append({"locIdx": len(places) - 1, "startTs": zero + start, "endTs": zero + end})
        marks += [
            {"locIdx": len(places) - 1, "timestamp": zero + time, "markerNameIdx": names.index(name), "color": 0}
            for time, name in own
        ]
    earlier = {"kernelName": "warm_up", "markers": [], "warpLifetimes": lives[:1]}
    last = {"kernelName": "attention_0", "markers": marks, "warpLifetimes": lives}
    return {"launches": [earlier, last], "locationTable": places, "stringTable": names}


def test_read_takes_the_last_launch_and_leading_warps():
    kernel, ctas, found = warps.read(trace())
    assert kernel == "attention_0"
    assert ctas == [(0, 7, 60, 1000), (1, 3, 0, 1200)]
    assert [(warp.number, warp.role) for warp in found] == [(0, "producer"), (4, "consumer 0"), (8, "consumer 1")]
    assert found[1].marks == FIRST and (found[1].start, found[1].end) == (60, 1000)
    assert warps.span(ctas) == 1200
    _, _, other = warps.read(trace(), cta=1)
    assert [warp.number for warp in other] == [0, 4]


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        ({"launches": []}, "a launch"),
        (trace() | {"launches": [{"kernelName": "k", "markers": [], "warpLifetimes": []}]}, "lifetimes"),
        (trace() | {"launches": trace()["launches"][:1]}, "marks of CTA 0"),
    ],
)
def test_a_trace_without_marks_is_refused(broken, fault):
    with pytest.raises(ValueError, match=fault):
        warps.read(broken)


def test_phases_products_and_hidden_softmax():
    producer, first, second = warps.read(trace())[2]
    assert producer.products == [] and producer.phases[0] == (100, 130, "SETUP")
    assert first.phases[1:4] == [(200, 210, "WAIT_K"), (210, 220, "ISSUE_QK"), (220, 230, "WAIT_V")]
    assert first.products == [(210, 300, "QKᵀ"), (230, 400, "PV")]
    assert second.products == [(150, 350, "QKᵀ")]
    assert first.coverage == pytest.approx(890 / 940)
    assert warps.shares(first)["EXPONENTIALS"] == pytest.approx(200 / 940)
    # first: 300-350 and 400-600 in softmax, 300-350 of it under second's product; second: 350-450, of it 350-400
    assert warps.hidden(first, [second]) == pytest.approx(50 / 250)
    assert warps.hidden(second, [first]) == pytest.approx(50 / 100)
    assert warps.hidden(first, [first, second]) == pytest.approx(50 / 250)


def test_union_and_overlap():
    assert warps.union([(5, 7), (1, 3), (2, 4), (4, 5)]) == [(1, 7)]
    assert warps.length([(0, 2), (1, 5), (10, 11)]) == 6
    assert warps.overlap([(0, 4), (6, 9)], [(3, 7)]) == 2


def test_steady_blocks_do_not_cross_the_end_of_a_tile():
    marks = [(10 * i, "WAIT_K") for i in range(5)] + [(50, "EPILOGUE")]
    marks += [(60 + 10 * i, "WAIT_K") for i in range(4)] + [(100, "EPILOGUE"), (120, "EXIT")]
    warp = warps.Warp(4, 0, 120, tuple(marks))
    assert warps.steady(warp, 3) == (60, 90)
    assert warps.steady(warp, 99) == (0, 40)
    assert warps.steady(warp, 1) == (60, 70)  # nearest to the middle of 0 to 120
    with pytest.raises(ValueError, match="a block of keys"):
        warps.steady(warps.Warp(4, 0, 9, ((0, "EPILOGUE"), (9, "EXIT"))), 3)


def document():
    _, ctas, found = warps.read(trace())
    facts = {"gpu": "NVIDIA H200", "date": "2026-01-02 03:04 UTC", "commit": "abc"}
    return {
        "environment": facts, "case": "d128-causal-s512", "kernel": "attention",
        "plan": {"pingpong": True, "overlap": False}, "phases": {phase.name: phase.value for phase in phases.Phase},
        "kernel_ns": 1150, "cta": 0, "ctas": ctas, "warps": found,
    }  # fmt: skip


def test_report_and_files_come_back_from_the_json(tmp_path):
    timeline.write(tmp_path, document())
    stem = "timeline-d128-causal-s512-no-overlap-nvidia-h200-2026-01-02"
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{stem}.{ending}" for ending in ("json", "md", "perfetto.json.gz", "png")
    }
    text = (tmp_path / f"{stem}.md").read_text()
    assert "span 1.2 µs with the marks; without them the kernel takes 1.1 µs (+4.3%)" in text
    assert "| exponentials |  | 21.3% |  |" in text
    assert "consumer 1: 2 blocks of keys, 0.47 µs each" in text and "another warpgroup's 50%" in text
    again = tmp_path / "again"
    assert timeline.main(["--from", str(tmp_path / f"{stem}.json"), "--out", str(again)]) == 0
    assert (again / f"{stem}.md").read_text() == text
    assert (again / f"{stem}.perfetto.json.gz").read_bytes() == (tmp_path / f"{stem}.perfetto.json.gz").read_bytes()
    assert json.loads(gzip.decompress((again / f"{stem}.perfetto.json.gz").read_bytes()))["traceEvents"]
    assert (again / f"{stem}.png").stat().st_size > 10_000


def test_options_take_out_what_they_name_and_nothing_else():
    table = plan.choose(Static("bfloat16", 128, 128, True, False, False))
    assert table.pingpong and table.overlap
    for words, pingpong, overlap in (
        ([], True, True),
        (["--no-pingpong"], False, True),
        (["--no-overlap"], True, False),
    ):
        found = timeline.asked(table, timeline.parser().parse_args(words))
        assert found == table._replace(pingpong=pingpong, overlap=overlap)


def test_perfetto_events_are_complete():
    events = warps.perfetto("attention", 7, document()["warps"], document()["phases"])["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(rows) == [
        "producer", "consumer 0", "consumer 0: QKᵀ in flight", "consumer 0: PV in flight", "consumer 1",
        "consumer 1: QKᵀ in flight",
    ]  # fmt: skip
    assert len(set(rows.values())) == 6
    for row in rows.values():  # Perfetto shows only intervals that do not overlap
        times = sorted(
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("tid") == row and event["ph"] == "X"
        )
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(times))
    mine = [event for event in events if event["ph"] == "X" and event["tid"] == rows["consumer 0"]]
    assert sum(event["dur"] for event in mine) == pytest.approx(0.890)
    assert {"name": "exponentials", "ts": 0.4, "dur": 0.2}.items() <= mine[-3].items()


@pytest.mark.parametrize(
    ("words", "fault"),
    [(["--case", "d128-what"], "a case is made of words"), (["--from", "nowhere.json"], "nowhere.json")],
)
def test_wrong_words_end_with_2(words, fault, capsys):
    assert timeline.main(words) == 2
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize("text", ["3", "[]", "{", '{"warps": [], "ctas": []}'])
def test_another_json_is_refused_in_one_line(text, tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert timeline.main(["--from", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("timeline: ") and error.count("\n") == 1


def test_without_a_hopper_gpu_one_line_and_exit_code_2():
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        pytest.skip("there is a Hopper GPU")
    done = subprocess.run([sys.executable, timeline.__file__], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("timeline needs an sm_90 GPU") and done.stderr.count("\n") == 1


def test_marks_are_absent_from_normal_builds(monkeypatch):
    """The same machine code as without any mark in the source; in a tracing build, one trigger a mark."""
    static = Static("bfloat16", 64, 64, False, False, False)
    chosen = plan.choose(static)
    normal, tracing = compiling.cubin(static, chosen), compiling.cubin(static, chosen, ("iket",))
    marked = []
    monkeypatch.setattr(phases.iket, "mark", marked.append)
    assert normal == compiling.cubin(static, chosen)
    assert set(marked) <= set(phases.Phase.__members__)  # what warps.py reads
    assert len(phases.Phase) <= 31  # the trace's five bits
    assert machine_code.report(tracing).counts["PMTRIG"] == len(marked) > 40


@pytest.mark.gpu
def test_a_traced_launch_covers_its_time(tmp_path):
    """The whole verb on the GPU: each warpgroup's phases cover its life, the CTAs' lives the kernel's duration."""
    done = subprocess.run(
        [sys.executable, timeline.__file__, "--case", "d64-causal-s2048-b2", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.json")
    found = timeline.loaded(file)
    assert [warp.role for warp in found["warps"]] == ["producer", "consumer 0", "consumer 1", "consumer 2"]
    assert all(warp.coverage >= 0.9 for warp in found["warps"])
    assert 0.9 <= warps.span(found["ctas"]) / found["kernel_ns"] <= 1.2  # the marks themselves take a few per cent

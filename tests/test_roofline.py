"""The arithmetic of the roofline against numbers worked out by hand, and the run of `make roofline` without a GPU."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import Case

from hopper_fa3 import roofline as arithmetic
from hopper_fa3.problem import Problem
from hopper_fa3.reference import traffic_standard

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "profiling"))
import peers  # noqa: E402  (found by the line above)
import roofline  # noqa: E402
import roofline_view as view  # noqa: E402
import tables  # noqa: E402
from timing import Launch, Timing  # noqa: E402

# 2 * 16 heads of 8192 queries and keys: 2^31 scores; each of q, k, v, out has 2^25 elements.
DENSE = arithmetic.Shape(2, 8192, 8192, 16, 16, 128, 128)
CAUSAL = DENSE._replace(causal=True)
FACTS = {"gpu": "an imagined GPU", "date": "2026-11-29 12:00 UTC", "commit": "none"}
FACTS |= {"matmul_tflops": 800.0, "copy_tb_per_s": 4.0}


def test_flops_and_bytes_of_a_dense_problem():
    assert arithmetic.flops(DENSE) == 2**40  # 2 * 2^31 * 256
    assert arithmetic.score_bytes(DENSE) == 2**32
    assert arithmetic.traffic(arithmetic.standard(DENSE)) == 4 * 2**32 + 4 * 2**26
    assert arithmetic.traffic(arithmetic.fused(DENSE)) == 4 * 2**26 + 2**20  # the LSE: 4 bytes of 2^18 rows
    assert arithmetic.standard_memory(DENSE) == 3 * 2**26 + 2 * 2**32
    assert arithmetic.fused_memory(DENSE) == 4 * 2**26 + 2**20
    assert arithmetic.intensity(DENSE, arithmetic.standard(DENSE)) == pytest.approx(63.015, abs=5e-4)
    assert arithmetic.intensity(DENSE, arithmetic.fused(DENSE)) == pytest.approx(4080.06, abs=5e-3)


def test_a_causal_problem_is_credited_half_and_moves_the_scores_twice_more():
    assert arithmetic.flops(CAUSAL) == 2**39
    assert arithmetic.traffic(arithmetic.standard(CAUSAL)) == 6 * 2**32 + 4 * 2**26
    assert arithmetic.traffic(arithmetic.fused(CAUSAL)) == arithmetic.traffic(arithmetic.fused(DENSE))
    # The standard way multiplies masked scores too; a fused kernel skips them.
    assert sum(one.flops for one in arithmetic.standard(CAUSAL)) == 2**40
    assert sum(one.flops for one in arithmetic.fused(CAUSAL)) == 2**39


def test_grouped_heads_and_another_head_dim_v():
    shape = DENSE._replace(heads_k=2, head_dim=192, dtype="float16")
    q, k, v, out = arithmetic.tensor_bytes(shape)
    assert (q, k, v, out) == (3 * 2**25, 3 * 2**22, 2**23, 2**26)
    first, softmax, last = arithmetic.standard(shape)
    assert first == ("scores", 2 * 2**31 * 192, q + k, 2**32)
    assert softmax == ("softmax", 0, 2**32, 2**32)
    assert last == ("product", 2 * 2**31 * 128, 2**32 + v, out)


@pytest.mark.parametrize("causal", [False, True])
def test_counts_agree_with_the_cases_of_the_tests_and_with_the_reference(causal):
    case = Case(3, 40, 72, 6, 2, 64, 32, causal=causal)
    assert arithmetic.flops(case) == case.flops_convention
    assert arithmetic.traffic(arithmetic.fused(case)) == case.bytes
    moved = traffic_standard(Problem.from_tensors(*case.inputs(), causal=causal))
    unmasked = [one for one in arithmetic.standard(case) if one.name != "mask"]
    lse = case.batch * case.heads * case.seqlen_q  # the reference returns it, PyTorch's unfused way does not
    assert arithmetic.traffic(unmasked) == 2 * (moved.read + moved.written - lse)


def test_roofs_and_the_model_of_the_time():
    roofs = arithmetic.Roofs(800.0, 4.0)
    assert roofs.ridge == 200
    assert [roofs.bound(x) for x in (199.9, 200)] == ["memory", "compute"]
    assert [roofs.attainable(x) for x in (10, 200, 1000)] == [40, 800, 800]
    passes = [arithmetic.Pass("a", 1600 * 10**12, 3 * 10**12, 10**12), arithmetic.Pass("b", 0, 10**12, 11 * 10**12)]
    assert arithmetic.seconds(passes, roofs) == pytest.approx(2 + 3)  # the first by its FLOPs, the second by its bytes


def test_amdahl():
    assert arithmetic.amdahl(0.08, 2) == pytest.approx(1 / 0.96)
    assert arithmetic.amdahl(0.5, math.inf) == 2
    assert arithmetic.amdahl(1, 3) == pytest.approx(3)
    assert arithmetic.amdahl(1, math.inf) == math.inf
    assert arithmetic.amdahl(0.5, 0.5) == pytest.approx(1 / 1.5)  # slower
    for share, speedup in ((0, 2), (1.01, 2), (-1, 2), (math.nan, 2), (0.5, 0), (0.5, math.nan)):
        with pytest.raises(ValueError, match="got"):
            arithmetic.amdahl(share, speedup)


def test_share_needed_is_amdahl_the_other_way():
    assert arithmetic.share_needed(0.05, 2) == pytest.approx(2 / 21)
    assert arithmetic.amdahl(arithmetic.share_needed(0.1, 3), 3) == pytest.approx(1.1)
    assert arithmetic.share_needed(0.05, 1.049) is None


def test_arithmetic_needs_no_package():
    code = "import runpy, sys; runpy.run_path('hopper_fa3/roofline.py'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False\n"


def points(names, seqlen=8192, rate=400.0):
    shape = (128, 128, seqlen, False, 2, 16, 16, "bfloat16")
    return [view.Point("kernel", name, *shape, 100.0, 0.05, rate, 1600.0, 690.0) for name in names]


def test_records_say_what_bounds_each_way():
    standard, ours = view.records([*points(("matmul",), rate=800.0), *points(("ours", "standard"))], FACTS)
    assert (standard["name"], standard["bound"], ours["name"], ours["bound"]) == (
        "standard",
        "memory",
        "ours",
        "compute",
    )
    assert standard["roof_teraflops"] == pytest.approx(4 * 63.015, rel=1e-5)
    assert standard["share_of_roof"] == pytest.approx(400 / (4 * 63.015), rel=1e-5)
    assert ours["share_of_matmul"] == 0.5


def test_a_result_file_is_drawn_again(tmp_path, capsys):
    source = tmp_path / "roofline-x.json"
    names = ("matmul", "standard", "flash", "ours")
    tables.write_json(source, FACTS, points(names, 1024) + points(names))
    folder = tmp_path / "new"
    assert roofline.main(["--from", str(source), "--out", str(folder)]) == 0
    assert "| 128 | dense | 8192 | standard | 400 | 63 | memory | 159% | 100% | 5.0% |" in capsys.readouterr().out
    with (folder / "roofline-x.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["seqlen"]) for row in rows] == [
        (name, seqlen) for seqlen in ("1024", "8192") for name in ("standard", "flash", "ours")
    ]
    assert float(rows[-1]["intensity"]) == pytest.approx(4080.06, abs=5e-3)
    assert "an imagined GPU" in (folder / "roofline-x.md").read_text()
    pytest.importorskip("matplotlib")
    for name in ("roofline-x.png", "ladder-x.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_pictures_hold_all_points_and_the_longest_lengths():
    plots = pytest.importorskip("matplotlib") and view.plots
    names = ("matmul", "standard", "ours")
    measured = points(names, 1024, 300.0) + points(names)
    for draw in (view.roofline, view.ladder):
        figure = draw(measured, FACTS)
        (axis,) = figure.axes
        if draw is view.ladder:
            assert axis.get_title().endswith("length 8192") and {bar.get_height() for bar in axis.patches} == {400.0}
        else:
            (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
            assert all(left < one.intensity < right for one in measured if one.name != "matmul")
            assert bottom < 300 and top > 400 and left < 200 < right  # the ridge
        plots.close(figure)


def test_cases_take_the_usual_lengths_or_their_own():
    usual = roofline.cases(roofline.parser().parse_args([]))
    assert [(case.head_dim, case.causal, case.seqlen_q) for case in usual] == [
        (128, True, 1024), (128, True, 4096), (128, True, 8192),
        (64, False, 1024), (64, False, 4096), (64, False, 8192),
    ]  # fmt: skip
    assert {case.batch * case.seqlen_q for case in usual} == {16384}
    words = ["--case", "d96-s512", "--case", "d64-fp16", "--seqlens", "256"]
    assert [(case.head_dim, case.seqlen_q) for case in roofline.cases(roofline.parser().parse_args(words))] == [
        (96, 512), (64, 256),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--peers", "math,fa5"],
            "roofline knows the peers standard, efficient, flash, xformers, cudnn, fa4, got math, fa5",
        ),
        (["--case", "d128-sparse"], f"a case is made of words as in {roofline.selection.FORM}, got 'sparse' in"),
        (["--seqlens", "1k"], "invalid literal for int"),
        (["--from", "/nowhere.json"], "roofline cannot read /nowhere.json: "),
    ],
)
def test_wrong_words_are_answered_in_one_line(words, line, capsys):
    assert roofline.main(words) == 2
    answer = capsys.readouterr()
    assert answer.err.startswith(line) and answer.err.count("\n") == 1 and answer.out == ""


def test_a_file_of_another_kind_is_refused(tmp_path, capsys):
    other = tmp_path / "forward.json"
    other.write_text(json.dumps({"environment": {}, "rows": [{"kind": "kernel"}]}))
    assert roofline.main(["--from", str(other)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_measuring_without_a_gpu_says_so_in_one_line(capsys):
    assert roofline.main([]) == 2
    answer = capsys.readouterr()
    assert answer.err == (
        "roofline needs an sm_90 GPU (H100, H200): torch finds no CUDA device; --from FILE.json draws without one\n"
    )


class Fake:
    """Everything of a run that needs a GPU: inputs on the CPU, a clock that gives every call a millisecond."""

    def __init__(self, cases=None):
        self.cases = cases

    def views(self, case):
        return case.inputs()

    def since(self, start):
        return 1600.0, 690.0


def refusing(q, k, v, causal):
    raise RuntimeError("not on this machine\nmore")


def test_a_run_measures_compares_and_leaves_out(monkeypatch, capsys):
    standard = peers.PEERS["standard"]
    wrong = standard._replace(
        name="fa4", kernel=lambda *tensors: Launch(lambda: standard.kernel(*tensors).call() * 1.1)
    )
    entrants = [standard, wrong, standard._replace(name="flash", kernel=refusing)]
    monkeypatch.setattr(roofline, "OURS", standard._replace(name="ours"))
    monkeypatch.setattr(roofline, "available", lambda names: (entrants, {("xformers", "not installed"): None}))
    monkeypatch.setattr(roofline, "Inputs", Fake)
    monkeypatch.setattr(roofline, "EventClock", Fake)
    monkeypatch.setattr(roofline, "ceilings", lambda: dict.fromkeys(("matmul", "copy"), Launch(lambda: None)))
    monkeypatch.setattr(roofline, "interleaved", lambda launches, *_, **__: dict.fromkeys(launches, Timing((1e-3,))))
    options = roofline.parser().parse_args(["--case", "d64-causal-s64-b1-h4_2-fp16", "--case", "d64-s32-b1-h4_2"])
    run = roofline.Run(options, ["standard"], Fake())
    facts = run.everything(roofline.cases(options))
    assert facts == {"matmul_tflops": 1099.5, "copy_tb_per_s": 4.295}
    assert [(one.name, one.seqlen) for one in run.points] == [
        (name, seqlen) for seqlen in (64, 32) for name in ("ours", "standard", "fa4", "matmul")
    ]
    first = run.points[0]
    assert first.panel == "head_dim 64, causal, 4/2 heads, fp16"
    assert first.teraflops == pytest.approx(2 * 4 * 64 * 64 * 128 / 2 / 1e-3 * 1e-12)
    assert run.left_out == [
        "xformers: not installed",
        "flash at d64-causal-s64-b1-h4_2-fp16: not on this machine",
        "flash at d64-dense-s32-b1-h4_2: not on this machine",
    ]
    assert [line.split(":")[0] for line in run.disagreements] == [
        "d64-causal-s64-b1-h4_2-fp16",
        "d64-dense-s32-b1-h4_2",
    ]
    assert "ours differs from fa4 by 0.09" in run.disagreements[1]


def test_a_spent_budget_leaves_the_later_cases_out(monkeypatch):
    monkeypatch.setattr(roofline, "available", lambda names: ([], {}))
    run = roofline.Run(roofline.parser().parse_args(["--budget", "-1"]), [], Fake())
    monkeypatch.setattr(roofline, "ceilings", lambda: dict.fromkeys(("matmul", "copy"), Launch(lambda: None)))
    monkeypatch.setattr(roofline, "interleaved", lambda launches, *_, **__: dict.fromkeys(launches, Timing((1e-3,))))
    monkeypatch.setattr(roofline, "Inputs", Fake)
    monkeypatch.setattr(roofline, "EventClock", Fake)
    monkeypatch.setattr(run, "measure", lambda case, *_: run.points.append(case))
    wanted = roofline.cases(run.options)
    run.everything(wanted)
    assert run.points == wanted[:1] and len(run.left_out) == 5

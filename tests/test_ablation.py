"""The ablation's versions, what its differences mean, and its picture from a result file. Needs no GPU."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "profiling"))
import ablation  # noqa: E402  (found by the line above)
import plots  # noqa: E402
import selection  # noqa: E402
import tables  # noqa: E402
from timing import Launch, Timing  # noqa: E402

from hopper_fa3 import plan as planning  # noqa: E402
from hopper_fa3.problem import Static  # noqa: E402

FACTS = {"gpu": "some GPU", "date": "2026-11-29 12:00 UTC", "commit": "abc"}


def static(head_dim, head_dim_v, right_bound):
    return Static("bfloat16", head_dim, head_dim_v, right_bound, False, False)


def candidate(word="d128-causal", launches=None):
    case = selection.case(word)
    found = static(case.head_dim, case.head_dim_v, case.causal)
    chosen, _ = ablation.plans(found)
    return ablation.Candidate(case, planning.choose(found), chosen, launches or {})


def rows(again=1.01):
    """Three rounds in which the clock falls: only rounds of the same turn can be compared."""
    one = candidate()
    full = [one.case.flops_convention / 600e12 * clock for clock in (1.0, 1.1, 1.2)]
    slower = {"full": 1.0, "no ping-pong": 1.005, "no overlap": 1.1, "neither": 1.25, ablation.AGAIN: again}
    times = {name: Timing(tuple(factor * seconds for seconds in full)) for name, factor in slower.items()}
    return ablation.rows_of(one, times, (1700.0, None))


@pytest.mark.parametrize("key", planning.TABLE)
def test_every_plan_of_the_table_has_all_versions(key):
    chosen, refused = ablation.plans(static(*key))
    assert not refused
    switches = {name: (plan.pingpong, plan.overlap) for name, plan in chosen.items()}
    assert switches == {
        "full": (True, True),
        "no ping-pong": (False, True),
        "no overlap": (True, False),
        "neither": (False, False),
    }
    assert {plan[:3] for plan in chosen.values()} == {planning.TABLE[key][:3]}


def test_versions_that_cannot_be_built_say_why(monkeypatch):
    monkeypatch.setitem(planning.TABLE, (128, 128, False), planning.Plan(64, 128))
    chosen, refused = ablation.plans(static(128, 128, False))
    assert list(chosen) == ["no ping-pong", "neither"]
    assert set(refused) == {"full", "no overlap"} and "got one" in refused["full"]


def test_speed_is_compared_within_rounds():
    found = {row.version: row for row in rows()}
    assert found["no overlap"].of_full == pytest.approx(1 / 1.1)
    assert found["full"].teraflops == pytest.approx(600 / 1.1)
    assert (found["full"].slowest, found["full"].fastest) == pytest.approx((500, 600))
    assert [row.version for row in rows() if row.in_use] == ["full"]


def test_a_plan_without_pingpong_is_marked_as_the_one_in_use():
    one = candidate("d256-dense")
    found = ablation.rows_of(one, {name: Timing((1.0, 1.0)) for name in (*one.plans, ablation.AGAIN)}, (None, None))
    assert [row.version for row in found if row.in_use] == ["no ping-pong"]


def test_the_table_tells_differences_from_noise_and_cites_the_paper():
    text = ablation.markdown(rows())
    for line in (
        "| d128-causal-s8192 | 192 × 128, 2 stages | full (in use) | 545 | 18.2% | 1.000 |  | 1700 |  |",
        "| no ping-pong | 543 | 18.2% | 0.995 | within noise |",
        "| neither | 436 | 18.2% | 0.800 | -20.0% |",
        "| full again | 540 | 18.2% | 0.990 | noise |",
        "differed from itself by up to 1.0%",
        "No version without warp specialisation",
        "full 661 TFLOP/s",
    ):
        assert line in text
    assert "| no ping-pong | 543 | 18.2% | 0.995 | -0.5% |" in ablation.markdown(rows(again=1.001))
    assert "differed from itself by up to 1.0%" in ablation.markdown([*rows(again=1.001), *rows()])  # the noisier case


def test_versions_that_differ_from_full_are_found():
    ones = torch.ones(2, 3)
    outputs = {"full": ones, "no ping-pong": ones * 1.001, "no overlap": ones * 1.1, "neither": ones * torch.nan}
    launches = {name: Launch(lambda out=out: out) for name, out in outputs.items()}
    wrong = ablation.disagreements(candidate(launches=launches))
    assert set(wrong) == {"no overlap", "neither"}
    assert wrong["no overlap"].startswith("d128-causal-s8192, no overlap: differs from full by 0.1 ")


class FakeClock:
    def seconds(self, launch, launches):
        return 0.001 * launches


class Quiet:
    def __init__(self):
        self.ended = []

    def begin(self, label):
        pass

    def end(self, text):
        self.ended.append(text)

    def since(self, start):
        return None, None


def test_wrong_versions_are_not_timed(monkeypatch):
    monkeypatch.setattr(ablation, "EventClock", FakeClock)
    ones, quiet = torch.ones(2), Quiet()
    outputs = {"full": ones, "no ping-pong": ones, "no overlap": -ones}
    launches = {name: Launch(lambda out=out: out) for name, out in outputs.items()}
    not_buildable = candidate("d64-dense")
    found, wrong = ablation.measure([candidate(launches=launches), not_buildable], 2, quiet, quiet)
    assert [row.version for row in found] == ["full", "no ping-pong", ablation.AGAIN]
    assert len(wrong) == 1 and "no overlap" in wrong[0]
    assert quiet.ended[1] == "d64-dense-s8192: nothing to compare with"


def test_results_are_drawn_again(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    tables.write(tmp_path, "stem", FACTS, rows(), ablation.markdown(rows()))
    (first, second) = (tmp_path / "stem.md").read_text(), tmp_path / "again"
    assert ablation.main(["--from", str(tmp_path / "stem.json"), "--out", str(second)]) == 0
    assert (second / "stem.md").read_text() == first
    assert (second / "stem.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "stem.csv").read_text().splitlines()[0] == ",".join(ablation.Version._fields)
    assert capsys.readouterr().out.startswith("### ablation")


def test_picture_says_what_it_shows():
    text = pytest.importorskip("matplotlib.text")
    figure = ablation.bars(rows(), FACTS)
    words = " | ".join(found.get_text() for found in figure.findobj(text.Text))
    plots.close(figure)
    for word in ("TFLOP/s: median", "some GPU, 2026-11-29", "d128-causal-s8192", "× 0.909", "noise 1.0%", "neither"):
        assert word in words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cases", "d128,wide"], "ablation: a case is made of words"),
        (["--from", "nowhere.json"], "ablation cannot read nowhere.json"),
    ],
)
def test_wrong_options_are_answered_in_one_line(words, said, capsys):
    assert ablation.main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(said) and printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys):
    assert ablation.main([]) == 2
    assert capsys.readouterr().err == "ablation needs an sm_90 GPU (H100, H200): torch finds no CUDA device\n"

"""The benchmark's gradients: which cells, what one launch is, deterministic ones, and what a wrong one brings."""

import functools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import bench
import peers
import suites
import tables
from bench_runs import FakeClock, SmallInputs, cases_of, on_a_cpu, run_of, small_tensors
from timing import Launch


def test_the_backward_has_shapes_of_its_own():
    """Those of the goals' tables."""
    cases = cases_of("--suite", "backward", "--others")
    grid, added = cases[:12], cases[12:]
    assert {(case.head_dim, case.seqlen_k) for case in grid} == {
        (head_dim, seqlen) for head_dim in (64, 128) for seqlen in (2048, 8192, 16384)
    }
    found = {(case.head_dim, case.head_dim_v, case.heads, case.heads_k, case.batch) for case in added}
    assert found == {(80, 80, 16, 16, 2), (96, 96, 16, 16, 2), (192, 192, 8, 8, 2), (192, 128, 16, 16, 2),
                     (256, 256, 8, 8, 2), (128, 128, 32, 4, 1)}  # fmt: skip
    assert {case.seqlen_k for case in added} == {8192} and len(added) == 12
    assert cases == cases_of("--suite", "training", "--others") == cases_of("--suite", "backward,training", "--others")
    assert all(case.dtype == "bfloat16" for case in cases)


@pytest.mark.parametrize("name", ["math", "standard"])
def test_gradients_of_a_peer_are_ours(name):
    with torch.no_grad():  # as in a run
        ours, peer = (suites.gradient(one, (*small_tensors(), True)) for one in (suites.OURS, peers.PEERS[name]))
        assert [gradient.shape for gradient in ours.call()] == [(1, 24, 2, 16)] * 3
        assert suites.apart(ours, peer) < 1e-4
        assert suites.apart(peer, peer) == 0  # the graph is kept


def rows_of(run, suite):
    """(kind, name) of the rows of one cell in a suite."""
    run.cell(run.suite.cases(run.options)[0], SmallInputs(), 1, suite)
    return [(row.kind, row.name) for row in run.rows[run.fresh :]]


def test_ours_takes_part_in_the_backward_also_deterministic(monkeypatch):
    words = ("--suite", "backward,training", "--deterministic")
    asked = []
    real = suites.flash_attn_func

    def recorded(*tensors, **options):
        asked.append((options["deterministic"], tensors[0].requires_grad))
        return real(*tensors, **options)

    monkeypatch.setattr(suites, "flash_attn_func", recorded)
    run = on_a_cpu(monkeypatch, *words, peers=[peers.PEERS["math"]])
    backward, training = run.suites
    with torch.no_grad():  # as in a run
        assert rows_of(run, backward) == [
            ("autograd", "ours"), ("autograd", "math"), ("deterministic", "ours"), ("autograd", "matmul")
        ]  # fmt: skip
        assert sorted(asked) == [(False, True), (True, True)]
        assert rows_of(run, training) == [("training", "ours"), ("training", "math"), ("training", "matmul")]
    assert run.disagreements == [] and not run.refusals
    case = run.suite.cases(run.options)[0]
    mine = {row.kind: row for row in run.rows if row.name == "ours"}
    assert mine["training"].teraflops / mine["autograd"].teraflops == pytest.approx(3.5 / 2.5)
    assert run.measured(case).startswith("D 64 length 2048 dense: ours ")  # of training, the last
    assert "x best SDPA" in run.measured(case)


def test_one_run_measures_gradients_deterministic_ones_and_training(monkeypatch, tmp_path):
    """All of a run but the GPU: two suites in the same cells, one table a kind, one file."""
    nothing = Launch(lambda: None)
    facts = {"gpu": "some GPU", "date": "2026-11-30 01:00 UTC", "commit": "abc"}
    monkeypatch.setattr(bench, "EventClock", FakeClock)
    monkeypatch.setattr(bench, "HostClock", lambda synchronize: FakeClock())
    monkeypatch.setattr(bench, "Inputs", functools.partial(suites.Inputs, device="cpu"))
    monkeypatch.setattr(bench, "ceilings", lambda: {"matmul": nothing, "copy": nothing})
    monkeypatch.setattr(bench.environment, "obstacle", lambda verb, folder: None)
    monkeypatch.setattr(bench.environment, "describe", lambda versions, commit: facts)
    words = ["--suite", "backward,training", "--deterministic", "--host", "--peers", "math,standard", "--rounds", "1",
             "--head-dims", "16", "--seqlens", "32", "--tokens", "64", "--width", "32", "--causal", "yes",
             "--others", "d16_8-s32-b1-h4_2"]  # fmt: skip
    assert bench.main([*words, "--out", str(tmp_path)]) == 0
    found, rows = tables.read(tmp_path / "backward-some-gpu-2026-11-30.json")
    assert (found["suite"], found["others"], found["left out"]) == ("backward,training", "d16_8-s32-b1-h4_2", "nothing")
    names = ["ours", "math", "standard"]
    expected = {
        "host": names,
        "autograd": [*names, "matmul"],
        "deterministic": ["ours"],
        "training": [*names, "matmul"],
    }
    for other in (False, True):
        kinds = {}
        for row in rows:
            if row.other == other:
                kinds.setdefault(row.kind, []).append(row.name)
        assert kinds == {kind: names for kind, names in expected.items() if kind != "host" or not other}
    text = (tmp_path / "backward-some-gpu-2026-11-30.md").read_text()
    assert "| 16/8 | 4/2 | bf16 | 32 | causal |" in text and "| math |" in text.split("### training")[1]


def test_graphs_are_replayed_where_they_are_short():
    run = run_of("--suite", "backward,training", "--graph")
    backward, training = run.suites
    assert [case.seqlen_k for case in run.suite.cases(run.options)[:3] if run.replays(backward, case)] == [2048]
    assert not any(run.replays(training, case) for case in run.suite.cases(run.options))
    assert not any(run_of("--suite", "backward").replays(backward, case) for case in cases_of("--suite", "backward"))


def test_gradients_that_are_wrong_only_when_deterministic_are_found(monkeypatch):
    run = on_a_cpu(monkeypatch, "--suite", "backward", "--deterministic", peers=[peers.PEERS["math"]])
    right = peers.PEERS["math"].public
    wrong = peers.PEERS["math"]._replace(name="ours", deterministic=lambda q, k, v, causal: right(q, k, 2 * v, causal))
    run.entrants = [wrong, peers.PEERS["math"]._replace(deterministic=right)]
    with torch.no_grad():
        rows_of(run, run.suite)
    (said,) = run.disagreements
    assert ", deterministic: ours differs from math" in said


def test_a_peer_with_wrong_gradients_has_no_rows(monkeypatch):
    """In no kind of row, though only the first kind compares all."""
    run = on_a_cpu(monkeypatch, "--suite", "backward", "--deterministic", peers=[])
    right = peers.PEERS["math"]._replace(deterministic=peers.PEERS["math"].public)
    wrong = right._replace(name="wrong", public=lambda q, k, v, causal: right.public(q, k, 2 * v, causal))
    run.entrants = [right._replace(name="ours"), wrong, right]
    with torch.no_grad():
        rows_of(run, run.suite)
    assert run.disagreements == [] and [name for name, _ in run.refusals] == ["wrong"]
    assert {(row.kind, row.name) for row in run.rows if row.kind not in ("host", "matmul")} == {
        ("autograd", "ours"), ("autograd", "math"), ("autograd", "matmul"), ("deterministic", "ours"),
        ("deterministic", "math"),
    }  # fmt: skip


def test_a_step_of_training_is_a_forward_and_its_gradients():
    tensors = (*small_tensors(), True)
    for entrant in (suites.OURS, peers.PEERS["math"], peers.PEERS["standard"]):
        with torch.no_grad():
            found = suites.step(entrant, tensors)
            with found.context():
                found.call()
                out, *gradients = found.call()  # again: nothing that it needs is gone
            alone = suites.gradient(entrant, tensors).call()
        wanting = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(tensor.transpose(1, 2) for tensor in wanting), is_causal=True
        ).transpose(1, 2)
        torch.testing.assert_close(out, expected.detach())
        assert not out.requires_grad
        given = suites.arriving(tensors[0], tensors[2])
        for each in (gradients, alone):
            torch.testing.assert_close(tuple(each), torch.autograd.grad(expected, wanting, given, retain_graph=True))

"""The benchmark's gradients: which cells, what one launch is, deterministic ones, and what a wrong one brings."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import peers
import suites
from bench_runs import cases_of, on_a_cpu, small_tensors


def test_the_backward_has_shapes_of_its_own():
    """Those of TARGETS.md's tables."""
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


class SmallInputs:
    def views(self, case):
        return small_tensors(torch.bfloat16)


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


def test_gradients_that_are_wrong_only_when_deterministic_are_found(monkeypatch):
    run = on_a_cpu(monkeypatch, "--suite", "backward", "--deterministic", peers=[peers.PEERS["math"]])
    right = peers.PEERS["math"].public
    wrong = peers.PEERS["math"]._replace(name="ours", deterministic=lambda q, k, v, causal: right(q, k, 2 * v, causal))
    run.entrants = [wrong, peers.PEERS["math"]._replace(deterministic=right)]
    with torch.no_grad():
        rows_of(run, run.suite)
    (said,) = run.disagreements
    assert ", deterministic: ours differs from math" in said


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

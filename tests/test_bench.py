"""The benchmark's grid, its pace, and its answer where there is no Hopper GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "profiling"))
import bench  # noqa: E402  (found by the line above)
import cost  # noqa: E402
import environment  # noqa: E402
import peers  # noqa: E402


def test_grid_keeps_tokens_and_width():
    cases = bench.grid(bench.parser().parse_args([]))
    assert len(cases) == len({case.name for case in cases}) == 3 * 6 * 2
    assert {case.batch * case.seqlen_q for case in cases} == {16384}
    assert {case.heads * case.head_dim for case in cases} == {2048}


def test_grid_takes_its_options():
    words = ["--head-dims", "64", "--seqlens", "512,1024", "--causal", "yes", "--group", "8"]
    cases = bench.grid(bench.parser().parse_args(words))
    assert [(case.seqlen_k, case.heads, case.heads_k, case.causal) for case in cases] == [
        (512, 32, 4, True),
        (1024, 32, 4, True),
    ]


def test_pace_slows_to_the_budget_and_never_below_the_shortest_round():
    assert bench.pace(1000, 2, 5, 7) == bench.LONGEST_ROUND
    assert bench.pace(10, 10, 5, 7) == pytest.approx(10 / 10 / 5 / 13.5)
    assert bench.pace(-1, 10, 5, 7) == bench.SHORTEST_ROUND


def test_teraflops_count_half_of_a_causal_square():
    (dense, causal) = bench.grid(bench.parser().parse_args(["--head-dims", "128", "--seqlens", "8192"]))
    assert cost.teraflops(dense, 1e-3) == pytest.approx(4 * 2 * 16 * 8192**2 * 128 * 1e-9)
    assert cost.teraflops(causal, 1e-3) == pytest.approx(cost.teraflops(dense, 1e-3) / 2)
    assert cost.matmul_flops() == 2 * 8192**3


@pytest.mark.parametrize(
    ("name", "seqlen_q", "causal"),
    [("math", 33, False), ("math", 33, True), ("standard", 33, False), ("standard", 7, True), ("standard", 33, True)],
)
def test_torch_peer_computes_attention_on_our_layout(name, seqlen_q, causal):
    from hopper_fa3.reference import standard

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, seqlen_q, 6, 16, generator=generator)
    k, v = (torch.randn(2, 33, 2, size, generator=generator) for size in (16, 24))
    launch = peers.PEERS[name].kernel(q, k, v, causal)
    with launch.context():
        out = launch.call()
    expected, _ = standard(q, k, v, right=0 if causal else None, compute_dtype=torch.float32)
    torch.testing.assert_close(out, expected)


def test_unfused_attention_says_what_it_cannot_do():
    q = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16)
    longest, longer = q.expand(1, 2**14, 32, 8), q.expand(1, 2**14, 33, 8)
    refuses = peers.PEERS["standard"].refuses
    assert refuses(longest, longest, longest, True) is None
    assert refuses(longer, longer, longer, True) == "a score matrix of more than 16 GiB"
    assert refuses(longest, q, q, False) is None
    assert "see no key" in refuses(longest, q, q, True)


def test_absent_peers_name_their_package():
    for name, package in (("fa4", "flash-attn-4"), ("xformers", "xformers")):
        why = peers.PEERS[name].missing()
        assert why is None or why.startswith(f"{package} cannot be imported")


def test_torch_peers_refuse_a_mask_that_torch_aligns_otherwise():
    q, k = torch.empty(1, 5, 2, 8), torch.empty(1, 7, 2, 8)
    for name in ("cudnn", "flash", "efficient", "math"):
        assert peers.PEERS[name].refuses(q, k, k, True) == "torch aligns causal masks to the top left"
        assert peers.PEERS[name].refuses(q, k, k, False) is None


def test_math_backend_is_left_out_where_its_scores_are_too_large():
    q = torch.empty(1, 1, 1, 8).expand(1, 2**15, 2, 8)
    assert "too large" in peers.PEERS["math"].refuses(q, q, q, False)


def test_disagreement_is_remembered():
    case = bench.grid(bench.parser().parse_args([]))[0]
    run = bench.Bench(None, [], None)
    ones = torch.ones(2, 3)
    run.compare(case, {"ours": bench.Launch(lambda: ones * 1.01), "fa4": bench.Launch(lambda: ones)})
    assert run.disagreements == []
    run.compare(case, {"ours": bench.Launch(lambda: ones * 1.1), "fa4": bench.Launch(lambda: ones)})
    run.compare(case, {"ours": bench.Launch(lambda: ones * torch.nan), "fa4": bench.Launch(lambda: ones)})
    assert len(run.disagreements) == 2
    assert run.disagreements[0].startswith(case.name)


def test_clock_samples_are_taken_from_the_cell_on():
    clocks = environment.Clocks()
    assert clocks.since(0.0) == (None, None)
    clocks.samples += [(1.0, 300.0, 80.0), (2.0, 1700.0, 600.0), (3.0, 1800.0, 700.0)]
    assert clocks.since(2.0) == (1750.0, 650.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_bench_without_a_gpu_says_so_in_one_line():
    done = subprocess.run([sys.executable, ROOT / "profiling" / "bench.py"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == "bench needs an sm_90 GPU (H100, H200): torch finds no CUDA device\n"
    assert done.stdout == ""

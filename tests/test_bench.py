"""The benchmark's suites, its pace, what it leaves out and why, and its answer where there is no Hopper GPU."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "profiling"))
import bench  # noqa: E402  (found by the line above)
import cost  # noqa: E402
import environment  # noqa: E402
import peers  # noqa: E402
import suites  # noqa: E402
from bench_runs import SmallInputs, cases_of, on_a_cpu, run_of, small_tensors  # noqa: E402
from timing import Launch, Timing  # noqa: E402


def test_grid_keeps_tokens_and_width():
    cases = cases_of()
    assert len(cases) == len({case.name for case in cases}) == 3 * 6 * 2
    assert {case.batch * case.seqlen_q for case in cases} == {16384}
    assert {case.heads * case.head_dim for case in cases} == {2048}


def test_grid_takes_its_options():
    words = ["--head-dims", "64", "--seqlens", "512,1024", "--causal", "yes", "--group", "8"]
    cases = cases_of(*words)
    assert cases == cases_of("--suite", "backward", *words)
    assert [(case.seqlen_k, case.heads, case.heads_k, case.causal) for case in cases] == [
        (512, 32, 4, True),
        (1024, 32, 4, True),
    ]


def test_others_come_after_the_grid():
    cases = cases_of("--others")
    added = cases[36:]
    assert cases[:36] == cases_of() and len(added) == len(set(cases)) - 36 == 2 * len(suites.OTHERS)
    assert {case.batch * case.seqlen_q for case in added if case.heads == case.heads_k} == {16384}
    found = {(case.head_dim, case.head_dim_v, case.heads, case.heads_k) for case in added if case.dtype == "bfloat16"}
    assert found == {(80, 80, 16, 16), (96, 96, 16, 16), (192, 192, 8, 8), (192, 128, 16, 16), (128, 128, 32, 4)}
    assert {(case.head_dim, case.seqlen_k) for case in added if case.dtype == "float16"} == {
        (128, seqlen) for seqlen in (2048, 8192, 16384)
    }
    assert [case for case in added if case.causal] == cases_of("--others", "--causal", "yes")[18:]
    narrow = ["--head-dims", "96", "--width", "1536", "--seqlens", "8192"]  # this grid holds two of them
    assert len(cases_of("--others", *narrow)) == len(added)


def test_others_may_be_named():
    cases = cases_of("--head-dims", "64", "--seqlens", "512", "--others", "d256-s1024,d72-h8_2", "--causal", "yes")
    assert [(case.head_dim, case.seqlen_k, case.heads_k) for case in cases] == [
        (64, 512, 32),
        (256, 1024, 8),
        (72, 8192, 2),
    ]


def test_inputs_come_in_the_dtype_of_the_case():
    small = suites.Case(2, 3, 5, 4, 2, 16, 8)
    half = suites.Case(1, 3, 5, 4, 2, 16, 24, dtype="float16")
    inputs = suites.Inputs([small, half], device="cpu")
    for case in (small, half):
        views = inputs.views(case)
        assert [tensor.shape for tensor in views] == [tensor.shape for tensor in case.inputs()]
        assert {str(tensor.dtype) for tensor in views} == {f"torch.{case.dtype}"}
    q, rounded = inputs.views(half)[0], inputs.views(small)[0][:1]
    torch.testing.assert_close(q.bfloat16(), rounded, rtol=2**-7, atol=0)  # the same numbers
    assert [sum(map(len, buffers)) for buffers in inputs.buffers.values()] == [384 + 320 + 160, 192 + 160 + 240]


def test_rows_say_which_case_they_are_of():
    run = run_of("--others")
    cases = {bench.label(case): case for case in run.suite.cases(run.options)}
    assert len(cases) == 36 + 16
    words = ("D 128 length 8192 dense", "D 128 heads 32/4 length 8192 dense", "D 128 length 8192 dense fp16",
             "D 192/128 length 8192 causal")  # fmt: skip
    for number, word in enumerate(words, 1):
        run.record(run.suite, cases[word], {("kernel", "ours"): Timing((number * 1e-3,))}, (None, None))
    assert [(row.heads_k, row.head_dim_v, row.dtype, row.other) for row in run.rows] == [
        (16, 128, "bfloat16", False), (4, 128, "bfloat16", True), (16, 128, "float16", True),
        (16, 128, "bfloat16", True),
    ]  # fmt: skip
    flops = 2 * 2 * 16 * 8192**2 * (192 + 128) / 2
    assert run.rows[3].teraflops == pytest.approx(flops / 4e-3 * 1e-12)
    for word, row in zip(words, run.rows, strict=True):
        assert run.measured(cases[word]) == f"{word}: ours {row.teraflops:.0f} TFLOP/s"


def test_pace_slows_to_the_budget_and_never_below_the_shortest_round():
    assert bench.pace(1000, 2, 5, 7) == bench.LONGEST_ROUND
    assert bench.pace(10, 10, 5, 7) == pytest.approx(10 / 10 / 5 / 13.5)
    assert bench.pace(-1, 10, 5, 7) == bench.SHORTEST_ROUND
    assert bench.pace(1000, 2, 5, 7, longest=0.4) == 0.4


def test_a_round_is_as_long_as_asked(monkeypatch):
    run = on_a_cpu(monkeypatch, "--suite", "decode", "--round", "0.3", "--budget", "1e6", peers=[peers.PEERS["math"]])
    run.entrants[0] = peers.PEERS["math"]._replace(name="ours")
    asked, real = [], bench.interleaved
    monkeypatch.setattr(bench, "interleaved", lambda *given, **how: asked.append(how) or real(*given, **how))
    run.cell(run.suite.cases(run.options)[0], SmallInputs(), 1)
    assert [how["seconds_per_round"] for how in asked] == [0.3]


def test_teraflops_count_half_of_a_causal_square():
    (dense, causal) = cases_of("--head-dims", "128", "--seqlens", "8192")
    assert cost.teraflops(dense, 1e-3) == pytest.approx(4 * 2 * 16 * 8192**2 * 128 * 1e-9)
    assert cost.teraflops(causal, 1e-3) == pytest.approx(cost.teraflops(dense, 1e-3) / 2)
    assert cost.backward_teraflops(causal, 1e-3) == pytest.approx(2.5 * cost.teraflops(causal, 1e-3))
    assert cost.training_teraflops(causal, 1e-3) == pytest.approx(3.5 * cost.teraflops(causal, 1e-3))
    assert cost.matmul_flops() == 2 * 8192**3


def test_decoding_counts_the_bytes_of_k_and_v():
    cases = cases_of("--suite", "decode")
    assert {(case.seqlen_q, case.heads, case.heads_k, case.head_dim) for case in cases} == {(1, 32, 8, 128)}
    assert [cost.key_value_bytes(case) / 2**20 for case in cases] == [32, 512, 1024, 1024]
    assert suites.SUITES["decode"].rates(cases[1], 1e-3) == (None, pytest.approx(0.512 * 2**20 * 1e-6, rel=0.01))
    queries_and_lse = 32 * 128 * 2 * 2 + 32 * 4  # q and out in bf16, LSE in float32
    assert cost.floor_bytes(cases[0]) == cost.key_value_bytes(cases[0]) + queries_and_lse


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
    case, run, ones = cases_of()[0], run_of(), torch.ones(2, 3)
    peer = Launch(lambda: (ones, 2 * ones))
    run.compare(case, "kernel", {"ours": Launch(lambda: (ones * 1.01, 2 * ones)), "fa4": peer})
    assert run.disagreements == []
    run.compare(case, "kernel", {"ours": Launch(lambda: (ones, 2.2 * ones)), "fa4": peer})
    run.compare(case, "autograd", {"ours": Launch(lambda: (ones * torch.nan, 2.2 * ones)), "fa4": peer})
    run.compare(case, "kernel", {"cudnn": peer, "fa4": peer})  # ours does not run
    assert len(run.disagreements) == 2
    assert (
        run.disagreements[0].startswith(f"{case.name}, kernel: ours differs from fa4 by 0.1 of")
        and "by nan" in run.disagreements[1]
    )
    assert not run.refusals


def test_a_peer_that_is_outvoted_is_left_out():
    """Where no more differ from ours than agree with it. NaN (0 / 0) differs."""
    case, run, ones = cases_of()[0], run_of(), torch.ones(2, 3)
    right, wrong = (Launch(lambda factor=factor: factor * ones) for factor in (1, 1.1))
    asked = {"ours": right, "fa4": wrong, "cudnn": right}
    assert run.compare(case, "kernel", asked) == ("fa4",)
    assert run.compare(case, "kernel", asked | {"cudnn": wrong, "flash": right}) == ()  # one against two
    assert run.compare(case, "kernel", asked | {"cudnn": Launch(lambda: 0 * ones), "flash": right}) == ()
    assert run.compare(case, "kernel", {"ours": right, "fa4": right}) == ()
    assert [name for name, _ in run.refusals] == ["fa4"]
    ((_, why),) = run.refusals
    assert why == f"wrong in {case.name}, kernel: 0.0909 of its largest value from ours, which is that of cudnn"
    assert len(run.disagreements) == 4 and all(": ours differs from" in line for line in run.disagreements)


def test_ours_is_left_out_only_where_it_is_not_built():
    def refuses(error):
        def make(entrant, tensors):
            raise error

        return make

    run, tensors = run_of(), (*small_tensors(), False)
    for _ in range(2):  # said once
        assert run.made(suites.OURS, tensors, refuses(NotImplementedError("no backward yet"))) == {}
    assert run.progress.stream.getvalue() == "  where it does not run, without ours: no backward yet\n"
    assert list(run.refusals) == [("ours", "no backward yet")]
    with pytest.raises(ValueError, match="a fault"):
        run.made(suites.OURS, tensors, refuses(ValueError("a fault")))
    compiler_error = type("CompilerError", (Exception,), {})  # a peer's own class, as the CuTe DSL's are
    for error in (ValueError("wrong shape"), compiler_error("no such tile")):
        assert run.made(peers.PEERS["math"], tensors, refuses(error)) == {}


@pytest.mark.parametrize("suite", ["backward", "training", "decode"])
def test_a_cell_without_ours_still_measures_the_peers(suite, monkeypatch):
    """A CPU stands in for the GPU, and a peer for ours, whose kernel it cannot launch."""
    run = on_a_cpu(monkeypatch, "--suite", suite, peers=[peers.PEERS["math"], peers.PEERS["standard"]])
    run.entrants[0] = peers.PEERS["math"]._replace(name="ours", refuses=lambda q, k, v, causal: "not built")

    class Inputs(SmallInputs):
        def views(self, case):
            q, k, v = super().views(case)
            return (q[:, :1], k, v) if suite == "decode" else (q, k, v)

    (case, *_) = run.suite.cases(run.options)
    run.host(Inputs())
    run.cell(case, Inputs(), 1)
    kind = {"backward": "autograd", "decode": "kernel", "training": "training"}[suite]
    names = {"math", "standard"}
    assert {(row.kind, row.name) for row in run.rows} == {("host", name) for name in names} | {
        (kind, name) for name in names | {run.suite.ceiling}
    }
    assert list(run.refusals) == [("ours, host", "not built"), ("ours", "not built")]
    assert run.measured(case).startswith(f"{bench.label(case)}: math ")
    rates = {row.name: (row.teraflops is None, row.tb_per_s is None) for row in run.rows if row.kind == kind}
    assert set(rates.values()) == {(suite == "decode", suite != "decode")}


def test_a_peer_refuses_with_the_reason_that_torch_warns_of():
    def call():
        for text in (
            "Memory efficient kernel not used because: (Triggered internally at sdp_utils.cpp:1)",
            "Memory Efficient attention has been runtime disabled. (Triggered internally at sdp_utils.cpp:2)",
            "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:3)",
            "head dims differ, got 192 and 128. (Triggered internally at sdp_utils.cpp:4)",
            "a second reason",
        ):
            warnings.warn(text, stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of them gets out
        why = peers.refusal(Launch(call))
    assert why == "No available kernel. Aborting execution. head dims differ, got 192 and 128."


def test_other_refusals_are_their_own_reason():
    def call():
        warnings.warn("something is deprecated", stacklevel=1)
        raise ValueError("head_dim 72 is not for me")

    assert peers.refusal(Launch(call)) == "head_dim 72 is not for me"


def test_torch_says_why_a_backend_is_no_choice():
    q, v = torch.empty(1, 24, 2, 16), torch.empty(1, 24, 2, 8)
    why = peers.refusal(peers.PEERS["flash"].public(q, q, v, False))
    assert why.startswith("No available kernel.") and "same last dimension" in why and "Triggered" not in why


def test_warnings_of_what_runs_are_passed_on_once():
    text = "about something else, once"
    with pytest.warns(UserWarning, match=text) as heard:
        for _ in range(2):
            assert peers.refusal(Launch(lambda: warnings.warn(text, stacklevel=1))) is None
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peers", "fa4,fa5"], "bench knows the peers fa4,"),
        (["--suite", "decode", "--seqlens", "512"], "the decode suite has shapes of its own, got --seqlens"),
        (["--suite", "decode", "--others"], "the decode suite has shapes of its own, got --others"),
        (["--from", "nowhere.json"], "bench cannot read nowhere.json"),
        (["--rounds", "0"], "bench needs --rounds"),
        (["--suite", "decode", "--rounds", "0"], "bench needs --rounds"),
        (["--round", "0"], "bench needs --round of at least"),
        (["--round", "nan"], "bench needs --round of at least"),
        (["--round", "inf"], "bench needs --round of at least"),
        (["--seqlens", "512,0"], "bench needs --group, --head-dims and --seqlens of at least 1"),
        (
            ["--suite", "sideways"],
            "bench knows the suites forward, backward, training, decode, windows, varlen, ",
        ),
        (["--suite", "backward,decode"], "the decode suite has shapes of its own, got --suite backward,decode"),
        (["--deterministic"], "only the backward suite has deterministic gradients of its own, got --suite forward"),
        (["--others", "d128-casual"], "bench --others: a case is made of words"),
        (["--others", "d128-causal"], "bench --others: a case says each thing once"),
        (["--seqlens", "32768"], "bench needs --tokens for the longest"),
        (["--group", "16"], "bench needs --tokens for the longest"),
    ],
)
def test_wrong_options_are_answered_in_one_line(words, said, capsys):
    assert bench.main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(said) and printed.err.count("\n") == 1 and printed.out == ""


def test_a_folder_that_takes_no_results_is_said_before_measuring(tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert environment.unwritable(file / "below") == f"{file / 'below'} cannot take the results: Not a directory"
    assert environment.unwritable(tmp_path / "new") is None
    assert list((tmp_path / "new").iterdir()) == []


def test_the_commit_says_where_files_differ_from_it(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    (tmp_path / "file").write_text("one")
    for words in (["init"], ["add", "."], ["commit", "-m", "first"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    clean = environment.commit()
    (tmp_path / "file").write_text("two")
    assert len(clean) == 12 and environment.commit() == f"{clean}-dirty"


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

"""`python -m hopper_fa3 advise`: its numbers, verdicts and errors, and that it needs neither a GPU nor profiling/."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hopper_fa3 import advise, measured, roofline
from hopper_fa3.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
LONG = "--seqlen 32768 --heads 32 --head-dim 128"
SHAPE = roofline.Shape(4, 4096, 4096, 16, 16, 128, 128)
HERE = advise.Machine("imagined", 80 * 10**9, "imagined")
# Ours twice as fast as standard attention and 5 % faster than cuDNN.
RATES = {
    (128, False, "ours"): {4096: 600.0},
    (128, False, "standard"): {1024: 100.0, 4096: 300.0},
    (128, False, "cudnn"): {4096: 600 / 1.05},
}


def said(words, capsys):
    assert main(["advise", *words.split()]) == 0
    return capsys.readouterr().out


def lines(share=None, rates=RATES, shape=SHAPE, here=HERE):
    """label -> what follows it, of every section in turn: the last one of a label counts."""
    found = {}
    for line in advise.answer(shape, here, share, rates):
        found[line[:31].strip()] = line[31:]
    return found


def test_share_of_eight_per_cent_gains_four_and_is_not_worth_it():
    text = "\n".join(advise.answer(SHAPE, HERE, 0.08, RATES))
    assert "against standard attention   +4.2 % at 2.00 times its speed" in text  # 1 / (0.92 + 0.04) = 1.0417
    assert "against torch SDPA (cuDNN)   +0.4 % at 1.05 times its speed" in text
    assert "at twice the speed           +4.2 %, not worth it" in text
    assert "if attention took no time    +8.7 %, worth it" in text
    found = lines(0.08)
    assert found["from standard attention"] == "+4.2 %, not worth it"
    assert found["from torch SDPA (cuDNN)"] == "+0.4 %, not worth it"
    assert "Verdict (worth it from +5.0 % end to end" in text


def test_a_large_share_is_worth_it_against_standard_attention_only():
    found = lines(0.5)
    assert found["from standard attention"] == "+33.3 %, worth it"
    assert found["from torch SDPA (cuDNN)"] == "+2.4 %, not worth it"


def test_without_a_share_it_says_which_share_would_do():
    found = lines()
    assert found["against standard attention"] == "10 % at 2.00 times its speed"  # (1 - 1 / 1.05) / (1 - 1 / 2)
    assert found["from standard attention"] == "worth it from a share of 10 % on"
    assert found["from torch SDPA (cuDNN)"] == "worth it from a share of 100 % on"
    faster = RATES | {(128, False, "cudnn"): {4096: 590.0}, (128, False, "fa4"): {4096: 640.0}}
    found = lines(rates=faster)
    assert found["from torch SDPA (cuDNN)"] == "not worth it at any share"
    assert found["from flash-attn-4"] == "not worth it: no faster"


def test_sizes_traffic_and_bounds(capsys):
    text = said(f"{LONG} --share 0.08 --memory 80GB", capsys)
    assert "68.7 GB: batch x heads x length x length x 2 bytes (2.1 GB a head)" in text  # 2^5 * 2^30 * 2
    assert "138.2 GB: scores, probabilities, q, k, v" in text  # 2 * 2^36 + 3 * 2^28
    assert "1.1 GB: q, k, v, out, LSE" in text  # 4 * 2^28 + 2^22
    assert "for 17.59 TFLOP\n" in text  # 2 * 2^35 * 256
    assert "276.0 GB (scores, softmax, product), 64 FLOP/byte: bound by memory" in text  # 4 * 2^36 + 4 * 2^28
    assert "1.1 GB (attention), 16,320 FLOP/byte: bound by compute" in text
    assert "fused moves 256 times fewer bytes" in text


def test_what_does_not_fit_is_no_question_of_speed(capsys):
    text = said(f"{LONG} --share 0.9 --memory 80GB", capsys)
    assert "does the standard way fit?   NO, in 80.0 GB (--memory)" in text
    assert "from standard attention      it does not fit in 80.0 GB: the question is not speed, only a fused" in text
    text = said(f"{LONG} --share 0.9 --memory 141GB", capsys)
    assert "does the standard way fit?   yes, in 141.0 GB (--memory)" in text
    assert "the question is not speed" not in text


def test_what_fits_in_no_way_gets_no_promise():
    shape = roofline.Shape(1, 4096, 4096, 16, 16, 128, 128)
    found = lines(0.5, shape=shape, here=HERE._replace(memory=roofline.fused_memory(shape) - 1))
    assert found["does a fused kernel fit?"].startswith("NO")
    assert found["at this shape"].startswith("neither way fits in") and "from standard attention" not in found
    found = lines(0.5, shape=shape, here=HERE._replace(memory=roofline.fused_memory(shape)))
    assert "does a fused kernel fit?" not in found and "only a fused" in found["from standard attention"]
    assert "NO" in found["does the standard way fit?"]
    found = lines(0.5, shape=shape, here=HERE._replace(memory=roofline.standard_memory(shape)))
    assert found["does the standard way fit?"].startswith("yes")


def test_verdicts_at_their_edges():
    assert advise.judged(0.5, 1.0) == "not worth it: no faster"
    share = roofline.share_needed(advise.WORTH, 2.0)
    assert advise.judged(share * 1.0001, 2.0).endswith(", worth it")
    assert advise.judged(share * 0.999, 2.0).endswith("not worth it")


def test_the_model_tells_the_range_of_its_own_mask_only():
    rates = {(64, False, "ours"): {4096: 500.0}, (256, False, "ours"): {4096: 650.0}, (64, True, "ours"): {4096: 9.0}}
    other = SHAPE._replace(head_dim=96, head_dim_v=96)
    assert advise.expected(other, "ours", rates).source.endswith("measured head dims reach 500 to 650")
    assert advise.expected(other._replace(causal=True), "ours", rates).source.endswith("reach 9 to 9")


def test_scores_stay_in_l2_up_to_its_size():
    heads = [roofline.Shape(1, 1024, 1024, count, count, 128, 128) for count in (23, 24)]  # 2 MiB a head: 48.2, 50.3 MB
    assert ["may stay in" in "\n".join(advise.traffic_lines(shape)) for shape in heads] == [True, False]


def test_measured_rates_are_taken_at_the_nearest_length(capsys):
    rate = measured.RATES[128, False, "ours"][16384]
    milliseconds = 2 * 32 * 32768**2 * 256 / rate * 1e-9
    text = said(LONG, capsys)
    assert f"{milliseconds:.2f} ms (measured: {rate:.0f} TFLOP/s at length 16384)" in text
    assert f"Expected time of one call, on an {measured.GPU} (kernels;" in text
    assert advise.nearest((1024, 4096), 2047) == 1024 and advise.nearest((1024, 4096), 2049) == 4096


def test_where_nothing_was_measured_it_says_model():
    time = advise.expected(SHAPE, "standard", {})
    assert not time.measured and time.source.startswith("model")
    # Each pass is bound by memory: 4 * 2^31 bytes of scores and 4 * 2^26 of q, k, v and out.
    assert time.seconds == pytest.approx((4 * 2**31 + 4 * 2**26) / (measured.COPY_TERABYTES * 1e12))
    other = SHAPE._replace(head_dim=96, head_dim_v=96)
    time = advise.expected(other, "ours", RATES)
    assert time.seconds == pytest.approx(2 * 2**30 * 192 / (measured.MATMUL_TERAFLOPS * 1e12))
    assert time.source == f"model: {measured.MATMUL_TERAFLOPS:.0f} TFLOP/s; measured head dims reach 600 to 600"
    assert advise.expected(other, "cudnn", RATES) is None
    only_ours = {(128, False, "ours"): {4096: 600.0}}
    assert lines(0.5, only_ours)["from standard attention"].endswith("worth it (its time is the model's)")


def test_measured_standard_attention_replaces_the_model():
    time = advise.expected(SHAPE._replace(seqlen_q=1000, seqlen_k=1000), "standard", RATES)
    assert (time.measured, time.source) == (True, "measured: 100 TFLOP/s at length 1024")
    assert time.seconds == pytest.approx(2 * 4 * 16 * 1000**2 * 256 / 100e12)


def test_few_tiles_leave_sms_idle():
    small = roofline.Shape(1, 512, 512, 16, 2, 128, 128)
    tiles = 16 * 3  # of 192 queries
    time = advise.expected(small, "ours", RATES)
    assert time.source.endswith(f"scaled: {tiles} tiles of queries for {measured.SMS} SMs")
    assert time.seconds == pytest.approx(2 * 16 * 512**2 * 256 / 600e12 * measured.SMS / tiles)
    text = "\n".join(advise.answer(small, HERE, 0.5, RATES))
    assert f"less than the host time of a call ({measured.HOST_MICROSECONDS['ours']} µs)" in text
    assert "the scores may stay in the 50.0 MB of L2" in text
    assert "at this size                 of kernels alone, as inside a CUDA graph" in text
    assert "host time" not in "\n".join(advise.answer(SHAPE, HERE, 0.5, RATES))


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GB", 80e9), ("96GiB", 96 * 2**30), ("1.5 TB", 1.5e12), ("512mb", 512e6), ("2TiB", 2**41), ("1MiB", 2**20)],
)
def test_memory_sizes(text, count):
    assert advise.memory_bytes(text) == count


SMALL = "--seqlen 8 --heads 4 --head-dim 64"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--seqlen 0", "--seqlen must be from 1 to 1073741823, got 0"),
        ("--seqlen 1073741824", "--seqlen must be from 1 to 1073741823, got 1073741824"),
        ("--heads -4", "--heads must be at least 1, got -4"),
        ("--heads-k 0", "--heads-k must be at least 1, got 0"),
        ("--batch -1", "--batch must be at least 1, got -1"),
        ("--heads-k 3", "--heads must be a multiple of --heads-k, got 4 and 3"),
        ("--head-dim 100", "--head-dim must be a multiple of 8 from 8 to 256, got 100"),
        ("--head-dim 264", "--head-dim must be a multiple of 8 from 8 to 256, got 264"),
        ("--head-dim -8", "--head-dim must be a multiple of 8 from 8 to 256, got -8"),
        ("--dtype fp32", "--dtype must be bf16 or fp16, got 'fp32'"),
        ("--share 0", "--share must be more than 0 and at most 1, got 0.0"),
        ("--share 8", "--share must be more than 0 and at most 1, got 8.0"),
        ("--share nan", "--share must be more than 0 and at most 1, got nan"),
        *(
            (
                f"--memory={text}",
                f"--memory must be positive, with MB, GB, TB, MiB, GiB or TiB, as in 80GB, got {text!r}",
            )
            for text in ("80", "-80GB", "0GB", "80XB", "GB")
        ),
    ],
)
def test_wrong_words_are_answered_in_one_line(words, line, capsys):
    assert main(["advise", *SMALL.split(), *words.split()]) == 2
    answer = capsys.readouterr()
    assert (answer.out, answer.err) == ("", f"python -m hopper_fa3 advise: {line}\n")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--heads 4 --head-dim 64", "the following arguments are required: --seqlen"),
        ("--seqlen x --heads 4 --head-dim 64", "argument --seqlen: invalid int value: 'x'"),
        (f"{SMALL} --wrong", "unrecognized arguments: --wrong"),
    ],
)
def test_wrong_arguments_are_answered_in_one_line(words, rule, capsys):
    with pytest.raises(SystemExit) as left:
        main(["advise", *words.split()])
    answer = capsys.readouterr()
    assert left.value.code == 2 and answer.out == ""
    assert rule in answer.err and answer.err.count("\n") == 1


def gpu(monkeypatch, name, missing=None):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"total_memory": 7}))
    monkeypatch.setattr(advise, "hopper_missing", lambda: missing)
    return advise.machine(None)


def test_the_gpu_of_the_measurements_is_recognised(monkeypatch):
    here = gpu(monkeypatch, measured.GPU)
    assert here == (f"{measured.GPU}, the kind of GPU that was measured ({measured.DATE})", 7, "this GPU", None)
    assert advise.machine("1GB")[1:3] == (10**9, "--memory")


def test_another_gpu_is_named_and_one_that_is_not_hopper_gets_a_verdict_of_its_own(monkeypatch):
    assert "of which nothing was measured" in gpu(monkeypatch, "NVIDIA H100").line
    here = gpu(monkeypatch, "NVIDIA A100", "NVIDIA A100 is sm_80, not sm_90")
    assert lines(0.5, here=here)["on this machine"] == "our kernel does not run: NVIDIA A100 is sm_80, not sm_90"
    assert "on this machine" not in lines(0.5)


def test_runs_without_a_gpu_and_without_the_repository(tmp_path):
    shutil.copytree(ROOT / "hopper_fa3", tmp_path / "hopper_fa3", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "hopper_fa3", "advise", *LONG.split(), "--share", "0.08"],
        capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no GPU here: the rates are those of an NVIDIA H200" in done.stdout
    assert "NO, in 80.0 GB (assumed: --memory)" in done.stdout
    assert "not worth it" in done.stdout

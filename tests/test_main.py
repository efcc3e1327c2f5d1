"""The command line: `info` and `demo`, and what the demo is made of."""

import subprocess
import sys

import pytest
import torch

from hopper_fa3 import demo, info
from hopper_fa3.__main__ import main


def run(*words):
    return subprocess.run([sys.executable, "-m", "hopper_fa3", *words], capture_output=True, text=True)


def test_info_says_what_is_here_and_what_will_run(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text
    assert f"Python      {sys.version_info.major}.{sys.version_info.minor}" in text
    ours = f"CUDA tensors    {'our sm_90a kernels' if info.hopper_missing() is None else 'nothing: '}"
    assert ours in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_info_without_a_gpu():
    assert info.hopper_missing() == "torch finds no CUDA device"
    assert "  GPU         none (torch finds no CUDA device)" in list(info.report())


def test_info_never_needs_nvidia_smi(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert info.smi("driver_version", "clocks.sm") == [None, None]


def test_info_reads_nvidia_smi(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '580.1, 1755 MHz'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert info.smi("driver_version", "clocks.sm") == ["580.1", "1755 MHz"]
    assert info.smi("driver_version") == [None]  # an answer of another shape is no answer


def test_command_line_lists_what_exists():
    done = run("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("info", "demo", "advise"))
    assert run("nothing").returncode == 2


@pytest.mark.parametrize("tokens", ["0", "-5", "some"])
def test_demo_needs_a_text(tokens):
    done = run("demo", "--tokens", tokens)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "--tokens" in done.stderr


def test_demo_inputs_are_the_same_each_time_and_continue_the_text():
    length = len(demo.TEXT.encode())
    first, second = demo.inputs(length + 10), demo.inputs(length + 10)
    assert [tuple(tensor.shape) for tensor in first] == [(1, length + 10, heads, 128) for heads in (16, 2, 2)]
    assert all(tensor.dtype == torch.bfloat16 for tensor in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    q, _, v = first
    assert torch.equal(v[:, :10], v[:, length:])  # the text starts over; values know no position
    assert not torch.equal(q[:, :10], q[:, length:])


def test_rotary_scores_depend_on_the_distance_only():
    torch.manual_seed(0)
    a, b = torch.randn(1, 1, 1, 128), torch.randn(1, 1, 1, 128)
    q, k = (demo.rotate(tensor.expand(1, 50, 1, 128).double())[0, :, 0] for tensor in (a, b))
    scores = q @ k.T
    torch.testing.assert_close(scores[3, 1], scores[42, 40], rtol=1e-5, atol=0)
    assert not torch.isclose(scores[3, 1], scores[3, 2])


def test_peak_memory_sees_what_is_freed_again():
    with demo.PeakMemory() as small:
        pass
    with demo.PeakMemory() as large:
        torch.ones(2**24)
    if large.bytes is None:
        pytest.skip("this system does not say its peak memory")
    assert small.bytes < 2**23
    assert 2**26 - 2**20 <= large.bytes < 2**26 + 2**23  # the kernel counts resident pages in batches


def test_demo_refuses_a_wrong_result(capsys):
    demo.say_error(1e-3, 1e-3)
    for wrong in (3e-3, float("nan")):
        with pytest.raises(SystemExit, match="WRONG"):
            demo.say_error(wrong, 1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_demo_runs_from_text_to_machine_code():
    done = run("demo", "--tokens", "300")
    assert done.returncode == 0, done.stderr
    assert "largest error against float32" in done.stdout
    assert "HGMMA instructions" in done.stdout
    assert "spilled                   0 instructions, 0 bytes of stack" in done.stdout

"""The harness itself, on the CPU: the error bound takes honest kernels and rejects wrong ones; the guards work."""

import math
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import SMALL, Case, bounds
from check import check, compare

from hopper_fa3.reference import standard

TESTS = Path(__file__).parent


def honest(q, k, v, *, out, return_attn_probs, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """Same-dtype blockwise attention as a kernel does it: P in q's dtype and not normalised, all else float32."""
    assert return_attn_probs
    (_, right), group, shift = bounds(causal, window_size), q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    queries = q.float().transpose(1, 2)
    keys, values = (x.float().transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    largest = queries.new_full(queries.shape[:3], -math.inf)
    total, summed = torch.zeros_like(largest), queries.new_zeros((*queries.shape[:3], v.shape[-1]))
    row = torch.arange(q.shape[1])[:, None]
    for start in range(0, k.shape[1], 64):
        block = slice(start, start + 64)
        scores = queries @ keys[:, :, block].mT * scale
        if right is not None:
            column = torch.arange(start, start + scores.shape[-1])
            scores = scores.masked_fill(column > row + shift + right, -math.inf)
        new = torch.maximum(largest, scores.amax(-1))
        anchor = new.masked_fill(new == -math.inf, 0)
        p, shrink = torch.exp(scores - anchor[..., None]), torch.exp(largest - anchor)
        total = total * shrink + p.sum(-1)
        summed = summed * shrink[..., None] + p.to(q.dtype).float() @ values[:, :, block]
        largest = new
    divisor = torch.where(total == 0, 1, total)
    out.copy_((summed / divisor[..., None]).transpose(1, 2))
    return out, largest + total.log()


def run_honest(case):
    q, k, v = case.inputs()
    out = q.new_empty((case.batch, case.seqlen_q, case.heads, case.head_dim_v))
    return q, k, v, *honest(q, k, v, out=out, return_attn_probs=True, **case.options)


ACCEPTED = [
    replace(SMALL, seqlen_q=q, seqlen_k=k, head_dim=d, head_dim_v=d, heads=4, heads_k=2, dtype=dtype, causal=causal)
    for dtype in ("bfloat16", "float16") for causal in (False, True)
    for q, k, d in ((113, 255, 64), (255, 113, 64), (1, 63, 8), (63, 1, 24), (1, 1, 8), (0, 5, 8), (5, 0, 8))
] + [
    replace(SMALL, window_size=(-1, 5)),
    *(replace(SMALL, softmax_scale=scale, causal=True) for scale in (0.0, -0.1, math.sqrt(120))),
]  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name)
def test_an_honest_kernel_passes(case):
    check(*case.inputs(), attention=honest, **case.options)


# Every row sees a key in WRONG, so that each planted error changes something.
WRONG = Case(2, 100, 255, 4, 2, 64, 64, causal=True)


def one_element(out, lse):
    out[1, 50, 2, 17] += 0.03


def one_element_untouched(out, lse):
    out[0, 99, 3, 63] = math.nan


def infinite_element(out, lse):
    out[0, 0, 0, 0] = math.inf


def last_row_missing(out, lse):
    out[1, -1] = 0


def swapped_heads(out, lse):
    out[:, :, [0, 1]] = out[:, :, [1, 0]]


def swapped_batches(out, lse):
    out[[0, 1]] = out[[1, 0]]


def lse_off(out, lse):
    lse += 1e-2


def one_lse_off(out, lse):
    lse[1, 3, 99] -= 1e-2


def lse_of_swapped_heads(out, lse):
    lse[:, [0, 1]] = lse[:, [1, 0]]


def lse_base_two(out, lse):
    lse *= math.log2(math.e)


def lse_untouched(out, lse):
    lse[0, 1, 2] = math.nan


def lse_of_a_blind_row(out, lse):
    lse[0, 1, 2] = -math.inf


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (one_element, "out: error"),
        (one_element_untouched, "out: NaN in 1 places, expected 0"),
        (infinite_element, r"out: \+inf in 1 places"),
        (last_row_missing, "out: error"),
        (swapped_heads, "out: error"),
        (swapped_batches, "out: error"),
        (lse_off, "LSE: error"),
        (one_lse_off, "LSE: error"),
        (lse_of_swapped_heads, "LSE: error"),
        (lse_base_two, "LSE: error"),
        (lse_untouched, "LSE: NaN in 1 places"),
        (lse_of_a_blind_row, "LSE: -inf in 1 places"),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_spoiled_result_is_rejected(spoil, message, dtype):
    q, k, v, out, lse = run_honest(replace(WRONG, dtype=dtype))
    spoil(out, lse)
    with pytest.raises(AssertionError, match=message):
        compare(out, lse, q, k, v, **WRONG.options)


@pytest.mark.parametrize(
    "asked",
    [
        {"window_size": (-1, 1)},
        {"window_size": (-1, -1)},
        {"causal": True, "softmax_scale": 1.0},
        {"causal": True, "softmax_scale": 1.05 * WRONG.head_dim**-0.5},
    ],
    ids=str,
)
def test_another_mask_or_scale_is_rejected(asked):
    q, k, v, out, lse = run_honest(WRONG)
    with pytest.raises(AssertionError, match="out: error"):
        compare(out, lse, q, k, v, **asked)


def test_a_mask_aligned_to_the_top_left_is_rejected():
    q, k, v = WRONG.inputs()
    top_left = (x[:, : WRONG.seqlen_q] for x in (k, v))
    out, lse = standard(q, *top_left, right=0)
    with pytest.raises(AssertionError, match="out: error"):
        compare(out, lse, q, k, v, causal=True)


def test_a_lost_last_key_and_a_wrong_head_map_are_rejected():
    q, k, v = WRONG.inputs()
    for attended in ((q, k[:, :-1], v[:, :-1]), (q, k[:, :, [1, 0]], v[:, :, [1, 0]])):
        out, lse = standard(*attended)
        with pytest.raises(AssertionError, match="out: error"):
            compare(out, lse, q, k, v)


def test_a_row_that_sees_no_key_must_be_exactly_zero():
    q, k, v, out, lse = run_honest(replace(WRONG, seqlen_k=90))
    compare(out, lse, q, k, v, causal=True)
    out[0, 3, 0, 0] = 1e-6
    with pytest.raises(AssertionError, match="exactly 0"):
        compare(out, lse, q, k, v, causal=True)


def test_wrong_types_and_shapes_are_rejected():
    q, k, v, out, lse = run_honest(WRONG)
    for wrong in ((out.float(), lse), (out[:, 1:], lse), (out, lse.double()), (out, lse.mT)):
        with pytest.raises(AssertionError, match="expected"):
            compare(*wrong, q, k, v, causal=True)


def test_memory_that_a_kernel_never_writes_is_seen():
    def lazy(q, k, v, *, out, **_):
        result = honest(q, k, v, out=torch.empty_like(out), return_attn_probs=True)
        out[:, :96] = result[0][:, :96]
        return out, result[1]

    with pytest.raises(AssertionError, match="out: NaN in"):
        check(*WRONG.inputs(), attention=lazy)


def test_an_output_other_than_the_given_one_is_rejected():
    def ignores_out(q, k, v, *, out, **_):
        return honest(q, k, v, out=torch.empty_like(out), return_attn_probs=True)

    with pytest.raises(AssertionError, match="given as out="):
        check(*WRONG.inputs(), attention=ignores_out)


@pytest.mark.parametrize(
    ("case", "pairs"),
    [
        (Case(2, 3, 5, 4, 2, 8, 16), 15),
        (Case(2, 3, 5, 4, 2, 8, 16, causal=True), 3 + 4 + 5),
        (Case(2, 5, 2, 4, 2, 8, 16, causal=True), 0 + 0 + 0 + 1 + 2),
        (Case(2, 4, 4, 4, 2, 8, 16, window_size=(1, 1)), 2 + 3 + 3 + 2),
        (Case(2, 4, 4, 4, 2, 8, 16, window_size=(-1, 2)), 3 + 4 + 4 + 4),
    ],
)
def test_case_counts(case, pairs):
    assert case.pairs == pairs
    assert case.flops == 2 * 2 * 4 * pairs * (8 + 16)
    full = 2 * 2 * 4 * case.seqlen_q * case.seqlen_k * (8 + 16)
    assert case.flops_convention == (full // 2 if case.causal else full)
    assert case.bytes == sum(x.numel() * 2 for x in case.inputs()) + 2 * case.seqlen_q * 4 * (16 * 2 + 4)


def test_case_inputs_follow_the_seed():
    first, again, other = SMALL.inputs(), SMALL.inputs(), replace(SMALL, seed=1).inputs()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[1], first[2])


def test_a_hang_ends_the_process_with_its_stack():
    program = "import time, conftest\nwith conftest.hang_guard(0.5, 2):\n    time.sleep(30)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=TESTS, capture_output=True, text=True, timeout=20)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr and 'File "<string>", line 3' in ended.stderr


@pytest.mark.parametrize(
    ("flags", "status", "summary"), [((), 0, "1 skipped"), (("--require-gpu",), 1, "Exit: no such GPU here")]
)
def test_a_missing_gpu_skips_or_fails(tmp_path, flags, status, summary):
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    body = """
        import conftest, pytest
        conftest.missing_gpu = lambda: "no such GPU here"

        @pytest.mark.gpu
        def test_needs_a_gpu():
            raise SystemError("it must not run")
    """
    (tmp_path / "test_one.py").write_text(textwrap.dedent(body))
    command = [sys.executable, "-m", "pytest", "-ra", *flags, "test_one.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == status, ended.stdout
    assert summary in ended.stdout and "no such GPU here" in ended.stdout

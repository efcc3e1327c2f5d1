"""Values and LSE of the forward kernels over head dims, lengths, groups, masks and dtypes."""

from dataclasses import replace

import pytest
import torch
from cases import FORWARD, SMALL
from check import check, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", FORWARD, ids=lambda case: case.name)
def test_values_and_lse(case, device):
    check(*case.inputs(device), **case.options)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(255, 255), (113, 255), (255, 113)])
def test_windows_that_only_cut_on_the_right_are_causal(seqlen_q, seqlen_k, device):
    q, k, v = replace(SMALL, seqlen_q=seqlen_q, seqlen_k=seqlen_k).inputs(device)
    causal = check(q, k, v, causal=True)
    for window_size in ((seqlen_k - 1, 0), (-1, 0), (None, 0)):
        same = check(q, k, v, window_size=window_size)
        assert all(torch.equal(a, b) for a, b in zip(causal, same, strict=True)), window_size


def test_causal_overrides_a_right_bound(device):
    q, k, v = SMALL.inputs(device)
    out, lse = check(q, k, v, causal=True)
    got, got_lse = run(q, k, v, causal=True, window_size=(-1, 5))
    assert torch.equal(out, got) and torch.equal(lse, got_lse)


@pytest.mark.parametrize("right", [254, 2**31 - 1])
def test_a_right_bound_that_never_bites_is_dense(right, device):
    q, k, v = SMALL.inputs(device)
    check(q, k, v, window_size=(-1, right))
    check(q, k, v, window_size=(SMALL.seqlen_k - 1, right))

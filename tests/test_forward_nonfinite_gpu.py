"""NaN and inf in Q, K, V and in the scores: where they must appear, and that they reach nothing else."""

import math
from dataclasses import replace

import pytest
import torch
from cases import Case
from check import check, run

from hopper_fa3 import plan
from hopper_fa3.problem import Problem

pytestmark = pytest.mark.gpu

CASE = Case(2, 300, 300, 4, 2, 64, 64, causal=True)
BATCH, ROW, KEY, HEAD, HEAD_K, COLUMN = 1, 137, 200, 2, 1, 7  # where a test puts its one value
QUERY_HEADS = slice(2, 4)  # the heads that read HEAD_K


def tile_m(q, k, v, **options):
    """Rows of one Q tile of the kernel that this call runs."""
    static = Problem.from_tensors(q, k, v, **options).static
    return plan.forward_config(static, plan.choose(static)).tile_m


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_one_value_in_q_reaches_its_row_only(value, causal, head_dim, device):
    q, k, v = replace(CASE, head_dim=head_dim, head_dim_v=head_dim).inputs(device)
    q[BATCH, ROW, HEAD, COLUMN] = value
    out, lse = check(q, k, v, causal=causal)
    spoiled = torch.zeros_like(lse, dtype=torch.bool)
    spoiled[BATCH, HEAD, ROW] = True
    assert torch.equal(lse.isnan(), spoiled)
    assert torch.equal(out.isnan(), spoiled.transpose(1, 2)[..., None].expand_as(out))


@pytest.mark.parametrize("causal", [False, True])
def test_a_nan_in_k_reaches_the_rows_that_see_it(causal, device):
    q, k, v = CASE.inputs(device)
    k[BATCH, KEY, HEAD_K, COLUMN] = math.nan
    out, lse = check(q, k, v, causal=causal)
    spoiled = torch.zeros_like(lse, dtype=torch.bool)
    spoiled[BATCH, QUERY_HEADS, KEY if causal else 0 :] = True
    assert torch.equal(lse.isnan(), spoiled)
    assert torch.equal(out.isnan(), spoiled.transpose(1, 2)[..., None].expand_as(out))


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_an_inf_in_k_reaches_the_rows_whose_score_is_plus_inf(value, causal, device):
    q, k, v = CASE.inputs(device)
    k[BATCH, KEY, HEAD_K, COLUMN] = value
    out, lse = check(q, k, v, causal=causal)
    # Score +inf: inf - inf is NaN. Score -inf: the key has no weight, and the row is as if it were not there.
    sees = torch.arange(CASE.seqlen_q, device=device) >= (KEY if causal else 0)
    spoiled = torch.zeros_like(lse, dtype=torch.bool)
    spoiled[BATCH, QUERY_HEADS] = ~(q[BATCH, :, QUERY_HEADS, COLUMN].T * value < 0) & sees
    assert spoiled.any() and not spoiled[BATCH, QUERY_HEADS, KEY:].all()
    assert torch.equal(lse.isnan(), spoiled)
    assert torch.equal(out.isnan(), spoiled.transpose(1, 2)[..., None].expand_as(out))


@pytest.mark.parametrize("key", [70, 200])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_one_value_in_v_reaches_the_rows_that_see_it_and_at_most_their_tile(causal, value, head_dim, key, device):
    q, k, v = replace(CASE, head_dim=head_dim, head_dim_v=head_dim).inputs(device)
    clean, clean_lse = check(q, k, v, causal=causal)
    v[BATCH, key, HEAD_K, COLUMN] = value
    out, lse = run(q, k, v, causal=causal)
    first = key if causal else 0
    reached = out[BATCH, first:, QUERY_HEADS, COLUMN]
    assert reached.isnan().all() if math.isnan(value) else (reached == value).all()
    # Elsewhere the result is bit for bit that without the value, which the oracle has checked.
    assert torch.equal(lse, clean_lse)
    rows = tile_m(q, k, v, causal=causal)
    tile = slice(first // rows * rows, None)
    out[BATCH, tile, QUERY_HEADS, COLUMN] = clean[BATCH, tile, QUERY_HEADS, COLUMN]
    assert torch.equal(out, clean)


def with_minus_inf(device, head_dim, keys):
    """Inputs whose scores at `keys` are -inf for every query."""
    q, k, v = replace(CASE, head_dim=head_dim, head_dim_v=head_dim, seqlen_k=600).inputs(device)
    q[..., 0] = q[..., 0].abs() + 0.5
    k[:, keys, :, 0] = -math.inf
    return q, k, v


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("keys", [slice(0, 290), slice(310, 600), slice(100, 500), slice(0, 600, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_minus_inf_have_no_weight(keys, causal, head_dim, device):
    q, k, v = with_minus_inf(device, head_dim, keys)
    out, lse = check(q, k, v, causal=causal)
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_whose_scores_are_all_minus_inf(causal, device):
    """It sees keys, so that it has no mean to be 0 of: NaN with LSE -inf, as softmax gives it."""
    q, k, v = with_minus_inf(device, 64, slice(0, 400))
    q, k, v = q[:, :200], k[:, :400], v[:, :400]
    out, lse = check(q, k, v, causal=causal)
    assert out.isnan().all() and (lse == -math.inf).all()


@pytest.mark.parametrize("seqlen_k", [1, 100, 113, 128, 200])
def test_keys_past_the_end_of_a_view_never_matter(seqlen_k, device):
    q, k, v = replace(CASE, seqlen_k=256).inputs(device)
    k[:, seqlen_k:] = math.nan
    v[:, seqlen_k:] = math.nan
    for causal in (False, True):
        check(q, k[:, :seqlen_k], v[:, :seqlen_k], causal=causal)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(72, 80), (40, 24)])
def test_columns_past_the_end_of_a_view_never_matter(head_dim, head_dim_v, device):
    q, k, v = replace(CASE, head_dim=96, head_dim_v=96).inputs(device)
    for x, used in ((q, head_dim), (k, head_dim), (v, head_dim_v)):
        x[..., used:] = math.nan
    check(q[..., :head_dim], k[..., :head_dim], v[..., :head_dim_v])

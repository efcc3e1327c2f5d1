"""Gradients of the backward kernels over head dims, lengths, groups, masks and dtypes, by way of out and of the LSE."""

from dataclasses import replace

import pytest
import torch
from cases import BACKWARD, SMALL
from check_gradients import arriving, check, compare, leaves_of, run

from hopper_fa3 import flash_attn_func, flash_attn_qkvpacked_func

pytestmark = pytest.mark.gpu

MASKS = ({}, {"causal": True}, {"window_size": (-1, 5)})


@pytest.mark.parametrize("case", BACKWARD, ids=lambda case: case.name)
def test_gradients(case, device):
    check(*case.inputs(device), **case.options)


@pytest.mark.parametrize("flow", ["both", "lse"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(113, 255), (255, 113), (1000, 1000), (1, 63), (63, 1)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_that_arrive_at_the_lse(head_dim, seqlen_q, seqlen_k, mask, flow, device):
    case = replace(SMALL, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=4, heads_k=2, head_dim=head_dim)
    q, k, v = replace(case, head_dim_v=head_dim).inputs(device)
    dout, dlse = arriving(q, v)
    _, _, dv = check(q, k, v, dout=dout if flow == "both" else None, dlse=dlse, **mask)
    assert dv.any() == (flow == "both"), "the LSE does not depend on V"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [113, 300])
def test_line_12_a_loss_of_out_and_lse(seqlen_q, causal, device):
    """dO is one element expanded; queries that see no key have LSE -inf, whose weight in the logsumexp is 0."""
    q, k, v = replace(SMALL, seqlen_q=seqlen_q).inputs(device)
    leaves = leaves_of(q, k, v)
    out, lse = flash_attn_func(*leaves, causal=causal, return_attn_probs=True)
    loss = out.sum() + lse.logsumexp(-1).sum()
    loss.backward()
    arrived = {"dout": torch.ones_like(out), "dlse": torch.softmax(lse.detach(), -1)}
    compare([leaf.grad for leaf in leaves], q, k, v, **arrived, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_any_subset_of_the_inputs_requires_a_gradient(wanted, causal, device):
    q, k, v = SMALL.inputs(device)
    dout, dlse = arriving(q, v)
    check(q, k, v, wanted=wanted, causal=causal)
    check(q, k, v, dout=dout, dlse=dlse, wanted=wanted, causal=causal)


@pytest.mark.parametrize("window_size", [(254, 0), (-1, 0), (None, 0)])
def test_windows_that_only_cut_on_the_right_are_causal(window_size, device):
    q, k, v = SMALL.inputs(device)
    check(q, k, v, window_size=window_size)


@pytest.mark.parametrize("right", [254, 2**31 - 1])
def test_a_right_bound_that_never_bites_is_dense(right, device):
    q, k, v = SMALL.inputs(device)
    dout, _ = arriving(q, v)
    compare(run(q, k, v, dout=dout, window_size=(-1, right)), q, k, v, dout=dout)


@pytest.mark.parametrize("how", [{"sm_margin": 8}, {"sm_margin": 100}, {"num_splits": 0}, {"pack_gqa": False}], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_options_that_change_no_value(causal, how, device):
    case = replace(SMALL, seqlen_q=1000, seqlen_k=700, heads=8, heads_k=2)
    check(*case.inputs(device), causal=causal, how=how)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_cta_computes_all_tiles(head_dim, causal, device):
    case = replace(SMALL, seqlen_q=500, seqlen_k=300, heads=4, heads_k=2, head_dim=head_dim, head_dim_v=head_dim)
    margin = torch.cuda.get_device_properties(device).multi_processor_count - 1
    check(*case.inputs(device), causal=causal, how={"sm_margin": margin})


def test_packed_inputs(device):
    q, k, v = replace(SMALL, seqlen_k=113, heads=6, heads_k=2).inputs(device)
    dout, _ = arriving(q, v)
    packed = torch.cat((q, k, v), 2).requires_grad_()
    out = flash_attn_qkvpacked_func(packed, causal=True, num_heads_q=6)
    (gradient,) = torch.autograd.grad(out, packed, dout)
    compare(gradient.split((6, 2, 2), 2), q, k, v, dout=dout, causal=True)


def test_keys_and_values_that_are_one_tensor(device):
    """Its gradient is the sum of both; deterministic, so that the two calls agree bit for bit."""
    q, k, _ = replace(SMALL, heads=4, heads_k=2).inputs(device)
    dout, _ = arriving(q, k)
    _, dk, dv = check(q, k, k, dout=dout, causal=True, how={"deterministic": True})
    shared = k.detach().requires_grad_()
    out = flash_attn_func(q, shared, shared, causal=True, deterministic=True)
    (both,) = torch.autograd.grad(out, shared, dout)
    assert torch.equal(both, dk + dv)


def test_the_graph_goes_on_at_both_ends(device):
    """Doubling is exact, so the gradients at the doubled tensors are half of those at the leaves."""
    q, k, v = replace(SMALL, seqlen_k=113, heads=4, heads_k=2).inputs(device)
    leaves, (dout, _) = leaves_of(q, k, v), arriving(q, v)
    out = flash_attn_func(*(2 * leaf for leaf in leaves), causal=True)
    torch.autograd.backward(out.relu(), dout)
    gradients = [leaf.grad / 2 for leaf in leaves]
    compare(gradients, 2 * q, 2 * k, 2 * v, dout=dout.masked_fill(out.detach() <= 0, 0), causal=True)


def test_inputs_stay_as_they_were(device):
    q, k, v = replace(SMALL, head_dim=40, head_dim_v=40).inputs(device)
    tensors = (q, k, v, *arriving(q, v))
    before = [x.clone() for x in tensors]
    run(q, k, v, dout=tensors[3], dlse=tensors[4], causal=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))

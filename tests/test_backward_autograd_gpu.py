"""Our autograd function among PyTorch's means: what it saves, checkpointing, repeated and second backward passes."""

from dataclasses import replace

import pytest
import torch
from cases import SMALL, Case
from check_gradients import arriving, check, compare, leaves_of, run
from torch.utils.checkpoint import checkpoint

from hopper_fa3 import flash_attn_func

pytestmark = pytest.mark.gpu

CASE = Case(2, 500, 600, 8, 2, 128, 128, causal=True)


def prepared(case, device):
    """``(q, k, v, dout, dlse, leaves)``"""
    q, k, v = case.inputs(device)
    return q, k, v, *arriving(q, v), leaves_of(q, k, v)


def test_only_inputs_and_results_are_saved(device):
    q, k, v, dout, _, leaves = prepared(CASE, device)
    run(q, k, v, dout=dout, causal=True)
    saved = []
    held = torch.cuda.memory_allocated(device)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out, lse = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    found = sorted((x.data_ptr(), x.shape, x.dtype) for x in saved)
    assert found == sorted((x.data_ptr(), x.shape, x.dtype) for x in (q, k, v, out, lse))
    # Nothing else lives on behind PyTorch's back; the allocator hands out multiples of 512 bytes.
    assert torch.cuda.memory_allocated(device) - held <= out.nbytes + lse.nbytes + 1024
    compare(torch.autograd.grad(out, leaves, dout), q, k, v, dout=dout, causal=True)


def test_saved_tensors_may_come_back_as_copies(device):
    q, k, v, dout, dlse, leaves = prepared(CASE, device)
    with torch.autograd.graph.save_on_cpu():
        results = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    gradients = torch.autograd.grad(results, leaves, (dout, dlse))
    compare(gradients, q, k, v, dout=dout, dlse=dlse, causal=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_activation_checkpointing(causal, use_reentrant, device):
    """A block of work around attention is computed again in the backward pass. Doubling is exact."""
    q, k, v, dout, _, leaves = prepared(CASE, device)

    def block(q, k, v):
        return 2 * flash_attn_func(2 * q, k, v, causal=causal)

    checkpoint(block, *leaves, use_reentrant=use_reentrant).backward(dout)
    dq, dk, dv = (leaf.grad for leaf in leaves)
    compare((dq / 2, dk, dv), 2 * q, k, v, dout=2 * dout, causal=causal)


def test_a_second_backward_over_a_kept_graph(device):
    q, k, v, dout, dlse, leaves = prepared(CASE, device)
    results = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    first = torch.autograd.grad(results, leaves, (dout, dlse), retain_graph=True)
    second = torch.autograd.grad(results, leaves, (2 * dout, dlse), retain_graph=True)
    third = torch.autograd.grad(results[0], leaves, dout)
    compare(first, q, k, v, dout=dout, dlse=dlse, causal=True)
    compare(second, q, k, v, dout=2 * dout, dlse=dlse, causal=True)
    compare(third, q, k, v, dout=dout, causal=True)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(results[0], leaves, dout)


def test_gradients_accumulate(device):
    q, k, v, dout, _, leaves = prepared(CASE, device)
    once = check(q, k, v, dout=dout, causal=True, how={"deterministic": True})
    for _ in range(2):
        flash_attn_func(*leaves, causal=True, deterministic=True).backward(dout)
    assert all(torch.equal(leaf.grad, 2 * gradient) for leaf, gradient in zip(leaves, once, strict=True))


@pytest.mark.parametrize("which", ["q", "k", "v", "out", "lse"])
def test_what_is_saved_must_not_change_before_the_backward(which, device):
    *_, dout, dlse, leaves = prepared(CASE, device)
    results = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    changed = dict(zip(("q", "k", "v", "out", "lse"), (*leaves, *results), strict=True))[which]
    with torch.no_grad():
        changed.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        torch.autograd.grad(results, leaves, (dout, dlse))


def test_a_second_derivative_is_refused(device):
    """Without an error it would be silently wrong: the backward's own graph does not exist."""
    *_, leaves = prepared(SMALL, device)
    loss = flash_attn_func(*leaves).float().square().sum()
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=r"twice|once"):
        sum(x.float().square().sum() for x in gradients).backward()


def test_results_require_a_gradient_where_an_input_does_and_grad_mode_is_on(device):
    q, k, v = SMALL.inputs(device)
    for wanted in ("q", "k", "v"):
        out, lse = flash_attn_func(*leaves_of(q, k, v, wanted), return_attn_probs=True)
        assert out.requires_grad and lse.requires_grad and out.grad_fn is not None
    with torch.no_grad():
        out = flash_attn_func(*leaves_of(q, k, v))
    assert not out.requires_grad
    assert not flash_attn_func(q, k, v).requires_grad
    leaves = leaves_of(q, k, v)
    with torch.inference_mode():
        assert not flash_attn_func(*leaves).requires_grad


def test_the_forward_is_the_same_with_and_without_a_graph(device):
    q, k, v = CASE.inputs(device)
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    with_graph = flash_attn_func(*leaves_of(q, k, v), causal=True, return_attn_probs=True)
    assert torch.equal(out, with_graph[0]) and torch.equal(lse, with_graph[1])
    assert torch.equal(out, flash_attn_func(*leaves_of(q, k, v), causal=True))


def test_a_graph_that_is_never_walked_leaves_nothing(device):
    q, k, v = CASE.inputs(device)
    flash_attn_func(*leaves_of(q, k, v), causal=True)
    held = torch.cuda.memory_allocated(device)
    for _ in range(3):
        flash_attn_func(*leaves_of(q, k, v), causal=True, return_attn_probs=True)
    assert torch.cuda.memory_allocated(device) <= held


@pytest.mark.parametrize("causal", [False, True])
def test_mixed_calls_share_what_is_remembered(causal, device):
    """Calls of equal shapes with and without gradients, in turns: the memo of api.py must not mix them up."""
    case = replace(SMALL, seqlen_q=77, causal=causal)
    q, k, v = case.inputs(device)
    for _ in range(3):
        assert not flash_attn_func(q, k, v, causal=causal).requires_grad
        check(q, k, v, causal=causal)
        check(q, k, v, wanted="k", causal=causal)
        with torch.no_grad():
            assert not flash_attn_func(*leaves_of(q, k, v), causal=causal).requires_grad

"""The CPU path as a node of PyTorch's graph: checkpoints, threads, hooks, writes in place, what is refused."""

import threading

import pytest
import torch
from problems import EXACT, agree, arriving, asked, derived, inputs, leaves
from refusal import refused
from torch.utils.checkpoint import checkpoint

from hopper_fa3 import flash_attn_func
from hopper_fa3.problem import Problem
from hopper_fa3.reference import blockwise, blockwise_backward, standard

pytestmark = pytest.mark.usefixtures("one_thread")


def attention(q, k, v):
    return flash_attn_func(q, k, v, causal=True, return_attn_probs=True)


def expected_gradients(tensors, given):
    tensors = leaves(tensors)
    return derived(standard(*tensors, right=0), tensors, given)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    tensors = leaves(inputs(12, 20))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        results = checkpoint(attention, *tensors, use_reentrant=reentrant)
    assert {x.data_ptr() for x in packed} <= {x.data_ptr() for x in tensors}  # no result is kept
    given = arriving(results)
    torch.autograd.backward(results, given)
    agree([x.grad for x in tensors], expected_gradients(tensors, given), **EXACT)


def test_a_backward_in_another_thread():
    """With grad mode of its own, and while this thread has it off."""
    tensors = leaves(inputs(12, 20))
    results = attention(*tensors)
    given = arriving(results)
    thread = threading.Thread(target=torch.autograd.backward, args=(results, given))
    with torch.no_grad():
        thread.start()
        thread.join()
    agree([x.grad for x in tensors], expected_gradients(tensors, given), **EXACT)


def test_gradients_accumulate_and_the_graph_can_be_kept():
    tensors = leaves(inputs(12, 20))
    results = attention(*tensors)
    given = arriving(results)
    for _ in range(2):
        torch.autograd.backward(results, given, retain_graph=True)
    expected = expected_gradients(tensors, given)
    agree([x.grad for x in tensors], [2 * x for x in expected], **EXACT)
    torch.autograd.backward(results, given)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.backward(results, given)


def test_one_tensor_for_all_three_inputs():
    (x,) = leaves(inputs(12, 12, 4, 4)[:1])
    results = attention(x, x, x)
    given = arriving(results)
    (ours,) = torch.autograd.grad(results, x, given)
    torch.testing.assert_close(ours, sum(expected_gradients((x, x, x), given)), **EXACT)


@pytest.mark.parametrize("place", range(5), ids=("q", "k", "v", "out", "lse"))
def test_a_write_to_what_is_saved_is_an_error(place):
    tensors = leaves(inputs(12, 20))
    moved = [x * 1 for x in tensors]  # no leaves: those may not be written
    out, lse = results = attention(*moved)
    loss = out.sum() + lse.sum()
    with torch.no_grad():
        (*moved, *results)[place].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("weighted", [False, True])
def test_second_derivatives_are_refused(weighted):
    """Also where the arriving gradient is a constant, which torch's once_differentiable would let pass."""
    q, k, v = leaves(inputs(4, 6))
    out = flash_attn_func(q, k, v)
    loss = (out * q.sum()).sum() if weighted else out.sum()
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    with refused(NotImplementedError, "attention can be differentiated once only (second derivatives are not built)"):
        (dq.square().sum() + q.sum()).backward()


def test_a_loss_that_stops_the_gradient():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    tensors = leaves(inputs(4, 6))
    Stop.apply(flash_attn_func(*tensors)).sum().backward()
    assert [x.grad for x in tensors] == [None] * 3


def test_without_gradients_there_is_no_node():
    q, k, v = inputs(4, 6)
    assert all(x.grad_fn is None and not x.requires_grad for x in attention(q, k, v))
    q.requires_grad_()
    with torch.no_grad():
        assert all(x.grad_fn is None and not x.requires_grad for x in attention(q, k, v))
    with_node, without = attention(q, k, v), attention(q.detach(), k, v)
    assert all(torch.equal(a, b) for a, b in zip(with_node, without, strict=True))  # bit for bit
    assert with_node[0].grad_fn is with_node[1].grad_fn


def test_the_backward_by_itself():
    q, k, v = inputs(12, 20)
    problem = Problem.from_tensors(q, k, v, causal=True)
    out, lse = blockwise(problem, q, k, v)
    for through in (("out",), ("lse",), ("out", "lse")):
        given = arriving((out, lse), through)
        expected = expected_gradients((q, k, v), given)
        ours = blockwise_backward(problem, q, k, v, out, lse, *given, block_q=5, block_k=7)
        agree(ours, expected, **EXACT)
        for place in range(3):
            wanted = [i == place for i in range(3)]
            alone = blockwise_backward(problem, q, k, v, out, lse, *given, wanted=wanted)
            torch.testing.assert_close(alone[place], expected[place], **EXACT)
            assert [x is None for x in alone] == [not x for x in wanted]


def test_autocast_changes_no_gradient():
    tensors = leaves(inputs(20, 30, dtype=torch.float32))
    results = blockwise(asked(*tensors, causal=True), *tensors, block_q=8, block_k=8)
    given = arriving(results)
    plain = torch.autograd.grad(results, tensors, given, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        agree(torch.autograd.grad(results, tensors, given), plain, rtol=0, atol=0)


def test_function_transforms():
    q, k, v = inputs(12, 20)
    results, backward = torch.func.vjp(attention, q, k, v)
    given = arriving(results)
    agree(backward(tuple(given)), expected_gradients((q, k, v), given), **EXACT)
    with pytest.raises(RuntimeError, match="does not have vmap support"):
        torch.func.jacrev(attention)(q, k, v)

"""Gradients of dense launches whose last K/V tiles are cut into parts of their steps."""

from dataclasses import replace

import pytest
import torch
from cases import Case
from check_gradients import arriving, check, compare, leaves_of, run
from test_backward_repeat_gpu import Company

from hopper_fa3 import flash_attn_func, plan
from hopper_fa3.problem import BackwardStatic, Problem

pytestmark = pytest.mark.gpu

# Both orders of a step, columns that products leave out, wide heads, and those where each warpgroup has a role
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
# (query heads per K/V head, full waves of tiles, share of the last one): few of its tiles, most of them; with fewer
# tiles than SMs all are cut. Grouped heads would be split instead where they have few tiles behind few waves.
TAILS = ((1, 1, 0.02), (1, 1, 0.6), (1, 0, 0.5), (2, 2, 0.6), (2, 4, 0.02))
HEADS_K = 4
FEW_SMS = (1, 5, 7)


def with_tail(head_dim, head_dim_v, group, waves, share, sms):
    """A case with ragged lengths whose tail is cut on so many SMs."""
    static = BackwardStatic("bfloat16", plan.tile_class(head_dim), plan.tile_class(head_dim_v), False, False, False)
    config = plan.backward_config(static, plan.choose_backward(static))
    blocks = -(-int(sms * (waves + share)) // HEADS_K)
    # Steps enough that parts of them are worth their cost
    seqlen_q = 62 * config.tile_m + 22
    # As many heads in as many batches as there are query heads of one
    heads_k = HEADS_K // group
    case = Case(group, seqlen_q, blocks * config.tile_n - 37, group * heads_k, heads_k, head_dim, head_dim_v)
    problem = Problem.from_tensors(*case.inputs())
    assert plan.head_parts(problem, config, sms) == 1
    tail = plan.split_tail(problem, config, sms)
    assert tail is not None and tail.whole_tiles in (waves * sms, (waves - 1) * sms)
    return case


def on_few_sms(head_dim, head_dim_v, sms):
    return with_tail(head_dim, head_dim_v, 2, 5, 0.2, max(sms, 5))


def count_sms(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


@pytest.mark.parametrize("tail", TAILS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_gradients(dims, tail, device):
    q, k, v = with_tail(*dims, *tail, count_sms(device)).inputs(device)
    dout, dlse = arriving(q, v)
    check(q, k, v, dout=dout, dlse=dlse)


@pytest.mark.parametrize("sms", FEW_SMS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_gradients_on_few_sms(dims, sms, device):
    """Each CTA takes many whole tiles before its steps of the last ones; one alone has no tail."""
    case = on_few_sms(*dims, sms)
    check(*case.inputs(device), how={"sm_margin": count_sms(device) - sms})


@pytest.mark.parametrize("tail", TAILS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dk_and_dv_are_bit_equal_run_after_run(dims, tail, device):
    """Parts are added in one order. dQ is not: that is what deterministic is for."""
    q, k, v = with_tail(*dims, *tail, count_sms(device)).inputs(device)
    dout, _ = arriving(q, v)
    company = Company(device)
    _, *first = run(q, k, v, dout=dout)
    for turn in range(10):
        company.work(turn)
        _, *again = run(q, k, v, dout=dout)
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True)), turn
    company.rest()


@pytest.mark.parametrize("dims", [(128, 128), (256, 256)], ids=str)
def test_a_cuda_graph_replays_with_changed_inputs(dims, device):
    """Workspace that a launch leaves behind may not count in the next."""
    case = with_tail(*dims, 1, 1, 0.6, count_sms(device))
    q, k, v = case.inputs(device)
    dout, _ = arriving(q, v)
    check(q, k, v, dout=dout)
    leaves, graph = leaves_of(q, k, v), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = torch.autograd.grad(flash_attn_func(*leaves), leaves, dout)
    for seed in (1, 2):
        fresh = replace(case, seed=seed).inputs(device)
        for x, y in zip((q, k, v, dout), (*fresh, arriving(*fresh[::2], seed=10 + seed)[0]), strict=True):
            x.copy_(y)
        for x in gradients:
            x.fill_(float("nan"))
        graph.replay()
        compare(gradients, q, k, v, dout=dout)

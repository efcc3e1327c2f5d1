"""Packed sequences on the GPU: no host synchronisation, CUDA graphs, streams, and no compilation from call to call."""

import threading
from dataclasses import replace

import pytest
import torch
from check_gradients import leaves_of
from check_packed import compare, compare_gradients, run, run_gradients
from packed_cases import CROSSED, RAGGED, USED, Inputs, PackedCase
from test_forward_runtime_gpu import busy, done_event

from hopper_fa3 import compile as compiling
from hopper_fa3 import flash_attn_varlen_func

pytestmark = pytest.mark.gpu

TOTAL = 1000
# Offsets of one length over 1000 rows: even, all in one, none at the ends, one row each, rows left over
OFFSETS = ((0, 250, 500, 750, 1000), (0, 1000, 1000, 1000, 1000), (0, 0, 999, 999, 1000), (0, 1, 2, 3, 4),
           (10, 60, 400, 700, 901))  # fmt: skip
CASE = PackedCase("fixed", (250,) * 4, (250,) * 4, heads=4, heads_k=2, causal=True)


def offsets(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def step(inputs, arrived, **options):
    """Forward and backward as they are captured: ((out, lse), gradients)."""
    leaves = leaves_of(*inputs[:3])
    results = flash_attn_varlen_func(*leaves, *inputs[3:], return_attn_probs=True, **options)
    gradients = torch.autograd.grad(results, leaves, arrived)
    return [x.detach() for x in results], gradients


def hold(case, inputs, arrived, results, gradients):
    compare(*results, inputs, **case.options)
    compare_gradients(gradients, inputs, *arrived, **case.options)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cuda_graph_replays_with_changed_offsets(deterministic, device):
    inputs = CASE.inputs(device)
    arrived = CASE.arriving(inputs)
    options = {**CASE.options, "deterministic": deterministic}
    hold(CASE, inputs, arrived, *step(inputs, arrived, **options))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results, gradients = step(inputs, arrived, **options)
    for turn, values in enumerate(OFFSETS):
        fresh = replace(CASE, seed=turn).inputs(device)
        for x, y in zip(inputs[:3], fresh[:3], strict=True):
            x.copy_(y)
        inputs.cu_seqlens_q.copy_(offsets(values, device))
        inputs.cu_seqlens_k.copy_(offsets(OFFSETS[-1 - turn], device))
        for x in (*results, *gradients):
            x.fill_(float("nan"))
        graph.replay()
        hold(CASE, inputs, arrived, results, gradients)


def test_a_cuda_graph_replays_with_changed_used_lengths(device):
    case = replace(CASE, used_q=(250, 250, 250, 250), used_k=(250, 250, 250, 250))
    inputs = case.inputs(device)
    run(inputs, **case.options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_varlen_func(*inputs, **case.options, return_attn_probs=True)
    for used_q, used_k in (((250, 0, 1, 129), (1, 250, 0, 64)), ((64, 65, 63, 250), (129, 128, 127, 0))):
        inputs.seqused_q.copy_(offsets(used_q, device))
        inputs.seqused_k.copy_(offsets(used_k, device))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        compare(out, lse, inputs, **case.options)


@pytest.mark.parametrize("case", (CASE, USED), ids=lambda case: case.name)
def test_no_call_makes_a_synchronizing_torch_call(case, device):
    """Neither a warm one nor the first of its shapes (its kernels are compiled)."""
    case = replace(case, causal=True)
    inputs = case.inputs(device)
    longer = replace(case, behind=(9, 9)).inputs(device)
    tensor = torch.tensor(300, device=device)
    step(inputs, case.arriving(inputs), **case.options)
    calls = [
        (each, case.arriving(each))
        for each in (inputs, longer, inputs._replace(max_seqlen_q=tensor, max_seqlen_k=tensor))
    ]
    torch.cuda.synchronize()
    for given, arrived in calls:
        torch.cuda.set_sync_debug_mode("error")
        try:
            results, gradients = step(given, arrived, **case.options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        hold(case, given, arrived, results, gradients)


def test_a_warm_call_does_not_wait_for_the_gpu(device):
    inputs = CASE.inputs(device)
    arrived = CASE.arriving(inputs)
    step(inputs, arrived, **CASE.options)
    torch.cuda.synchronize()
    busy(0.5)
    before = done_event()
    results, gradients = step(inputs, arrived, **CASE.options)
    waiting = not before.query()
    torch.cuda.synchronize()
    assert waiting, "the call returned only after the work that was queued before it"
    hold(CASE, inputs, arrived, results, gradients)


def test_line_9_max_seqlen_on_the_gpu_is_not_read(device):
    """Any value gives the same bits; one that were read would leave rows out."""
    inputs = CROSSED.inputs(device)
    out, lse = run(inputs, causal=True)
    compare(out, lse, inputs, causal=True)
    for longest in (torch.tensor(0, device=device), torch.tensor(2**40, device=device), torch.tensor(7), 4096, 0):
        given = inputs._replace(max_seqlen_q=longest, max_seqlen_k=longest)
        again, lse_again = run(given, causal=True)
        assert torch.equal(out, again) and torch.equal(lse, lse_again), longest


def test_line_9_nothing_is_compiled_from_call_to_call(device):
    """Other offsets, max_seqlen as int or tensor; of the forward also other totals and batches."""
    inputs = CASE.inputs(device)
    arrived = CASE.arriving(inputs)
    step(inputs, arrived, **CASE.options)
    compiled = compiling.cached()
    for turn, values in enumerate(OFFSETS):
        longest = (1000 + turn, torch.tensor(1000 + turn, device=device))[turn % 2]
        given = inputs._replace(cu_seqlens_q=offsets(values, device), max_seqlen_q=longest, max_seqlen_k=longest)
        results, gradients = step(given, arrived, **CASE.options)
        hold(CASE, given, arrived, results, gradients)
        other = replace(RAGGED, lengths_q=(40 + turn,) * (turn + 2), lengths_k=(70 - turn,) * (turn + 2), causal=True)
        run(other.inputs(device), causal=True)
    assert compiling.cached() == compiled


def test_line_10_work_runs_on_the_current_stream(device):
    """The side stream writes inputs and offsets late: what another stream did with them would come before."""
    wanted = CASE.inputs(device)
    arrived = CASE.arriving(wanted)
    late = Inputs(*(torch.full_like(x, float("nan")) for x in wanted[:3]),
                  *(torch.zeros_like(x) for x in wanted[3:5]), *wanted[5:])  # fmt: skip
    step(wanted, arrived, **CASE.options)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        for x, y in zip(late[:5], wanted[:5], strict=True):
            x.copy_(y)
        results, gradients = step(late, arrived, **CASE.options)
    torch.cuda.synchronize()
    hold(CASE, wanted, arrived, results, gradients)


def test_line_10_threads_on_streams_of_their_own(device):
    """Whatever calls share (counters, workspace of the schedule) must not mix them up."""
    cases = [replace(CROSSED, seed=seed, causal=bool(seed % 2), behind=(seed, 5)) for seed in range(4)]
    found, failures = {}, []

    def work(case):
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                inputs = case.inputs(device)
                arrived = case.arriving(inputs)
                for _ in range(10):
                    found[case] = inputs, arrived, *step(inputs, arrived, **case.options)
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for case, kept in found.items():
        hold(case, *kept)


def test_launches_of_different_batches_follow_each_other(device):
    """Without a wait between them: what a launch leaves in shared workspace must not count for the next."""
    cases = [replace(CASE, seed=seed, lengths_q=(100 * seed, 1, 64), lengths_k=(30, 200, 64 * seed), causal=True)
             for seed in range(5)]  # fmt: skip
    inputs = [case.inputs(device) for case in cases]
    arrived = [case.arriving(each) for case, each in zip(cases, inputs, strict=True)]
    for _ in range(3):
        kept = [step(each, given, causal=True) for each, given in zip(inputs, arrived, strict=True)]
    for case, each, given, (results, gradients) in zip(cases, inputs, arrived, kept, strict=True):
        hold(case, each, given, results, gradients)


@pytest.mark.parametrize(("tensors", "current"), [(1, 0), (0, 1)])
def test_line_10_tensors_on_a_device_that_is_not_current(tensors, current):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = CASE.inputs(f"cuda:{tensors}")
    dout, _ = CASE.arriving(inputs)
    with torch.cuda.device(current):
        compare(*run(inputs, **CASE.options), inputs, **CASE.options)
        compare_gradients(run_gradients(inputs, dout, **CASE.options), inputs, dout, **CASE.options)
        assert torch.cuda.current_device() == current

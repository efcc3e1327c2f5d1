"""Streams, threads, devices, CUDA graphs, and that a warm call never waits for the GPU."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from cases import SMALL, Case
from check import check, compare, run

from hopper_fa3 import flash_attn_func

pytestmark = pytest.mark.gpu

CASE = Case(2, 1000, 1000, 8, 2, 128, 128, causal=True)


def busy(seconds=0.2):
    """Holds the current stream for about this long (the clock runs at 1 to 2 GHz)."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def done_event():
    event = torch.cuda.Event()
    event.record()
    return event


def test_line_10_work_runs_on_the_current_stream(device):
    """The side stream writes the inputs late: a kernel on another stream would read them before."""
    wanted = CASE.inputs(device)
    late = [torch.full_like(x, float("nan")) for x in wanted]
    run(*wanted, causal=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        for x, y in zip(late, wanted, strict=True):
            x.copy_(y)
        out, lse = run(*late, causal=True)
        kept = out.clone(), lse.clone()
    torch.cuda.synchronize()
    compare(*kept, *wanted, causal=True)


def test_a_warm_call_does_not_wait_for_the_gpu(device):
    q, k, v = CASE.inputs(device)
    check(q, k, v, causal=True)
    torch.cuda.synchronize()
    busy(0.5)
    before = done_event()
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    waiting = not before.query()
    torch.cuda.synchronize()
    assert waiting, "the call returned only after the work that was queued before it"
    compare(out, lse, q, k, v, causal=True)


def test_a_warm_call_makes_no_synchronizing_torch_call(device):
    tensors = CASE.inputs(device)
    unaligned = [torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape) for x in tensors]
    for inputs in (tensors, unaligned):
        flash_attn_func(*inputs, causal=True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            flash_attn_func(*inputs, causal=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("causal", [False, True])
def test_a_cuda_graph_replays_with_changed_inputs(causal, device):
    case = replace(CASE, causal=causal)
    q, k, v = case.inputs(device)
    check(q, k, v, causal=causal)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    for seed in (1, 2, 3):
        for x, y in zip((q, k, v), replace(case, seed=seed).inputs(device), strict=True):
            x.copy_(y)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        compare(out, lse, q, k, v, causal=causal)


def test_a_cuda_graph_of_several_calls(device):
    """Two layers, the second fed by the first, into a given output: nothing that a call leaves behind may count."""
    q, k, v = replace(CASE, heads=2).inputs(device)
    out = torch.empty_like(q)
    middle, _ = check(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = flash_attn_func(q, k, v, causal=True)
        _, lse = flash_attn_func(first, k, v, causal=True, return_attn_probs=True, out=out)
    for _ in range(3):
        first.fill_(float("nan"))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(first, middle)
        compare(out, lse, first, k, v, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_launches_that_feed_each_other_do_not_overlap(causal, device):
    """A launch sets itself up while the one before it ends. Here it reads what that one writes, and writes over what
    that one reads.
    """
    q, k, v = Case(1, 2000, 2000, 16, 16, 128, 128).inputs(device)
    keys = [k.roll(100 * i, 1) for i in range(8)]

    def last(after_each):
        read, written = q.clone(), torch.full_like(q, float("nan"))
        for one in keys:  # scale 1: each query attends to few keys, so results of different steps are far apart
            flash_attn_func(read, one, v, causal=causal, softmax_scale=1.0, out=written)
            after_each()
            read, written = written, read
        return read

    one_by_one = last(torch.cuda.synchronize)
    for _ in range(10):
        assert torch.equal(last(lambda: None), one_by_one)


def test_threads_on_streams_of_their_own(device):
    """A thread starts on the default stream; every call must see its own thread's stream and the tensors' device."""
    cases = [replace(SMALL, seed=seed, seqlen_q=100 + 30 * seed, causal=bool(seed % 2)) for seed in range(4)]
    results, failures = {}, []

    def work(case):
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                inputs = case.inputs(device)
                for _ in range(20):
                    results[case] = inputs, run(*inputs, causal=case.causal)
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for case, (inputs, result) in results.items():
        compare(*result, *inputs, causal=case.causal)


@pytest.mark.parametrize(("tensors", "current"), [(1, 0), (0, 1)])
def test_line_10_tensors_on_a_device_that_is_not_current(tensors, current, device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = CASE.inputs(f"cuda:{tensors}")
    with torch.cuda.device(current):
        out, lse = check(*inputs, causal=True)
        assert torch.cuda.current_device() == current
    assert out.device == lse.device == inputs[0].device


def test_a_warm_call_compiles_nothing(device):
    """It finds its kernel in memory, whatever the lengths: a thousand calls take less than one compilation."""
    q, k, v = replace(SMALL, seqlen_q=64, seqlen_k=64).inputs(device)
    flash_attn_func(q, k, v)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(1000):
        flash_attn_func(q[:, : 1 + i % 64], k[:, : 1 + i % 61], v[:, : 1 + i % 61])
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    "seqlen", [300, 20000]
)  # an LSE that nobody asks for: small ones share memory, large ones do not
def test_the_result_is_the_same_where_the_lse_is_not_asked_for(seqlen, device):
    q, k, v = replace(CASE, batch=1, seqlen_q=seqlen, seqlen_k=300, heads=16, heads_k=2).inputs(device)
    out, lse = check(q, k, v, causal=True)
    kept = lse.clone()
    for _ in range(3):
        assert torch.equal(flash_attn_func(q, k, v, causal=True), out)
    assert torch.equal(lse, kept)


def share_until_done(work, device):
    """Part of the time of ``work()`` after which a small launch on another stream, made right behind it, is done."""
    q, k, v = Case(1, 64, 64, 1, 1, 128, 128).inputs(device)
    side = torch.cuda.Stream(device)
    begin, end, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    for _ in range(2):  # the first compiles
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        with torch.cuda.stream(side):
            flash_attn_func(q, k, v)
            done.record()
        torch.cuda.synchronize()
    return begin.elapsed_time(done) / begin.elapsed_time(end)


def test_others_run_on_the_sms_that_two_launches_leave_free(device):
    """The second launch's CTAs may not wait on them for the end of the first: half of the time would pass so."""
    q, k, v = Case(4, 8192, 8192, 16, 16, 128, 128).inputs(device)

    def work():
        for _ in range(2):
            flash_attn_func(q, k, v, sm_margin=8)

    assert share_until_done(work, device) < 0.3

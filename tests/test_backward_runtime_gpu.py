"""The backward's streams, threads, devices, CUDA graphs and memory, and that a warm call never waits for the GPU."""

import threading
from dataclasses import replace

import pytest
import torch
from cases import SMALL, Case
from check_gradients import arriving, check, compare, leaves_of, run, tensors_of
from test_forward_runtime_gpu import busy, share_until_done

from hopper_fa3 import flash_attn_func

pytestmark = pytest.mark.gpu

CASE = Case(2, 1000, 1000, 8, 2, 128, 128, causal=True)


def test_line_10_forward_and_backward_on_a_side_stream(device):
    """The side stream writes the inputs late: a kernel on another stream would read them before."""
    wanted = tensors_of(CASE, device)
    late = [torch.full_like(x, float("nan")) for x in wanted]
    run(*late[:3], dout=late[3], causal=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        for x, y in zip(late, wanted, strict=True):
            x.copy_(y)
        gradients = [x.clone() for x in run(*late[:3], dout=late[3], causal=True)]
    torch.cuda.synchronize()
    compare(gradients, *wanted[:3], dout=wanted[3], causal=True)


def test_line_10_backward_called_from_another_stream_than_the_forward(device):
    """PyTorch runs a backward on its forward's stream; that one is late here, and the caller waits for it."""
    q, k, v, dout = tensors_of(CASE, device)
    late = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    run(*late, dout=dout, causal=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        for x, y in zip(late, (q, k, v), strict=True):
            x.copy_(y)
        leaves = leaves_of(*late)
        out = flash_attn_func(*leaves, causal=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    compare(gradients, q, k, v, dout=dout, causal=True)


def test_line_10_backward_in_threads_on_streams_of_their_own(device):
    cases = [replace(SMALL, seed=seed, seqlen_q=100 + 30 * seed, causal=bool(seed % 2)) for seed in range(4)]
    results, failures = {}, []

    def work(case):
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                tensors = tensors_of(case, device)
                for _ in range(20):
                    results[case] = tensors, run(*tensors[:3], dout=tensors[3], causal=case.causal)
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for case, ((q, k, v, dout), gradients) in results.items():
        compare(gradients, q, k, v, dout=dout, causal=case.causal)


@pytest.mark.parametrize(("tensors", "current"), [(1, 0), (0, 1)])
def test_line_10_tensors_on_a_device_that_is_not_current(tensors, current, device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v, dout = tensors_of(CASE, f"cuda:{tensors}")
    with torch.cuda.device(current):
        gradients = check(q, k, v, dout=dout, causal=True)
        assert torch.cuda.current_device() == current
    assert {x.device for x in gradients} == {q.device}


def test_launches_that_feed_each_other_do_not_overlap(device):
    """A step's gradients are the next step's inputs, in memory that the allocator hands out again at once."""
    q, k, v, dout = tensors_of(replace(CASE, heads_k=8), device)

    def last(after_each):
        now, fixed = [q, k, v], {"causal": True, "deterministic": True}
        for _ in range(8):
            leaves = leaves_of(*now)
            gradients = torch.autograd.grad(flash_attn_func(*leaves, **fixed), leaves, dout)
            after_each()
            now = [x + gradient for x, gradient in zip(now, gradients, strict=True)]
        return now

    one_by_one = last(torch.cuda.synchronize)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(last(lambda: None), one_by_one, strict=True))


def recorded(leaves, arrived, **options):
    """Forward and backward as they are captured: ``(dq, dk, dv)``."""
    results = flash_attn_func(*leaves, return_attn_probs=True, **options)
    return torch.autograd.grad(results, leaves, arrived)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_cuda_graph_of_forward_and_backward_replays_with_changed_inputs(causal, deterministic, device):
    case = replace(CASE, causal=causal)
    q, k, v = case.inputs(device)
    arrived, options = arriving(q, v), {"causal": causal, "deterministic": deterministic}
    leaves = leaves_of(q, k, v)
    compare(recorded(leaves, arrived, **options), q, k, v, dout=arrived[0], dlse=arrived[1], causal=causal)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = recorded(leaves, arrived, **options)
    for seed in (1, 2, 3):
        fresh = replace(case, seed=seed).inputs(device)
        for x, y in zip((q, k, v, *arrived), (*fresh, *arriving(q, v, seed=10 + seed)), strict=True):
            x.copy_(y)
        for x in gradients:
            x.fill_(float("nan"))
        graph.replay()
        compare(gradients, q, k, v, dout=arrived[0], dlse=arrived[1], causal=causal)


def test_a_cuda_graph_of_two_layers(device):
    """The first layer's backward is fed by the second's: nothing that a launch leaves behind may count."""
    q, k, v, dout = tensors_of(replace(CASE, heads=2), device)
    leaves = leaves_of(q, k, v)

    def step():
        first = flash_attn_func(*leaves, causal=True, deterministic=True)
        second = flash_attn_func(first, *leaves[1:], causal=True, deterministic=True)
        return first.detach(), torch.autograd.grad(second, (first, *leaves), dout)

    middle, eager = step()
    inner, _, _ = check(middle, k, v, dout=dout, causal=True, how={"deterministic": True})
    assert torch.equal(inner, eager[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, gradients = step()
    for _ in range(3):
        for x in gradients:
            x.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(gradients, eager, strict=True))


def test_a_warm_backward_does_not_wait_for_the_gpu(device):
    q, k, v, dout = tensors_of(CASE, device)
    check(q, k, v, dout=dout, causal=True)
    leaves = leaves_of(q, k, v)
    out = flash_attn_func(*leaves, causal=True)
    torch.cuda.synchronize()
    busy(0.5)
    before = torch.cuda.Event()
    before.record()
    gradients = torch.autograd.grad(out, leaves, dout)
    waiting = not before.query()
    torch.cuda.synchronize()
    assert waiting, "the call returned only after the work that was queued before it"
    compare(gradients, q, k, v, dout=dout, causal=True)


def test_a_warm_backward_makes_no_synchronizing_torch_call(device):
    tensors = tensors_of(CASE, device)
    unaligned = [torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape) for x in tensors]
    for q, k, v, dout in (tensors, unaligned):
        for mode in ("default", "error"):
            leaves = leaves_of(q, k, v)
            torch.cuda.set_sync_debug_mode(mode)
            try:
                torch.autograd.grad(flash_attn_func(*leaves, causal=True), leaves, dout)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def rise(length, device, **options):
    """``(bytes by which the backward's peak lies above what was held before, bytes of the inputs)``."""
    q, k, v, dout = tensors_of(Case(1, length, length, 4, 1, 64, 64), device)
    leaves = leaves_of(q, k, v)
    out = flash_attn_func(*leaves, **options)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    torch.autograd.grad(out, leaves, dout)
    return torch.cuda.max_memory_allocated(device) - before, sum(x.nbytes for x in (q, k, v))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear_in_length(causal, deterministic, device):
    """Gradients take as much as the inputs; float32 sums of dQ, and of dK and dV of every query head before the group
    is added up, twice that each; delta and the LSE in base 2 little. Nothing of seqlen x seqlen.
    """
    lengths, options = (4096, 8192, 16384), {"causal": causal, "deterministic": deterministic}
    rise(lengths[0], device, **options)  # what stays for all calls
    rises = [rise(length, device, **options)[0] for length in lengths]
    assert rises[1] <= 2.1 * rises[0] and rises[2] <= 2.1 * rises[1]
    peak, inputs = rise(lengths[-1], device, **options)
    assert peak < lengths[-1] ** 2, "bytes: less than one byte for each score of one head"
    query = inputs * 4 // 6  # heads: four of q, one each of k and v
    assert peak <= inputs + 2 * query + 4 * query + inputs


@pytest.mark.parametrize("head_dim", [128, 256])
def test_others_run_on_the_sms_that_a_backward_leaves_free(head_dim, device):
    """No CTA of the kernels behind the main one may wait there for its end: nearly all of the time would pass so."""
    q, k, v = Case(2, 8192, 8192, 8, 8, head_dim, head_dim).inputs(device)
    leaves = leaves_of(q, k, v)
    out = flash_attn_func(*leaves, sm_margin=8)
    dout = torch.ones_like(out)
    assert share_until_done(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), device) < 0.5

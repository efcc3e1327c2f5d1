"""What the blockwise orders allocate and move: O(length) extra memory, and the closed forms of the traffic."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hopper_fa3.band import Band, blocks
from hopper_fa3.problem import Problem
from hopper_fa3.reference import (
    Traffic,
    blockwise,
    blockwise_backward,
    blockwise_kv_outer,
    standard,
    traffic_kv_outer,
    traffic_q_outer,
    traffic_standard,
)

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_Q, BLOCK_K = 32, 64


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operations create: the largest one, and the most that live at a time."""

    def __init__(self):
        super().__init__()
        self.largest = self.live = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        self.seen.update(x.untyped_storage()._cdata for x in inputs)
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor):
                self.record(result.untyped_storage())
        return results

    def record(self, storage):
        if storage._cdata in self.seen:
            return
        self.seen.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, storage.nbytes())
        weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())

    def free(self, key, size):
        self.seen.discard(key)
        self.live -= size


def inputs(seqlen_q, seqlen_k, heads=2, heads_k=1, head_dim=8, head_dim_v=4, batch=1):
    return (
        torch.randn(batch, seqlen_q, heads, head_dim),
        torch.randn(batch, seqlen_k, heads_k, head_dim),
        torch.randn(batch, seqlen_k, heads_k, head_dim_v),
    )


def allocated(attention, length, causal, with_gradients=False, **options):
    q, k, v = (x.requires_grad_(with_gradients) for x in inputs(length, length))
    problem = Problem.from_tensors(q, k, v, causal=causal, **options)
    with Allocations() as allocations:
        out, lse = attention(problem, q, k, v)
        if with_gradients:
            (out.sum() + lse.sum()).backward()
    return allocations


def small_blocks(order, **beside):
    return lambda problem, q, k, v: order(problem, q, k, v, block_q=BLOCK_Q, block_k=BLOCK_K, **beside)


def in_full(problem, q, k, v):
    return standard(q, k, v, right=problem.right)


def test_the_meter_sees_what_lives():
    with Allocations() as allocations:
        a = torch.ones(100)
        b = a + 1
        b.mul_(2)
        b.view(10, 10)
        del a
        c = b[:50] * 2
        assert allocations.live == 400 + 200
        del b, c
    assert (allocations.live, allocations.peak, allocations.largest) == (0, 800, 400)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", [blockwise, blockwise_kv_outer])
def test_extra_memory_is_linear_in_length(order, causal):
    lengths = (256, 512, 1024)
    peaks = [allocated(small_blocks(order), length, causal).peak for length in lengths]
    # Equal steps per token: linear with nothing above it. A constant part (the tile) makes the first ratio less than 2.
    steps = [(b - a) / (n - m) for a, b, m, n in zip(peaks, peaks[1:], lengths, lengths[1:], strict=False)]
    assert steps[1] == pytest.approx(steps[0], rel=0.05) and peaks[2] < 4.2 * peaks[0]
    # Per token: out, LSE and at most the state of FA-1 again, in float32; a bool for every value.
    assert steps[0] <= 4 * 2 * (2 * 4 + 3) + 4
    assert allocated(small_blocks(order), 1024, causal).largest < 1024 * 1024


@pytest.mark.parametrize("causal", [False, True])
def test_extra_memory_of_standard_is_quadratic(causal):
    peaks = [allocated(in_full, length, causal).peak for length in (256, 512, 1024)]
    assert peaks[1] > 3.8 * peaks[0] and peaks[2] > 3.8 * peaks[1]
    assert peaks[2] > 10 * allocated(small_blocks(blockwise), 1024, causal).peak


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "window_size": (50, 0)}, {"attention_chunk": 100}], ids=str)
@pytest.mark.parametrize("scored", [False, True])
def test_the_backward_pass_is_linear_too(scored, options):
    """Also with a sink, which takes its gradient, and slopes."""
    lengths = (256, 512, 1024)
    beside = {"sink": torch.ones(2, requires_grad=True), "alibi_slopes": torch.ones(2)} if scored else {}
    attention = small_blocks(blockwise, **beside)
    meters = [allocated(attention, length, True, with_gradients=True, **options, **beside) for length in lengths]
    peaks = [meter.peak for meter in meters]
    assert peaks[1] < 2.2 * peaks[0] and peaks[2] < 2.2 * peaks[1] and meters[2].largest < 1024 * 1024
    full = [allocated(in_full, length, True, with_gradients=True).peak for length in lengths]
    assert full[2] > 3.8 * full[1] and full[2] > 10 * peaks[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_the_backward_alone_allocates_the_gradients_and_tiles(causal, dtype):
    """Also where the arriving gradient is not contiguous: out.sum() expands a single number."""
    lengths, meters = (256, 512, 1024), []
    for length in lengths:
        q, k, v = (x.to(dtype) for x in inputs(length, length))
        problem = Problem.from_tensors(q, k, v, causal=causal)
        results = small_blocks(blockwise)(problem, q, k, v)
        given = [torch.ones((), dtype=x.dtype).expand(x.shape) for x in results]
        with Allocations() as meter:
            blockwise_backward(problem, q, k, v, *results, *given, block_q=BLOCK_Q, block_k=BLOCK_K)
        meters.append(meter)
    steps = [(b.peak - a.peak) / (n - m) for a, b, m, n in zip(meters, meters[1:], lengths, lengths[1:], strict=False)]
    # A token's dq (2 heads of 8), dk (8) and dv (4); the last two in float32 too where that is another dtype.
    gradients = (16 + 8 + 4) * dtype.itemsize + (0 if dtype == torch.float32 else (8 + 4) * 4)
    assert steps[1] == pytest.approx(steps[0], rel=0.01) and steps[0] <= gradients
    # The largest piece is a gradient or a tile of 2 heads, never the scores of the whole.
    assert meters[-1].largest <= max(1024 * 16, 2 * BLOCK_Q * BLOCK_K) * 4 < 1024 * 1024 * dtype.itemsize


def test_the_graph_keeps_inputs_and_results_only():
    q, k, v = (x.requires_grad_() for x in inputs(256, 256))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        out, lse = blockwise(Problem.from_tensors(q, k, v, causal=True), q, k, v, block_q=BLOCK_Q, block_k=BLOCK_K)
    assert [x.data_ptr() for x in packed] == [x.data_ptr() for x in (q, k, v, out, lse)]
    assert sum(x.nbytes for x in packed) == 4 * 256 * (2 * 8 + 8 + 4 + 2 * 4 + 2)
    # Nothing hides on the node outside of what the hooks see: a tensor there would never be freed or checked.
    node = out.grad_fn
    assert node is lse.grad_fn and node.next_functions[0][0].variable is q
    assert not [name for name, value in vars(node).items() if isinstance(value, torch.Tensor)]


SHAPES = (
    (96, 128, 2, 2, 8, 8, 1), (96, 128, 6, 2, 16, 4, 2), (100, 130, 5, 1, 8, 8, 2), (130, 100, 4, 4, 8, 16, 1),
    (1, 200, 8, 1, 8, 8, 2), (200, 1, 2, 2, 8, 8, 1), (0, 50, 2, 1, 8, 8, 1), (50, 0, 2, 1, 8, 8, 1),
)  # fmt: skip


def counted(order, problem, q, k, v):
    traffic = Traffic()
    order(problem, q, k, v, block_q=BLOCK_Q, block_k=BLOCK_K, traffic=traffic)
    return traffic


@pytest.mark.parametrize("chunk", [0, 24, 64])
@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (None, 17), (20, 0), (40, -1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_counts_are_the_closed_forms(shape, left, right, chunk):
    q, k, v = inputs(*shape)
    problem = Problem.from_tensors(q, k, v, window_size=(left, right), attention_chunk=chunk)
    assert counted(blockwise, problem, q, k, v) == traffic_q_outer(problem, BLOCK_Q)
    assert counted(blockwise_kv_outer, problem, q, k, v) == traffic_kv_outer(problem, BLOCK_K)


@pytest.mark.parametrize(("batch", "heads", "heads_k", "d", "d_v"), [(1, 1, 1, 8, 8), (2, 6, 2, 16, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_closed_forms_of_whole_tiles(batch, heads, heads_k, d, d_v, causal):
    """The docstrings' formulas, written out; lengths are multiples of the blocks."""
    n = 256
    q, k, v = inputs(n, n, heads, heads_k, d, d_v, batch)
    problem = Problem.from_tensors(q, k, v, causal=causal)
    rows, keys = batch * heads, batch * heads_k
    per_tile = n * (n // BLOCK_Q + 1) // 2 if causal else n * n // BLOCK_Q
    q_outer = Traffic(rows * n * d + keys * (d + d_v) * per_tile, rows * n * (d_v + 1))
    visits = n * (n // BLOCK_K + 1) // 2 if causal else n * n // BLOCK_K
    kv_outer = Traffic(
        keys * n * (d + d_v) + rows * visits * (d + d_v + 2) + rows * n * (d_v + 2),
        rows * n * (d_v + 2) + rows * visits * (d_v + 2) + rows * n * (d_v + 1),
    )
    full = Traffic(
        rows * n * d + keys * n * (d + d_v) + 2 * rows * n * n,
        2 * rows * n * n + rows * n * (d_v + 1),
    )
    assert traffic_q_outer(problem, BLOCK_Q) == counted(blockwise, problem, q, k, v) == q_outer
    assert traffic_kv_outer(problem, BLOCK_K) == counted(blockwise_kv_outer, problem, q, k, v) == kv_outer
    assert traffic_standard(problem) == full


def test_tiles_save_traffic_over_the_standard_way():
    """Theorem 2: N^2 d^2 / Z against N^2. Writing falls from quadratic to linear, and a larger tile reads less."""
    q, k, v = inputs(4096, 4096, 8, 8, 64, 64)
    problem = Problem.from_tensors(q, k, v)
    full, small, large = traffic_standard(problem), traffic_q_outer(problem, 128), traffic_q_outer(problem, 512)
    assert small.read < full.read / 1.9 and large.read < full.read / 7
    assert small.written == large.written < full.written / 100
    kv_outer = traffic_kv_outer(problem, 128)
    assert small.read + small.written < kv_outer.read + kv_outer.written < full.read + full.written


def test_the_other_order_has_softcap_and_chunks_too():
    q, k, v = inputs(100, 130, 6, 2)
    problem = Problem.from_tensors(q, k, v, window_size=(40, 9), attention_chunk=48, softcap=0.7)
    expected = blockwise(problem, q, k, v)
    for a, b in zip(small_blocks(blockwise_kv_outer)(problem, q, k, v), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_blocks_that_no_query_sees_are_not_read():
    q, k, v = inputs(256, 256)
    k[:, 100:], v[:, 100:] = float("nan"), float("nan")
    problem = Problem.from_tensors(q[:, :90], k, v)  # 90 queries, of which a right bound lets the last see key 99
    problem = replace(problem, right=99 - (89 + 256 - 90))
    traffic = Traffic()
    out, _ = blockwise(problem, q[:, :90], k, v, traffic=traffic)
    assert out.isfinite().all() and traffic.read == 90 * 2 * 8 + 100 * (8 + 4)


def moved_backward(problem, tensors, used=("out",), wanted="qkv"):
    """(read, written) of a backward pass through the results that are used, to the inputs that are wanted."""
    traffic = Traffic()
    leaves = [x.requires_grad_(name in wanted) for name, x in zip("qkv", tensors, strict=True)]
    results = blockwise(problem, *leaves, block_q=BLOCK_Q, block_k=BLOCK_K, traffic=traffic)
    forward = replace(traffic)
    assert forward == traffic_q_outer(problem, BLOCK_Q)
    sum(x.sum() for name, x in zip(("out", "lse"), results, strict=True) if name in used).backward()
    return traffic.read - forward.read, traffic.written - forward.written


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(96, 128), (100, 70)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_backward_pass_counts_too(seqlen_q, seqlen_k, causal):
    """The closed form in the docstring of blockwise_backward, and what one result or one gradient alone saves."""
    tensors = inputs(seqlen_q, seqlen_k)
    problem = Problem.from_tensors(*tensors, causal=causal)
    per_tile = [len(Band.of(problem).keys(rows)) for rows in blocks(range(seqlen_q), BLOCK_Q)]
    assert min(per_tile) > 0  # also with 30 queries that see nothing: they share their tile with two that do
    queries, keys = 2 * seqlen_q, sum(per_tile)
    read, written = queries * (8 + 2 * 4 + 1) + 2 * keys * (8 + 4), queries * 8 + (keys + seqlen_k) * (8 + 4)
    assert moved_backward(problem, tensors) == (read, written)
    assert moved_backward(problem, tensors, ("out", "lse")) == (read + queries, written)
    unread = 2 * queries * 4 + keys * 4  # O, dO and V
    assert moved_backward(problem, tensors, ("lse",)) == (read + queries - unread, written)
    unread = keys * (8 + 4)  # dK and dV
    assert moved_backward(problem, tensors, wanted="q") == (read - unread, queries * 8)
    unread = keys * (8 + 4)  # dK and V
    assert moved_backward(problem, tensors, wanted="v") == (read - unread, (keys + seqlen_k) * 4)


def test_tiles_without_keys_are_not_read_in_the_backward():
    tensors = inputs(96, 32)
    problem = Problem.from_tensors(*tensors, causal=True)  # two of three tiles see nothing
    read, written = 2 * 32 * (8 + 2 * 4 + 1) + 2 * 32 * (8 + 4), 2 * 32 * 8 + 2 * 32 * (8 + 4)
    assert moved_backward(problem, tensors) == (read, written)

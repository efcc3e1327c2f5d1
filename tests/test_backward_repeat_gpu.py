"""Repeated backward passes: deterministic ones give the same bits fifty times over, others stay within the bound."""

from dataclasses import replace

import pytest
import torch
from cases import Case
from check_gradients import arriving, compare, run

pytestmark = pytest.mark.gpu

RUNS = 50
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
CASE = Case(2, 1000, 1113, 8, 2, 128, 128)  # ragged ends, four query heads per K/V head, more tiles than SMs


class Company:
    """Other work on the GPU: matrix products of changing size on a stream of their own move our blocks' timing."""

    def __init__(self, device):
        self.stream = torch.cuda.Stream(device)
        self.tensor = torch.ones(2048, 2048, device=device, dtype=torch.bfloat16)
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def work(self, turn):
        size = 256 * (1 + turn % 8)
        with torch.cuda.stream(self.stream):
            for _ in range(turn % 5):
                self.tensor[:size] @ self.tensor

    def rest(self):
        self.stream.synchronize()


@pytest.fixture
def company(device):
    found = Company(device)
    yield found
    found.rest()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), DIMS)
def test_deterministic_gradients_are_bit_equal(head_dim, head_dim_v, causal, company, device):
    q, k, v = replace(CASE, head_dim=head_dim, head_dim_v=head_dim_v).inputs(device)
    arrived = dict(zip(("dout", "dlse"), arriving(q, v), strict=True))
    first = run(q, k, v, **arrived, causal=causal, deterministic=True)
    changed = torch.zeros(RUNS, 3, dtype=torch.bool, device=device)
    for turn in range(RUNS):
        company.work(turn)
        again = run(q, k, v, **arrived, causal=causal, deterministic=True)
        changed[turn] = torch.stack([(one != two).any() for one, two in zip(first, again, strict=True)])
    assert not changed.any(), f"[run, gradient] {changed.nonzero().tolist()} differ"
    compare(first, q, k, v, **arrived, causal=causal)


# Queries that no key tile visits; a bound past the diagonal; heads in several sections; fp16
ORDERS = (
    replace(CASE, seqlen_q=1500, seqlen_k=700, causal=True),
    replace(CASE, seqlen_q=1000, seqlen_k=700, window_size=(-1, 200)),
    replace(CASE, batch=5, seqlen_q=2000, seqlen_k=2000, heads=8, heads_k=8),
    replace(CASE, batch=5, seqlen_q=2000, seqlen_k=2000, heads=8, heads_k=8, causal=True),
    replace(CASE, dtype="float16", causal=True),
)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", ORDERS, ids=lambda case: case.name)
def test_deterministic_gradients_whatever_the_order_of_tiles(case, head_dim, company, device):
    q, k, v = replace(case, head_dim=head_dim, head_dim_v=head_dim).inputs(device)
    dout, _ = arriving(q, v)
    options = {"causal": case.causal, "window_size": case.window_size}
    first = run(q, k, v, dout=dout, deterministic=True, **options)
    for turn in range(5):
        company.work(turn)
        again = run(q, k, v, dout=dout, deterministic=True, **options)
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    compare(first, q, k, v, dout=dout, **options)


@pytest.mark.parametrize("sms", [1, 32, None])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients_on_any_number_of_sms(sms, head_dim, company, device):
    """An order that rests on which block comes first must not hang or change where few blocks run at once."""
    q, k, v = replace(CASE, head_dim=head_dim, head_dim_v=head_dim).inputs(device)
    dout, _ = arriving(q, v)
    count = torch.cuda.get_device_properties(device).multi_processor_count
    options = {"causal": True, "deterministic": True, "sm_margin": count - (sms or count)}
    first = run(q, k, v, dout=dout, **options)
    for turn in range(5):
        company.work(turn)
        again = run(q, k, v, dout=dout, **options)
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    compare(first, q, k, v, dout=dout, causal=True)


def test_deterministic_gradients_on_streams_that_run_at_once(device):
    """Each stream has a case of its own; whatever calls share (counters, semaphores) must not mix them up."""
    cases = [replace(CASE, seed=seed, causal=bool(seed % 2), seqlen_q=700 + 100 * seed) for seed in range(3)]
    inputs = [case.inputs(device) for case in cases]
    arrived = [arriving(q, v)[0] for q, _, v in inputs]
    wanted = [
        run(*tensors, dout=dout, causal=case.causal, deterministic=True)
        for case, tensors, dout in zip(cases, inputs, arrived, strict=True)
    ]
    streams = [torch.cuda.Stream(device) for _ in cases]
    torch.cuda.synchronize()
    results = [[] for _ in cases]
    for _ in range(10):
        for case, tensors, dout, stream, kept in zip(cases, inputs, arrived, streams, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(run(*tensors, dout=dout, causal=case.causal, deterministic=True))
    torch.cuda.synchronize()
    for first, kept in zip(wanted, results, strict=True):
        assert all(torch.equal(a, b) for gradients in kept for a, b in zip(gradients, first, strict=True))
    for case, tensors, dout, first in zip(cases, inputs, arrived, wanted, strict=True):
        compare(first, *tensors, dout=dout, causal=case.causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_stay_within_the_bound_run_after_run(head_dim, causal, company, device):
    """The largest and the smallest value that each element takes: the bound is one of elements, so it holds for all."""
    q, k, v = replace(CASE, head_dim=head_dim, head_dim_v=head_dim).inputs(device)
    dout, _ = arriving(q, v)
    largest = smallest = run(q, k, v, dout=dout, causal=causal)
    for turn in range(RUNS):
        company.work(turn)
        again = run(q, k, v, dout=dout, causal=causal)
        largest, smallest = (
            [choose(one, two) for one, two in zip(extreme, again, strict=True)]
            for choose, extreme in ((torch.maximum, largest), (torch.minimum, smallest))
        )
    compare(largest, q, k, v, dout=dout, causal=causal)
    compare(smallest, q, k, v, dout=dout, causal=causal)

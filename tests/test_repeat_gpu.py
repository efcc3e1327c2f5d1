"""The same call gives the same bits: a hundred times over, and on streams that run at once."""

import pytest
import torch
from cases import Case
from check import check, compare, run

pytestmark = pytest.mark.gpu

CASES = [
    Case(2, 1000, 1113, 14, 2, 128, 128, causal=True),
    Case(3, 777, 2048, 8, 8, 64, 64),
    Case(1, 2000, 1999, 6, 1, 256, 256, causal=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hundred_repeats_are_bit_equal(case, device):
    q, k, v = case.inputs(device)
    first, first_lse = check(q, k, v, **case.options)
    changed = torch.zeros(100, dtype=torch.bool, device=device)
    for i in range(100):
        out, lse = run(q, k, v, **case.options)
        changed[i] = (out != first).any() | (lse != first_lse).any()
    assert not changed.any(), f"repeats {changed.nonzero().flatten().tolist()} differ"


def test_streams_that_run_at_once_are_bit_equal(device):
    """Each stream runs another case again and again; whatever calls share must not mix them up."""
    inputs = [case.inputs(device) for case in CASES]
    wanted = [check(*tensors, **case.options) for case, tensors in zip(CASES, inputs, strict=True)]
    streams = [torch.cuda.Stream() for _ in CASES]
    torch.cuda.synchronize()
    results = [[] for _ in CASES]
    for _ in range(20):
        for case, tensors, stream, kept in zip(CASES, inputs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(run(*tensors, **case.options))
    torch.cuda.synchronize()
    for (first, first_lse), kept in zip(wanted, results, strict=True):
        assert all(torch.equal(out, first) and torch.equal(lse, first_lse) for out, lse in kept)
    for case, tensors, kept in zip(CASES, inputs, results, strict=True):
        compare(*kept[-1], *tensors, **case.options)

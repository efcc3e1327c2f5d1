"""Where a NaN or inf of an input, or of an arriving gradient, reaches on the CPU path: exactly what depends on it."""

import math
from dataclasses import replace

import pytest
import torch
from problems import EXACT, agree, arriving, asked, derived, inputs, leaves

from hopper_fa3.reference import blockwise

pytestmark = pytest.mark.usefixtures("one_thread")

CAUSAL = pytest.mark.parametrize("causal", [False, True])
VALUES = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
LENGTHS = pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(20, 20), (20, 12), (12, 20)])
GROUP = 2  # of 4 heads over 2
ENTRY, KV_HEAD, HEAD, COLUMN = 1, 1, 3, 5  # where the value is put; the head is one of the K/V head's group
HEADS = slice(KV_HEAD * GROUP, (KV_HEAD + 1) * GROUP)


def gradients(tensors, given, **options):
    tensors = leaves(tensors)
    results = blockwise(asked(*tensors, **options), *tensors, block_q=5, block_k=8)
    return derived(results, tensors, given)


def drawn(seqlen_q, seqlen_k):
    tensors = inputs(seqlen_q, seqlen_k)
    shape = (2, seqlen_q, 4, 8)
    return tensors, arriving(
        (torch.empty(shape, dtype=torch.float64), torch.empty(2, 4, seqlen_q, dtype=torch.float64))
    )


def visible(seqlen_q, seqlen_k, causal):
    """Bool (seqlen_q, seqlen_k)"""
    keys, queries = torch.arange(seqlen_k), torch.arange(seqlen_q)[:, None]
    return (keys - (queries + seqlen_k - seqlen_q) <= 0) if causal else torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)


class Reached:
    """Bool masks of dq, dk and dv: what must not be finite. All else must be as if the value were not there."""

    def __init__(self, seqlen_q, seqlen_k):
        self.dq = torch.zeros(2, seqlen_q, 4, 8, dtype=torch.bool)
        self.dk, self.dv = (torch.zeros(2, seqlen_k, 2, 8, dtype=torch.bool) for _ in range(2))

    def check(self, ours, clean):
        masks = (self.dq, self.dk, self.dv)
        for name, gradient, mask in zip(("dq", "dk", "dv"), ours, masks, strict=True):
            wrong = (~gradient.isfinite() != mask).nonzero()
            assert not len(wrong), f"{name}: first wrong place {wrong[0].tolist()}"
        agree(*([x.masked_fill(mask, 0) for x, mask in zip(y, masks, strict=True)] for y in (ours, clean)), **EXACT)


@CAUSAL
@VALUES
@LENGTHS
@pytest.mark.parametrize("where", ["q", "dout", "dlse"])
def test_of_one_query(where, seqlen_q, seqlen_k, value, causal):
    tensors, given = drawn(seqlen_q, seqlen_k)
    clean = gradients(tensors, given, causal=causal)
    seen = visible(seqlen_q, seqlen_k, causal)
    for row in (0, 9, seqlen_q - 1):  # row 0 sees nothing with more queries than keys
        spoiled = {"q": tensors[0].clone(), "dout": given[0].clone(), "dlse": given[1].clone()}
        spoiled[where][(ENTRY, HEAD, row) if where == "dlse" else (ENTRY, row, HEAD, COLUMN)] = value
        ours = gradients((spoiled["q"], *tensors[1:]), (spoiled["dout"], spoiled["dlse"]), causal=causal)
        reached = Reached(seqlen_q, seqlen_k)
        reached.dq[ENTRY, row, HEAD] = seen[row].any()
        reached.dk[ENTRY, seen[row], KV_HEAD] = True
        if where == "q":
            reached.dv[ENTRY, seen[row], KV_HEAD] = True
        if where == "dout":
            reached.dv[ENTRY, seen[row], KV_HEAD, COLUMN] = True
        reached.check(ours, clean)


@CAUSAL
@LENGTHS
@pytest.mark.parametrize("where", ["k", "v"])
def test_of_one_key(where, seqlen_q, seqlen_k, causal):
    """dv does not depend on v. The diagonal decides which queries see the key, and those which keys they reach."""
    tensors, given = drawn(seqlen_q, seqlen_k)
    clean = gradients(tensors, given, causal=causal)
    seen = visible(seqlen_q, seqlen_k, causal)
    for key in (0, 7, seqlen_k - 1):
        q, k, v = (x.clone() for x in tensors)
        {"k": k, "v": v}[where][ENTRY, key, KV_HEAD, COLUMN] = math.nan
        rows, reached = seen[:, key], Reached(seqlen_q, seqlen_k)
        reached.dq[ENTRY, rows, HEADS] = True
        keys = seen[rows].any(0)
        reached.dk[ENTRY, keys, KV_HEAD] = True
        reached.dv[ENTRY, keys, KV_HEAD] = where == "k"
        reached.check(gradients((q, k, v), given, causal=causal), clean)


@VALUES
def test_queries_that_see_nothing_are_not_read(value):
    """Whole tiles of them, and in a tile with others; dout and dlse too."""
    (q, k, v), (dout, dlse) = drawn(20, 12)
    clean = gradients((q, k, v), (dout, dlse), causal=True)
    q[:, :8] = dout[:, :8] = dlse[:, :, :8] = value
    ours = gradients((q, k, v), (dout, dlse), causal=True)
    agree(ours, clean, **EXACT)
    assert not ours[0][:, :8].any() and ours[0][:, 9:].all()


@VALUES
def test_keys_that_no_query_sees_are_not_read(value):
    """Past a right bound: the last query sees key 12, in the middle of a block of 8."""
    tensors, given = drawn(20, 20)
    results = []
    for spoil in (False, True):
        q, k, v = leaves(tensors)
        if spoil:
            k.detach()[:, 13:], v.detach()[:, 13:] = value, value
        problem = replace(asked(q, k, v), right=-7)
        results.append(derived(blockwise(problem, q, k, v, block_q=5, block_k=8), (q, k, v), given))
    agree(*results, **EXACT)
    assert not results[1][1][:, 13:].any() and not results[1][2][:, 13:].any()


@CAUSAL
@pytest.mark.parametrize("keys", [slice(9, 30), slice(4, 26), slice(1, 30, 2)], ids=str)
def test_keys_of_no_weight_give_and_take_nothing(keys, causal):
    """Scores of -inf, beside V of NaN; as scores so low that P underflows, beside a plain V."""
    tensors, given = drawn(20, 30)
    q, k, v = tensors
    q[..., 0] = q[..., 0].abs() + 0.5
    low, unused = k.clone(), v.clone()
    low[:, keys, :, 0], unused[:, keys] = -math.inf, math.nan
    ours = gradients((q, low, unused), given, causal=causal)
    k[:, keys, :, 0] = -1e5
    agree(ours, gradients((q, k, v), given, causal=causal), **EXACT)
    assert not ours[1][:, keys].any() and not ours[2][:, keys].any() and ours[0].all()


def test_a_query_of_only_minus_inf_scores_reaches_its_keys_only():
    """Its out is NaN, so are its gradients; those of queries that see nothing stay 0."""
    tensors, given = drawn(20, 12)
    q, k, v = tensors
    q[..., 0] = q[..., 0].abs() + 0.5
    k[:, :3, :, 0] = -math.inf  # queries 8, 9 and 10 see no other keys
    dq, dk, dv = gradients((q, k, v), given, causal=True)
    assert not dq[:, :8].any() and dq[:, 8:11].isnan().all() and dq[:, 11:].isfinite().all()
    for x in (dk, dv):
        assert x[:, :3].isnan().all() and x[:, 3:].isfinite().all()

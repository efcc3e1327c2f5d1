"""NaN and inf in Q, K, V, dO and dLSE: which gradients they must reach, which they may, and that all else stays right.

A tile takes part as a whole in a matrix product, where 0 * NaN is NaN: so a value may also reach other rows and keys of
the tiles that it passes through. Whatever stays finite must be the gradient without the value.
"""

import math
from dataclasses import replace

import pytest
import torch
from cases import Case
from check_gradients import arriving, check, compare, run

pytestmark = pytest.mark.gpu

CASE = Case(2, 1200, 1200, 4, 2, 64, 64)
BATCH, HEAD, HEAD_K, COLUMN = 1, 2, 1, 7  # where a test puts its one value
ROW = KEY = 500
GROUP = slice(2, 4)  # the query heads that read HEAD_K
TILE = 192  # no tile of queries or keys has more rows
NEAR = (ROW - TILE + 1, ROW + TILE)  # all rows that may share a tile with ROW


def places(tensors, spots):
    """Bool masks of the shapes of (q, k, v), True in the [batch, rows, heads, columns] of each spot; None: nowhere."""
    masks = tuple(torch.zeros(x.shape, dtype=torch.bool, device=x.device) for x in tensors)
    for mask, spot in zip(masks, spots, strict=True):
        if spot is not None:
            mask[spot] = True
    return masks


def compare_where_finite(gradients, must, may, tensors, arrived, **options):
    """All ``must`` places are NaN or inf, none outside ``may`` is, and the finite ones are the ``arrived`` ones' right
    gradients.
    """
    masks = (places(tensors, must), places(tensors, may))
    spoiled = [~x.isfinite() for x in gradients]
    for name, found, needed, allowed in zip(("dq", "dk", "dv"), spoiled, *masks, strict=True):
        missing, beyond = (needed & ~found).nonzero(), (found & ~allowed).nonzero()
        assert not len(missing), f"{name}: finite in {len(missing)} places, the first one {missing[0].tolist()}"
        assert not len(beyond), f"{name}: not finite in {len(beyond)} places, the first one {beyond[0].tolist()}"
    clean = run(*tensors, **arrived, **options)
    compare(clean, *tensors, **arrived, **options)
    patched = [x.where(~bad, good) for x, bad, good in zip(gradients, spoiled, clean, strict=True)]
    compare(patched, *tensors, **arrived, **options)


def with_value(x, spot, value):
    x = x.clone()
    x[spot] = value
    return x


def seen_by(rows, causal):
    """Keys that at least one of the first ``rows`` queries sees."""
    return slice(0, rows if causal else None)


def sizes(head_dim):
    return replace(CASE, head_dim=head_dim, head_dim_v=head_dim)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_one_value_in_q(value, causal, head_dim, device):
    """Its row's P is NaN: dQ of the row, dK and dV of the keys that the row sees."""
    q, k, v = sizes(head_dim).inputs(device)
    arrived = dict(zip(("dout", "dlse"), arriving(q, v), strict=True))
    gradients = run(with_value(q, (BATCH, ROW, HEAD, COLUMN), value), k, v, **arrived, causal=causal)
    row, seen = (BATCH, ROW, HEAD), (BATCH, seen_by(ROW + 1, causal), HEAD_K)
    near = (BATCH, seen_by(NEAR[1] + TILE, causal), HEAD_K)
    compare_where_finite(gradients, (row, seen, seen), (row, near, near), (q, k, v), arrived, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_one_value_in_the_gradient_of_out(value, causal, head_dim, device):
    """dQ of the row, dK of the keys that it sees, and one column of dV."""
    q, k, v = sizes(head_dim).inputs(device)
    dout, _ = arriving(q, v)
    gradients = run(q, k, v, dout=with_value(dout, (BATCH, ROW, HEAD, COLUMN), value), causal=causal)
    row, seen = (BATCH, ROW, HEAD), (BATCH, seen_by(ROW + 1, causal), HEAD_K)
    near = (BATCH, seen_by(NEAR[1] + TILE, causal), HEAD_K)
    must, may = (row, seen, (*seen, COLUMN)), (row, near, (*near, COLUMN))
    compare_where_finite(gradients, must, may, (q, k, v), {"dout": dout}, causal=causal)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_one_value_in_the_gradient_of_the_lse(value, causal, device):
    """dQ of the row and dK of the keys that it sees; dV does not depend on it."""
    q, k, v = CASE.inputs(device)
    dout, dlse = arriving(q, v)
    spoiled = with_value(dlse, (BATCH, HEAD, ROW), value)
    gradients = run(q, k, v, dout=dout, dlse=spoiled, causal=causal)
    row, seen = (BATCH, ROW, HEAD), (BATCH, seen_by(ROW + 1, causal), HEAD_K)
    near = (BATCH, seen_by(NEAR[1] + TILE, causal), HEAD_K)
    arrived = {"dout": dout, "dlse": dlse}
    compare_where_finite(gradients, (row, seen, None), (row, near, None), (q, k, v), arrived, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_a_nan_in_k(causal, head_dim, device):
    """The LSE of every row that sees it is NaN, and so are dK and dV of all keys that these rows see."""
    q, k, v = sizes(head_dim).inputs(device)
    dout, _ = arriving(q, v)
    gradients = run(q, with_value(k, (BATCH, KEY, HEAD_K, COLUMN), math.nan), v, dout=dout, causal=causal)
    rows, near = ((BATCH, slice(first if causal else 0, None), GROUP) for first in (KEY, NEAR[0]))
    keys = (BATCH, slice(None), HEAD_K)
    compare_where_finite(gradients, (rows, keys, keys), (near, keys, keys), (q, k, v), {"dout": dout}, causal=causal)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_an_inf_in_k(value, causal, device):
    """Rows whose score is +inf have LSE NaN. Those whose score is -inf give the key no weight, but 0 * inf in dS K may
    spoil their dQ in its column.
    """
    q, k, v = CASE.inputs(device)
    dout, _ = arriving(q, v)
    (dq, dk, dv) = run(q, with_value(k, (BATCH, KEY, HEAD_K, COLUMN), value), v, dout=dout, causal=causal)
    first, keys = (KEY if causal else 0), (BATCH, slice(None), HEAD_K)
    reached = (q[BATCH, first:, GROUP, COLUMN] * value > 0).nonzero()
    assert 0 < len(reached) < 2 * (CASE.seqlen_q - first)
    seen = (BATCH, seen_by(int(reached[:, 0].max()) + first + 1, causal), HEAD_K)
    must = places((q, k, v), ((BATCH, reached[:, 0] + first, reached[:, 1] + GROUP.start), seen, seen))
    assert not any((x.isfinite() & mask).any() for x, mask in zip((dq, dk, dv), must, strict=True))
    near = (BATCH, slice(NEAR[0] if causal else 0, None), GROUP)
    may = places((q, k, v), (near, keys, keys))
    assert all((x.isfinite() | mask).all() for x, mask in zip((dq, dk, dv), may, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_one_value_in_v(value, causal, head_dim, device):
    """Through out and so delta: dQ of the rows that see it and dK of all keys that they see. P stays as it was."""
    q, k, v = sizes(head_dim).inputs(device)
    dout, _ = arriving(q, v)
    gradients = run(q, k, with_value(v, (BATCH, KEY, HEAD_K, COLUMN), value), dout=dout, causal=causal)
    rows, near = ((BATCH, slice(first if causal else 0, None), GROUP) for first in (KEY, NEAR[0]))
    keys = (BATCH, slice(None), HEAD_K)
    compare_where_finite(gradients, (rows, keys, None), (near, keys, None), (q, k, v), {"dout": dout}, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_arrives_at_rows_that_see_no_key_is_not_read(value, head_dim, device):
    """Their dQ is 0 whatever arrives, and where they fill whole tiles, nothing at all comes of it."""
    q, k, v = replace(sizes(head_dim), seqlen_q=700, seqlen_k=300).inputs(device)
    clean = dict(zip(("dout", "dlse"), arriving(q, v), strict=True))
    blind = 400
    for last in (blind - TILE, blind):
        spoiled = {"dout": clean["dout"].clone(), "dlse": clean["dlse"].clone()}
        spoiled["dout"][:, :last] = value
        spoiled["dlse"][:, :, :last] = value
        gradients = run(q, k, v, **spoiled, causal=True)
        assert not gradients[0][:, :blind].any(), "dq: a row that sees no key must be exactly 0"
        # The last tile of blind rows may hold rows that see the first keys
        shared = (slice(None), slice(0, 2 * TILE)) if last == blind else None
        compare_where_finite(gradients, (None,) * 3, (None, shared, shared), (q, k, v), clean, causal=True)


@pytest.mark.parametrize("keys", [slice(0, 290), slice(310, 600), slice(0, 600, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_keys_without_weight_get_no_gradient(keys, causal, device):
    """Scores near -1e4 beside those near 0: P underflows to 0. Every query sees a key of the other kind: with
    a causal mask the first one sees 301.
    """
    q, k, v = replace(CASE, seqlen_q=300, seqlen_k=600).inputs(device)
    q[..., 0] = q[..., 0].abs() + 8
    k[:, keys, :, 0] = -1e4
    _, dk, dv = check(q, k, v, causal=causal)
    assert not dk[:, keys].any() and not dv[:, keys].any()


def test_a_nan_among_the_inputs_of_one_head_leaves_the_others_bit_equal(device):
    """With deterministic gradients, other heads and batches must not change by a single bit."""
    q, k, v = replace(CASE, head_dim=128, head_dim_v=128).inputs(device)
    dout, _ = arriving(q, v)
    options = {"causal": True, "deterministic": True}
    clean = run(q, k, v, dout=dout, **options)
    compare(clean, q, k, v, dout=dout, causal=True)
    spoiled = run(with_value(q, (BATCH, ROW, HEAD, COLUMN), math.nan), k, v, dout=dout, **options)
    others = places((q, k, v), [(BATCH, slice(None), head) for head in (HEAD, HEAD_K, HEAD_K)])
    for before, after, mask in zip(clean, spoiled, others, strict=True):
        assert torch.equal(before.masked_fill(mask, 0), after.masked_fill(mask, 0))

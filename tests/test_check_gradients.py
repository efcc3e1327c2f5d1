"""The harness of gradients itself, on the CPU: its oracle is autograd's, its bound takes honest kernels and rejects
wrong ones.
"""

import math
from dataclasses import replace

import pytest
import torch
from cases import SMALL, Case, bounds
from check_gradients import arriving, check, compare, leaves_of, oracle, run, spoil_free_memory, yardstick
from test_check import honest

from hopper_fa3 import flash_attn_func
from hopper_fa3.reference import standard

pytestmark = pytest.mark.usefixtures("one_thread")


def honest_gradients(case, q, k, v, out, lse, dout, dlse):
    """(dq, dk, dv) as a kernel computes them: P and dS in q's dtype in front of products, all else float32."""
    (_, right), group, shift = (
        bounds(case.causal, case.window_size),
        case.heads // case.heads_k,
        k.shape[1] - q.shape[1],
    )
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    queries, stored, gradient = (x.float().transpose(1, 2) for x in (q, out, dout))
    keys, values = (x.float().transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    scores = queries @ keys.mT * scale
    if right is not None:
        scores = scores.masked_fill(
            torch.arange(k.shape[1]) > torch.arange(q.shape[1])[:, None] + shift + right, -math.inf
        )
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
    delta = (gradient * stored).sum(-1) - dlse
    inner = (weights * (gradient @ values.mT - delta[..., None])).to(q.dtype).float()
    found = (scale * inner @ keys, scale * inner.mT @ queries, weights.to(q.dtype).float().mT @ gradient)
    summed = (
        x.unflatten(1, (x.shape[1] // parts, parts)).sum(2) for x, parts in zip(found, (1, group, group), strict=True)
    )
    return tuple(x.transpose(1, 2).to(q.dtype) for x in summed)


def kernel(case, backward=honest_gradients):
    """Attention of this case as a function of (q, k, v, options), differentiable by ``backward``."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out = q.new_empty((*q.shape[:3], v.shape[-1]))
            out, lse = honest(q, k, v, out=out, return_attn_probs=True, **case.options)
            ctx.save_for_backward(q, k, v, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx, dout, dlse):
            return backward(case, *ctx.saved_tensors, dout, dlse)

    def attention(q, k, v, return_attn_probs=False, **options):
        out, lse = Kernel.apply(q, k, v)
        return (out, lse) if return_attn_probs else out

    return attention


ACCEPTED = [
    replace(SMALL, seqlen_q=q, seqlen_k=k, head_dim=d, head_dim_v=d_v, heads=4, heads_k=2, dtype=dtype, causal=causal)
    for dtype in ("bfloat16", "float16") for causal in (False, True)
    for q, k, d, d_v in ((113, 255, 64, 64), (255, 113, 64, 40), (1, 63, 128, 128), (63, 1, 24, 128), (1, 1, 8, 8),
                         (5, 2, 128, 128), (2, 3, 64, 64))
] + [
    replace(SMALL, window_size=(-1, 5)),
    *(replace(SMALL, softmax_scale=scale, causal=True) for scale in (0.0, -0.1, math.sqrt(120))),
]  # fmt: skip


@pytest.mark.parametrize("flow", ["out", "both", "lse"])
@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name)
def test_an_honest_kernel_passes(case, flow):
    q, k, v = case.inputs()
    dout, dlse = arriving(q, v)
    arrived = {"out": {"dout": dout}, "both": {"dout": dout, "dlse": dlse}, "lse": {"dlse": dlse}}[flow]
    check(q, k, v, **arrived, attention=kernel(case), **case.options)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_no_pairs(sizes):
    case = replace(SMALL, seqlen_q=sizes[0], seqlen_k=sizes[1])
    dq, dk, dv = check(*case.inputs(), **case.options)
    assert not dq.any() and not dk.any() and not dv.any()
    dq, dk, dv = (torch.ones_like(x) for x in (dq, dk, dv))
    if sum(sizes):
        with pytest.raises(AssertionError, match="exactly 0"):
            compare((dq, dk, dv), *case.inputs())


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(("sizes", "mask"), [((37, 50), {}), ((50, 37), {"causal": True}), ((40, 40), {"right": 3})])
def test_the_oracle_is_autograd_through_standard_attention(sizes, mask, with_lse):
    case = replace(SMALL, seqlen_q=sizes[0], seqlen_k=sizes[1], heads=4, heads_k=2, head_dim=24, head_dim_v=16)
    left, right = None, 0 if mask.get("causal") else mask.get("right")
    q, k, v = (x.double() for x in case.inputs())
    dout, dlse = (x.double() for x in arriving(q, v))
    leaves = leaves_of(q, k, v)
    results = standard(*leaves, softmax_scale=0.3, left=left, right=right)
    used = slice(None, 2 if with_lse else 1)
    wanted = torch.autograd.grad(results[used], leaves, (dout, dlse)[used])
    dlse = dlse if with_lse else None
    rest = {"same_out": results[0].detach(), "dtype": torch.float64}
    exact = oracle(q, k, v, dout, dlse, 0.3, left, right, **rest).gradients
    same, out = yardstick(q, k, v, dout, dlse, 0.3, left, right)  # in float64 it is exact too: head by head
    assert torch.equal(out, results[0])
    for one, two, three in zip(exact, wanted, same, strict=True):
        assert torch.allclose(one, two, rtol=1e-10, atol=1e-12) and torch.allclose(three, two, rtol=1e-10, atol=1e-12)


# Every query sees a key in WRONG, so that each planted error changes something.
WRONG = Case(2, 100, 255, 4, 2, 64, 64, causal=True)


def spoiled(change):
    """Gradients of which ``change`` gets the list (dq, dk, dv), after an honest backward."""

    def backward(*arguments):
        found = list(honest_gradients(*arguments))
        change(found)
        return tuple(found)

    return backward


def changed(**others):
    """An honest backward of arguments that ``others`` replaces, each by a function of all arguments."""
    names = ("case", "q", "k", "v", "out", "lse", "dout", "dlse")

    def backward(*arguments):
        given = dict(zip(names, arguments, strict=True))
        return honest_gradients(**given | {name: make(given) for name, make in others.items()})

    return backward


def one_element(which, place, by):
    def change(found):
        found[which][place] += by

    return spoiled(change)


def one_untouched(which, place):
    return one_element(which, place, math.nan)


def last_query_missing(found):
    found[0][1, -1] = 0


def last_key_missing(found):
    found[2][0, -1] = 0


def heads_swapped(found):
    found[1] = found[1][:, :, [1, 0]]


def queries_accumulated_twice(found):
    found[0] = 2 * found[0]


def one_head_of_the_group_only(case, q, k, v, out, lse, dout, dlse):
    only = dout.clone()
    only[:, :, 1::2] = 0
    dq, _, _ = honest_gradients(case, q, k, v, out, lse, dout, dlse)
    _, dk, dv = honest_gradients(case, q, k, v, out, lse, only, dlse)
    return dq, dk, dv


@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (one_element(0, (1, 50, 3, 17), 0.02), "dq: error"),
        (one_element(1, (1, 200, 1, 63), 0.02), "dk: error"),
        (one_element(2, (0, 0, 0, 0), 0.1), "dv: error"),
        (one_untouched(0, (0, 99, 3, 63)), "dq: NaN in 1 places, expected 0"),
        (one_untouched(1, (0, 254, 1, 63)), "dk: NaN in 1 places"),
        (one_untouched(2, (1, 0, 0, 0)), "dv: NaN in 1 places"),
        (spoiled(last_query_missing), "dq: error"),
        (spoiled(last_key_missing), "dv: error"),
        (spoiled(heads_swapped), "dk: error"),
        (spoiled(queries_accumulated_twice), "dq: error"),
        (one_head_of_the_group_only, "dk: error"),
        (changed(dlse=lambda given: -given["dlse"]), "dq: error"),
        (changed(dlse=lambda given: torch.zeros_like(given["dlse"])), "dq: error"),
        (changed(out=lambda given: torch.zeros_like(given["out"])), "dq: error"),
        (changed(out=lambda given: given["out"].roll(1, 1)), "dq: error"),
        (changed(lse=lambda given: given["lse"] + 0.03), "dq: error"),
        (changed(case=lambda given: replace(given["case"], causal=False)), "dq: error"),
        (changed(case=lambda given: replace(given["case"], softmax_scale=1.05 / 8)), "dq: error"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_wrong_backward_is_rejected(backward, message, dtype):
    case = replace(WRONG, dtype=dtype)
    q, k, v = case.inputs()
    dout, dlse = arriving(q, v)
    with pytest.raises(AssertionError, match=message):
        check(q, k, v, dout=dout, dlse=dlse, attention=kernel(case, backward), **case.options)


def test_a_row_that_sees_no_key_must_be_exactly_zero():
    case = replace(WRONG, seqlen_k=90)
    check(*case.inputs(), attention=kernel(case), **case.options)
    with pytest.raises(AssertionError, match="exactly 0"):
        check(*case.inputs(), attention=kernel(case, one_element(0, (0, 9, 0, 0), 1e-6)), **case.options)


def test_few_keys_do_not_excuse_a_missing_delta():
    """Where a query sees one key or two, PyTorch's own error is next to nothing: the derived term decides alone."""
    for seqlen_k in (1, 2):
        case = replace(SMALL, seqlen_q=5, seqlen_k=seqlen_k, causal=True)
        without = changed(out=lambda given: torch.zeros_like(given["out"]))
        with pytest.raises(AssertionError, match="dq: error"):
            check(*case.inputs(), attention=kernel(case, without), **case.options)


def test_wrong_types_and_shapes_are_rejected():
    q, k, v = WRONG.inputs()
    dout, _ = arriving(q, v)
    dq, dk, dv = run(q, k, v, dout=dout, attention=kernel(WRONG), **WRONG.options)
    for wrong in ((dq.float(), dk, dv), (dq, dk[:, 1:], dv), (dq, dk, dv.transpose(1, 2))):
        with pytest.raises(AssertionError, match="expected"):
            compare(wrong, q, k, v, dout=dout, **WRONG.options)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_a_subset_of_the_gradients(wanted):
    case = replace(SMALL, seqlen_q=20, seqlen_k=30)
    got = check(*case.inputs(), wanted=wanted, causal=True)
    assert "".join(name for name, x in zip("qkv", got, strict=True) if x is not None) == wanted


def test_the_cpu_path_passes():
    case = replace(SMALL, dtype="float16", seqlen_k=100)
    q, k, v = case.inputs()
    dout, dlse = arriving(q, v)
    check(q, k, v, dout=dout, dlse=dlse, causal=True)
    check(q, k, v, dout=torch.ones((), dtype=q.dtype).expand(dout.shape), attention=flash_attn_func)


def test_spoiled_memory_reads_as_nan_in_every_dtype(monkeypatch):
    kept = []
    real = torch.full
    monkeypatch.setattr(torch, "full", lambda *args, **options: kept.append(real(*args, **options)) or kept[-1])
    spoil_free_memory(*SMALL.inputs())
    assert len(kept) == 10
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert all(x.view(dtype).isnan().all() for x in kept)

"""The one error bound: runs attention into NaN-filled memory, then the references, then compares.

Values: in the maximum norm of each (batch, head),
    |ours - oracle| <= 2 * |same-dtype PyTorch - oracle| + |oracle rounded to the output dtype - oracle|,
where the oracle computes in float32. So no tolerance is set by hand: plain PyTorch's error in the same dtype is the
yardstick.
"""

import math

import torch
from cases import bounds

from hopper_fa3 import flash_attn_func
from hopper_fa3.hooks import indices_of
from hopper_fa3.reference import standard


def run(q, k, v, *, attention=flash_attn_func, out=None, **options):
    """(out, lse) of `attention`; out is filled with NaN before, and so is the memory that the LSE is likely to get.

    To be called before any reference: a reference leaves right answers in freed memory, where an output that the kernel
    never writes would find them.
    """
    batch, seqlen_q, heads, _ = q.shape
    if out is None:
        out = q.new_empty((batch, seqlen_q, heads, v.shape[-1]))
    out.fill_(math.nan)
    torch.full((batch, heads, seqlen_q), math.nan, device=q.device)
    got, lse = attention(q, k, v, out=out, return_attn_probs=True, **options)
    assert (got.data_ptr(), got.stride()) == (out.data_ptr(), out.stride()), "not the tensor given as out="
    return got, lse


def check(q, k, v, *, attention=flash_attn_func, out=None, **options):
    """Run, then compare; returns (out, lse) for whatever else a test wants to know."""
    out, lse = run(q, k, v, attention=attention, out=out, **options)
    compare(out, lse, q, k, v, **options)
    return out, lse


def compare(out, lse, q, k, v, *, softmax_scale=None, causal=False, window_size=(-1, -1), **hook):
    """AssertionError where (out, lse) is not attention of q, k, v within the bounds of this file. ``hook``: softcap,
    sink, alibi_slopes, attention_chunk, score, mask.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    expected = (q.dtype, (batch, seqlen_q, heads, v.shape[-1]))
    assert (out.dtype, out.shape) == expected, f"out: {out.dtype} {tuple(out.shape)}, expected {expected}"
    expected = (torch.float32, (batch, heads, seqlen_q))
    assert (lse.dtype, lse.shape) == expected, f"LSE: {lse.dtype} {tuple(lse.shape)}, expected {expected}"
    if lse.numel() == 0:
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    left, right = bounds(causal, window_size)
    rule = {"softmax_scale": scale, "left": left, "right": right, **hook}
    true, true_lse = standard(q, k, v, **rule, compute_dtype=torch.float32)
    same, _ = standard(q, k, v, **rule)
    same_places("out", out, true)
    same_places("LSE", lse, true_lse)

    sees_no_key = (true_lse == -math.inf).transpose(1, 2)[..., None] & ~true.isnan()
    assert not out.masked_fill(~sees_no_key, 0).any(), "out: a row that sees no key must be exactly 0"
    yardstick = largest(same.float() - true, (1, 3))
    rounding = largest(true.to(out.dtype).float() - true, (1, 3))
    _within("out", largest(out.float() - true, (1, 3)), 2 * yardstick + rounding)
    bound = lse_bound(q, k, true_lse, scale) + hook_error(q, k, **hook)
    _within("LSE", largest(lse - true_lse, (2,)), bound)


def lse_bound(q, k, lse, scale):
    """Absolute bound on |ours - oracle| of the LSE per (batch, head); both sum in float32, unit roundoff u = 2^-24.

    LSE = m + log(sum_j exp(s_j - m)) moves by at most max_j |error of s_j|, plus the relative error of the sum, plus
    the rounding of the result itself. Products of two 16-bit floats are exact in float32, so
    - s_j = scale * q.k_j is a sum of head_dim exact terms: at most head_dim * 2u * |scale| * sum_c |q_c k_jc|, where 2u
      stands for tensor cores that truncate, and Cauchy-Schwarz bounds the sum by |q| |k_j|; eight more roundings of s_j
      cover the scale, its change to base 2 and the subtraction of m;
    - the sum of seqlen_k positive terms: at most seqlen_k * u relative; exp2 and log2 by the hardware's approximations
      add up to 2^-22 each, taken as 16 u together;
    - the result: the last addition and the factor log 2, 4 u * |LSE|.
    Twice the total, because the oracle errs by as much.
    """
    u, head_dim, seqlen_k, group = 2.0**-24, q.shape[-1], k.shape[1], q.shape[2] // k.shape[2]
    norm_q = largest(torch.linalg.vector_norm(q.float(), dim=-1), (1,))
    norm_k = largest(torch.linalg.vector_norm(k.float(), dim=-1), (1,)).repeat_interleave(group, dim=1)
    scores = (head_dim + 8) * 2 * u * abs(scale) * norm_q * norm_k
    return 2 * (scores + (seqlen_k + 16) * u + 4 * u * largest(lse, (2,)))


def hook_error(q, k, *, softcap=0.0, alibi_slopes=None, score=None, **_):
    """By what softcap and slopes may move the LSE further, each twice because the oracle errs as well. u = 2^-24.

    Softcap is a float32's tanh times the cap: at most 16 u of the cap, by the hardware's exponential and reciprocal
    (2^-22 each) and three products; by a polynomial 21 u, 2 by what rows' sums may hide (fused.py), and its rounding. A
    bias is a slope times a distance below 2^24, rounded four times: 4 u of the largest. What a score hook adds to a
    score of 0 is rounded a few times likewise: 8 u of the largest.
    """
    added = 0.0
    if score is not None:
        zero = q.new_zeros((q.shape[0], q.shape[2], q.shape[1], k.shape[1]), dtype=torch.float32)
        added = largest(score.scores(zero, indices_of(*map(range, zero.shape), q.device)), (2, 3))
    farthest = max(q.shape[1], k.shape[1])
    slopes = q.new_zeros(()) if alibi_slopes is None else alibi_slopes
    return 2 * 2.0**-24 * (24 * softcap + 4 * farthest * slopes.abs().float() + 8 * added)


def largest(x, dims):
    """Maximum norm over dims of the finite entries: the places of the others are compared on their own."""
    finite = x.abs().masked_fill(~x.isfinite(), 0)
    return finite.amax(dims) if x.numel() else finite.sum(dims)


def same_places(what, ours, true):
    for kind, here, there in (
        ("NaN", ours.isnan(), true.isnan()),
        ("+inf", ours == math.inf, true == math.inf),
        ("-inf", ours == -math.inf, true == -math.inf),
    ):
        wrong = (here != there).nonzero()
        counts = f"{kind} in {int(here.sum())} places, expected {int(there.sum())}"
        assert not len(wrong), f"{what}: {counts}; first wrong place {wrong[0].tolist()}"


def _within(what, error, bound):
    worst = divmod(int((error - bound).argmax()), error.shape[1])
    place = f"(batch, head) {worst}"
    assert error[worst] <= bound[worst], f"{what}: error {error[worst]:.3e} > bound {bound[worst]:.3e} in {place}"

"""The lines of CASES.md that concern the dense backward: inputs that broke other kernels."""

import math
from dataclasses import replace

import pytest
import torch
from cases import SMALL, Case, drawn_on
from check_gradients import arriving, check, compare, run

pytestmark = pytest.mark.gpu


def with_logits_near(case, logit, device):
    """q, k, v of a case whose every logit is this within a few units: entries of one size, with a little noise."""
    q, k, v = case.inputs(device)
    size = math.sqrt(abs(logit) / math.sqrt(case.head_dim))
    return size + 0.02 * size * q, math.copysign(size, logit) + 0.02 * size * k, v


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_line_1_a_fully_masked_first_block_and_logits_near_minus_200(dtype, device):
    case = Case(1, 88, 448, 14, 2, 128, 128, dtype=dtype, causal=True)
    check(*with_logits_near(case, -200, device), causal=True)


@pytest.mark.parametrize("logit", [-60, -120, -1000, 120])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(113, 255), (64, 65), (130, 129), (1, 200), (200, 1)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_very_negative_logits_with_ragged_tails(head_dim, seqlen_q, seqlen_k, causal, logit, device):
    """A zero-filled key past the end has logit 0: exp(0 - LSE) is inf from LSE -89 on, and inf * 0 would be NaN."""
    case = replace(SMALL, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=head_dim)
    gradients = check(*with_logits_near(case, logit, device), causal=causal)
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 2), (300, 10), (1000, 129)])
def test_line_2_rows_and_whole_tiles_that_see_no_key(seqlen_q, seqlen_k, head_dim, device):
    case = replace(SMALL, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=head_dim)
    q, k, v = case.inputs(device)
    dout, dlse = arriving(q, v)
    dq, dk, dv = check(q, k, v, dout=dout, dlse=dlse, causal=True)
    blind = seqlen_q - seqlen_k
    assert not dq[:, :blind].any() and dq[:, blind + 1 :].any(-1).all()
    assert dk.any(-1).all() and dv.any(-1).all()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(76, 1), (34, 2), (146, 3)])
def test_line_4_one_to_three_keys(seqlen_q, seqlen_k, head_dim, device):
    case = replace(SMALL, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=1, head_dim=head_dim, head_dim_v=head_dim)
    for causal in (False, True):
        gradients = check(*case.inputs(device), causal=causal)
        assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 0), (0, 300), (0, 0)])
def test_no_pair_at_all(seqlen_q, seqlen_k, causal, device):
    q, k, v = replace(SMALL, seqlen_q=seqlen_q, seqlen_k=seqlen_k).inputs(device)
    dout, dlse = arriving(q, v)
    check(q, k, v, causal=causal)
    check(q, k, v, dout=dout, dlse=dlse, causal=causal)


@pytest.mark.parametrize("shape", [(0, 5, 2, 64), (2, 0, 2, 64)])
def test_nothing_to_do(shape, device):
    q = torch.empty(shape, device=device, dtype=torch.bfloat16)
    k = torch.ones((shape[0], 7, *shape[2:]), device=device, dtype=torch.bfloat16)
    check(q, k, k)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "head_dim"),
    [(8300, 1, 8, 64), (1600, 729, 16, 72), (80_000, 16, 2, 64), (1, 16, 65_536, 64), (70_000, 3, 1, 128)],
)
def test_line_6_more_batches_and_heads_than_a_grid_dimension(batch, length, heads, head_dim, device):
    if torch.cuda.mem_get_info(device)[0] < 16 * 2 * batch * length * heads * head_dim:
        pytest.skip("needs as much free GPU memory as sixteen tensors of the size of q")
    q, k, v, dout = drawn_on(device, 4, batch, length, heads, head_dim)
    gradients = run(q, k, v, dout=dout)
    # All of it was written; the oracle takes a sample. Where a query sees one key, dQ and dK are 0.
    assert not any(x.isnan().any() for x in gradients)
    assert all(x.any(-1).all() for x in gradients[2 if length == 1 else 0 :])
    some = torch.tensor(sorted({0, batch // 2, batch - 1}), device=device)
    heads = torch.arange(0, heads, max(1, heads // 16), device=device)
    dq, dk, dv, q, k, v, dout = (x[some][:, :, heads] for x in (*gradients, q, k, v, dout))
    compare((dq, dk, dv), q, k, v, dout=dout)
    del gradients
    torch.cuda.empty_cache()


def test_line_7_expanded_then_contiguous_then_a_larger_batch(device):
    q, k, v = replace(SMALL, batch=3, heads=4, heads_k=4).inputs(device)
    check(q, k[:1].expand_as(k), v[:1].expand_as(v))
    check(q, k[:, :, :1].expand_as(k), v)
    check(q, k[:, :1].expand_as(k), v)
    check(q[:, :, :1].expand_as(q), k, v)
    check(q, k, v)
    check(*replace(SMALL, batch=7, heads=4, heads_k=4).inputs(device))


def test_line_8_transposed_queries_twice(device):
    q, k, v = drawn_on(device, 3, 1, 24, 256, 256).transpose(2, 3)
    for _ in range(2):
        check(q, k, v)


def test_line_8_strided_keys_and_contiguous_values(device):
    q, k, v = SMALL.inputs(device)
    check(q, k.transpose(1, 2).contiguous().transpose(1, 2), v)
    check(q, k, v.transpose(1, 2).contiguous().transpose(1, 2))
    check(q.transpose(0, 1).contiguous().transpose(0, 1), torch.cat((k, k), -1)[..., :128], v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.3, -(120**-0.5), math.sqrt(120), 1e-30])
def test_line_19_scales(scale, causal, device):
    q, k, v = replace(SMALL, head_dim=120, head_dim_v=120).inputs(device)
    dout, dlse = arriving(q, v)
    check(q, k, v, dout=dout, dlse=dlse, softmax_scale=scale, causal=causal)


@pytest.mark.parametrize("scale", [1.1, -1.1, math.sqrt(96), 17.0, 128**-0.5, -1e-30])
def test_lines_1_and_19_a_fully_masked_first_block(scale, device):
    check(*replace(SMALL, seqlen_k=200).inputs(device), softmax_scale=scale, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_large_logits_of_both_signs(causal, device):
    q, k, v = replace(SMALL, seqlen_k=300).inputs(device)
    gradients = check(20 * q, 20 * k, v, causal=causal)
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**10])
def test_upstream_gradients_of_another_size(factor, device):
    """Loss scaling multiplies dO, and a mean divides it: gradients are linear in it, exactly so for powers of two."""
    q, k, v = replace(SMALL, seqlen_k=300).inputs(device)
    dout, dlse = arriving(q, v)
    check(q, k, v, dout=factor * dout, dlse=factor * dlse, causal=True)


def test_small_upstream_gradients_in_float16(device):
    """dS falls among float16's subnormal numbers, which must not be flushed to 0."""
    q, k, v = replace(SMALL, dtype="float16", seqlen_q=255).inputs(device)
    dout, _ = arriving(q, v)
    check(q, k, v, dout=dout * 2.0**-12, causal=True)

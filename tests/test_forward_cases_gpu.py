"""The lines of CASES.md that concern the dense forward: inputs that broke other kernels."""

import math
from dataclasses import replace

import pytest
import torch
from cases import SMALL, Case, drawn_on
from check import check, compare, run

from hopper_fa3 import flash_attn_func, flash_attn_qkvpacked_func, plan
from hopper_fa3.problem import Problem

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_line_1_a_fully_masked_first_block_and_logits_near_minus_200(dtype, device):
    case = Case(1, 88, 448, 14, 2, 128, 128, dtype=dtype, causal=True)
    q, k, v = case.inputs(device)
    # Entries near 4.2 and -4.2 with a little noise: every logit is -200 within a few units.
    q, k = 4.2 + 0.1 * q, -4.2 + 0.1 * k
    _, lse = check(q, k, v, causal=True)
    assert (lse > -210).all() and (lse < -180).all()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 2), (300, 10), (1000, 129)])
def test_lines_2_and_15_rows_and_whole_tiles_that_see_no_key(seqlen_q, seqlen_k, device):
    q, k, v = replace(SMALL, seqlen_q=seqlen_q, seqlen_k=seqlen_k).inputs(device)
    out, lse = check(q, k, v, causal=True)
    blind = seqlen_q - seqlen_k
    assert not out[:, :blind].any() and (lse[:, :, :blind] == -math.inf).all()
    assert out[:, blind:].any() and lse[:, :, blind:].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_line_15_no_keys_at_all(causal, device):
    q, k, v = replace(SMALL, seqlen_q=300, seqlen_k=0).inputs(device)
    out, lse = run(q, k, v, causal=causal)
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("shape", [(0, 5, 2, 64), (2, 0, 2, 64)])
def test_nothing_to_do(shape, device):
    q = torch.empty(shape, device=device, dtype=torch.bfloat16)
    k = torch.empty((shape[0], 7, *shape[2:]), device=device, dtype=torch.bfloat16)
    out, lse = run(q, k, k)
    assert out.shape == shape and lse.shape == (shape[0], 2, shape[1])


@pytest.mark.parametrize(
    ("batch", "length", "heads", "head_dim"),
    [(8300, 1, 8, 64), (1600, 729, 16, 72), (80_000, 16, 2, 64), (1, 16, 65_536, 64), (70_000, 3, 1, 128)],
)
def test_line_6_more_batches_and_heads_than_a_grid_dimension(batch, length, heads, head_dim, device):
    q, k, v = drawn_on(device, 3, batch, length, heads, head_dim)
    out, lse = run(q, k, v)
    assert not out.isnan().any() and not lse.isnan().any()
    # All of it was written; the oracle takes a sample.
    some = torch.tensor(sorted({0, batch // 2, batch - 1}), device=device)
    heads = torch.arange(0, heads, max(1, heads // 16), device=device)
    compare(out[some][:, :, heads], lse[some][:, heads], *(x[some][:, :, heads] for x in (q, k, v)))


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
    check(q, k, v, softmax_scale=scale, causal=causal)


@pytest.mark.parametrize("scale", [1.1, -1.1, math.sqrt(96), 17.0, 128**-0.5, -1e-30])
def test_lines_1_and_19_a_fully_masked_first_block(scale, device):
    """Rows 0 to 40 see no key of the tile's last block, where their extreme still is Softmax.start's; / scale * scale
    rounds up for 1.1, sqrt(96) and 17."""
    check(*replace(SMALL, seqlen_k=200).inputs(device), softmax_scale=scale, causal=True)


def test_line_19_scale_zero_is_the_mean_of_the_visible_values(device):
    q, k, v = replace(SMALL, head_dim=120, head_dim_v=120).inputs(device)
    out, lse = run(q, k, v, softmax_scale=0.0, causal=True)
    seen = torch.arange(1, SMALL.seqlen_q + 1, device=device) + SMALL.seqlen_k - SMALL.seqlen_q
    assert torch.allclose(lse, seen.log().expand_as(lse), rtol=0, atol=1e-4)
    mean = v.float().cumsum(1)[:, -SMALL.seqlen_q :] / seen[:, None, None]
    assert ((out.float() - mean).abs() <= 2**-8 * (mean.abs() + v.float().abs().mean())).all()


def test_large_logits_of_both_signs(device):
    q, k, v = replace(SMALL, seqlen_k=300).inputs(device)
    check(20 * q, 20 * k, v)
    check(20 * q, 20 * k, v, causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "given"),
    [
        (64, plan.Plan(64, 128, pingpong=False)),
        (64, plan.Plan(128, 224)),
        (64, plan.Plan(192, 128, stages=4)),
        (128, plan.Plan(128, 16)),
        (128, plan.Plan(64, 16, pingpong=False, overlap=False)),
        (256, plan.Plan(64, 64, pingpong=False)),
        (64, plan.Plan(192, 192, shared_p=True)),
        (64, plan.Plan(128, 48, stages=3, pingpong=False, shared_p=True)),
        (96, plan.Plan(192, 144, shared_p=True)),
        (96, plan.Plan(192, 128, shared_p=True)),
        (128, plan.Plan(192, 128, shared_p=True)),
        (128, plan.Plan(192, 112, overlap=False, shared_p=True)),
        (128, plan.Plan(64, 16, pingpong=False, overlap=False, shared_p=True)),
        (256, plan.Plan(64, 64, pingpong=False, shared_p=True)),
    ],
    ids=str,
)
def test_plans_that_the_table_does_not_hold(head_dim, given, causal, device):
    """Whatever plan= takes must be right: one warpgroup, narrow and wide blocks, more stages, no overlap, P in shared
    memory (in each of its swizzles, with O narrower and wider)."""
    case = replace(SMALL, seqlen_q=700, seqlen_k=650, heads=30, heads_k=15, head_dim=head_dim, head_dim_v=head_dim)
    tensors = case.inputs(device)
    compare(*run(*tensors, causal=causal, plan=given), *tensors, causal=causal)


@pytest.mark.parametrize(("head_dim", "tile_n"), [(64, 192), (96, 144), (128, 128)])
def test_shared_p_where_tiles_that_see_no_key_stand_between_others(head_dim, tile_n, device):
    """P and O take turns in the same memory; a tile without keys writes O only. Two CTAs compute all tiles."""
    case = replace(SMALL, seqlen_q=1000, seqlen_k=200, heads=6, heads_k=2, head_dim=head_dim, head_dim_v=head_dim)
    tensors = case.inputs(device)
    given = plan.Plan(192, tile_n, shared_p=True)
    margin = torch.cuda.get_device_properties(device).multi_processor_count - 2
    compare(*run(*tensors, causal=True, plan=given, sm_margin=margin), *tensors, causal=True)


def test_batch_invariance_with_a_given_plan(device):
    q, k, v = replace(SMALL, batch=5, heads=4, heads_k=2).inputs(device)
    chosen = plan.choose(Problem.from_tensors(q, k, v, causal=True).static)
    out, lse = run(q, k, v, causal=True, plan=chosen)
    compare(out, lse, q, k, v, causal=True)
    for i in range(5):
        alone, lse_alone = run(q[i : i + 1], k[i : i + 1], v[i : i + 1], causal=True, plan=chosen)
        assert torch.equal(alone[0], out[i]) and torch.equal(lse_alone[0], lse[i])


def test_packed_inputs(device):
    case = replace(SMALL, seqlen_k=113, heads=6, heads_k=2)
    q, k, v = case.inputs(device)
    out, lse = flash_attn_qkvpacked_func(torch.cat((q, k, v), 2), causal=True, num_heads_q=6, return_attn_probs=True)
    compare(out, lse, q, k, v, causal=True)
    q = q[:, :, :2]
    out, lse = flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), causal=True, return_attn_probs=True)
    compare(out, lse, q, k, v, causal=True)


def test_options_that_change_no_value(device):
    q, k, v = SMALL.inputs(device)
    out, _ = check(q, k, v, causal=True)
    options = ({"sm_margin": 8}, {"sm_margin": 100}, {"num_splits": 0}, {"pack_gqa": False}, {"deterministic": True})
    for option in options:
        alone = flash_attn_func(q, k, v, causal=True, **option)
        assert isinstance(alone, torch.Tensor) and torch.equal(alone, out), option


def test_inputs_stay_as_they_were(device):
    tensors = replace(SMALL, head_dim=40, head_dim_v=40).inputs(device)
    before = [x.clone() for x in tensors]
    flash_attn_func(*tensors, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_refusals_on_the_gpu(device):
    q, k, v = SMALL.inputs(device)
    with pytest.raises(TypeError, match="float32"):
        flash_attn_func(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match="head_dim must be a multiple of 8"):
        flash_attn_func(q[..., :20], k[..., :20], v)
    with pytest.raises(ValueError, match="head_dim must be a multiple of 8 and at most 256, got 260"):
        flash_attn_func(*(torch.cat((x, x, x), -1)[..., :260] for x in (q, k)), v)
    with pytest.raises(ValueError, match="out must be None"):
        flash_attn_func(q.detach().requires_grad_(), k, v, out=torch.empty_like(q))

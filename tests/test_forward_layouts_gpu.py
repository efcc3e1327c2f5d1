"""Strides, alignment, views, given outputs and 64-bit offsets."""

import math
from dataclasses import replace

import pytest
import torch
from cases import SMALL, drawn_on
from check import check, compare, run

from hopper_fa3 import plan
from hopper_fa3.problem import Problem

pytestmark = pytest.mark.gpu


def relaid(x, order):
    """x with the same values, its dimensions in memory in this order."""
    back = sorted(range(4), key=lambda dim: order[dim])
    return x.permute(order).contiguous().permute(back)


@pytest.mark.parametrize("head_dim", [128, 200])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3), (1, 2, 0, 3), (2, 1, 0, 3)], ids=str)
def test_any_order_of_dimensions_in_memory(order, causal, head_dim, device):
    case = replace(SMALL, heads=6, heads_k=3, head_dim=head_dim, head_dim_v=head_dim)
    q, k, v = (relaid(x, order) for x in case.inputs(device))
    assert not q.is_contiguous() and q.stride(-1) == 1
    check(q, k, v, causal=causal, out=torch.empty_like(q))


@pytest.mark.parametrize("which", range(3))
def test_a_base_that_is_not_16_byte_aligned(which, device):
    tensors = list(SMALL.inputs(device))
    x = tensors[which]
    tensors[which] = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    assert tensors[which].data_ptr() % 16 == 2
    check(*tensors, causal=True)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("extra", [1, 2, 4, 8])
def test_rows_with_padding(extra, which, device):
    """With 1, 2 or 4 elements between rows, no stride is a multiple of 16 bytes; 8 keeps them so."""
    tensors = list(SMALL.inputs(device))
    x = tensors[which]
    tensors[which] = torch.cat((x, x.new_full((*x.shape[:3], extra), math.nan)), -1)[..., : x.shape[-1]]
    check(*tensors, causal=True)


@pytest.mark.parametrize("which", range(3))
def test_a_last_dimension_that_is_not_contiguous(which, device):
    tensors = list(SMALL.inputs(device))
    tensors[which] = relaid(tensors[which], (0, 1, 3, 2))
    check(*tensors, causal=True)
    tensors[which] = tensors[which].repeat_interleave(2, -1)[..., ::2]
    check(*tensors, causal=True)


@pytest.mark.parametrize("stride", [1, 3, 7, 2**40 + 1])
def test_dimensions_of_size_one_carry_any_stride(stride, device):
    case = replace(SMALL, batch=1, heads=1, heads_k=1)
    q, k, v = (x.as_strided(x.shape, (stride, x.stride(1), stride, 1)) for x in case.inputs(device))
    check(q, k, v, causal=True)
    q, k, v = replace(case, seqlen_q=1, seqlen_k=1).inputs(device)
    q, k, v = (x.as_strided(x.shape, (stride, stride, stride, 1)) for x in (q, k, v))
    check(q, k, v)


@pytest.mark.parametrize("dim", range(3))
def test_expanded_dimensions_of_every_input(dim, device):
    tensors = replace(SMALL, heads=3, heads_k=3).inputs(device)
    q, k, v = (x.narrow(dim, 0, 1).expand_as(x) for x in tensors)
    check(q, k, v, causal=True)


def check_inside_a_larger_tensor(case, device):
    """With all memory around the output 7, also between its rows; strides are odd multiples of 16 bytes where
    head_dim_v is an even one.
    """
    q, k, v = case.inputs(device)
    shape = (case.batch + 2, case.seqlen_q + 3, case.heads + 2, case.head_dim_v + 24)
    around = torch.full(shape, 7.0, dtype=q.dtype, device=device)
    out = around[1:-1, 1:-2, 1:-1, 8:-16]
    check(q, k, v, out=out, **case.options)
    out.fill_(7)
    assert (around == 7).all(), "the kernel wrote outside the given output"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_a_given_output_inside_a_larger_tensor(head_dim, causal, device):
    check_inside_a_larger_tensor(replace(SMALL, head_dim=head_dim, head_dim_v=head_dim, causal=causal), device)


# A quad stores 32 columns at once: head_dim_v leaves each remainder, and from none to seven whole stores unused
DIRECT = [(136, 136), (144, 144), (152, 152), (160, 160), (184, 184), (192, 192), (200, 200), (256, 256), (192, 128),
          (256, 8), (256, 40), (256, 72), (256, 192), (128, 168), (128, 256)]  # fmt: skip


@pytest.mark.parametrize("seqlen_q", [1, 9, 64, 65, 300])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), DIRECT)
def test_an_output_that_leaves_straight_from_registers(head_dim, head_dim_v, seqlen_q, device):
    case = replace(SMALL, head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=seqlen_q)
    static = Problem.from_tensors(*case.inputs(device), causal=True).static
    assert not plan.forward_config(static, plan.choose(static)).staged_output
    check_inside_a_larger_tensor(replace(case, causal=True), device)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_given_transposed_output(head_dim, device):
    q, k, v = replace(SMALL, head_dim=head_dim, head_dim_v=head_dim).inputs(device)
    out = q.new_empty((SMALL.batch, SMALL.heads, SMALL.seqlen_q, head_dim)).transpose(1, 2)
    check(q, k, v, causal=True, out=out)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("layout", ["base", "stride", "last"])
def test_a_given_output_that_the_kernel_cannot_write_is_right_or_refused(layout, head_dim, device):
    q, k, v = replace(SMALL, head_dim=head_dim, head_dim_v=head_dim).inputs(device)
    shape = (SMALL.batch, SMALL.seqlen_q, SMALL.heads, head_dim)
    around = torch.full((2 * math.prod(shape),), 7.0, dtype=q.dtype, device=device)
    head, last = {"base": (head_dim, 1), "stride": (head_dim + 2, 1), "last": (2 * head_dim, 2)}[layout]
    row = SMALL.heads * head
    strides = (SMALL.seqlen_q * row, row, head, last)
    out = around.as_strided(shape, strides, 1 if layout == "base" else 0)
    try:
        got, lse = run(q, k, v, causal=True, out=out)
    except ValueError as error:
        assert "out" in str(error)
        return
    compare(got, lse, q, k, v, causal=True)
    out.fill_(7)
    assert (around == 7).all(), "the kernel wrote outside the given output"


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("dim", range(3))
def test_offsets_past_32_bits(dim, head_dim, far_apart, device):
    """Three batches (or rows, or heads) 2^31 elements apart: the last offset does not fit in 32 bits, signed or not."""
    sizes = {0: {"batch": 3}, 1: {"seqlen_q": 3, "seqlen_k": 3}, 2: {"heads": 3, "heads_k": 3}}[dim]
    case = replace(SMALL, head_dim=head_dim, head_dim_v=head_dim, **sizes)
    q, k, v = (far_apart(x, dim, place) for place, x in enumerate(case.inputs(device)))
    check(q, k, v, causal=True, out=far_apart(q, dim, 3))


def test_one_contiguous_tensor_past_32_bits(device):
    """65,600 sequences of 256 rows of 128: contiguous, and more than 2^31 elements."""
    batch = 65_600
    q = drawn_on(device, batch, 256, 1, 128)
    assert q.numel() > 2**31
    out, lse = run(q, q, q, causal=True)
    last = torch.tensor([0, 32_768, 65_535, 65_536, batch - 1], device=device)
    assert not lse.isnan().any()
    compare(out[last], lse[last], q[last], q[last], q[last], causal=True)
    del q, out
    torch.cuda.empty_cache()

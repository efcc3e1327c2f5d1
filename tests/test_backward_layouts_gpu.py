"""Strides, alignment, views and 64-bit offsets of q, k, v and of the gradient that arrives at out."""

import math
from dataclasses import replace

import pytest
import torch
from cases import SMALL, drawn_on
from check_gradients import arriving, check, compare, leaves_of, run, tensors_of
from test_forward_layouts_gpu import relaid

from hopper_fa3 import flash_attn_func

pytestmark = pytest.mark.gpu

NAMES = ("q", "k", "v", "dout")


def check_all(q, k, v, dout, **options):
    return check(q, k, v, dout=dout, causal=True, **options)


@pytest.mark.parametrize("head_dim", [128, 200])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3), (1, 2, 0, 3), (2, 1, 0, 3)], ids=str)
def test_any_order_of_dimensions_in_memory(order, head_dim, device):
    case = replace(SMALL, heads=6, heads_k=3, head_dim=head_dim, head_dim_v=head_dim)
    laid = [relaid(x, order) for x in tensors_of(case, device)]
    assert not laid[0].is_contiguous() and laid[0].stride(-1) == 1
    check_all(*laid)


@pytest.mark.parametrize("which", range(4), ids=NAMES.__getitem__)
def test_each_tensor_alone_in_another_order(which, device):
    tensors = tensors_of(replace(SMALL, heads=4, heads_k=2), device)
    tensors[which] = relaid(tensors[which], (0, 2, 1, 3))
    check_all(*tensors)


@pytest.mark.parametrize("which", range(4), ids=NAMES.__getitem__)
def test_a_base_that_is_not_16_byte_aligned(which, device):
    tensors = tensors_of(SMALL, device)
    x = tensors[which]
    tensors[which] = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    assert tensors[which].data_ptr() % 16 == 2
    check_all(*tensors)


@pytest.mark.parametrize("which", range(4), ids=NAMES.__getitem__)
@pytest.mark.parametrize("extra", [1, 2, 4, 8])
def test_rows_with_padding(extra, which, device):
    """With 1, 2 or 4 elements between rows, no stride is a multiple of 16 bytes; 8 keeps them so."""
    tensors = tensors_of(SMALL, device)
    x = tensors[which]
    tensors[which] = torch.cat((x, x.new_full((*x.shape[:3], extra), math.nan)), -1)[..., : x.shape[-1]]
    check_all(*tensors)


@pytest.mark.parametrize("which", range(4), ids=NAMES.__getitem__)
def test_a_last_dimension_that_is_not_contiguous(which, device):
    tensors = tensors_of(SMALL, device)
    tensors[which] = relaid(tensors[which], (0, 1, 3, 2))
    check_all(*tensors)
    tensors[which] = tensors[which].repeat_interleave(2, -1)[..., ::2]
    check_all(*tensors)


@pytest.mark.parametrize("stride", [1, 3, 7, 2**40 + 1])
def test_dimensions_of_size_one_carry_any_stride(stride, device):
    case = replace(SMALL, batch=1, heads=1, heads_k=1)
    check_all(*(x.as_strided(x.shape, (stride, x.stride(1), stride, 1)) for x in tensors_of(case, device)))
    case = replace(case, seqlen_q=1, seqlen_k=1)
    check_all(*(x.as_strided(x.shape, (stride, stride, stride, 1)) for x in tensors_of(case, device)))


@pytest.mark.parametrize("which", range(4), ids=NAMES.__getitem__)
@pytest.mark.parametrize("dim", range(3))
def test_an_expanded_dimension(dim, which, device):
    tensors = tensors_of(replace(SMALL, heads=3, heads_k=3), device)
    tensors[which] = tensors[which].narrow(dim, 0, 1).expand_as(tensors[which])
    check_all(*tensors)


@pytest.mark.parametrize("head_dim", [64, 72, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_one_element_expanded_to_the_gradient_of_out(causal, head_dim, device):
    """What out.sum() sends back has stride 0 everywhere, in the last dimension too; out.mean() sends less than 1."""
    case = replace(SMALL, heads=4, heads_k=2, head_dim=head_dim, head_dim_v=head_dim)
    q, k, v, dout = tensors_of(case, device)
    check(q, k, v, dout=torch.full((), 0.5, dtype=q.dtype, device=device).expand_as(dout), causal=causal)
    leaves = leaves_of(q, k, v)
    flash_attn_func(*leaves, causal=causal).sum().backward()
    compare([leaf.grad for leaf in leaves], q, k, v, dout=torch.ones_like(dout), causal=causal)


def test_a_gradient_that_arrives_in_heads_first_order(device):
    """The output projection of a model reads (batch, seqlen, heads * head_dim); others transpose first."""
    q, k, v, dout = tensors_of(replace(SMALL, heads=4, heads_k=2), device)
    leaves = leaves_of(q, k, v)
    out = flash_attn_func(*leaves, causal=True).transpose(1, 2)
    torch.autograd.backward(out.contiguous(), dout.transpose(1, 2).contiguous())
    compare([leaf.grad for leaf in leaves], q, k, v, dout=dout, causal=True)


@pytest.mark.parametrize("stride", [0, 2])
def test_a_gradient_of_the_lse_with_strides(stride, device):
    q, k, v, dout = tensors_of(SMALL, device)
    dlse = arriving(q, v)[1]
    dlse = dlse[..., :1].expand_as(dlse) if stride == 0 else dlse.repeat_interleave(2, -1)[..., ::2]
    assert dlse.stride(-1) == stride
    check_all(q, k, v, dout, dlse=dlse)
    check_all(q, k, v, None, dlse=dlse.transpose(1, 2).contiguous().transpose(1, 2))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (192, 64), (256, 256)])
@pytest.mark.parametrize("seqlen_k", [1, 100, 113, 128, 200])
def test_rows_past_the_end_of_a_view_never_matter(seqlen_k, head_dim, head_dim_v, device):
    """NaN behind the last key and the last query of every tensor: tiles that reach there must not take it in."""
    tensors = tensors_of(replace(SMALL, seqlen_q=256, seqlen_k=256, head_dim=head_dim, head_dim_v=head_dim_v), device)
    lengths = (100, seqlen_k, seqlen_k, 100)
    for x, length in zip(tensors, lengths, strict=True):
        x[:, length:] = math.nan
    q, k, v, dout = (x[:, :length] for x, length in zip(tensors, lengths, strict=True))
    for causal in (False, True):
        check(q, k, v, dout=dout, causal=causal)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(72, 72), (104, 120), (200, 200)])
def test_columns_past_the_end_of_a_view_never_matter(head_dim, head_dim_v, device):
    tensors = tensors_of(replace(SMALL, head_dim=256, head_dim_v=256), device)
    widths = (head_dim, head_dim, head_dim_v, head_dim_v)
    for x, width in zip(tensors, widths, strict=True):
        x[..., width:] = math.nan
    check_all(*(x[..., :width] for x, width in zip(tensors, widths, strict=True)))


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("dim", range(3))
def test_offsets_past_32_bits(dim, head_dim, far_apart, device):
    """Three batches (or rows, or heads) 2^31 elements apart: the last offset does not fit in 32 bits, signed or not."""
    sizes = {0: {"batch": 3}, 1: {"seqlen_q": 3, "seqlen_k": 3}, 2: {"heads": 3, "heads_k": 3}}[dim]
    case = replace(SMALL, head_dim=head_dim, head_dim_v=head_dim, **sizes)
    check_all(*(far_apart(x, dim, place) for place, x in enumerate(tensors_of(case, device))))


def test_one_contiguous_tensor_past_32_bits(device):
    """65,600 sequences of 256 rows of 128: more than 2^31 elements in q, dO, every gradient and float32 workspace."""
    batch = 65_600
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if free < 40 * 2**30:
        pytest.skip(f"needs 40 GiB of free GPU memory, got {free / 2**30:.1f}")
    q, dout = drawn_on(device, 2, batch, 256, 1, 128)
    assert q.numel() > 2**31
    # With the usual scale the last query sees itself with probability 1 here and there: its gradients are then 0
    options = {"causal": True, "softmax_scale": 0.02}
    gradients = run(q, q, q, dout=dout, **options)
    last = torch.tensor([0, 32_768, 65_535, 65_536, batch - 1], device=device)
    assert all(x[:, -1].any(-1).all() for x in gradients)
    compare([x[last] for x in gradients], *[q[last]] * 3, dout=dout[last], **options)
    del q, dout, gradients
    torch.cuda.empty_cache()

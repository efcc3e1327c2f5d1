"""Checks of single arguments. All errors have one style: the rule, then what was given."""

import numbers

import torch

from .hooks import MaskHook, ScoreHook

# The kernel works in base 2: scale * log2(e) must be finite in float32
SCALE_LIMIT = 2.0**127
# The smallest normal float32: what is divided by a smaller one may become inf, or NaN where it is 0
SMALLEST_SOFTCAP = 2.0**-126


def checked_scale(softmax_scale):
    """The scale as a float."""
    if not isinstance(softmax_scale, numbers.Real):
        raise TypeError(f"softmax_scale must be a number or None, got {shown(softmax_scale)}")
    if not abs(softmax_scale) < SCALE_LIMIT:  # also true for NaN
        raise ValueError(f"softmax_scale must be finite and below 2**127 in magnitude, got {softmax_scale}")
    return float(softmax_scale)


def checked_softcap(softcap):
    """The softcap as a float, 0.0 for none."""
    if not isinstance(softcap, numbers.Real):
        raise TypeError(f"softcap must be a number, got {shown(softcap)}")
    if not (softcap == 0 or SMALLEST_SOFTCAP <= softcap < SCALE_LIMIT):
        raise ValueError(f"softcap must be 0 (none), or from 2**-126 to below 2**127, got {softcap}")
    return abs(float(softcap))  # no -0.0: equal problems have equal fields


def check_chunk(attention_chunk):
    """Raise where an attention_chunk is no count."""
    if not (is_integer(attention_chunk) and attention_chunk in range(2**63)):
        raise ValueError(f"attention_chunk must be an integer of at least 0, got {shown(attention_chunk)}")


def check_scoring(q, batch, *, sink, alibi_slopes, score, mask):
    """Raise for the first of these tensors and hooks that is not None and does not fit q. ``batch``: entries of q, or
    packed sequences.
    """
    _check_sink(sink, q)
    _check_alibi_slopes(alibi_slopes, q, batch)
    _check_hook("score", score, ScoreHook, q)
    _check_hook("mask", mask, MaskHook, q)


def _check_sink(sink, q):
    """Raise where ``sink`` is not None and no logit for each head of q."""
    if sink is None:
        return
    require_tensor("sink", sink)
    if sink.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"sink must have dtype float32 or q's, {name_of(q.dtype)}, got {name_of(sink.dtype)}")
    if tuple(sink.shape) != (q.shape[-2],):
        raise ValueError(f"sink must have shape (heads,), here {(q.shape[-2],)}, got {tuple(sink.shape)}")
    _check_device("sink", sink, q)


def _check_alibi_slopes(slopes, q, batch):
    """Raise where ``slopes`` is not None and no slope for each head of q, or for each of each batch entry."""
    if slopes is None:
        return
    require_tensor("alibi_slopes", slopes)
    if slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes must have dtype float32, got {name_of(slopes.dtype)}")
    legal = (q.shape[-2],), (batch, q.shape[-2])
    if tuple(slopes.shape) not in legal:
        rule = f"alibi_slopes must have shape (heads,) or (batch, heads), here {legal[0]} or {legal[1]}"
        raise ValueError(f"{rule}, got {tuple(slopes.shape)}")
    _check_device("alibi_slopes", slopes, q)


def _check_hook(name, hook, kind, q):
    """Raise where ``hook`` is not None and no ``kind``, or has nothing for CPU tensors where q is one."""
    if hook is None:
        return
    if not isinstance(hook, kind):
        raise TypeError(f"{name} must be a hopper_fa3.hooks.{kind.__name__}, got {shown(hook)}")
    if q.device.type == "cpu" and hook.cpu is None:
        raise NotImplementedError(f"{name} must have a function cpu for tensors on the CPU, got None")


def _check_device(name, tensor, q):
    if tensor.device != q.device:
        raise RuntimeError(f"{name} must be on q's device {q.device}, got {tensor.device}")


def check_states(out_a, lse_a, out_b, lse_b):
    """Raise where the arguments of merge_states do not fit each other."""
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        require_tensor(name, tensor)
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {name_of(tensor.dtype)}")
    for name in ("dtype", "device"):
        pair = tuple(getattr(tensor, name) for tensor in (out_a, out_b))
        if pair[0] != pair[1]:
            error = TypeError if name == "dtype" else RuntimeError
            raise error(f"out_a and out_b must have one {name}, got {pair[0]} and {pair[1]}")
    if out_a.dim() not in (3, 4) or out_a.shape != out_b.shape:
        raise ValueError(
            "out_a and out_b must have one shape (batch, seqlen_q, heads, head_dim_v) or (total, heads, head_dim_v), "
            f"got {tuple(out_a.shape)} and {tuple(out_b.shape)}"
        )
    expected = tuple(out_a.transpose(-3, -2).shape[:-1])
    if tuple(lse_a.shape) != expected or tuple(lse_b.shape) != expected:
        raise ValueError(
            f"lse_a and lse_b must have shape {expected}, got {tuple(lse_a.shape)} and {tuple(lse_b.shape)}"
        )


def check_flag(name, value):
    """Raise where a value is no flag."""
    if not isinstance(value, int):  # a tensor could change its value under the memo of api.py
        raise TypeError(f"{name} must be True or False, got {shown(value)}")


def require_tensor(name, value):
    """Raise where ``value`` is no tensor with strides."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {shown(value)}")
    if value.layout != torch.strided or value.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got {'a nested one' if value.is_nested else value.layout}")


def is_integer(value):
    """True for an int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def name_of(dtype):
    """``"bfloat16"`` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def shown(value):
    """How an error names what was given: plain values as they are, all else by its type."""
    if isinstance(value, str):
        return value
    return repr(value) if value is None or isinstance(value, (int, float)) else type(value).__name__


def recorded(*tensors):
    """True where autograd records what is computed of these, of which any may be None."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)

"""What is asked: one attention call, validated. All errors have one style: the rule, then what was given."""

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from . import plan as planning
from .checks import (
    check_chunk,
    check_flag,
    check_scoring,
    checked_scale,
    checked_softcap,
    is_integer,
    name_of,
    recorded,
    require_tensor,
    shown,
)
from .hooks import MaskHook, ScoreHook
from .kernels.config import SMALLEST_CAP

TILE_ROWS = 64  # queries of the smallest tile that a kernel may use
# A tile index has 32 bits, and a CTA stops at one that may be a whole grid (an SM a CTA) past the last tile.
TOO_MANY_TILES = 2**31 - 2**12
ANY_COUNT = range(2**63)
NOT_BUILT = NotImplementedError
LARGEST_SOFTCAP = 1024.0
LARGEST_CHUNK = 2**30  # longer than any sequence on CUDA: the kernels add in 32 bits
# Of q, k and v: dimensions of one name have one size.
LAYOUTS = (
    ("batch", "seqlen_q", "heads", "head_dim"),
    ("batch", "seqlen_k", "heads_k", "head_dim"),
    ("batch", "seqlen_k", "heads_k", "head_dim_v"),
)
ON_CPU, ON_CUDA = (("device", "cpu"),), (("device", "cuda"),)


class Illegal(NamedTuple):
    """A row of the table: ``fact`` must be one of ``legal`` wherever every (fact, value) of ``where`` holds."""

    fact: str
    legal: tuple | range
    where: tuple  # of (fact, value)
    error: type
    rule: str  # the message is "{rule}, got {value}"


# Every combination that is refused. The facts are the plain values that from_tensors of a Problem or of a PackedProblem
# collects; rows are checked in order, those of a fact that the call does not have are not.
ILLEGAL = (
    Illegal("device", ("cpu", "cuda"), (), RuntimeError, "device must be the CPU or a CUDA GPU"),
    Illegal("architecture", ("sm_90",), ON_CUDA, RuntimeError, "the CUDA device must be sm_90 (H100, H200)"),
    Illegal("dtype", ("bfloat16", "float16"), ON_CUDA, TypeError, "dtype must be bfloat16 or float16 on CUDA"),
    Illegal(
        "dtype", ("float16", "bfloat16", "float32", "float64"), ON_CPU, TypeError,
        "dtype must be float16, bfloat16, float32 or float64 on the CPU",
    ),
    Illegal("head_dim", range(8, 257, 8), ON_CUDA, ValueError, "head_dim must be a multiple of 8 and at most 256"),
    Illegal("head_dim_v", range(8, 257, 8), ON_CUDA, ValueError, "head_dim_v must be a multiple of 8 and at most 256"),
    Illegal("head_dim", ANY_COUNT[1:], ON_CPU, ValueError, "head_dim must be at least 1"),
    Illegal("head_dim_v", ANY_COUNT[1:], ON_CPU, ValueError, "head_dim_v must be at least 1"),
    # The kernel adds seqlen_q and seqlen_k in 32 bits.
    Illegal("seqlen_q", range(2**30), ON_CUDA, ValueError, "seqlen_q must be less than 2**30"),
    Illegal("seqlen_k", range(2**30), ON_CUDA, ValueError, "seqlen_k must be less than 2**30"),
    Illegal(
        "tiles", range(TOO_MANY_TILES), ON_CUDA, ValueError,
        "batch * heads * ceil(seqlen_q / 64) must be less than 2**31 - 2**12",
    ),
    # Rows of packed tensors are counted in 32 bits, too, and so are the words of a table of tiles: 8 for each of up to
    # 2 batch + 2 that are not full, and of total / 64 others. The sequences' lengths only the device knows.
    Illegal("total_q", range(2**30), ON_CUDA, ValueError, "total_q must be less than 2**30"),
    Illegal("total_k", range(2**30), ON_CUDA, ValueError, "total_k must be less than 2**30"),
    Illegal("sequences", range(2**26), ON_CUDA, ValueError, "batch must be less than 2**26 for packed sequences"),
    *(
        Illegal(
            f"packed_tiles_{name}", range(TOO_MANY_TILES), ON_CUDA, ValueError,
            f"{heads} * (total_{name} // 64 + min(2 * batch + 2, total_{name})) must be less than 2**31 - 2**12",
        )
        for name, heads in (("q", "heads"), ("k", "heads_k"))
    ),
    Illegal("sm_margin", ANY_COUNT, (), ValueError, "sm_margin must be an integer of at least 0"),
    Illegal("remaining_sms", ANY_COUNT[1:], ON_CUDA, ValueError, "the device's SMs minus sm_margin must be at least 1"),
    Illegal("num_splits", (0, 1), (), NOT_BUILT, "num_splits must be 0 or 1 (splitting is not built yet)"),
    Illegal("pack_gqa", (None, False), (), NOT_BUILT, "pack_gqa must be None or False (packing is not built yet)"),
    # The kernel's scores are off by a float32's last bit of the cap (kernels/score.py).
    Illegal("large_softcap", (None,), ON_CUDA, ValueError, "softcap must be at most 1024 on CUDA"),
    *(
        Illegal(
            f"{name}_{function}", (True,), where, NOT_BUILT,
            f"{name} must have a function {function} for {what} on CUDA",
        )
        for name, function, where, what in (
            ("score", "forward", ON_CUDA, "tensors"), ("mask", "visible", ON_CUDA, "tensors"),
            ("score", "backward", (*ON_CUDA, ("requires_grad", True)), "gradients"),
        )
    ),
    *(
        Illegal(name, (None,), (), NOT_BUILT, f"{name} must be None (not built yet)")
        for name in ("qv", "q_descale", "k_descale", "v_descale", "block_mask", "page_table")
    ),
    Illegal(
        "slopes_gradient", (False,), (), NOT_BUILT, "alibi_slopes must not require grad (their gradient is not built)"
    ),
    Illegal(
        "tangent", (False,), ON_CUDA, NOT_BUILT,
        "q, k and v must have no tangent on CUDA (forward-mode derivatives are not built)",
    ),
    Illegal(
        "out", (None,), (("requires_grad", True),), ValueError,
        "out must be None where q, k, v or sink requires grad (results are written in place)",
    ),
)  # fmt: skip


class Packed(NamedTuple):
    """Several sequences in one tensor, of which some rows may not be used."""

    used_q: bool  # seqused_q is given
    used_k: bool


class Static(NamedTuple):
    """All that changes the compiled code; the only such list."""

    dtype: str  # "bfloat16" or "float16"
    head_dim: int  # tile class
    head_dim_v: int  # tile class
    right_bound: bool  # a right bound is present; its value is a run-time argument (causal: 0)
    left_bound: bool  # likewise; only together with a right one
    negative_scale: bool  # not with softcap or a score hook, where the sign is in a run-time argument
    packed: Packed | None = None
    softcap: bool = False
    by_sums: bool = False  # a softcap alone that is not below kernels.config.SMALLEST_CAP
    sink: bool = False
    alibi: str | None = None  # "linear" where no query sees a key behind its diagonal, else "distance"
    chunked: bool = False  # only with both bounds
    score: ScoreHook | None = None  # hooks are equal where their keys are
    mask: MaskHook | None = None


class BackwardStatic(NamedTuple):
    """All that changes the compiled code of the gradients."""

    dtype: str
    head_dim: int  # tile class
    head_dim_v: int  # tile class
    right_bound: bool
    lse_gradient: bool  # a gradient of the LSE arrives
    deterministic: bool
    left_bound: bool = False
    packed: Packed | None = None
    softcap: bool = False
    alibi: str | None = None
    chunked: bool = False
    sink: bool = False  # of packed sequences, where rows without keys count in its gradient
    score: ScoreHook | None = None
    mask: MaskHook | None = None


class Asked:
    """What a Problem and a PackedProblem say of their fields alike."""

    packed = None  # what of packed sequences the kernels are compiled for

    @property
    def group(self):
        """Query heads per K/V head."""
        return self.heads // self.heads_k

    @property
    def bounded(self):
        """True where some query may see less than all keys of its sequence."""
        return self.windowed or self.right is not None

    @property
    def windowed(self):
        """True where keys in front of others may be hidden: kernels have a left bound."""
        return self.left is not None or self.attention_chunk > 0

    @property
    def static(self):
        """The part of a CUDA problem that the kernel is compiled for."""
        alone = not self.has_alibi and self.score is None and self.mask is None
        return Static(
            dtype=name_of(self.dtype),
            head_dim=planning.tile_class(self.head_dim),
            head_dim_v=planning.tile_class(self.head_dim_v),
            # A left bound comes with a right one, which may hide nothing: a third of the kernels less, and a window
            # that is open on the right is rare
            right_bound=self.bounded,
            left_bound=self.windowed,
            negative_scale=self.softmax_scale < 0 and not self.softcap and self.score is None,
            packed=self.packed,
            softcap=self.softcap > 0,
            by_sums=alone and self.softcap >= SMALLEST_CAP,
            sink=self.has_sink,
            alibi=("linear" if self.right == 0 else "distance") if self.has_alibi else None,
            chunked=self.attention_chunk > 0,
            score=self.score,
            mask=self.mask,
        )

    def backward_static(self, lse_gradient, deterministic):
        """The same for the gradients of a CUDA problem; the sign of the scale changes nothing in them."""
        static = self.static
        return BackwardStatic(
            static.dtype, static.head_dim, static.head_dim_v, static.right_bound, lse_gradient, deterministic,
            static.left_bound, static.packed, static.softcap, static.alibi, static.chunked,
            sink=static.sink and static.packed is not None, score=static.score, mask=static.mask,
        )  # fmt: skip


@dataclass(frozen=True)
class Problem(Asked):
    """One attention call: what is asked, with nothing about how it is computed."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    left: int | None  # query i sees keys from i + seqlen_k - seqlen_q - left on; None: from the first
    right: int | None  # ... up to i + seqlen_k - seqlen_q + right; None: up to the last; causal: 0
    attention_chunk: int = 0  # ... and of the chunk of this many keys that i + seqlen_k - seqlen_q lies in; 0: of all
    softcap: float = 0.0  # scores lie within plus and minus this; 0: anywhere
    has_sink: bool = False  # tensors are passed beside q, k and v
    has_alibi: bool = False
    score: ScoreHook | None = None
    mask: MaskHook | None = None

    @classmethod
    def from_tensors(
        cls, q, k, v, *, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, sink=None, alibi_slopes=None, score=None, mask=None, block_mask=None, out=None, plan=None,
    ):  # fmt: skip
        """The problem that these arguments of flash_attn_func pose (shapes and meanings: see there).

        A bound that hides no key is stored as None, so that equal masks give equal problems. ``deterministic``,
        ``plan`` and ``sm_margin`` say how to compute, so they are checked but not stored.

        Raises TypeError for dtypes and for what is no tensor or plan, ValueError for shapes and values,
        NotImplementedError for features that are not built yet, RuntimeError for the device.
        """
        check_shapes(q, k, v, LAYOUTS)
        check_flag("deterministic", deterministic)
        batch, seqlen_q, heads, head_dim = q.shape
        _, seqlen_k, heads_k, head_dim_v = v.shape
        left, right = bounds(window_size, causal, seqlen_q, seqlen_k)
        chunk, left, right = chunked(attention_chunk, left, right, seqlen_q, seqlen_k)
        softcap = checked_softcap(softcap)
        check_scoring(q, batch, sink=sink, alibi_slopes=alibi_slopes, score=score, mask=mask)
        facts = tensor_facts(q, k, v, sm_margin, sink, alibi_slopes) | hook_facts(score, mask) | {
            "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "tiles": batch * heads * -(-seqlen_q // TILE_ROWS),
            "num_splits": num_splits, "pack_gqa": pack_gqa, "attention_chunk": chunk,
            "softcap": softcap, "large_softcap": too_large(softcap),
            "qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
            "sink": sink, "alibi_slopes": alibi_slopes, "block_mask": block_mask, "out": out,
        }  # fmt: skip
        refuse_illegal(facts)
        check_memory(q, k=k, v=v, sink=sink, alibi_slopes=alibi_slopes, out=out)
        scale = head_dim**-0.5 if softmax_scale is None else checked_scale(softmax_scale)
        problem = cls(
            q.device, q.dtype, batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v, scale, left, right,
            chunk, softcap, sink is not None, alibi_slopes is not None, score, mask,
        )  # fmt: skip
        check_out(out, problem)
        check_plan(plan, problem)
        return problem

    @property
    def out_shape(self):
        """That of the result."""
        return self.batch, self.seqlen_q, self.heads, self.head_dim_v

    @property
    def kernel_bounds(self):
        """See kernel_bounds_of."""
        return kernel_bounds_of(self, self.seqlen_q, self.seqlen_k)


def kernel_bounds_of(problem, longest_q, longest_k):
    """``(right, left, chunk)`` of a Problem or PackedProblem as the kernels take them at run time: bounds that hide
    nothing, of lengths up to these, where others need them; None where there is none.
    """
    right = longest_q - 1 if problem.right is None else problem.right
    if not problem.attention_chunk:
        return right, problem.left, None
    return right, longest_k if problem.left is None else problem.left, min(problem.attention_chunk, LARGEST_CHUNK)


def too_large(softcap):
    """The softcap where kernels refuse it, else None."""
    return softcap if softcap > LARGEST_SOFTCAP else None


def tensor_facts(q, k, v, sm_margin, sink, alibi_slopes):
    """Facts for ILLEGAL that every call has, of its tensors and their device."""
    on_cuda = q.device.type == "cuda"
    sms = multiprocessors(q.device) if on_cuda else None
    return {
        "device": q.device.type, "architecture": architecture(q.device) if on_cuda else None,
        "dtype": name_of(q.dtype), "head_dim": q.shape[-1], "head_dim_v": v.shape[-1], "sm_margin": sm_margin,
        "remaining_sms": sms - sm_margin if on_cuda and is_integer(sm_margin) else None,
        "requires_grad": recorded(q, k, v, sink),
        "slopes_gradient": recorded(alibi_slopes),
        "tangent": forward_ad._current_level >= 0 and any(map(_has_tangent, (q, k, v))),
    }  # fmt: skip


def hook_facts(score, mask):
    """The same of hooks."""
    return {
        "score": score, "mask": mask, "score_forward": _has(score, "forward"),
        "score_backward": _has(score, "backward"), "mask_visible": _has(mask, "visible"),
    }  # fmt: skip


def refuse_illegal(facts):
    """Raise for the first row of ILLEGAL that the facts (a dict of plain values, device facts among them) break."""
    for row in ILLEGAL:
        if row.fact not in facts:
            continue
        value = facts[row.fact]
        applies = all(facts[fact] == required for fact, required in row.where)
        if applies and not _among(value, row.legal):
            raise row.error(f"{row.rule}, got {shown(value)}")


def bounds(window_size, causal, seqlen_q, seqlen_k):
    """``(left, right)`` of the visibility rule, None for a side that hides no key of these lengths."""
    check_flag("causal", causal)
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(f"window_size must be a pair (left, right), got {shown(window_size)}")
    if len(window_size) != 2:
        raise ValueError(f"window_size must be a pair (left, right), got {len(window_size)} values")
    for side in window_size:
        if side is not None and not (is_integer(side) and side >= -1):
            raise ValueError(f"each side of window_size must be None, -1 or at least 0, got {tuple(window_size)}")
    left, right = (None if side in (None, -1) else side for side in window_size)
    right = 0 if causal else right
    # The last query is the first to lose keys on the left, the first query on the right.
    left = None if left is None or left >= seqlen_k - 1 else left
    right = None if right is None or right >= seqlen_q - 1 else right
    return left, right


def chunked(attention_chunk, left, right, seqlen_q, seqlen_k):
    """``(attention_chunk, left, right)`` without what hides no key: 0 for no chunks, None for an open side."""
    check_chunk(attention_chunk)
    # A query that stands before the first key shares no chunk with any key.
    if attention_chunk == 0 or seqlen_q <= seqlen_k <= attention_chunk:
        return 0, left, right
    left, right = (None if side is not None and side >= attention_chunk - 1 else side for side in (left, right))
    return attention_chunk, left, right


@functools.cache
def architecture(device):
    """``"sm_90"`` and the like. Asked once per device: the query costs microseconds."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def multiprocessors(device):
    """Number of SMs of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def split_packed(qkv, num_heads_q=None):
    """``(q, k, v)``, views of one packed tensor of either layout that flash_attn_qkvpacked_func takes."""
    require_tensor("qkv", qkv)
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        if num_heads_q not in (None, qkv.shape[3]):
            raise ValueError(f"num_heads_q must be the {qkv.shape[3]} heads of a 5-D qkv or None, got {num_heads_q}")
        return qkv.unbind(2)
    if qkv.dim() != 4:
        raise ValueError(
            "qkv must have shape (batch, seqlen, 3, heads, head_dim) or (batch, seqlen, heads_q + 2 heads_k, head_dim)"
            f", got {tuple(qkv.shape)}"
        )
    heads = qkv.shape[2]
    if not (is_integer(num_heads_q) and 0 < num_heads_q < heads and (heads - num_heads_q) % 2 == 0):
        rule = f"num_heads_q must leave an even number of the {heads} heads of a 4-D qkv to k and v"
        raise ValueError(f"{rule}, got {shown(num_heads_q)}")
    heads_k = (heads - num_heads_q) // 2
    return qkv.split((num_heads_q, heads_k, heads_k), 2)


def check_shapes(q, k, v, layouts):
    """Raise where q, k and v are not three tensors that fit each other. ``layouts``: the names of their dimensions."""
    given = tuple(zip("qkv", (q, k, v), layouts, strict=True))
    for name, tensor, layout in given:
        require_tensor(name, tensor)
        if tensor.dim() != len(layout):
            raise ValueError(f"{name} must have shape ({', '.join(layout)}), got {tuple(tensor.shape)}")
    for name, error in (("dtype", TypeError), ("device", RuntimeError)):
        found = [getattr(tensor, name) for tensor in (q, k, v)]
        if len(set(found)) > 1:
            raise error(f"q, k and v must have one {name}, got {found[0]}, {found[1]} and {found[2]}")
    for (name, tensor, layout), (other, beside, names) in itertools.pairwise(given):
        for what in (each for each in layout if each in names):
            a, b = tensor.shape[layout.index(what)], beside.shape[names.index(what)]
            if a != b:
                raise ValueError(f"{name} and {other} must have the same {what}, got {a} and {b}")
    heads, heads_k = q.shape[-2], k.shape[-2]
    if heads_k == 0 or heads % heads_k:
        raise ValueError(f"heads must be a multiple of heads_k, which is at least 1, got {heads} and {heads_k}")


def check_out(out, problem):
    """Raise where results cannot be written to ``out``, unless it is None."""
    if out is None:
        return
    require_tensor("out", out)
    if out.dtype != problem.dtype:
        raise TypeError(f"out must have q's dtype {name_of(problem.dtype)}, got {name_of(out.dtype)}")
    if tuple(out.shape) != problem.out_shape:
        raise ValueError(f"out must have shape {problem.out_shape}, got {tuple(out.shape)}")
    if out.device != problem.device:
        raise ValueError(f"out must be on q's device {problem.device}, got {out.device}")
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError("out must not require grad where grad mode is on (results are written in place), got True")
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out must have an address of its own for every element, got strides {out.stride()}")


def check_memory(q, **others):
    """Raise on CUDA for the first tensor whose elements have no address: a kernel would take null for one, and the
    fault that follows ends the whole process's use of the GPU. ``others``: tensors beside q, or None.
    """
    if q.device.type != "cuda":
        return
    for name, tensor in {"q": q, **others}.items():
        if tensor is not None and tensor.numel() and not _address(tensor):
            raise TypeError(
                f"{name} must have memory on CUDA (fake and wrapped tensors have none), got {shown(tensor)}"
            )


def _has_tangent(tensor):
    return forward_ad.unpack_dual(tensor).tangent is not None


def _has(hook, function):
    """Whether there is such a function, or no hook: True, or as errors show it None."""
    return True if hook is None or getattr(hook, function) is not None else None


def _address(tensor):
    try:
        return tensor.data_ptr()
    except RuntimeError:  # of a function transform
        return 0


def check_plan(plan, problem):
    """Raise where ``plan`` is neither None nor a plan, or on CUDA gives no legal kernel for the problem."""
    if plan is None:
        return
    if not isinstance(plan, planning.Plan):
        raise TypeError(f"plan must be a hopper_fa3.plan.Plan, got {shown(plan)}")
    if problem.device.type == "cuda":
        planning.forward_config(problem.static, plan).check()


def _among(value, legal):
    """True where value is one of the plain values in legal. Never compares a tensor, nor walks through a range."""
    if isinstance(legal, range):
        return is_integer(value) and value in legal
    return any(value is one for one in legal) or (isinstance(value, (int, float, str)) and value in legal)

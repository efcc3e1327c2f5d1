"""What is asked of sequences packed into one tensor: one call of flash_attn_varlen_func, validated as in problem.py."""

import itertools
from dataclasses import dataclass, fields

import torch

from .checks import (
    check_chunk,
    check_flag,
    check_scoring,
    checked_scale,
    checked_softcap,
    is_integer,
    name_of,
    require_tensor,
    shown,
)
from .hooks import MaskHook, ScoreHook
from .kernels.table_size import HEADER, table_lines
from .problem import (
    TILE_ROWS,
    Asked,
    Packed,
    Problem,
    bounds,
    check_memory,
    check_out,
    check_plan,
    check_shapes,
    chunked,
    hook_facts,
    kernel_bounds_of,
    refuse_illegal,
    tensor_facts,
    too_large,
)

LAYOUTS = (("total_q", "heads", "head_dim"), ("total_k", "heads_k", "head_dim"), ("total_k", "heads_k", "head_dim_v"))


@dataclass(frozen=True)
class PackedProblem(Asked):
    """One attention call on packed sequences: what is asked, with nothing about how it is computed.

    Nothing here depends on where the sequences begin and end: on CUDA only the device knows.
    """

    device: torch.device
    dtype: torch.dtype
    batch: int  # sequences
    total_q: int  # rows of q, whether or not they belong to a sequence
    total_k: int
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    left: int | None  # as in Problem, with a sequence's used lengths for seqlen_q and seqlen_k
    right: int | None
    has_seqused_q: bool
    has_seqused_k: bool
    attention_chunk: int = 0  # this and all below as in Problem; of a sequence it may hide nothing
    softcap: float = 0.0
    has_sink: bool = False
    has_alibi: bool = False
    score: ScoreHook | None = None
    mask: MaskHook | None = None

    @classmethod
    def from_tensors(
        cls, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, *,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, sink=None, alibi_slopes=None, score=None, mask=None, block_mask=None, page_table=None, out=None,
        plan=None,
    ):  # fmt: skip
        """The problem that these arguments of flash_attn_varlen_func pose (shapes and meanings: see there).

        A bound that hides no key of sequences as long as all rows is stored as None. What tensors on CUDA hold is not
        read; the values of cu_seqlens, seqused and max_seqlen on the CPU are checked, where q is there too. Raises what
        Problem.from_tensors raises.
        """
        check_shapes(q, k, v, LAYOUTS)
        check_flag("deterministic", deterministic)
        batch = _check_lengths(q, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            _check_longest(name, value)
        total_q, heads, head_dim = q.shape
        total_k, heads_k, head_dim_v = v.shape
        left, right = bounds(window_size, causal, total_q, total_k)  # no sequence is longer than all rows
        check_chunk(attention_chunk)
        softcap = checked_softcap(softcap)
        check_scoring(q, batch, sink=sink, alibi_slopes=alibi_slopes, score=score, mask=mask)
        facts = tensor_facts(q, k, v, sm_margin, sink, alibi_slopes) | hook_facts(score, mask) | {
            "total_q": total_q, "total_k": total_k,
            "sequences": batch, "packed_tiles_q": heads * _most_tiles(total_q, batch),
            "packed_tiles_k": heads_k * _most_tiles(total_k, batch),
            "num_splits": num_splits, "pack_gqa": pack_gqa, "attention_chunk": attention_chunk,
            "softcap": softcap, "large_softcap": too_large(softcap),
            "qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
            "sink": sink, "alibi_slopes": alibi_slopes, "block_mask": block_mask, "page_table": page_table, "out": out,
        }  # fmt: skip
        refuse_illegal(facts)
        check_memory(
            q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
            seqused_k=seqused_k, sink=sink, alibi_slopes=alibi_slopes, out=out,
        )  # fmt: skip
        scale = head_dim**-0.5 if softmax_scale is None else checked_scale(softmax_scale)
        problem = cls(
            q.device, q.dtype, batch, total_q, total_k, heads, heads_k, head_dim, head_dim_v, scale, left, right,
            seqused_q is not None, seqused_k is not None, attention_chunk, softcap, sink is not None,
            alibi_slopes is not None, score, mask,
        )  # fmt: skip
        check_out(out, problem)
        check_plan(plan, problem)
        if problem.device.type == "cpu":
            _check_values("q", total_q, cu_seqlens_q, seqused_q, max_seqlen_q)
            _check_values("k", total_k, cu_seqlens_k, seqused_k, max_seqlen_k)
        return problem

    @property
    def kernel_bounds(self):
        """See kernel_bounds_of: no sequence is longer than all rows."""
        return kernel_bounds_of(self, self.total_q, self.total_k)

    @property
    def out_shape(self):
        """That of the result."""
        return self.total_q, self.heads, self.head_dim_v

    @property
    def packed(self):
        """What of it the kernels are compiled for."""
        return Packed(self.has_seqused_q, self.has_seqused_k)

    def side_by_side(self, sequences, seqlen_q, seqlen_k):
        """The Problem of some of its sequences, all of these lengths, as the heads of one.

        ``sequences``: int64 (count,), which. Head h of sequence number n of them is head ``n * heads + h``.
        """
        shared = {field.name for field in fields(self)} & {field.name for field in fields(Problem)}
        chunk, left, right = chunked(self.attention_chunk, self.left, self.right, seqlen_q, seqlen_k)
        own = {
            "batch": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": len(sequences) * self.heads,
            "heads_k": len(sequences) * self.heads_k, "attention_chunk": chunk, "left": left, "right": right,
            "score": None if self.score is None else self.score.side_by_side(sequences, self.heads),
            "mask": None if self.mask is None else self.mask.side_by_side(sequences, self.heads),
        }  # fmt: skip
        return Problem(**{name: getattr(self, name) for name in shared} | own)


def used_rows(cu_seqlens, seqused=None):
    """The range of rows that each sequence uses. Reads the tensors: on the CPU only."""
    offsets = cu_seqlens.tolist()
    if seqused is None:
        return [range(start, stop) for start, stop in itertools.pairwise(offsets)]
    return [range(start, start + used) for start, used in zip(offsets[:-1], seqused.tolist(), strict=True)]


def _most_tiles(rows, batch):
    """Tiles of one head that the sequences' lengths, which only the device knows, may make of so many rows."""
    return table_lines(rows, TILE_ROWS, batch, used=True) - HEADER


def _check_lengths(q, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
    """The number of sequences; raises where the tensors that say where they are do not fit q and each other."""
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    given |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    batch = None
    for name, tensor in given.items():
        if tensor is None and name.startswith("seqused"):
            continue
        require_tensor(name, tensor)
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} must have dtype int32, got {name_of(tensor.dtype)}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
        if batch is None:
            if tensor.dim() != 1 or len(tensor) == 0:
                raise ValueError(f"{name} must have shape (batch + 1,), got {tuple(tensor.shape)}")
            batch = len(tensor) - 1
        expected = (batch + 1,) if name.startswith("cu_seqlens") else (batch,)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name} must have shape {expected} beside cu_seqlens_q, got {tuple(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    return batch


def _check_longest(name, value):
    """Raise where max_seqlen is no count. The value of a tensor is not read."""
    rule = f"{name} must be an integer of at least 0 or a 0-dim tensor of integers"
    if isinstance(value, torch.Tensor):
        whole = not (value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool)
        if not whole:
            raise TypeError(f"{rule}, got {name_of(value.dtype)}")
        if value.dim():
            raise ValueError(f"{rule}, got shape {tuple(value.shape)}")
    elif not is_integer(value):
        raise TypeError(f"{rule}, got {shown(value)}")
    elif value < 0:
        raise ValueError(f"{rule}, got {value}")


def _check_values(name, total, cu_seqlens, seqused, longest):
    """Raise where offsets and lengths on the CPU are not those of sequences that stand in ``total`` rows."""
    offsets = cu_seqlens.tolist()
    if offsets[0] < 0:
        raise ValueError(f"cu_seqlens_{name} must start at 0 or above, got {offsets[0]}")
    for index, (start, stop) in enumerate(itertools.pairwise(offsets)):
        if stop < start:
            raise ValueError(f"cu_seqlens_{name} must not decrease, got {start} and {stop} at {index} and {index + 1}")
    if offsets[-1] > total:
        raise ValueError(f"cu_seqlens_{name} must end at total_{name}, {total}, or below, got {offsets[-1]}")
    lengths = [stop - start for start, stop in itertools.pairwise(offsets)]
    if seqused is not None:
        used = seqused.tolist()
        for index, (count, length) in enumerate(zip(used, lengths, strict=True)):
            if not 0 <= count <= length:
                rule = f"seqused_{name} must be from 0 to the sequence's length"
                raise ValueError(f"{rule}, got {count} for sequence {index} of length {length}")
        lengths = used
    if isinstance(longest, torch.Tensor) and longest.device.type != "cpu":
        return
    if int(longest) < max(lengths, default=0):
        rule = f"max_seqlen_{name} must be at least the longest sequence's used length, {max(lengths)}"
        raise ValueError(f"{rule}, got {int(longest)}")

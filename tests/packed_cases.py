"""Cases of packed sequences: a case makes its inputs, its name and the oracle's results, for tests on both devices."""

import random
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from cases import bounds

from hopper_fa3.reference_packed import Lengths, standard_packed

NAN = float("nan")


class Inputs(NamedTuple):
    """The positional arguments of flash_attn_varlen_func."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None

    @property
    def lengths(self):
        """What the CPU path takes; read from the device where it is not the CPU."""
        given = (self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k)
        return Lengths(*(None if x is None else x.cpu() for x in given))


@dataclass(frozen=True)
class PackedCase:
    """One call of flash_attn_varlen_func.

    Sequence b has ``lengths_q[b]`` queries and ``lengths_k[b]`` keys, of which it uses the first ``used_q[b]`` and
    ``used_k[b]`` (None: all). ``before`` and ``behind``: rows of q and of k in front of the first sequence and behind
    the last. Rows that no sequence uses are NaN. ``mix`` names the lengths.
    """

    mix: str
    lengths_q: tuple
    lengths_k: tuple
    used_q: tuple | None = None
    used_k: tuple | None = None
    before: tuple = (0, 0)
    behind: tuple = (0, 0)
    heads: int = 2
    heads_k: int = 1
    head_dim: int = 128
    head_dim_v: int = 128
    dtype: str = "bfloat16"
    causal: bool = False
    window_size: tuple = (-1, -1)
    softmax_scale: float | None = None
    seed: int = 0

    @property
    def name(self):
        """The whole case but the seed, as a test identifier."""
        window = "dense" if self.window_size == (-1, -1) else "window{}_{}".format(*self.window_size)
        scale = "" if self.softmax_scale is None else f"-scale{self.softmax_scale:.4g}"
        shape = f"{self.mix}-h{self.heads}_{self.heads_k}-d{self.head_dim}_{self.head_dim_v}"
        return f"{self.dtype}-{shape}-{'causal' if self.causal else window}{scale}"

    @property
    def options(self):
        """The keywords of flash_attn_varlen_func that this case sets."""
        return {"softmax_scale": self.softmax_scale, "causal": self.causal, "window_size": self.window_size}

    def inputs(self, device="cpu"):
        """The arguments, with normal entries. Drawn on the CPU: a seed means the same numbers on every device."""
        generator = torch.Generator().manual_seed(self.seed)
        offsets = [
            torch.tensor([before, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            for before, lengths in zip(self.before, (self.lengths_q, self.lengths_k), strict=True)
        ]
        used = [None if x is None else torch.tensor(x, dtype=torch.int32) for x in (self.used_q, self.used_k)]
        total_q, total_k = (int(x[-1]) + behind for x, behind in zip(offsets, self.behind, strict=True))
        shapes = (
            (total_q, self.heads, self.head_dim),
            (total_k, self.heads_k, self.head_dim),
            (total_k, self.heads_k, self.head_dim_v),
        )
        lengths = Lengths(*offsets, *used)
        tensors = [torch.randn(shape, generator=generator).to(getattr(torch, self.dtype)) for shape in shapes]
        for tensor, place in zip(tensors, (0, 1, 1), strict=True):
            tensor[unused(lengths, len(tensor), place)] = NAN
        longest = (max(self.used_q or self.lengths_q, default=0), max(self.used_k or self.lengths_k, default=0))
        given = (*tensors, *lengths)
        q, k, v, cu_seqlens_q, cu_seqlens_k, *used = (None if x is None else x.to(device) for x in given)
        return Inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, *used)

    def arriving(self, inputs):
        """Random gradients of out and of the LSE; NaN for rows that no sequence uses, to which no gradient belongs."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        total_q = len(inputs.q)
        dout = torch.randn((total_q, self.heads, self.head_dim_v), generator=generator)
        dlse = torch.randn((self.heads, total_q), generator=generator)
        rows = unused(inputs.lengths, total_q, 0)
        dout[rows] = NAN
        dlse[:, rows] = NAN
        return dout.to(inputs.q), dlse.to(inputs.q.device)

    def oracle(self, inputs, dout=None, dlse=None, dtype=torch.float32):
        """``((out, lse), (dq, dk, dv))`` in ``dtype`` by reference.standard, one sequence at a time, on the inputs'
        device. Gradients of what arrives; None where nothing does.
        """
        leaves = [x.detach().nan_to_num(0).to(dtype).requires_grad_() for x in inputs[:3]]
        left, right = bounds(self.causal, self.window_size)
        results = standard_packed(
            *leaves, inputs.lengths, softmax_scale=self.softmax_scale, left=left, right=right, compute_dtype=dtype
        )
        arrived = [(x, y.nan_to_num(0).to(x)) for x, y in zip(results, (dout, dlse), strict=True) if y is not None]
        outputs, given = zip(*arrived, strict=True) if arrived else ((), ())
        gradients = torch.autograd.grad(outputs, leaves, given) if arrived else None
        return tuple(x.detach() for x in results), gradients


def unused(lengths, total, place):
    """Bool (total,), True for the rows that no sequence uses: of q (place 0), or of k and v (place 1)."""
    rows = torch.ones(total, dtype=torch.bool)
    for used in lengths.rows:
        rows[used[place].start : used[place].stop] = False
    return rows


def long_tailed(count, longest, seed=0):
    """Lengths drawn from a log-normal distribution with a median of 90, from 16 to ``longest``."""
    draw = random.Random(seed)
    return tuple(min(max(int(draw.lognormvariate(4.5, 1.2)), 16), longest) for _ in range(count))


def of_dims(case, head_dim, head_dim_v, dtype):
    """The case with these."""
    return replace(case, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)


# Mixes of lengths. Among few and short rows a bound by PyTorch's largest error is a matter of luck: none has sequences
# of 2 to 15 rows but that of CASES.md, line 4, and where sequences have one query, rows are wide.
UNIFORM = PackedCase("uniform", (256,) * 6, (256,) * 6)
RAGGED = PackedCase(
    "ragged", (17, 63, 64, 65, 113, 128, 200, 255, 513), (513, 255, 200, 128, 113, 65, 64, 63, 17)
)  # fmt: skip
EMPTY = PackedCase("empty", (0, 0, 100, 0, 130, 64, 0), (0, 70, 0, 0, 130, 100, 90))
SINGLE = PackedCase("single", (1,) * 24, (1, 64, 300, 129, 1, 1000, 65, 63) * 3)
TAILED = PackedCase("tailed", long_tailed(40, 4096), long_tailed(40, 4096))
CROSSED = PackedCase("crossed", long_tailed(40, 4096), long_tailed(40, 4096, seed=1))
SPARE = PackedCase("spare", (100, 0, 64, 257), (200, 90, 64, 70), before=(3, 70), behind=(200, 65))
USED = PackedCase(
    "used", (100, 64, 0, 300, 130), (513, 64, 90, 100, 300), used_q=(65, 64, 0, 0, 129), used_k=(300, 17, 90, 40, 0)
)  # fmt: skip
USED_Q, USED_K = (replace(USED, mix="used_q", used_k=None), replace(USED, mix="used_k", used_q=None))
WHOLE = (UNIFORM, RAGGED, EMPTY, SINGLE, TAILED, CROSSED, SPARE)
MIXES = (*WHOLE, USED, USED_Q, USED_K)
# Lines of CASES.md: 3 (batch longer than total, 21 heads over 7), 4 (tiny keys), 5 (of 256 keys 107 are used)
LINES = (
    PackedCase("line3", (0, 0, 0, 1), (0, 0, 0, 1), heads=21, heads_k=7, head_dim=120, head_dim_v=120),
    PackedCase("line3all", (0, 0, 0, 1), (1, 0, 0, 0), heads=21, heads_k=7, head_dim=120, head_dim_v=120),
    PackedCase("line4", (76, 34, 146), (1, 1, 1), heads=1, causal=True),
    PackedCase("line5", (64, 1, 107), (256,) * 3, used_k=(107, 200, 107), causal=True),
)


def _head_dims():
    """Each class of head dims under both masks; dims inside a class under one."""
    whole = [replace(RAGGED, head_dim=d, head_dim_v=d, causal=causal) for d in (64, 96, 192, 256) for causal in MASKS]
    inside = (8, 16, 24, 40, 72, 80, 104, 120, 136, 144, 160, 176, 200, 248)
    pairs = [(d, d, "bfloat16") for d in inside] + [(192, 128, "bfloat16"), (128, 128, "float16")]
    return whole + [replace(RAGGED, head_dim=d, head_dim_v=d_v, dtype=dtype, causal=True) for d, d_v, dtype in pairs]


def _heads():
    return [
        replace(RAGGED, heads=heads, heads_k=heads_k, causal=causal)
        for heads, heads_k in ((2, 2), (10, 2), (14, 2), (5, 1), (16, 2)) for causal in MASKS
    ]  # fmt: skip


MASKS = (False, True)
# Some 20 kernels forward and 30 backward: used lengths, given or not for q and for k, have their own, so their
# combinations are seen under one mask and at one head dim.
ON_GPU = (
    *_head_dims(),
    *(replace(case, causal=True) for case in (*MIXES, *LINES)),
    *WHOLE,
    USED,
    *LINES[:2],
    *(replace(case, head_dim=64, head_dim_v=64) for case in WHOLE),
    *_heads(),
    *(replace(case, window_size=(-1, right)) for case in (RAGGED, CROSSED, USED) for right in (5, 100)),
    *(replace(RAGGED, causal=True, softmax_scale=scale) for scale in (0.0, 1.0)),
)
# Cases that need windows which cut on the left: their own kernels
WINDOWED = tuple(
    replace(case, window_size=window)
    for case in (RAGGED, EMPTY, CROSSED, USED, SPARE)
    for window in ((100, 0), (0, 0), (64, 32), (300, -1), (5, 200))
)

"""Attention cases: a case makes its inputs, name, FLOPs and bytes. Tests and benchmarks import the same ones."""

from dataclasses import dataclass, replace

import torch


def bounds(causal=False, window_size=(-1, -1)):
    """(left, right) of the visibility rule, None where the side is open; causal means right = 0."""
    left, right = (None if side in (None, -1) else side for side in window_size)
    return left, 0 if causal else right


@dataclass(frozen=True)
class Case:
    """One call of flash_attn_func: shapes, dtype (a torch attribute name), mask, scale and the seed of the inputs."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"
    causal: bool = False
    softmax_scale: float | None = None
    seed: int = 0
    window_size: tuple = (-1, -1)

    @property
    def name(self):
        """The whole case but the seed, as a test identifier."""
        window = "dense" if self.window_size == (-1, -1) else "window{}_{}".format(*self.window_size)
        mask = "causal" if self.causal else window
        scale = "" if self.softmax_scale is None else f"-scale{self.softmax_scale:.4g}"
        shape = f"b{self.batch}-q{self.seqlen_q}-k{self.seqlen_k}-h{self.heads}_{self.heads_k}"
        return f"{self.dtype}-{shape}-d{self.head_dim}_{self.head_dim_v}-{mask}{scale}"

    @property
    def options(self):
        """The keywords of flash_attn_func that this case sets."""
        return {"softmax_scale": self.softmax_scale, "causal": self.causal, "window_size": self.window_size}

    def inputs(self, device="cpu"):
        """q, k, v with normal entries. Drawn on the CPU, so that a seed means the same numbers on every device."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (
            (self.batch, self.seqlen_q, self.heads, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_k, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_k, self.head_dim_v),
        )
        dtype = getattr(torch, self.dtype)
        return tuple(torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes)

    @property
    def pairs(self):
        """Number of (query, key) pairs of one head that the mask lets through, exactly."""
        left, right = bounds(self.causal, self.window_size)
        shift, last = self.seqlen_k - self.seqlen_q, self.seqlen_k - 1
        total = 0
        for i in range(self.seqlen_q):
            low = 0 if left is None else max(0, i + shift - left)
            high = last if right is None else min(last, i + shift + right)
            total += max(0, high - low + 1)
        return total

    @property
    def flops(self):
        """Multiply-adds of the visible pairs, each counted as two: QK^T costs head_dim a pair, PV costs head_dim_v."""
        return 2 * self.batch * self.heads * self.pairs * (self.head_dim + self.head_dim_v)

    @property
    def flops_convention(self):
        """The count that published tables use: all seqlen_q * seqlen_k pairs, half of them when causal."""
        full = 2 * self.batch * self.heads * self.seqlen_q * self.seqlen_k * (self.head_dim + self.head_dim_v)
        return full // 2 if self.causal else full

    @property
    def bytes(self):
        """The least traffic with global memory: q, k, v read once, out and the float32 LSE written once."""
        query_rows, key_rows = self.batch * self.seqlen_q * self.heads, self.batch * self.seqlen_k * self.heads_k
        elements = (query_rows + key_rows) * (self.head_dim + self.head_dim_v)
        return elements * getattr(torch, self.dtype).itemsize + 4 * query_rows


def drawn_on(device, *shape, dtype=torch.bfloat16):
    """Normal entries drawn on the device itself: for tensors too large to draw on the CPU."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, device=device, dtype=dtype, generator=generator)


FAR = 2**31 + 64  # elements: twice that is an offset that 32 bits do not hold, signed or not

SMALL = Case(batch=2, seqlen_q=113, seqlen_k=255, heads=2, heads_k=1, head_dim=128, head_dim_v=128)

# All dims of the list share the compiled kernels of their tile classes: 5 classes x (dense, causal) in bfloat16. Of the
# backward 72 and 80, and 104, have kernels of their own (plan.unused_columns).
HEAD_DIMS = (8, 16, 24, 40, 64, 72, 80, 96, 104, 120, 128, 136, 144, 160, 176, 192, 200, 248, 256)
# (head_dim, head_dim_v, causal): two different classes cost compilations of their own, so most are seen under one mask.
UNEVEN_DIMS = (
    (192, 128, True), (192, 128, False), (64, 256, True), (256, 64, False), (128, 64, False), (72, 40, True),
    (128, 248, True),
)  # fmt: skip
HALF_DIMS = ((64, 64, True), (80, 80, False), (128, 128, True), (192, 128, False), (256, 256, True))
# Of the backward, whose kernels take longer to compile: two different classes under one mask, fewer in float16.
BACKWARD_UNEVEN_DIMS = (
    (64, 128, True), (128, 64, False), (96, 128, True), (192, 128, True), (192, 128, False), (256, 64, False),
    (64, 256, True), (256, 96, False), (128, 256, True), (112, 80, False),
)  # fmt: skip
BACKWARD_HALF_DIMS = ((64, 64, True), (128, 128, True), (192, 128, False), (256, 256, True))

LENGTHS = (
    (0, 64), (64, 0), (0, 0), (1, 1), (1, 63), (63, 1), (1, 4096), (64, 64), (63, 64), (64, 113), (113, 64),
    (113, 128), (128, 113), (128, 255), (255, 128), (255, 1000), (1000, 255), (1000, 1000), (128, 4096), (4096, 128),
    (1000, 4096), (4096, 1000), (4096, 4096),
)  # fmt: skip
DIM_LENGTHS = ((113, 255), (255, 113), (1000, 128), (128, 1000))
GROUPS = ((1, 2), (2, 2), (5, 2), (7, 2), (8, 2), (5, 1))  # (heads // heads_k, heads_k); the last one is MQA
MASKS = (False, True)


def _lengths():
    return [
        replace(SMALL, batch=1, seqlen_q=q, seqlen_k=k, head_dim=d, head_dim_v=d, causal=causal)
        for d in (64, 128, 256) for causal in MASKS for q, k in LENGTHS
    ]  # fmt: skip


def _head_dims(uneven, half):
    asked = [(d, d, causal, "bfloat16") for d in HEAD_DIMS for causal in MASKS]
    asked += [(d, d_v, causal, "bfloat16") for d, d_v, causal in uneven]
    asked += [(d, d_v, causal, "float16") for d, d_v, causal in half]
    return [
        replace(SMALL, seqlen_q=q, seqlen_k=k, head_dim=d, head_dim_v=d_v, causal=causal, dtype=dtype)
        for d, d_v, causal, dtype in asked for q, k in DIM_LENGTHS
    ]  # fmt: skip


def _groups():
    return [
        replace(SMALL, seqlen_q=255, seqlen_k=1000, heads=group * heads_k, heads_k=heads_k, causal=causal)
        for group, heads_k in GROUPS for causal in MASKS
    ]  # fmt: skip


def _right_bounds():
    return [
        replace(SMALL, seqlen_q=q, seqlen_k=k, head_dim=d, head_dim_v=d, window_size=(-1, right))
        for d in (64, 128) for right in (5, 200)
        for q, k in ((64, 64), (113, 255), (255, 113), (1000, 1000), (1000, 4096))
    ]  # fmt: skip


def _many_tiles():
    """More tiles than a GPU has SMs, so that a persistent block takes several; the last wave is ragged."""
    return [
        Case(batch, length, length, heads, heads_k, d, d, causal=causal)
        for batch, length, heads, heads_k in ((3, 1000, 10, 5), (2, 4096, 8, 1))
        for d in (64, 128, 256) for causal in MASKS
    ]  # fmt: skip


def _own_and_shared_heads():
    """A K/V head for each query head, so that dK and dV leave whole; one for many, whose few tiles are split over SMs
    and leave as parts (plan.head_parts). A case of both for each kernel of the others.
    """
    pairs = [(d, d, causal, "bfloat16") for d in (64, 80, 96, 104, 128, 192, 256) for causal in MASKS]
    pairs += [(d, d_v, causal, "bfloat16") for d, d_v, causal in BACKWARD_UNEVEN_DIMS]
    pairs += [(d, d_v, causal, "float16") for d, d_v, causal in BACKWARD_HALF_DIMS]
    return [
        replace(case, head_dim=d, head_dim_v=d_v, causal=causal, dtype=dtype)
        for case in (replace(SMALL, seqlen_q=200, seqlen_k=300, heads_k=2), Case(1, 500, 600, 8, 1, 128, 128))
        for d, d_v, causal, dtype in pairs
    ]


_SHARED = _lengths() + _groups() + _right_bounds() + _many_tiles()
FORWARD = tuple(_head_dims(UNEVEN_DIMS, HALF_DIMS) + _SHARED)
BACKWARD = tuple(_head_dims(BACKWARD_UNEVEN_DIMS, BACKWARD_HALF_DIMS) + _SHARED + _own_and_shared_heads())

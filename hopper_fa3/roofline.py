"""What attention costs by arithmetic: FLOPs, HBM bytes, arithmetic intensity, memory, bounds and Amdahl gains.

Forward pass only, and plain arithmetic: nothing is measured here and no package needed. A shape is a Shape or anything
with its attributes. Sizes are bytes, times seconds, rates TFLOP/s (10^12 FLOP/s) and TB/s (10^12 byte/s). Sources: for
the roofline, Williams, Waterman and Patterson, "Roofline" (2009); for the passes of both ways, Dao et al.,
"FlashAttention" (2022), algorithms 0 and 1, and Dao, "FlashAttention-2" (2023), algorithm 1.
"""

from typing import NamedTuple

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2}
LSE_BYTES = 4  # float32, one a query row
# Of an H100 or H200 (NVIDIA's H100 white paper): what stays there makes no HBM traffic
L2_BYTES = 50 * 10**6


class Shape(NamedTuple):
    """q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, heads_k, head_dim), v with head_dim_v."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    dtype: str = "bfloat16"


class Pass(NamedTuple):
    """One kernel's matrix FLOPs, and the bytes it reads from and writes to HBM when nothing stays in L2."""

    name: str
    flops: int
    read: int
    written: int


class Roofs(NamedTuple):
    """The two ceilings of a machine: matrix product (TFLOP/s) and copy (TB/s, bytes read plus bytes written)."""

    teraflops: float
    terabytes: float

    @property
    def ridge(self):
        """FLOP/byte from which the matrix units and no longer the memory are the bound."""
        return self.teraflops / self.terabytes

    def attainable(self, intensity):
        """The roof in TFLOP/s over an intensity in FLOP/byte: min(peak, bandwidth * intensity)."""
        return min(self.teraflops, self.terabytes * intensity)

    def bound(self, intensity):
        """ "memory" below the ridge, "compute" from it on."""
        return "memory" if intensity < self.ridge else "compute"


def scores(shape):
    """Number of scores, batch * heads * seqlen_q * seqlen_k, masked ones included."""
    return shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k


def flops(shape):
    """FLOPs that published rates credit: 2 * scores * (head_dim + head_dim_v), half of it when causal."""
    full = 2 * scores(shape) * (shape.head_dim + shape.head_dim_v)
    return full // 2 if shape.causal else full


def tensor_bytes(shape):
    """Bytes of (q, k, v, out)."""
    size = ELEMENT_BYTES[shape.dtype]
    queries, keys = shape.batch * shape.seqlen_q * shape.heads, shape.batch * shape.seqlen_k * shape.heads_k
    dims = (queries * shape.head_dim, keys * shape.head_dim, keys * shape.head_dim_v, queries * shape.head_dim_v)
    return tuple(size * count for count in dims)


def score_bytes(shape):
    """Bytes of the score matrix in the inputs' dtype."""
    return scores(shape) * ELEMENT_BYTES[shape.dtype]


def standard_memory(shape):
    """Bytes alive at the softmax of the standard way: q, k and v, the scores S, and P, which is made from S."""
    return sum(tensor_bytes(shape)[:3]) + 2 * score_bytes(shape)


def fused_memory(shape):
    """Bytes alive in a fused kernel: q, k, v, out and the LSE."""
    return sum(tensor_bytes(shape)) + LSE_BYTES * shape.batch * shape.seqlen_q * shape.heads


def standard(shape):
    """The passes of standard attention, unfused as PyTorch runs it (Dao et al. 2022, algorithm 0)::

        scores    read q, k     write S      2 * scores * head_dim FLOPs
        mask      read S        write S      only when causal: masked_fill_ is an elementwise kernel
        softmax   read S        write P
        product   read P, v     write out    2 * scores * head_dim_v FLOPs

    Masked scores are computed, moved and multiplied like all others. The scale belongs to q; the mask itself (one for
    all heads) and exponentials are not counted. A tuple of Pass.
    """
    q, k, v, out = tensor_bytes(shape)
    matrix = score_bytes(shape)
    mask = (Pass("mask", 0, matrix, matrix),) if shape.causal else ()
    return (
        Pass("scores", 2 * scores(shape) * shape.head_dim, q + k, matrix),
        *mask,
        Pass("softmax", 0, matrix, matrix),
        Pass("product", 2 * scores(shape) * shape.head_dim_v, matrix + v, out),
    )


def fused(shape):
    """The one pass of a fused kernel: q, k and v read once, out and LSE written once (Dao 2023, algorithm 1).

    Other tiles of queries read the same K and V again, from L2 as long as they are there: not counted. Masked blocks
    are skipped: half of the FLOPs when causal.
    """
    read = sum(tensor_bytes(shape)[:3])
    return (Pass("attention", flops(shape), read, fused_memory(shape) - read),)


def traffic(passes):
    """HBM bytes of all passes."""
    return sum(one.read + one.written for one in passes)


def intensity(shape, passes):
    """Credited FLOPs per HBM byte: the x of a roofline whose y is a credited rate."""
    return flops(shape) / traffic(passes)


def seconds(passes, roofs):
    """Model of the time: each pass at the roof that binds it, one after the other. No real kernel is faster, unless the
    passes find in L2 what those before them wrote::

    sum over passes of max(FLOPs / peak, bytes / bandwidth)
    """
    return sum(max(one.flops / roofs.teraflops, (one.read + one.written) / roofs.terabytes) * 1e-12 for one in passes)


def amdahl(share, speedup):
    """How many times faster the whole gets when ``share`` of its time runs ``speedup`` times faster.

    1 / (1 - share + share / speedup) (Amdahl 1967). ValueError for a share outside (0, 1] or a speedup that is not
    positive; an infinite speedup gives the limit 1 / (1 - share).
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be more than 0 and at most 1, got {share}")
    if not speedup > 0:
        raise ValueError(f"speedup must be positive, got {speedup}")
    left = 1 - share + share / speedup
    return 1 / left if left else float("inf")


def share_needed(gain, speedup):
    """The share from which ``speedup`` gains ``gain`` (0.05: 5 %) end to end, or None where no share does.

    amdahl(share, speedup) = 1 + gain, solved for the share: (1 - 1 / (1 + gain)) / (1 - 1 / speedup).
    """
    if speedup < 1 + gain:
        return None
    return (1 - 1 / (1 + gain)) / (1 - 1 / speedup)

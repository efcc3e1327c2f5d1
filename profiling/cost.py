"""FLOPs and bytes behind the rates that a benchmark prints: attention and the two ceilings that bound it."""

from hopper_fa3.kernels.config import ELEMENT_BYTES

MATMUL_SIZE = 8192  # the square bf16 matrix product whose speed is the practical ceiling
COPY_BYTES = 2 * 2**30  # read and written by the bandwidth measurement: many times the L2 cache
BACKWARD = 2.5  # FLOPs of a backward over those of its forward: five matrix products instead of two
TRAINING = 1 + BACKWARD  # of a forward and its backward


def matmul_flops(size=MATMUL_SIZE):
    """FLOPs of a square matrix product: a multiply-add counts as two."""
    return 2 * size**3


def copy_traffic(size=COPY_BYTES):
    """Bytes that a copy of ``size`` bytes moves: each is read and written."""
    return 2 * size


def teraflops(case, seconds):
    """TFLOP/s of a forward pass by the usual count: a causal one is credited with half of the dense matrix work."""
    return case.flops_convention / seconds * 1e-12


def band_teraflops(case, seconds):
    """TFLOP/s of a forward pass on the pairs that its mask lets through, exactly."""
    return case.flops / seconds * 1e-12


def backward_teraflops(case, seconds):
    """TFLOP/s of a backward pass by the usual count."""
    return BACKWARD * teraflops(case, seconds)


def training_teraflops(case, seconds):
    """TFLOP/s of a forward and its backward together by the usual count."""
    return TRAINING * teraflops(case, seconds)


def key_value_bytes(case):
    """Bytes of K and V: what a decoding step must read."""
    return case.batch * case.seqlen_k * case.heads_k * (case.head_dim + case.head_dim_v) * ELEMENT_BYTES


def floor_bytes(case):
    """The least traffic of a forward with memory, in bytes: q, k, v read once, out and LSE written once."""
    return case.bytes

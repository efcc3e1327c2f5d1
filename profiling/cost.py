"""FLOPs and bytes behind the rates that a benchmark prints: attention and the two ceilings that bound it."""

MATMUL_SIZE = 8192  # the square bf16 matrix product whose speed is the practical ceiling
COPY_BYTES = 2 * 2**30  # read and written by the bandwidth measurement: many times the L2 cache


def matmul_flops(size=MATMUL_SIZE):
    """FLOPs of a square matrix product: a multiply-add counts as two."""
    return 2 * size**3


def copy_traffic(size=COPY_BYTES):
    """Bytes that a copy of ``size`` bytes moves: each is read and written."""
    return 2 * size


def teraflops(case, seconds):
    """TFLOP/s of a forward pass by the usual count: a causal one is credited with half of the dense matrix work."""
    return case.flops_convention / seconds * 1e-12

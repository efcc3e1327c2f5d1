"""How many clocks of an SM an iteration of a main loop needs at least: matrix products, issue slots, exponentials,
float32 arithmetic.

Rates of compute capability 9.0, each a clock and SM. Four sub-partitions of one warp scheduler each: NVIDIA H100 Tensor
Core GPU Architecture (whitepaper). Float32 and exponentials: CUDA C++ Programming Guide, "Throughput of Native
Arithmetic Instructions". The rates of FMNMX, F2FP and SHFL on this GPU are left out, neither sourced nor measured by
us: these count as issue slots only.
"""

from hopper_fa3.kernels.config import BackwardConfig

SUB_PARTITIONS = 4  # each issues one instruction of one warp a clock
LANES = 32
WARPS = 4  # of a warpgroup: one in each sub-partition
# 989.4 TFLOP/s of dense bf16 at the 1.83 GHz and 132 SMs of the whitepaper's H100 SXM
TENSOR_FLOPS = 4096
EXPONENTIALS = 16  # MUFU results
FLOAT32 = 128  # results of FADD, FMUL, FFMA
FLOAT32_FAMILIES = ("FADD", "FMUL", "FFMA")


def tensor_clocks(tile_m, tile_n, head_dim, head_dim_v):
    """Clocks of Q Kᵀ and P V of one block at the tensor cores' peak."""
    return 2 * tile_m * tile_n * (head_dim + head_dim_v) / TENSOR_FLOPS


def backward_tensor_clocks(config):
    """The same of one step of the gradients (BackwardConfig): S, dK and dQ, dP and dV."""
    columns = 3 * config.head_dim + 2 * config.head_dim_v
    return 2 * config.tile_m * config.tile_n * columns / TENSOR_FLOPS


def issue_clocks(instructions, warpgroups):
    """Clocks in which the schedulers issue so many instructions for every warp of the consumer warpgroups."""
    return instructions * warpgroups * WARPS / SUB_PARTITIONS


def pipe_clocks(instructions, warpgroups, results):
    """Clocks of a pipe that gives ``results`` a clock and SM, likewise."""
    return instructions * warpgroups * WARPS * LANES / results


def clocks(config, counts):
    """Clocks of an SM that one K/V block, or a step of the gradients, needs of each resource: a dict.

    ``config``: ForwardConfig or BackwardConfig; ``counts``: instructions by family of one iteration of the unmasked
    loop, one warp.
    """
    warpgroups = config.consumer_warpgroups
    if isinstance(config, BackwardConfig):
        tensor = backward_tensor_clocks(config)
    else:
        tensor = tensor_clocks(config.tile_m, config.tile_n, config.head_dim, config.head_dim_v)
    float32 = sum(counts.get(family, 0) for family in FLOAT32_FAMILIES)
    return {
        "tensor": tensor,
        "issue": issue_clocks(sum(counts.values()), warpgroups),
        "MUFU": pipe_clocks(counts.get("MUFU", 0), warpgroups, EXPONENTIALS),
        "FP32": pipe_clocks(float32, warpgroups, FLOAT32),
    }


def tensor_share(needed):
    """Upper bound of the tensor cores' utilisation in the loop: reached only if everything overlaps perfectly."""
    return needed["tensor"] / max(needed.values())

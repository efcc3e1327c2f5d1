"""Which kernel configuration answers a problem: a table of measured choices, and the order of tiles. Plain
arithmetic.
"""

from typing import NamedTuple

from .kernels.config import ELEMENT_BYTES, HEAD_DIM_CLASSES, SHARED_MEMORY_LIMIT, ForwardConfig

# K and V of the heads that are scheduled together should stay in L2. An H200 has 50 to 60 MB of it; O, Q and the
# neighbours' traffic take the rest. FlashAttention-3 uses the same 32 MB.
L2_BUDGET_BYTES = 32 * 2**20
WIDEST_BLOCK = 128  # keys; 160 and 176 lost 9 % at head_dim 128 and 96, see the table
STAGES = 2  # K and V tiles in flight; three do not fit beside these tiles from head_dim 128 on


class Plan(NamedTuple):
    """How a problem is computed. Part of the key of a compiled kernel."""

    tile_m: int  # queries per CTA: 64 per consumer warpgroup
    tile_n: int  # keys per block
    stages: int = STAGES
    pingpong: bool = True
    overlap: bool = True
    shared_p: bool = False  # P through shared memory: leaves registers to wide blocks under three warpgroups


# (head_dim class, head_dim_v class, right bound) -> plan. Figures: TFLOP/s on an H200, bf16, length 8192, batch 2, of
# this row and of what it was tried against in the same run (2026-11-29); notes in profiling/NOTES.md.
TABLE = {
    # 530 with 2 stages, 528 with 3, 523 with 4; two warpgroups (128 x 128) 402 against 516; without ping-pong 497
    (64, 64, False): Plan(192, 128),
    (64, 64, True): Plan(192, 128),
    # 567; 192 x 96 554, 128 x 128 523, 128 x 160 494
    (96, 96, False): Plan(192, 112),
    # 516; 128 x 128 507
    (96, 96, True): Plan(192, 96),
    # 656; 128 x 160 591 and 128 x 176 599, where O shared Q's memory then; three stages, also sharing, 646; without
    # ping-pong 659
    (128, 128, False): Plan(128, 128),
    # 619; three stages without ping-pong 602
    (128, 128, True): Plan(128, 128),
    # 691; without ping-pong 681
    (192, 128, False): Plan(128, 128),
    # 642; with ping-pong 634
    (192, 128, True): Plan(128, 128, pingpong=False),
    # 112 keys are all that shared memory holds beside Q in two stages; 666, without ping-pong 657
    (192, 192, False): Plan(128, 112),
    (192, 192, True): Plan(128, 112),
    # 80 keys likewise; 688, with ping-pong 689: softmax is short beside these products, so the turns bring nothing
    (256, 256, False): Plan(128, 80, pingpong=False),
    # 618, with ping-pong 618
    (256, 256, True): Plan(128, 80, pingpong=False),
}


def choose(static):
    """The plan for a problem's static part: a row of the table, or for unusual pairs of head dims the largest K/V
    block that fits.
    """
    row = TABLE.get((static.head_dim, static.head_dim_v, static.right_bound))
    return row if row is not None else largest_block(static)


def largest_block(static):
    """Two consumer warpgroups and the widest K/V block whose configuration is legal; ping-pong as in the table's
    rows.
    """
    for tile_n in range(WIDEST_BLOCK, 0, -16):
        plan = Plan(128, tile_n, pingpong=max(static.head_dim, static.head_dim_v) <= 128)
        config = forward_config(static, plan)
        if config.smem_bytes() <= SHARED_MEMORY_LIMIT and config.spare_registers() >= 0:
            return plan
    raise ValueError(f"no tile fits head_dim {static.head_dim} and head_dim_v {static.head_dim_v}")


def forward_config(static, plan):
    """The kernel configuration: what the problem fixes and what the plan chose."""
    return ForwardConfig(
        dtype=static.dtype,
        head_dim=static.head_dim,
        head_dim_v=static.head_dim_v,
        right_bound=static.right_bound,
        negative_scale=static.negative_scale,
        tile_m=plan.tile_m,
        tile_n=plan.tile_n,
        stages=plan.stages,
        pingpong=plan.pingpong,
        overlap=plan.overlap,
        shared_p=plan.shared_p,
    )


def heads_per_section(problem):
    """Query heads, counted over the batch, whose tiles are scheduled together.

    Without a right bound all tiles are equally long: one head after the other reads K and V from L2. With one, the
    longest tiles of several heads come first, as many heads as keep their K and V in L2.
    """
    if problem.right is None:
        return 1
    bytes_per_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * ELEMENT_BYTES
    heads_k = max(1, L2_BUDGET_BYTES // max(bytes_per_head, 1))
    heads_k = 1 << (heads_k.bit_length() - 1)
    return min(heads_k * problem.group, problem.batch * problem.heads)


def tiles(problem, plan):
    """Number of Q tiles: one CTA's unit of work."""
    return -(-problem.seqlen_q // plan.tile_m) * problem.heads * problem.batch


def tile_class(head_dim):
    """The smallest static head-dim class that holds ``head_dim``."""
    for candidate in HEAD_DIM_CLASSES:
        if head_dim <= candidate:
            return candidate
    raise ValueError(f"head_dim must be at most {HEAD_DIM_CLASSES[-1]}, got {head_dim}")

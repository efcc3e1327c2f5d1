"""Which kernel configuration answers a problem: a table of measured choices, and the order of tiles. Plain
arithmetic.
"""

from typing import NamedTuple

from .kernels.config import ELEMENT_BYTES, FLOAT_BYTES, HEAD_DIM_CLASSES, WGMMA_K, BackwardConfig, ForwardConfig

# K and V of the heads that are scheduled together should stay in L2. An H200 has 50 to 60 MB of it; O, Q and the
# neighbours' traffic take the rest. FlashAttention-3 uses the same 32 MB.
L2_BUDGET_BYTES = 32 * 2**20
WIDEST_BLOCK = 128  # keys; 160 and 176 lost 7 % at head_dim 128
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
# this row and of what it was tried against in the same run (2026-11-29 and 30); "P shared": P goes through shared
# memory. Notes in profiling/NOTES.md.
TABLE = {
    # 585; without ping-pong 565, 192 x 112 563; P shared 192 x 192 537 and three stages 560 where this had 558
    (64, 64, False): Plan(192, 128),
    # 549; without ping-pong 518, 192 x 112 526
    (64, 64, True): Plan(192, 128),
    # 672, without ping-pong 663; P shared 192 x 144 641 and 192 x 128 630 where this had 656
    (96, 96, False): Plan(192, 112),
    # 611, without ping-pong 598; 192 x 112, and P shared 192 x 144, were equal, P shared 192 x 128 2 % slower
    (96, 96, True): Plan(192, 96),
    # 729; without ping-pong 719, P in registers, 128 x 128 691; 128 x 176 661 where 128 x 128 had 709
    (128, 128, False): Plan(192, 128, shared_p=True),
    # 691; without ping-pong 678, 192 x 112 679; P in registers, 128 x 128 646 where this had 673. At length 2048 546,
    # 128 x 128 516
    (128, 128, True): Plan(192, 128, shared_p=True),
    # 749; P shared 192 x 80 682; without ping-pong 715 where this had 726
    (192, 128, False): Plan(128, 128),
    # 708; P shared 192 x 80 661; with ping-pong equal
    (192, 128, True): Plan(128, 128, pingpong=False),
    # 112 keys are all that shared memory holds beside Q in two stages; 723, without ping-pong 720
    (192, 192, False): Plan(128, 112),
    # 664
    (192, 192, True): Plan(128, 112),
    # 80 keys likewise; 733, with ping-pong 727: softmax is short beside these products, so the turns bring nothing
    (256, 256, False): Plan(128, 80, pingpong=False),
    # 677, with ping-pong 679
    (256, 256, True): Plan(128, 80, pingpong=False),
}

# Instead with a score hook: two warpgroups leave 80 registers more to what it computes. Not measured yet; with three,
# a bias of the distance beside a mask spills 95 instructions at head_dim 64, 6 at 96 and 109 at 128
SCORE_HOOK_TABLE = {(head_dim, head_dim): Plan(128, 128) for head_dim in (64, 96, 128)}


def choose(static):
    """The plan for a problem's static part: a row of the table, or for unusual pairs of head dims the largest K/V
    block that fits. With a left bound the row of a causal mask: its kernels hold the second mask without a spill.
    """
    row = TABLE.get((static.head_dim, static.head_dim_v, static.right_bound))
    if static.score is not None:
        row = SCORE_HOOK_TABLE.get((static.head_dim, static.head_dim_v), row)
    return row if row is not None else largest_block(static)


def largest_block(static):
    """Two consumer warpgroups and the widest K/V block whose configuration is legal; ping-pong as in the table's
    rows.
    """
    for tile_n in range(WIDEST_BLOCK, 0, -16):
        plan = Plan(128, tile_n, pingpong=max(static.head_dim, static.head_dim_v) <= 128)
        if forward_config(static, plan).broken_rule() is None:
            return plan
    raise ValueError(f"no tile fits head_dim {static.head_dim} and head_dim_v {static.head_dim_v}")


def forward_config(static, plan):
    """The kernel configuration: what the problem fixes and what the plan chose."""
    return ForwardConfig(
        dtype=static.dtype,
        head_dim=static.head_dim,
        head_dim_v=static.head_dim_v,
        right_bound=static.right_bound,
        left_bound=static.left_bound,
        negative_scale=static.negative_scale,
        packed=static.packed is not None,
        softcap=static.softcap,
        by_sums=static.by_sums,
        sink=static.sink,
        alibi=static.alibi,
        chunked=static.chunked,
        score=static.score,
        mask=static.mask,
        **plan._asdict(),
    )


def heads_per_section(problem):
    """Query heads, counted over the batch, whose tiles are scheduled together.

    Without bounds all tiles are equally long: one head after the other reads K and V from L2. With one, the longest
    tiles of several heads come first, as many heads as keep their K and V in L2. A window makes most tiles equal, but
    not the first of a head, and with a long window many.
    """
    if not problem.bounded:
        return 1
    bytes_per_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * ELEMENT_BYTES
    heads_k = max(1, L2_BUDGET_BYTES // max(bytes_per_head, 1))
    heads_k = 1 << (heads_k.bit_length() - 1)
    return min(heads_k * problem.group, problem.batch * problem.heads)


class PackedSections(NamedTuple):
    """How many heads of packed sequences are scheduled together. That follows from the longest sequence, which only the
    device knows (kernels/tile_table.py): as many as have no more ``rows`` than L2 holds, but at least as many as have
    so many ``tiles``.
    """

    rows: int  # of K and V for tiles of Q, else of Q, dO and the sums of dQ
    tiles: int


def packed_sections(problem, sms):
    """The PackedSections of tiles of Q."""
    row_bytes = (problem.head_dim + problem.head_dim_v) * ELEMENT_BYTES
    return PackedSections(packed_budget(problem) // row_bytes, section_tiles(problem, sms))


def packed_budget(problem):
    """Bytes of L2 for the heads of a section of the longest sequence. One sequence follows another: where its tiles
    are equally long, those of two are computed at a time; with a right bound its long ones only.
    """
    return L2_BUDGET_BYTES if problem.bounded else L2_BUDGET_BYTES // 2


def section_tiles(problem, sms):
    """Tiles of packed sequences that keep the SMs (nearly) busy until the longest of them ends: one for each SM where
    all are equally long, two where the longest is twice the average. As many end the launch, the longest first.
    """
    return (2 if problem.bounded else 1) * sms * SECTION_TILES // 100


def tiles(problem, plan):
    """Number of Q tiles: one CTA's unit of work."""
    return -(-problem.seqlen_q // plan.tile_m) * problem.heads * problem.batch


def tile_class(head_dim):
    """The smallest static head-dim class that holds ``head_dim``."""
    for candidate in HEAD_DIM_CLASSES:
        if head_dim <= candidate:
            return candidate
    raise ValueError(f"head_dim must be at most {HEAD_DIM_CLASSES[-1]}, got {head_dim}")


# Splitting a K/V head's query heads must save this share of the time at least
SPLIT_GAIN = 0.9
# Of nearly equal choices the fewest parts: each is a copy of dK and dV in float32, gigabytes where heads are many
SPLIT_SLACK = 1.05
# Cutting a launch's last tiles must save this share of the time at least
TAIL_GAIN = 0.99
# In steps: what a part costs besides its own (K, V and the first Q arrive, the last products drain, dK and dV leave in
# float32), and what it costs in the kernel that adds. With 2 for 8, dense launches of length 2048 became 1 to 2 %
# slower than uncut. The second is an estimate: at head_dim 128 a step takes 3446 clocks (profiling/NOTES.md), in which
# one SM reads the 128 KB at 38 bytes a clock.
PART_STEPS = 8
ADD_STEPS = 1
SHORTEST_PART = 8  # steps
SECTION_TILES = 90  # percent of the SMs that a section must occupy: 128 tiles are enough for 132
INDEX_LIMIT = 2**31  # the kernels count in 32 bits
LONG_STEP = 128  # queries; as long as kernels have
NARROW_STEPS = 6  # of 64 queries, which a tile of 128 keys visits of a window of up to 256: see faster_in_turns


class BackwardPlan(NamedTuple):
    """How the gradients of a problem are computed. Part of the key of the compiled kernels."""

    tile_m: int  # queries per step
    stages: int = STAGES  # tiles of Q and of dO in flight
    split_heads: bool = False  # query heads of a K/V head go to several CTAs; choose_backward leaves it to head_parts
    split_tail: bool = False  # the last tiles are cut by steps; choose_backward leaves it to split_tail
    # Columns of the classes that products leave out; choose_backward leaves them to unused_columns
    unused: int = 0  # of Q and K
    unused_v: int = 0  # of V and dO
    # Where tiles are short: of K and V; of dK and dV; of the next tile's K and V
    early_release: bool = False
    predicated_output: bool = False
    prefetch_keys: bool = False


# (head_dim class, head_dim_v class, right bound) -> plan of the gradients
BACKWARD_TABLE = {
    (64, 64, False): BackwardPlan(LONG_STEP),
    (64, 64, True): BackwardPlan(LONG_STEP),
}
BACKWARD_PLAN = BackwardPlan(64)  # of all others


def choose_backward(static):
    """The plan for a BackwardStatic."""
    plan = BACKWARD_TABLE.get((static.head_dim, static.head_dim_v, static.right_bound), BACKWARD_PLAN)
    # A derivative takes as many registers as P: 475 spilled with 128 queries at head_dim 64
    if static.softcap or static.score is not None:
        plan = BACKWARD_PLAN
    # The ends of short tiles count. Without one of the three, window 128 at head_dim 64 takes 12, 5 and 2 % longer;
    # packed sequences gain 1 to 7 % from all
    if short_tiles(static) and not changed_scores(static) and max(static.head_dim, static.head_dim_v) <= 128:
        plan = plan._replace(early_release=True, predicated_output=True, prefetch_keys=True)
    return plan


def short_tiles(static):
    """True where K/V tiles visit few steps: those of a window, and of packed sequences."""
    return static.left_bound or static.packed is not None


def changed_scores(static):
    """True where scores are not plain: more registers are taken, and what plain kernels gained was not measured."""
    changed = static.softcap or static.alibi or static.chunked or static.mask is not None
    return changed or static.score is not None


def faster_in_turns(static, plan, problem):
    """True where sums of dQ have turns though nobody asked for their order: the first tile stores, so nobody zeroes
    them, which is worth more than turns cost where few tiles add to a query, or each step is long.

    Time in turns over time without (H200, 2026-11-30 and 12-01), head_dim 64, whose steps are of 128 queries: window
    128 0.92, 1024 and 4096 1.00; packed 16 x 1024 causal 0.99, dense 0.99, lognormal 0.96, 4 x 4096 1.00; with 4 query
    heads a K/V head 1.02. Head_dim 128, steps of 64: window 128 (4 steps a tile) 0.94, 1024 (18) 1.04; packed 0.95 to
    1.06.
    """
    if problem.group > 1 or changed_scores(static) or not short_tiles(static):
        return False
    if plan.tile_m == LONG_STEP:
        return True
    if (static.head_dim, static.head_dim_v) != (128, 128) or static.packed is not None:
        return False
    return max(tile_steps(problem, backward_config(static, plan))) <= NARROW_STEPS


def backward_choice(static, problem):
    """``(static, plan)`` of the kernels for a problem's BackwardStatic."""
    plan = choose_backward(static)
    asked = static._replace(deterministic=static.deterministic or faster_in_turns(static, plan, problem))
    # Kernels without sums are the same for both
    return static._replace(deterministic=backward_config(asked, plan).turns), plan


def backward_config(static, plan):
    """The kernels' configuration: what the problem fixes and what the plan chose."""
    return BackwardConfig(
        dtype=static.dtype,
        head_dim=static.head_dim,
        head_dim_v=static.head_dim_v,
        right_bound=static.right_bound,
        left_bound=static.left_bound,
        deterministic=static.deterministic,
        packed=static.packed is not None,
        softcap=static.softcap,
        alibi=static.alibi,
        chunked=static.chunked,
        sink=static.sink,
        score=static.score,
        mask=static.mask,
        **plan._asdict(),
    )


def unused_columns(problem, config):
    """``(of Q and K, of V and dO)``: the columns of the classes beyond the exact head dims, in whole WGMMAs, which the
    products may leave out. Each is a kernel more to compile: none of the smallest class, whose time goes into
    exponentials, and none of wide heads, whose kernels cannot.
    """
    if config.wide:
        return 0, 0
    used = (
        max(HEAD_DIM_CLASSES[0], -(-exact // WGMMA_K) * WGMMA_K) for exact in (problem.head_dim, problem.head_dim_v)
    )
    return tuple(whole - columns for whole, columns in zip((config.head_dim, config.head_dim_v), used, strict=True))


def tiles_of_head(problem, config):
    """K/V tiles of one head."""
    return -(-problem.seqlen_k // config.tile_n)


def key_tiles(problem, config):
    """K/V tiles of all heads."""
    return problem.batch * problem.heads_k * tiles_of_head(problem, config)


def tile_steps(problem, config):
    """Steps of each K/V tile of a head, for one query head: the blocks of queries that see any of its keys."""
    if not problem.bounded:
        return [-(-problem.seqlen_q // config.tile_m)] * tiles_of_head(problem, config)
    right, left, chunk = problem.kernel_bounds
    shift = problem.seqlen_k - problem.seqlen_q

    def steps(key):
        last = min(key + config.tile_n, problem.seqlen_k) - 1
        first, end = key - right, problem.seqlen_k if left is None else last + left + 1
        if chunk:
            first, end = max(first, key // chunk * chunk), min(end, (last // chunk + 1) * chunk)
        end = max(min(end - shift, problem.seqlen_q), 0)
        return max(-(-end // config.tile_m) - max(first - shift, 0) // config.tile_m, 0)

    return [steps(key) for key in range(0, problem.seqlen_k, config.tile_n)]


def head_parts(problem, config, sms):
    """Into how many parts the query heads of each K/V head are split, each part a CTA's: one where that keeps the SMs
    busy, because the parts' dK and dV cost a way through memory in float32. Parts of equal numbers of heads, but for
    the last.

    Estimates the steps of the busiest SM. Equal tiles run in waves. Tiles of unequal length fill the SMs evenly if the
    longest come first, but none is shorter than itself. Where the shortest do (``BackwardConfig.descending``), SMs
    become idle one by one while the longest run: half of its time each, as dealing them out one by one shows too. With
    a window most are equal, but not all: no later than in waves of the longest.
    """
    tiles, of_head = key_tiles(problem, config), tile_steps(problem, config)
    all_steps = sum(of_head) * problem.batch * problem.heads

    def steps(parts):
        added = PART_STEPS + ADD_STEPS if parts > 1 else 0
        longest = max(of_head) * -(-problem.group // parts) + added
        waves = -(-tiles * parts // sms) * longest
        if not problem.bounded or tiles * parts <= sms:
            return waves
        mean = (all_steps + tiles * parts * added) / sms
        if problem.windowed:
            return min(waves, mean + longest / 2)
        return max(longest, mean + longest / 2 if config.descending else mean)

    possible = sorted({-(-problem.group // -(-problem.group // parts)) for parts in range(1, problem.group + 1)})
    enough = SPLIT_SLACK * min(map(steps, possible))
    best = next(parts for parts in possible if steps(parts) <= enough)
    return best if steps(best) < SPLIT_GAIN * steps(1) else 1


class Tail(NamedTuple):
    """How a launch's last tiles are cut: kernels/backward_work.py."""

    whole_tiles: int  # those before
    parts: int  # of each

    def indices(self, tiles):
        """Pieces of work among so many tiles."""
        return self.whole_tiles + self.slots(tiles)

    def slots(self, tiles):
        """Parts of all of them."""
        return (tiles - self.whole_tiles) * self.parts


def split_tail(problem, config, sms):
    """The Tail, or None: all tiles stay whole. Where tiles are equally long, the last wave is as long as any, however
    few tiles it has; with fewer tiles than SMs it is the only one. Its parts may fill waves of their own better
    together with those of the wave before.
    """
    tiles = key_tiles(problem, config)
    steps = -(-problem.seqlen_q // config.tile_m) * problem.group
    last = tiles % sms
    unequal = config.right_bound or config.turns or config.split_heads
    if unequal or not last or steps * sms >= INDEX_LIMIT:
        return None

    def cost(tail):
        cut = tiles - tail.whole_tiles
        waves = -(-cut * tail.parts // sms)
        added = -(-cut // sms) * tail.parts * ADD_STEPS
        return tail.whole_tiles // sms * steps + waves * (-(-steps // tail.parts) + PART_STEPS) + added

    tails = [
        Tail(tiles - cut, parts)
        for cut in (last, last + sms)
        if cut <= tiles
        for parts in range(2, min(sms, steps // SHORTEST_PART) + 1)
    ]
    best = min(tails, key=cost, default=None)
    return best if best and cost(best) < TAIL_GAIN * -(-tiles // sms) * steps else None


def backward_heads_per_section(problem, config, parts, sms):
    """K/V heads, counted over the batch, whose tiles are scheduled together: see heads_per_section. What should be in
    L2 is what all K/V tiles of a head read and add to: Q, dO and the sums of dQ. Where these are added in turns, a
    head's tiles wait for each other, so they should not all start together; sections spread them also without a right
    bound. ``parts``: head_parts.

    At least as many as have a tile for (nearly) every SM. With fewer several sections run at once anyway, and the
    longest tile of the last one starts late: 4 K/V heads of 64 tiles each, dealt out one by one, take half as long
    again.
    """
    if not problem.bounded and not config.turns:
        return 1
    row_bytes = (problem.head_dim + problem.head_dim_v) * ELEMENT_BYTES
    row_bytes += FLOAT_BYTES * problem.head_dim if config.sums else 0
    rows = problem.seqlen_q
    if problem.windowed:
        # Those that one tile visits: the section's tiles go through its heads side by side
        rows = min(rows, max(tile_steps(problem, config)) * config.tile_m)
    fitting = max(1, L2_BUDGET_BYTES // max(problem.group * rows * row_bytes, 1))
    filling = -(-sms * SECTION_TILES // (tiles_of_head(problem, config) * parts * 100))
    # Powers of two: the largest that fits, the smallest that fills
    heads_k = max(1 << (fitting.bit_length() - 1), 1 << (filling - 1).bit_length())
    return min(heads_k, problem.batch * problem.heads_k)


def packed_backward_sections(problem, config, sms):
    """The PackedSections of tiles of K and V. Sums in turns wait for each other: see backward_heads_per_section."""
    row_bytes = (problem.head_dim + problem.head_dim_v) * ELEMENT_BYTES
    row_bytes += FLOAT_BYTES * problem.head_dim if config.sums else 0
    budget = L2_BUDGET_BYTES if config.turns else packed_budget(problem)
    return PackedSections(budget // (problem.group * row_bytes), section_tiles(problem, sms))

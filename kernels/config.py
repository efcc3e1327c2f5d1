"""Static configuration of the kernels: what is fixed when a kernel is compiled. Plain arithmetic, no cutlass."""

from dataclasses import dataclass

HEAD_DIM_CLASSES = (64, 96, 128, 192, 256)
WARPGROUP_THREADS = 128
WARP_THREADS = 32
WARPS_PER_WARPGROUP = WARPGROUP_THREADS // WARP_THREADS
WGMMA_M = 64  # rows that one warpgroup's WGMMA computes
WGMMA_K = 16  # columns of its operands in 16 bit that it multiplies
SHARED_MEMORY_LIMIT = 232_448  # bytes a CTA may use on sm_90: 227 KiB
SHARED_ALIGNMENT = 1024  # bytes; the 128-byte swizzle of TMA and WGMMA repeats every 1024
ELEMENT_BYTES = 2  # bf16 and fp16
FLOAT_BYTES = 4
# Of which rows' sums tell whether a polynomial serves their scores (fused.py). Keys to which sums are blind, those that
# it makes wrong by more than 2^-9, weigh at most a millionth of one with a score of 0, with a cap of 15 a thousandth
SMALLEST_CAP = 30.0
CAP_UNITS = 4.0  # of a softcap, in which score.py takes a score: below 2 units it needs no exponential
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}  # what kernels are built for, as names say it

REGISTER_FILE = 65_536  # registers of an SM, which a CTA at launch shares out evenly
# Registers that ptxas wants at launch beside the accumulator of one WGMMA (N / 2), whatever setmaxnreg gives later:
# its error C7602 asked for 130 at N = 208 and 154 at N = 256.
WGMMA_REGISTERS = 26
OTHER_REGISTERS = 24  # addresses, row statistics and loop state: seen in the compiled kernels
# More with a right bound: the rows' key limits and the next tile's index. With 4 left, two registers spilled.
RIGHT_BOUND_REGISTERS = 8
# Registers per thread after setmaxnreg, by number of consumer warpgroups: (producer, consumer). The sum over
# warpgroups must stay within 65,536 / 128 = 512 registers per "thread column", and each is a multiple of 8. The
# producer needs few: it issues TMA only.
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}


def mask_name(config):
    """What a kernel's name says of its bounds."""
    name = "window" if config.left_bound else "causal" if config.right_bound else "dense"
    return ("chunked" if config.chunked else name) + ("_packed" if config.packed else "")


def hook_name(config):
    """What a kernel's name says of how products become scores."""
    parts = ("softcap" * config.softcap, f"alibi_{config.alibi}" * bool(config.alibi))
    parts += ("score" * (config.score is not None), "mask" * (config.mask is not None))
    return "".join(f"_{part}" for part in parts if part)


class Checked:
    """What the configurations have in common: ``rules()`` gives those of one kind of kernel."""

    def check(self):
        """Raise ValueError, naming the rule, where no kernel can be built from this configuration."""
        broken = self.broken_rule()
        if broken is not None:
            raise ValueError(broken)

    def broken_rule(self):
        """The first rule that this configuration breaks, in words with what it has instead; None: it is legal."""
        inputs = (
            (
                self.head_dim in HEAD_DIM_CLASSES,
                f"head_dim class must be one of {HEAD_DIM_CLASSES}, got {self.head_dim}",
            ),
            (
                self.head_dim_v in HEAD_DIM_CLASSES,
                f"head_dim_v class must be one of {HEAD_DIM_CLASSES}, got {self.head_dim_v}",
            ),
            (self.dtype in SHORT_DTYPES, f"dtype must be bfloat16 or float16, got {self.dtype}"),
            (
                self.right_bound or not self.left_bound,
                "left_bound needs right_bound (one that hides nothing will do), got none",
            ),
        )
        # The others only where these hold: their arithmetic rests on them
        broken = (message for holds, message in inputs if not holds)
        return next(broken, None) or next((message for holds, message in self.rules() if not holds), None)

    @property
    def threads(self):
        """Threads of a CTA: one producer warpgroup and the consumers."""
        return WARPGROUP_THREADS * (1 + self.consumer_warpgroups)

    @property
    def registers(self):
        """(producer, consumer) registers per thread."""
        return REGISTERS[self.consumer_warpgroups]


@dataclass(frozen=True)
class ForwardConfig(Checked):
    """One compiled forward kernel. ``head_dim`` and ``head_dim_v`` are tile classes; exact extents are run-time
    values.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    right_bound: bool
    negative_scale: bool
    tile_m: int
    tile_n: int
    stages: int
    pingpong: bool
    overlap: bool
    shared_p: bool = False  # P goes to P V through shared memory instead of registers
    left_bound: bool = False
    packed: bool = False  # several sequences in one tensor, whose lengths the device knows
    softcap: bool = False
    by_sums: bool = False  # a softcap alone that is not below SMALLEST_CAP: fused.py
    sink: bool = False
    alibi: str | None = None  # "linear" (no key behind a query's diagonal) or "distance"
    chunked: bool = False  # only with both bounds
    score: object | None = None  # a user's own hooks: score.py
    mask: object | None = None

    @property
    def name(self):
        """Readable kernel name for profilers."""
        mask = mask_name(self)
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        hook = hook_name(self) + "_by_sums" * self.by_sums + "_sink" * self.sink
        sign = "_negative_scale" * self.negative_scale
        tile = f"{self.tile_m}x{self.tile_n}{'_shared_p' if self.shared_p else ''}"
        return f"hopper_fa3_forward_{dims}_{mask}_{SHORT_DTYPES[self.dtype]}_{tile}{sign}{hook}"

    @property
    def consumer_warpgroups(self):
        return self.tile_m // WGMMA_M

    @property
    def launch_registers(self):
        """Registers per thread before setmaxnreg; allocated in units of 8."""
        return REGISTER_FILE // self.threads // 8 * 8

    @property
    def dynamic(self):
        """True where tiles are of unequal length, so that CTAs fetch them from a counter."""
        return self.right_bound or self.packed

    @property
    def from_diagonal(self):
        """True where a tile's blocks are not visited from the last to the first: blocks.DiagonalFirst."""
        return self.alibi == "distance" and not self.right_bound

    @property
    def fused(self):
        """True where exponents of unmasked blocks come straight from the products: fused.py. ALiBi's must be linear
        there.
        """
        linear = self.alibi != "distance" or self.from_diagonal
        return (self.softcap or self.alibi is not None) and linear and self.score is None and self.mask is None

    @property
    def query_bytes(self):
        return self.tile_m * self.head_dim * ELEMENT_BYTES

    @property
    def early_p(self):
        """True where a block's P is converted to 16 bit among its exponentials, behind an early wait for the P V before
        it, which reads these registers. Three warpgroups share the special function unit, so a warp's conversions
        are free there; with two, P V is not done so early.
        """
        return self.consumer_warpgroups == 3 and not self.shared_p

    @property
    def output_columns(self):
        """Width of the 64 rows that a warpgroup has for O where it is staged, or for P and after it O."""
        return max(self.tile_n, self.head_dim_v) if self.shared_p else self.head_dim_v

    @property
    def p_columns(self):
        """Columns of P in shared memory that are swizzled as one row: 128, 64 or 32 bytes."""
        return next(columns for columns in (64, 32, 16) if self.tile_n % columns == 0)

    @property
    def output_bytes(self):
        return self.tile_m * self.output_columns * ELEMENT_BYTES

    @property
    def staged_output(self):
        """True where the O tile has shared memory, its own or P's, in which it waits for a TMA store; otherwise it
        leaves straight from registers.
        """
        return self.shared_p or self._smem_bytes(staged_output=True) <= SHARED_MEMORY_LIMIT

    def smem_bytes(self):
        """Shared memory of a CTA in bytes, as kernels/smem.py lays it out."""
        return self._smem_bytes(self.staged_output)

    def _smem_bytes(self, staged_output):
        key_value = self.stages * self.tile_n * (self.head_dim + self.head_dim_v) * ELEMENT_BYTES
        output = self.output_bytes if staged_output else 0
        barriers = SHARED_ALIGNMENT  # they fill less than one alignment unit
        return barriers + self.query_bytes + key_value + output

    @property
    def other_registers(self):
        return OTHER_REGISTERS + (RIGHT_BOUND_REGISTERS if self.right_bound else 0)

    def spare_registers(self):
        """Registers left per consumer thread beside S and O (float32), P (16 bit) and all others; negative: it would
        spill. P that goes through shared memory is converted where S was.
        """
        scores, output = self.tile_n // 2, self.head_dim_v // 2
        probabilities = 0 if self.shared_p else self.tile_n // 4
        return self.registers[1] - scores - probabilities - output - self.other_registers

    def rules(self):
        return (
            (self.tile_m in (64, 128, 192), f"tile_m must be 64, 128 or 192, got {self.tile_m}"),
            # 16 is the depth of one WGMMA step of P V; 256 the widest WGMMA.
            (
                self.tile_n % 16 == 0 and 16 <= self.tile_n <= 256,
                f"tile_n must be a multiple of 16 up to 256, got {self.tile_n}",
            ),
            (self.stages >= 2, f"stages must be at least 2 (the next K is loaded under this one), got {self.stages}"),
            (
                not self.pingpong or self.consumer_warpgroups > 1,
                "pingpong needs two or three consumer warpgroups, got one",
            ),
            (
                self.smem_bytes() <= SHARED_MEMORY_LIMIT,
                f"shared memory must be at most {SHARED_MEMORY_LIMIT} bytes, got {self.smem_bytes()}",
            ),
            (
                self.spare_registers() >= 0,
                f"S, P and O must leave {self.other_registers} of {self.registers[1]} registers, "
                f"got {self.other_registers + self.spare_registers()}",
            ),
            (
                max(self.tile_n, self.head_dim_v) // 2 + WGMMA_REGISTERS <= self.launch_registers,
                f"a WGMMA of {max(self.tile_n, self.head_dim_v)} columns needs more than the {self.launch_registers} "
                "registers of a thread at launch",
            ),
        )


@dataclass(frozen=True)
class BackwardConfig(Checked):
    """One compiled backward kernel. A CTA owns ``tile_n`` keys, 64 a consumer warpgroup, whose dK and dV stay in
    registers while it visits the queries that see them, ``tile_m`` at a time.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    right_bound: bool
    tile_m: int
    stages: int
    deterministic: bool = False
    # The query heads of a K/V head are split among CTAs: dK and dV leave as float32 parts, added after the main kernel
    split_heads: bool = False
    # A launch's last tiles are cut into parts, of which a CTA takes one: dK and dV of these likewise (backward_work.py)
    split_tail: bool = False
    # Last columns of the classes, beyond the exact head dims, which the products leave out: of Q and K, of V and dO
    unused: int = 0
    unused_v: int = 0
    left_bound: bool = False
    packed: bool = False  # several sequences in one tensor, whose lengths the device knows
    softcap: bool = False
    alibi: str | None = None  # as in ForwardConfig
    chunked: bool = False
    sink: bool = False  # of packed sequences: row statistics also of those without keys, for the sink's gradient
    score: object | None = None
    mask: object | None = None
    # K and V are each given back behind the last product that reads them, not where the tile ends
    early_release: bool = False
    predicated_output: bool = False  # of dK and dV: see DirectOutput
    prefetch_keys: bool = False  # the next tile's K and V to L2, as soon as it is known

    consumer_warpgroups = 2

    @property
    def factors(self):
        """True where dP - delta is multiplied with something else than P, which takes registers beside it."""
        return self.softcap or self.score is not None

    @property
    def wide(self):
        """True for heads beside whose dK and dV registers do not hold what backward_consume.py keeps in flight."""
        return max(self.head_dim, self.head_dim_v) > 128

    @property
    def columns(self):
        """Columns of Q and K that go into S and out of dK."""
        return self.head_dim - self.unused

    @property
    def columns_v(self):
        """Columns of V and dO that go into dP and out of dV."""
        return self.head_dim_v - self.unused_v

    @property
    def roles(self):
        """True where dK and dV of 64 keys are all that registers hold: one warpgroup has dV, the other dK
        (backward_roles.py). Otherwise each has both, of 64 keys of its own.
        """
        return self.wide and self.free_registers() < 0

    @property
    def sums(self):
        """True where dQ is summed in global memory, K/V tile by K/V tile. The sums are as many bytes a product as tiles
        have few keys, and 64 are too few (profiling/NOTES.md): there another kernel computes dQ (query_kernel.py),
        though S and dP once more.
        """
        return not self.roles

    @property
    def turns(self):
        """True where the order of the sums must be the same in every run."""
        return self.deterministic and self.sums

    @property
    def key_parts(self):
        """True where dK and dV of some tiles are added after the main kernel."""
        return self.split_heads or self.split_tail

    def free_registers(self):
        """Registers left per consumer thread beside dK, dV and the larger of dQ's piece and dP with P in 16 bit, and
        where it needs them its factors, all for 64 keys and 64 queries.
        """
        totals = (self.head_dim + self.head_dim_v) // 2
        step = max(self.dq_columns // 2, WGMMA_M // 2 + (1 + self.factors) * WGMMA_M // 4)
        return self.registers[1] - OTHER_REGISTERS - totals - step

    @property
    def tile_n(self):
        return WGMMA_M if self.roles else self.consumer_warpgroups * WGMMA_M

    @property
    def score_stages(self):
        """Buffers of ``tile_m`` by ``tile_n`` scores in 16 bit. With roles: P of two steps. Otherwise dS, which is read
        in the next step: three where a warpgroup that is ahead may already write the one after that.
        """
        return 2 if self.wide else 3

    @property
    def early_sums(self):
        """True where registers hold dQ's piece beside dP and P, so that it can be computed beside dP
        (backward_steps.py). Softcap has its derivative beside P, ALiBi slopes and places, chunks the ends
        of each key's queries, hooks of a user's own all these.
        """
        more = self.factors or self.alibi is not None or self.chunked or self.mask is not None
        return not self.wide and self.tile_m == WGMMA_M and not more

    @property
    def polynomial_columns(self):
        """Of 4 queries, so many whose probabilities come from a polynomial (backward_scores.py). Tiles of 128 queries
        need twice the exponentials of those of 64 for the same products: there, 1 gained 3 to 4 %; at 64 it lost as
        much.
        """
        return 0 if self.wide or self.tile_m == WGMMA_M else 1

    @property
    def score_words(self):
        """32-bit words of all buffers of scores."""
        return self.score_stages * self.tile_m * self.tile_n // 2

    @property
    def name(self):
        """Readable kernel name for profilers."""
        mask = mask_name(self)
        dims = f"d{self.columns}" if self.columns == self.columns_v else f"d{self.columns}v{self.columns_v}"
        split = ("_split_heads" if self.split_heads else "") + ("_split_tail" if self.split_tail else "")
        options = hook_name(self) + split + ("_deterministic" if self.turns else "")
        return f"hopper_fa3_backward_{dims}_{mask}_{SHORT_DTYPES[self.dtype]}_{self.tile_m}x{self.tile_n}{options}"

    @property
    def descending(self):
        """True where a head's last K/V tile, the shortest, comes first: ``Band.turn`` says why."""
        return self.right_bound and self.turns

    @property
    def query_pieces(self):
        """Pieces of 64 queries in which warpgroups compute dQ."""
        return self.tile_m // WGMMA_M

    @property
    def column_pieces(self):
        """Pieces of dQ's columns: every warpgroup has one piece, of 64 queries and these columns."""
        return self.consumer_warpgroups // self.query_pieces

    @property
    def dq_columns(self):
        """Columns of a piece of dQ: equal shares, whole swizzle atoms of 64, 32 or 16 columns of K."""
        return self.head_dim // self.column_pieces

    @property
    def row_floats(self):
        """Floats of a step's row statistics: LSE and delta of each query."""
        return 2 * self.tile_m

    @property
    def piece_floats(self):
        """Floats of a piece of dQ."""
        return WGMMA_M * self.dq_columns

    @property
    def do_stages(self):
        """Tiles of dO in flight: one where a second does not fit. Q is held longer than dO, from S to dK."""
        return self.memory_choice[0]

    @property
    def sum_rounds(self):
        """Parts in which a warpgroup's piece of dQ passes through shared memory, one after the other."""
        return self.memory_choice[1]

    @property
    def memory_choice(self):
        """``(do_stages, sum_rounds)``: the first choice that fits, or the smallest."""
        choices = [(self.stages, 1), (self.stages, 2), (1, 2)] if self.wide and self.sums else [(self.stages, 1)]
        fitting = (choice for choice in choices if self._smem_bytes(*choice) <= SHARED_MEMORY_LIMIT)
        return next(fitting, choices[-1])

    def smem_bytes(self):
        """Shared memory of a CTA in bytes, as kernels/backward_smem.py lays it out."""
        return self._smem_bytes(*self.memory_choice)

    def _smem_bytes(self, do_stages, sum_rounds):
        keys = self.tile_n * (self.head_dim + self.head_dim_v) * ELEMENT_BYTES
        queries = self.tile_m * (self.stages * self.head_dim + do_stages * self.head_dim_v) * ELEMENT_BYTES
        scores = self.score_stages * self.tile_m * self.tile_n * ELEMENT_BYTES
        sums = self.consumer_warpgroups * self.piece_floats // sum_rounds * FLOAT_BYTES if self.sums else 0
        # Barriers fill less than 256 bytes
        rows = 256 + self.stages * self.row_floats * FLOAT_BYTES
        return -(-rows // SHARED_ALIGNMENT) * SHARED_ALIGNMENT + keys + queries + scores + sums

    def rules(self):
        return (
            (
                self.tile_m == WGMMA_M or (self.tile_m == 2 * WGMMA_M and not self.wide),
                f"tile_m must be 64, or 128 at head dims up to 128, got {self.tile_m}",
            ),
            (
                not (self.split_tail and (self.right_bound or self.turns or self.split_heads)),
                "split_tail needs tiles of equal length, whole groups of heads and sums in any order",
            ),
            (
                not (self.packed and self.key_parts),
                "packed sequences need whole groups of heads and whole tiles: only the device knows how many these are",
            ),
            (
                {self.unused, self.unused_v} <= set(range(0, 1 if self.wide else WGMMA_M, WGMMA_K)),
                f"unused columns must be multiples of {WGMMA_K} below {WGMMA_M}, none where a head dim is above 128, "
                f"got {self.unused} and {self.unused_v}",
            ),
            (self.stages >= 2, f"stages must be at least 2 (the next Q is loaded under this one), got {self.stages}"),
            (not (self.early_release and self.wide), "early_release needs head dims up to 128"),
            (
                self.smem_bytes() <= SHARED_MEMORY_LIMIT,
                f"shared memory must be at most {SHARED_MEMORY_LIMIT} bytes, got {self.smem_bytes()}",
            ),
        )

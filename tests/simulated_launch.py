"""Launches of the backward's kernels on the simulation, and the gradients that they must give."""

from dataclasses import dataclass, replace

import numpy as np
from simulated_backward import Replacements
from simulated_cutlass import Kernels
from simulated_dsl import Cta, Pipe, Simulation, require
from simulated_memory import WARPGROUP_ROWS, Memory, Stages, Tensor

HEAD_DIM, HEAD_DIM_V = 4, 3  # columns; dQ's must divide into the pieces and parts of every kernel
WARPGROUP_WARPS, CONSUMER_WARPS = 4, range(4, 12)
SCALE_LOG2, SCALE = 0.7, 0.5


@dataclass(frozen=True)
class Shape:
    """What a launch computes, and how it is divided."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_k: int
    group: int  # query heads of a K/V head
    right: int | None  # bound of the band; None: there is none
    ctas: int
    section: int
    split: int = 1  # parts of a group
    left: int | None = None  # only with a right bound
    chunk: int | None = None  # only with both

    @property
    def heads(self):
        return self.heads_k * self.group

    @property
    def bounded(self):
        return self.right is not None


class Problem:
    """Inputs, row statistics and the gradients, in float64."""

    packed = False

    def __init__(self, shape, seed):
        normal = np.random.default_rng(seed).normal
        rows, keys = (shape.batch, shape.seqlen_q, shape.heads), (shape.batch, shape.seqlen_k, shape.heads_k)
        self.shape = shape
        self.q, self.do = normal(size=(*rows, HEAD_DIM)), normal(size=(*rows, HEAD_DIM_V))
        self.k, self.v = normal(size=(*keys, HEAD_DIM)), normal(size=(*keys, HEAD_DIM_V))
        k, v = (np.repeat(x, shape.group, 2) for x in (self.k, self.v))
        distance = np.arange(shape.seqlen_k) - np.arange(shape.seqlen_q)[:, None]
        distance -= shape.seqlen_k - shape.seqlen_q
        seen = distance <= (shape.right if shape.bounded else shape.seqlen_q)
        seen &= distance >= -(shape.seqlen_k if shape.left is None else shape.left)
        if shape.chunk is not None:
            keys = np.arange(shape.seqlen_k)
            seen &= keys // shape.chunk == (keys - distance) // shape.chunk
        scores = np.where(seen, np.einsum("bqhd,bkhd->bhqk", self.q, k) * SCALE_LOG2, -np.inf)
        total = np.exp2(scores).sum(-1)
        self.lse = np.log2(total, out=np.full_like(total, np.inf), where=total > 0)
        p = np.exp2(scores - self.lse[..., None])
        dp = np.einsum("bqhd,bkhd->bhqk", self.do, v)
        # As if a gradient of the LSE came in: else keys past the end would not show where P is not masked
        self.delta = np.where(total > 0, (p * dp).sum(-1) + normal(size=total.shape), 0)
        ds = p * (dp - self.delta[..., None])
        heads = (shape.batch, shape.seqlen_k, shape.heads_k, shape.group, -1)
        self.dq = np.einsum("bhqk,bkhd->bqhd", ds, k) * SCALE
        self.dk = np.einsum("bhqk,bqhd->bkhd", ds, self.q).reshape(heads).sum(3) * SCALE
        self.dv = np.einsum("bhqk,bqhd->bkhd", p, self.do).reshape(heads).sum(3)

    def statistics(self, queries):
        """(batch, steps, heads, LSE and delta of a step's queries)."""
        shape = self.shape
        steps = -(-shape.seqlen_q // queries)
        padding = ((0, 0), (0, 0), (0, steps * queries - shape.seqlen_q))
        padded = np.pad(self.lse, padding, constant_values=np.inf), np.pad(self.delta, padding)
        parts = [x.reshape(shape.batch, shape.heads, steps, queries) for x in padded]
        return np.concatenate(parts, -1).swapaxes(1, 2)

    def rows_in_lines(self, rows, queries):
        """The rows of q among those of whole lines of the workspace, ``queries`` each."""
        return rows[:, : self.shape.seqlen_q]

    def check(self, **gradients):
        for name, found in gradients.items():
            np.testing.assert_allclose(found, getattr(self, name), rtol=0, atol=1e-9, err_msg=name)


class Launch:
    """The CTAs of one kernel, and its modules with ``edits`` in their text."""

    kind_of_replacements = Replacements

    def __init__(self, problem, seed, edits=()):
        self.problem, self.simulation = problem, Simulation(seed)
        self.replacements = self.kind_of_replacements(self.simulation)
        self.kernels = Kernels(self.replacements.cutlass(), self.replacements.modules(), edits)
        self.counter, self.table = Memory(np.zeros(2, int)), None
        load = self.kernels["load"]
        self.boxes = load.SequenceBoxes if problem.packed else load.WholeBoxes

    def add_warps(self, cta, warps, role, *arguments):
        for warp in warps:
            self.simulation.add_warp(cta, warp, lambda: role.run(*arguments))

    def queue(self, cta, dynamic, readers, slots=2):
        pipe = Pipe(cta, "queue", 2, readers, copies=0) if dynamic else None
        return self.kernels["schedule"].TileQueue(self.counter, Memory(np.full(slots, -2)), pipe, self.table)

    def band(self, config):
        return self.kernels["chunks"].make_band(config)

    def bounds(self, config):
        """(right, left) as the band takes them."""
        shape = self.problem.shape
        return self.kernels["chunks"].make_bounds(config, shape.right or 0, shape.left, shape.chunk)

    def run(self):
        self.simulation.run()
        require(not self.counter.array.any(), "the tile counter is not left at 0")


def run_queries(problem, seed, edits=(), head_dim=256):
    """The kernel of dQ."""
    launch, shape = Launch(problem, seed, edits), problem.shape
    kernels = launch.kernels
    bounds = shape.bounded, shape.left is not None
    hook = {"packed": problem.packed, "chunked": shape.chunk is not None}
    config = kernels["query_config"].QueryConfig("bfloat16", head_dim, head_dim, *bounds, **hook)
    schedule = kernels["schedule"].Schedule(config.tile_m, config.dynamic, descending=config.dynamic)
    if problem.packed:
        schedule = kernels["packed_schedule"].PackedSchedule()
        launch.table = problem.table(config, launch.simulation.chance, keys=False)
    band = launch.band(config)
    class_of_consumer = kernels["query_consume"].QueryConsumer
    class_of_consumer.own_rows = launch.replacements.own_rows(class_of_consumer.own_rows)
    class_of_consumer.make_products = launch.replacements.make_query_products
    producer = kernels["query_load"].QueryProducer(config, band, schedule, launch.boxes)
    consumer = class_of_consumer(config, None, band, schedule, WARPGROUP_ROWS)
    section = None if problem.packed else shape.section
    run = kernels["args"].RunTime(SCALE_LOG2, *launch.bounds(config), section, 1)
    tensors = [Tensor(x) for x in (problem.q, problem.do, problem.k, problem.v)]
    rows, dq = Memory(problem.statistics(WARPGROUP_ROWS).swapaxes(1, 2)), Memory(np.full_like(problem.q, np.nan))
    stages = ((2, HEAD_DIM), (2, HEAD_DIM_V), (config.stages, HEAD_DIM), (config.value_stages, HEAD_DIM_V))
    readers = len(CONSUMER_WARPS)
    for index in range(shape.ctas):
        cta = Cta(launch.simulation, index)
        shared = [Stages.new(count, WARPGROUP_ROWS, columns) for count, columns in stages]
        pipes = (
            Pipe(cta, "Q", 2, WARPGROUP_WARPS, copies=2),
            Pipe(cta, "K", config.stages, readers),
            Pipe(cta, "V", config.value_stages, readers),
        )
        queue = launch.queue(cta, config.dynamic, readers, (schedule.fields, 2) if problem.packed else 2)
        launch.add_warps(cta, [0], producer, tensors, shared, pipes, queue, run)
        launch.add_warps(cta, CONSUMER_WARPS, consumer, tensors, rows, dq, SCALE, shared, pipes, queue, run)
    launch.run()
    problem.check(dq=dq.array)


class KeysLaunch(Launch):
    """The main kernel: dK and dV, and dQ where its configuration has sums."""

    def __init__(
        self,
        problem,
        seed,
        edits,
        head_dims,
        tile_m=WARPGROUP_ROWS,
        deterministic=False,
        split_tail=False,
        early_release=False,
    ):
        super().__init__(problem, seed, edits)
        shape, kernels = problem.shape, self.kernels
        split = shape.split > 1
        options = (tile_m, 2, deterministic, split, split_tail, 0, 0, shape.left is not None, problem.packed)
        self.config = config = kernels["config"].BackwardConfig(
            "bfloat16",
            *head_dims,
            shape.bounded,
            *options,
            chunked=shape.chunk is not None,
            early_release=early_release,
            prefetch_keys=early_release,
        )
        self.band = self.band(config)
        self.work = kernels["backward_work"]
        order = config.descending, config.turns
        self.schedule = self.work.WorkSchedule(config.tile_n, True, *order, split_tail, tile_m)
        if problem.packed:
            self.schedule = kernels["packed_schedule"].PackedWorkSchedule(ordered=config.turns)
            together = {"together": config.turns, "descending": config.descending, "line": tile_m}
            self.table = problem.table(config, self.simulation.chance, keys=True, **together)
        rows = problem.statistics(tile_m)
        self.steps, self.tiles = rows.shape[1], -(-shape.seqlen_k // config.tile_n)
        section = None if problem.packed else shape.section * shape.split
        scalars = SCALE_LOG2, SCALE, *self.bounds(config), section
        scalars = *scalars, shape.heads_k * shape.split
        self.all_tiles = self.tiles * shape.heads_k * shape.split * shape.batch
        self.run_time = kernels["args"].BackwardRunTime(*scalars, *self.tail(), 1)
        self.tensors = [Tensor(x) for x in (problem.k, problem.v, problem.q, problem.do, rows)]
        self.lengths = shape.seqlen_q, shape.seqlen_k, shape.heads, shape.heads_k, shape.batch
        self.outputs = [
            [Memory(np.full(shape, np.nan)) for shape in (x.shape, self.parts_shape(x.shape[-1]))]
            for x in (problem.k, problem.v)
        ]
        # dQ: a piece of each warpgroup, in parts
        parts = (config.sum_rounds, WARPGROUP_ROWS, HEAD_DIM // config.column_pieces // config.sum_rounds)
        pieces = (shape.batch, shape.heads, self.steps, config.consumer_warpgroups)
        self.class_of_store = kernels["backward_store"].SumStore
        self.class_of_store.add_head = self.replacements.add_head(self.class_of_store.add_head)
        # Where there are turns nobody zeroes the sums
        self.sums = Memory(np.full((*pieces, *parts), np.nan if config.turns else 0.0))
        self.turns = Memory(np.zeros(pieces, int))

    def tail(self):
        """``(whole_tiles, parts)`` by chance."""
        if not self.config.split_tail:
            return None, None
        chance, steps = self.simulation.chance, self.steps * self.problem.shape.group
        return chance.randrange(self.all_tiles), chance.randint(1, min(steps, 4))

    def parts_shape(self, columns):
        """Of parts of dK or dV, pieces in the order of registers."""
        shape, piece = self.problem.shape, (self.config.tile_n // WARPGROUP_ROWS, WARPGROUP_ROWS, columns)
        if self.config.split_tail:
            run = self.run_time
            return (self.all_tiles - run.whole_tiles) * run.parts, *piece
        return shape.batch, shape.heads_k, shape.split, self.tiles, *piece

    def add_cta(self, index):
        config, kernels = self.config, self.kernels
        cta = Cta(self.simulation, index)
        consumers = len(CONSUMER_WARPS)
        stages = (
            (1, config.tile_n, HEAD_DIM),
            (1, config.tile_n, HEAD_DIM_V),
            (config.stages, config.tile_m, HEAD_DIM),
            (config.do_stages, config.tile_m, HEAD_DIM_V),
            (config.stages, 1, config.row_floats),
        )
        shared = [Stages.new(*sizes) for sizes in stages]
        pipes = (
            Pipe(cta, "K", 1, consumers),
            Pipe(cta, "V", 1, consumers),
            Pipe(cta, "Q", config.stages, consumers, copies=2),
            Pipe(cta, "dO", config.do_stages, consumers),
        )
        readers = consumers + config.sums * config.consumer_warpgroups
        queue = self.queue(cta, True, readers, slots=(self.schedule.fields, 2))
        role = (config, None, self.band, self.schedule)
        producer = kernels["backward_load"].BackwardProducer(config, self.band, self.schedule, self.boxes)
        self.add_warps(cta, [0], producer, self.tensors, self.lengths, shared, pipes, queue, self.run_time)
        if config.roles:
            p = Memory(np.full((2, WARPGROUP_ROWS, config.tile_m), np.nan))
            roles = kernels["backward_roles"]
            passed = Pipe(cta, "P", config.score_stages, WARPGROUP_WARPS, copies=0, writers=WARPGROUP_WARPS)
            warps = CONSUMER_WARPS[:WARPGROUP_WARPS], CONSUMER_WARPS[WARPGROUP_WARPS:]
            dk, dv = self.outputs
            for own, name, output in zip(warps, ("ProbabilityRole", "GradientRole"), (dv, dk), strict=True):
                consumer = getattr(roles, name)(*role)
                given = self.lengths, output, (*shared, p), (*pipes, passed), queue, self.run_time
                self.add_warps(cta, own, consumer, *given)
            return
        ds = Stages.new(config.score_stages, config.tile_n, config.tile_m)
        dq = Memory(np.full((config.consumer_warpgroups, *self.sums.shape[-2:]), np.nan))
        steps = "EarlySums" if config.early_sums else "LateSums"
        module, name = ("backward_wide", "WideConsumer") if config.wide else ("backward_steps", steps)
        consumer = getattr(kernels[module], name)(*role)
        given = self.lengths, self.outputs, (*shared, ds, dq), pipes, queue, self.run_time
        self.add_warps(cta, CONSUMER_WARPS, consumer, *given)
        store = self.class_of_store(config, self.band, self.schedule)
        for warpgroup in range(config.consumer_warpgroups):
            given = self.lengths, self.sums, self.turns, dq, queue, self.run_time, warpgroup
            self.add_warps(cta, [1 + warpgroup], store, *given)

    def gradients(self):
        """What the launch gave, by name."""
        found = {}
        for name, (whole, parts), factor in zip(("dk", "dv"), self.outputs, (SCALE, 1.0), strict=True):
            found[name] = whole.array
            if self.config.split_heads:
                found[name] = self.added_parts(parts.array) * factor
            elif self.config.split_tail:
                self.add_tail(whole.array, parts.array * factor)
        return {**found, "dq": self.added_pieces() * SCALE} if self.config.sums else found

    def added_parts(self, parts):
        batch, heads, _, _, _, _, columns = parts.shape
        keys = parts.sum(2).reshape(batch, heads, -1, columns)
        return keys[:, :, : self.problem.shape.seqlen_k].swapaxes(1, 2)

    def add_tail(self, gradient, parts):
        """To dK or dV."""
        run, shape = self.run_time, self.problem.shape
        for tile in range(run.whole_tiles, self.all_tiles):
            n_block, head, batch = self.schedule.coordinates(
                tile, shape.seqlen_k, run.head_parts, shape.batch, run.section
            )
            keys = gradient[batch, n_block * self.config.tile_n :][: self.config.tile_n, head]
            require(np.isnan(keys).all(), "a tile of the tail is stored as a whole one")
            first = (tile - run.whole_tiles) * run.parts
            keys[:] = parts[first : first + run.parts].sum(0).reshape(-1, keys.shape[-1])[: len(keys)]

    def added_pieces(self):
        """dQ from its pieces: (batch, heads, steps, pieces, parts, 64 queries, columns)."""
        batch, heads, *_ = self.sums.shape
        by_rows = self.sums.array.transpose(0, 1, 2, 3, 5, 4, 6)
        if self.config.column_pieces > 1:
            by_rows = self.sums.array.transpose(0, 1, 2, 5, 3, 4, 6)
        queries = by_rows.reshape(batch, heads, -1, HEAD_DIM)
        # As the kernel behind: 0 where a query sees no key
        lse = self.problem.statistics(self.config.tile_m)[..., : self.config.tile_m].swapaxes(1, 2)
        queries = np.where(np.isinf(lse).reshape(batch, heads, -1, 1), 0, queries)
        return self.problem.rows_in_lines(queries.swapaxes(1, 2), self.config.tile_m)


def run_tail(problem, seed, edits=(), **options):
    """run_keys for the same sizes without a bound, whose last tiles are cut."""
    shape = replace(problem.shape, right=None, left=None, split=1)
    run_keys(Problem(shape, seed), seed, edits, split_tail=True, **options)


def run_keys(problem, seed, edits=(), **options):
    launch = KeysLaunch(problem, seed, edits, **options)
    for index in range(problem.shape.ctas):
        launch.add_cta(index)
    launch.run()
    problem.check(**launch.gradients())
    if launch.config.turns:
        orders = launch.replacements.additions.values()
        require(
            all(order == sorted(order, reverse=launch.config.descending) for order in orders),
            "dQ is not summed in the order of the K/V tiles",
        )

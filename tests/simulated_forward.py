"""The forward kernel on the simulation of simulated_dsl.py, each warp's registers lane by lane (simulated_lanes.py).

Head dims are a few columns, whatever the configuration says. What stands below the protocols and the softmax is
replaced: the layout of tensors in memory, and the products, which are rounded once. P stays in float32.
"""

import math
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
from simulated_backward import Replacements
from simulated_cutlass import PipelineState, StandIn, identity
from simulated_dsl import WARP_THREADS, Cta, Pipe, require
from simulated_lanes import Accumulator, Few, LaneView, with_lanes, with_scalar_lane
from simulated_launch import HEAD_DIM, Launch, Shape
from simulated_memory import WARPGROUP_ROWS, Memory, Registers, Stages, Tensor, Tiles
from simulated_packed import PackedProblem

HEAD_DIM_V = 8  # columns of one group of a WGMMA's accumulator
CONSUMERS = 4  # the first warp of the consumers
LARGEST_P = 65504  # of fp16
NEIGHBOURS = 16  # keys
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Attention(Shape):
    """A Shape, and what makes scores of its products. ``spreads``: factors of queries and of keys, by chance."""

    scale: float = 0.5
    softcap: float = 0.0
    slopes: tuple = ()  # of which each head has one, by chance
    sink: float | None = None  # about which each head has one
    spreads: tuple = (1.0,)


class ForwardProblem:
    """Inputs, O and LSE (batch, seqlen_q, heads) by the definition, in float64."""

    packed = False

    def __init__(self, shape, seed):
        chance = np.random.default_rng(seed)
        rows, keys = (shape.batch, shape.seqlen_q, shape.heads), (shape.batch, shape.seqlen_k, shape.heads_k)
        self.shape = shape
        self.q, self.k = chance.normal(size=(*rows, HEAD_DIM)), chance.normal(size=(*keys, HEAD_DIM))
        self.v = chance.normal(size=(*keys, HEAD_DIM_V))
        self.q *= chance.choice(shape.spreads, size=(*rows, 1))
        # Neighbours are alike, or differ in size alone
        groups = np.arange(shape.seqlen_k) // NEIGHBOURS
        alike = groups % 2 == 0
        self.k[:, alike] = self.k[:, groups[alike] * NEIGHBOURS] + 0.3 * self.k[:, alike]
        spread = chance.choice(shape.spreads, size=shape.seqlen_k)
        self.k *= np.where(alike, spread[groups], spread)[:, None, None]
        self.slopes = chance.choice(shape.slopes or (0.0,), size=(shape.batch, shape.heads))
        # Of all sequences the same
        self.sink = None if shape.sink is None else shape.sink + np.arange(shape.heads)
        self.define()

    def define(self):
        """The expected results, from the inputs."""
        shape = self.shape
        k, v = (np.repeat(x, shape.group, 2) for x in (self.k, self.v))
        scores = np.einsum("bqhd,bkhd->bhqk", self.q, k) * shape.scale
        if shape.softcap:
            scores = shape.softcap * np.tanh(scores / shape.softcap)
        keys, place = np.arange(shape.seqlen_k), np.arange(shape.seqlen_q)[:, None] + shape.seqlen_k - shape.seqlen_q
        scores -= self.slopes[:, :, None, None] * abs(keys - place)
        seen = keys <= place + (shape.seqlen_k + shape.seqlen_q if shape.right is None else shape.right)
        seen &= keys >= place - (shape.seqlen_k if shape.left is None else shape.left)
        if shape.chunk is not None:
            seen &= keys // shape.chunk == place // shape.chunk
        logits = np.where(seen, scores, -np.inf)
        if self.sink is not None:
            column = np.broadcast_to(self.sink[:, None, None], (*logits.shape[:3], 1))
            logits = np.concatenate([logits, column], -1)
        largest = logits.max(-1, keepdims=True, initial=-1e300)
        p = np.exp(logits - largest)
        total = p.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            self.lse = (largest + np.log(total))[..., 0].swapaxes(1, 2)
        p = p[..., : shape.seqlen_k] / np.where(total > 0, total, 1)
        self.out = np.einsum("bhqk,bkhd->bqhd", p, v)

    def check(self, out, lse):
        polynomial = 23 * 2.0**-24 * self.shape.softcap  # of which it may be off: fused.py
        np.testing.assert_allclose(out, self.out, rtol=0, atol=1e-3, err_msg="out")
        np.testing.assert_allclose(lse, self.lse, rtol=1e-5, atol=2e-4 + polynomial, err_msg="lse")


class PackedForwardProblem(PackedProblem):
    kind = ForwardProblem
    inputs = (("q", 0, HEAD_DIM), ("k", 1, HEAD_DIM), ("v", 1, HEAD_DIM_V))

    def __init__(self, shape, lengths, seed):
        super().__init__(shape, lengths, seed)
        shape = self.shape
        self.sink = None if shape.sink is None else shape.sink + np.arange(shape.heads)
        # One that nothing may use where there is no sequence
        self.slopes = np.array(
            [[np.nan] * shape.heads if sequence is None else sequence.slopes[0] for sequence in self.sequences]
        )

    def check(self, out, lse):
        expected = self.joined("lse", 0, lse.shape, -np.inf)
        for (queries, keys), (offset, _) in zip(self.lengths, self.offsets, strict=True):
            if not keys and self.sink is not None:
                expected[:, offset : offset + queries] = self.sink
        np.testing.assert_allclose(out, self.joined("out", 0, out.shape, 0.0), rtol=0, atol=1e-3, err_msg="out")
        np.testing.assert_allclose(lse, expected, rtol=1e-5, atol=2e-4, err_msg="lse")


class Heads:
    """A tensor as kernels index it: (length, columns, heads, batch), or with its length twice (cut_rows.py)."""

    def __init__(self, array, shape):
        self.array, self.shape = array, shape

    def __getitem__(self, place):
        head, batch = place[-2:]
        return self.array[batch, :, head]


class ForwardTensor(Tensor):
    def __init__(self, array):
        super().__init__(array)
        self.tensor = Heads(array, self.tensor.shape)


class CutBoxes:
    """cut_rows.CutRows, of loads."""

    def __init__(self, rows, columns):
        self.rows = rows

    def box(self, rows, first, valid):
        require(0 <= valid <= self.rows and first + valid <= len(rows), "a box begins or ends outside")
        tile = np.zeros((self.rows, rows.shape[1]))
        tile[:valid] = rows[first : first + valid]
        return tile


class SharedPiece(Memory):
    """A warpgroup's shared memory for O and P, which is an operand of P V. Both begin at its first column."""

    def read(self):
        return self.array

    def __setitem__(self, rows, values):
        self.array[rows, : values.shape[1]] = values


def rows_of(tensor, offset, length, mode=0):
    """sequence.rows_of, of the LSE."""
    return tensor if offset is None else Memory(tensor.array[:, :, offset : offset + length])


def output_rows(piece, seqlen_q):
    """Those of the tensor that a piece has; ``seqlen_q``: all."""
    first, offset = piece.index * WARPGROUP_ROWS, 0
    if piece.sequence.offset_q is not None:
        seqlen_q, offset = piece.sequence.seqlen_q, piece.sequence.offset_q
    return slice(offset + min(first, seqlen_q), offset + min(first + WARPGROUP_ROWS, seqlen_q))


class ForwardReplacements(Replacements):
    def __init__(self, simulation):
        super().__init__(simulation)
        self.lane, self.again = 0, 0  # again: blocks that a warpgroup does again
        self.votes = {}

    def cutlass(self):
        made = with_lanes(super().cutlass(), lambda: self.simulation.current.warp)
        vars(made.pipeline)["PipelineState"] = lambda stages, count, index, phase: PipelineState(stages, index, phase)
        self.scalar_cute = with_scalar_lane(made.cute, lambda: self.lane)
        return made

    def cute(self):
        return {
            "copy": self.copy,
            "size": lambda view, mode: view.shape[mode[0]],
            "make_rmem_tensor": lambda count, dtype: Few([None] * count),
            "local_tile": lambda rows, box, place: Tiles(rows, box[0])[place[:1]],
        }

    def modules(self):
        own_cute = {"cute": self.scalar_cute}
        return {
            "schedule": own_cute,
            "packed_schedule": own_cute,
            "epilogue": own_cute,
            "sequence": {"rows_of": rows_of},
            "barriers": {"any_of_warpgroup": self.any_of_warpgroup},
            "load": {"head_tiles": self.head_tiles},
            "kv_source": {"CutRows": CutBoxes, "partition": lambda tiled, shared, source: (shared, source)},
            "products": {
                "make_products": self.make_products,
                "issue_scores": self.issue_scores,
                "issue_output": self.issue_output,
                "new_accumulator": lambda columns, tile: Accumulator(columns),
                "new_left_operand": lambda accumulator, dtype: Registers(),
                "rows_and_columns": LaneView,
                "convert": self.convert,
                "store_copy": lambda *_: StandIn(retile=identity, partition_D=identity),
            },
            "output": {"partition": lambda out, shared, box: (shared, box)},
            "forward": {
                "SmemAllocator": lambda: StandIn(allocate=lambda _: self.simulation.current.cta.storage),
                "forward_layouts": lambda *_: [StandIn()] * 5,
                "make_tile_queue": lambda storage, *_: storage.queue,
            },
        }

    def add_methods(self, kernels):
        """Those of classes that stay as they are otherwise."""
        self.first_vote = kernels["barriers"].Barrier.VOTE
        store_lse = kernels["consume"].store_lse
        kernels["consume"].store_lse = partial(self.store_lse, store_lse)
        kernels["output"].StagedOutput.box = lambda output, out, piece: out.array[
            piece.batch, output_rows(piece, out.array.shape[1]), piece.head
        ]
        kernels["output"].DirectOutput.store = self.store_directly
        probabilities = kernels["probabilities"]
        probabilities.SharedP.start = lambda way, products, scores, memory: probabilities.Probabilities(memory, memory)
        probabilities.SharedP.write = lambda way, converted, memory: self.copy(None, converted, memory)
        kernel = kernels["forward"].ForwardKernel
        kernel.storage = lambda kernel: None
        kernel.pipelines = lambda kernel, storage: storage.pipes
        kernel.output_piece = lambda kernel, storage, layout, warpgroup: storage.pieces[warpgroup]

    def any_of_warpgroup(self, warpgroup, predicate):
        cta, barrier = self.simulation.current.cta, self.first_vote + warpgroup
        generation = cta.arrive(barrier, 2 * WARPGROUP_ROWS)
        vote = cta, barrier, generation
        self.votes[vote] = self.votes.get(vote, False) or bool(np.any(predicate))
        self.simulation.point(lambda: cta.generation[barrier] > generation, f"vote {barrier}")
        self.again += self.votes[vote] and self.simulation.current.warp % 4 == 0
        return self.votes[vote]

    def copy(self, atom, source, target, tma_bar_ptr=None):
        if atom != "store":
            super().copy(atom, source, target, tma_bar_ptr)
            return
        # A bulk copy of O, which reads later and writes later still
        agent, rows = self.simulation.current, source.array[: len(target), : target.shape[1]]

        def write(values):
            require(np.isnan(target).all(), "rows of O are written twice")
            target[:] = values

        def read():
            agent.sums.waiting.append(partial(write, rows.copy()))
            source.array[:] = np.nan

        agent.reads.waiting.append(read)
        self.simulation.point()

    def convert(self, accumulator, dtype, target=None):
        target = Registers() if target is None else target
        target.write(accumulator.matrix())
        return target

    def store_lse(self, one_lane, lse, values, first_row, head, batch):
        of_lanes = np.array([np.broadcast_to(value, WARP_THREADS) for value in values]).T
        for self.lane, row in enumerate(first_row):
            one_lane(lse, of_lanes[self.lane], row, head, batch)
        self.lane = 0

    def store_directly(self, output, out, shared, acc_o, pv_add, piece):
        rows = out.array[piece.batch, output_rows(piece, out.array.shape[1]), piece.head][self.rows()]
        require(np.isnan(rows).all(), "rows of O are written twice")
        rows[:] = acc_o.matrix()[: len(rows)]

    def make_products(self, config, dtype, shared, source, warpgroup):
        q, k, v = shared
        return SimpleNamespace(
            qk_first=config.tile_n, pv_add=HEAD_DIM_V,
            q=q.operand(fixed=warpgroup), k=k.operand(np.transpose), v=v.operand(),
        )  # fmt: skip

    def issue_scores(self, products, scores, stage):
        """S = Q Kᵀ; operands are read when it runs."""
        q, k, rows = products.q, products.k[None, stage], self.rows()
        scores.writers += 1

        def run():
            scores.take(q.read()[rows] @ k.read())
            scores.writers -= 1

        self.simulation.current.products.waiting.append(run)
        self.simulation.point()

    def issue_output(self, products, acc_o, probabilities, stage):
        """O += P V."""
        in_registers = isinstance(probabilities, Registers)
        v, rows = products.v[None, stage], self.rows()
        p = probabilities.read() if in_registers else probabilities.read()[rows, :]
        require(not (abs(p[:, : products.qk_first]) > LARGEST_P).any(), "fp16 cannot hold P")
        acc_o.writers += 1
        if in_registers:
            probabilities.readers += 1

        def run():
            p = (probabilities.values if in_registers else probabilities.read()[rows])[:, : products.qk_first]
            accumulated = np.empty((len(p), HEAD_DIM_V), np.float32)
            accumulated[acc_o.places] = acc_o.values
            acc_o.take(accumulated + p.astype(float) @ v.read())
            acc_o.writers -= 1
            if in_registers:
                probabilities.readers -= 1

        self.simulation.current.products.waiting.append(run)
        self.simulation.point()


class ForwardLaunch(Launch):
    """The forward kernel. ``options``: of ForwardConfig."""

    kind_of_replacements = ForwardReplacements

    def __init__(self, problem, seed, edits=(), **options):
        super().__init__(problem, seed, edits)
        shape, kernels = problem.shape, self.kernels
        alibi = ("linear" if shape.right == 0 else "distance") if shape.slopes else None
        given = dict(
            tile_m=128, tile_n=16, stages=2, pingpong=True, overlap=True, negative_scale=shape.scale < 0,
            right_bound=shape.bounded, left_bound=shape.left is not None, chunked=shape.chunk is not None,
            packed=problem.packed, softcap=bool(shape.softcap), sink=shape.sink is not None, alibi=alibi,
        )  # fmt: skip
        given["by_sums"] = alibi is None and shape.softcap >= kernels["config"].SMALLEST_CAP
        self.config = kernels["config"].ForwardConfig("bfloat16", 64, 64, **(given | options))
        self.replacements.add_methods(kernels)
        self.kernel = kernels["forward"].ForwardKernel(self.config)
        scale, factor = shape.scale * LOG2_E, None
        if shape.softcap:
            factor = kernels["config"].CAP_UNITS * shape.scale / shape.softcap
            scale, factor = -2 * LOG2_E * shape.softcap, np.float32(factor)
        sink = None if problem.sink is None else problem.sink.astype(np.float32)
        section = None if problem.packed else shape.section
        slopes = problem.slopes.astype(np.float32) if shape.slopes else None
        run = kernels["args"].RunTime(np.float32(scale), *self.bounds(self.config), section, 1, factor, slopes, sink)
        if self.config.fused and shape.softcap:
            run = run._replace(polynomial=kernels["fused"].polynomial(factor, run.scale_log2))
        if problem.packed:
            other = {"other": -1 if self.config.sink else 0}
            self.table = problem.table(self.config, self.simulation.chance, keys=False, **other)
        self.out, self.lse = np.full((*problem.q.shape[:3], HEAD_DIM_V), np.nan), Memory(np.full(self.rows, np.nan))
        out = ForwardTensor(self.out)
        out.atom, out.shape = "store", out.tensor.shape
        tensors = [ForwardTensor(x) for x in (problem.q, problem.k, problem.v)]
        self.given = tensors, out, self.lse, self.counter.array, self.table, run
        for index in range(shape.ctas):
            self.add_cta(Cta(self.simulation, index))

    @property
    def rows(self):
        batch, seqlen_q, heads, _ = self.problem.q.shape
        return batch, heads, seqlen_q

    def add_cta(self, cta):
        config, schedule = self.config, self.kernel.schedule
        pieces, warps = config.consumer_warpgroups, 4 * config.consumer_warpgroups
        stages = (pieces, WARPGROUP_ROWS, HEAD_DIM), (config.stages, config.tile_n, HEAD_DIM)
        q, k, v = (Stages.new(*sizes) for sizes in (*stages, (config.stages, config.tile_n, HEAD_DIM_V)))
        pipes = Pipe(cta, "Q", pieces, 4), Pipe(cta, "K", config.stages, warps), Pipe(cta, "V", config.stages, warps)
        slots = 2 if schedule.fields is None else (schedule.fields, 2)
        columns = max(config.tile_n, HEAD_DIM_V) if config.shared_p else HEAD_DIM_V
        cta.storage = SimpleNamespace(
            **{name: StandIn(get_tensor=lambda *_, x=x, **__: x) for name, x in zip("qkv", (q, k, v), strict=True)},
            pipes=pipes,
            queue=self.queue(cta, config.dynamic, warps, slots),
            pieces=[SharedPiece(np.full((WARPGROUP_ROWS, columns), np.nan)) for _ in range(pieces)],
        )
        self.add_warps(cta, [0, *range(CONSUMERS, CONSUMERS + warps)], SimpleNamespace(run=self.run_warp))

    def run_warp(self):
        with np.errstate(all="ignore"):  # as the GPU
            self.kernel.kernel(*self.given)


def run_forward(problem, seed, edits=(), **options):
    """O and LSE (batch, seqlen_q, heads), checked; and in how many blocks a warpgroup began again."""
    launch = ForwardLaunch(problem, seed, edits, **options)
    launch.run()
    lse = launch.lse.array.swapaxes(1, 2)
    problem.check(launch.out, lse)
    return launch.out, lse, launch.replacements.again

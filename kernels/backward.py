"""Backward attention for sm_90a: dQ, dK and dV from Q, K, V, O, LSE and dO, with S and P computed again tile by tile.

FlashAttention-2's loop order (Dao 2023, algorithm 2): K/V tiles outside, queries inside; dK and dV stay in registers,
dQ is summed in float32 in global memory, but for the widest heads (query_kernel.py). Warp-specialised as in
FlashAttention-3 (Shah et al. 2024, section 3 and appendix): one warp loads, two add dQ, two warpgroups compute.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from .args import BackwardRunTime, RunTime, TiledTensor, may_begin_early
from .backward_edges import THREADS, Epilogue, Prologue, tile_of
from .backward_load import BackwardProducer
from .backward_roles import GradientRole, ProbabilityRole
from .backward_smem import backward_layouts, backward_storage, row_layout, staged_floats
from .backward_steps import EarlySums, LateSums
from .backward_store import SumStore
from .backward_wide import WideConsumer
from .backward_work import WorkSchedule
from .chunks import make_band, make_bounds
from .config import WARP_THREADS, WARPGROUP_THREADS, WARPS_PER_WARPGROUP, BackwardConfig
from .forward import DTYPES, heads_last
from .load import SequenceBoxes, WholeBoxes, tma_pipe
from .packed_schedule import PackedWorkSchedule
from .phases import Phase, begin
from .query_config import QueryConfig
from .query_kernel import QueryKernel
from .schedule import SLOTS, make_tile_queue
from .score import ScoreHook


class BackwardKernel:
    """Everything about the kernels that is fixed at compile time."""

    def __init__(self, config: BackwardConfig):
        config.check()
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.band = make_band(config)
        self.schedule = WorkSchedule(
            config.tile_n, True, config.descending, config.turns, config.split_tail, config.tile_m
        )
        self.boxes = WholeBoxes
        if config.packed:
            given = {"ordered": config.turns, "reread": config.wide, "numbered": ScoreHook.of(config).numbered}
            self.schedule, self.boxes = PackedWorkSchedule(**given), SequenceBoxes
        self.prologue = Prologue(config, self.dtype)
        # Where dQ is not summed
        self.queries = None
        if not config.sums:
            bounds = config.right_bound, config.left_bound, config.packed
            hook = config.softcap, config.alibi, config.chunked, config.score, config.mask
            query_config = QueryConfig(config.dtype, config.head_dim, config.head_dim_v, *bounds, *hook)
            self.queries = QueryKernel(query_config, self.dtype, config.tile_m)
        self.epilogue = Epilogue(config, self.dtype, self.band)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        do: cute.Tensor,
        dlse: cute.Tensor,
        slopes: cute.Tensor | None,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        rows: cute.Tensor,
        sums: cute.Tensor,
        turns: cute.Tensor,
        dk_parts: cute.Tensor,
        dv_parts: cute.Tensor,
        counter: cute.Tensor,
        scale_log2: Float32,
        scale: Float32,
        cap_factor: Float32 | None,
        right: Int32,
        left: Int32 | None,
        chunk: Int32 | None,
        section: Int32,
        head_parts: Int32,
        whole_tiles: Int32,
        tile_parts: Int32,
        ctas: Int32,
        query_section: Int32,
        query_ctas: Int32,
        fills_idle_sms: Int32,
        stream: cuda.CUstream,
    ):
        """q, k, v, out, do, dq, dk, dv: (batch, length, heads, head_dim) in 16 bit, last stride 1. lse, dlse: (batch,
        heads, seqlen_q) float32; slopes (batch, heads) likewise, or None. Workspace in float32: rows (batch, heads,
        blocks, 2 tile_m); where dQ is summed, else None: sums (batch, heads, blocks, tile_m head_dim). dk_parts and
        dv_parts: where heads are split (batch, heads_k, parts, K/V tiles, tile_n head_dim), where the tail is split
        (PartWork.slot, tile_n head_dim), else None. In int32: turns (batch, heads, blocks, warpgroups), None where no
        order of sums is asked for. head_parts, whole_tiles and tile_parts are those of BackwardRunTime, query_section
        and query_ctas those of query_kernel.py. The short kernels before and behind use all SMs.
        """
        config = self.config
        edge_ctas = rows.shape[0] * rows.shape[1] * rows.shape[2]
        cap_scale = scale_log2 if const_expr(config.softcap and config.score is None) else None
        self.before(out, do, lse, dlse, rows, (sums, turns), cap_scale).launch(
            grid=(edge_ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )
        parts = head_parts, whole_tiles, tile_parts
        right, left = make_bounds(config, right, left, chunk)
        run = BackwardRunTime(scale_log2, scale, right, left, section, *parts, fills_idle_sms, cap_factor, slopes)
        results = (heads_last(dk), heads_last(dv))
        direct = (None, None) if const_expr(config.split_heads) else results
        outputs = (direct[0], dk_parts), (direct[1], dv_parts)
        matrices = tuple(map(heads_last, (k, v, q, do)))
        self.launch(matrices, (rows, sums, turns), outputs, counter, run, ctas, stream)
        behind = {"block": (WARPGROUP_THREADS * config.consumer_warpgroups, 1, 1), "stream": stream, "use_pdl": True}
        if const_expr(config.key_parts):
            parts = (dk_parts, results[0]), (dv_parts, results[1])
            grid = (2 * self.tiles_in_parts(dk_parts, results[0], run), 1, 1)
            self.add(parts, run).launch(grid=grid, **behind)
        if const_expr(not config.sums):
            query_run = RunTime(scale_log2, right, left, query_section, fills_idle_sms, cap_factor, slopes)
            matrices = tuple(map(heads_last, (q, do, k, v)))
            self.queries.launch(matrices, rows, heads_last(dq), counter, scale, query_run, query_ctas, stream)
        else:
            self.behind(sums, heads_last(dq), scale, k.shape[1], right).launch(grid=(edge_ctas, 1, 1), **behind)

    @cute.jit
    def launch(
        self,
        matrices: tuple,
        workspace: tuple,
        outputs: tuple,
        counter: cute.Tensor,
        run: BackwardRunTime,
        ctas: Int32,
        stream: cuda.CUstream,
        table: cute.Tensor | None = None,
    ):
        """The main kernel. matrices: k, v, q, do, (length, head_dim, heads, batch); workspace: rows, sums, turns;
        outputs: of dK and of dV, (gradient, its parts). With a table of K/V tiles: packed sequences, a batch of 1.
        """
        config, dtype = self.config, self.dtype
        rows, *sums_and_turns = workspace
        # TMA atoms
        layouts = (*backward_layouts(config, dtype)[:4], row_layout(config))
        boxes = (
            (config.tile_n, config.head_dim),
            (config.tile_n, config.head_dim_v),
            (config.tile_m, config.head_dim),
            (config.tile_m, config.head_dim_v),
            (1, config.row_floats),
        )
        views = tuple(self.boxes(*box).view(matrix) for matrix, box in zip(matrices, boxes[:4], strict=True))
        sources = (*views, cute.make_tensor(rows.iterator, steps_first(rows.layout)))
        load_op = cpasync.CopyBulkTensorTileG2SOp()
        tensors = tuple(
            TiledTensor(*cpasync.make_tiled_tma_atom(load_op, source, cute.slice_(layout, (None, None, 0)), box))
            for source, layout, box in zip(sources, layouts, boxes, strict=True)
        )
        # Persistent, one CTA an SM; without min_blocks_per_mp setmaxnreg would vanish
        self.kernel(tensors, tuple(sums_and_turns), outputs, counter, table, run).launch(
            grid=(ctas, 1, 1), block=(config.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    @cute.kernel
    def before(self, out: cute.Tensor, do: cute.Tensor, lse: cute.Tensor, dlse, rows: cute.Tensor, cleared, cap_scale):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        thread = cute.arch.thread_idx()[0]
        place = tile_of(cute.arch.block_idx()[0], rows.shape[2], rows.shape[1])
        self.prologue.run(thread, place, out, do, lse, dlse, rows, *cleared, cap_scale)

    @cute.kernel
    def behind(self, sums, dq: cute.Tensor, scale: Float32, seqlen_k: Int32, right):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        place = tile_of(cute.arch.block_idx()[0], sums.shape[2], sums.shape[1])
        self.epilogue.queries(place, sums, dq, scale, seqlen_k, right)

    @cute.kernel
    def add(self, parts: tuple, run: BackwardRunTime):
        """dK or dV of a tile that left in parts. Not a part of ``behind``, whose CTAs need half the registers.
        ``parts``: ((parts, gradient) of dK, and of dV).
        """
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        of_dk, of_dv = parts
        tile = cute.arch.block_idx()[0] // 2
        if cute.arch.block_idx()[0] % 2 == 0:
            self.add_parts(tile, of_dk, self.config.head_dim, run.scale, run)
        else:
            self.add_parts(tile, of_dv, self.config.head_dim_v, Float32(1.0), run)

    @cute.jit
    def tiles_in_parts(self, parts: cute.Tensor, gradient: cute.Tensor, run: BackwardRunTime) -> Int32:
        """How many tiles left in parts."""
        if const_expr(self.config.split_heads):
            count = parts.shape[0] * parts.shape[1] * parts.shape[3]
        else:
            seqlen_k, _, _, batch = gradient.shape
            count = self.schedule.count(seqlen_k, run.head_parts, batch) - run.whole_tiles
        return count

    @cute.jit
    def add_parts(
        self, tile: Int32, output: tuple, head_dim: cutlass.Constexpr[int], scale: Float32, run: BackwardRunTime
    ):
        """One of the two gradients of one of these."""
        parts, gradient = output
        if const_expr(self.config.split_heads):
            block, head, batch = tile_of(tile, parts.shape[3], parts.shape[1])
            own = parts[batch, head, None, block, None]
            self.epilogue.keys((block, head, batch), own, (Int32(0), parts.shape[2]), gradient, head_dim, scale)
        else:
            seqlen_k, _, _, batches = gradient.shape
            place = self.schedule.coordinates(run.whole_tiles + tile, seqlen_k, run.head_parts, batches, run.section)
            bounds = tile * run.parts, (tile + 1) * run.parts
            self.epilogue.keys(place, parts, bounds, gradient, head_dim, scale)

    @cute.kernel
    def kernel(
        self,
        tensors: tuple,
        sums_and_turns: tuple,
        outputs: tuple,
        counter: cute.Tensor,
        table,
        run: BackwardRunTime,
    ):
        begin(Phase.SETUP)
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Descriptors, shared memory, barriers
        if warp == 0:
            for tiled in tensors:
                cpasync.prefetch_descriptor(tiled.atom)
        storage = SmemAllocator().allocate(self.storage())
        fields = (storage.k, storage.v, storage.q, storage.do, storage.ds)
        s_k, s_v, s_q, s_do, s_ds = (
            field.get_tensor(layout.outer, swizzle=layout.inner)
            for field, layout in zip(fields, backward_layouts(config, self.dtype), strict=True)
        )
        s_rows = storage.rows.get_tensor(row_layout(config))
        s_dq = storage.dq.get_tensor(cute.make_layout(staged_floats(config))) if config.sums else None
        readers = (WARPGROUP_THREADS + config.sums * WARP_THREADS) * config.consumer_warpgroups  # and the store warps
        pipes, p_pipe = self.pipelines(storage), self.probabilities_pipeline(storage)
        queue = make_tile_queue(storage, counter, True, readers, (self.schedule.fields, SLOTS), table)
        pipeline.pipeline_init_arrive(is_relaxed=True)
        pipeline.pipeline_init_wait()
        # Every thread waits for the launch before, so a launch's end implies the end of all before it
        may_begin_early(run)
        cute.arch.griddepcontrol_wait()
        # Roles
        producer_registers, consumer_registers = config.registers
        if warp < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == 0:
                producer = BackwardProducer(config, self.band, self.schedule, self.boxes)
                producer.run(tensors, self.lengths(tensors), (s_k, s_v, s_q, s_do, s_rows), pipes, queue, run)
            elif const_expr(config.sums):
                if warp <= config.consumer_warpgroups:
                    store = SumStore(config, self.band, self.schedule)
                    store.run(self.lengths(tensors), *sums_and_turns, s_dq, queue, run, warp - 1)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            shared = (s_k, s_v, s_q, s_do, s_rows[0, None, None])
            if const_expr(config.roles):
                # P, 16 bit, seen as words
                s_p = storage.ds.get_tensor(cute.make_layout(config.score_words), dtype=Float32)
                role = (config, self.dtype, self.band, self.schedule)
                given = (*shared, s_p), (*pipes, p_pipe), queue, run
                if warp < 2 * WARPS_PER_WARPGROUP:
                    ProbabilityRole(*role).run(self.lengths(tensors), outputs[1], *given)
                else:
                    GradientRole(*role).run(self.lengths(tensors), outputs[0], *given)
            elif const_expr(config.wide):
                consumer = WideConsumer(config, self.dtype, self.band, self.schedule)
                consumer.run(self.lengths(tensors), outputs, (*shared, s_ds, s_dq), pipes, queue, run)
            else:
                order = EarlySums if config.early_sums else LateSums
                consumer = order(config, self.dtype, self.band, self.schedule)
                consumer.run(self.lengths(tensors), outputs, (*shared, s_ds, s_dq), pipes, queue, run)

    def lengths(self, tensors):
        """(seqlen_q, seqlen_k, heads, heads_k, batch); without meaning the lengths, where sequences are packed."""
        tiled_k, _, tiled_q, *_ = tensors
        seqlen_q, *_, heads, batch = tiled_q.tensor.shape
        seqlen_k, *_, heads_k, _ = tiled_k.tensor.shape
        return seqlen_q, seqlen_k, heads, heads_k, batch

    def storage(self):
        """The struct of shared memory; BackwardConfig's arithmetic, by which plans are made, must not promise less."""
        storage = backward_storage(self.config, self.dtype, self.schedule.fields)
        if storage.size_in_bytes() > self.config.smem_bytes():
            raise ValueError(f"{self.config.name}: {storage.size_in_bytes()} bytes, planned {self.config.smem_bytes()}")
        return storage

    @cute.jit
    def pipelines(self, storage):
        """Full and empty barriers of K, V, Q (with its row statistics) and dO."""
        config = self.config
        warps = WARPS_PER_WARPGROUP * config.consumer_warpgroups

        def pipe(barriers, stages, rows, columns, more_bytes=0):
            return tma_pipe(barriers, stages, warps, rows * columns * self.dtype.width // 8 + more_bytes)

        return (
            pipe(storage.k_barriers, 1, config.tile_n, config.head_dim),
            pipe(storage.v_barriers, 1, config.tile_n, config.head_dim_v),
            pipe(storage.q_barriers, config.stages, config.tile_m, config.head_dim, 4 * config.row_floats),
            pipe(storage.do_barriers, config.do_stages, config.tile_m, config.head_dim_v),
        )

    @cute.jit
    def probabilities_pipeline(self, storage):
        """Full and empty barriers of P on its way from one role to the other. All threads arrive, each for what it has
        written or read itself: racecheck knows no other handshake (AGENTS.md).
        """
        if const_expr(not self.config.roles):
            return None
        role = pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPGROUP_THREADS)
        return pipeline.PipelineAsync.create(
            barrier_storage=storage.p_barriers.data_ptr(),
            num_stages=self.config.score_stages,
            producer_group=role,
            consumer_group=role,
            defer_sync=True,
        )


def steps_first(layout):
    """Row statistics (batch, heads, steps, floats) as a producer takes tensors: (steps, floats, heads, batch)."""
    return cute.select(layout, mode=[2, 3, 1, 0])

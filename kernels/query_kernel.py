"""dQ from Q, K, V, dO and the row statistics, by a kernel of its own: where K/V tiles are so small that summing dQ tile
by tile in global memory would take longer than S and dP once more. It has no sums, so its result is the same in every
run.

The loop order is the forward's (queries outside, keys inside), the formulas are FlashAttention-2's (Dao 2023,
algorithm 2).
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .args import RunTime, TiledTensor, may_begin_early
from .chunks import make_band
from .config import SHARED_ALIGNMENT, WARPS_PER_WARPGROUP, WGMMA_M
from .load import SequenceBoxes, WholeBoxes, tma_pipe
from .packed_schedule import PackedSchedule
from .phases import Phase, begin
from .query_config import QueryConfig
from .query_consume import QueryConsumer
from .query_load import QueryProducer
from .schedule import SLOTS, Schedule, make_tile_queue, slots_shape
from .score import ScoreHook


class QueryKernel:
    """Everything about the kernel that is fixed at compile time."""

    def __init__(self, config: QueryConfig, dtype, statistics_rows: int):
        config.check()
        self.config = config
        self.dtype = dtype
        self.statistics_rows = statistics_rows  # queries of one line of row statistics
        self.band = make_band(config)
        self.schedule = Schedule(config.tile_m, dynamic=config.dynamic, descending=config.dynamic)
        self.boxes = WholeBoxes
        if config.packed:
            self.schedule, self.boxes = PackedSchedule(numbered=ScoreHook.of(config).numbered), SequenceBoxes

    @cute.jit
    def launch(
        self,
        tensors: tuple,
        rows: cute.Tensor,
        dq: cute.Tensor,
        counter: cute.Tensor,
        scale: Float32,
        run: RunTime,
        ctas: Int32,
        stream: cuda.CUstream,
        table: cute.Tensor | None = None,
    ):
        """tensors: q, do, k, v, and dq: (length, head_dim, heads, batch) in 16 bit; rows: (batch, heads, lines, 2
        statistics_rows) float32. With a table of tiles: packed sequences, and a batch of 1.
        """
        config = self.config
        q, do, k, v = tensors
        k, v = self.boxes(config.tile_n, config.head_dim).view(k), self.boxes(config.tile_n, config.head_dim_v).view(v)
        load_op = cpasync.CopyBulkTensorTileG2SOp()
        boxes = (
            (WGMMA_M, config.head_dim),
            (WGMMA_M, config.head_dim_v),
            (config.tile_n, config.head_dim),
            (config.tile_n, config.head_dim_v),
        )
        tiled = tuple(
            TiledTensor(*cpasync.make_tiled_tma_atom(load_op, tensor, cute.slice_(layout, (None, None, 0)), box))
            for tensor, layout, box in zip((q, do, k, v), self.layouts(), boxes, strict=True)
        )
        # Persistent, one CTA an SM; without min_blocks_per_mp setmaxnreg would vanish
        self.kernel(tiled, rows, dq, counter, table, scale, run).launch(
            grid=(ctas, 1, 1), block=(config.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    def layouts(self):
        """``(q, do, k, v)``: swizzled layouts (rows, head dim, stages); Q and dO have a stage a warpgroup."""
        config, warpgroups = self.config, self.config.consumer_warpgroups
        tile = (WGMMA_M, config.tile_n)
        return (
            sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (*tile, config.head_dim), self.dtype, warpgroups),
            sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (*tile, config.head_dim_v), self.dtype, warpgroups),
            sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (*tile, config.head_dim), self.dtype, config.stages),
            sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (*tile, config.head_dim_v), self.dtype, config.value_stages),
        )

    @cute.kernel
    def kernel(
        self,
        tensors: tuple,
        rows: cute.Tensor,
        dq: cute.Tensor,
        counter: cute.Tensor,
        table,
        scale: Float32,
        run: RunTime,
    ):
        config = self.config
        begin(Phase.SETUP)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Descriptors, shared memory, barriers
        if warp == 0:
            for tiled in tensors:
                cpasync.prefetch_descriptor(tiled.atom)
        storage = SmemAllocator().allocate(self.storage())
        shared = tuple(
            field.get_tensor(layout.outer, swizzle=layout.inner)
            for field, layout in zip((storage.q, storage.do, storage.k, storage.v), self.layouts(), strict=True)
        )
        readers = self.schedule.readers(WARPS_PER_WARPGROUP * config.consumer_warpgroups)
        slots = slots_shape(self.schedule.fields)
        pipes, queue = self.pipelines(storage), make_tile_queue(storage, counter, config.dynamic, readers, slots, table)
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
                producer = QueryProducer(config, self.band, self.schedule, self.boxes)
                producer.run(tensors, shared, pipes, queue, run)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            consumer = QueryConsumer(config, self.dtype, self.band, self.schedule, self.statistics_rows)
            consumer.run(tensors, rows, dq, scale, shared, pipes, queue, run)

    def storage(self):
        """The struct of shared memory; QueryConfig's arithmetic, by which stages are chosen, must not promise less."""
        config, dtype = self.config, self.dtype
        q_layout, do_layout, k_layout, v_layout = self.layouts()
        slots = (self.schedule.fields or 1) * SLOTS

        @cute.struct
        class QueryStorage:
            # full and empty barriers, one pair a stage
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * config.consumer_warpgroups]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * config.stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * config.value_stages]
            queue_barriers: cute.struct.MemRange[cutlass.Int64, 2 * SLOTS]
            queue_slots: cute.struct.MemRange[cutlass.Int32, slots]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_layout)], SHARED_ALIGNMENT]
            do: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(do_layout)], SHARED_ALIGNMENT]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(k_layout)], SHARED_ALIGNMENT]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(v_layout)], SHARED_ALIGNMENT]

        size = QueryStorage.size_in_bytes()
        if size > config.smem_bytes():
            raise ValueError(f"{config.name}: {size} bytes, planned {config.smem_bytes()}")
        return QueryStorage

    @cute.jit
    def pipelines(self, storage):
        """Full and empty barriers of Q and dO (one stage a warpgroup), K and V."""
        config = self.config

        def pipe(barriers, stages, consumer_warps, elements):
            return tma_pipe(barriers, stages, consumer_warps, elements * self.dtype.width // 8)

        warps, columns = WARPS_PER_WARPGROUP * config.consumer_warpgroups, config.head_dim + config.head_dim_v
        return (
            pipe(storage.q_barriers, config.consumer_warpgroups, WARPS_PER_WARPGROUP, WGMMA_M * columns),
            pipe(storage.k_barriers, config.stages, warps, config.tile_n * config.head_dim),
            pipe(storage.v_barriers, config.value_stages, warps, config.tile_n * config.head_dim_v),
        )

"""Forward attention for sm_90a: one producer warp, two or three consumer warpgroups, ping-pong, persistent CTAs.

The pipeline is FlashAttention-3's (Shah et al. 2024, sections 3.1 and 3.2); the loop order and the online softmax are
FlashAttention-2's (Dao 2023).
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from . import fused
from .args import RunTime, TiledTensor, may_begin_early
from .barriers import Turns
from .block_softmax import FusedSoftmax, InPlaceSoftmax
from .chunks import make_band, make_bounds
from .config import SHARED_ALIGNMENT, WARPS_PER_WARPGROUP, WGMMA_M, ForwardConfig
from .consume import Consumer
from .kv_source import DenseValues
from .load import Producer, tma_pipe
from .output import DirectOutput, StagedOutput
from .packed_schedule import PackedSchedule
from .phases import Phase, begin
from .probabilities import RegisterP, SharedP
from .schedule import SLOTS, Schedule, make_tile_queue, slots_shape
from .score import ScoreHook
from .smem import forward_layouts, forward_storage
from .softmax import Softmax

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def heads_last(tensor):
    """(batch, length, heads, head_dim) as (length, head_dim, heads, batch): one head is then a plain matrix."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))


class ForwardKernel:
    """Everything about the kernel that is fixed at compile time."""

    def __init__(self, config: ForwardConfig):
        config.check()
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.band = make_band(config)
        self.schedule = Schedule(config.tile_m, dynamic=config.dynamic, descending=config.dynamic)
        self.values = DenseValues(config.tile_n, config.head_dim_v, cut=config.right_bound or config.packed)
        self.turns = Turns(config.consumer_warpgroups, config.pingpong)
        self.hook = ScoreHook.of(config)
        self.softmax = Softmax(self.hook.negative(config.negative_scale), blind_rows=config.mask is not None)
        self.output = DirectOutput(self.dtype, config.head_dim_v)
        if config.staged_output:
            self.output = StagedOutput(self.dtype, config.head_dim_v, cut=config.packed)
        if config.packed:
            self.schedule = PackedSchedule(numbered=self.hook.numbered)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sink: cute.Tensor | None,
        slopes: cute.Tensor | None,
        counter: cute.Tensor,
        scale_log2: Float32,
        cap_factor: Float32 | None,
        right: Int32,
        left: Int32 | None,
        chunk: Int32 | None,
        section: Int32,
        ctas: Int32,
        fills_idle_sms: Int32,
        stream: cuda.CUstream,
    ):
        """q, k, v, out: (batch, length, heads, head_dim) in 16 bit, last stride 1. In float32: lse (batch, heads,
        seqlen_q); sink (heads) and slopes (batch, heads), None where there are none.
        """
        bounds = make_bounds(self.config, right, left, chunk)
        run = RunTime(scale_log2, *bounds, section, fills_idle_sms, cap_factor, slopes, sink)
        self.launch(tuple(map(heads_last, (q, k, v, out))), lse, counter, run, ctas, stream)

    @cute.jit
    def launch(
        self,
        tensors: tuple,
        lse: cute.Tensor,
        counter: cute.Tensor,
        run: RunTime,
        ctas: Int32,
        stream: cuda.CUstream,
        table: cute.Tensor | None = None,
    ):
        """tensors: q, k, v and out, (length, head_dim, heads, batch); lse: (batch, heads, seqlen_q). With a table of
        tiles: packed sequences, one behind the other, and a batch of 1.
        """
        config, dtype = self.config, self.dtype
        if const_expr(config.fused and config.softcap):
            run = run._replace(polynomial=fused.polynomial(run.cap_factor, run.scale_log2))
        q, k, v, out = tensors
        # TMA atoms
        q_layout, k_layout, v_layout, o_layout, _ = forward_layouts(config, dtype)
        load_op = cpasync.CopyBulkTensorTileG2SOp()
        atom = cpasync.make_tiled_tma_atom
        one = (None, None, 0)
        tiled_q = TiledTensor(*atom(load_op, q, cute.slice_(q_layout, one), (WGMMA_M, config.head_dim)))
        tiled_k = TiledTensor(*atom(load_op, k, cute.slice_(k_layout, one), (config.tile_n, config.head_dim)))
        v_box = (config.tile_n, config.head_dim_v)
        tiled_v = TiledTensor(*atom(load_op, self.values.view(v), cute.slice_(v_layout, one), v_box))
        # Launch: persistent, one CTA an SM; without min_blocks_per_mp setmaxnreg would vanish. use_pdl: CTAs start as
        # SMs fall idle at the end of the launch before, and wait at the kernel's griddepcontrol.
        target = self.output.target(out, o_layout)
        self.kernel((tiled_q, tiled_k, tiled_v), target, lse, counter, table, run).launch(
            grid=(ctas, 1, 1), block=(config.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tensors: tuple, out, lse: cute.Tensor, counter: cute.Tensor, table, run: RunTime):
        config = self.config
        begin(Phase.SETUP)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Descriptors, shared memory, barriers
        if warp == 0:
            for tiled in tensors:
                cpasync.prefetch_descriptor(tiled.atom)
            self.output.prefetch(out)
        storage = SmemAllocator().allocate(self.storage())
        q_layout, k_layout, v_layout, o_layout, p_layout = forward_layouts(config, self.dtype)
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        readers = self.schedule.readers(WARPS_PER_WARPGROUP * config.consumer_warpgroups)
        slots = slots_shape(self.schedule.fields)
        pipes, queue = self.pipelines(storage), make_tile_queue(storage, counter, config.dynamic, readers, slots, table)
        pipeline.pipeline_init_arrive(is_relaxed=True)
        pipeline.pipeline_init_wait()
        # This launch goes on when the one before it is complete. Every thread waits, so a launch's end implies the end
        # of all before it.
        may_begin_early(run)
        cute.arch.griddepcontrol_wait()
        # Roles
        producer_registers, consumer_registers = config.registers
        if warp < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == 0:
                producer = Producer(config, self.band, self.values, self.schedule)
                producer.run(tensors, (s_q, s_k, s_v), pipes, queue, run)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            warpgroup = warp // WARPS_PER_WARPGROUP - 1
            o = self.output_piece(storage, o_layout, warpgroup) if config.staged_output else None
            p = self.output_piece(storage, p_layout, warpgroup) if config.shared_p else None
            probabilities = SharedP(self.dtype, config.p_columns) if config.shared_p else RegisterP(self.dtype)
            given = config, self.band, self.softmax, probabilities, self.hook
            consumer = Consumer(
                config, self.dtype, self.band, self.schedule, self.turns, self.softmax, probabilities, self.output,
                self.hook, InPlaceSoftmax(*given), FusedSoftmax(*given),
            )  # fmt: skip
            consumer.run(tensors, (s_q, s_k, s_v, p), out, o, lse, pipes, queue, run)

    def storage(self):
        """The struct of shared memory; ForwardConfig's arithmetic, by which plans are chosen, must not promise less."""
        storage = forward_storage(self.config, self.dtype, slots=(self.schedule.fields or 1) * SLOTS)
        if storage.size_in_bytes() > self.config.smem_bytes():
            raise ValueError(f"{self.config.name}: {storage.size_in_bytes()} bytes, planned {self.config.smem_bytes()}")
        return storage

    @cute.jit
    def output_piece(self, storage, layout, warpgroup: Int32):
        """A consumer warpgroup's piece of shared memory for O and, one after the other, P."""
        pointer = (storage.o.data_ptr() + warpgroup * (WGMMA_M * self.config.output_columns)).align(SHARED_ALIGNMENT)
        one_piece = cute.slice_(layout, (None, None, 0))
        return cute.make_tensor(cute.recast_ptr(pointer, one_piece.inner, dtype=self.dtype), one_piece.outer)

    @cute.jit
    def pipelines(self, storage):
        """Full and empty barriers of Q (one stage a warpgroup), K and V."""
        config = self.config

        def pipe(barriers, stages, consumer_warps, elements):
            return tma_pipe(barriers, stages, consumer_warps, elements * self.dtype.width // 8)

        warps = WARPS_PER_WARPGROUP * config.consumer_warpgroups
        return (
            pipe(storage.q_barriers, config.consumer_warpgroups, WARPS_PER_WARPGROUP, WGMMA_M * config.head_dim),
            pipe(storage.k_barriers, config.stages, warps, config.tile_n * config.head_dim),
            pipe(storage.v_barriers, config.stages, warps, config.tile_n * config.head_dim_v),
        )

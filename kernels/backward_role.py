"""What the two consumer warpgroups of the backward kernel for the widest heads have in common: backward_roles.py."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup as wgmma

from .args import BackwardRunTime
from .backward_products import issue
from .backward_role_products import RoleProducts
from .backward_scores import first_queries_of, own_statistics
from .backward_store import sums_barrier
from .barriers import BackwardBarrier, RoleBarrier
from .blocks import Band
from .config import OTHER_REGISTERS, WARPGROUP_THREADS, WGMMA_M, BackwardConfig
from .output import DirectOutput, Piece
from .phases import Phase, begin
from .products import new_accumulator, new_left_operand
from .schedule import SLOTS, Schedule, TileQueue
from .softmax import QUAD
from .workspace import write_piece


class Memory(NamedTuple):
    """Shared memory, and the pipelines that say what of it is full."""

    q_pipe: pipeline.PipelineTmaAsync
    do_pipe: pipeline.PipelineTmaAsync
    rows: cute.Tensor  # (LSE and delta of a step, stages)
    ds: cute.Tensor  # (tile_m, tile_n, stages)
    dq: cute.Tensor  # a part of each warpgroup's piece of dQ
    p: cute.Tensor  # two steps' P in the order of registers


class State(NamedTuple):
    """Where a warpgroup stands."""

    q: pipeline.PipelineState
    do: pipeline.PipelineState
    parity: Int32  # of the step: which buffers and barriers it uses


@dataclass(frozen=True)
class Role:
    """What both have in common. ``head`` and ``columns`` (of what they own) are theirs."""

    config: BackwardConfig
    dtype: type
    band: Band
    schedule: Schedule

    @cute.jit
    def run(
        self, lengths: tuple, output: cute.Tensor, shared: tuple, pipes: tuple, queue: TileQueue, run: BackwardRunTime
    ):
        """All tiles of this CTA. ``output``: dV or dK; ``shared``: K, V, Q, dO, the row statistics, dS, dQ and P."""
        config = self.config
        seqlen_q, seqlen_k, heads, heads_k, batch = lengths
        *_, s_rows, s_ds, s_dq, s_p = shared
        k_pipe, v_pipe, q_pipe, do_pipe = pipes
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        products = self.products(shared)
        memory = Memory(q_pipe, do_pipe, s_rows, s_ds, s_dq, s_p)
        consumer = pipeline.PipelineUserType.Consumer
        k_state, v_state = (pipeline.make_pipeline_state(consumer, 1) for _ in range(2))
        q_state = pipeline.make_pipeline_state(consumer, config.stages)
        do_state = pipeline.make_pipeline_state(consumer, config.do_stages)
        state = State(q_state, do_state, Int32(0))
        queue_state = pipeline.make_pipeline_state(consumer, SLOTS)
        own_key = thread // QUAD // 8 * 16 + thread // QUAD % 8
        index, tiles = self.schedule.first(), self.schedule.count(seqlen_k, run.head_parts, batch)
        while index < tiles:
            n_block, part, batch_index = self.schedule.coordinates(index, seqlen_k, run.head_parts, batch, run.section)
            head_k, head, last_head = run.heads_of(part, heads, heads_k)
            blocks = self.band.query_blocks(n_block, config.tile_m, seqlen_q, seqlen_k, run.right)
            first_key = n_block * config.tile_n + own_key
            first_queries = first_queries_of(self.band, first_key, seqlen_q, seqlen_k, run.right)
            total = new_accumulator(products.total_add, (WGMMA_M, self.columns))
            total.fill(0.0)
            scores = self.new_scores(products)
            operand = new_left_operand(scores, self.dtype)
            k_pipe.consumer_wait(k_state)
            v_pipe.consumer_wait(v_state)
            while head < last_head:
                state = self.head(products, memory, state, total, (scores, operand, first_queries), blocks, run)
                head += 1
            k_pipe.consumer_release(k_state)
            v_pipe.consumer_release(v_state)
            k_state.advance()
            v_state.advance()
            begin(Phase.EPILOGUE)
            self.store_total(output, total, (n_block, head_k, part, batch_index), first_key, run)
            begin(Phase.WAIT_TILE)
            index, queue_state = self.schedule.receive(queue, queue_state, index)
        # No barrier is left half full
        sums_barrier(BackwardBarrier.SUMS_FREE, Int32(self.warpgroup), arrive=False)
        begin(Phase.EXIT)

    @property
    def early_scores(self):
        """Whether registers hold dQ's piece beside scores and a 16-bit operand, so that all three products are in
        flight together.
        """
        held = self.columns // 2 + self.config.dq_columns // 2
        return held + self.config.tile_m // 2 + self.config.tile_m // 4 <= self.config.registers[1] - OTHER_REGISTERS

    @property
    def all_parts(self):
        return 0, self.config.sum_rounds

    @property
    def first_parts(self):
        """Parts of dQ that leave before the next scores are made: the first one, where that makes room for them."""
        room = self.config.dq_columns // self.config.sum_rounds >= self.config.tile_m
        return (0, 1) if room else self.all_parts

    @property
    def other_parts(self):
        return self.first_parts[1], self.config.sum_rounds

    def new_scores(self, products):
        return new_accumulator(products.scores_first, (WGMMA_M, self.config.tile_m))

    @cute.jit
    def store_total(self, output: cute.Tensor, total: cute.Tensor, where: tuple, first_key: Int32, run):
        """dV or dK of a K/V tile leaves: in the input's dtype, or as one of the parts to be added later."""
        n_block, head_k, part, batch = where
        if const_expr(self.config.split_heads):
            write_piece(output[batch, head_k, part - head_k * output.shape[2], n_block, None], total, Int32(0))
        else:
            if const_expr(self.scaled):
                for element in cutlass.range(cute.size(total), unroll_full=True):
                    total[element] = total[element] * run.scale
            thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
            piece = Piece(n_block, head_k, batch, Int32(self.warpgroup), thread, Boolean(False), first_key)
            DirectOutput(self.dtype, self.columns).store(output, None, total, None, piece)

    def statistics(self, memory: Memory, state: State):
        """This lane's share of what the role needs of a step's row statistics: LSE or delta."""
        first = self.warpgroup * self.config.tile_m
        return own_statistics(memory.rows[None, state.q.index], first, self.config.tile_m)

    @cute.jit
    def meet(self):
        """All threads of this warpgroup."""
        cute.arch.barrier(barrier_id=int(RoleBarrier.OWN) + self.warpgroup, number_of_threads=WARPGROUP_THREADS)

    @cute.jit
    def issue_scores(self, products: RoleProducts, scores: cute.Tensor, stage: Int32):
        """Start Sᵀ = K Qᵀ, or dPᵀ = V dOᵀ."""
        wgmma.fence()
        queries = products.queries[None, None, None, stage]
        issue(products.scores_first, products.scores_add, scores, products.keys, queries)

    @cute.jit
    def issue_total(self, products: RoleProducts, total: cute.Tensor, operand: cute.Tensor, stage: Int32):
        """Start dV += Pᵀ dO, or dK += dSᵀ Q."""
        wgmma.fence()
        issue(products.total_add, products.total_add, total, operand, products.rows[None, None, None, stage])

    @cute.jit
    def issue_dq(self, products: RoleProducts, parity: Int32):
        """Start dQ = dS K, this warpgroup's piece."""
        dq = new_accumulator(products.dq_first, (WGMMA_M, self.config.dq_columns))
        wgmma.fence()
        issue(products.dq_first, products.dq_add, dq, products.ds[None, None, None, parity], products.k_transposed)
        return dq

    @cute.jit
    def store_dq(self, memory: Memory, dq: cute.Tensor, parts: cutlass.Constexpr):
        """Hand parts of this warpgroup's piece of dQ to its store warp."""
        for part in cutlass.range_constexpr(parts[0], parts[1]):
            size = cute.size(dq) // self.config.sum_rounds
            own = cute.make_tensor(dq.iterator + part * size, cute.make_layout(size))
            sums_barrier(BackwardBarrier.SUMS_FREE, Int32(self.warpgroup), arrive=False)
            write_piece(memory.dq, own, Int32(self.warpgroup))
            sums_barrier(BackwardBarrier.SUMS_FULL, Int32(self.warpgroup), arrive=True)


def words_of(operand):
    """Registers of 16-bit scores, two to a word. No arithmetic is done with these: the type only suits workspace.py."""
    return cute.make_tensor(cute.recast_ptr(operand.iterator, dtype=Float32), cute.make_layout(cute.size(operand) // 2))


def arrive(barrier, parity):
    """The other warpgroup may go on."""
    cute.arch.barrier_arrive(barrier_id=int(barrier) + parity, number_of_threads=2 * WARPGROUP_THREADS)


def wait(barrier, parity):
    """Wait for the other warpgroup."""
    cute.arch.barrier(barrier_id=int(barrier) + parity, number_of_threads=2 * WARPGROUP_THREADS)

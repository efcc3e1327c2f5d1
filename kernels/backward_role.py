"""What the two consumer warpgroups of the backward kernel for the widest heads have in common: backward_roles.py."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup as wgmma

from .args import BackwardRunTime
from .backward_output import store_gradient
from .backward_products import issue
from .backward_role_products import RoleProducts
from .backward_scores import own_keys, own_statistics
from .backward_work import WorkSchedule
from .blocks import Band
from .config import WARPGROUP_THREADS, WGMMA_M, BackwardConfig
from .phases import Phase, begin
from .products import new_accumulator, new_left_operand
from .registers import kept, released_by_first_lane
from .schedule import SLOTS, TileQueue
from .score import ScoreHook
from .softmax import QUAD


class Memory(NamedTuple):
    """Shared memory, and the pipelines that say what of it is full."""

    q_pipe: pipeline.PipelineTmaAsync
    do_pipe: pipeline.PipelineTmaAsync
    p_pipe: pipeline.PipelineAsync
    rows: cute.Tensor  # (LSE and delta of a step, stages)
    p: cute.Tensor  # two steps' P in the order of registers
    thread: Int32  # of the warpgroup


class State(NamedTuple):
    """Where a warpgroup stands."""

    q: pipeline.PipelineState
    do: pipeline.PipelineState
    p: pipeline.PipelineState


@dataclass(frozen=True)
class Role:
    """What both have in common. ``head``, ``columns`` (of what they own) and ``end_of_p`` are theirs."""

    config: BackwardConfig
    dtype: type
    band: Band
    schedule: WorkSchedule

    @property
    def hook(self):
        return ScoreHook.of(self.config)

    @cute.jit
    def run(self, lengths: tuple, output: tuple, shared: tuple, pipes: tuple, queue: TileQueue, run: BackwardRunTime):
        """All tiles of this CTA. ``output``: of store_gradient; ``shared``: K, V, Q, dO, the row statistics and P, and
        so ``pipes``, but for the row statistics.
        """
        config = self.config
        k_pipe, v_pipe, q_pipe, do_pipe = released_by_first_lane(pipes[:4])
        thread = kept(cute.arch.thread_idx()[0] % WARPGROUP_THREADS)
        products = self.products(shared)
        memory = Memory(q_pipe, do_pipe, pipes[4], *shared[4:], thread)
        consumer = pipeline.PipelineUserType.Consumer
        k_state, v_state = (pipeline.make_pipeline_state(consumer, 1) for _ in range(2))
        q_state = pipeline.make_pipeline_state(consumer, config.stages)
        do_state = pipeline.make_pipeline_state(consumer, config.do_stages)
        state = State(q_state, do_state, pipeline.make_pipeline_state(self.end_of_p, config.score_stages))
        queue_state = pipeline.make_pipeline_state(consumer, SLOTS)
        own_key = thread // QUAD // 8 * 16 + thread // QUAD % 8
        work = self.schedule.receive_work(queue, queue_state)
        while work.n_block >= 0:
            seqlen_q, seqlen_k = work.lengths(lengths)
            lengths_and_bounds = seqlen_q, seqlen_k, run.right, run.left
            blocks = self.band.query_blocks(work.n_block, config.tile_m, *lengths_and_bounds)
            head = self.band.first_head(work, blocks)
            first_key = work.n_block * config.tile_n + own_key
            keys = own_keys(self.band, self.hook, first_key, seqlen_q, seqlen_k, run)
            total = new_accumulator(products.total_add, (WGMMA_M, self.columns))
            total.fill(0.0)
            operand = new_left_operand(self.new_scores(products), self.dtype)
            k_pipe.consumer_wait(k_state)
            v_pipe.consumer_wait(v_state)
            while head < work.last_head:
                keys.begin_head(self.hook, run, self.schedule.batch_entry(queue, queue_state, work), head)
                of_head = work.blocks_of(head, blocks)
                state = self.head(products, memory, state, total, operand, keys, of_head, run)
                head += 1
            k_pipe.consumer_release(k_state)
            v_pipe.consumer_release(v_state)
            k_state.advance()
            v_state.advance()
            begin(Phase.EPILOGUE)
            work = self.schedule.read_work(queue, queue_state)
            queue_state = self.schedule.give_back(queue, queue_state)
            factor = run.scale if const_expr(self.scaled) else None
            store_gradient(config, self.dtype, self.columns, output, total, work, Int32(0), first_key, factor)
            begin(Phase.WAIT_TILE)
            work = self.schedule.receive_work(queue, queue_state)
        self.schedule.give_back(queue, queue_state)
        begin(Phase.EXIT)

    def new_scores(self, products):
        return new_accumulator(products.scores_first, (WGMMA_M, self.config.tile_m))

    def statistics(self, memory: Memory, q_state):
        """This thread's share of what the role needs of a step's row statistics: LSE or delta."""
        first = self.warpgroup * self.config.tile_m
        return own_statistics(memory.rows[None, q_state.index], first, self.config.tile_m)

    @cute.jit
    def issue_scores(self, products: RoleProducts, stage: Int32):
        """Start Sᵀ = K Qᵀ, or dPᵀ = V dOᵀ."""
        scores = self.new_scores(products)
        wgmma.fence()
        queries = products.queries[None, None, None, stage]
        issue(products.scores_first, products.scores_add, scores, products.keys, queries)
        return scores

    @cute.jit
    def issue_total(self, products: RoleProducts, total: cute.Tensor, operand: cute.Tensor, stage: Int32):
        """Start dV += Pᵀ dO, or dK += dSᵀ Q."""
        wgmma.fence()
        issue(products.total_add, products.total_add, total, operand, products.rows[None, None, None, stage])


def words_of(operand):
    """Registers of 16-bit scores, two to a word. No arithmetic is done with these: the type only suits workspace.py."""
    return cute.make_tensor(cute.recast_ptr(operand.iterator, dtype=Float32), cute.make_layout(cute.size(operand) // 2))

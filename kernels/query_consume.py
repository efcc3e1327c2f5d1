"""The consumer warpgroups of the kernel that computes dQ by itself."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu import warpgroup as wgmma

from .args import RunTime
from .backward_products import issue, transposed
from .blocks import LEFT, NO_SIDE, Band, RowKeys, Sides
from .config import WARPGROUP_THREADS, WARPS_PER_WARPGROUP, WGMMA_M
from .mask import mask_scores
from .output import DirectOutput, Piece
from .phases import Phase, begin
from .products import convert, new_accumulator, new_left_operand, rows_and_columns
from .query_config import QueryConfig
from .registers import released_by_first_lane
from .schedule import SLOTS, Schedule, TileQueue
from .score import Pairs, ScoreHook, cap, known_with
from .sequence import behind
from .softmax import QUAD, ROWS


class QueryProducts(NamedTuple):
    """WGMMA instructions, and their operands in shared memory. Scores are queries by keys, as in the forward."""

    scores_first: cute.TiledMma  # S = Q Kᵀ and dP = dO Vᵀ, first step of the head dimension
    scores_add: cute.TiledMma  # the other steps
    dq_add: cute.TiledMma  # dQ += dS K, dS from registers
    q: cute.Tensor  # (.., head_dim / 16) of this warpgroup's queries
    do: cute.Tensor  # (.., head_dim_v / 16)
    k: cute.Tensor  # (.., head_dim / 16, stages)
    v: cute.Tensor  # (.., head_dim_v / 16, stages)
    k_transposed: cute.Tensor  # (.., tile_n / 16, stages)


class State(NamedTuple):
    """Where a warpgroup stands in the pipelines."""

    k: pipeline.PipelineState
    v: pipeline.PipelineState


class Rows(NamedTuple):
    """Of a thread's two rows."""

    lse: cute.Tensor  # in base 2
    delta: cute.Tensor
    keys: RowKeys
    slope: Float32 | None = None  # with ALiBi, here and below
    diagonal: Int32 | None = None  # the key on the first row's diagonal, counted from the tile's origin
    pairs: Pairs | None = None  # of the first row and the tile's origin; with hooks of a user's own


@dataclass(frozen=True)
class QueryConsumer:
    """Two warpgroups with 64 queries each, which share K and V. dQ of a block is issued in the next one's step, before
    that one's S and dP: exponentials run under dP, and the other warpgroup's products under what is left.
    """

    config: QueryConfig
    dtype: type
    band: Band
    schedule: Schedule
    statistics_rows: int  # queries of one line of row statistics

    @property
    def hook(self):
        return ScoreHook.of(self.config)

    @cute.jit
    def run(
        self,
        tensors: tuple,
        rows: cute.Tensor,
        dq: cute.Tensor,
        scale: Float32,
        shared: tuple,
        pipes: tuple,
        queue: TileQueue,
        run: RunTime,
    ):
        """All tiles of this CTA; one warpgroup's 64 queries of each. rows: (batch, heads, lines, 2 statistics_rows);
        dq: (seqlen_q, head_dim, heads, batch).
        """
        config = self.config
        tiled_q, _, tiled_k, _ = tensors
        q_pipe, k_pipe, v_pipe = released_by_first_lane(pipes)
        seqlen_q, _, heads, batch = tiled_q.tensor.shape
        seqlen_k = tiled_k.tensor.shape[0]
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # The bounds change nothing, but tell the compiler the range
        warpgroup = cutlass.min(cutlass.max(warp // WARPS_PER_WARPGROUP - 1, 0), config.consumer_warpgroups - 1)
        products = self.make_products(shared, warpgroup)
        consumer = pipeline.PipelineUserType.Consumer
        q_state = pipeline.make_pipeline_state(consumer, config.consumer_warpgroups)
        if warpgroup == 1:
            q_state.advance()
        state = State(
            pipeline.make_pipeline_state(consumer, config.stages),
            pipeline.make_pipeline_state(consumer, config.value_stages),
        )
        queue_state = pipeline.make_pipeline_state(consumer, SLOTS)
        lengths = seqlen_q, seqlen_k, heads, batch
        tile, tiles = self.schedule.begin_receiving(queue, queue_state, lengths)
        while self.schedule.exists(tile, tiles):
            place = self.schedule.place(tile, lengths, run)
            m_block, head, batch_index, sequence, first_line = place
            first_query = m_block * config.tile_m
            origin = self.band.origin(first_query, *sequence[:2], run.left)
            blocks = self.band.blocks(first_query, config.tile_m, *sequence[:2], run.right, run.left, origin)
            first_row = first_query + warpgroup * WGMMA_M + thread // QUAD // 8 * 16 + thread // QUAD % 8
            lines = behind(rows[batch_index, head, None, None], first_line)
            slope = self.hook.slope(run, place.batch_entry, head)
            pairs = Pairs(place.batch_entry, head, first_row, origin) if self.hook.of_pairs else None
            own = self.own_rows(lines, first_row, *sequence[:2], run, origin, slope, pairs)
            total = new_accumulator(products.dq_add, (WGMMA_M, config.head_dim))
            total.fill(0.0)
            q_pipe.consumer_wait(q_state)
            if blocks.end > 0:
                state = self.tile(products, k_pipe, v_pipe, state, total, own, blocks, run)
            q_pipe.consumer_release(q_state)
            for _ in cutlass.range_constexpr(config.consumer_warpgroups):
                q_state.advance()
            begin(Phase.EPILOGUE)
            self.finish(total, own, scale)
            m_block, head, batch_index, sequence, _ = self.schedule.place_again(queue, queue_state, place)
            piece = Piece(m_block, head, batch_index, warpgroup, thread, Boolean(False), first_row)
            DirectOutput(self.dtype, config.head_dim).store(sequence.queries_of(dq), None, total, None, piece)
            begin(Phase.WAIT_TILE)
            tile, queue_state = self.schedule.receive(queue, queue_state, tile)
        self.schedule.end_receiving(queue, queue_state)
        begin(Phase.EXIT)

    @cute.jit
    def make_products(self, shared: tuple, warpgroup: Int32) -> QueryProducts:
        """Instructions and operands of one warpgroup; ``shared`` holds Q, dO, K and V."""
        config, dtype = self.config, self.dtype
        s_q, s_do, s_k, s_v = shared
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        make = sm90.make_trivial_tiled_mma
        score_tile, dq_tile = (WGMMA_M, config.tile_n), (WGMMA_M, config.head_dim)
        scores_first = make(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), score_tile)
        scores_add = make(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), score_tile)
        source = wgmma.OperandSource.RMEM
        dq_add = make(dtype, dtype, k_major, mn_major, Float32, (1, 1, 1), dq_tile, a_source=source)
        scores_first.set(wgmma.Field.ACCUMULATE, False)
        scores_add.set(wgmma.Field.ACCUMULATE, True)
        dq_add.set(wgmma.Field.ACCUMULATE, True)
        scores, dq = scores_first.get_slice(0), dq_add.get_slice(0)
        return QueryProducts(
            scores_first,
            scores_add,
            dq_add,
            scores_first.make_fragment_A(scores.partition_A(s_q))[None, None, None, warpgroup],
            scores_first.make_fragment_A(scores.partition_A(s_do))[None, None, None, warpgroup],
            scores_first.make_fragment_B(scores.partition_B(s_k)),
            scores_first.make_fragment_B(scores.partition_B(s_v)),
            dq_add.make_fragment_B(dq.partition_B(transposed(s_k))),
        )

    @cute.jit
    def own_rows(
        self,
        rows: cute.Tensor,
        first_row: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        run: RunTime,
        origin: Int32,
        slope: Float32 | None,
        pairs: Pairs | None,
    ) -> Rows:
        """Of a thread, in a tile with this ``origin``."""
        lse, delta = (cute.make_rmem_tensor(ROWS, Float32) for _ in range(2))
        size = self.statistics_rows
        for row in cutlass.range_constexpr(ROWS):
            query = first_row + 8 * row
            # As for queries that see no key: P is 0
            lse[row], delta[row] = Float32(math.inf), Float32(0.0)
            if query < seqlen_q:
                line = query // size
                lse[row] = rows[line, query - line * size]
                delta[row] = rows[line, query - line * size + size]
        diagonal = None if slope is None else first_row + seqlen_k - seqlen_q - origin
        keys = self.band.row_keys(first_row, seqlen_q, seqlen_k, run, origin)
        return Rows(lse, delta, keys, slope, diagonal, pairs)

    @cute.jit
    def tile(self, products, k_pipe, v_pipe, state: State, total: cute.Tensor, own: Rows, blocks: tuple, run) -> State:
        """dQ of one tile into ``total``."""
        _, inner, full, end, _ = blocks
        ds = new_left_operand(new_accumulator(products.scores_first, (WGMMA_M, self.config.tile_n)), self.dtype)
        memory = (k_pipe, v_pipe)
        v_state = self.step(products, memory, state.k, state.v, total, ds, own, end - 1, run, True, self.band.sides)
        state = State(state.k, v_state)
        for block in cutlass.range(end - 2, full - 1, -1, unroll=1):
            state = self.next_step(products, memory, state, total, ds, own, block, run, self.band.sides)
        full = cutlass.min(full, end - 1)
        inner = cutlass.min(inner, full)
        for block in cutlass.range(full - 1, inner - 1, -1, unroll=1):
            state = self.next_step(products, memory, state, total, ds, own, block, run, NO_SIDE)
        if const_expr(self.band.left_bound):
            for block in cutlass.range(inner - 1, -1, -1, unroll=1):
                state = self.next_step(products, memory, state, total, ds, own, block, run, LEFT)
        self.issue_dq(products, total, ds, state.k.index)
        wgmma.wait_group(0)
        k_pipe.consumer_release(state.k)
        state.k.advance()
        return state

    @cute.jit
    def next_step(self, products, memory, state: State, total, ds, own: Rows, block, run, sides) -> State:
        """dQ of the block before and dS of ``block``."""
        following = state.k.clone()
        following.advance()
        self.issue_dq(products, total, ds, state.k.index)
        v_state = self.step(products, memory, following, state.v, total, ds, own, block, run, False, sides, state.k)
        return State(following, v_state)

    @cute.jit
    def step(
        self,
        products: QueryProducts,
        memory: tuple,
        k_state,
        v_state,
        total: cute.Tensor,
        ds: cute.Tensor,
        own: Rows,
        block: Int32,
        run: RunTime,
        first: cutlass.Constexpr[bool],
        sides: cutlass.Constexpr[Sides],
        before=None,
    ):
        """dS of a block in 16 bit; returns V's state behind it. ``before``: K's stage of the block before, whose dQ is
        in flight.
        """
        k_pipe, v_pipe = memory
        tile = (WGMMA_M, self.config.tile_n)
        k_pipe.consumer_wait(k_state)
        scores, dp = (new_accumulator(products.scores_first, tile) for _ in range(2))
        wgmma.fence()
        k = products.k[None, None, None, k_state.index]
        issue(products.scores_first, products.scores_add, scores, products.q, k)
        v_pipe.consumer_wait(v_state)
        wgmma.fence()
        v = products.v[None, None, None, v_state.index]
        issue(products.scores_first, products.scores_add, dp, products.do, v)
        wgmma.wait_group(1)
        if const_expr(not first):
            k_pipe.consumer_release(before)
        # Under dP. The conversion and the branch of a wait, which is over at once, hold this before the wait for dP.
        self.exponentiate(rows_and_columns(scores), own, block, run, sides)
        p = convert(scores, self.dtype)
        v_pipe.consumer_wait(v_state)
        wgmma.wait_group(0)
        v_pipe.consumer_release(v_state)
        probabilities, gradients = rows_and_columns(p), rows_and_columns(dp)
        for row in cutlass.range_constexpr(ROWS):
            for column in cutlass.range_constexpr(cute.size(gradients, mode=[1])):
                p_value = probabilities[row, column].to(Float32)
                gradients[row, column] = p_value * (gradients[row, column] - own.delta[row])
        convert(dp, self.dtype, target=ds)
        v_state.advance()
        return v_state

    @cute.jit
    def exponentiate(
        self,
        scores: cute.Tensor,
        own: Rows,
        block: Int32,
        run: RunTime,
        sides: cutlass.Constexpr[Sides],
    ):
        """P = exp2(S scale - LSE), in place; where there are factors, these."""
        bias, pairs, capped = None, None, scores
        if const_expr(self.config.alibi is not None):
            first_column = block * self.config.tile_n + 2 * (cute.arch.lane_idx() % QUAD)
            bias = self.hook.bias(own.slope, first_column - own.diagonal, scores[0, 0])
        if const_expr(self.hook.of_pairs):
            first_column = block * self.config.tile_n + 2 * (cute.arch.lane_idx() % QUAD)
            pairs = own.pairs._replace(key=own.pairs.key + known_with(scores[0, 0], first_column))
        if const_expr(self.config.softcap):
            cap(scores, run.cap_factor)
        if const_expr(self.hook.factors):
            capped = cute.make_rmem_tensor_like(scores)
            capped.store(scores.load())
        for row in cutlass.range_constexpr(ROWS):
            for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                lse = own.lse[row]
                exponent = self.hook.exponent(scores[row, column], bias, row, column, run, lse, pairs)
                scores[row, column] = self.hook.unless_hidden(exponent, lse, pairs, row, column, transposed=False)
        if const_expr(sides != NO_SIDE):
            first_column = block * self.config.tile_n + 2 * (cute.arch.lane_idx() % QUAD)
            mask_scores(scores, *self.band.columns(own.keys, first_column, sides, run), -math.inf)
        for row in cutlass.range_constexpr(ROWS):
            for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[row, column] = cute.math.exp2(scores[row, column], fastmath=True)
                if const_expr(self.hook.factors):
                    scores[row, column] = self.hook.factor(
                        scores[row, column], capped[row, column], bias, pairs, row, column, run, transposed=False
                    )

    @cute.jit
    def issue_dq(self, products: QueryProducts, total: cute.Tensor, ds: cute.Tensor, stage: Int32):
        """Start dQ += dS K."""
        wgmma.fence()
        issue(products.dq_add, products.dq_add, total, ds, products.k_transposed[None, None, None, stage])

    @cute.jit
    def finish(self, total: cute.Tensor, own: Rows, scale: Float32):
        """dQ times the scale. A query that sees no key gets 0, whatever dO held."""
        values = rows_and_columns(total)
        for row in cutlass.range_constexpr(ROWS):
            for column in cutlass.range(cute.size(values, mode=[1]), unroll_full=True):
                value = values[row, column] * scale
                if const_expr(self.band.blind_rows):
                    value = cutlass.select_(self.band.sees_none(own.keys, row), Float32(0.0), value)
                values[row, column] = value

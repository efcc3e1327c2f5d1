"""Gradients of packed sequences: tables of their tiles, then the backward's kernels."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .args import BackwardRunTime, RunTime
from .backward import BackwardKernel
from .backward_edges import THREADS
from .chunks import make_bounds
from .config import WARPGROUP_THREADS, BackwardConfig
from .packed_forward import one_batch, one_more_mode
from .packed_schedule import entry_of
from .score import ScoreHook
from .sequence import behind, rows_of
from .tile_table import Sections, Side, TileTable, entry_words


class PackedBackwardKernel:
    """Everything about the kernels that is fixed at compile time."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.main = BackwardKernel(config)
        band = self.main.band
        # Of K/V tiles, of the steps' queries, and of the tiles of queries_kernel.py where it computes dQ
        order = {"descending": config.descending, "level_end": config.right_bound and not config.turns}
        numbered = ScoreHook.of(config).numbered
        self.tables = [
            TileTable(config.tile_n, config.tile_m, True, band, config.tile_m, **order, numbered=numbered),
            TileTable(config.tile_m, config.tile_n, False, band, config.tile_m, marked=config.sink),
        ]
        if not config.sums:
            tile, query_band = self.main.queries.config, self.main.queries.band
            order = {"descending": config.right_bound, "level_end": config.right_bound}
            table = TileTable(tile.tile_m, tile.tile_n, False, query_band, config.tile_m, **order, numbered=numbered)
            self.tables.append(table)

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
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_q: cute.Tensor,
        seqused_k: cute.Tensor,
        rows: cute.Tensor,
        sums: cute.Tensor,
        turns: cute.Tensor,
        key_table: cute.Tensor,
        step_table: cute.Tensor,
        query_table: cute.Tensor,
        counter: cute.Tensor,
        scale_log2: Float32,
        scale: Float32,
        cap_factor: Float32 | None,
        right: Int32,
        left: Int32 | None,
        chunk: Int32 | None,
        section_rows: Int32,
        section_tiles: Int32,
        ctas: Int32,
        query_section_rows: Int32,
        query_section_tiles: Int32,
        query_ctas: Int32,
        fills_idle_sms: Int32,
        stream: cuda.CUstream,
    ):
        """q, k, v, out, do, dq, dk, dv: (total, heads, head_dim) in 16 bit, last stride 1. lse, dlse: (heads, total_q)
        float32. slopes, cu_seqlens, seqused: see PackedForwardKernel. Workspace in float32: rows (heads,
        workspace_lines, 2 tile_m); where dQ is summed, else None: sums (heads, lines, tile_m head_dim). In int32:
        turns (heads, lines, warpgroups), None where no order of sums is asked for; tables (table_lines, ENTRY_WORDS) of
        K/V tiles, of steps, and where dQ is not summed, else None, of Q tiles. section_rows and so on: see Sections.
        """
        config, main = self.config, self.main
        sides = Side(cu_seqlens_q, seqused_q, q.shape[0]), Side(cu_seqlens_k, seqused_k, k.shape[0])
        tables = (key_table, step_table, query_table)[: len(self.tables)]
        heads, heads_k = q.shape[1], k.shape[1]
        right, left = make_bounds(config, right, left, chunk)
        given = heads_k, Int32(0), Int32(1), fills_idle_sms, cap_factor, slopes
        run = BackwardRunTime(scale_log2, scale, right, left, None, *given)
        of_keys = Sections(heads_k, Int32(1), section_rows, section_tiles)
        of_queries = Sections(heads_k, heads // heads_k, query_section_rows, query_section_tiles)
        self.list_tiles(sides, tables, run, (of_keys, None, of_queries)).launch(
            grid=(len(tables), 1, 1), block=(self.tables[0].threads, 1, 1), stream=stream, use_pdl=True
        )
        edge_grid = ((step_table.shape[0] - 1) * heads, 1, 1)
        workspace = tuple(map(one_more_mode, (rows, sums, turns)))
        statistics = tuple(map(one_more_mode, (lse, dlse)))
        cap_scale = scale_log2 if const_expr(config.softcap and config.score is None) else None
        self.before((out, do), statistics, workspace, step_table, cap_scale).launch(
            grid=edge_grid, block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )
        matrices = tuple(map(one_batch, (k, v, q, do)))
        outputs = (one_batch(dk), None), (one_batch(dv), None)
        main.launch(matrices, workspace, outputs, counter, run, ctas, stream, key_table)
        if const_expr(not config.sums):
            query_run = RunTime(scale_log2, right, left, None, fills_idle_sms, cap_factor, slopes)
            q_do_k_v = (*matrices[2:], *matrices[:2])
            given = counter, scale, query_run, query_ctas, stream, query_table
            main.queries.launch(q_do_k_v, workspace[0], one_batch(dq), *given)
        else:
            threads = WARPGROUP_THREADS * config.consumer_warpgroups
            self.behind(workspace[1], one_batch(dq), scale, right, step_table).launch(
                grid=edge_grid, block=(threads, 1, 1), stream=stream, use_pdl=True
            )

    @cute.kernel
    def list_tiles(self, sides: tuple, tables: tuple, run: BackwardRunTime, sections: tuple):
        """A CTA a table."""
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        for index in cutlass.range_constexpr(len(self.tables)):
            if cute.arch.block_idx()[0] == index:
                self.tables[index].run(*sides, tables[index], run, sections[index])

    @cute.kernel
    def before(self, outs: tuple, statistics: tuple, workspace: tuple, table: cute.Tensor, cap_scale):
        """See Prologue."""
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        heads = statistics[0].shape[1]
        (block, seqlen_q, seqlen_k, offset_q, _, first_line), head = self.step_of(table, heads)
        # Rows of no sequence have no statistics, and those without keys for the sink only: no product meets them
        if block >= 0 and seqlen_k > (-1 if self.config.sink else 0):
            own = (rows_of(one_more_mode(tensor), offset_q, seqlen_q, mode=1) for tensor in outs)
            own_statistics = (
                None if each is None else rows_of(each, offset_q, seqlen_q, mode=2) for each in statistics
            )
            lines = (None if each is None else lines_of(each, first_line) for each in workspace)
            thread, place = cute.arch.thread_idx()[0], (block, head, 0)
            self.main.prologue.run(thread, place, *own, *own_statistics, *lines, cap_scale)

    @cute.kernel
    def behind(self, sums: cute.Tensor, dq: cute.Tensor, scale: Float32, right, table: cute.Tensor):
        """See Epilogue."""
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        (block, seqlen_q, seqlen_k, offset_q, _, first_line), head = self.step_of(table, dq.shape[2])
        if block >= 0:
            own = lines_of(sums, first_line), rows_of(dq, offset_q, seqlen_q)
            self.main.epilogue.queries((block, head, 0), *own, scale, seqlen_k, right)

    @cute.jit
    def step_of(self, table: cute.Tensor, heads: Int32):
        """``(entry, head)`` of a CTA; the entry's block is -1 where there is no more."""
        place = cute.arch.block_idx()[0] // heads
        block, *others = entry_of(table, place, entry_words(False))
        block = cutlass.select_(place < table[0, 0], block, Int32(-1))
        return (block, *others), cute.arch.block_idx()[0] - place * heads


def lines_of(tensor, first_line):
    """A sequence's lines of (1, heads, lines, ..)."""
    moved = behind(cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[2, 1, 0, 3])), first_line)
    return cute.make_tensor(moved.iterator, tensor.layout)

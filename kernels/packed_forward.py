"""Forward attention of packed sequences: a table of their tiles, then the forward kernel."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from .args import RunTime
from .chunks import make_bounds
from .config import ForwardConfig
from .forward import ForwardKernel
from .tile_table import Sections, Side, TileTable


def one_batch(tensor):
    """(total, heads, columns) as (total, columns, heads, 1)."""
    layout = cute.select(tensor.layout, mode=[0, 2, 1])
    return cute.make_tensor(tensor.iterator, cute.make_layout((*layout.shape, 1), stride=(*layout.stride, 0)))


def one_more_mode(tensor):
    """A tensor with a batch of 1 in front; None stays None."""
    if tensor is None:
        return None
    return cute.make_tensor(
        tensor.iterator, cute.make_layout((1, *tensor.layout.shape), stride=(0, *tensor.layout.stride))
    )


class PackedForwardKernel:
    """Everything about the kernels that is fixed at compile time."""

    def __init__(self, config: ForwardConfig):
        self.config = config
        self.main = ForwardKernel(config)
        order = {"descending": config.right_bound, "level_end": config.right_bound}
        told = {"numbered": self.main.hook.numbered, "marked": config.sink}
        self.table = TileTable(config.tile_m, config.tile_n, False, self.main.band, **order, **told)

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
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_q: cute.Tensor,
        seqused_k: cute.Tensor,
        table: cute.Tensor,
        counter: cute.Tensor,
        scale_log2: Float32,
        cap_factor: Float32 | None,
        right: Int32,
        left: Int32 | None,
        chunk: Int32 | None,
        section_rows: Int32,
        section_tiles: Int32,
        ctas: Int32,
        fills_idle_sms: Int32,
        stream: cuda.CUstream,
    ):
        """q, k, v, out: (total, heads, head_dim) in 16 bit, last stride 1; In float32: lse (heads, total_q);
        sink (heads) and slopes (batch, heads), None where there are none. In int32: cu_seqlens (batch + 1), seqused
        (batch) or None, table (table_lines, ENTRY_WORDS): workspace. section_rows and section_tiles: see Sections.
        """
        bounds = make_bounds(self.config, right, left, chunk)
        run = RunTime(scale_log2, *bounds, None, fills_idle_sms, cap_factor, slopes, sink)
        sides = Side(cu_seqlens_q, seqused_q, q.shape[0]), Side(cu_seqlens_k, seqused_k, k.shape[0])
        heads, heads_k = q.shape[1], k.shape[1]
        sections = Sections(heads_k, heads // heads_k, section_rows, section_tiles)
        self.list_tiles(sides, table, run, sections).launch(
            grid=(1, 1, 1), block=(self.table.threads, 1, 1), stream=stream, use_pdl=True
        )
        tensors = tuple(map(one_batch, (q, k, v, out)))
        self.main.launch(tensors, one_more_mode(lse), counter, run, ctas, stream, table)

    @cute.kernel
    def list_tiles(self, sides: tuple, table: cute.Tensor, run: RunTime, sections: Sections):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        self.table.run(*sides, table, run, sections)

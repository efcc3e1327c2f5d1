"""launch_packed.py, and what autograd keeps of packed sequences, without a GPU."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from hopper_fa3 import launch, launch_packed, ops, plan
from hopper_fa3.kernels import table_size
from hopper_fa3.problem import BackwardStatic, Packed, Static
from hopper_fa3.problem_packed import PackedProblem

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
FORWARD = (
    "q", "k", "v", "out", "lse", "sink", "slopes", *LENGTHS, "table", "counter", "scale_log2", "cap_factor", "right",
    "left", "chunk", "section_rows", "section_tiles", "ctas", "fills_idle_sms",
)  # fmt: skip
BACKWARD = (
    "q", "k", "v", "out", "lse", "do", "dlse", "slopes", "dq", "dk", "dv", *LENGTHS, "rows", "sums", "turns",
    "key_table", "step_table", "query_table", "counter", "scale_log2", "scale", "cap_factor", "right", "left", "chunk",
    "section_rows", "section_tiles", "ctas", "query_section_rows", "query_section_tiles", "query_ctas",
    "fills_idle_sms",
)  # fmt: skip
SMS = 132


class Kernels:
    """Stand in for the compiled kernels: record what they get, and write results that can be recognised."""

    def __init__(self):
        self.asked, self.calls = [], []

    def compiled(self, static, chosen):
        self.asked.append((static, chosen))
        return self.backward if isinstance(static, BackwardStatic) else self.forward

    def forward(self, *given):
        got = SimpleNamespace(**dict(zip(FORWARD, given, strict=True)))
        assert all(launch.tma_reads(x) for x in (got.q, got.k, got.v, got.out)) and got.lse.is_contiguous()
        self.calls.append(got)
        got.out.fill_(5.0)
        got.lse.fill_(7.0)

    def backward(self, *given):
        got = SimpleNamespace(**dict(zip(BACKWARD, given, strict=True)))
        assert all(launch.tma_reads(x) for x in (got.q, got.k, got.v, got.out, got.do))
        assert all(x.is_contiguous() for x in (got.lse, got.dq, got.dk, got.dv, got.rows))
        self.calls.append(got)
        for value, gradient in enumerate((got.dq, got.dk, got.dv), 1):
            gradient.fill_(value)


@pytest.fixture
def kernels(monkeypatch):
    """The kernels of any problem, and CPU tensors serve as those of a GPU."""
    found = Kernels()
    monkeypatch.setitem(sys.modules, "hopper_fa3.compile", SimpleNamespace(compiled=found.compiled))
    monkeypatch.setattr(launch_packed, "multiprocessors", lambda device: SMS)
    monkeypatch.setattr(launch_packed, "tile_counter", lambda device: "counter")
    monkeypatch.setattr(launch, "_unread", {})
    return found


SHORT_TILES = {"early_release": True, "predicated_output": True, "prefetch_keys": True}


def inputs(total_q=700, total_k=900, batch=3, heads=4, heads_k=2, head_dim=16, head_dim_v=8, used=(False, False)):
    generator = torch.Generator().manual_seed(0)
    shapes = ((total_q, heads, head_dim), (total_k, heads_k, head_dim), (total_k, heads_k, head_dim_v))
    tensors = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    ends = [torch.linspace(0, total, batch + 1).int() for total in (total_q, total_k)]
    return tensors, (*ends, *(torch.ones(batch, dtype=torch.int32) if given else None for given in used))


def asked(tensors, lengths, **options):
    cu_seqlens_q, cu_seqlens_k, *used = lengths
    return PackedProblem.from_tensors(*tensors, cu_seqlens_q, cu_seqlens_k, 10**6, 10**6, *used, **options)


def run(tensors, lengths, *, want_lse=True, given=None, plan=None, sm_margin=0, **options):
    problem = asked(tensors, lengths, **options)
    recipe = launch_packed.prepare(problem, *tensors, out=given, plan=plan, sm_margin=sm_margin)
    return launch_packed.execute(recipe, *tensors, lengths, given, want_lse=want_lse)


def test_what_a_kernel_is_launched_with(kernels):
    tensors, lengths = inputs(used=(True, False))
    out, lse = run(tensors, lengths, softmax_scale=-0.5, window_size=(-1, 3))
    (got,) = kernels.calls
    assert [got.q, got.k, got.v] == list(tensors) and got.out is out and got.lse is lse
    assert [getattr(got, name) for name in LENGTHS] == list(lengths)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((700, 4, 8), torch.bfloat16, (4, 700), torch.float32)
    assert out.is_contiguous() and lse.is_contiguous() and (out == 5).all() and (lse == 7).all()
    # Tiles of 192 queries: 3 are full, and one of each range of rows may not be
    assert got.table.shape == (1 + 3 + 2 * 3 + 2, 8) and got.table.is_contiguous() and got.table.dtype == torch.int32
    assert (got.counter, got.scale_log2, got.right, got.left) == ("counter", launch.scale_log2(-0.5), 3, None)
    # 24 values of 2 bytes a row of K and V in 32 MB; 1.8 tiles for each SM
    assert (got.section_rows, got.section_tiles) == (2**25 // 48, 237)
    assert (got.ctas, got.fills_idle_sms) == (48, 1)
    assert kernels.asked == [
        (Static("bfloat16", 64, 64, True, False, True, Packed(True, False)), plan.TABLE[64, 64, True])
    ]


def test_options(kernels):
    tensors, lengths = inputs(total_q=70_000)
    chosen = plan.Plan(64, 128, pingpong=False)
    run(tensors, lengths, plan=chosen, sm_margin=32)
    (got,) = kernels.calls
    assert (got.ctas, got.fills_idle_sms, got.right, got.left) == (100, 0, 69_999, None)
    assert kernels.asked[0][1] == chosen and kernels.asked[0][0].packed == Packed(False, False)


def test_an_unread_lse_shares_memory(kernels):
    tensors, lengths = inputs()
    first, second = (run(tensors, lengths, want_lse=False)[1] for _ in range(2))
    assert first.data_ptr() == second.data_ptr() and first.shape == (4, 700)


@pytest.mark.parametrize("none", [{"total_q": 0}, {"total_k": 0}, {"batch": 0}])
def test_no_work_is_not_launched(none, kernels):
    tensors, lengths = inputs(**none)
    out, lse = run(tensors, lengths)
    assert not kernels.asked and out.shape == (tensors[0].shape[0], 4, 8)
    assert not out.any() and (lse == -math.inf).all()
    leaves = [x.requires_grad_() for x in tensors]
    recipe = launch_packed.prepare(asked(leaves, lengths), *leaves)
    out, _ = ops.PackedAttention.apply(*leaves, None, None, recipe, *lengths)
    for gradient, x in zip(torch.autograd.grad(out, leaves, torch.ones_like(out)), leaves, strict=True):
        assert gradient.shape == x.shape and not gradient.any()
    assert not kernels.asked


def test_what_tma_cannot_read_is_copied(kernels):
    tensors, lengths = inputs()
    strided = [torch.empty(*x.shape[:2], x.shape[2] + 1, dtype=x.dtype)[..., :-1].copy_(x) for x in tensors]
    out = torch.zeros(700, 4, 9, dtype=torch.bfloat16)[..., :-1]
    result, _ = run(strided, lengths, given=out)
    (got,) = kernels.calls
    assert all(torch.equal(a, b) for a, b in zip((got.q, got.k, got.v), tensors, strict=True))
    assert result is out and (out == 5).all()


def gradients(tensors, lengths, through=("out", "lse"), wanted="qkv", deterministic=False, **options):
    leaves = [x.detach().requires_grad_(name in wanted) for name, x in zip("qkv", tensors, strict=True)]
    recipe = launch_packed.prepare(asked(leaves, lengths, **options), *leaves, deterministic=deterministic)
    results = ops.PackedAttention.apply(*leaves, None, None, recipe, *lengths)
    used = [result for name, result in zip(("out", "lse"), results, strict=True) if name in through]
    torch.autograd.backward(used, [torch.ones_like(x) for x in used])
    return [x.grad for x in leaves]


def test_what_the_gradients_kernels_are_launched_with(kernels):
    tensors, lengths = inputs(used=(False, True))
    found = gradients(tensors, lengths, softmax_scale=-0.5, causal=True)
    forward, got = kernels.calls
    assert all(torch.equal(getattr(got, name), x) for name, x in zip("qkv", tensors, strict=True))
    assert got.out.data_ptr() == forward.out.data_ptr() and got.lse.data_ptr() == forward.lse.data_ptr()
    assert [getattr(got, name) for name in LENGTHS] == list(lengths)
    for value, (gradient, x) in enumerate(zip(found, tensors, strict=True), 1):
        assert gradient.shape == x.shape and (gradient == value).all()
    # Lines of 128 queries: 5 are full, and each of 3 sequences may begin a new one
    assert got.rows.shape == (4, 9, 256) and got.sums.shape == (4, 9, 128 * 64) and got.turns is None
    # Tiles of 128 keys in 3 sequences, what each leaves, and 2 edges; of 128 queries
    assert (got.key_table.shape, got.step_table.shape) == ((1 + 7 + 8, 8), (1 + 5 + 5, 8))
    assert (got.query_table, got.counter) == (None, "counter")
    assert (got.scale_log2, got.scale, got.right, got.left) == (launch.scale_log2(-0.5), -0.5, 0, None)
    # Q and dO, and dQ's sums in 4 bytes, of two query heads
    assert (got.section_rows, got.section_tiles) == (2**25 // (2 * (48 + 64)), 237)
    assert (got.ctas, got.query_ctas, got.fills_idle_sms) == (32, 0, 1)
    static = BackwardStatic("bfloat16", 64, 64, True, True, False, packed=Packed(False, True))
    assert kernels.asked[-1] == (static, plan.BackwardPlan(128, **SHORT_TILES))


def test_wide_heads_have_a_table_of_query_tiles(kernels):
    tensors, lengths = inputs(head_dim=256, head_dim_v=200)
    gradients(tensors, lengths, through=("out",), deterministic=True)
    got = kernels.calls[-1]
    assert (got.sums, got.turns, got.dlse) == (None, None, None)
    assert got.query_table.shape == (1 + 700 // 128 + 5, 8) and got.key_table.shape == (1 + 900 // 64 + 5, 8)
    assert (got.ctas, got.query_ctas) == (40, 44)
    assert not kernels.asked[-1][0].deterministic  # kernels without sums are the same for both


def test_deterministic_sums_have_turns(kernels):
    tensors, lengths = inputs(head_dim=128, head_dim_v=128)
    gradients(tensors, lengths, deterministic=True)
    got = kernels.calls[-1]
    assert got.turns.shape == (4, 700 // 64 + 4, 2) and got.turns.dtype == torch.int32


def test_only_wanted_gradients_are_given(kernels):
    tensors, lengths = inputs()
    dq, dk, dv = gradients(tensors, lengths, wanted="k")
    assert dq is None and dv is None and (dk == 2).all()


def test_a_second_derivative_is_refused(kernels):
    tensors, lengths = inputs()
    leaves = [x.requires_grad_() for x in tensors]
    recipe = launch_packed.prepare(asked(leaves, lengths), *leaves)
    out, _ = ops.PackedAttention.apply(*leaves, None, None, recipe, *lengths)
    (dq,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="once only"):
        dq.sum().backward()


@pytest.mark.parametrize(("rows", "tile", "batch", "used"), [(0, 64, 3, False), (5, 64, 900, True), (900, 64, 3, True)])
def test_tables_have_room_for_the_worst_lengths(rows, tile, batch, used):
    """Each range of rows that has any ends with a tile that is not full: at worst of one row."""
    ranges = min(rows, (2 * batch if used else batch) + 2)
    worst = 0 if not ranges else ranges - 1 + -(-(rows - ranges + 1) // tile)
    assert table_size.table_lines(rows, tile, batch, used) >= table_size.HEADER + worst


def test_what_decides_the_sections():
    """Rows and tiles, not how many heads: that follows from the longest sequence, which no host knows."""
    tensors, lengths = inputs(heads=8, heads_k=2, head_dim=128, head_dim_v=128)
    for causal in (False, True):
        problem, budget = asked(tensors, lengths, causal=causal), plan.L2_BUDGET_BYTES // (1 if causal else 2)
        tiles = 237 if causal else 118
        assert plan.packed_sections(problem, SMS) == (budget // 512, tiles)
        for deterministic in (False, True):
            config = plan.backward_config(problem.backward_static(False, deterministic), plan.BACKWARD_PLAN)
            found = plan.packed_backward_sections(problem, config, SMS)
            # Those that wait for each other are spread over more heads
            assert found == ((plan.L2_BUDGET_BYTES if deterministic else budget) // (4 * 1024), tiles)


# Softcap, sinks, slopes, chunks

ENDS = torch.tensor([2, 2, 5, 9, 12], dtype=torch.int32)  # of 14 rows
USED = {None: [2, 3, 4, 5, 6, 7, 8, 9, 10, 11], (0, 2, 4, 0): [2, 3, 5, 6, 7, 8]}


@pytest.mark.parametrize("used", USED)
def test_rows_that_sequences_use(used):
    counts = None if used is None else torch.tensor(used, dtype=torch.int32)
    found = launch_packed.used_queries((ENDS, ENDS, counts, None), 14)
    assert found.nonzero().flatten().tolist() == USED[used]
    assert not launch_packed.used_queries((ENDS[:1], ENDS[:1], None, None), 14).any()


def hook(batch=3, heads=4):
    return {"sink": torch.arange(heads).to(torch.bfloat16), "alibi_slopes": torch.arange(heads).float()}


def test_what_changed_scores_are_launched_with(kernels):
    tensors, lengths = inputs()
    problem = asked(tensors, lengths, softcap=15.0, attention_chunk=100, softmax_scale=-0.5, **hook())
    recipe = launch_packed.prepare(problem, *tensors, sink=hook()["sink"])
    launch_packed.execute(recipe, *tensors, lengths, **hook())
    per_sequence = torch.rand(3, 4)
    launch_packed.execute(recipe, *tensors, lengths, alibi_slopes=per_sequence)
    got, other = kernels.calls
    assert got.sink.dtype == torch.float32 and got.sink.tolist() == [0, 1, 2, 3] and other.sink is None
    assert got.slopes.tolist() == [[0, 1, 2, 3]] * 3 and torch.equal(other.slopes, per_sequence)
    assert (got.scale_log2, got.cap_factor) == launch.scales(problem) and got.cap_factor < 0
    assert (got.right, got.left, got.chunk) == (699, 900, 100)
    static, _ = kernels.asked[0]
    assert (static.softcap, static.sink, static.alibi, static.chunked) == (True, True, "distance", True)


def sink_gradients(kernels, tensors, lengths, sink, options, **through):
    recorded = sink.clone().requires_grad_()
    problem = asked(tensors, lengths, sink=recorded, **options)
    recipe = launch_packed.prepare(problem, *tensors, sink=recorded)
    results = ops.PackedAttention.apply(*tensors, recorded, options.get("alibi_slopes"), recipe, *lengths)
    found = torch.autograd.grad(results, recorded, tuple(torch.ones_like(x) for x in results))[0]
    return found, results


def test_the_gradient_of_a_sink_comes_from_the_row_statistics(kernels):
    """Of lines that the kernels write; what they leave as it was has no weight."""
    tensors, lengths = inputs()
    options = {"softcap": 2.0, "alibi_slopes": torch.ones(3, 4), "causal": True}
    sink, statistics = torch.tensor([0.5, -math.inf, 0.0, 1.0]), torch.randn(4, 3, 2, 64, dtype=torch.float64)
    plain = kernels.backward

    def backward(*given):
        plain(*given)
        rows = kernels.calls[-1].rows
        assert (rows == math.inf).all()
        rows[:, 2:5].copy_(statistics.flatten(-2))

    kernels.backward = backward
    found, _ = sink_gradients(kernels, tensors, lengths, sink, options)
    got = kernels.calls[-1]
    assert torch.equal(got.slopes, options["alibi_slopes"]) and got.cap_factor is not None and got.chunk is None
    lse, delta = statistics.unbind(-2)
    weights = torch.exp2((sink.double() - 2.0)[:, None, None] * math.log2(math.e) - lse)
    torch.testing.assert_close(found.double(), -(weights * delta).sum((1, 2)), rtol=1e-5, atol=1e-5)
    static, _ = kernels.asked[-1]
    assert static.sink and static.softcap and static.alibi == "linear"


@pytest.mark.parametrize("used", [False, True])
def test_a_sink_without_any_key(used, kernels):
    """The LSE of rows that sequences use, where its gradient is the sink's."""
    tensors, lengths = inputs(total_k=0, used=(used, False))
    lengths = (lengths[0].clamp(10, 690), *lengths[1:])
    sink = torch.tensor([0.5, -math.inf, 0.0, 1.0])
    found, (out, lse) = sink_gradients(kernels, tensors, lengths, sink, {})
    rows = 3 if used else 680
    assert not kernels.asked and not out.any() and found.tolist() == [rows, 0, rows, rows]
    inside = launch_packed.used_queries(lengths, 700)
    assert inside.sum() == rows and (lse[:, ~inside] == -math.inf).all()
    assert torch.equal(lse[:, inside], sink[:, None].expand(4, rows))

"""launch_backward.py and ops.py without a GPU: what the kernels of a backward get, and what autograd keeps."""

import functools
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from hopper_fa3 import launch, launch_backward, ops, plan
from hopper_fa3.problem import BackwardStatic, Problem

NAMES = (
    "q", "k", "v", "out", "lse", "do", "dlse", "slopes", "dq", "dk", "dv", "rows", "sums", "turns", "dk_parts",
    "dv_parts", "counter", "scale_log2", "scale", "cap_factor", "right", "left", "chunk", "section", "head_parts",
    "whole_tiles", "tile_parts", "ctas", "query_section", "query_ctas", "fills_idle_sms",
)  # fmt: skip
FORWARD = (
    "q", "k", "v", "out", "lse", "sink", "slopes", "counter", "scale_log2", "cap_factor", "right", "left", "chunk",
    "section", "ctas", "fills_idle_sms",
)  # fmt: skip


class Kernels:
    """Stand in for the compiled kernels: record what they get, and write results that can be recognised."""

    def __init__(self):
        self.asked, self.calls, self.forwards = [], [], 0

    def compiled(self, static, chosen):
        self.asked.append((static, chosen))
        return self.backward if isinstance(static, BackwardStatic) else self.forward

    def forward(self, *given):
        got = dict(zip(FORWARD, given, strict=True))
        self.forwards += 1
        got["out"].fill_(5.0)
        got["lse"].fill_(7.0)

    def backward(self, *given):
        got = SimpleNamespace(**dict(zip(NAMES, given, strict=True)))
        assert all(launch.tma_reads(x) for x in (got.q, got.k, got.v, got.out, got.do))
        assert all(x.is_contiguous() for x in (got.lse, got.dq, got.dk, got.dv, got.rows))
        assert got.sums is None or got.sums.is_contiguous()
        assert got.dlse is None or got.dlse.stride(-1) == 1
        self.calls.append(got)
        for value, gradient in enumerate((got.dq, got.dk, got.dv), 1):
            gradient.fill_(value)
        got.rows.fill_(1.0)


@pytest.fixture
def kernels(monkeypatch):
    """The kernels of any problem, and CPU tensors serve as those of a GPU with 132 SMs."""
    found = Kernels()
    monkeypatch.setitem(sys.modules, "hopper_fa3.compile", SimpleNamespace(compiled=found.compiled))
    for module in (launch, launch_backward):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
        monkeypatch.setattr(module, "tile_counter", lambda device: "counter")
    monkeypatch.setattr(launch, "_unread", {})
    return found


def inputs(seqlen_q=300, seqlen_k=310, heads=4, heads_k=2, head_dim=16, head_dim_v=8, batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = ((seqlen_q, heads, head_dim), (seqlen_k, heads_k, head_dim), (seqlen_k, heads_k, head_dim_v))
    return [torch.randn(batch, *shape, generator=generator).to(torch.bfloat16) for shape in shapes]


def results(q, v):
    """(out, lse, dout, dlse) of these inputs, of any values."""
    out = torch.ones(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    lse = torch.ones(q.shape[0], q.shape[2], q.shape[1])
    return out, lse, 2 * out, 3 * lse


def execute(q, k, v, *, dout=None, dlse=None, deterministic=False, sm_margin=0, **options):
    recipe = launch.GradientRecipe(Problem.from_tensors(q, k, v, **options), deterministic, sm_margin, {})
    out, lse, *_ = results(q, v)
    return launch_backward.execute(recipe, q, k, v, out, lse, dout, dlse)[:3]


def test_what_the_kernels_are_launched_with(kernels):
    q, k, v = inputs(heads=2)
    out, lse, dout, dlse = results(q, v)
    problem = Problem.from_tensors(q, k, v, softmax_scale=-0.5, window_size=(-1, 3))
    recipe = launch.GradientRecipe(problem, False, 0, {})
    *gradients, dsink = launch_backward.execute(recipe, q, k, v, out, lse, dout, dlse)
    (got,) = kernels.calls
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "do": dout, "dlse": dlse}
    assert all(getattr(got, name) is tensor for name, tensor in given.items())
    for gradient, tensor, value in zip(gradients, (q, k, v), (1, 2, 3), strict=True):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype) and (gradient == value).all()
    # Three steps of 128 queries: LSE and delta, and 64 columns of dQ
    assert got.rows.shape == (2, 2, 3, 256) and got.sums.shape == (2, 2, 3, 128 * 64)
    assert got.rows.dtype == got.sums.dtype == torch.float32
    assert (got.turns, got.dk_parts, got.dv_parts, got.counter) == (None, None, None, "counter")
    # 3 K/V tiles of 2 heads of 2 batches; all heads fit in L2
    assert (got.scale_log2, got.scale, got.right) == (launch.scale_log2(-0.5), -0.5, 3)
    assert (got.section, got.head_parts, got.ctas) == (4, 2, 12)
    assert (dsink, got.slopes, got.cap_factor) == (None, None, None)
    assert kernels.asked == [(BackwardStatic("bfloat16", 64, 64, True, True, False), plan.BackwardPlan(128))]


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "rows", "columns"),
    [(64, 64, 128, 64), (96, 64, 64, 96), (64, 96, 64, 64), (128, 128, 64, 128), (72, 128, 64, 96)],
)
def test_the_workspace(head_dim, head_dim_v, rows, columns, kernels):
    """Linear in the length: row statistics, and float32 sums of dQ."""
    execute(*inputs(head_dim=head_dim, head_dim_v=head_dim_v))
    (got,) = kernels.calls
    blocks = -(-300 // rows)
    assert got.rows.shape == (2, 4, blocks, 2 * rows) and got.sums.shape == (2, 4, blocks, rows * columns)


@pytest.mark.parametrize("deterministic", [False, True])
def test_wide_heads_sum_no_dq(deterministic, kernels):
    """Their dQ has a kernel of its own, which gives the same bits every time: one set of kernels serves both."""
    q, k, v = inputs(seqlen_q=1500, head_dim=200, head_dim_v=256)
    execute(q, k, v, dout=results(q, v)[2], deterministic=deterministic)
    (got,) = kernels.calls
    assert (got.sums, got.turns, got.counter) == (None, None, "counter")
    assert got.rows.shape == (2, 4, 24, 128)
    # 5 K/V tiles of 64 for 2 heads of 2 batches, their query heads in two parts; 12 tiles of 128 queries for 4 heads
    assert (got.ctas, got.query_ctas, got.query_section) == (40, 96, 1)
    chosen = plan.BackwardPlan(64, split_heads=True)
    assert kernels.asked == [(BackwardStatic("bfloat16", 256, 256, False, False, False), chosen)]


def test_calls_of_one_recipe_are_planned_once(kernels):
    q, k, v = inputs()
    out, lse, dout, dlse = results(q, v)
    recipe = launch.GradientRecipe(Problem.from_tensors(q, k, v), False, 0, {})
    for given in (None, dlse, None, dlse):
        launch_backward.execute(recipe, q, k, v, out, lse, dout, given)
    assert [static.lse_gradient for static, _ in kernels.asked] == [False, True] and len(kernels.calls) == 4
    first, second = (kernels.calls[place].sums for place in (0, 2))
    assert first.data_ptr() != second.data_ptr()  # workspace is each call's own


def test_without_a_gradient_of_out_it_is_zero(kernels):
    q, k, v = inputs()
    execute(q, k, v, dlse=results(q, v)[3])
    (got,) = kernels.calls
    assert got.do.shape == got.out.shape and got.do.dtype == q.dtype and not got.do.any()


def test_without_a_gradient_of_the_lse_other_kernels_run(kernels):
    q, k, v = inputs()
    execute(q, k, v, dout=results(q, v)[2])
    assert kernels.calls[0].dlse is None and not kernels.asked[0][0].lse_gradient


def test_gradients_that_arrive_in_any_layout(kernels):
    """As after a sum (expanded), or a transposition."""
    q, k, v = inputs(head_dim_v=8)
    out, lse, *_ = results(q, v)
    expanded = torch.tensor(4.0, dtype=q.dtype).expand(out.shape)
    transposed = torch.arange(lse.numel(), dtype=torch.float32).reshape(2, 300, 4).transpose(1, 2)
    for dout, dlse in ((expanded, transposed), (out, torch.tensor(2.0).expand(lse.shape))):
        execute(q, k, v, dout=dout, dlse=dlse)
        got = kernels.calls[-1]
        assert torch.equal(got.do, dout) and torch.equal(got.dlse, dlse)
    recipe = launch.GradientRecipe(Problem.from_tensors(q, k, v), False, 0, {})
    launch_backward.execute(recipe, q, k, v, out, transposed, None, None)  # the LSE, as a hook may have stored it
    assert torch.equal(kernels.calls[-1].lse, transposed)
    padded = torch.ones(2, 4, 320)[..., :300]  # rows further apart need no copy
    execute(q, k, v, dlse=padded)
    assert kernels.calls[-1].dlse is padded


def test_gradients_of_expanded_inputs_are_dense(kernels):
    q, k, v = (x[:1].expand(2, -1, -1, -1) for x in inputs())
    gradients = execute(q, k, v)
    assert all(dense.is_contiguous() and dense.shape == x.shape for dense, x in zip(gradients, (q, k, v), strict=True))
    assert kernels.calls[0].q is q  # TMA reads it as it is


NO_WORK = ({"seqlen_q": 0}, {"seqlen_k": 0}, {"batch": 0}, {"heads": 0}, {"seqlen_q": 0, "seqlen_k": 0})


@pytest.mark.parametrize("numbers", NO_WORK, ids=str)
def test_no_work_gives_zeros_and_launches_nothing(numbers, kernels):
    tensors = inputs(**numbers)
    for tensor, gradient in zip(tensors, execute(*tensors), strict=True):
        assert gradient.shape == tensor.shape and gradient.dtype == tensor.dtype and not gradient.any()
    assert not kernels.calls and not kernels.asked


@pytest.mark.parametrize("causal", [False, True])
def test_bit_equal_gradients_take_turns(causal, kernels):
    """A turn a piece of dQ; a counter gives tiles, so that whoever is waited for was started before."""
    q, k, v = inputs(seqlen_k=128 * 100, heads=2)
    execute(q, k, v, deterministic=True, causal=causal)
    (got,) = kernels.calls
    assert got.ctas == 132 and got.counter == "counter"
    assert got.turns.shape == (*got.sums.shape[:3], 2) and got.turns.dtype == torch.int32
    assert kernels.asked[0][0].deterministic is True


@pytest.mark.parametrize(("sm_margin", "causal"), [*itertools.product((0, 100), (False, True))])
def test_persistent_ctas_leave_the_margin(sm_margin, causal, kernels):
    execute(*inputs(seqlen_q=20_000, seqlen_k=128 * 100), sm_margin=sm_margin, causal=causal)
    (got,) = kernels.calls
    assert got.ctas == 132 - sm_margin and got.counter == "counter"
    # Else the next kernels' CTAs would wait on the SMs that are left free
    assert got.fills_idle_sms == (sm_margin == 0)


def test_query_heads_are_split_where_tiles_are_few(kernels):
    """2 K/V tiles of 1 head with 8 query heads: 8 parts, whose dK and dV are added in float32 afterwards."""
    q, k, v = inputs(seqlen_k=200, heads=8, heads_k=1, batch=1, head_dim=96, head_dim_v=128)
    execute(q, k, v)
    (got,) = kernels.calls
    assert kernels.asked[0][1].split_heads and (got.head_parts, got.ctas) == (8, 16)
    assert got.dk_parts.shape == (1, 1, 8, 2, 128 * 96) and got.dv_parts.shape == (1, 1, 8, 2, 128 * 128)
    assert got.dk_parts.dtype == got.dv_parts.dtype == torch.float32
    assert got.section % 8 == 0  # parts of a head stay together


@pytest.mark.parametrize("sms", [132, 131])
def test_the_last_tiles_are_cut(sms, kernels):
    """1600 tiles of 64 steps on 132 SMs: 12 waves and 16 tiles, whose dK and dV are added in float32 afterwards."""
    q, k, v = inputs(seqlen_q=4000, seqlen_k=128 * 100, heads=16, heads_k=16, batch=1, head_dim=96, head_dim_v=128)
    execute(q, k, v, sm_margin=132 - sms)
    (got,) = kernels.calls
    assert kernels.asked[0][1] == plan.BackwardPlan(64, split_tail=True)
    tail = 1600 - got.whole_tiles
    assert tail in (1600 % sms, 1600 % sms + sms) and 1 < got.tile_parts <= 64 // plan.SHORTEST_PART
    assert (got.ctas, got.head_parts, got.section) == (sms, 16, 1)
    slots = tail * got.tile_parts
    assert got.dk_parts.shape == (slots, 128 * 96) and got.dv_parts.shape == (slots, 128 * 128)
    assert got.dk_parts.dtype == got.dv_parts.dtype == torch.float32


def test_fewer_tiles_than_sms_are_all_cut(kernels):
    """Wide heads, whose tiles have 64 keys: also where asked to be deterministic, because their order is."""
    execute(*inputs(seqlen_q=2000, heads=2, head_dim=256, head_dim_v=256, batch=1), deterministic=True)
    (got,) = kernels.calls
    assert kernels.asked[0] == (
        BackwardStatic("bfloat16", 256, 256, False, False, False), plan.BackwardPlan(64, split_tail=True)
    )  # fmt: skip
    # 10 tiles of 32 steps
    assert got.whole_tiles == 0 and got.ctas == 10 * got.tile_parts == got.dk_parts.shape[0] > 10


@pytest.mark.parametrize("options", [{"causal": True}, {"deterministic": True}], ids=str)
def test_a_tail_that_stays_whole(options, kernels):
    execute(*inputs(seqlen_q=4000, seqlen_k=128 * 100, heads=16, heads_k=16, batch=1), **options)
    (got,) = kernels.calls
    assert not kernels.asked[0][1].split_tail and (got.whole_tiles, got.tile_parts) == (1600, 1)
    assert (got.dk_parts, got.dv_parts) == (None, None)


class Summed:
    """A call recorded by autograd, of a problem with all the usual numbers."""

    def __init__(self, wanted=(True, True, True), **options):
        self.inputs = [x.requires_grad_(needed) for x, needed in zip(inputs(), wanted, strict=True)]
        problem = Problem.from_tensors(*self.inputs)
        recipe = launch.prepare(problem, *self.inputs, **options)
        self.apply = functools.partial(ops.Attention.apply, *self.inputs, None, None, recipe)
        self.recipe = recipe


def test_autograd_keeps_five_tensors(kernels):
    call = Summed(deterministic=True, sm_margin=3)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out, lse = call.apply()
    assert len(kept) == 5
    wanted = (*call.inputs, out, lse)
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in wanted]
    assert call.recipe.gradients[1:] == (True, 3, {})
    assert (out.requires_grad, lse.requires_grad) == (True, True)


@pytest.mark.parametrize("wanted", [w for w in itertools.product((False, True), repeat=3) if any(w)], ids=str)
def test_gradients_go_to_the_inputs_that_need_them(wanted, kernels):
    call = Summed(wanted)
    call.apply()[0].sum().backward()
    for value, (tensor, needed) in enumerate(zip(call.inputs, wanted, strict=True), 1):
        assert (tensor.grad == value).all() if needed else tensor.grad is None


@pytest.mark.parametrize("used", ["out", "lse", "both", "none"])
def test_only_used_results_send_gradients(used, kernels):
    call = Summed()
    out, lse = call.apply()
    loss = {"out": out.sum(), "lse": lse.sum(), "both": out.sum() + lse.sum(), "none": call.inputs[0].sum()}[used]
    loss.backward()
    if used == "none":
        assert not kernels.calls
        return
    (got,) = kernels.calls
    assert got.do.any() == (used != "lse") and (got.dlse is not None) == (used != "out")


def test_a_second_derivative_is_refused(kernels):
    """Also of a sum, whose own gradient does not depend on anything: what is missing may not pass silently."""
    call = Summed()
    out, _ = call.apply()
    first = torch.autograd.grad(out.sum(), call.inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated once only"):
        torch.autograd.grad(sum(x.float().sum() for x in first), call.inputs)


def test_no_recipe_of_gradients_without_grad(kernels):
    q, k, v = inputs()
    assert launch.prepare(Problem.from_tensors(q, k, v), q, k, v).gradients is None
    with torch.no_grad():
        q.requires_grad_()
        assert launch.prepare(Problem.from_tensors(q, k, v), q, k, v).gradients is None
    for place in range(3):
        given = [x.requires_grad_(i == place) for i, x in enumerate(inputs())]
        problem = Problem.from_tensors(*given)
        assert launch.prepare(problem, *given).gradients == launch.GradientRecipe(problem, False, 0, {})

"""launch.py without a GPU: scale, what TMA reads in place, copies, recipes, tile counters."""

import itertools
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hopper_fa3 import launch
from hopper_fa3.plan import Plan
from hopper_fa3.problem import Problem

SCALES = (0, 0.0, -0.0, 1.0, -1.0, 0.125, -(120**-0.5), 1e-30, -1e-30, 1e-45, -5e-324, 5e-324, 1.7e38, -1.7e38)


@pytest.mark.parametrize("scale", SCALES)
def test_scale_in_base_two(scale):
    """Never 0 in float32, finite, and of the sign that the kernel was compiled for: -0.0 is not negative."""
    tensors = [torch.empty(1, 1, 1, 8, dtype=torch.bfloat16)] * 3
    asked = Problem.from_tensors(*tensors, softmax_scale=scale)
    for given in (scale, asked.softmax_scale):
        rounded = torch.tensor(launch.scale_log2(given), dtype=torch.float32)
        assert rounded.isfinite() and rounded.abs() >= torch.finfo(torch.float32).tiny
        assert bool(rounded < 0) == asked.static.negative_scale
        if abs(scale) > 1e-37:
            assert launch.scale_log2(given) == pytest.approx(scale * math.log2(math.e), rel=1e-15)


def memory(count=2**16):
    """Elements 0, 1, 2, ... modulo 251 in bfloat16, 16-byte aligned."""
    found = (torch.arange(count) % 251).to(torch.bfloat16)
    assert found.data_ptr() % 16 == 0
    return found


def view(shape, strides, offset=0):
    return memory().as_strided(shape, strides, offset)


SHAPE = (2, 5, 3, 24)
READ_IN_PLACE = {
    "contiguous": view(SHAPE, (360, 72, 24, 1)),
    "heads before rows": view(SHAPE, (360, 24, 120, 1)),
    "rows with padding of 16 bytes": view(SHAPE, (480, 96, 32, 1)),
    "from a later row": view(SHAPE, (480, 96, 32, 1), 40),
    "expanded batch": view(SHAPE, (0, 72, 24, 1)),
    "expanded rows": view(SHAPE, (360, 0, 24, 1)),
    "expanded heads": view(SHAPE, (360, 72, 0, 1)),
}
ANOTHER_VIEW = {
    "size 1, odd stride": view((1, 5, 1, 24), (7, 72, 3, 1)),
    "size 1, a stride past TMA's 40 bits": view((1, 5, 3, 24), (2**40, 72, 24, 1)),
    "size 1, a stride whose multiple is no address": view((2, 1, 3, 24), (72, 2**38, 24, 1)),
    "one query, one head, one batch": view((1, 1, 1, 24), (5, 2**61, 1, 1)),
}
COPIED = {
    "base": view(SHAPE, (360, 72, 24, 1), 4),
    "batch stride": view(SHAPE, (364, 72, 24, 1)),
    "row stride": view(SHAPE, (384, 76, 24, 1)),
    "head stride": view(SHAPE, (480, 96, 28, 1)),
    "last stride": view(SHAPE, (720, 144, 48, 2)),
    "transposed": view(SHAPE, (360, 3, 1, 15)),
    "expanded columns": view(SHAPE, (16, 8, 24, 0)),
    "base and a stride of a dimension of size 1": view((1, 5, 3, 24), (2**40, 72, 24, 1), 1),
}


def cases(*tables):
    found = [(name, tensor) for table in tables for name, tensor in table.items()]
    return pytest.mark.parametrize("tensor", [tensor for _, tensor in found], ids=[name for name, _ in found])


@cases(READ_IN_PLACE)
def test_tma_reads_in_place(tensor):
    assert launch.tma_reads(tensor)
    assert launch.readable(tensor) is tensor and launch.writable(tensor) is tensor


def test_alignment_is_in_bytes():
    for dtype, fits in ((torch.float32, True), (torch.bfloat16, False)):  # rows of 112 and of 56 bytes
        assert launch.tma_reads(torch.zeros(2, 5, 3, 28, dtype=dtype)[..., :24]) == fits


@cases(ANOTHER_VIEW)
def test_a_dimension_of_size_one_needs_no_copy(tensor):
    assert not launch.tma_reads(tensor)
    for found in (launch.readable(tensor), launch.writable(tensor)):
        assert launch.tma_reads(found) and found.data_ptr() == tensor.data_ptr()
        assert torch.equal(found, tensor) and found.shape == tensor.shape
        assert max(found.stride()) < 2**20


@cases(COPIED)
def test_what_tma_cannot_read_is_copied(tensor):
    assert not launch.tma_reads(tensor)
    found = launch.readable(tensor)
    assert launch.tma_reads(found) and found.is_contiguous() and torch.equal(found, tensor)
    assert found.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    target = launch.writable(tensor)
    assert launch.tma_reads(target) and (target.shape, target.dtype) == (tensor.shape, tensor.dtype)
    assert target.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@cases(READ_IN_PLACE, ANOTHER_VIEW, COPIED)
def test_canonical_is_the_same_view(tensor):
    found = launch.canonical(tensor)
    assert torch.equal(found, tensor) and found.data_ptr() == tensor.data_ptr()
    for size, before, after in zip(tensor.shape, tensor.stride(), found.stride(), strict=True):
        assert size == 1 or before == after
    plain = torch.empty(tensor.shape).stride()
    ones = [i for i, size in enumerate(tensor.shape) if size == 1]
    assert [found.stride(i) for i in ones] == [plain[i] for i in ones]


@pytest.mark.parametrize("rows", [2**19 - 1, 2**19, 2**20])
def test_one_long_sequence_needs_no_copy(rows):
    """From 2**31 elements on the plain stride of a batch of one is more than a descriptor holds."""
    tensor = torch.empty(1, rows, 32, 128, dtype=torch.bfloat16, device="meta")
    for found in (launch.readable(tensor), launch.readable(tensor[0].unsqueeze(0)), launch.writable(tensor)):
        assert launch.tma_reads(found) and found.shape == tensor.shape and found.stride()[1:] == tensor.stride()[1:]
        assert found._base is tensor or found is tensor


def tensors(seqlen_q=5, seqlen_k=7, heads=4, heads_k=2, batch=2, head_dim=16, head_dim_v=8):
    torch.manual_seed(0)
    shapes = ((seqlen_q, heads, head_dim), (seqlen_k, heads_k, head_dim), (seqlen_k, heads_k, head_dim_v))
    return [torch.randn(batch, *shape).to(torch.bfloat16) for shape in shapes]


class Kernel:
    """Stands in for a compiled kernel: checks that TMA could move its arguments, writes what can be recognised."""

    def __init__(self):
        self.calls = []

    def __call__(self, q, k, v, out, lse, sink, slopes, counter, *scalars):
        assert all(launch.tma_reads(x) for x in (q, k, v, out)) and lse.is_contiguous()
        self.calls.append((q, k, v, out, lse, sink, slopes, counter, scalars))
        out.copy_(torch.arange(out.numel()).reshape(out.shape) % 251)
        lse.fill_(7.0)


@pytest.fixture
def kernel(monkeypatch):
    """prepare() takes this for the kernel of any problem, and CPU tensors for those of a GPU with 132 SMs."""
    found = Kernel()
    found.asked = []

    def compiled(static, plan):
        found.asked.append((static, plan))
        return found

    monkeypatch.setitem(sys.modules, "hopper_fa3.compile", SimpleNamespace(compiled=compiled))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "tile_counter", lambda device: "counter")
    monkeypatch.setattr(launch, "_unread", {})
    return found


def prepared(q, k, v, *, out=None, plan=None, sm_margin=0, **options):
    return launch.prepare(Problem.from_tensors(q, k, v, **options), q, k, v, out=out, plan=plan, sm_margin=sm_margin)


def test_what_a_kernel_is_launched_with(kernel):
    q, k, v = tensors(seqlen_q=300, seqlen_k=310)
    launch.execute(prepared(q, k, v, softmax_scale=-0.5, window_size=(-1, 3)), q, k, v)
    launch.execute(prepared(q, k, v, plan=Plan(64, 128, pingpong=False), sm_margin=100), q, k, v)
    (*_, counter, scalars), (*_, none, dense) = kernel.calls
    assert (counter, scalars) == (
        "counter",
        (launch.scale_log2(-0.5), None, 3, None, None, 8, 2 * 4 * 2, 1),
    )  # tiles of 192 queries
    # 40 tiles of 64 queries, 32 SMs
    assert (none, dense) == (None, (launch.scale_log2(0.25), None, 299, None, None, 1, 32, 0))
    assert [static.right_bound for static, _ in kernel.asked] == [True, False]
    assert kernel.asked[1][1] == Plan(64, 128, pingpong=False)
    assert kernel.calls[0][:3] == (q, k, v)


def test_what_a_score_hook_is_launched_with(kernel):
    q, k, v = tensors(seqlen_q=300, seqlen_k=310)
    sink, slopes = torch.ones(4, dtype=torch.bfloat16), torch.ones(8)[::2]
    hook = {"sink": sink, "alibi_slopes": slopes}
    launch.execute(prepared(q, k, v, softmax_scale=-0.5, softcap=2.0, **hook), q, k, v, **hook)
    (*_, sinks, per_head, _, scalars) = kernel.calls[0]
    assert (sinks.dtype, sinks.tolist()) == (torch.float32, [1.0] * 4)
    assert (per_head.shape, per_head.stride(), per_head.data_ptr()) == ((2, 4), (0, 2), slopes.data_ptr())
    # What score.py makes of a product is a number times -2 cap log2(e), whatever the sign of the scale
    assert scalars[:2] == pytest.approx((-4 * math.log2(math.e), -0.5 * 4 / 2))
    static, _ = kernel.asked[0]
    assert (static.softcap, static.sink, static.alibi, static.negative_scale) == (True, True, "distance", False)
    launch.execute(prepared(q, k, v, attention_chunk=7), q, k, v)
    launch.execute(prepared(*tensors(seqlen_q=320, seqlen_k=310), causal=True, attention_chunk=2**40), q, k, v)
    assert [call[-1][2:5] for call in kernel.calls[1:]] == [(299, 310, 7), (0, 310, 2**30)]
    for scale in (0.0, 1.0, -(2.0**120)):
        tiny = Problem.from_tensors(q, k, v, softmax_scale=scale, softcap=2.0**-126)
        assert all(torch.tensor(launch.scales(tiny), dtype=torch.float32).isfinite())


@pytest.mark.parametrize("want_lse", [True, False])
def test_results_are_new_and_contiguous(want_lse, kernel):
    q, k, v = tensors()
    recipe = prepared(q, k, v)
    (out, lse), (again, _) = (launch.execute(recipe, q, k, v, want_lse=want_lse) for _ in range(2))
    assert out.shape == (2, 5, 4, 8) and out.is_contiguous() and out.dtype == q.dtype
    assert lse.shape == (2, 4, 5) and lse.is_contiguous() and lse.dtype == torch.float32
    assert out.data_ptr() != again.data_ptr()


@pytest.mark.parametrize("shape", list(itertools.product((1, 2, 3), (1, 2, 5), (1, 2, 7), (8, 64))), ids=str)
def test_templates_give_contiguous_results(shape, kernel):
    batch, seqlen_q, heads, head_dim_v = shape
    recipe = prepared(*tensors(seqlen_q, 3, heads, 1, batch, 8, head_dim_v))
    for template, wanted in ((recipe.out, shape), (recipe.lse, (batch, heads, seqlen_q))):
        assert torch.empty_like(template).stride() == torch.empty(wanted).stride()
        assert template.untyped_storage().nbytes() <= 4


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("name", [*ANOTHER_VIEW, *COPIED])
def test_a_layout_that_tma_cannot_take(name, place, kernel):
    """As q, k, v or out: the kernel gets the same values in a layout that it can take, and out is written."""
    tensor = (ANOTHER_VIEW | COPIED)[name]
    if place == 3 and 0 in tensor.stride():  # Problem refuses such an out
        tensor = COPIED["transposed"]
    shape = tensor.shape
    given = [torch.randn(shape).to(torch.bfloat16) for _ in range(3)]
    if place < 3:
        given[place] = tensor
    before = [x.clone() for x in given]
    around = memory()
    out = around.as_strided(shape, tensor.stride(), tensor.storage_offset()) if place == 3 else None
    written, _ = launch.execute(prepared(*given, out=out), *given, out)
    for seen, wanted in zip(kernel.calls[0][:3], before, strict=True):
        assert torch.equal(seen, wanted)
    assert torch.equal(written.flatten(), (torch.arange(written.numel()) % 251).to(torch.bfloat16))
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    if out is not None:
        assert written is out
        out.copy_(memory().as_strided(shape, out.stride(), out.storage_offset()))
        assert torch.equal(around, memory()), "written outside the given output"


def test_tensors_that_fit_are_passed_on(kernel):
    q, k, v = tensors()
    out = torch.empty(2, 5, 4, 8, dtype=q.dtype)
    written, _ = launch.execute(prepared(q, k, v, out=out), q, k, v, out)
    assert all(a is b for a, b in zip(kernel.calls[0], (q, k, v, out))) and written is out  # noqa: B905


NO_WORK = ({"seqlen_q": 0}, {"seqlen_k": 0}, {"batch": 0}, {"heads": 0}, {"seqlen_q": 0, "seqlen_k": 0})


@pytest.mark.parametrize("numbers", NO_WORK, ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_no_work_launches_nothing(given, numbers, kernel):
    q, k, v = tensors(**numbers)
    out = torch.full((*q.shape[:3], v.shape[-1]), math.nan, dtype=q.dtype) if given else None
    written, lse = launch.execute(prepared(q, k, v, out=out), q, k, v, out)
    assert not kernel.calls and not kernel.asked
    assert written.shape == (*q.shape[:3], 8) and (written == 0).all() and (out is None or written is out)
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and (lse == -math.inf).all()


def test_an_unread_lse_shares_memory(kernel, monkeypatch):
    monkeypatch.setattr(launch, "UNREAD_ROWS", 40)
    q, k, v = tensors()
    larger = tensors(seqlen_q=6)
    recipes = [prepared(q, k, v), prepared(q, k, v, causal=True), prepared(*larger)]
    (_, a), (_, b) = (launch.execute(recipe, q, k, v, want_lse=False) for recipe in recipes[:2])
    assert a.data_ptr() == b.data_ptr()
    _, wanted = launch.execute(recipes[0], q, k, v)
    assert wanted.untyped_storage().data_ptr() != a.untyped_storage().data_ptr()
    assert recipes[2].unread_lse is None
    assert launch.execute(recipes[2], *larger, want_lse=False)[1].shape == (2, 4, 6)


@pytest.mark.parametrize("numbers", [{}, {"seqlen_k": 0}], ids=str)
@pytest.mark.parametrize("want_lse", [True, False])
def test_a_recipe_made_in_inference_mode_serves_everywhere(want_lse, numbers, kernel):
    q, k, v = tensors(**numbers)
    with torch.inference_mode():
        recipe = prepared(q, k, v)
        launch.execute(recipe, q, k, v, want_lse=want_lse)
    kernel.__class__ = type("Quiet", (Kernel,), {"__call__": lambda self, *arguments: None})  # a kernel asks no mode
    out, lse = launch.execute(recipe, q, k, v, want_lse=want_lse)
    assert not out.is_inference() and not (want_lse and lse.is_inference())


def test_a_recipe_made_for_a_subclass_serves_plain_tensors(kernel):
    class Subclass(torch.Tensor):
        pass

    q, k, v = tensors()
    recipe = prepared(*(x.as_subclass(Subclass) for x in (q, k, v)))
    assert [type(x) for x in launch.execute(recipe, q, k, v)] == [torch.Tensor] * 2


def test_one_counter_a_stream_and_a_new_one_in_a_capture(monkeypatch):
    stream, capturing = [11], [False]
    monkeypatch.setattr(launch, "_counters", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream[0], raising=False)
    with FakeTensorMode():
        first, second = torch.device("cuda", 0), torch.device("cuda", 1)
        a, b = launch.tile_counter(first), launch.tile_counter(first)
        assert a is b and a.shape == (2,) and a.dtype == torch.int32 and a.device == first
        other_device = launch.tile_counter(second)
        assert other_device is not a and other_device.device == second
        stream[0] = 12
        other_stream = launch.tile_counter(first)
        assert other_stream is not a
        capturing[0] = True
        captured = [launch.tile_counter(first) for _ in range(2)]
        assert captured[0] is not captured[1] and not any(captured[0] is x for x in (a, other_device, other_stream))
        capturing[0], stream[0] = False, 11
        assert launch.tile_counter(first) is a

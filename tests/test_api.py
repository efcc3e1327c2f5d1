"""The public functions: signatures, values on the CPU through them, refusals, and what an import costs."""

import inspect
import math
import subprocess
import sys

import pytest
import torch
from refusal import refused
from torch.autograd import forward_ad

import hopper_fa3
from hopper_fa3 import api, flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, launch
from hopper_fa3.plan import Plan
from hopper_fa3.reference import standard

# The public interface. Keyword-only arguments are ours; all before them is FlashAttention-3's interface.
SIGNATURES = {
    "flash_attn_func": "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, "
    "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
    "deterministic=False, sm_margin=0, return_attn_probs=False, *, sink=None, alibi_slopes=None, score=None, "
    "mask=None, block_mask=None, out=None, plan=None",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
    "seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False, *, sink=None, alibi_slopes=None, score=None, mask=None, "
    "block_mask=None, page_table=None, out=None, plan=None",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    "cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, "
    "v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
    "return_softmax_lse=False, *, sink=None, out=None",
    "flash_attn_qkvpacked_func": "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, "
    "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, "
    "sm_margin=0, return_attn_probs=False",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "merge_states": "out_a, lse_a, out_b, lse_b",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert str(inspect.signature(getattr(hopper_fa3, name))) == f"({SIGNATURES[name]})"


def test_the_package_exports_these_names_only():
    assert set(hopper_fa3.__all__) == set(SIGNATURES)


@pytest.mark.parametrize(("name", "count"), [("flash_attn_with_kvcache", 3), ("flash_attn_combine", 2)])
def test_what_is_not_built_says_so(name, count):
    with refused(NotImplementedError, f"{name} is not built yet"):
        getattr(hopper_fa3, name)(*[None] * count)


def inputs(seqlen_q=40, seqlen_k=60, heads=4, heads_k=2, head_dim=24, head_dim_v=16, dtype=torch.float32):
    torch.manual_seed(0)
    return (
        torch.randn(2, seqlen_q, heads, head_dim).to(dtype),
        torch.randn(2, seqlen_k, heads_k, head_dim).to(dtype),
        torch.randn(2, seqlen_k, heads_k, head_dim_v).to(dtype),
    )


def is_oracle(out, lse, q, k, v, **options):
    true, true_lse = standard(q, k, v, compute_dtype=torch.float64, **options)
    assert out.dtype == q.dtype and lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    unit = torch.finfo(q.dtype).eps
    assert ((out - true).abs() <= unit / 2 * true.abs() + 32 * torch.finfo(lse.dtype).eps).all()
    torch.testing.assert_close(lse.double(), true_lse, rtol=0, atol=64 * torch.finfo(lse.dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options", [{}, {"right": 0}, {"right": 5}, {"left": 9}, {"left": 9, "right": 5}, {"softmax_scale": -0.5}], ids=str
)
def test_values_on_the_cpu_are_the_oracle(options, dtype):
    q, k, v = inputs(dtype=dtype)
    scale, left, right = options.get("softmax_scale"), options.get("left", -1), options.get("right", -1)
    given = flash_attn_func(q, k, v, scale, right == 0, window_size=(left, right), return_attn_probs=True)
    is_oracle(*given, q, k, v, **options)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0), (1, 1), (5, 2), (300, 1030)])
def test_lengths(seqlen_q, seqlen_k):
    q, k, v = inputs(seqlen_q, seqlen_k)
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    is_oracle(out, lse, q, k, v, right=0)
    blind = max(0, seqlen_q - seqlen_k)
    assert not out[:, :blind].any() and (lse[:, :, :blind] == -math.inf).all()


def test_what_is_returned():
    q, k, v = inputs()
    out = flash_attn_func(q, k, v)
    assert isinstance(out, torch.Tensor) and out.shape == (2, 40, 4, 16)
    again, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, again) and lse.shape == (2, 4, 40)


def test_the_given_output_is_written_and_returned():
    q, k, v = inputs(300, 330)  # several tiles
    out = torch.full((2, 4, 16, 300), math.nan).permute(0, 3, 1, 2)
    given = flash_attn_func(q, k, v, causal=True, out=out)
    assert given is out and torch.equal(out, flash_attn_func(q, k, v, causal=True))


@pytest.mark.parametrize("group", [1, 2, 5, 7, 8])
@pytest.mark.parametrize("heads_k", [1, 3])
def test_a_query_head_reads_its_key_head(group, heads_k):
    q, k, v = inputs(9, 11, group * heads_k, heads_k)
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    for head in range(group * heads_k):
        kv_head = slice(head // group, head // group + 1)
        alone = flash_attn_func(q[:, :, head : head + 1], k[:, :, kv_head], v[:, :, kv_head], causal=True,
                                return_attn_probs=True)  # fmt: skip
        torch.testing.assert_close(out[:, :, head : head + 1], alone[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(lse[:, head : head + 1], alone[1], rtol=0, atol=1e-6)


def test_options_that_change_no_value():
    q, k, v = inputs()
    expected = flash_attn_func(q, k, v, causal=True)
    options = ({"num_splits": 0}, {"pack_gqa": False}, {"deterministic": True}, {"sm_margin": 8},
               {"plan": Plan(128, 64)}, {"window_size": (59, 0)}, {"window_size": (None, 3)})  # fmt: skip
    for option in options:
        assert torch.equal(flash_attn_func(q, k, v, causal=True, **option), expected), option


def test_inputs_stay_as_they_were():
    tensors = inputs()
    before = [x.clone() for x in tensors]
    flash_attn_func(*tensors, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_gradients_flow_through_both_results():
    tensors = [x.double().requires_grad_() for x in inputs(12, 20)]

    def gradients(out, lse):  # CASES 12
        return torch.autograd.grad(out.sum() + lse.logsumexp(-1).sum(), tensors)

    ours = gradients(*flash_attn_func(*tensors, causal=True, return_attn_probs=True))
    for a, b in zip(ours, gradients(*standard(*tensors, right=0)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_both_packed_layouts():
    q, k, v = inputs(40, 40, 6, 2, 16, 16)
    options = {"softmax_scale": 0.3, "causal": True, "return_attn_probs": True}
    expected = flash_attn_func(q, k, v, **options)
    given = flash_attn_qkvpacked_func(torch.cat((q, k, v), 2), num_heads_q=6, **options)
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    equal_heads = flash_attn_func(q[:, :, :2], k, v, **options)
    packed = torch.stack((q[:, :, :2], k, v), 2)
    for heads in (None, 2):
        given = flash_attn_qkvpacked_func(packed, num_heads_q=heads, **options)
        assert all(torch.equal(a, b) for a, b in zip(given, equal_heads, strict=True))
    assert torch.equal(flash_attn_qkvpacked_func(packed), flash_attn_func(q[:, :, :2], k, v))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"q_descale": 2.0}, "q_descale must be None (not built yet), got 2.0"),
        ({"k_descale": 2.0}, "k_descale must be None (not built yet), got 2.0"),
        ({"v_descale": 2.0}, "v_descale must be None (not built yet), got 2.0"),
    ],
    ids=str,
)
def test_packed_options_are_passed_on(option, message):
    with refused(NotImplementedError, message):
        flash_attn_qkvpacked_func(torch.zeros(1, 2, 3, 1, 8), **option)


def test_options_of_scores_and_masks_are_passed_on():
    qkv = torch.randn(2, 12, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    plain = flash_attn_qkvpacked_func(qkv)
    for option in ({"softcap": 0.5}, {"attention_chunk": 5}, {"window_size": (2, 1)}):
        given = flash_attn_qkvpacked_func(qkv, **option)
        assert torch.equal(given, flash_attn_func(*qkv.unbind(2), **option)) and not torch.equal(given, plain)


PACKED = "qkv must have shape (batch, seqlen, 3, heads, head_dim) or (batch, seqlen, heads_q + 2 heads_k, head_dim)"


@pytest.mark.parametrize(
    ("shape", "heads", "message"),
    [
        ((2, 3, 4), None, f"{PACKED}, got (2, 3, 4)"),
        ((2, 5, 2, 4, 8), None, f"{PACKED}, got (2, 5, 2, 4, 8)"),
        ((2, 5, 3, 4, 8), 8, "num_heads_q must be the 4 heads of a 5-D qkv or None, got 8"),
        ((2, 5, 6, 8), None, "num_heads_q must leave an even number of the 6 heads of a 4-D qkv to k and v, got None"),
        ((2, 5, 6, 8), 3, "num_heads_q must leave an even number of the 6 heads of a 4-D qkv to k and v, got 3"),
        ((2, 5, 6, 8), 6, "num_heads_q must leave an even number of the 6 heads of a 4-D qkv to k and v, got 6"),
        ((2, 5, 6, 8), 0, "num_heads_q must leave an even number of the 6 heads of a 4-D qkv to k and v, got 0"),
        ((2, 5, 6, 8), 2.0, "num_heads_q must leave an even number of the 6 heads of a 4-D qkv to k and v, got 2.0"),
    ],
)
def test_packed_shapes_that_do_not_fit(shape, heads, message):
    with refused(ValueError, message):
        flash_attn_qkvpacked_func(torch.empty(shape), num_heads_q=heads)


def test_packed_input_is_a_tensor():
    with refused(TypeError, "qkv must be a torch.Tensor, got tuple"):
        flash_attn_qkvpacked_func(inputs())


UNBUILT = ("qv", "q_descale", "k_descale", "v_descale", "block_mask")
REFUSED = {
    **dict.fromkeys(UNBUILT, (2.0, NotImplementedError)), "window_size": ((3, -2), ValueError),
    "attention_chunk": (-1, ValueError), "softcap": (-2.0, ValueError), "sink": (2.0, TypeError),
    "alibi_slopes": (2.0, TypeError), "score": (2.0, TypeError), "mask": (2.0, TypeError),
    "num_splits": (2, NotImplementedError), "pack_gqa": (True, NotImplementedError), "sm_margin": (-1, ValueError),
    "softmax_scale": (math.nan, ValueError), "out": (2.0, TypeError), "plan": (2.0, TypeError),
}  # fmt: skip
TAKEN = {"q", "k", "v", "causal", "deterministic", "return_attn_probs"}
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k")
REFUSED_PACKED = {**dict.fromkeys(LENGTHS, (2.0, TypeError)), "page_table": (2.0, NotImplementedError)}


def test_every_argument_reaches_the_problem():
    parameters = set(inspect.signature(flash_attn_func).parameters)
    assert parameters == set(REFUSED) | TAKEN
    for name, (value, error) in REFUSED.items():
        with pytest.raises(error, match=name):
            flash_attn_func(*inputs(), **{name: value})


def test_every_argument_reaches_the_packed_problem():
    parameters = set(inspect.signature(flash_attn_varlen_func).parameters)
    assert parameters == set(REFUSED) | set(REFUSED_PACKED) | TAKEN
    q, k, v = (x.flatten(0, 1) for x in inputs())
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 40], dtype=torch.int32))
    lengths |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 40)
    for name, (value, error) in (REFUSED | REFUSED_PACKED).items():
        with pytest.raises(error, match=name):
            flash_attn_varlen_func(q, k, v, **lengths | {name: value})


class Launches:
    """Stands in for launch.py: which recipes were prepared (numbered from 1), and which were launched."""

    class Number(int):
        gradients = None

    TMA_ALIGNMENT = launch.TMA_ALIGNMENT

    def __init__(self):
        self.prepared, self.executed, self.wanted = [], [], []

    def prepare(self, problem, *tensors, sink=None, **options):
        self.prepared.append((problem, tensors, options))
        recipe = self.Number(len(self.prepared))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            recipe.gradients = "gradients"
        return recipe

    def execute(self, recipe, *tensors, sink=None, alibi_slopes=None, want_lse):
        self.executed.append((recipe, tensors))
        self.wanted.append(want_lse)
        return "out", "lse"


@pytest.fixture
def launches(hopper, monkeypatch):
    """CUDA tensors can be made, the device says that it is an H200, and nothing is launched."""
    monkeypatch.setattr(api, "launch", Launches())
    monkeypatch.setattr(api, "_recipes", {})
    return api.launch


def fakes(batch=2, seqlen_q=8, seqlen_k=8, heads=4, heads_k=4, head_dim_v=64, dtype=torch.bfloat16):
    shapes = ((batch, seqlen_q, heads, 64), (batch, seqlen_k, heads_k, 64), (batch, seqlen_k, heads_k, head_dim_v))
    return [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]


def test_cuda_tensors_go_to_launch(launches):
    q, k, v = fakes()
    plan, out = Plan(128, 128), torch.empty_like(q)
    assert flash_attn_func(q, k, v, causal=True, out=out, plan=plan, sm_margin=3) == "out"
    assert flash_attn_func(q, k, v, return_attn_probs=True) == ("out", "lse")
    asked, tensors, options = launches.prepared[0]
    assert asked.right == 0 and all(a is b for a, b in zip(tensors, (q, k, v), strict=True))
    assert options["out"] is out and options["plan"] is plan and options["sm_margin"] == 3
    recipe, given = launches.executed[0]
    assert recipe == 1 and all(a is b for a, b in zip(given, (q, k, v, out), strict=True))
    assert launches.executed[1][0] == 2 and launches.executed[1][1][3] is None
    assert launches.wanted == [False, True]


@pytest.mark.parametrize("used", [False, True])
def test_packed_cuda_tensors_go_to_launch(used, launches, monkeypatch):
    monkeypatch.setattr(api, "launch_packed", launches)
    recorded = []
    monkeypatch.setattr(api.ops.PackedAttention, "apply", lambda *given: recorded.append(given) or ("out", "lse"))
    q, k, v = (torch.empty(8, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    offsets, lengths = (torch.empty(n, dtype=torch.int32, device="cuda") for n in (3, 2))
    where = (offsets, offsets.clone(), *((lengths, lengths.clone()) if used else (None, None)))
    plan, out = Plan(128, 128), torch.empty_like(q)
    options = {"causal": True, "plan": plan, "sm_margin": 3, "deterministic": True}
    assert flash_attn_varlen_func(q, k, v, *where[:2], 8, 8, *where[2:], out=out, **options) == "out"
    asked, tensors, prepared = launches.prepared[0]
    assert asked.right == 0 and asked.batch == 2 and all(a is b for a, b in zip(tensors, (q, k, v), strict=True))
    assert prepared == {"out": out, "plan": plan, "sm_margin": 3, "deterministic": True}
    (recipe, given), = launches.executed  # fmt: skip
    assert recipe == 1 and all(a is b for a, b in zip((*given[:3], given[4]), (q, k, v, out), strict=True))
    assert all(a is b for a, b in zip(given[3], where, strict=True)) and launches.wanted == [False]
    leaf = v.clone().requires_grad_()
    assert flash_attn_varlen_func(q, k, leaf, *where[:2], 8, 8, *where[2:], return_attn_probs=True) == ("out", "lse")
    ((*tensors, sink, slopes, recipe), lengths), = [(given[:6], given[6:]) for given in recorded]  # fmt: skip
    assert sink is None and slopes is None
    assert recipe == 2 and all(a is b for a, b in zip((*tensors, *lengths), (q, k, leaf, *where), strict=True))


@pytest.mark.parametrize("place", range(3))
def test_a_recorded_call_goes_to_autograd(place, launches, monkeypatch):
    """Where any input requires grad and grad mode is on; such calls and others have recipes of their own."""
    recorded = []
    monkeypatch.setattr(api.ops.Attention, "apply", lambda *given: recorded.append(given) or ("out", "lse"))
    plain = fakes()
    given = [x.clone().requires_grad_() if i == place else x for i, x in enumerate(plain)]
    assert flash_attn_func(*given, deterministic=True) == "out"
    assert flash_attn_func(*given, deterministic=True, return_attn_probs=True) == ("out", "lse")
    assert [recipe for *_, recipe in recorded] == [1, 1] and launches.prepared[0][2]["deterministic"] is True
    assert all(a is b for a, b in zip(recorded[0][:3], given, strict=True))
    with torch.no_grad():
        flash_attn_func(*given, deterministic=True)
    flash_attn_func(*plain, deterministic=True)
    assert [recipe for recipe, _ in launches.executed] == [2, 2] and len(recorded) == 2


def test_a_call_seen_before_reuses_its_recipe(launches):
    for _ in range(3):
        flash_attn_func(*fakes(), causal=True)
    assert [recipe for recipe, _ in launches.executed] == [1, 1, 1] and len(launches.prepared) == 1


def test_a_call_that_differs_has_a_recipe_of_its_own(launches):
    options = (
        {}, {"causal": True}, {"softmax_scale": 0.5}, {"softmax_scale": -0.5}, {"window_size": (-1, 3)},
        {"sm_margin": 1}, {"plan": Plan(128, 64)}, {"out": fakes()[0]}, {"deterministic": True},
    )  # fmt: skip
    shapes = (
        {"batch": 1}, {"seqlen_q": 4}, {"seqlen_k": 4}, {"heads": 8}, {"heads_k": 2}, {"head_dim_v": 32},
        {"dtype": torch.float16},
    )  # fmt: skip
    calls = [(fakes(), option) for option in options] + [(fakes(**shape), {}) for shape in shapes]
    transposed = [x.transpose(1, 2) for x in fakes(seqlen_q=4, seqlen_k=4, heads=8, heads_k=8)]
    calls += [([*fakes()[:place], transposed[place], *fakes()[place + 1 :]], {}) for place in range(3)]
    calls += [(fakes(), {"out": transposed[0]})]
    same_strides = torch.empty_strided((2, 8, 4, 32), fakes()[2].stride(), dtype=torch.bfloat16, device="cuda")
    calls += [([*fakes()[:2], same_strides], {})]
    for tensors, option in calls:
        flash_attn_func(*tensors, **option)
    assert [recipe for recipe, _ in launches.executed] == list(range(1, len(calls) + 1))


def test_a_refused_call_is_refused_again(launches):
    q, k, v = fakes()
    flash_attn_func(q, k, v)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="num_splits"):
            flash_attn_func(q, k, v, num_splits=2)
        with pytest.raises(ValueError, match="out must have shape"):
            flash_attn_func(q, k, v, out=fakes(batch=1)[0])
    assert len(launches.prepared) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device="cuda", requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            flash_attn_func(q, k, v, out=out)
        with pytest.raises(ValueError, match="out must not require grad"):
            flash_attn_func(q, k, v, out=out)
    assert len(launches.prepared) == 2


def test_alignment_is_part_of_the_signature(launches, monkeypatch):
    tensors = fakes()
    for address in (4096, 4112, 4098, 4096):
        monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor, address=address: address)
        flash_attn_func(*tensors)
    assert [recipe for recipe, _ in launches.executed] == [1, 1, 2, 1]


@pytest.mark.parametrize("place", range(4))
def test_the_alignment_of_every_tensor_is_part_of_the_signature(place, launches, monkeypatch):
    q, k, v, out = tensors = [*fakes(), fakes()[0]]
    flash_attn_func(q, k, v, out=out)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 4098 if tensor is tensors[place] else 4096)
    flash_attn_func(q, k, v, out=out)
    assert [recipe for recipe, _ in launches.executed] == [1, 2]


@pytest.mark.parametrize("place", range(4))
def test_tensors_without_memory_are_refused(place, launches, monkeypatch):
    """Also where a call of the same signature is remembered: a kernel would read address 0."""
    q, k, v, out = tensors = [*fakes(), fakes()[0]]
    flash_attn_func(q, k, v, out=out)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0 if tensor is tensors[place] else 4096)
    name = ("q", "k", "v", "out")[place]
    message = f"{name} must have memory on CUDA (fake and wrapped tensors have none), got FakeTensor"
    with refused(TypeError, message):
        flash_attn_func(q, k, v, out=out)
    empty = [*fakes(batch=0), fakes(batch=0)[0]]
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
    flash_attn_func(*empty[:3], out=empty[3])
    assert [recipe for recipe, _ in launches.executed] == [1, 2]


@pytest.mark.parametrize("place", range(3))
def test_a_tangent_is_refused(place, launches):
    """Also where the same call without one is remembered: the result would have none, as if its derivative were 0."""
    tensors = fakes()
    flash_attn_func(*tensors)
    with forward_ad.dual_level():
        flash_attn_func(*tensors)
        dual = [forward_ad.make_dual(x, torch.zeros_like(x)) if i == place else x for i, x in enumerate(tensors)]
        message = "q, k and v must have no tangent on CUDA (forward-mode derivatives are not built), got True"
        with refused(NotImplementedError, message):
            flash_attn_func(*dual)
    flash_attn_func(*tensors)
    assert [recipe for recipe, _ in launches.executed] == [1, 2, 1]


def test_options_that_are_no_plain_values_are_left_to_problem(launches):
    for _ in range(2):
        flash_attn_func(*fakes(), window_size=[-1, -1])
    assert [recipe for recipe, _ in launches.executed] == [1, 2]


def test_the_memo_is_bounded(launches, monkeypatch):
    monkeypatch.setattr(api, "MEMO_ENTRIES", 3)
    for batch in range(1, 9):
        flash_attn_func(*fakes(batch=batch))
        assert len(api._recipes) <= 3
    assert len(launches.prepared) == 8


def test_the_cpu_path_imports_no_kernel_language():
    code = (
        "import sys, torch, hopper_fa3\n"
        "q = torch.randn(1, 3, 2, 8)\n"
        "hopper_fa3.flash_attn_func(q, q, q, causal=True)\n"
        "found = [name for name in sys.modules if name.split('.')[0] in ('cutlass', 'tvm_ffi')]\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

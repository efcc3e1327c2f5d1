"""flash_attn_varlen_func on CUDA, without a GPU: what it hands on, and which calls share a recipe."""

import pytest
import torch

from hopper_fa3 import api, flash_attn_varlen_func
from hopper_fa3.plan import Plan


class Launches:
    """Stands in for launch_packed.py: which recipes were prepared (numbered from 1), and which were launched."""

    class Number(int):
        gradients = None

    def __init__(self):
        self.prepared, self.executed, self.hooks = [], [], []

    def prepare(self, problem, *tensors, **options):
        self.prepared.append((problem, tensors, options))
        recipe = self.Number(len(self.prepared))
        if torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (*tensors, options["sink"]) if tensor is not None
        ):
            recipe.gradients = "gradients"
        return recipe

    def execute(self, recipe, *given, want_lse, **hook):
        self.executed.append((recipe, given, want_lse))
        self.hooks.append(hook)
        return "out", "lse"


@pytest.fixture
def launches(hopper, monkeypatch):
    """CUDA tensors can be made, the device says that it is an H200, and nothing is launched."""
    monkeypatch.setattr(api, "launch_packed", Launches())
    monkeypatch.setattr(api, "_recipes", {})
    return api.launch_packed


def fakes(total_q=40, total_k=50, heads=4, heads_k=2, head_dim_v=64, dtype=torch.bfloat16):
    shapes = ((total_q, heads, 64), (total_k, heads_k, 64), (total_k, heads_k, head_dim_v))
    return [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]


def words(count):
    return torch.empty(count, dtype=torch.int32, device="cuda")


def call(tensors=None, batch=3, longest=(7, 7), used=(None, None), **options):
    return flash_attn_varlen_func(*(tensors or fakes()), words(batch + 1), words(batch + 1), *longest, *used, **options)


def test_tensors_and_options_are_handed_on(launches):
    tensors, ends, used = fakes(), (words(4), words(4)), (words(3), None)
    out, plan = torch.empty(40, 4, 64, dtype=torch.bfloat16, device="cuda"), Plan(128, 128)
    options = {"causal": True, "out": out, "plan": plan, "sm_margin": 3, "deterministic": True}
    assert flash_attn_varlen_func(*tensors, *ends, 7, 7, *used, **options) == "out"
    problem, given, prepared = launches.prepared[0]
    assert (problem.right, problem.batch, problem.has_seqused_q, problem.has_seqused_k) == (0, 3, True, False)
    assert all(a is b for a, b in zip(given, tensors, strict=True))
    assert prepared == {"sink": None, "out": out, "plan": plan, "sm_margin": 3, "deterministic": True}
    assert launches.hooks == [{"sink": None, "alibi_slopes": None}]
    recipe, (*given, lengths, target), want_lse = launches.executed[0]
    assert recipe == 1 and all(a is b for a, b in zip(given, tensors, strict=True)) and target is out
    assert all(a is b for a, b in zip(lengths, (*ends, *used), strict=True)) and not want_lse
    assert call(return_attn_probs=True) == ("out", "lse") and launches.executed[1][2]


def test_a_recorded_call_goes_to_autograd(launches, monkeypatch):
    recorded = []
    monkeypatch.setattr(api.ops.PackedAttention, "apply", lambda *given: recorded.append(given) or ("out", "lse"))
    tensors = [x.requires_grad_() for x in fakes()]
    assert call(tensors) == "out" and call(tensors, return_attn_probs=True) == ("out", "lse")
    assert [given[3:6] for given in recorded] == [(None, None, 1), (None, None, 1)] and not launches.executed
    assert all(a is b for a, b in zip(recorded[0][:3], tensors, strict=True)) and len(recorded[0]) == 10
    sink = torch.ones(4, device="cuda", requires_grad=True)
    call(sink=sink)
    assert recorded[2][3] is sink and launches.prepared[-1][2]["sink"] is sink


def test_a_sink_and_slopes_are_handed_on_and_share_a_recipe(launches):
    """Whatever they hold: their addresses and values are no part of it, their presence, shape and dtype are."""
    made = [(torch.ones(4, device="cuda"), torch.ones(3, 4, device="cuda")) for _ in range(2)]
    others = (
        (torch.ones(4, device="cuda", dtype=torch.bfloat16), made[0][1]),
        (made[0][0], torch.ones(4, device="cuda")),
    )
    for sink, slopes in (*made, *others):
        call(sink=sink, alibi_slopes=slopes)
        assert launches.hooks[-1]["sink"] is sink and launches.hooks[-1]["alibi_slopes"] is slopes
    call(sink=made[0][0])
    assert [recipe for recipe, *_ in launches.executed] == [1, 1, 2, 3, 4]


def test_calls_that_differ_in_what_the_host_does_not_read_share_a_recipe(launches):
    tensor = torch.empty((), dtype=torch.int64, device="cuda")
    for longest in ((7, 7), (0, 7), (9000, 1)):
        call(longest=longest)
    assert [recipe for recipe, *_ in launches.executed] == [1, 1, 1]
    call(longest=(tensor, tensor))
    call(longest=(tensor.clone(), tensor))
    assert [recipe for recipe, *_ in launches.executed] == [1, 1, 1, 2, 2]


def test_a_call_that_differs_has_a_recipe_of_its_own(launches):
    options = (
        {}, {"causal": True}, {"softmax_scale": 0.5}, {"window_size": (3, 3)}, {"sm_margin": 1},
        {"plan": Plan(128, 64)}, {"deterministic": True}, {"batch": 4}, {"used": (words(3), None)},
        {"used": (None, words(3))}, {"used": (words(3), words(3))}, {"softcap": 2.0},
        {"attention_chunk": 9}, {"tensors": fakes(total_q=41)},
        {"tensors": fakes(total_k=51)}, {"tensors": fakes(dtype=torch.float16)}, {"tensors": fakes(head_dim_v=32)},
    )  # fmt: skip
    for each in options:
        call(**each)
    assert [recipe for recipe, *_ in launches.executed] == list(range(1, len(options) + 1))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"longest": (-1, 7)}, ValueError, "max_seqlen_q must be an integer of at least 0"),
        ({"longest": (7, 7.0)}, TypeError, "max_seqlen_k must be an integer of at least 0"),
        ({"longest": (True, 7)}, TypeError, "max_seqlen_q must be an integer of at least 0"),
        ({"used": (words, None)}, TypeError, "seqused_q must be a torch.Tensor"),
        ({"softcap": 2000.0}, ValueError, "softcap must be at most 1024 on CUDA"),
        ({"page_table": 1}, NotImplementedError, "page_table"),
    ],
)
def test_a_refused_call_is_refused_again(changed, error, message, launches):
    call()
    for _ in range(2):
        with pytest.raises(error, match=message):
            call(**changed)
    assert len(launches.prepared) == 1


@pytest.mark.parametrize("place", range(4))
def test_lengths_without_memory_are_refused(place, launches, monkeypatch):
    """Also where a call of the same signature is remembered."""
    tensors, lengths = fakes(), [words(4), words(4), words(3), words(3)]
    flash_attn_varlen_func(*tensors, *lengths[:2], 7, 7, *lengths[2:])
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0 if tensor is lengths[place] else 4096)
    with pytest.raises(TypeError, match="must have memory on CUDA"):
        flash_attn_varlen_func(*tensors, *lengths[:2], 7, 7, *lengths[2:])

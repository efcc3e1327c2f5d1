"""Packed sequences on the CPU with what changes scores and masks: the oracle, calls one by one, and gradients."""

import math
from dataclasses import replace
from typing import NamedTuple

import check_packed
import hooks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import EMPTY, RAGGED, SPARE, USED, unused
from problems import EXACT
from test_hooks import BENT, BENT_BY_HAND, of_table
from test_packed import SMALL, cases, is_alone

from hopper_fa3 import flash_attn_func, flash_attn_varlen_func
from hopper_fa3.hooks import ScoreHook
from hopper_fa3.reference_packed import standard_packed

pytestmark = pytest.mark.usefixtures("one_thread")


class Options(NamedTuple):
    """What changes scores and masks, of all sequences of a case."""

    attention_chunk: int = 0
    softcap: float = 0.0
    sink: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    score: ScoreHook | None = None
    table: torch.Tensor | None = None  # bool (sequences, heads, queries, keys), of the mask hook

    @property
    def keywords(self):
        return self._asdict() | {"mask": None if self.table is None else of_table(self.table)}

    def of(self, number, queries, keys):
        """The keywords of flash_attn_func for one sequence alone, by numbers of its own."""
        slopes, table, score = self.alibi_slopes, self.table, self.score
        if table is not None:
            table = table[number : number + 1, :, : len(queries), : len(keys)]
        if score is not None:  # BENT takes a quarter of the batch entry away
            score = replace(score, cpu=lambda x, b, *place: self.score.cpu(x, b + number, *place))
        slopes = slopes[number] if slopes is not None and slopes.dim() == 2 else slopes
        return without_table(self._replace(alibi_slopes=slopes, table=table, score=score).keywords)


def without_table(keywords):
    return {name: value for name, value in keywords.items() if name != "table"}


def drawn_options(case, seed, *, table, slopes, sink, dtype=torch.float64, **numbers):
    """Options with random tensors that fit a case: ``slopes`` is None, 1 (a head) or 2 (a sequence and head)."""
    generator = torch.Generator().manual_seed(seed)
    batch, shape = len(case.lengths_q), [max(x, default=0) for x in (case.lengths_q, case.lengths_k)]
    return Options(
        sink=torch.randn(case.heads, generator=generator).to(dtype) if sink else None,
        alibi_slopes=torch.randn((batch, case.heads)[-slopes:], generator=generator) if slopes else None,
        table=torch.rand((batch, case.heads, *shape), generator=generator) < 0.8 if table else None, **numbers,
    )  # fmt: skip


@st.composite
def options(draw, case):
    return drawn_options(
        case, draw(st.integers(0, 99)), table=draw(st.booleans()), slopes=draw(st.sampled_from((0, 1, 2))),
        sink=draw(st.booleans()), attention_chunk=draw(st.sampled_from((0, 1, 2, 3, 4, 7, 30))),
        softcap=draw(st.sampled_from((0.0, 0.5, 3))), score=draw(st.sampled_from((None, BENT, BENT_BY_HAND))),
    )  # fmt: skip


calls = cases().flatmap(lambda case: st.tuples(st.just(case), options(case)))


def differentiated(attention, tensors, arrived):
    """((out, lse), gradients of the tensors that are not None, in their order)"""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    results = attention(*leaves)
    gradients = torch.autograd.grad(results, [x for x in leaves if x is not None], arrived)
    return [x.detach() for x in results], gradients


def packed(case, inputs, given):
    def attention(q, k, v, sink):
        keywords = without_table(given.keywords) | {"sink": sink} | case.options
        return flash_attn_varlen_func(q, k, v, *inputs[3:], return_attn_probs=True, **keywords)

    return attention


def is_oracle(case, given):
    inputs = case.inputs()
    arrived = case.arriving(inputs)
    left, right = (None if side == -1 else side for side in case.window_size)

    def oracle(q, k, v, sink):
        keywords = without_table(given.keywords) | {"sink": sink}
        return standard_packed(
            q, k, v, inputs.lengths, softmax_scale=case.softmax_scale, left=left, right=0 if case.causal else right,
            **keywords,
        )  # fmt: skip

    ours = differentiated(packed(case, inputs, given), (*inputs[:3], given.sink), arrived)
    clean = [x.nan_to_num(0) for x in (*inputs[:3], *arrived)]
    # A query without keys has an LSE of -inf, which no derivative passes
    results, _ = differentiated(oracle, (*clean[:3], given.sink), clean[3:])
    clean[4] = clean[4].masked_fill(results[1] == -math.inf, 0)
    expected = differentiated(oracle, (*clean[:3], given.sink), clean[3:])
    for a, b in zip((*ours[0], *ours[1]), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def one_by_one(case, given, *, bits):
    """Each sequence is as in a call of its own; rows of none are 0, -inf and without gradient."""
    inputs = case.inputs()
    dout, dlse = case.arriving(inputs)
    tensors = (*inputs[:3], given.sink)
    (out, lse), gradients = differentiated(packed(case, inputs, given), tensors, (dout, dlse))
    sink_gradient = 0
    for number, (queries, keys, parts) in enumerate(check_packed.sequences(inputs)):
        keywords = given.of(number, *inputs.lengths.rows[number]) | case.options

        def alone(q, k, v, sink, keywords=keywords):
            return flash_attn_func(q, k, v, return_attn_probs=True, **keywords | {"sink": sink})

        arrived = dout[None, queries], dlse[None, :, queries]
        results, own = differentiated(alone, (*parts, given.sink), arrived)
        ours = [x[rows] for x, rows in zip(gradients[:3], (queries, keys, keys), strict=True)]
        is_alone((out[queries], lse[:, queries], *ours), [x[0] for x in (*results, *own[:3])], bits=bits)
        sink_gradient = sink_gradient + (0 if given.sink is None else own[3])
    if given.sink is not None:
        torch.testing.assert_close(gradients[3], sink_gradient + torch.zeros_like(given.sink), **EXACT)
    rows, key_rows = (unused(inputs.lengths, len(inputs[place]), place) for place in (0, 1))
    assert not out[rows].any() and (lse[:, rows] == -math.inf).all() and not gradients[0][rows].any()
    assert not gradients[1][key_rows].any() and not gradients[2][key_rows].any()


@given(calls)
@settings(max_examples=150, deadline=None)
def test_drawn_calls_are_the_oracle(call):
    is_oracle(*call)


@given(calls)
@settings(max_examples=150, deadline=None)
def test_drawn_calls_are_those_of_calls_one_by_one(call):
    one_by_one(*call, bits=False)


NUMBERS = {"attention_chunk": 64, "softcap": 2.0}
KINDS = (
    {"attention_chunk": 64}, {"softcap": 0.8}, {"sink": True}, {"slopes": 1}, {"slopes": 2}, {"table": True},
    {"score": BENT}, {"sink": True, "slopes": 2, "table": True, "score": BENT_BY_HAND, **NUMBERS},
)  # fmt: skip
NONE = {"sink": False, "slopes": 0, "table": False}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
@pytest.mark.parametrize("case", (RAGGED, EMPTY, SPARE, USED), ids=lambda case: case.mix)
def test_mixes_of_lengths(case, kind):
    case = replace(case, dtype="float64", head_dim=16, head_dim_v=24, causal=case is RAGGED)
    given = drawn_options(case, 0, **NONE | kind)
    is_oracle(case, given)
    one_by_one(case, given, bits=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", (RAGGED, EMPTY, SPARE, USED), ids=lambda case: case.mix)
def test_hooks_that_kernels_run_too(case, causal):
    """In 16 bit, within the bounds that kernels are held to: by sequence, head, query and key."""
    case = replace(case, head_dim=16, head_dim_v=16, causal=causal)
    for chosen in ({"score": hooks.DISTANCE, "mask": hooks.SCATTERED}, {"score": hooks.BENT, "mask": hooks.DOCUMENTS}):
        check_packed.check_both(case, "cpu", sink=torch.tensor([0.5, -math.inf]), softcap=15.0, **chosen)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
def test_finite_differences(kind):
    case = replace(USED, lengths_q=(3, 0, 4, 3), lengths_k=(2, 3, 0, 5), used_q=(2, 0, 4, 2), used_k=(2, 1, 0, 4))
    case = replace(case, before=(1, 1), behind=(1, 2), window_size=(3, 2), **SMALL)
    given = drawn_options(case, 1, **NONE | kind | ({"attention_chunk": 3} if "attention_chunk" in kind else {}))
    inputs = case.inputs()
    tensors = [None if x is None else x.nan_to_num(0).requires_grad_() for x in (*inputs[:3], given.sink)]

    def results(*tensors):
        out, lse = packed(case, inputs, given)(*tensors, *[None] * (4 - len(tensors)))
        return out, lse.masked_fill(lse == -math.inf, 0)

    assert torch.autograd.gradcheck(results, [x for x in tensors if x is not None])


def test_a_sink_of_sequences_without_keys():
    """Their LSE is the sink, whose gradient is that of the LSE; rows of no sequence have no sink."""
    case = replace(SPARE, lengths_k=(0, 0, 64, 0), **SMALL)
    inputs, sink = case.inputs(), torch.tensor([0.5, -math.inf], dtype=torch.float64, requires_grad=True)
    out, lse = flash_attn_varlen_func(*inputs, sink=sink, return_attn_probs=True)
    seen = torch.zeros(len(inputs.q), dtype=torch.bool)
    seen[case.before[0] + 100 : case.before[0] + 164] = True
    used = ~unused(inputs.lengths, len(seen), 0)
    assert not out[~seen].any() and out[seen].any(-1).all()
    assert (lse[0, used & ~seen] == 0.5).all() and (lse[1, ~seen] == -math.inf).all()
    assert (lse[0, ~used] == -math.inf).all() and (~used).any()
    (gradient,) = torch.autograd.grad(lse[0, used & ~seen].sum(), sink)
    assert gradient.tolist() == [100 + 257, 0]


def test_a_gradient_of_the_sink_alone():
    case = replace(RAGGED, causal=True, **SMALL)
    inputs, sink = case.inputs(), torch.tensor([0.5, -1], dtype=torch.float64)
    given, arrived = Options(sink=sink), case.arriving(inputs)
    _, (*_, expected) = differentiated(packed(case, inputs, given), (*inputs[:3], sink), arrived)
    leaf = sink.clone().requires_grad_()
    results = packed(case, inputs, given)(*inputs[:3], leaf)
    (found,) = torch.autograd.grad(results, leaf, arrived)
    assert torch.equal(found, expected) and found.all()


def test_the_gradient_of_a_16_bit_sink_is_summed_in_float32():
    """300 sequences of different lengths, each with a gradient of 1: bfloat16 counts to 256."""
    lengths = tuple(range(1, 301))
    case = replace(RAGGED, lengths_q=lengths, lengths_k=(0,) * 300, head_dim=8, head_dim_v=8)
    inputs, sink = case.inputs(), torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    _, lse = flash_attn_varlen_func(*inputs, sink=sink, return_attn_probs=True)
    last = inputs.cu_seqlens_q[1:].long() - 1
    (gradient,) = torch.autograd.grad(lse[:, last].sum(), sink)
    assert gradient.dtype == torch.bfloat16 and gradient.tolist() == [300, 300]


def test_what_changes_nothing_leaves_the_bits():
    case = replace(RAGGED, causal=True, head_dim=16, head_dim_v=16)
    inputs = case.inputs()
    plain = flash_attn_varlen_func(*inputs, causal=True, return_attn_probs=True)
    for option in ({"softcap": 0}, {"attention_chunk": 513}, {"sink": torch.full((2,), -math.inf)},
                   {"alibi_slopes": torch.zeros(9, 2)}):  # fmt: skip
        ours = flash_attn_varlen_func(*inputs, causal=True, return_attn_probs=True, **option)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True)), option


def test_tensors_of_a_hook_that_require_grad_are_refused():
    inputs = replace(RAGGED, **SMALL).inputs()
    bias = torch.ones((), dtype=torch.float64, requires_grad=True)
    hook = ScoreHook("biased", None, cpu=lambda x, *_: x + bias)
    inputs.q.requires_grad_()
    with pytest.raises(NotImplementedError, match="tensors in a score hook must not require grad"):
        flash_attn_varlen_func(*inputs, score=hook)
    with torch.no_grad():
        flash_attn_varlen_func(*inputs, score=hook)


def test_what_autograd_keeps():
    """The sink and the slopes as they are, and nothing else that a plain call does not keep."""
    inputs, sink, slopes = replace(RAGGED, **SMALL).inputs(), torch.ones(2).double(), torch.ones(9, 2)
    leaves, kept = [x.requires_grad_() for x in (*inputs[:3], sink)], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        results = flash_attn_varlen_func(*inputs, sink=sink, alibi_slopes=slopes, return_attn_probs=True)
    known = (*results, *leaves, slopes, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in known}

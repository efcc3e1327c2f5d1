"""The bounds of check.py and check_gradients.py for packed sequences: each sequence is held to them by itself."""

import contextlib
import math

import check
import check_gradients
import torch
from packed_cases import Inputs, unused

from hopper_fa3 import flash_attn_varlen_func


def run(inputs, *, out=None, **options):
    """(out, lse), with NaN before in out and in the memory that the LSE is likely to get: see check.run."""
    (total_q, heads, _), head_dim_v = inputs.q.shape, inputs.v.shape[-1]
    if out is None:
        out = inputs.q.new_empty((total_q, heads, head_dim_v))
    out.fill_(math.nan)
    torch.full((heads, total_q), math.nan, device=out.device)
    got, lse = flash_attn_varlen_func(*inputs, out=out, return_attn_probs=True, **options)
    assert (got.data_ptr(), got.stride()) == (out.data_ptr(), out.stride()), "not the tensor given as out="
    return got, lse


def run_gradients(inputs, dout=None, dlse=None, *, wanted="qkv", **options):
    """(dq, dk, dv), with NaN in freed memory before; None for what is not ``wanted``: see check_gradients.run."""
    leaves = check_gradients.leaves_of(*inputs[:3], wanted)
    results = flash_attn_varlen_func(*leaves, *inputs[3:], return_attn_probs=True, **options)
    outputs, arrived = zip(*((x, y) for x, y in zip(results, (dout, dlse), strict=True) if y is not None), strict=True)
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    check_gradients.spoil_free_memory(*(leaf[None] for leaf in leaves))
    got = iter(torch.autograd.grad(outputs, asked, arrived))
    return tuple(next(got) if leaf.requires_grad else None for leaf in leaves)


def sequences(inputs):
    """For each sequence: the slices of its used rows in q and in k, and its q, k and v as a batch of one."""
    for rows in inputs.lengths.rows:
        queries, keys = (slice(each.start, each.stop) for each in rows)
        yield queries, keys, (inputs.q[None, queries], inputs.k[None, keys], inputs.v[None, keys])


def compare(out, lse, inputs, **options):
    """AssertionError where (out, lse) is not attention of each sequence, or 0 and -inf in rows that none uses."""
    (total_q, heads, _), head_dim_v = inputs.q.shape, inputs.v.shape[-1]
    assert (out.dtype, out.shape) == (inputs.q.dtype, (total_q, heads, head_dim_v))
    assert (lse.dtype, lse.shape) == (torch.float32, (heads, total_q))
    rows = unused(inputs.lengths, total_q, 0).to(out.device)
    assert not out[rows].any() and (lse[:, rows] == -math.inf).all(), "rows of no sequence must be 0 and -inf"
    for number, (queries, _, tensors) in enumerate(sequences(inputs)):
        with located(number, tensors):
            check.compare(out[None, queries], lse[None, :, queries], *tensors, **of_sequence(number, **options))


def compare_gradients(gradients, inputs, dout=None, dlse=None, **options):
    """AssertionError where (dq, dk, dv), of which any may be None, are not those of each sequence, 0 in other rows."""
    for name, x, ours, place in zip(("dq", "dk", "dv"), inputs[:3], gradients, (0, 1, 1), strict=True):
        if ours is not None:
            assert (ours.dtype, ours.shape) == (x.dtype, x.shape)
            rows = unused(inputs.lengths, len(x), place).to(x.device)
            assert not ours[rows].any(), f"{name}: rows of no sequence must be exactly 0"
    for number, (queries, keys, tensors) in enumerate(sequences(inputs)):
        parts = [None if x is None else x[None, rows] for x, rows in zip(gradients, (queries, keys, keys), strict=True)]
        arrived = {
            "dout": None if dout is None else dout[None, queries],
            "dlse": None if dlse is None else dlse[None, :, queries],
        }
        with located(number, tensors):
            check_gradients.compare(parts, *tensors, **arrived, **of_sequence(number, **options))


def check_both(case, device, how=None, **options):
    """Values and gradients; those of the sink by torch's own formula in float64. ``how``: options that change no
    value.
    """
    how, options = how or {}, case.options | options
    inputs = case.inputs(device)
    out, lse = run(inputs, **options, **how)
    compare(out, lse, inputs, **options)
    dout, dlse = case.arriving(inputs)
    gradients = run_gradients(inputs, dout, dlse, **options, **how)
    compare_gradients(gradients, inputs, dout, dlse, **options)
    if options.get("sink") is not None:
        check_sink(inputs, out, lse, dout, dlse, **options, **how)
    return out, lse


def check_sink(inputs, out, lse, dout, dlse, *, sink, **options):
    """d sink = -sum exp(sink - LSE) (rowsum(dO O) - dLSE) over the rows that sequences use, from the results that the
    kernel itself gave.
    """
    leaf = sink.detach().clone().requires_grad_()
    results = flash_attn_varlen_func(*inputs, sink=leaf, return_attn_probs=True, **options)
    got, again = (torch.autograd.grad(results, leaf, (dout, dlse), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(got, again)  # whether or not the other gradients repeat
    delta = (out.double() * dout.double()).sum(-1).mT - dlse.double()
    terms = torch.exp(sink.double()[:, None] - lse.double()) * delta
    terms[:, unused(inputs.lengths, len(out), 0).to(out.device)] = 0
    terms[sink == -math.inf] = 0
    expected = -terms.sum(1)
    # Sums of float32 terms in any order, each off by a few of its last bits, its LSE's among them
    bound = 2.0**-18 * terms.abs().sum(1) + 2.0**-20 + expected.abs() * torch.finfo(sink.dtype).eps
    assert got.dtype == sink.dtype and ((got.double() - expected).abs() <= bound).all()


def check_neighbours_of_nan(case, device, **options):
    """A sequence's results and gradients have the same bits where all other rows are NaN."""
    inputs, options = case.inputs(device), case.options | options
    dout, _ = case.arriving(inputs)
    results, gradients = run(inputs, **options), run_gradients(inputs, dout, **options, deterministic=True)
    for number, (queries, keys) in enumerate(inputs.lengths.rows):
        places = [slice(rows.start, rows.stop) for rows in (queries, keys, keys, queries)]
        alone = [torch.full_like(x, math.nan) for x in (*inputs[:3], dout)]
        for x, place, whole in zip(alone, places, (*inputs[:3], dout), strict=True):
            x[place] = whole[place]
        given = Inputs(*alone[:3], *inputs[3:])
        out, lse = run(given, **options)
        assert torch.equal(out[places[0]], results[0][places[0]]), f"sequence {number}"
        assert torch.equal(lse[:, places[0]], results[1][:, places[0]]), f"sequence {number}"
        found = run_gradients(given, alone[3], **options, deterministic=True)
        for name, place, ours, theirs in zip("qkv", places[:3], found, gradients, strict=True):
            assert torch.equal(ours[place], theirs[place]), f"sequence {number}: d{name}"


def of_sequence(number, *, alibi_slopes=None, score=None, mask=None, **options):
    """The options of one sequence, alone; hooks for tensors."""
    if alibi_slopes is not None:
        own = alibi_slopes[number : number + 1] if alibi_slopes.dim() == 2 else alibi_slopes
        options = options | {"alibi_slopes": own}
    hooks = {"score": score, "mask": mask}
    given = {name: hook for name, hook in hooks.items() if hook is not None}
    return options | {name: check_gradients.from_head(hook, number, 0) for name, hook in given.items()}


@contextlib.contextmanager
def located(number, tensors):
    """Says in which sequence an assertion inside the block failed."""
    try:
        yield
    except AssertionError as error:
        place = f"sequence {number} ({tensors[0].shape[1]} queries, {tensors[1].shape[1]} keys)"
        raise AssertionError(f"{place}: {error}") from error

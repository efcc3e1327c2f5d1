"""The public functions. No logic here: problem.py validates, reference.py and launch.py compute; of packed sequences
problem_packed.py, reference_packed.py and launch_packed.py.

How a pair scores, and whether it is seen, in all functions with these arguments. With ``p = i + seqlen_k - seqlen_q``
the key on query i's diagonal (masks align to the bottom right), in this order::

    score = softmax_scale * q.k
    softcap         float, 0 for none          score = softcap * tanh(score / softcap)
    alibi_slopes    float32, ``(heads,)``      score -= slope * |p - j|
                    or ``(batch, heads)``
    score           hooks.ScoreHook            what it makes of the score
    causal          bool                       seen only if j <= p
    window_size     (left, right), -1 or None  seen only if p - left <= j <= p + right; causal sets right to 0
                    for an open side
    attention_chunk int, 0 for none            seen only if j // attention_chunk == p // attention_chunk
    mask            hooks.MaskHook             seen only if it says so
    sink            ``(heads,)``, float32 or   one more logit of each query, which has no value: it is in the softmax
                    q's dtype                  and the LSE, log(sum exp(score) + exp(sink)); -inf is none

Any of them combine. All have a gradient that counts them in; the sink gets one of its own, the slopes none. The time is
that of the blocks that some query sees; blocks that only a hook hides are computed. On CUDA softcap is at most 1024,
and a hook needs functions for CUDA (hopper_fa3/hooks.py).
"""

import torch
from torch.autograd import forward_ad

from . import launch, launch_packed, ops, reference, reference_packed
from .checks import check_states
from .problem import Problem, split_packed
from .problem_packed import PackedProblem

MEMO_ENTRIES = 4096  # one or two KiB each: bounds what a program with endlessly varying lengths keeps
_recipes = {}  # signature of a CUDA call -> Recipe or PackedRecipe: a call seen before skips validation and planning


def _traits(tensor):
    """What a recipe depends on of a tensor whose address it does not."""
    if tensor is None:
        return None
    wanted = tensor.requires_grad and torch.is_grad_enabled()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() == 0, wanted


def _recall(q, k, v, out, hook, options):
    """``(signature, recipe)``: all that a CUDA call's recipe depends on, and the recipe of an equal call before it.

    Both None where there is no signature (CPU tensors, forward mode, what has no memory); then Problem says what is
    wrong, if anything. ``hook``: sink and slopes. Built from raw attributes because host time counts: validating anew
    costs several times the launch.
    """
    try:
        if not q.is_cuda or forward_ad._current_level >= 0:  # tangents are no part of a signature
            return None, None
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), 1 if out is None else out.data_ptr()
        if not all(addresses):
            return None, None
        signature = (
            q.shape, q.stride(), q.dtype, q.device, addresses[0] % launch.TMA_ALIGNMENT,
            k.shape, k.stride(), k.dtype, k.device, addresses[1] % launch.TMA_ALIGNMENT,
            v.shape, v.stride(), v.dtype, v.device, addresses[2] % launch.TMA_ALIGNMENT,
            out is not None
            and (out.shape, out.stride(), out.dtype, out.device, addresses[3] % launch.TMA_ALIGNMENT),
            torch.is_grad_enabled()
            and (q.requires_grad or k.requires_grad or v.requires_grad or (out is not None and out.requires_grad)),
            _traits(hook[0]), _traits(hook[1]), options,
        )  # fmt: skip
        return signature, _recipes.get(signature)
    except (AttributeError, TypeError, RuntimeError):  # no tensors, no plain values, tensors without memory
        return None, None


def _lengths_recalled(lengths, longest):
    """What a recipe of packed sequences depends on of cu_seqlens and seqused (``lengths``) and max_seqlen
    (``longest``): not on what they hold. None where one is of no legal kind; then PackedProblem says so.
    """
    try:
        kinds = tuple(
            (x >= 0) if type(x) is int else (x.dtype, x.shape)  # a bool or a float has none of these
            for x in longest
        )
        traits = tuple(
            None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() != 0) for x in lengths
        )
        return None if False in kinds else (kinds, traits)
    except (AttributeError, RuntimeError):  # no tensors, tensors without memory
        return None


def _remember(signature, recipe):
    if signature is None:
        return
    if len(_recipes) >= MEMO_ENTRIES:
        _recipes.clear()
    _recipes[signature] = recipe


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False, *, sink=None, alibi_slopes=None, score=None, mask=None, block_mask=None, out=None,
    plan=None,
):  # fmt: skip
    """Exact attention, ``softmax(softmax_scale * Q K^T + mask) V``, without ever holding the score matrix.

    On an sm_90 GPU by the FlashAttention-3 algorithm (Shah et al. 2024); on the CPU blockwise in PyTorch
    (FlashAttention-2, Dao 2023, algorithm 1). Differentiable once: the gradients recompute the scores from q, k, v, out
    and the LSE, which is all that is kept.

    q: ``(batch, seqlen_q, heads, head_dim)``. k: ``(batch, seqlen_k, heads_k, head_dim)``.
    v: ``(batch, seqlen_k, heads_k, head_dim_v)``.
        One dtype: bfloat16 or float16 on CUDA, float16 to float64 on the CPU. head_dim and head_dim_v: multiples of 8
        up to 256 on CUDA, any on the CPU. Query head h reads K/V head ``h // (heads // heads_k)``. Strides are free.
    softmax_scale: factor of the scores, ``head_dim ** -0.5`` by default; may be 0 or negative.
    causal: the last query sees all keys, each earlier one sees one key less.
    window_size, attention_chunk, softcap, sink, alibi_slopes, score, mask: which keys a query sees and what the scores
        are: see the top of hopper_fa3/api.py.
    sm_margin: number of SMs that the kernels leave free; the short ones before and behind the gradients' main kernel do
        not. deterministic: gradients are bit-equal from run to run (the forward always is).
    return_attn_probs: return ``(out, lse)``; no probabilities, as in FlashAttention-3.
    out: tensor to write to: ``(batch, seqlen_q, heads, head_dim_v)``, q's dtype and device; must share no memory with
        q, k and v.
    plan: a hopper_fa3.plan.Plan instead of the chosen one (CUDA; the CPU path has one way).
    The other arguments are not built yet and must keep their defaults.

    Returns out ``(batch, seqlen_q, heads, head_dim_v)`` in q's dtype, and where asked for the natural-log LSE
    ``(batch, heads, seqlen_q)`` in float32 (float64 for float64). A query that sees no key yields 0 and LSE -inf, or
    the sink.

    Raises TypeError for dtypes, ValueError for shapes and values, NotImplementedError for what is not built yet,
    RuntimeError for devices other than the CPU and sm_90.
    """
    options = (
        softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, num_splits,
        pack_gqa, deterministic, sm_margin, score, mask, block_mask, plan,
    )  # fmt: skip
    signature, recipe = _recall(q, k, v, out, (sink, alibi_slopes), options)
    if recipe is None:
        problem = Problem.from_tensors(
            q, k, v, softmax_scale=softmax_scale, causal=causal, qv=qv, q_descale=q_descale, k_descale=k_descale,
            v_descale=v_descale, window_size=window_size, attention_chunk=attention_chunk, softcap=softcap,
            num_splits=num_splits, pack_gqa=pack_gqa, deterministic=deterministic, sm_margin=sm_margin, sink=sink,
            alibi_slopes=alibi_slopes, score=score, mask=mask, block_mask=block_mask, out=out, plan=plan,
        )  # fmt: skip
        if problem.device.type == "cpu":
            out, lse = reference.blockwise(problem, q, k, v, sink=sink, alibi_slopes=alibi_slopes, out=out)
            return (out, lse) if return_attn_probs else out
        how = {"plan": plan, "sm_margin": sm_margin, "deterministic": deterministic}
        recipe = launch.prepare(problem, q, k, v, sink=sink, out=out, **how)
        _remember(signature, recipe)
    if recipe.gradients is not None:
        out, lse = ops.Attention.apply(q, k, v, sink, alibi_slopes, recipe)
    else:
        hook = {"sink": sink, "alibi_slopes": alibi_slopes}
        out, lse = launch.execute(recipe, q, k, v, out, **hook, want_lse=return_attn_probs)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False, *, sink=None, alibi_slopes=None, score=None, mask=None, block_mask=None, page_table=None,
    out=None, plan=None,
):  # fmt: skip
    """flash_attn_func for sequences of different lengths, packed one behind the other into one tensor.

    q: ``(total_q, heads, head_dim)``. k: ``(total_k, heads_k, head_dim)``. v: ``(total_k, heads_k, head_dim_v)``.
        Dtypes, head dims, heads and strides as in flash_attn_func.
    cu_seqlens_q, cu_seqlens_k: int32 ``(batch + 1,)``, contiguous, on q's device: the rows of sequence b go from
        ``cu_seqlens[b]`` to before ``cu_seqlens[b + 1]``. They start at 0 or above, never decrease, and end at the
        total or below. Sequences may be empty.
    max_seqlen_q, max_seqlen_k: at least the longest sequence's used length; an int or a 0-dim tensor of integers. No
        result depends on them.
    seqused_q, seqused_k: int32 ``(batch,)``, contiguous, on q's device: how many of its rows, the first ones, a
        sequence uses, from 0 to its length. None: all.
    causal, window_size, attention_chunk, softcap, sink, alibi_slopes, score, mask: as in flash_attn_func within each
        sequence, which is a batch entry, with its used lengths as seqlen_q and seqlen_k.
    page_table: not built yet. The other arguments are those of flash_attn_func.

    The host reads nothing from a GPU, so what cu_seqlens, seqused and max_seqlen hold is checked on the CPU only. Rows
    that no sequence uses may hold anything, also NaN: it reaches no result, and their gradients are 0.

    Returns out ``(total_q, heads, head_dim_v)`` in q's dtype, and with return_attn_probs the natural-log LSE ``(heads,
    total_q)`` in float32 (float64 for float64). A query that sees no key yields 0 and LSE -inf, or the sink; a row of q
    that no sequence uses always the former. Differentiable as flash_attn_func is, and raises what it does.
    """
    lengths = reference_packed.Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    options = (
        softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, num_splits,
        pack_gqa, deterministic, sm_margin, score, mask, block_mask, page_table, plan,
        _lengths_recalled(lengths, (max_seqlen_q, max_seqlen_k)),
    )  # fmt: skip
    signature, recipe = (None, None) if options[-1] is None else _recall(q, k, v, out, (sink, alibi_slopes), options)
    if recipe is None:
        problem = PackedProblem.from_tensors(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
            softmax_scale=softmax_scale, causal=causal, qv=qv, q_descale=q_descale, k_descale=k_descale,
            v_descale=v_descale, window_size=window_size, attention_chunk=attention_chunk, softcap=softcap,
            num_splits=num_splits, pack_gqa=pack_gqa, deterministic=deterministic, sm_margin=sm_margin, sink=sink,
            alibi_slopes=alibi_slopes, score=score, mask=mask, block_mask=block_mask, page_table=page_table, out=out,
            plan=plan,
        )  # fmt: skip
        if problem.device.type == "cpu":
            out, lse = reference_packed.blockwise_packed(
                problem, q, k, v, lengths, sink=sink, alibi_slopes=alibi_slopes, out=out
            )
            return (out, lse) if return_attn_probs else out
        how = {"plan": plan, "sm_margin": sm_margin, "deterministic": deterministic}
        recipe = launch_packed.prepare(problem, q, k, v, sink=sink, out=out, **how)
        _remember(signature, recipe)
    if recipe.gradients is not None:
        out, lse = ops.PackedAttention.apply(q, k, v, sink, alibi_slopes, recipe, *lengths)
    else:
        hook = {"sink": sink, "alibi_slopes": alibi_slopes}
        out, lse = launch_packed.execute(recipe, q, k, v, lengths, out, **hook, want_lse=return_attn_probs)
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False, *, sink=None, out=None,
):  # fmt: skip
    """Attention over a key/value cache, for decoding. Not built yet: raises NotImplementedError."""
    raise NotImplementedError("flash_attn_with_kvcache is not built yet")


def flash_attn_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    """flash_attn_func on views of one tensor.

    qkv: ``(batch, seqlen, 3, heads, head_dim)``, or with ``num_heads_q`` given ``(batch, seqlen, num_heads_q + 2
    heads_k, head_dim)``: the query heads, then those of K, then those of V. The other arguments, the results and the
    errors are those of flash_attn_func.
    """
    q, k, v = split_packed(qkv, num_heads_q)
    return flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, window_size=window_size, attention_chunk=attention_chunk, softcap=softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Merge split-KV partial results into (out, lse). Not built yet: raises NotImplementedError."""
    raise NotImplementedError("flash_attn_combine is not built yet")


def merge_states(out_a, lse_a, out_b, lse_b):
    """Merge the results of the same queries over two disjoint sets of keys into the result over both.

    out_a, out_b: ``(batch, seqlen_q, heads, head_dim_v)`` of one floating-point dtype, or ``(total, heads,
    head_dim_v)``. lse_a, lse_b: natural log, ``(batch, heads, seqlen_q)`` or ``(heads, total)``; -inf marks a part
    without weight: its out is not read beside another part, and where both are -inf the result is 0 (NaN if one is).

    Returns out in out_a's dtype and the LSE in float32 (float64 where an LSE is). Arithmetic in the LSE's dtype, with
    gradients. From ``exp(lse) = exp(lse_a) + exp(lse_b)``: the online softmax (Milakov and Gimelshein 2018) with a part
    as one step. Raises TypeError for dtypes, ValueError for shapes, RuntimeError for tensors on different devices.
    """
    check_states(out_a, lse_a, out_b, lse_b)
    return reference.merge(out_a, lse_a, out_b, lse_b)

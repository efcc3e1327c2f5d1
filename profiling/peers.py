"""What we compare with: PyTorch's attention backends, attention written out in PyTorch, FlashAttention-4 and xFormers,
each as a launch on the same q, k, v.

Inputs are ours: (batch, seqlen, heads, head_dim). A peer is chosen from PEERS by name; ``missing()`` says why it cannot
run here.
"""

import functools
import importlib.metadata
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from timing import Launch
from torch.nn.attention import SDPBackend, sdpa_kernel

MATH_BYTES = 4 * 2**30  # the math backend keeps every score: only where those fit easily
# Of the 16-bit scores; the softmax beside them needs as much again, a backward four times. 16 GiB: 32 heads at 16384.
STANDARD_GIB = 16
NO_BACKEND = ("No available kernel", "No viable backend")  # how torch's errors begin whose reasons are its warnings
REFUSALS = Exception  # a peer's compiler raises errors of classes of its own


class Peer(NamedTuple):
    """Makes Launches of (q, k, v, causal), and what else a suite's cases ask for: ``kernel`` the shortest way to its
    kernel, ``public`` what people call, ``deterministic`` the same where its gradients come out bit-equal each time.
    """

    name: str
    missing: Callable  # () -> why it is not available, or None
    refuses: Callable  # the same arguments -> why it cannot run these inputs, or None
    kernel: Callable
    public: Callable
    deterministic: Callable | None = None  # None: it has no such option of a call


def sdpa(q, k, v, causal, backend):
    """torch.nn.functional.scaled_dot_product_attention held to one backend.

    It wants (batch, heads, seqlen, head_dim), which views give, and aligns ``is_causal`` to the top left: refused by
    square() where that differs from our bottom right.
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    call = functools.partial(functional.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=grouped)
    return Launch(lambda: call().transpose(1, 2), functools.partial(sdpa_kernel, backend))


def square(q, k, v, causal):
    """Why torch's top-left mask would differ from ours, or None."""
    if causal and q.shape[1] != k.shape[1]:
        return "torch aligns causal masks to the top left"
    return None


def small(q, k, v, causal):
    """Why the math backend, which forms all scores, is left out, or None."""
    batch, seqlen_q, heads, _ = q.shape
    if batch * heads * seqlen_q * k.shape[1] * 4 > MATH_BYTES:
        return "its score matrix is too large"
    return square(q, k, v, causal)


def standard(q, k, v, causal):
    """Attention as it is defined, in four unfused steps of PyTorch: scores, mask, softmax, product with V; all in the
    inputs' dtype. Grouped query heads become further rows of their K/V head, so K and V are not repeated.
    """
    (_, seqlen_q, heads, head_dim), (_, seqlen_k, heads_k, _) = q.shape, k.shape
    grouped = (heads // heads_k, seqlen_q)
    hidden = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device).triu(seqlen_k - seqlen_q + 1)

    def call():
        rows = (q * head_dim**-0.5).unflatten(2, (heads_k, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        scores = rows @ k.permute(0, 2, 3, 1)
        if causal:
            scores.unflatten(2, grouped).masked_fill_(hidden, -math.inf)
        out = torch.softmax(scores, -1) @ v.transpose(1, 2)
        return out.unflatten(2, grouped).permute(0, 3, 1, 2, 4).flatten(2, 3)

    return Launch(call)


def too_large(q, k, v, causal):
    """Why attention in unfused steps is left out, or None."""
    size = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1] * q.element_size() / 2**30
    if size > STANDARD_GIB:
        return f"a score matrix of more than {STANDARD_GIB} GiB"
    if causal and q.shape[1] > k.shape[1]:
        return "its softmax gives NaN for queries that see no key"
    return None


def refusal(launch, errors=REFUSALS):
    """Why a backend does not take these inputs (it says so when called, by one of ``errors``), or None.

    torch says in warnings why each of its backends is no choice, and in the error only that none is left.
    """
    why = None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            with launch.context():
                launch.call()
        except errors as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
    if why is None:
        for warning in heard:
            pass_on(str(warning.message), warning.category, warning.filename, warning.lineno)
        return None
    reasons = _reasons(str(warning.message) for warning in heard) if why.startswith(NO_BACKEND) else ()
    return " ".join([why, *reasons][:2])


@functools.cache  # each once: a benchmark asks in every cell
def pass_on(text, category, filename, line):
    warnings.warn_explicit(text, category, filename, line)


def _reasons(texts):
    """What torch's warnings say against the one backend that was not switched off."""
    for text in texts:
        text = text.split(" (Triggered internally")[0].strip()
        if not text.endswith("not used because:") and "runtime disabled" not in text:
            yield text


def flash_attention_4():
    """The module of FlashAttention-4's functions, or why it cannot be imported (a string)."""
    try:
        from flash_attn.cute import interface
    except ImportError as error:
        return f"flash-attn-4 cannot be imported: {error}"
    return interface


def fa4_missing():
    module = flash_attention_4()
    return module if isinstance(module, str) else None


def fa4_kernel(q, k, v, causal, **options):
    """Without the autograd wrapper, into a given output: the least host time that its Python offers."""
    forward, out = flash_attention_4()._flash_attn_fwd, v.new_empty((*q.shape[:-1], v.shape[-1]))
    return Launch(lambda: forward(q, k, v, causal=causal, return_lse=True, out=out, **options)[0])


def fa4_public(q, k, v, causal, **options):
    function = flash_attention_4().flash_attn_func
    return Launch(lambda: first(function(q, k, v, causal=causal, **options)))


def xformers_missing():
    try:
        import xformers.ops  # noqa: F401  (is it there, and does it load?)
    except ImportError as error:
        return f"xformers cannot be imported: {error}"
    return None


def xformers_attention(q, k, v, causal):
    """xformers.ops.memory_efficient_attention with its own choice of kernel.

    Heads are (K/V head, query head of the group) where they are grouped: K and V are then expanded views.
    """
    from xformers import ops

    bias = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if causal else None
    heads, heads_k = q.shape[2], k.shape[2]
    if heads != heads_k:
        group = heads // heads_k
        q = q.unflatten(2, (heads_k, group))
        k, v = (tensor.unsqueeze(3).expand(-1, -1, -1, group, -1) for tensor in (k, v))
    call = functools.partial(ops.memory_efficient_attention, q, k, v, attn_bias=bias)
    return Launch(call if heads == heads_k else lambda: call().flatten(2, 3))


def first(result):
    return result[0] if isinstance(result, tuple) else result


def never(*arguments):
    """No inputs are known beforehand to be refused."""
    return None


def torch_peer(name, backend, refuses=square):
    make = functools.partial(sdpa, backend=backend)
    return Peer(name, lambda: None, refuses, make, make)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("fa4", fa4_missing, never, fa4_kernel, fa4_public, functools.partial(fa4_public, deterministic=True)),
        torch_peer("cudnn", SDPBackend.CUDNN_ATTENTION),
        torch_peer("flash", SDPBackend.FLASH_ATTENTION),
        torch_peer("efficient", SDPBackend.EFFICIENT_ATTENTION),
        torch_peer("math", SDPBackend.MATH, small),
        Peer("xformers", xformers_missing, never, xformers_attention, xformers_attention),
        Peer("standard", lambda: None, too_large, standard, standard),
    )
}


def versions():
    """Versions of the packages that the peers come from; None where one is not installed."""
    found = {"cudnn": torch.backends.cudnn.version()}
    for package in ("flash-attn-4", "quack-kernels", "xformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found

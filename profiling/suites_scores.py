"""`make bench ARGS="--suite scores"`: softcap, sink and ALiBi slopes beside our own plain scores."""

from dataclasses import dataclass

import torch
from cost import backward_teraflops, teraflops
from peers import Peer, never
from peers_features import SCORED
from selection import TOKENS, WIDTH, Case
from suites import BACKWARD, FORWARD, Yardstick, gradient, masks
from timing import Launch

from hopper_fa3 import flash_attn_func

SEQLEN = 8192
# Gemma 2's; and one so small that kernels look at each score (kernels/config.py: SMALLEST_CAP), half of Grok-1's
SOFTCAPS = {"softcap 50": 50.0, "softcap 15": 15.0}
# Which scores at which head dims: those that goals are about first, because a run's time may not reach to the last
SHAPES = {
    128: ("softcap 50", "sink", "ALiBi", "softcap 15"), 256: ("softcap 50", "softcap 15"), 64: ("softcap 50",)
}  # fmt: skip


@dataclass(frozen=True)
class Scored(Case):
    """One call of flash_attn_func whose scores are changed."""

    change: str = ""


def scored(change, head_dim, causal, batch=TOKENS // SEQLEN, seqlen=SEQLEN):
    heads = max(1, WIDTH // head_dim)
    return Scored(batch, seqlen, seqlen, heads, heads, head_dim, head_dim, causal=causal, change=change)


def slopes(heads, device):
    """Those of Press et al. (2022): 2 ** (-8 h / heads) for head h from 1 on."""
    return torch.tensor([2 ** (-8 * head / heads) for head in range(1, heads + 1)], device=device)


def arguments(inputs, case):
    """q, k, v, causal, further keywords of flash_attn_func, and a sink or None: it stands alone for its gradient."""
    tensors = inputs.views(case)
    device, keywords, sink = tensors[0].device, {}, None
    if case.change in SOFTCAPS:
        keywords = {"softcap": SOFTCAPS[case.change]}
    elif case.change == "ALiBi":
        keywords = {"alibi_slopes": slopes(case.heads, device)}
    else:  # a sink of the size of scores
        sink = torch.linspace(-1, 1, case.heads, device=device)
    return *tensors, case.causal, keywords, sink


def ours_public(q, k, v, causal, keywords, sink):
    given = keywords if sink is None else keywords | {"sink": sink}
    return Launch(lambda: flash_attn_func(q, k, v, causal=causal, **given))


def cases(options):
    return [
        scored(change, head_dim, causal)
        for head_dim in options.head_dims or SHAPES for change in SHAPES.get(head_dim, tuple(SOFTCAPS))
        for causal in masks(options)
    ]  # fmt: skip


GRADIENTS = BACKWARD._replace(
    name="scores, gradients",
    shapes=None,
    kinds=lambda entrant, tensors: {"autograd": gradient(entrant, tensors)},
    replayed=lambda case: False,  # long launches: no host time shows
    rates=lambda case, seconds: (backward_teraflops(case, seconds), None),
    deterministic=None,
    ours=Peer("ours", lambda: None, never, ours_public, ours_public),
    arguments=arguments,
    feature=lambda case: case.change,
    yardsticks=(
        Yardstick("ours plain", lambda case: scored("", case.head_dim, case.causal, case.batch, case.seqlen_q)),
    ),
)
SCORES = GRADIENTS._replace(
    name="scores",
    cases=cases,
    kinds=lambda entrant, tensors: {"public": entrant.public(*tensors)},
    host=FORWARD.host,
    host_case=scored("softcap 50", 128, False, 1, 128),
    rates=lambda case, seconds: (teraflops(case, seconds), None),
    peers=SCORED,
    also=(GRADIENTS,),
    takes=("head_dims", "causal"),
    facts=(
        ("scores", f"{', '.join(SOFTCAPS)}; a sink a head; ALiBi slopes 2 ** (-8 h / heads)"),
        ("shape", f"length {SEQLEN}, batch * length = {TOKENS} tokens, heads * head_dim = {WIDTH}"),
        ("ours / ours plain", "speed of the changed scores over that of plain ones, both through the public function"),
    ),
)

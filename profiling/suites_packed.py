"""`make bench ARGS="--suite varlen"`: sequences of different lengths packed into one tensor, beside FlashAttention-4's
and beside our own call on a batch of equal lengths.
"""

import functools
import random
from dataclasses import dataclass

import torch
from cost import backward_teraflops, teraflops
from peers import Peer, never
from peers_features import PACKED as PEERS
from peers_features import both, packing
from selection import TOKENS, WIDTH, Case
from suites import BACKWARD, FORWARD, Yardstick, forwards, gradient, masks, replayed
from timing import Launch, graph

from hopper_fa3 import flash_attn_varlen_func
from hopper_fa3.problem_packed import PackedProblem

HEAD_DIMS, UNIFORM = (64, 128), 16 * (1024,)
# Lengths of exp(normal) grow by this power of e per standard deviation: the longest of 64 is a fifth of all tokens
SEQUENCES, SIGMA, SEED = 64, 1.5, 0


def long_tailed(count=SEQUENCES, tokens=TOKENS, sigma=SIGMA, seed=SEED):
    """Lengths from a lognormal distribution, scaled to so many tokens in all; each at least 1."""
    draw = random.Random(seed)
    drawn = [draw.lognormvariate(0, sigma) for _ in range(count)]
    lengths = [max(1, int(size * tokens / sum(drawn))) for size in drawn]
    lengths[lengths.index(max(lengths))] += tokens - sum(lengths)  # what rounding left over
    return tuple(lengths)


@dataclass(frozen=True)
class Packed(Case):
    """One call of flash_attn_varlen_func. As a Case it is what the tensors hold: one sequence of all tokens."""

    mix: str = ""  # names the lengths
    lengths: tuple = ()

    @property
    def flops_convention(self):
        squares = sum(length**2 for length in self.lengths)
        full = 2 * self.heads * squares * (self.head_dim + self.head_dim_v)
        return full // 2 if self.causal else full


def packed(mix, lengths, head_dim, causal, heads=None):
    heads, tokens = heads or max(1, WIDTH // head_dim), sum(lengths)
    return Packed(1, tokens, tokens, heads, heads, head_dim, head_dim, causal=causal, mix=mix, lengths=lengths)


LONG_TAILED = long_tailed()
MIXES = (("16 x 1024", UNIFORM), ("64 lognormal", LONG_TAILED))


def batched(case):
    """Equal work without packing: as many tokens and, but for rounding, as many pairs in sequences of one length, which
    is the mean length that a token finds itself in.
    """
    tokens = sum(case.lengths)
    batch = max(1, round(tokens**2 / sum(length**2 for length in case.lengths)))
    length = tokens // batch
    return Case(batch, length, length, case.heads, case.heads_k, case.head_dim, case.head_dim_v, causal=case.causal)


def arguments(inputs, case):
    q, k, v = (tensor[0] for tensor in inputs.views(case))
    return q, k, v, case.causal, packing(case.lengths, q.device)


def ours_kernel(q, k, v, causal, where):
    """The launch alone, into an output allocated once: see suites.ours_kernel."""
    from hopper_fa3 import launch_packed

    problem = PackedProblem.from_tensors(q, k, v, *both(where), causal=causal)
    recipe, lengths = launch_packed.prepare(problem, q, k, v), (where.offsets, where.offsets, None, None)
    out = torch.empty_like(recipe.out)
    return Launch(lambda: launch_packed.execute(recipe, q, k, v, lengths, out)[0])


def ours_public(q, k, v, causal, where):
    return Launch(lambda: flash_attn_varlen_func(q, k, v, *both(where), causal=causal))


def cases(options):
    return [
        packed(mix, lengths, head_dim, causal)
        for head_dim in options.head_dims or HEAD_DIMS for mix, lengths in MIXES for causal in masks(options)
    ]  # fmt: skip


OURS = Peer("ours", lambda: None, never, ours_kernel, ours_public)
GRADIENTS = BACKWARD._replace(
    name="varlen, gradients",
    shapes=None,
    kinds=lambda entrant, tensors: {"autograd": gradient(entrant, tensors)},
    replay=functools.partial(replayed, gradient),
    replayed=lambda case: True,
    rates=lambda case, seconds: (backward_teraflops(case, seconds), None),
    deterministic=None,
    ours=OURS,
    arguments=arguments,
    graph_kind="autograd graph",
    feature=lambda case: case.mix,
    yardsticks=(Yardstick("ours batched", batched),),
)


def in_words(mix, lengths):
    other = batched(packed(mix, lengths, 64, False))
    return f"{mix}: {len(lengths)} of {min(lengths)} to {max(lengths)}, equal work {other.batch} x {other.seqlen_q}"


PACKED = GRADIENTS._replace(
    name="varlen",
    cases=cases,
    kinds=forwards,
    replay=lambda entrant, tensors: graph(entrant.kernel(*tensors)),
    host=FORWARD.host,
    host_case=packed("2 x 64", (64, 64), 128, False),
    rates=lambda case, seconds: (teraflops(case, seconds), None),
    peers=PEERS,
    also=(GRADIENTS,),
    graph_kind="graph",
    takes=("head_dims", "causal"),
    facts=(
        (
            "packed",
            f"{TOKENS} tokens, heads * head_dim = {WIDTH}; exp of normal numbers of deviation {SIGMA}, seed {SEED}",
        ),
        ("lengths", "; ".join(in_words(*mix) for mix in MIXES)),
        ("ours / ours batched", "TFLOP/s of packed sequences over those of a batch of one length at equal work"),
    ),
)

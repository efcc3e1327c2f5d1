"""`make bench ARGS="--suite windows"`: sliding windows beside FlashAttention-4's and beside our own dense calls.

FLOPs are those of the band. What our kernel should take is counted in the blocks that it visits.
"""

import functools
from dataclasses import replace

import torch
from cases import bounds
from cost import BACKWARD, band_teraflops
from peers_features import WINDOWED
from selection import WIDTH, Case
from suites import BACKWARD as GRADIENTS
from suites import FORWARD, Yardstick, gradient, replayed
from timing import graph

from hopper_fa3 import plan
from hopper_fa3.band import Band, blocks
from hopper_fa3.problem import Problem

SEQLEN, HEAD_DIMS, LEFTS = 16384, (64, 128), (128, 1024, 4096)
OPEN = (-1, -1)
GRAPH_LEFT = 1024  # windows up to this one have launches short enough for a peer's host time to hide them


def windowed(left, head_dim, seqlen=SEQLEN):
    """A query sees itself and ``left`` keys before it."""
    heads = max(1, WIDTH // head_dim)
    return Case(1, seqlen, seqlen, heads, heads, head_dim, head_dim, causal=True, window_size=(left, 0))


def dense(case):
    return replace(case, causal=False, window_size=OPEN)


def causal(case):
    return replace(case, window_size=OPEN)


def arguments(inputs, case):
    return *inputs.views(case), case.causal, case.window_size


def problem_of(case):
    """The Problem that a case poses, without its tensors."""
    left, right = bounds(case.causal, case.window_size)
    sizes = (case.batch, case.seqlen_q, case.seqlen_k, case.heads, case.heads_k, case.head_dim, case.head_dim_v)
    return Problem(
        torch.device("cpu"),
        getattr(torch, case.dtype),
        *sizes,
        softmax_scale=case.head_dim**-0.5,
        left=left,
        right=right,
    )


def visited(case):
    """Blocks that our forward visits, as a share of all: of the pairs of a Q tile and a K/V block (of its plan's sizes)
    those whose K and V the tile's CTA loads. A tile of a window counts its blocks from the first key that it sees.
    """
    problem = problem_of(case)
    chosen, band = plan.choose(problem.static), Band.of(problem)
    tiles = blocks(range(problem.seqlen_q), chosen.tile_m)
    found = sum(-(-len(band.keys(tile)) // chosen.tile_n) for tile in tiles)
    return found / (len(tiles) * -(-problem.seqlen_k // chosen.tile_n))


def visited_backward(case):
    """The same of the gradients' main kernel: pairs of a K/V tile and a step of queries that the tile's CTA takes."""
    problem = problem_of(case)
    static = problem.backward_static(lse_gradient=False, deterministic=False)
    config = plan.backward_config(static, plan.choose_backward(static))
    steps = plan.tile_steps(problem, config)
    return sum(steps) / (len(steps) * -(-problem.seqlen_q // config.tile_m))


WINDOWS_BACKWARD = GRADIENTS._replace(
    name="windows, gradients",
    shapes=None,
    kinds=lambda entrant, tensors: {"autograd": gradient(entrant, tensors)},
    replay=functools.partial(replayed, gradient),
    replayed=lambda case: case.window_size[0] <= GRAPH_LEFT,
    rates=lambda case, seconds: (BACKWARD * band_teraflops(case, seconds), None),
    deterministic=None,
    arguments=arguments,
    graph_kind="autograd graph",
    feature=lambda case: f"window {case.window_size[0]}",
    work=visited_backward,
    yardsticks=(Yardstick("ours dense", dense), Yardstick("ours causal", causal)),
)
WINDOWS = WINDOWS_BACKWARD._replace(
    name="windows",
    cases=lambda options: [windowed(left, head_dim) for head_dim in options.head_dims or HEAD_DIMS for left in LEFTS],
    kinds=lambda entrant, tensors: {"kernel": entrant.kernel(*tensors)},
    replay=lambda entrant, tensors: graph(entrant.kernel(*tensors)),
    host=FORWARD.host,
    host_case=windowed(32, 128, seqlen=128),
    rates=lambda case, seconds: (band_teraflops(case, seconds), None),
    peers=WINDOWED,
    also=(WINDOWS_BACKWARD,),
    graph_kind="graph",
    work=visited,
    takes=("head_dims",),
    facts=(
        ("windows", f"each query and as many keys before it; batch 1, length {SEQLEN}, heads * head_dim = {WIDTH}"),
        ("FLOPs", "of the pairs in the band; of ours dense and ours causal those of their own masks"),
        (
            "blocks visited",
            "pairs of a Q tile and a K/V block whose K and V our kernel loads, as a share of all pairs (gradients: of "
            "a K/V tile and a step of queries); ours / ours dense by blocks: this over the time as a share of dense's",
        ),
    ),
)

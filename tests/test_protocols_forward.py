"""The forward kernel, executed warp by warp under many orders of events, with its softmax lane by lane: simulated_dsl.py
and simulated_forward.py say how. O and LSE are compared with their definition.
"""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from defined import defined
from simulated_dsl import ProtocolError
from simulated_forward import Attention, ForwardProblem, PackedForwardProblem, run_forward

QUERIES = (1, 7, 63, 64, 65, 100, 130, 200)
KEYS = (1, 7, 15, 16, 17, 48, 100, 130)
MIXED = (0.1, 1.0, 10.0)  # some scores are beyond half the cap, and rows outgrow their shifts
# What a kind of kernel has; a list: one of these by chance
KINDS = {
    "ALiBi from the diagonal": {"slopes": [(0.3,), (-0.2,), (6.0, 0.5), (0.5, -0.1, 4.0)]},
    "ALiBi from the diagonal, softcap": {"slopes": [(0.3,), (-0.2, 4.0)], "softcap": [5.0, 30.0], "spreads": MIXED},
    "ALiBi, causal": {"slopes": [(0.3,), (-0.2,), (6.0, 0.5)], "right": 0},
    "ALiBi, right bound": {"slopes": [(0.3,), (-0.2,), (6.0, 0.5)], "right": [1, 20]},
    "ALiBi, window": {"slopes": [(0.3,), (-0.2, 4.0)], "right": [0, 20], "left": [0, 30, 70]},
    "softcap": {"softcap": [5.0, 30.0], "right": [None, 0], "spreads": [(0.3,), MIXED]},
    "softcap, ALiBi, causal": {"softcap": [5.0, 30.0], "slopes": [(0.3, -0.2), (4.0,)], "right": 0, "spreads": MIXED},
    "softcap, window": {"softcap": 5.0, "right": [0, 20], "left": [0, 30, 70], "spreads": MIXED},
    "softcap, sink": {"softcap": 5.0, "right": [None, 0], "sink": [-2.0, 30.0], "spreads": MIXED},
    "plain": {"right": [None, 0, 20], "spreads": [(1.0,), MIXED]},
    "window": {"right": [0, 20], "left": [0, 30, 70], "spreads": [(1.0,), MIXED]},
    "chunks": {"right": [0, 20], "left": [30, 200], "chunk": [16, 50, 64]},
    "sink": {"right": [None, 0], "sink": [-2.0, 30.0]},
}
# ForwardConfig: one or the other by chance. Three warpgroups have P early, unless it goes through shared memory
TILES = (
    {}, {}, {"tile_n": 48}, {"stages": 3}, {"pingpong": False}, {"overlap": False}, {"tile_m": 64, "pingpong": False},
    {"tile_m": 192}, {"tile_m": 192, "pingpong": False}, {"tile_m": 192, "shared_p": True},
    {"shared_p": True, "pingpong": False},
)  # fmt: skip
SEEDS = range(12)


def drawn(chance, options):
    return {name: chance.choice(value) if isinstance(value, list) else value for name, value in options.items()}


def shape_of(kind, chance, **lengths):
    """An Attention but for what ``lengths`` leaves out."""
    others = {"batch": chance.choice((1, 1, 2)), "right": None, "scale": chance.choice((0.5, 0.5, -0.5))}
    others |= {"heads_k": chance.choice((1, 1, 2)), "group": chance.choice((1, 2))}
    others |= {"ctas": chance.choice((1, 2)), "section": chance.choice((1, 2))}
    return {**others, **drawn(chance, KINDS[kind]), **lengths}


def problem(kind, seed, **lengths):
    """``(problem, options of ForwardConfig)`` by chance."""
    chance = random.Random(seed)
    lengths = {"seqlen_q": chance.choice(QUERIES), "seqlen_k": chance.choice(KEYS)} | lengths
    return ForwardProblem(Attention(**shape_of(kind, chance, **lengths)), seed), chance.choice(TILES)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_results_whatever_the_order(kind, seed):
    given, options = problem(kind, seed)
    run_forward(given, seed, **options)


# Fewer queries than keys, as many, more; both ends ragged, and blocks behind and in front of all diagonals
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(129, 129), (70, 250), (250, 70), (128, 96), (1, 130)])
@pytest.mark.parametrize("kind", ["ALiBi from the diagonal", "ALiBi from the diagonal, softcap"])
def test_order_from_the_diagonal(kind, seqlen_q, seqlen_k):
    for tile in range(3):
        given, _ = problem(kind, tile, seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=1, heads_k=1)
        run_forward(given, tile, tile_n=(16, 32, 80)[tile])

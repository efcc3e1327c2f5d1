"""Protocols of the backward's kernels on packed sequences: see test_protocols.py."""

import random
from functools import partial

import pytest
from simulated_dsl import ProtocolError
from simulated_launch import Shape
from simulated_packed import PackedProblem
from test_protocols import KINDS

LENGTHS = (0, 0, 1, 7, 63, 64, 65, 128, 130, 200)
PACKED = [kind for kind in KINDS if not any(word in kind for word in ("split tail", "window", "chunks"))]


def problem(seed, window=False, chunk=False):
    """Lengths, heads and bounds by chance."""
    chance = random.Random(seed)
    lengths = [(chance.choice(LENGTHS), chance.choice(LENGTHS)) for _ in range(chance.randint(1, 4))]
    shape = partial(
        Shape,
        heads_k=chance.choice((1, 2)),
        group=chance.choice((1, 1, 2)),
        right=chance.choice((0, 5, 300) if window or chunk else (None, 0, 0, 1, 64)),
        left=chance.choice((0, 3, 70, 300) if chunk else (0, 3, 70)) if window or chunk else None,
        chunk=chance.choice((1, 30, 64, 100, 2**30)) if chunk else None,
        ctas=chance.choice((1, 2, 3)),
        section=chance.choice((1, 2)),
    )
    return PackedProblem(shape, lengths, seed)


@pytest.mark.filterwarnings("error::RuntimeWarning")  # of numpy: a division by 0
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", PACKED)
def test_gradients_whatever_the_order(kind, seed):
    KINDS[kind](problem(seed, window=seed in (6, 7), chunk=seed >= 8), seed)


FAULTS = {
    "tiles of keys without queries load Q": (
        "early sums", "blocks", "return self.left_bound or self.packed", "return self.left_bound"
    ),
    "Q is read from another sequence": (
        "late sums", "backward_load", "q_boxes.of_head(tiled_q, s_q, head, batch_index, offset_q)",
        "q_boxes.of_head(tiled_q, s_q, head, batch_index, offset_q + 1)",
    ),
    "dQ is added to the lines of another sequence": (
        "wide", "backward_store", "head_sums = work.lines_of(", "head_sums = ("
    ),
    "gradients go to another sequence's rows": (
        "roles", "backward_output", "work.keys_of(gradient)", "gradient"
    ),
    "a tile is given back before its end": (
        "queries", "packed_schedule", "tile, _ = self.receive(queue, state)", "tile, _ = self.receive(queue, state)\n"
        "        queue.pipe.consumer_release(state)",
    ),
    "a sequence's tiles come in another order than their turns": (
        "early sums, in order", "config", "return self.right_bound and self.turns", "return False"
    ),
}  # fmt: skip


def reports(kind, edits):
    """What the simulation says of changed kernels; None where many runs show nothing."""
    for seed in range(40):
        try:
            KINDS[kind](problem(seed), seed, edits)
        except (ProtocolError, AssertionError, IndexError, ValueError) as error:
            return str(error)
    return None


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_reported(fault):
    kind, module, text, instead = FAULTS[fault]
    assert reports(kind, {module: ((text, instead),)}) is not None

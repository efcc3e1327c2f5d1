"""A small transformer trained with our attention and with PyTorch's backends, in bfloat16 on the GPU, from one seed."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import training

pytestmark = pytest.mark.gpu


def test_the_loss_curves_agree_and_fall(device):
    text = training.corpus()
    curves = training.measure(training.Setup(), text, device, torch.bfloat16)
    assert training.agree(curves), training.markdown(curves)
    known = training.entropy(text)
    for curve in curves:
        first, last = training.ends(curve)
        assert last < known < first, f"{curve.name}: the loss must pass {known:.2f}, which needs the text before a byte"

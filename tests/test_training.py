"""The training behind `make training`: it runs with both attentions, tells agreement from its lack, and is drawn."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "profiling"))
import peers  # noqa: E402  (found by the line above)
import plots  # noqa: E402
import suites  # noqa: E402
import tables  # noqa: E402
import training  # noqa: E402

TINY = training.Setup(layers=1, heads=4, heads_k=2, head_dim=8, length=24, batch=2, steps=2)
FACTS = {"gpu": "some GPU", "date": "2026-11-29 12:00 UTC", "commit": "abc", "entropy": 3.4, "layers": 2, "heads": 4}
FACTS |= {"heads_k": 2, "head_dim": 64}


def curve(name, by=0.0, steps=60):
    """A falling loss whose batches differ, ``by`` above it."""
    noise = torch.rand(steps, generator=torch.Generator().manual_seed(0))
    return training.Curve(name, [2 + 3 * 0.95**step + x + by for step, x in enumerate(noise.tolist())])


def curves(ours=0.0):
    return [curve("ours", ours), curve("flash"), curve("efficient", 0.01), curve("math", -0.002)]


@pytest.mark.usefixtures("one_thread")
def test_ours_and_torch_train_alike_in_float32():
    text = training.corpus()
    first, second = (
        training.train(TINY, training.attention_of(entrant), text, "cpu")
        for entrant in (suites.OURS, peers.PEERS["math"])
    )
    assert len(first) == len(second) == TINY.steps
    assert torch.allclose(torch.tensor(first), torch.tensor(second), rtol=1e-5)
    assert first == training.train(TINY, training.attention_of(suites.OURS), text, "cpu")  # the seed decides
    assert first != training.train(TINY._replace(seed=1), training.attention_of(suites.OURS), text, "cpu")


@pytest.mark.usefixtures("one_thread")
def test_gradients_reach_every_weight_and_autocast_reaches_attention():
    seen = []

    def attention(q, k, v):
        seen.append((q.dtype, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return training.attention_of(suites.OURS)(q, k, v)

    model = training.Model(TINY, attention)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(training.corpus()[:48].view(2, 24)).float().sum().backward()
    assert seen == [(torch.bfloat16, (2, 24, 4, 8), (2, 24, 2, 8), (2, 24, 2, 8))]
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())


@pytest.mark.usefixtures("one_thread")
def test_losses_fall_within_a_few_steps():
    setup = TINY._replace(steps=40, learning_rate=1e-2)
    losses = training.train(setup, training.attention_of(suites.OURS), training.corpus(), "cpu", torch.bfloat16)
    assert losses[0] > 5 and losses[-1] < losses[0] - 1  # log(256) is 5.5


def test_the_text_is_the_repository_and_its_entropy_that_of_bytes():
    text = training.corpus()
    assert (ROOT / "LICENSE").read_bytes() == bytes(text.tolist())[-(ROOT / "LICENSE").stat().st_size :]
    assert text.min() >= 0 and text.max() < training.BYTES
    assert training.entropy(torch.arange(256)) == pytest.approx(8 * 0.6931472)
    assert training.entropy(torch.zeros(5, dtype=torch.int64)) == 0
    assert 2 < training.entropy(text) < 4


@pytest.mark.parametrize(("ours", "expected"), [(0.0, True), (0.03, True), (0.05, False), (-0.5, False)])
def test_the_bound_is_twice_the_distance_between_torch_backends(ours, expected):
    near, apart = training.distances(curves(ours))
    assert apart == pytest.approx(0.012)
    assert near == pytest.approx(min(abs(ours - by) for by in (0, 0.01, -0.002)), abs=1e-9)
    assert training.agree(curves(ours)) == expected


@pytest.mark.parametrize(("ours", "expected"), [(0.0, True), (0.9e-4, True), (1.1e-4, False)])
def test_curves_nearer_than_what_can_matter_are_one(ours, expected):
    """Where PyTorch's backends happen to give the same curve, twice their distance would be nothing."""
    alike = [curve("ours", ours), curve("flash"), curve("math")]
    assert training.agree(alike) == expected


@pytest.mark.parametrize("which", [0, 2])
def test_a_nan_is_no_agreement(which):
    found = curves()
    found[which].losses[30] = float("nan")
    assert not training.agree(found)


def test_curves_are_written_and_drawn_again(tmp_path, capsys):
    source = tmp_path / "training-some-gpu.json"
    tables.write_json(source, FACTS, curves())
    assert training.main(["--from", str(source), "--out", str(tmp_path / "new")]) == 0
    page = (tmp_path / "new" / "training-some-gpu.md").read_text()
    assert "Curves agree: ours is 0.00e+00 from the nearest" in page and "1.20e-02 apart" in page
    assert page.endswith(training.markdown(curves())) and training.markdown(curves()) in capsys.readouterr().out
    assert "DO NOT AGREE" in training.markdown(curves(1.0))
    pytest.importorskip("matplotlib")
    assert (tmp_path / "new" / "training-some-gpu.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_says_what_it_shows():
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    figure = training.picture(curves(), FACTS)
    words = " | ".join(text.get_text() for text in figure.findobj(Text))
    for word in ("hopper_fa3", "FlashAttention-2 (torch)", "loss, nats a byte", "byte frequencies alone: 3.40",
                 "2 layers, 4/2 heads, head_dim 64, bf16", "some GPU, 2026-11-29"):  # fmt: skip
        assert word in words
    assert len(figure.axes[1].lines) == 4
    plots.close(figure)


def test_without_a_gpu_it_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(training.environment, "hopper_missing", lambda: "no such GPU here")
    assert training.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "training needs an sm_90 GPU (H100, H200): no such GPU here\n"
    assert training.main(["--out", str(tmp_path), "--steps", "19"]) == 2
    assert "--steps of at least 20" in capsys.readouterr().err


def test_a_file_of_something_else_is_refused(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text('{"environment": {"gpu": "", "date": "", "commit": ""}, "rows": [{"case": "x"}]}')
    assert training.main(["--from", str(other)]) == 2
    assert "must hold rows of name, losses" in capsys.readouterr().err

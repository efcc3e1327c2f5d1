"""A small language model trained with our attention and with PyTorch's, from one seed: do the losses agree?

Rounding differs between kernels, and training lets differences grow: two of PyTorch's own backends do not give one
curve either. So the distance between theirs is what ours is measured against.
"""

import argparse
import itertools
import sys
from typing import NamedTuple

import environment
import peers
import plots
import tables
import torch
import torch.nn.functional as functional
from progress import Progress, say
from suites import OURS

TEXTS = ("README.md", "AGENTS.md", "profiling/NOTES.md", "LICENSE")
BYTES = 256  # the vocabulary
TORCH = ("flash", "efficient", "math")  # of peers.PEERS: PyTorch's backends
ALLOWED = 2  # our distance in units of the largest between two of PyTorch's: the factor of the tests' error bounds
NOTHING = 1e-4  # nats a byte: curves this near are one, however near two of PyTorch's happen to be
SMOOTHED = 20  # steps of the moving mean


class Setup(NamedTuple):
    """A decoder of ``layers`` blocks over bytes, and how it is trained. The defaults are what `make training` shows."""

    layers: int = 2
    heads: int = 4
    heads_k: int = 2
    head_dim: int = 64
    length: int = 256  # bytes of a sequence
    batch: int = 16
    steps: int = 200
    learning_rate: float = 1e-3
    seed: int = 0

    @property
    def width(self):
        return self.heads * self.head_dim


class Curve(NamedTuple):
    """The loss of each step, in nats a byte, with the attention of this name."""

    name: str
    losses: list


class Block(torch.nn.Module):
    """Pre-norm decoder block: causal grouped-query attention, then an MLP four times as wide."""

    def __init__(self, setup, attention):
        super().__init__()
        width, narrow = setup.width, setup.heads_k * setup.head_dim
        self.head_dim, self.attention = setup.head_dim, attention
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.queries, self.back = (torch.nn.Linear(width, width, bias=False) for _ in range(2))
        self.keys, self.values = (torch.nn.Linear(width, narrow, bias=False) for _ in range(2))
        self.wide, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, hidden):
        read = self.norms[0](hidden)
        q, k, v = (
            project(read).unflatten(-1, (-1, self.head_dim)) for project in (self.queries, self.keys, self.values)
        )
        hidden = hidden + self.back(self.attention(q, k, v).flatten(-2))
        return hidden + self.narrow(functional.gelu(self.wide(self.norms[1](hidden))))


class Model(torch.nn.Module):
    """Bytes ``(batch, length)`` to logits of the next byte ``(batch, length, 256)``; learned positions."""

    def __init__(self, setup, attention):
        super().__init__()
        self.letters = torch.nn.Embedding(BYTES, setup.width)
        self.places = torch.nn.Embedding(setup.length, setup.width)
        self.blocks = torch.nn.Sequential(*(Block(setup, attention) for _ in range(setup.layers)))
        self.norm, self.logits = torch.nn.LayerNorm(setup.width), torch.nn.Linear(setup.width, BYTES)

    def forward(self, text):
        hidden = self.letters(text) + self.places.weight[: text.shape[1]]
        return self.logits(self.norm(self.blocks(hidden)))


def corpus():
    """All bytes of TEXTS as int64, one after the other."""
    return torch.tensor(list(b"".join((environment.ROOT / name).read_bytes() for name in TEXTS)))


def entropy(text):
    """Nats a byte of a model that knows nothing but how often each byte occurs: what reading the context must beat."""
    shares = torch.bincount(text, minlength=BYTES) / len(text)
    return -torch.xlogy(shares, shares).sum().item()


def attention_of(entrant):
    """The causal attention of a Peer as a function of q, k, v. PyTorch's gets K and V once a query head: not each of
    its backends takes groups.
    """

    def attention(q, k, v):
        group = q.shape[2] // k.shape[2]
        if entrant is not OURS and group > 1:
            k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
        launch = entrant.public(q, k, v, True)
        with launch.context():
            return launch.call()

    return attention


def train(setup, attention, text, device, dtype=None):
    """The losses of a training run, a float a step. Weights and batches depend on the seed alone; ``dtype`` is that of
    autocast, None for float32 throughout.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(setup.seed)  # drawn on the CPU: the same on every device
        model = Model(setup, attention).to(device)
    generator = torch.Generator().manual_seed(setup.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.learning_rate)
    text, losses = text.to(device), []
    for _ in range(setup.steps):
        starts = torch.randint(len(text) - setup.length, (setup.batch, 1), generator=generator)
        taken = text[(starts + torch.arange(setup.length + 1)).to(device)]
        with torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype is not None):
            logits = model(taken[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), taken[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def smoothed(losses):
    """Moving mean over SMOOTHED steps: batches differ more than curves do."""
    size = min(SMOOTHED, len(losses))
    return torch.tensor(losses, dtype=torch.float64).unfold(0, size, 1).mean(-1)


def distance(one, other):
    """Mean difference of two smoothed curves, in nats. NaN where a loss is."""
    return (smoothed(one.losses) - smoothed(other.losses)).abs().mean().item()


def distances(curves):
    """``(from ours to the nearest of PyTorch's, the largest between two of PyTorch's)``"""
    (ours,) = (curve for curve in curves if curve.name == "ours")
    others = [curve for curve in curves if curve.name != "ours"]
    near = torch.tensor([distance(ours, other) for other in others], dtype=torch.float64).min().item()  # NaN wins
    return near, max(distance(*pair) for pair in itertools.combinations(others, 2))


def agree(curves):
    """True where ours is as near to PyTorch's curves as the bound asks; False where any loss is NaN."""
    ours, torchs = distances(curves)
    return ours <= max(ALLOWED * torchs, NOTHING)


def ends(curve):
    """Mean loss of the first and of the last SMOOTHED steps."""
    means = smoothed(curve.losses)
    return means[0].item(), means[-1].item()


def markdown(curves):
    """The table: where each curve starts and ends, and how far the curves lie apart."""
    found = {curve.name: ends(curve) for curve in curves}
    lines = [(plots.STYLES[name].label, f"{first:.4f}", f"{last:.4f}") for name, (first, last) in found.items()]
    ours, torchs = distances(curves)
    verdict = "agree" if agree(curves) else "DO NOT AGREE"
    return "\n".join(
        [
            "### training, nats a byte",
            "",
            *tables.grid(("attention", f"first {SMOOTHED} steps", f"last {SMOOTHED} steps"), lines),
            "",
            f"Curves {verdict}: ours is {ours:.2e} from the nearest of PyTorch's, of which two are up to {torchs:.2e} "
            f"apart (mean over steps; losses smoothed over {SMOOTHED}; asked for: at most {ALLOWED} times that, or "
            f"{NOTHING:.0e}).",
            "",
        ]
    )


def picture(curves, facts):
    """The figure: the losses, and below how far each lies from the mean of PyTorch's."""
    figure, axes = plots.canvas(2, 1, (9, 7), sharex=True, height_ratios=(2, 1))
    mean = torch.stack([smoothed(curve.losses) for curve in curves if curve.name != "ours"]).mean(0)
    late = len(curves[0].losses) - len(mean) + 1
    for curve in curves:
        style, front = plots.STYLES[curve.name], 3 if curve.name == "ours" else 2
        look = {"color": style.color, "linestyle": style.dash, "linewidth": 1.5, "zorder": front}
        steps = range(late, late + len(mean))
        axes[0, 0].plot(range(1, len(curve.losses) + 1), curve.losses, color=style.color, alpha=0.25, linewidth=0.8)
        axes[0, 0].plot(steps, smoothed(curve.losses), label=style.label, **look)
        axes[1, 0].plot(steps, smoothed(curve.losses) - mean, **look)
    context = f"byte frequencies alone: {facts['entropy']:.2f}"
    axes[0, 0].axhline(facts["entropy"], color="#000000", linewidth=0.8, linestyle=":", label=context)
    axes[0, 0].set_ylabel("loss, nats a byte")
    axes[1, 0].set_ylabel("from PyTorch's mean")
    axes[1, 0].set_xlabel(f"step (thick: mean of {SMOOTHED})")
    plots.legend(figure, axes)
    shape = f"{facts['layers']} layers, {facts['heads']}/{facts['heads_k']} heads, head_dim {facts['head_dim']}, bf16"
    plots.title(figure, f"A byte-level language model trained from one seed: {shape}", facts)
    return figure


def measure(setup, text, device, dtype, names=TORCH, progress=None):
    """The Curves of ours and of PyTorch's backends of these names."""
    progress = progress or Progress(1 + len(names))
    curves = []
    for name in ("ours", *names):
        progress.begin(f"training with {name}")
        losses = train(setup, attention_of(OURS if name == "ours" else peers.PEERS[name]), text, device, dtype)
        curves.append(Curve(name, losses))
        progress.end(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    progress.close()
    return curves


def parser():
    root = argparse.ArgumentParser(prog="make training ARGS=...", description=__doc__.splitlines()[0])
    root.add_argument("--steps", type=int, default=Setup().steps, help=f"at least {SMOOTHED}")
    tables.output_options(root)
    return root


def main(words=None):
    options = parser().parse_args(words)
    if options.source:
        return tables.redraw("training", options, markdown, picture, Curve)
    if options.steps < SMOOTHED:
        say(f"training needs --steps of at least {SMOOTHED}, over which losses are smoothed")
        return 2
    folder = options.out or environment.RESULTS
    obstacle = environment.obstacle("training", folder)
    if obstacle:
        say(obstacle)
        return 2
    setup, text = Setup(steps=options.steps), corpus()
    curves = measure(setup, text, "cuda", torch.bfloat16)
    model = setup._asdict() | {"text_bytes": len(text), "entropy": entropy(text)}
    facts = environment.describe(peers.versions(), options.commit) | model
    document = folder / f"{environment.stem('training', facts)}.json"
    tables.write_json(document, facts, curves)
    tables.write_text(document.with_suffix(".md"), facts, markdown(curves))
    print(markdown(curves))
    say(f"wrote {document} and its .md")
    plots.draw(document.with_suffix(".png"), picture, curves, facts)
    return 0 if agree(curves) else 1


if __name__ == "__main__":
    sys.exit(main())

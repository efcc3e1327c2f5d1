"""Random calls with any combination of the options that change scores and masks, for hypothesis."""

import torch
from hypothesis import strategies as st
from problems import inputs

SIDES = st.none() | st.integers(0, 12)
HEADS = st.sampled_from(((1, 1), (2, 2), (4, 2), (3, 1), (5, 1)))


@st.composite
def calls(draw):
    """q, k, v and any combination of options, as flash_attn_func takes them."""
    heads, heads_k = draw(HEADS)
    seqlen_q, seqlen_k, batch = draw(st.integers(0, 14)), draw(st.integers(0, 14)), draw(st.integers(1, 2))
    seed = draw(st.integers(0, 99))
    tensors = inputs(seqlen_q, seqlen_k, heads, heads_k, 5, 3, batch=batch, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    options = {
        "softmax_scale": draw(st.sampled_from((0.4, 0.0, -0.7, 3.0))), "causal": draw(st.booleans()),
        "window_size": (draw(SIDES), draw(SIDES)), "attention_chunk": draw(st.integers(0, 9)),
        "softcap": draw(st.sampled_from((0.0, 0.5, 3))),
    }  # fmt: skip
    if draw(st.booleans()):
        options["sink"] = torch.randn(heads, generator=generator)
    if draw(st.booleans()):
        shape = draw(st.sampled_from(((heads,), (batch, heads))))
        options["alibi_slopes"] = torch.randn(shape, generator=generator)
    return tensors, options


def as_defined(options):
    """The same options as the definition and the oracle name them, straight from what the user wrote."""
    options = dict(options)
    (left, right), causal = options.pop("window_size", (None, None)), options.pop("causal", False)
    return options | {"left": left, "right": 0 if causal else right}


def beside(options):
    """The tensors among them, which stand beside a Problem."""
    return {name: options[name] for name in ("sink", "alibi_slopes") if name in options}

"""Run by test_sanitizer_gpu.py under compute-sanitizer: small launches of the tile classes, of each mask, of packed
sequences, and of each way to score.

The argument says which of TARGETS. Inputs are drawn, and results compared, on the CPU: the kernels
under test are nearly all that the tool has to watch. Argument "plant" writes past the end of an allocation instead,
which a tool that works must report.
"""

import sys
from dataclasses import replace

import check
import check_gradients
import check_packed
import torch
from cases import Case
from hooks import DISTANCE, DOCUMENTS, SCATTERED
from packed_cases import EMPTY, RAGGED, SPARE, USED

from hopper_fa3.plan import Plan

# Ragged ends in both lengths, several K/V blocks, GQA; head dims that fill their tile class and head dims that do not.
# With each its plan; None: the chosen one.
FORWARD = [
    (Case(1, 150, 201, 2, 1, head_dim, head_dim_v, causal=causal, dtype=dtype), given)
    for head_dim, head_dim_v, dtype, given in (
        (56, 56, "bfloat16", None), (96, 96, "float16", None), (128, 128, "bfloat16", None),
        (136, 136, "bfloat16", None), (256, 256, "bfloat16", None),
        (96, 96, "bfloat16", Plan(192, 144, shared_p=True)), (128, 128, "float16", Plan(128, 128)),
    )
    for causal in (False, True)
] + [
    (Case(1, 150, 401, 2, 1, head_dim, head_dim, dtype=dtype, window_size=(70, 20)), None)
    for head_dim, dtype in ((64, "bfloat16"), (128, "float16"), (256, "bfloat16"))
]  # fmt: skip

# With each whether it must be deterministic.
BACKWARD = [
    (Case(1, 150, 201, 2, 1, head_dim, head_dim_v, causal=causal, dtype=dtype), deterministic)
    for head_dim, head_dim_v, dtype, causal, deterministic in (
        (64, 64, "bfloat16", True, False), (80, 80, "float16", False, False), (128, 128, "bfloat16", False, False),
        (128, 128, "bfloat16", True, True), (136, 136, "bfloat16", False, True), (192, 128, "bfloat16", True, False),
        (256, 256, "bfloat16", True, False),
    )
] + [
    # The first 240 keys are seen by no query
    (Case(1, 150, 401, 2, 1, head_dim, head_dim, window_size=(10, 20)), deterministic)
    for head_dim, deterministic in ((64, False), (128, True), (256, False))
]  # fmt: skip

# Whole tiles, ragged and empty sequences, rows of no sequence; with each whether gradients must be deterministic, and
# hooks, which depend on the sequence's number
PACKED = [
    (replace(case, head_dim=head_dim, head_dim_v=head_dim, causal=causal, window_size=window_size), deterministic, hook)
    for case, head_dim, causal, window_size, deterministic, hook in (
        (RAGGED, 64, True, (-1, -1), False, {}), (USED, 128, False, (70, 20), True, {}),
        (SPARE, 128, False, (-1, -1), False, {}), (EMPTY, 256, True, (-1, -1), False, {}),
        (USED, 128, True, (-1, -1), True, {"score": DISTANCE, "mask": SCATTERED}),
        (EMPTY, 256, False, (-1, -1), False, {"score": DISTANCE, "mask": DOCUMENTS}),
    )
]  # fmt: skip

# One of each way to score, and of chunks: options of both directions
HOOKS = [
    (Case(1, 150, 201, 2, 1, head_dim, head_dim, causal=causal), options)
    for head_dim, causal, options in (
        (64, False, {"softcap": 15.0}), (64, False, {"softcap": 50.0}),
        (128, True, {"sink": torch.tensor([100.0, -3.0])}),
        (128, True, {"alibi_slopes": torch.tensor([0.1, -0.02])}),
        (256, False, {"alibi_slopes": torch.tensor([0.5, 0.1])}),
        (128, False, {"attention_chunk": 70}), (256, True, {"attention_chunk": 40, "softcap": 5.0}),
    )
]  # fmt: skip


def moved(options):
    """The same options with their tensors there."""
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def growing(q, k, v):
    """The same inputs with keys that grow from the last, which kernels visit first, to the first: the first head's rows
    outgrow their shift in every block, the second head's never.
    """
    factors = torch.linspace(8, 0.1, k.shape[1])[:, None, None]
    return torch.cat((q[:, :, :1], q[:, :, 1:] * 0.01), 2), (k * factors).to(k.dtype), v


class Longer:
    """A view of a tensor's memory that claims more bytes than were allocated."""

    def __init__(self, tensor, extra):
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() + extra,),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def forward(one_cta):
    for case, given in FORWARD:
        inputs = growing(*case.inputs())
        out, lse = check.run(*(x.cuda() for x in inputs), **case.options, plan=given, sm_margin=one_cta)
        check.compare(out.cpu(), lse.cpu(), *inputs, **case.options)
        print("right:", case.name, flush=True)


def scores(one_cta):
    for case, hook in HOOKS:
        inputs = growing(*case.inputs())
        out, lse = check.run(*(x.cuda() for x in inputs), **case.options, **moved(hook), sm_margin=one_cta)
        check.compare(out.cpu(), lse.cpu(), *inputs, **case.options, **hook)
        print("right:", case.name, *hook, flush=True)


def backward(one_cta):
    for case, deterministic in BACKWARD:
        inputs = case.inputs()
        arrived = dict(zip(("dout", "dlse"), check_gradients.arriving(inputs[0], inputs[2]), strict=True))
        on_gpu = {name: x.cuda() for name, x in arrived.items()}
        how = {"deterministic": deterministic, "sm_margin": one_cta}
        gradients = check_gradients.run(*(x.cuda() for x in inputs), **on_gpu, **case.options, **how)
        check_gradients.compare([x.cpu() for x in gradients], *inputs, **arrived, **case.options)
        print("right:", case.name, flush=True)


def scores_backward(one_cta):
    for case, hook in HOOKS:
        inputs = case.inputs()
        dout, _ = check_gradients.arriving(inputs[0], inputs[2])
        given = case.options | moved(hook) | {"sm_margin": one_cta}
        gradients = check_gradients.run(*(x.cuda() for x in inputs), dout=dout.cuda(), **given)
        check_gradients.compare([x.cpu() for x in gradients], *inputs, dout=dout, **case.options, **hook)
        print("right:", case.name, *hook, flush=True)


def packed(one_cta):
    for case, _, hook in PACKED:
        out, lse = check_packed.run(case.inputs("cuda"), **case.options, **hook, sm_margin=one_cta)
        check_packed.compare(out.cpu(), lse.cpu(), case.inputs(), **case.options, **hook)
        print("right:", case.name, *hook, flush=True)


def packed_backward(one_cta):
    for case, deterministic, hook in PACKED:
        inputs = case.inputs()
        arrived = dict(zip(("dout", "dlse"), case.arriving(inputs), strict=True))
        on_gpu = {name: x.cuda() for name, x in arrived.items()}
        how = {"deterministic": deterministic, "sm_margin": one_cta}
        gradients = check_packed.run_gradients(case.inputs("cuda"), **on_gpu, **case.options, **hook, **how)
        check_packed.compare_gradients([x.cpu() for x in gradients], inputs, **arrived, **case.options, **hook)
        print("right:", case.name, *hook, flush=True)


# With each its cases
TARGETS = {
    "forward": (forward, FORWARD),
    "backward": (backward, BACKWARD),
    "packed": (packed, PACKED),
    "packed backward": (packed_backward, PACKED),
    "scores": (scores, HOOKS),
    "scores backward": (scores_backward, HOOKS),
}


def plant():
    torch.as_tensor(Longer(torch.zeros(1000, device="cuda"), 4096), device="cuda").fill_(1)
    torch.cuda.synchronize()


def main():
    (what,) = sys.argv[1:]
    if what == "plant":
        plant()
        return
    # One CTA computes all tiles, one after the other: buffers, barriers and the tile queue are used again and again
    one_cta = torch.cuda.get_device_properties(0).multi_processor_count - 1
    TARGETS[what][0](one_cta)


if __name__ == "__main__":
    main()

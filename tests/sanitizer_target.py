"""Run by test_sanitizer_gpu.py under compute-sanitizer: one small launch of every tile class, dense and causal.

Inputs are drawn, and results compared, on the CPU: the kernels under test are nearly all that the tool has to watch.
Argument "plant" writes past the end of an allocation instead, which a tool that works must report.
"""

import sys

import torch
from cases import Case
from check import compare, run

from hopper_fa3.plan import Plan

# Ragged ends in both lengths, several K/V blocks, GQA; head dims that fill their tile class and head dims that do not.
# With each its plan; None: the chosen one.
CASES = [
    (Case(1, 150, 201, 2, 1, head_dim, head_dim_v, causal=causal, dtype=dtype), given)
    for head_dim, head_dim_v, dtype, given in (
        (56, 56, "bfloat16", None), (96, 96, "float16", None), (128, 128, "bfloat16", None),
        (136, 136, "bfloat16", None), (256, 256, "bfloat16", None),
        (96, 96, "bfloat16", Plan(192, 144, shared_p=True)), (128, 128, "float16", Plan(128, 128)),
    )
    for causal in (False, True)
]  # fmt: skip


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


def main():
    if sys.argv[1:] == ["plant"]:
        torch.as_tensor(Longer(torch.zeros(1000, device="cuda"), 4096), device="cuda").fill_(1)
        torch.cuda.synchronize()
        return
    one_cta = torch.cuda.get_device_properties(0).multi_processor_count - 1
    for case, given in CASES:
        inputs = growing(*case.inputs())
        # One CTA computes all tiles, one after the other: buffers, barriers and the tile queue are used again and again
        out, lse = run(*(x.cuda() for x in inputs), **case.options, plan=given, sm_margin=one_cta)
        compare(out.cpu(), lse.cpu(), *inputs, **case.options)
        print("right:", case.name, flush=True)


if __name__ == "__main__":
    main()

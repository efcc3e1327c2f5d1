"""The kernels of plan.TABLE under short names, and their machine code. Also what another commit's kernels are compiled
with: `main` writes the cubins of whatever hopper_fa3 is importable.
"""

import sys
import time
from pathlib import Path

from hopper_fa3 import plan
from hopper_fa3.problem import Static


def static(head_dim, head_dim_v, right_bound, dtype="bfloat16"):
    return Static(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        right_bound=right_bound,
        left_bound=False,
        negative_scale=False,
    )


def name(static):
    """As in selection.case: "d128-causal", "d192_128-dense-fp16"."""
    head_dim = static.head_dim if static.head_dim == static.head_dim_v else f"{static.head_dim}_{static.head_dim_v}"
    words = [f"d{head_dim}", "causal" if static.right_bound else "dense"]
    return "-".join(words if static.dtype == "bfloat16" else [*words, "fp16"])


def of_case(text):
    """The kernel (a Static) that computes a case of selection.case; ValueError where the words name none."""
    import selection  # PyTorch, through tests/cases.py

    case = selection.case(text)
    return static(plan.tile_class(case.head_dim), plan.tile_class(case.head_dim_v), case.causal, case.dtype)


def chosen(texts=()):
    """{name: Static} of the named cases, else of every row of the table, in bf16."""
    found = [of_case(text) for text in texts] or [static(*row) for row in plan.TABLE]
    return {name(kernel): kernel for kernel in found}


def config(static):
    return plan.forward_config(static, plan.choose(static))


def compiled(kernels):
    """Yields (name, cubin) of {name: Static}, with progress on stderr."""
    from hopper_fa3 import compile as compiling  # cutlass: not needed to read a cubin

    for number, (key, kernel) in enumerate(kernels.items(), 1):
        print(f"{number}/{len(kernels)} {key} ...", end="", file=sys.stderr, flush=True)
        started = time.perf_counter()
        cubin = compiling.cubin(kernel, plan.choose(kernel))
        print(f" {time.perf_counter() - started:.1f} s", file=sys.stderr)
        yield key, cubin


def main(folder, *texts):
    """Write FOLDER/NAME.cubin of the named kernels, else of the table's."""
    for key, cubin in compiled(chosen(texts)):
        Path(folder, f"{key}.cubin").write_bytes(cubin)

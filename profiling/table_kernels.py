"""The kernels of plan.TABLE and some of the gradients' under short names, and their machine code. Also what another
commit's kernels are compiled with: `main` writes the cubins of whatever hopper_fa3 is importable.
"""

import sys
import time
from pathlib import Path

from hopper_fa3 import plan, problem
from hopper_fa3.problem import Static

# (head dim class, right bound, dtype, deterministic) of the gradients' kernels that are shown: seconds each
GRADIENTS = (
    *((head_dim, right_bound, "bfloat16", False) for head_dim in (64, 96, 128) for right_bound in (False, True)),
    *((head_dim, right_bound, "float16", False) for head_dim in (64, 128) for right_bound in (False, True)),
    *((128, right_bound, "bfloat16", True) for right_bound in (False, True)),
)


def static(head_dim, head_dim_v, right_bound, dtype="bfloat16"):
    return Static(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        right_bound=right_bound,
        left_bound=False,
        negative_scale=False,
    )


def backward_static(head_dim, head_dim_v, right_bound, dtype="bfloat16", deterministic=False):
    return problem.BackwardStatic(dtype, head_dim, head_dim_v, right_bound, False, deterministic)


def is_backward(static):
    return not isinstance(static, Static)


def name(static):
    """As in selection.case: "d128-causal", "d192_128-dense-fp16"; "d128-causal-backward-deterministic"."""
    head_dim = static.head_dim if static.head_dim == static.head_dim_v else f"{static.head_dim}_{static.head_dim_v}"
    words = [f"d{head_dim}", "causal" if static.right_bound else "dense"]
    words += [] if static.dtype == "bfloat16" else ["fp16"]
    if is_backward(static):
        words += ["backward", "deterministic"] if static.deterministic else ["backward"]
    return "-".join(words)


def of_case(text):
    """The kernel (a Static) that computes a case of selection.case, with the word "backward" a BackwardStatic, then
    also with "deterministic"; ValueError where the words name none.
    """
    import selection  # PyTorch, through tests/cases.py

    words = text.split("-")
    backward = "backward" in words
    options = {"backward", "deterministic"} if backward else set()
    case = selection.case("-".join(word for word in words if word not in options))
    static_part = (plan.tile_class(case.head_dim), plan.tile_class(case.head_dim_v), case.causal, case.dtype)
    return backward_static(*static_part, "deterministic" in words) if backward else static(*static_part)


def chosen(texts=()):
    """{name: Static or BackwardStatic} of the named cases, else of every row of the table, in bf16, and of
    GRADIENTS.
    """
    found = [of_case(text) for text in texts] or [static(*row) for row in plan.TABLE]
    if not texts and hasattr(problem, "BackwardStatic"):  # the first commits have no gradients
        found += [backward_static(row[0], *row) for row in GRADIENTS]
    return {name(kernel): kernel for kernel in found}


def choice(static):
    """The plan for a Static or BackwardStatic."""
    return plan.choose_backward(static) if is_backward(static) else plan.choose(static)


def config(static):
    """The configuration of the kernel, for a BackwardStatic of its main one."""
    configuration = plan.backward_config if is_backward(static) else plan.forward_config
    return configuration(static, choice(static))


def compiled(kernels):
    """Yields (name, cubin) of {name: Static}, with progress on stderr."""
    from hopper_fa3 import compile as compiling  # cutlass: not needed to read a cubin

    for number, (key, kernel) in enumerate(kernels.items(), 1):
        print(f"{number}/{len(kernels)} {key} ...", end="", file=sys.stderr, flush=True)
        started = time.perf_counter()
        cubin = compiling.cubin(kernel, choice(kernel))
        print(f" {time.perf_counter() - started:.1f} s", file=sys.stderr)
        yield key, cubin


def main(folder, *texts):
    """Write FOLDER/NAME.cubin of the named kernels, else of the table's."""
    for key, cubin in compiled(chosen(texts)):
        Path(folder, f"{key}.cubin").write_bytes(cubin)

"""Sizes and import directions, held by the syntax tree, and proof that the checker finds violations."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("hopper_fa3", "kernels", "profiling", "tests")
FILE_LINES, HOST_LINES, DEVICE_LINES, KERNEL_ARGUMENTS, KEYWORDS, CONST_EXPRS, DEPTH = 500, 60, 120, 8, 12, 15, 3
BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Keywords that FA-3's signatures fix, which the limit on keywords leaves out.
FA3 = {
    "softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale", "window_size", "attention_chunk", "softcap",
    "num_splits", "pack_gqa", "deterministic", "sm_margin", "return_attn_probs", "return_softmax_lse", "num_heads_q",
    "seqused_q", "seqused_k", "k", "v", "rotary_cos", "rotary_sin", "rotary_seqlens", "rotary_interleaved",
    "cache_seqlens", "cache_batch_idx", "cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new",
    "max_seqlen_q", "scheduler_metadata", "out", "out_dtype",
}  # fmt: skip
# Put together here, so that this file does not hold them.
REGISTRIES = [".".join(parts) for parts in (("pypi", "org"), ("python" "hosted", "org"), ("pypi", "nvidia", "com"),
              ("anaconda", "org"), ("download", "pytorch", "org"), ("registry", "npmjs", "org"))]  # fmt: skip


def depth(node, level=0):
    """Deepest nesting of control flow under a node; an elif adds none, a function inside starts anew."""
    deepest = level
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            continue
        is_elif = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        # A lone if under else reads as an elif only where it is written as one: both start at the same column.
        is_elif = is_elif and child.col_offset == node.col_offset
        deepest = max(deepest, depth(child, level + (isinstance(child, BLOCKS) and not is_elif)))
    return deepest


def imported(tree):
    """Dotted names of all that a file imports; a relative one keeps its dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (base + ("" if base.endswith(".") else ".") + name.name for name in node.names)


def is_kernel(function):
    return any(ast.unparse(decorator).split("(")[0].endswith("cute.kernel") for decorator in function.decorator_list)


def function_faults(function, device, public):
    """What is wrong with the size of one function."""
    arguments, name = function.args, function.name
    lines, limit = function.end_lineno - function.lineno + 1, DEVICE_LINES if device else HOST_LINES
    if lines > limit:
        yield f"{name} has {lines} lines, at most {limit}"
    if depth(function) > DEPTH:
        yield f"{name} nests {depth(function)} levels, at most {DEPTH}"
    positional = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    taken = [argument for argument in positional if argument != "self"] + [a.arg for a in arguments.kwonlyargs]
    if is_kernel(function) and len(taken) > KERNEL_ARGUMENTS:
        yield f"{name} is a kernel of {len(taken)} arguments, at most {KERNEL_ARGUMENTS}"
    keywords = positional[len(positional) - len(arguments.defaults) :] + [a.arg for a in arguments.kwonlyargs]
    added = [keyword for keyword in keywords if keyword not in FA3]
    if public and len(added) > KEYWORDS:
        yield f"{name} has {len(added)} keywords of its own, at most {KEYWORDS}"


def import_faults(path, names):
    """Imports against the one-way order: kernels know no torch and no host, the host has cutlass in compile.py only."""
    folder = path.split("/")[0]
    for name in names:
        root = name.split(".")[0]
        known = root in ("", "cutlass", "cuda") or root in sys.stdlib_module_names
        if folder == "kernels" and (not known or name.startswith("..")):
            yield f"imports {name} into kernels/"
        if folder == "hopper_fa3" and root == "cutlass" and path != "hopper_fa3/compile.py":
            yield f"imports {name} outside compile.py"
        if path == "kernels/config.py" and root in ("cutlass", "cuda"):
            yield f"imports {name} into arithmetic"
        if folder != "tests" and path != "hopper_fa3/compile.py" and name in ("os.environ", "os.getenv", "os.environb"):
            yield f"imports {name} outside the settings block"


def faults(path, source):
    """All that is wrong with one Python file; path is relative to the repository."""
    tree, folder = ast.parse(source), path.split("/")[0]
    found = list(import_faults(path, list(imported(tree))))
    if source.count("\n") > FILE_LINES:
        found.append(f"{source.count(chr(10))} lines, at most {FILE_LINES}")
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            public = folder != "tests" and not node.name.startswith("_")
            found += function_faults(node, folder == "kernels", public)
        reads = isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.environb")
        if reads and folder != "tests" and path != "hopper_fa3/compile.py":
            found.append(f"line {node.lineno}: reads the environment outside the settings block")
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    branches = sum(call.split(".")[-1] == "const_expr" for call in calls)
    if folder == "kernels" and branches > CONST_EXPRS:
        found.append(f"{branches} const_expr, at most {CONST_EXPRS}")
    return [f"{path}: {fault}" for fault in found]


def registries_in(text):
    return [host for host in REGISTRIES if host in text.lower()]


FILES = sorted(str(file.relative_to(ROOT)) for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_sizes_and_imports(path):
    assert faults(path, (ROOT / path).read_text()) == []


def test_no_tracked_file_names_a_package_registry():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    files = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert __file__.endswith("test_style.py") and "pyproject.toml" in files
    named = {name: registries_in((ROOT / name).read_bytes().decode(errors="replace")) for name in files}
    assert {name: hosts for name, hosts in named.items() if hosts} == {}


def nested(*headers):
    """A function whose body opens these blocks, one inside the other."""
    lines = [f"{'    ' * (i + 1)}{header}" for i, header in enumerate(headers)]
    return "def f():\n" + "\n".join(lines) + f"\n{'    ' * (len(headers) + 1)}pass\n"


def lines_of(count):
    return "def f():\n" + "    pass\n" * (count - 1)


def taking(count, before="", start=""):
    return f"{before}def f({start}{', '.join(f'a{i}' for i in range(count))}):\n    pass\n"


FOUR = ("for a in b:", "while c:", "if d:", "with e:")
ELIF = nested(*FOUR[:3]) + "            elif e:\n                pass\n"
ELSE_IF = nested(*FOUR[:3]) + "            else:\n                if e:\n                    pass\n"


@pytest.mark.parametrize(
    ("path", "legal", "illegal", "fault"),
    [
        ("hopper_fa3/a.py", "x = 1\n" * 500, "x = 1\n" * 501, "501 lines, at most 500"),
        ("hopper_fa3/a.py", lines_of(60), lines_of(61), "f has 61 lines, at most 60"),
        ("tests/a.py", lines_of(60), lines_of(61), "f has 61 lines, at most 60"),
        ("kernels/a.py", lines_of(120), lines_of(121), "f has 121 lines, at most 120"),
        ("kernels/a.py", nested(*FOUR[:3]), nested(*FOUR), "f nests 4 levels"),
        ("profiling/a.py", ELIF, ELSE_IF, "f nests 4 levels"),
        ("hopper_fa3/a.py", nested("try:").replace("pass", "pass\n    finally:\n        pass"), None, None),
        ("kernels/a.py", taking(8, "@cute.kernel\n"), taking(9, "@cute.kernel\n"), "kernel of 9 arguments"),
        ("kernels/a.py", taking(8, "@cute.kernel()\n", "self, "), taking(8, "@cute.kernel\n", "x, "), "9 arguments"),
        ("kernels/a.py", taking(9, "@cute.jit\n"), None, None),
        ("hopper_fa3/a.py", taking(12, start="q, *, "), taking(13, start="q, *, "), "13 keywords of its own"),
        ("hopper_fa3/a.py", taking(12, start="q, *, out, causal, "), None, None),
        ("kernels/a.py", "if const_expr(a): pass\n" * 15, "if cutlass.const_expr(a): pass\n" * 16, "16 const_expr"),
        ("kernels/a.py", "import cutlass\nfrom . import mask", "import torch", "imports torch"),
        ("kernels/a.py", "from cuda.bindings import driver", "import numpy", "imports numpy"),
        ("kernels/a.py", "from .config import x", "def f():\n    from torch.nn import Module", "torch.nn.Module"),
        ("kernels/a.py", "import math", "from hopper_fa3 import plan", "imports hopper_fa3.plan"),
        ("kernels/a.py", "from .mask import x", "from ..problem import Problem", "imports ..problem.Problem"),
        ("kernels/config.py", "import enum", "import cutlass.cute as cute", "into arithmetic"),
        ("hopper_fa3/plan.py", "from .kernels import a", "from cutlass import cute", "cutlass.cute outside"),
        ("hopper_fa3/a.py", "import torch", "def f():\n    import cutlass.cute", "cutlass.cute outside"),
        ("hopper_fa3/a.py", "import os\nos.cpu_count()", "import os\nx = os.environ.get('A')", "line 2: reads"),
        ("hopper_fa3/a.py", "import os", "import os\nx = os.getenv('A')", "line 2: reads"),
        ("profiling/a.py", "from os import path", "from os import environ", "imports os.environ outside"),
        ("hopper_fa3/compile.py", "import os, cutlass\nos.environ['A'] = 'b'", None, None),
    ],
)  # fmt: skip
def test_the_checker_finds_planted_faults(path, legal, illegal, fault):
    assert faults(path, legal) == []
    if illegal is not None:
        found = faults(path, illegal)
        assert len(found) == 1 and fault in found[0]


def test_the_checker_finds_a_planted_registry():
    assert registries_in(f"see https://{REGISTRIES[0].upper()}/simple") == [REGISTRIES[0]]
    assert registries_in("the package registry") == []

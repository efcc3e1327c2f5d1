"""Writes hopper_fa3/measured.py, the rates that `python -m hopper_fa3 advise` knows, from result files of this folder.

Without arguments: from the newest forward table of an H200 and the newest roofline file beside it, which adds the peers
that the table lacks (standard attention). Needs no GPU. tests/test_measured.py holds the module to its files.
"""

import argparse
import json
import sys
from pathlib import Path

from environment import RESULTS, ROOT
from selection import TOKENS, WIDTH

MODULE = ROOT / "hopper_fa3" / "measured.py"
STEMS = ("forward-nvidia-h200", "roofline-nvidia-h200")  # the first file that has a name gives all its rates
HEAD = '''\
"""TFLOP/s of forward kernels measured on one GPU: what `python -m hopper_fa3 advise` expects.

Written by `python profiling/measured.py` from the files of SOURCES (in profiling/results); do not edit. Kernel time,
bf16, batch * length = {tokens} tokens, heads * head_dim = {width}; causal rates credit half of the dense work.
"""

SOURCES = {sources}
GPU = "{gpu}"
DATE = "{date}"
COMMIT = "{commit}"
SMS = {sms}
MATMUL_TERAFLOPS = {matmul_tflops}  # the bf16 matrix product 8192 x 8192 x 8192
COPY_TERABYTES = {copy_tb_per_s}  # per second, read plus written, device to device
HOST_MICROSECONDS = {host}  # host time of a warm public call on a small problem

# (head_dim, causal, name) -> length -> TFLOP/s
RATES = {{
'''


def newest():
    """The newest result file of each stem that has one."""
    found = [sorted(RESULTS.glob(f"{stem}-*.json")) for stem in STEMS]
    return [files[-1] for files in found if files]


def usual(row):
    """Whether a row is a kernel rate of the kind that the table is about: bf16, one head dim, no grouped heads, as many
    tokens and heads as its docstring says.
    """
    if row["batch"] * row["seqlen"] != TOKENS or row["heads"] * row["head_dim"] != WIDTH:
        return False
    same_dims = row.get("head_dim_v", row["head_dim"]) == row["head_dim"] and row["heads"] == row["heads_k"]
    bf16 = row.get("dtype", "bfloat16") == "bfloat16"
    return row["kind"] == "kernel" and row["name"] != "matmul" and same_dims and bf16


def rates(documents):
    """(head_dim, causal, name) -> {length: TFLOP/s}, each from the first document that has any."""
    found = {}
    for document in documents:
        mine = {}
        for row in filter(usual, document["rows"]):
            cell = mine.setdefault((row["head_dim"], row["causal"], row["name"]), {})
            cell[row["seqlen"]] = round(row["teraflops"], 1)
        found = mine | found
    return found


def text(paths):
    """The module's whole text."""
    documents = [json.loads(path.read_text()) for path in paths]
    facts = dict(documents[0]["environment"])
    facts |= {"date": facts["date"][:10], "tokens": TOKENS, "width": WIDTH}
    quoted = ", ".join(f'"{path.name}"' for path in paths)
    facts["sources"] = f"({quoted},)" if len(paths) == 1 else f"({quoted})"
    host = {row["name"]: round(row["microseconds"], 1) for row in documents[0]["rows"] if row["kind"] == "host"}
    facts["host"] = repr(host).replace("'", '"')
    lines = [
        f"    {key!r}: {dict(sorted(cell.items()))},\n".replace("'", '"')
        for key, cell in sorted(rates(documents).items())
    ]
    return HEAD.format(**facts) + "".join(lines) + "}\n"


def main(words=None):
    parser = argparse.ArgumentParser(prog="python profiling/measured.py", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="JSON files of `make bench` and `make roofline`")
    paths = parser.parse_args(words).files or newest()
    MODULE.write_text(text(paths))
    print(f"wrote {MODULE} from {', '.join(path.name for path in paths)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The cases that profiling looks at, as short words: `CASE=d128-causal`, `CASE=d192_128-dense-s4096-b1-h32_4-fp16`."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from cases import Case

TOKENS, WIDTH, SEQLEN = 16384, 2048, 8192  # batch * length, heads * head_dim, length where a word does not say
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
MASKS = {"dense": False, "causal": True}
FORM = "d128-causal-s8192-b2-h16_16-bf16"
NUMBERS = re.compile(r"([dsbh])(\d+)(?:_(\d+))?")


def case(text):
    """The Case that dash-separated words describe, in any order; only the head dim (d) must be given.

    d: head_dim or head_dim_headdimv; s: length of queries and keys; b: batch; h: query heads or queryheads_kvheads;
    causal or dense; bf16 or fp16. ValueError where a word is none of these or says twice the same, where a number is 0
    and where query heads are no multiple of K/V heads.
    """
    found = {}
    for word in text.split("-"):
        meaning = _meaning(word)
        if meaning is None:
            raise ValueError(f"a case is made of words as in {FORM}, got {word!r} in {text!r}")
        if meaning[0] in found:
            raise ValueError(f"a case says each thing once, got {word!r} as well in {text!r}")
        found[meaning[0]] = meaning[1]
    if "d" not in found:
        raise ValueError(f"a case names its head dim, as in {FORM}, got {text!r}")
    if any(0 in found.get(letter, ()) for letter in "dsbh"):
        raise ValueError(f"a case has no size of 0, got {text!r}")
    head_dim, head_dim_v = found["d"]
    seqlen, _ = found.get("s", (SEQLEN, SEQLEN))
    batch, _ = found.get("b", (max(1, TOKENS // seqlen), None))
    heads, heads_k = found.get("h", 2 * (max(1, WIDTH // head_dim),))
    if heads % heads_k:
        raise ValueError(f"a case's query heads are a multiple of its K/V heads, got {text!r}")
    dtype, causal = found.get("dtype", "bfloat16"), found.get("causal", False)
    return Case(batch, seqlen, seqlen, heads, heads_k, head_dim, head_dim_v, dtype=dtype, causal=causal)


def _meaning(word):
    """(what a word is about, its value), or None."""
    number = NUMBERS.fullmatch(word)
    if number and (number[3] is None or number[1] in "dh"):
        return number[1], (int(number[2]), int(number[3] or number[2]))
    for kind, known in (("causal", MASKS), ("dtype", DTYPES)):
        if word in known:
            return kind, known[word]
    return None


def slug(case):
    """A case in words short enough for a file's name; batch, heads and dtype only where they are not the usual ones."""
    head_dim = case.head_dim if case.head_dim == case.head_dim_v else f"{case.head_dim}_{case.head_dim_v}"
    words = [f"d{head_dim}", "causal" if case.causal else "dense", f"s{case.seqlen_q}"]
    usual = max(1, TOKENS // case.seqlen_q), *(2 * (max(1, WIDTH // case.head_dim),))
    if (case.batch, case.heads, case.heads_k) != usual:
        words += [f"b{case.batch}", f"h{case.heads}_{case.heads_k}"]
    if case.dtype != "bfloat16":
        words.append("fp16")
    return "-".join(words)

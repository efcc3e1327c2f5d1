"""The words by which profiling names its cases."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import Case

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import selection


def test_the_usual_case_needs_two_words():
    assert selection.case("d128-causal") == Case(2, 8192, 8192, 16, 16, 128, 128, causal=True)
    assert selection.case("dense-d64") == Case(2, 8192, 8192, 32, 32, 64, 64)


def test_every_word():
    case = selection.case("d192_128-dense-s4096-b1-h32_4-fp16")
    assert case == Case(1, 4096, 4096, 32, 4, 192, 128, dtype="float16")
    assert selection.slug(case) == "d192_128-dense-s4096-b1-h32_4-fp16"


@pytest.mark.parametrize(
    "text", ["d128-causal-s8192", "d64-dense-s512", "d256-causal-s100000", "d80-dense-s1024-b3-h2_1"]
)
def test_slug_and_case_are_inverse(text):
    assert selection.slug(selection.case(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "causal", "d128-casual", "128", "d128-s1_2", "d128-x5", "d", "d128--causal", "d0", "d128_0", "d128-s0",
     "d128-b0", "d128-h0", "d128-h4_0", "d128-h3_2", "d64-d128", "d64-causal-dense", "d64-fp16-bf16"],
)  # fmt: skip
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match="a case"):
        selection.case(text)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_no_verb_of_profiling_ignores_case():
    root = Path(__file__).resolve().parent.parent
    # As a person's shell: under `make test ARGS=-q` a make would inherit directory messages and ARGS
    shell = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS")}
    for verb in ("sass", "profile", "timeline", "ablation", "roofline", "bench"):
        done = subprocess.run(
            ["make", verb, "CASE=d64", "PY=echo"], cwd=root, env=shell, capture_output=True, text=True
        )
        if verb == "bench":
            assert done.returncode == 2 and "bench takes no CASE" in done.stderr
        else:
            assert done.stdout.endswith("--case d64\n"), verb

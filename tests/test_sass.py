"""`make sass`: our kernels against their committed baseline, and how figures and differences are made."""

import json
import os
import subprocess
import sys
from pathlib import Path

import compiled
import pytest

from hopper_fa3.machine_code import instructions

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import sass
import sass_diff
import sass_figures
import table_kernels

KERNELS = table_kernels.chosen()
BASELINE = json.loads(sass_figures.BASELINE.read_text())
ON_PURPOSE = "where this is on purpose: make sass ARGS=--update-baseline"


def figures(name):
    return sass_figures.figures(KERNELS[name], *compiled.texts(KERNELS[name]))


def baseline(name):
    assert name in BASELINE["kernels"], f"{name} has no baseline; {ON_PURPOSE}"
    return BASELINE["kernels"][name]


def test_every_kernel_of_the_table_has_a_baseline():
    assert sorted(BASELINE["kernels"]) == sorted(KERNELS), ON_PURPOSE


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_spills(name):
    code = compiled.code(KERNELS[name])  # not figures(): to be seen also where the loops are not found
    found = {"spills": code.spills, "stack": code.stack, "local": code.local}
    assert sass_figures.memory_faults(found, baseline(name)) == [], ON_PURPOSE


@pytest.mark.parametrize("name", KERNELS)
def test_no_loop_grows(name):
    found = figures(name)
    made = sass_figures.versions(compiled.cubin(KERNELS[name]))
    if made != BASELINE["versions"]:
        pytest.skip(
            f"made by {made}, the baseline by {BASELINE['versions']}: the loops of two compilers do not compare"
        )
    assert sass_figures.loop_faults(found, baseline(name)) == [], ON_PURPOSE


def test_figures_follow_from_the_algorithm():
    """D 128, 192 x 128: a thread has 64 scores of two rows and 64 elements of O."""
    found = figures("d128-causal")
    assert found["registers"] == {"launch": 128, "producer": 32, "consumer": 160}
    for loop, selected in (("unmasked", 0), ("masked", 64)):
        counts = found[loop]["counts"]
        assert found[loop]["instructions"] == sum(counts.values())
        assert counts["HGMMA"] == 8 + 8 and counts.get("FSEL", 0) == selected
        # An exponential, a multiply-subtract and an addition a score; a maximum of the thread's two sums, none of a row
        assert counts["MUFU"] == counts["FFMA"] == counts["FADD"] == 64 and counts["FMNMX"] == 1
        assert counts["F2FP"] == 64 / 2 and not counts.keys() & {"SHFL", "FMUL"}
    assert found["producer"]["counts"]["UTMALDG"] == 2 * 2  # K and V in boxes of 64 columns
    assert found["clocks"]["tensor"] == 3072 and found["clocks"]["MUFU"] == 64 * 3 * 8


@pytest.mark.parametrize(("name", "queries"), [("d64-causal-backward", 128), ("d128-causal-backward", 64)])
def test_figures_of_gradients_follow_from_the_algorithm(name, queries):
    """A thread has a half of each query's 64 scores; a step's five products are 2 * queries * 128 * head_dim FLOP."""
    found, scores, head_dim = figures(name), queries // 2, KERNELS[name].head_dim
    assert found["registers"] == {"launch": 168, "producer": 24, "consumer": 240}
    # A share of the unmasked exponentials is a polynomial: three FMAs, a product, a rounding, and its difference
    polynomials = scores // 4 if queries == 128 else 0
    for loop, selected, others in (("unmasked", 0, polynomials), ("masked", scores, 0)):
        counts = found[loop]["counts"]
        assert counts["HGMMA"] == 2 * head_dim // 16 + 2 * queries // 16 + 128 // 16
        # exp2(S scale - LSE); P (dP - delta), for which P comes back from 16 bit
        assert counts["MUFU"] == scores - others
        assert counts["FFMA"] == counts["FADD"] == scores + 3 * others and counts["FMUL"] == scores + others
        assert counts.get("FSEL", 0) == selected and counts["F2FP"] == 2 * scores / 2
        # Row statistics: a load for two queries' LSE or delta
        assert counts["LDS"] == 2 * queries // 8
        # A fence a product, and three or four waits: serialised, each WGMMA would have its own
        assert 8 <= counts["WARPGROUP"] <= 9
    assert found["producer"]["counts"]["UTMALDG"] == 2 * head_dim // 64 + 1  # Q and dO in boxes of 64 columns, and rows
    assert found["clocks"]["tensor"] == 5 * 2 * queries * 128 * head_dim / 4096


def test_a_loop_that_computes_other_than_one_block_is_refused():
    with pytest.raises(ValueError, match="must issue 12 HGMMA for one block, got 16"):
        sass_figures.figures(KERNELS["d64-dense"], *compiled.texts(KERNELS["d128-dense"]))


def iteration(**counts):
    return {"instructions": sum(counts.values()), "counts": counts}


BEFORE = {
    "tile": "128x128", "spills": 0, "stack": 0, "local": 0,
    "unmasked": iteration(FMUL=64, UMOV=8), "masked": iteration(FMUL=64, FSEL=64),
}  # fmt: skip


def test_growth_is_a_fault_and_shrinking_is_none():
    assert sass_figures.loop_faults(BEFORE, BEFORE) == []
    assert sass_figures.loop_faults(BEFORE | {"unmasked": iteration(FMUL=60, UMOV=12)}, BEFORE) == []
    grown = BEFORE | {"unmasked": iteration(FMUL=66, UADD=1, UMOV=6), "masked": iteration(FMUL=1)}
    fault = "the unmasked loop grew from 72 to 73 instructions (FMUL +2, UADD +1, UMOV -2)"
    assert sass_figures.loop_faults(grown, BEFORE) == [fault]
    (fault,) = sass_figures.loop_faults(BEFORE | {"masked": iteration(FMUL=64, FSEL=65)}, BEFORE)
    assert fault.startswith("the masked loop grew from 128 to 129")
    (fault,) = sass_figures.loop_faults(BEFORE | {"tile": "128x64"}, BEFORE)
    assert fault.startswith("the tile is 128x64, in the baseline 128x128")


def test_more_local_memory_is_a_fault():
    assert sass_figures.memory_faults(BEFORE, BEFORE) == []
    found = sass_figures.memory_faults(BEFORE | {"spills": 3, "stack": 8}, BEFORE)
    assert found == ["spills grew from 0 to 3", "stack grew from 0 to 8"]


def lines(text):
    """Instructions of a text, one a line, behind "LABEL: " where it has one."""
    rows = []
    for address, line in enumerate(text.strip().splitlines()):
        label, separator, instruction = line.rpartition(": ")
        rows += [f"{label}:"] * bool(separator) + [f"        /*{16 * address:04x}*/   {instruction} ;"]
    return instructions("\n".join(rows))


OLD = """
MOV R14, 0x20
CALL.REL.NOINC `($div)
.L_x_3: @!P0 HGMMA.64x128x16.F32.BF16 R24, R12, gdesc[UR20].tnspB, R24, gsb0
.L_x_9: FFMA R4, R4.reuse, UR9, -R8
@!UP1 UIADD3 UR4, UP0, UR6, 0x30, URZ
BAR.ARV 0x3, 0x100
@P1 BRA `(.L_x_3)
$div: RET.REL.NODEC R14 `(kernel)
NOP
"""


def test_normalised_keeps_what_is_computed_and_drops_where_it_is_kept():
    assert sass_diff.normalised(lines(OLD)) == [
        "MOV R, return",
        "CALL.REL.NOINC (label)",
        "label:",
        "@!P HGMMA.64x128x16.F32.BF16 R, R, gdesc[UR].tnspB, R, gsb0",
        "FFMA R, R, UR, -R",
        "@!UP UIADD3 UR, UP, UR, 0x30, URZ",
        "BAR.ARV 0x3, 0x100",
        "@P BRA (label)",
        "label:",
        "RET.REL.NODEC R (label)",
    ]


def test_other_registers_addresses_and_labels_are_no_difference():
    new = OLD.replace("R24", "R88").replace("UR9", "UR30").replace(".L_x_3", ".L_x_70").replace("P1", "P4")
    assert sass_diff.compare_lines("d64-dense", lines(OLD), lines(new)) == ("", "d64-dense: same")


def test_a_difference_is_shown_and_counted():
    new = OLD.replace("0x3, 0x100", "0x4, 0x100").replace("@P1 BRA `(.L_x_3)", "NOP\nNOP")
    text, summary = sass_diff.compare_lines("d64-dense", lines(OLD), lines(new))
    assert "--- before/d64-dense.sass\n+++ now/d64-dense.sass\n" in text
    assert "\n-BAR.ARV 0x3, 0x100\n" in text and "\n+BAR.ARV 0x4, 0x100\n" in text
    assert summary.startswith("d64-dense: +3/-2 instructions, loops not found: the consumer must have two")


def test_the_loop_before_and_after():
    """Of a real kernel whose unmasked loop has lost one instruction."""
    before = instructions(compiled.texts(KERNELS["d128-dense"])[1])
    loop = sass_diff.main_loops(before).unmasked
    lost = next(line for line in loop if line.family == "UMOV")
    now = [line for line in before if line is not lost]
    _, summary = sass_diff.compare_lines("d128-dense", before, now)
    size = len(loop)
    assert summary == f"d128-dense: +0/-1 instructions, loop {size} -> {size - 1} (UMOV -1)"


PACKAGE = {
    "compile.py": "from .kernels import FOLDER\n\n\ndef cubin(static, plan):\n"
    "    return (FOLDER / f'{static.head_dim}.cubin').read_bytes()\n",
    "plan.py": "TABLE = {(128, 128, False): None, (512, 512, False): None}\n\n\ndef choose(static):\n    return None\n",
    "problem.py": "from collections import namedtuple\n\n"
    "Static = namedtuple('Static', 'dtype head_dim head_dim_v right_bound left_bound negative_scale')\n",
    "__init__.py": "",
}
KERNELS_FOLDER = "from pathlib import Path\n\nFOLDER = Path(__file__).parent\n"


@pytest.fixture
def history(tmp_path):
    """A repository whose commit "old" has no function cubin, "new" one that takes recorded kernels, "broken" none."""
    package = tmp_path / "hopper_fa3"
    package.mkdir()

    def git(*arguments):
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    def commit(tag):
        git("add", ".")
        git("commit", "-m", tag)
        git("tag", tag)

    git("init")
    (package / "compile.py").write_text("def compiled():\n    pass\n")
    commit("old")
    for file, text in PACKAGE.items():
        (package / file).write_text(text)
    kernels = tmp_path / "kernels"  # and no link to it in the package, as in our first commits
    kernels.mkdir()
    (kernels / "__init__.py").write_text(KERNELS_FOLDER)
    for head_dim in (128, 512):
        (kernels / f"{head_dim}.cubin").write_bytes(compiled.cubin(KERNELS["d128-dense"]))
    commit("new")
    (package / "plan.py").write_text("raise RuntimeError('half done')\n")
    commit("broken")
    return tmp_path


def test_difference_to_another_commit(history, monkeypatch, capsys):
    def already(kernels):
        return [(name, compiled.cubin(KERNELS[name])) for name in ("d64-dense", "d128-dense")]

    monkeypatch.setattr(table_kernels, "compiled", already)
    sass.print_difference("new", [], history)
    said = capsys.readouterr().out.splitlines()
    assert said == ["d64-dense: only here", "d128-dense: same", "d512-dense: only in the other commit"]
    with pytest.raises(sass_diff.OtherCommit, match=r"^broken does not compile: RuntimeError: half done$"):
        sass.print_difference("broken", [], history)
    with pytest.raises(sass_diff.OtherCommit, match=r"^old has no hopper_fa3\.compile\.cubin$"):
        sass.print_difference("old", [], history)
    with pytest.raises(sass_diff.OtherCommit, match="git worktree: fatal: invalid reference: none"):
        sass.print_difference("none", [], history)
    left = subprocess.run(["git", "-C", str(history), "worktree", "list"], capture_output=True, text=True)
    assert len(left.stdout.splitlines()) == 1


def test_an_ended_comparison_leaves_no_checkout(history):
    code = (
        "import sys, time, sass_diff; sass_diff.end_in_order()\n"
        "with sass_diff.checkout(sys.argv[1], 'new') as path: print(path, flush=True); time.sleep(60)"
    )
    environment = os.environ | {"PYTHONPATH": f"{sass_diff.FOLDER}:{sass_diff.FOLDER.parent}"}
    command = [sys.executable, "-c", code, str(history)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        path = Path(process.stdout.readline().strip())
        assert path.is_dir()
        process.terminate()
        assert process.wait(20) == 143
    left = subprocess.run(["git", "-C", str(history), "worktree", "list"], capture_output=True, text=True)
    assert not path.exists() and len(left.stdout.splitlines()) == 1


def test_a_report_is_written_for_people_and_programs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        table_kernels, "compiled", lambda kernels: [(name, compiled.cubin(KERNELS[name])) for name in kernels]
    )
    monkeypatch.setattr(sass, "BASELINE", tmp_path / "baseline.json")
    assert sass.main(["--case", "d128-causal", "--out", str(tmp_path / "new")]) == 0
    page = (tmp_path / "new" / "sass.md").read_text()
    assert capsys.readouterr().out == page and not sass.BASELINE.exists()
    found = json.loads((tmp_path / "new" / "sass.json").read_text())
    assert found == {
        "versions": sass_figures.versions(compiled.cubin(KERNELS["d128-causal"])),
        "kernels": {"d128-causal": figures("d128-causal")},
    }
    size = found["kernels"]["d128-causal"]["unmasked"]["instructions"]
    assert f"| d128-causal, unmasked | 16 | 64 | 0 | 64 | 64 | 1 | 32 | 0 | 3 | 4 | 0 | {size} |" in page
    clocks = f"| d128-causal | 3072 | {3 * size} | 1536 | 384 | tensor | 100% | {3 * size / 3072:.0%} |"
    assert clocks in page
    assert "| d128-causal | 192x128 | 3 | 128 / 32 / 160 | 0 | 0 | 0 | 230400 |" in page


def test_cubin_files_are_reported_without_compiling(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(table_kernels, "compiled", None)
    path = tmp_path / "some.cubin"
    path.write_bytes(compiled.cubin(KERNELS["d128-causal"]))
    assert sass.main([str(path)]) == 0
    said = capsys.readouterr().out
    assert (
        said.startswith("hopper_fa3_forward_d128_causal_bf16_192x128_shared_p_0: registers 128  stack 0")
        and "unmasked " in said
    )
    path.write_text("not machine code")
    assert sass.main([str(path)]) == 2
    assert f"sass: {path}: cuobjdump cannot read this cubin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--case", "d64-dense", "--update-baseline"], "no --case"),
        (["--diff", "HEAD", "--out", "x"], "no --out"),
        (["a.cubin", "--case", "d64"], "cubin files take no options"),
    ],
)
def test_options_that_do_not_go_together(words, message, capsys):
    with pytest.raises(SystemExit):
        sass.main(words)
    assert message in capsys.readouterr().err


def test_names_are_those_of_the_cases():
    for name, kernel in KERNELS.items():
        assert table_kernels.of_case(name) == kernel
    assert table_kernels.name(table_kernels.of_case("causal-d80-fp16")) == "d96-causal-fp16"

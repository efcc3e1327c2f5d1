"""Profiles read and told: on pages that Nsight Compute 2025.3.1 exported on an H200, cut to what is read.

tests/data/ncu holds one launch each of d128-causal and d64-dense (batch 2, length 8192) of 2026-11-29; the latter
without lines. A shell script stands in for ncu.
"""

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from cases import Case

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import ncu
import ncu_pages
import ncu_report
import ncu_roles
import selection

DATA = Path(__file__).parent / "data" / "ncu"
FACTS = {"gpu": "NVIDIA H200", "date": "2026-11-29 19:40 UTC", "commit": "0123456789ab"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Name of a case -> folder of its pages as ncu writes them."""

    def unpack(folder):
        target = tmp_path_factory.mktemp(folder.name)
        for file in folder.iterdir():
            packed = file.suffix == ".gz"
            content = gzip.decompress(file.read_bytes()) if packed else file.read_bytes()
            (target / (file.stem if packed else file.name)).write_bytes(content)
        return target

    return {folder.name: unpack(folder) for folder in DATA.iterdir()}


@pytest.fixture(scope="module")
def figures(pages):
    return {name: ncu_report.read(folder, selection.case(name), FACTS) for name, folder in pages.items()}


def samples(figures, role, reason=None):
    counts = figures["roles"][role]
    return sum(counts.values()) if reason is None else counts.get(reason, 0)


def test_metrics_are_plain_numbers(pages):
    kernel, gpu, metrics = ncu_pages.metrics(pages["d128-causal"] / "raw.csv")
    assert kernel == "hopper_fa3_forward_d128_causal_bf16_128x128_0" and gpu == "NVIDIA H200"
    assert metrics["nanoseconds"] == 789_728 and metrics["tensor"] == 79.48 and metrics["shared_bytes"] == 197_632
    assert metrics["l2_read_bytes"] == 4_429_254_784 and metrics["registers"] == 168


def test_a_missing_metric_is_named(pages, tmp_path):
    text = (pages["d128-causal"] / "raw.csv").read_text()
    (tmp_path / "raw.csv").write_text(text.replace("dram__bytes_read.sum", "dram__bytes_read_all.sum"))
    with pytest.raises(ValueError, match=r"lacks dram__bytes_read\.sum"):
        ncu_pages.metrics(tmp_path / "raw.csv")


def test_the_stall_without_a_column_is_found(pages):
    # The raw page counts 1859 samples of warpgroup_arrive and 82,141 in all; the source page has no such column.
    sampled = ncu_pages.source(pages["d128-causal"] / "source.csv")
    stalls = sum((row.stalls for row in sampled), Counter())
    assert len(sampled) == 3112 and stalls.total() == 82_141
    assert stalls["warpgroup_arrive"] == 1859 and stalls["barrier"] == 9354 and stalls["selected"] == 15_649


def test_an_instruction_keeps_predicate_modifiers_and_target():
    branch = ncu_pages.instruction("0x7f17a77a2600", "@!P1  BRA 0x7f17a77ac360")
    assert (branch.predicate, branch.family, branch.target) == ("!P1", "BRA", "0x7f17a77ac360")
    product = ncu_pages.instruction("0x10", "      HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT")
    assert (product.family, product.opcode) == ("HGMMA", "HGMMA.64x128x16.F32.BF16") and product.target is None
    sleep = ncu_pages.instruction("0x20", "@!P0  NANOSLEEP.SYNCS 0x989680")
    assert sleep.target is None, "an immediate is no address"


def test_kernel_sources_are_named_as_in_the_repository():
    assert ncu_pages.short("/home/user/hopper_fa3/kernels/softmax.py") == "kernels/softmax.py"
    assert ncu_pages.short("/usr/lib/python3/cutlass/cute/math.py") == "cute/math.py"


def test_every_sample_has_one_role(figures):
    # Two samples fell on the branch to itself behind the kernel's end.
    assert sum(samples(figures["d128-causal"], role) for role in ncu_roles.ROLES) == 82_141 - 2
    assert samples(figures["d128-causal"], ncu_roles.MAIN) == 69_612
    assert samples(figures["d128-causal"], ncu_roles.PRODUCER) == 6853


@pytest.mark.parametrize(("name", "k_and_v"), [("d128-causal", 66_560), ("d64-dense", 43 * 64 * 64)])
def test_loops_are_told_apart_by_what_they_execute(pages, name, k_and_v):
    sampled = ncu_pages.source(pages[name] / "source.csv")
    rows = list(zip(sampled, ncu_roles.roles(sampled), strict=True))
    products = {role: [row for row, its in rows if its == role and row.instruction.family == "HGMMA"]
                for role in ncu_roles.ROLES}  # fmt: skip
    warps = 4 * (2 if name == "d128-causal" else 3)
    heads = 2 * selection.case(name).heads
    tiles = heads * (64 if name == "d128-causal" else 43)
    # The first block of each tile stands before the loops, where it is masked; here no tile has a second masked one.
    assert {row.executed for row in products[ncu_roles.MAIN]} == {warps * (k_and_v - tiles)}
    assert {row.executed for row in products[ncu_roles.MASKED]} == {0}
    assert {row.executed for row in products[ncu_roles.REST]} == {warps * tiles}
    assert not products[ncu_roles.PRODUCER] and not products[ncu_roles.SETUP]
    assert {role for row, role in rows if row.instruction.family == "UTMALDG"} == {ncu_roles.PRODUCER}


def test_polling_behind_the_kernels_end_belongs_to_whom_it_serves(pages):
    sampled = ncu_pages.source(pages["d128-causal"] / "source.csv")
    of_role = ncu_roles.roles(sampled)
    polled = Counter(role for row, role in zip(sampled, of_role, strict=True) if row.instruction.family == "NANOSLEEP")
    # Producer: tile queue, Q twice, K and V inside and outside their loop; consumers: two in each loop, the rest once.
    assert polled[ncu_roles.MAIN] == 2 and polled[ncu_roles.MASKED] == 2
    assert polled[ncu_roles.PRODUCER] == 6 and polled[ncu_roles.REST] == 4


def test_setmaxnreg_is_read_from_the_code(figures):
    assert figures["d128-causal"]["registers_by_role"] == (24, 240)
    assert figures["d64-dense"]["registers_by_role"] == (32, 160)


def test_waits_are_split_by_what_is_waited_for(figures):
    wide, narrow = figures["d128-causal"], figures["d64-dense"]
    assert (
        samples(wide, ncu_roles.MAIN, "products") == 4800 + 1457 and samples(wide, ncu_roles.PRODUCER, "products") == 0
    )
    assert samples(wide, ncu_roles.PRODUCER, "mbarrier") > 0.75 * samples(wide, ncu_roles.PRODUCER)
    assert samples(narrow, ncu_roles.MAIN, "exponentials") > 0.1 * samples(narrow, ncu_roles.MAIN)
    assert samples(narrow, ncu_roles.MAIN, "barrier") == 6505


def test_code_of_another_structure_is_refused(pages):
    sampled = ncu_pages.source(pages["d64-dense"] / "source.csv")
    without = [row for row in sampled if row.instruction.family != "USETMAXREG"]
    with pytest.raises(ValueError, match=r"must hold USETMAXREG\.DEALLOC"):
        ncu_roles.roles(without)


def test_lines_name_our_python(figures):
    hottest = figures["d128-causal"]["lines"][0]
    assert hottest["place"] == "kernels/softmax.py:86" and "cute.math.exp2" in hottest["text"]
    assert hottest["samples"] == 20_523 and hottest["role"] == ncu_roles.MAIN
    load = next(line for line in figures["d128-causal"]["lines"] if line["place"].startswith("kernels/load.py"))
    assert load["reason"] == "mbarrier" and load["role"] == ncu_roles.PRODUCER
    shown = [line["samples"] for line in figures["d128-causal"]["lines"]]
    assert shown == sorted(shown, reverse=True) and len(shown) == ncu_report.SHOWN_LINES


def test_lines_of_other_machine_code_are_refused(pages, tmp_path):
    for file in pages["d64-dense"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "lines.csv").write_bytes((pages["d128-causal"] / "lines.csv").read_bytes())
    with pytest.raises(ValueError, match=r"lacks 2528 instructions"):
        ncu_report.read(tmp_path, selection.case("d64-dense"), FACTS)


@pytest.mark.parametrize("name", ["d128-causal", "d64-dense"])
def test_the_least_agrees_with_two_counters(figures, name):
    # What TMA read from L2, to the byte but for the tile counter; and the tensor cores' busy cycles at 4096 FLOP each.
    metrics, least = figures[name]["metrics"], figures[name]["least"]
    assert metrics["l2_read_bytes"] == pytest.approx(least["l2_bytes"], rel=2e-5)
    busy = least["tile_flops"] / (4096 * metrics["sms"] * metrics["cycles"])
    assert 100 * busy == pytest.approx(metrics["tensor"], abs=0.02)
    assert least["flops"] < least["tile_flops"]


@pytest.mark.parametrize(
    ("case", "blocks"),
    [
        (Case(1, 300, 300, 1, 1, 64, 64), 3 * 3),
        (Case(1, 300, 300, 1, 1, 64, 64, causal=True), 1 + 2 + 3),
        (Case(1, 128, 300, 1, 1, 64, 64, causal=True), 3),
        (Case(1, 300, 128, 1, 1, 64, 64, causal=True), 0 + 1 + 1),  # the first 172 queries see no key: their first tile
        (Case(1, 256, 256, 1, 1, 64, 64, window_size=(0, 0)), 1 + 1),
    ],
)
def test_visited_blocks(case, blocks):
    tiles = -(-case.seqlen_q // 128)
    least = ncu_report.least(case, 128, 128)
    assert least.l2_bytes == 2 * (blocks * 128 * (64 + 64) + tiles * 128 * 64)
    assert least.tile_flops == blocks * 128 * 128 * 2 * (64 + 64)
    assert least.dram_bytes == case.bytes


def test_the_page_tells_the_figures(figures):
    page = ncu_report.markdown(figures["d128-causal"])
    for told in (
        "# Nsight Compute: d128-causal-s8192 on NVIDIA H200, 2026-11-29", "commit 0123456789ab", "ncu 2025.3.1",
        "**0.790 ms, 696 TFLOP/s**", "SM clock 1645 of at most 1980 MHz", "then 24 for the producer and 240",
        "| tensor cores (WGMMA) | 79.5 |", "| L2 to SMs | 4429.3 | 4429.2 | 1.000 | 5.61 |",
        "| DRAM | 298.1 | 269.5 | 1.106 |", "235,441 of 88,935,834", "| mbarrier | 79.7 | 3.3 |",
        "| kernels/softmax.py:86 | 25.0 % |", "No sample fell on: consumers, masked loop.",
    ):  # fmt: skip
        assert told in page
    assert page.count("masked loop") == 1, "it never ran, so it has no column"
    assert len(page.splitlines()) < 80


def test_a_page_without_lines_says_so(figures):
    assert "carries no line information" in ncu_report.markdown(figures["d64-dense"])


def test_the_reading_follows_the_figures(figures):
    wide = " ".join(ncu_report.reading(figures["d128-causal"]))
    narrow = " ".join(ncu_report.reading(figures["d64-dense"]))
    assert (
        wide.startswith("Nearest bound: tensor cores")
        and "0.628 instead of 0.790 ms" in wide
        and "products 9.0 %" in wide
        and "DRAM moves 1.11 times the least, L2 1.00 times" in wide
    )
    assert narrow.startswith("Nearest bound: MUFU") and "next tensor cores (WGMMA), 60 %" in narrow
    metrics = dict(
        figures["d128-causal"]["metrics"], tensor=30.0, mufu=20.0, issue=25.0, shared=10.0, l2_out=8.0, l2=9.0
    )
    idle = " ".join(ncu_report.reading(figures["d128-causal"] | {"metrics": metrics}))
    assert idle.startswith(
        "Nothing is busy 60 % of the time, so waiting bounds it; busiest: tensor cores (WGMMA), 30 %"
    )
    assert "add up" in wide and "add up" not in idle
    metrics["dram"] = 91.0
    memory = " ".join(ncu_report.reading(figures["d128-causal"] | {"metrics": metrics}))
    assert memory.startswith("Nearest bound: DRAM, 91 %") and "may bound this launch" in memory


def test_another_case_than_the_profiled_one_is_refused(pages, capsys, tmp_path):
    folder = str(pages["d128-causal"])
    assert ncu.main(["--from", folder, "--case", "d128-dense", "--out", str(tmp_path)]) == 2
    assert "must be computed by hopper_fa3_forward_d128_dense_bf16" in capsys.readouterr().err


def test_rereading_csv_and_json_gives_the_same_page(pages, tmp_path, capsys):
    assert ncu.main(["--from", str(pages["d128-causal"]), "--case", "d128-causal", "--out", str(tmp_path)]) == 0
    page, data = map(Path, capsys.readouterr().out.split())
    assert page.name == "profile-d128-causal-s8192-nvidia-h200-2026-11-29.md" and data.stat().st_size < 10_000
    assert ncu.main(["--from", str(data), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / page.name).read_text() == page.read_text()


EXPORTS = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
case "$*" in
*--export*) while [ "$1" != --export ]; do shift; done; : > "$2.ncu-rep";;
*sass,cuda*) cat PAGES/lines.csv;;
*--page*) while [ "$1" != --page ]; do shift; done; cat "PAGES/$2.csv"; echo "==WARNING== chatter" >&2;;
esac
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A function that puts a shell script in ncu's place, on a machine that claims to have the GPU."""

    def install(script):
        path = tmp_path / "bin" / "ncu"
        path.parent.mkdir()
        path.write_text(script)
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(path.parent), prepend=":")
        return path

    monkeypatch.setattr(ncu, "hopper_missing", lambda: None)
    monkeypatch.setattr(ncu.environment, "describe", lambda peers, commit: dict(FACTS, commit=commit))
    return install


def profiled(tmp_path):
    reports, out = tmp_path / "reports", tmp_path / "out"
    return ["--case", "d128-causal", "--reports", str(reports), "--out", str(out), "--commit", "0123456789ab"]


def test_one_run_profiles_exports_and_reports(stand_in, pages, tmp_path, capsys):
    tool = stand_in(EXPORTS.replace("PAGES", str(pages["d128-causal"])))
    assert ncu.main(profiled(tmp_path)) == 0
    report, page, data = capsys.readouterr().out.splitlines()
    folder = tmp_path / "reports" / "d128-causal-s8192"
    assert report == f"for ncu-ui: {folder / 'report.ncu-rep'}" and (folder / "report.ncu-rep").exists()
    figures = json.loads(Path(data).read_text())
    assert figures["lines"][0]["place"] == "kernels/softmax.py:86" and "commit 0123456789ab" in Path(page).read_text()
    asked = (tool.parent / "calls").read_text().splitlines()
    assert "--clock-control none --kernel-name regex:hopper_fa3 --launch-skip 2 --launch-count 1 --set full" in asked[0]
    assert asked[0].endswith("ncu.py --workload --case d128-causal-s8192") and len(asked) == 5
    # The folder alone serves as well, with what was known about the machine.
    assert ncu.main(["--from", str(folder), "--case", "d128-causal", "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / Path(page).name).read_text() == Path(page).read_text()


def test_line_information_is_asked_of_the_workload_alone():
    words = ncu.command("/opt/ncu", Path("/tmp/report"), selection.case("d128-causal"))
    assert words[:3] == ["env", "CUTE_DSL_LINEINFO=1", "/opt/ncu"] and sys.executable in words


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'", "may not read performance counters"),
        ("echo Traceback >&2; echo 'RuntimeError: no memory' >&2; echo '==WARNING== No kernels were profiled.'; exit 1",
         "ncu failed: RuntimeError: no memory"),
        ("exit 1", "it printed nothing"),
        ('case "$*" in *--export*) while [ "$1" != --export ]; do shift; done; : > "$2.ncu-rep";; '
         "*) echo '==ERROR== cannot open'; exit 1;; esac", "ncu failed: ==ERROR== cannot open"),
    ],
)  # fmt: skip
def test_ncus_failures_are_one_line(stand_in, tmp_path, capsys, script, said):
    stand_in(f"#!/bin/sh\n{script}\n")
    assert ncu.main(profiled(tmp_path)) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2 and error[1].startswith("profile: ") and said in error[1]


def test_without_ncu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ncu, "hopper_missing", lambda: None)
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    monkeypatch.setattr(ncu, "INSTALLED", (str(tmp_path / "*" / "ncu"),))
    assert ncu.main(profiled(tmp_path)) == 2
    assert (
        capsys.readouterr().err
        == "profile: ncu (Nsight Compute) is neither on PATH nor in /opt/nvidia/nsight-compute\n"
    )


def test_the_newest_installed_ncu_serves(monkeypatch, tmp_path):
    for version in ("2024.1.0", "2025.3.1"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ncu").touch()
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    monkeypatch.setattr(ncu, "INSTALLED", (str(tmp_path / "*" / "ncu"),))
    assert ncu.find_ncu() == str(tmp_path / "2025.3.1" / "ncu")


def test_without_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ncu, "hopper_missing", lambda: "torch finds no CUDA device")
    assert ncu.main(profiled(tmp_path)) == 2
    assert capsys.readouterr().err == "profile: profiling needs a Hopper GPU: torch finds no CUDA device\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "--case is needed"), (["--case", "d12x"], "a case is"), (["--from", "/nowhere"], "/nowhere")],
)
def test_a_case_is_needed(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        ncu.main(words)
    error = capsys.readouterr().err
    assert error.startswith("profile: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize("text", ["[]", "{", "3", '{"environment": {}, "rows": []}'])
def test_another_json_is_refused(text, tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert ncu.main(["--from", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("profile: ") and error.count("\n") == 1

"""hopper_fa3/measured.py holds what the result files hold, and `python profiling/measured.py` writes it."""

import json
import sys
from pathlib import Path

import pytest

from hopper_fa3 import measured as module

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "profiling"))
import bench  # noqa: E402  (found by the line above)
import measured as writer  # noqa: E402
from timing import Timing  # noqa: E402

FILES = [writer.RESULTS / name for name in module.SOURCES]


def test_the_module_is_what_its_sources_give():
    text = writer.text(FILES)
    assert text == (ROOT / "hopper_fa3" / "measured.py").read_text(), "run python profiling/measured.py"


def test_rates_of_ours_are_the_kernel_rows_of_the_forward_table():
    document = json.loads(FILES[0].read_text())
    rows = [row for row in document["rows"] if row["kind"] == "kernel" and row["name"] == "ours" and not row["other"]]
    assert 0 < len(rows) == sum(len(cell) for (*_, name), cell in module.RATES.items() if name == "ours")
    for row in rows:
        known = module.RATES[row["head_dim"], row["causal"], "ours"][row["seqlen"]]
        assert known == pytest.approx(row["teraflops"], abs=0.05)
    facts = document["environment"]
    assert (facts["matmul_tflops"], facts["copy_tb_per_s"]) == (module.MATMUL_TERAFLOPS, module.COPY_TERABYTES)
    assert (facts["gpu"], facts["sms"], facts["date"][:10]) == (module.GPU, module.SMS, module.DATE)


def row(name, teraflops, **other):
    shape = {"head_dim": 128, "seqlen": 4096, "causal": False, "heads": 16, "heads_k": 16} | other
    shape = {"batch": 16384 // shape["seqlen"]} | shape
    return {"kind": "kernel", "name": name, "teraflops": teraflops} | shape


def test_a_second_file_adds_the_names_that_the_first_lacks():
    table = {"rows": [row("ours", 600.04), row("matmul", 700.0), row("ours", 610.0, kind="public")]}
    second = {"rows": [row("ours", 550.0, seqlen=1024), row("standard", 150.0, dtype="bfloat16", head_dim_v=128)]}
    unusual = [row("ours", 1.0, heads_k=4, causal=True), row("ours", 2.0, dtype="float16", head_dim=64)]
    unusual.append(row("ours", 3.0, head_dim=192, head_dim_v=128))
    unusual += [row("flash", 4.0, batch=1), row("flash", 5.0, heads=8, heads_k=8), row("cudnn", 6.0, kind="graph")]
    second["rows"] += unusual
    assert writer.rates([table, second]) == {
        (128, False, "ours"): {4096: 600.0},
        (128, False, "standard"): {4096: 150.0},
    }


def test_cells_beside_the_grid_are_not_taken():
    options = bench.parser().parse_args(["--others"])
    run = bench.Bench(options, [], None, None)
    for case in run.others:
        run.record(run.suite, case, {("kernel", "ours"): Timing((1e-3,))}, (None, None))
    assert len(run.rows) == 16 and writer.rates([{"rows": [row._asdict() for row in run.rows]}]) == {}


def test_the_newest_files_are_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writer, "RESULTS", tmp_path)
    monkeypatch.setattr(writer, "MODULE", tmp_path / "measured.py")
    older, newer = (tmp_path / f"forward-nvidia-h200-2026-{day}.json" for day in ("11-29", "12-03"))
    added = tmp_path / "roofline-nvidia-h200-2026-12-01.json"
    document = json.loads(FILES[0].read_text())
    older.write_text("{}")
    newer.write_text(json.dumps(document))
    added.write_text(json.dumps({"environment": {}, "rows": [row("standard", 150.0)]}))
    assert writer.main([]) == 0
    namespace = {}
    exec((tmp_path / "measured.py").read_text(), namespace)
    assert namespace["SOURCES"] == (newer.name, added.name)
    assert namespace["RATES"][128, False, "standard"] == {4096: 150.0}
    assert namespace["RATES"][128, True, "ours"] == module.RATES[128, True, "ours"]

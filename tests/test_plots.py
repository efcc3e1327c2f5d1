"""Tables and pictures drawn again from result files, without a GPU; skipped where matplotlib is not installed."""

import builtins
import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "profiling"))
import bench  # noqa: E402  (found by the line above)
import plots  # noqa: E402
import tables  # noqa: E402

COMMITTED = ROOT / "profiling" / "results" / "forward-nvidia-h200-2026-11-29"
FACTS = {"gpu": "some GPU", "date": "2026-11-29 12:00 UTC", "commit": "abc", "copy_tb_per_s": 4.25}


def words_of(figure):
    """All that a reader can read in a figure."""
    from matplotlib.text import Text

    return " | ".join(text.get_text() for text in figure.findobj(Text))


def decode_rows():
    shape = {"kind": "kernel", "head_dim": 128, "causal": False, "heads": 32, "heads_k": 8, "spread": 0.01}
    shape |= {"teraflops": None, "sm_clock": None, "power": None}
    return [
        tables.Row(seqlen=seqlen, batch=batch, name=name, microseconds=time, tb_per_s=size / time * 1e-6, **shape)
        for batch, seqlen, size in ((1, 8192, 34e6), (32, 8192, 1074e6))
        for name, time in (("ours", 300.0), ("cudnn", 252.0))
    ]


def test_committed_results_are_drawn_again(tmp_path):
    pytest.importorskip("matplotlib")
    source = Path(shutil.copy(COMMITTED.with_suffix(".json"), tmp_path))
    assert bench.main(["--from", str(source), "--out", str(tmp_path / "new")]) == 0
    redrawn = tmp_path / "new" / COMMITTED.name
    assert redrawn.with_suffix(".md").read_text() == COMMITTED.with_suffix(".md").read_text()
    assert redrawn.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_lengths_say_what_they_show():
    pytest.importorskip("matplotlib")
    facts, rows = tables.read(COMMITTED.with_suffix(".json"))
    figure = plots.rates(rows, facts)
    words, top = words_of(figure), figure.axes[0].get_ylim()[1]
    assert max(row.teraflops for row in rows if row.kind == "kernel") < top < 1000
    for word in ("TFLOP/s", "length (queries = keys)", "NVIDIA H200, 2026-11-29", "head_dim 256, causal", "16k",
                 "hopper_fa3", "FlashAttention-4", "matrix product 8192³", "16384 tokens"):  # fmt: skip
        assert word in words


def test_decoding_shows_times_and_the_copy():
    pytest.importorskip("matplotlib")
    figure = plots.rates(decode_rows(), FACTS | {"suite": "decode"})
    words = words_of(figure)
    for word in (
        "TB/s",
        "batch 32\n8k keys",
        "(fit the L2 cache)",
        "252 µs",
        "copy, 4.25 TB/s",
        "some GPU, 2026-11-29",
    ):
        assert word in words
    assert "launches one by one" in words and "batch 32\n8k keys\n(fit" not in words
    assert "batch 1\n8k keys\n(fit the L2 cache)" in words
    heights = {bar.get_height() for container in figure.axes[0].containers for bar in container}
    assert heights == {row.tb_per_s for row in decode_rows()}
    graphs = [row._replace(kind="graph", microseconds=row.microseconds / 2) for row in decode_rows()]
    words = words_of(plots.rates(decode_rows() + graphs, FACTS | {"suite": "decode"}))
    assert "replayed CUDA graphs" in words and "126 µs" in words and "252 µs" not in words


def test_styles_differ_also_in_grey():
    lines = [(style.marker, style.dash) for name, style in plots.STYLES.items() if name not in ("matmul", "copy")]
    assert len(set(lines)) == len(lines)
    assert len({style.hatch for style in plots.STYLES.values()}) == len(lines)


def test_without_matplotlib_there_is_one_line_and_no_picture(tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def absent(name, *arguments, **options):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert plots.draw(tmp_path / "x.png", plots.rates, decode_rows(), FACTS | {"suite": "decode"}) is None
    assert capsys.readouterr().err == "matplotlib is not installed: no x.png; --from draws it later\n"
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_other_rows_is_refused(tmp_path):
    path = tmp_path / "x.json"
    empty = {"environment": FACTS, "rows": []}
    nothing = {"environment": {}, "rows": [row._asdict() for row in decode_rows()]}
    for text in ("[]", "{", *map(json.dumps, (empty, nothing, {"environment": {}, "rows": [{"name": "ours"}]}))):
        path.write_text(text)
        with pytest.raises(ValueError, match="a result file must hold rows of kind, head_dim"):
            tables.read(path)

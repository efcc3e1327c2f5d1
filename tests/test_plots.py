"""Tables and pictures drawn again from result files, without a GPU; skipped where matplotlib is not installed."""

import builtins
import json
import math
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "profiling"))
import bench  # noqa: E402  (found by the line above)
import plots  # noqa: E402
import tables  # noqa: E402

COMMITTED = ROOT / "profiling" / "results" / "forward-nvidia-h200-2026-11-30"
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
    for word in ("TFLOP/s", "length (queries = keys)", "NVIDIA H200, 2026-11-30", "head_dim 256, causal", "16k",
                 "hopper_fa3", "FlashAttention-4", "matrix product 8192³", "16384 tokens"):  # fmt: skip
        assert word in words


def committed_grid():
    """(facts, rows) of the committed results, without the cells that --others added."""
    facts, rows = tables.read(COMMITTED.with_suffix(".json"))
    return facts, [row for row in rows if not row.other]


def with_others(rows):
    """Rows and, as --others adds them, three cells of kernel time in which ours is 1.5, 1.25 and 0.5 times fa4."""
    shapes = (
        {"head_dim": 192, "heads": 16, "heads_k": 16, "head_dim_v": 128},
        {"head_dim": 128, "heads": 32, "heads_k": 4, "head_dim_v": 128},
        {"head_dim": 128, "heads": 16, "heads_k": 16, "head_dim_v": 128, "dtype": "float16"},
    )
    one = next(row for row in rows if (row.kind, row.name, row.seqlen) == ("kernel", "ours", 8192))
    added = [
        one._replace(name=name, teraflops=teraflops, causal=True, other=True, **shape)
        for shape, ours in zip(shapes, (600.0, 500.0, 200.0), strict=True)
        for name, teraflops in (("ours", ours), ("fa4", 400.0))
    ]
    return rows + added


def test_others_stand_in_words_in_their_tables_and_in_no_picture(tmp_path):
    facts, rows = committed_grid()
    everything = with_others(rows)
    text = tables.markdown(everything)
    for line in (
        "| D | heads | dtype | length | mask | ours | fa4 | cudnn | matmul |",
        "| 192/128 | 16 | bf16 | 8192 | causal | 600 | 400 |  |  | 1.50 |",
        "| 128 | 32/4 | bf16 | 8192 | causal | 500 | 400 |  |  | 1.25 |",
        "| 128 | 16 | fp16 | 8192 | causal | 200 | 400 |  |  | 0.50 |",
        "| 64 | 32 | bf16 | 512 | dense | 345 |",
        "- geometric mean of ours / fa4 over the grid's lengths >= 2048: 1.10; least 0.50 (D 128 fp16 causal, 8192)",
    ):
        assert line in text
    assert text.split("### ")[3:] == tables.markdown(rows).split("### ")[3:]  # public and graph
    _, measured = tables.read(COMMITTED.with_suffix(".json"))
    committed = COMMITTED.with_suffix(".md").read_text()
    assert tables.markdown(measured).split("### ")[1:] == committed.split("### ")[1:]
    bf16 = [row for row in everything if row.other and row.dtype == "bfloat16"]
    assert "- least ours / fa4: 1.25 (D 128 causal, 32/4 heads, 8192)" in tables.markdown(bf16)
    *_, document = tables.write(tmp_path, "stem", facts, everything)
    assert tables.read(document) == (facts, everything)
    pytest.importorskip("matplotlib")
    assert words_of(plots.rates(everything, facts)) == words_of(plots.rates(rows, facts))


def test_below_each_table_stands_what_its_ratios_come_to():
    _, rows = committed_grid()
    _, host, kernel, _, graph = tables.markdown(rows).split("### ")
    long = [cell for key, cell in tables.cells(rows).items() if key.kind == "kernel" and key.seqlen >= 2048]
    ratios = [cell["ours"].teraflops / cell["fa4"].teraflops for cell in long]
    assert len(ratios) == 24 and f"{math.prod(ratios) ** (1 / 24):.2f}" == "1.10"
    assert "- geometric mean of ours / fa4 over lengths >= 2048: 1.10; least 1.02 (D 256 dense, 16384)" in kernel
    assert "- geometric mean of ours / cudnn over lengths >= 2048: 1.22; least 0.91 (D 64 causal, 512)" in kernel
    assert "- least ours / fa4: 1.06 (D 256 causal, 1024)" in graph and "geometric" not in graph
    assert "least" not in host  # one cell
    faster = [row._replace(name="fa4") for row in decode_rows() if row.name == "cudnn"]
    assert "(D 128 dense, batch 1, 8192)" in tables.markdown(decode_rows() + faster)
    assert "least" not in tables.markdown([row for row in rows if row.name != "ours"])


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


def test_a_picture_has_few_colours(tmp_path):
    """And is still the picture: a third of the bytes, no pixel far from what was drawn."""
    pytest.importorskip("matplotlib")
    from PIL import Image, ImageChops

    path, facts = tmp_path / "x.png", FACTS | {"suite": "decode"}
    figure = plots.rates(decode_rows(), facts)
    figure.savefig(tmp_path / "all.png")
    assert plots.draw(path, plots.rates, decode_rows(), facts) == path
    with Image.open(path) as found, Image.open(tmp_path / "all.png") as drawn:
        assert found.mode == "P" and found.size == drawn.size
        off = ImageChops.difference(found.convert("RGB"), drawn.convert("RGB"))
    assert max(largest for _, largest in off.getextrema()) < 48
    assert path.stat().st_size < 0.5 * (tmp_path / "all.png").stat().st_size


def test_a_file_of_other_rows_is_refused(tmp_path):
    path = tmp_path / "x.json"
    empty = {"environment": FACTS, "rows": []}
    nothing = {"environment": {}, "rows": [row._asdict() for row in decode_rows()]}
    for text in ("[]", "{", *map(json.dumps, (empty, nothing, {"environment": {}, "rows": [{"name": "ours"}]}))):
        path.write_text(text)
        with pytest.raises(ValueError, match="a result file must hold rows of kind, head_dim"):
            tables.read(path)

"""The tables of gradients: deterministic beside not, torch's best backend, and what is asked of each cell."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import goals
import peers
import plots
import tables
from bench_runs import cases_of

SHAPE = {"seqlen": 8192, "causal": True, "batch": 2, "heads": 16, "heads_k": 16, "head_dim": 128}
REST = {"spread": 0.01, "sm_clock": 1755.0, "power": 690.0}


def rows(kind, rates, **shape):
    """Rows of one cell: name -> TFLOP/s."""
    shape = SHAPE | shape
    return [
        tables.Row(kind=kind, name=name, microseconds=1e6 / rate, teraflops=float(rate), **shape, **REST)
        for name, rate in rates.items()
    ]


def cell(kind="autograd", **shape):
    return rows(kind, {"ours": 1}, **shape)[0].cell


def test_every_cell_of_the_backward_has_a_goal():
    cases = cases_of("--suite", "backward", "--others")
    asked = {case: goals.goal(tables.Cell.of("autograd", case)) for case in cases}
    assert all(asked.values()) and {one.least for one in asked.values()} == {1.0}
    table = {
        (case.head_dim, case.causal, case.seqlen_k): one.asked for case, one in asked.items() if case in cases[:12]
    }
    assert table[64, False, 2048] == 1.08 and table[128, True, 16384] == 1.10 and len(table) == 12
    others = {
        (case.head_dim, case.head_dim_v, case.heads_k): one.asked
        for case, one in asked.items()
        if case not in cases[:12]
    }
    assert others == {(80, 80, 16): 1.05, (96, 96, 16): 1.05, (192, 192, 8): 1.05, (192, 128, 16): 1.1,
                      (256, 256, 8): 1.3, (128, 128, 4): 1.05}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("kernel", {}), ("graph", {}), ("training", {}), ("autograd", {"seqlen": 512}), ("autograd", {"head_dim": 72}),
     ("autograd", {"head_dim_v": 64}), ("autograd", {"heads_k": 8}), ("autograd", {"dtype": "float16"}),
     ("deterministic", {"dtype": "float16"})],
)  # fmt: skip
def test_other_cells_have_none(kind, shape):
    assert goals.goal(cell(kind, **shape)) is None


def test_what_is_met_is_decided_unrounded():
    plain, kept = goals.Goal(1.12, 1.0), goals.Goal(None, 1.0, 0.9)
    assert [goals.met(plain, ratio, None) for ratio in (1.12, 1.1199, 1.0, 0.9999)] == [
        "goal",
        "least",
        "least",
        "neither",
    ]
    assert [goals.met(kept, 1.0, share) for share in (0.9, 0.899, None)] == ["goal", "least", "least"]
    assert goals.met(kept, 0.99, 1.0) == "neither"


def gradients():
    """Three cells, the last one beside the grid: goal, least and neither."""
    shapes = (
        {"seqlen": 8192},
        {"seqlen": 2048, "batch": 8},
        {"head_dim": 256, "heads": 8, "heads_k": 8, "other": True},
    )
    speeds = ((560, 500, 450), (400, 399, 380), (300, 301, 200))
    found = []
    for shape, (ours, fa4, cudnn) in zip(shapes, speeds, strict=True):
        found += rows("autograd", {"ours": ours, "fa4": fa4, "cudnn": cudnn, "matmul": 700}, **shape)
        found += rows("deterministic", {"ours": 0.95 * ours, "fa4": 0.8 * fa4}, **shape)
    return found


def test_a_table_of_gradients_says_what_is_met():
    backward, deterministic = tables.markdown(gradients()).split("### ")[1:]
    assert "| ours / fa4 | ours / cudnn | ours / matmul | goal; least | met | spread of ours |" in backward
    for line in (
        "| 128 | 16 | bf16 | 8192 | causal | 560 | 500 | 450 | 700 | 1.12 | 1.24 | 0.80 | 1.12; 1.00 | goal | 1.0% |",
        "| 1.09; 1.00 | least |",
        "| 256 | 8 | bf16 | 8192 | causal | 300 | 301 | 200 | 700 | 1.00 | 1.50 | 0.43 | 1.30; 1.00 | neither |",
        "- geometric mean of ours / fa4 over D 128 and the grid's lengths >= 2048: 1.06; least 1.00 (D 256 causal, ",
        "- goals, unrounded: 1 of 3 cells meet the goal, 1 only the least, 1 neither (D 256 causal, 8192: 0.997)",
    ):
        assert line in backward
    assert "cudnn" not in deterministic
    for line in (
        "| ours | fa4 | ours / fa4 | ours / not deterministic | fa4 / not deterministic | goal; least | met |",
        "| 128 | 16 | bf16 | 8192 | causal | 532 | 400 | 1.33 | 0.95 | 0.80 | 0.90 kept; 1.00 | goal |",
        "- geometric mean of ours / ours not deterministic: 0.95; least 0.95 (",
        "- geometric mean of fa4 / fa4 not deterministic: 0.80; least 0.80 (",
        "- goals, unrounded: 3 of 3 cells meet the goal, 0 only the least, 0 neither",
    ):
        assert line in deterministic


def test_without_fa4_nothing_is_judged():
    alone = [row for row in gradients() if row.name != "fa4"]
    backward, deterministic = tables.markdown(alone).split("### ")[1:]
    assert "| 1.12; 1.00 |  | 1.0% |" in backward and "TARGETS" not in backward
    assert "| 0.95 | 0.90 kept; 1.00 |  |" in deterministic
    others = tables.markdown([row for row in gradients() if row.name != "ours"])
    assert "goal" not in others and "fa4 / not deterministic" in others


def test_training_names_the_fastest_backend_of_torch():
    assert set(tables.SDPA) < set(peers.PEERS)
    found = rows("training", {"ours": 500, "fa4": 400, "cudnn": 390, "flash": 250, "matmul": 700})
    found += rows("training", {"ours": 300, "efficient": 200, "flash": 250, "cudnn": 240, "matmul": 700}, head_dim=256)
    text = tables.markdown(found)
    for line in (
        "| ours | fa4 | cudnn | flash | matmul | efficient | best SDPA | ours / fa4 | ours / best SDPA |",
        "| 128 | 8192 | causal | 500 | 400 | 390 | 250 | 700 |  | cudnn | 1.25 | 1.28 | 0.71 |",
        "| 256 | 8192 | causal | 300 |  | 240 | 250 | 700 | 200 | flash |  | 1.20 | 0.43 |",
        "- geometric mean of ours / best SDPA over D 128, 256 and lengths >= 2048: 1.24; least 1.20 (D 256 causal",
    ):
        assert line in text
    assert "ours / cudnn" not in text
    (first, _) = tables.cells(found).values()
    assert tables.summary(first) == "ours 500 TFLOP/s, 1.25 x fa4, 1.28 x best SDPA, 0.71 x matmul"
    facts = {"gpu": "some", "date": "2026-11-30", "commit": "abc", "group": 1, "tokens": 16384, "width": 2048}
    pytest.importorskip("matplotlib")
    figure = plots.rates(found, facts | {"suite": "training"})
    assert figure.get_suptitle().startswith("Attention forward and backward, bf16")
    both = plots.rates(found + gradients(), facts | {"suite": "backward,training"})
    assert both.get_suptitle().startswith("Attention backward, bf16") and len(both.axes) == 1
    for one in (figure, both):
        plots.close(one)

"""The benchmark's windows, packed sequences and changed scores: cases, work, peers, goals, and whole runs on a CPU."""

import functools
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import bench
import cost
import goals
import peers
import peers_features
import suites
import suites_packed
import suites_scores
import suites_windows
import tables
import yardsticks
from bench_runs import FakeClock, cases_of
from peers import Peer
from timing import Launch

import hopper_fa3
from hopper_fa3 import flash_attn_func, flash_attn_varlen_func, plan, reference

FACTS = {"gpu": "some GPU", "date": "2026-11-30 01:00 UTC", "commit": "abc", "copy_tb_per_s": 4.2}


def mask_of(case):
    """Bool (queries, keys), True where a query sees a key."""
    distance = torch.arange(case.seqlen_k)[None] - torch.arange(case.seqlen_q)[:, None]
    left, right = case.window_size
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0 or case.causal:
        seen &= distance <= 0
    return seen


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("left", [0, 100, 128, 1024, None])
def test_blocks_visited_are_those_with_a_visible_pair(head_dim, left):
    case = suites_windows.windowed(left or 0, head_dim, seqlen=1500)
    case = suites_windows.causal(case) if left is None else case
    seen, problem = mask_of(case), suites_windows.problem_of(case)
    chosen = plan.choose(problem.static)
    tiles = seen.split(chosen.tile_m)
    visited = 0
    for tile in tiles:
        keys = tile.any(0).nonzero()
        origin = 0 if left is None else int(keys.min())
        visited += (int(keys.max()) - origin) // chosen.tile_n + 1
    whole = len(tiles) * -(-1500 // chosen.tile_n)
    assert suites_windows.visited(case) == pytest.approx(visited / whole) and visited < whole
    static = problem.backward_static(False, False)
    config = plan.backward_config(static, plan.choose_backward(static))
    steps = [step.any().item() for tile in seen.split(config.tile_n, 1) for step in tile.split(config.tile_m)]
    assert suites_windows.visited_backward(case) == pytest.approx(sum(steps) / len(steps))


def test_windows_count_the_flops_of_their_band():
    cases = cases_of("--suite", "windows")
    assert [(case.head_dim, case.heads, case.window_size) for case in cases] == [
        (head_dim, 2048 // head_dim, (left, 0)) for head_dim in (64, 128) for left in (128, 1024, 4096)
    ]
    assert {(case.batch, case.seqlen_k, case.causal) for case in cases} == {(1, 16384, True)}
    pairs = 16384 * 129 - 128 * 129 // 2  # the first 128 queries lack 128, 127, ... keys
    suite = bench.SUITES["windows"]
    flops, _ = suite.rates(cases[0], 1e-3)
    assert flops == pytest.approx(4 * 2048 * pairs * 1e-9)
    assert suite.also[0].rates(cases[0], 1e-3)[0] == pytest.approx(2.5 * flops)
    dense, causal = (own.of(cases[0]) for own in suite.yardsticks)
    assert cost.band_teraflops(dense, 1e-3) == pytest.approx(4 * 2048 * 16384**2 * 1e-9)
    assert cost.band_teraflops(causal, 1e-3) == pytest.approx(4 * 2048 * 16384 * 16385 / 2 * 1e-9)
    assert [suite.work(one) for one in (dense, cases[0])] == [1.0, pytest.approx(0.0233, abs=1e-4)]
    assert [suite.replayed(case) for case in cases[:3]] == [True, True, False]
    assert len(cases_of("--suite", "windows", "--head-dims", "128")) == 3


def test_packed_lengths_are_the_seeds_and_fill_all_tokens():
    lengths = suites_packed.LONG_TAILED
    assert len(lengths) == 64 and sum(lengths) == 16384 and (min(lengths), max(lengths)) == (2, 3655)
    assert suites_packed.long_tailed(seed=1) != lengths == suites_packed.long_tailed()
    cases = cases_of("--suite", "varlen")
    assert [(case.head_dim, case.mix, case.causal) for case in cases] == list(
        itertools.product((64, 128), ("16 x 1024", "64 lognormal"), (False, True))
    )
    assert {case.seqlen_q for case in cases} == {16384} and len({(case.name, case.mix) for case in cases}) == 8
    uniform, tailed = cases[1], cases[2]
    assert cost.teraflops(uniform, 1e-3) == pytest.approx(4 * 2048 * 16 * 1024**2 / 2 * 1e-9)
    same, near = suites_packed.batched(uniform), suites_packed.batched(tailed)
    assert (same.batch, same.seqlen_q, same.causal) == (16, 1024, True)
    assert same.flops_convention == uniform.flops_convention
    assert near.flops_convention == pytest.approx(tailed.flops_convention, rel=0.04)  # 12.6 sequences are 13
    assert near.batch * near.seqlen_q == pytest.approx(16384, rel=0.001) and not near.causal
    assert "13 x 1260" in dict(bench.SUITES["varlen"].facts)["lengths"]


def test_scores_are_changed_where_goals_ask_for_it():
    cases = cases_of("--suite", "scores")
    assert {(case.change, case.head_dim) for case in cases} == {
        ("softcap 50", 64), ("softcap 50", 128), ("softcap 50", 256), ("softcap 15", 128), ("softcap 15", 256),
        ("sink", 128), ("ALiBi", 128),
    }  # fmt: skip
    assert {(case.seqlen_q, case.batch, case.heads * case.head_dim) for case in cases} == {(8192, 2, 2048)}
    (own,) = bench.SUITES["scores"].yardsticks
    assert own.of(cases[1]).change == "" and own.of(cases[1]).causal and len(cases) == 14
    asked = {goals.goal(tables.Cell.of(kind, case, case.change)) for case in cases for kind in ("public", "autograd")}
    assert asked == {None, *(goals.Goal(None, None, kept) for kept in (0.85, 0.98, 0.95))}


class FakeModule:
    """FlashAttention-4's functions: they remember their keywords."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        def function(*tensors, **keywords):
            self.asked.append((name, keywords))
            return tensors[0], None

        return function


def test_fa4_is_asked_for_the_same(monkeypatch):
    fake, x = FakeModule(), torch.zeros(1, 8, 2, 16)
    for module in (peers, peers_features):
        monkeypatch.setattr(module, "flash_attention_4", lambda: fake)
    where, sink = peers_features.packing((3, 5), "cpu"), torch.zeros(2)
    windowed, packed, scored = (
        known["fa4"] for known in (peers_features.WINDOWED, peers_features.PACKED, peers_features.SCORED)
    )
    for make in (windowed.kernel, windowed.public):
        make(x, x, x, True, (3, 0)).call()
    for make in (packed.kernel, packed.public):
        make(x[0], x[0], x[0], False, where).call()
    scored.public(x, x, x, False, {"softcap": 15.0}, None).call()
    scored.public(x, x, x, False, {}, sink).call()
    assert scored.refuses(x, x, x, False, {"alibi_slopes": sink}, None) == "FlashAttention-4 has no ALiBi slopes"
    assert scored.refuses(x, x, x, False, {"softcap": 15.0}, None) is None
    names = [name for name, _ in fake.asked]
    assert names == ["_flash_attn_fwd", "flash_attn_func", "_flash_attn_fwd", "flash_attn_varlen_func",
                     "flash_attn_func", "flash_attn_func"]  # fmt: skip
    asked = [keywords for _, keywords in fake.asked]
    assert (asked[0]["window_size_left"], asked[0]["window_size_right"], asked[0]["causal"]) == (3, 0, True)
    assert asked[1] == {"causal": True, "window_size": (3, 0)}
    for keywords in asked[2:4]:
        assert keywords["cu_seqlens_q"].tolist() == keywords["cu_seqlens_k"].tolist() == [0, 3, 8]
        assert keywords["max_seqlen_q"] == keywords["max_seqlen_k"] == 5
    assert (asked[4]["softcap"], asked[4]["learnable_sink"], asked[5]["learnable_sink"] is sink) == (15.0, None, True)


def packed_attention(q, k, v, starts, other, longest, longest_k, *, window_size):
    """torch's varlen_attn, by definition."""
    assert (starts.diff() <= longest).all() and starts.equal(other) and longest == longest_k
    left, right = (None if side < 0 else side for side in window_size)
    parts = [
        reference.standard(*(x[None, a:b] for x in (q, k, v)), left=left, right=right, compute_dtype=torch.float32)[0]
        for a, b in itertools.pairwise(starts.tolist())
    ]
    return torch.cat([part[0] for part in parts]).to(q.dtype)


@pytest.fixture
def torch_packs(monkeypatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", packed_attention)


@pytest.mark.usefixtures("torch_packs")
def test_torch_computes_the_same_windows_and_packed_sequences():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 20, 2, 16, generator=generator) for _ in range(3))
    peer = peers_features.WINDOWED["flash"]
    assert peer.missing() is None
    for window_size in ((4, 0), (4, -1)):
        ours = suites.ours_public(q, k, v, True, window_size)
        assert suites.apart(ours, peer.public(q, k, v, True, window_size)) < 1e-5
    where = peers_features.packing((1, 12, 7), "cpu")
    for causal in (False, True):
        given = (q[0], k[0], v[0], causal, where)
        assert suites.apart(suites_packed.ours_public(*given), peers_features.PACKED["flash"].public(*given)) < 1e-5


def test_other_peers_say_why_they_are_left_out():
    for known in (peers_features.WINDOWED, peers_features.PACKED, peers_features.SCORED):
        assert set(known) == set(peers.PEERS)
        assert "mask over all scores" in known["cudnn"].missing() and "not measured" in known["xformers"].missing()
    _, absent = bench.available(["cudnn", "math"], peers_features.SCORED)
    assert [name for name, _ in absent] == ["cudnn", "math"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--suite", "windows", "--causal", "yes"], "the windows suite has shapes of its own, got --causal"),
        (["--suite", "varlen", "--seqlens", "512"], "the varlen suite has shapes of its own, got --seqlens"),
        (["--suite", "scores,varlen"], "the scores suite has shapes of its own, got --suite scores,varlen"),
        (["--suite", "scores", "--head-dims", "0"], "bench needs --head-dims of at least 1"),
        (["--suite", "scores", "--deterministic"], "only the backward suite has deterministic gradients"),
    ],
)
def test_wrong_options_of_these_suites(words, said, capsys):
    assert bench.main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(said) and printed.err.count("\n") == 1


# What stands for FlashAttention-4 in a whole run: the same attention in float32


def exact_window(q, k, v, causal, window_size):
    return Launch(lambda: flash_attn_func(*(x.float() for x in (q, k, v)), window_size=window_size).to(q.dtype))


def exact_packed(q, k, v, causal, where):
    given = peers_features.both(where)
    return Launch(lambda: flash_attn_varlen_func(*(x.float() for x in (q, k, v)), *given, causal=causal).to(q.dtype))


def exact_scores(q, k, v, causal, keywords, sink):
    given = keywords | {"sink": sink}
    return Launch(lambda: flash_attn_func(*(x.float() for x in (q, k, v)), causal=causal, **given).to(q.dtype))


class PackedLaunches:
    """What stands for hopper_fa3.launch_packed: the CPU path behind the same two functions."""

    @staticmethod
    def prepare(problem, q, k, v):
        return SimpleNamespace(problem=problem, out=q.new_empty(1).expand(problem.out_shape))

    @staticmethod
    def execute(recipe, q, k, v, lengths, out):
        offsets, offsets_k, used_q, used_k = lengths
        longest, causal = int(offsets.diff().max()), recipe.problem.right == 0
        assert offsets is offsets_k and used_q is used_k is None
        given = (offsets, offsets, longest, longest)
        return flash_attn_varlen_func(q, k, v, *given, causal=causal, out=out, return_attn_probs=True)


SMALL = {
    "windows": (
        [replace(suites_windows.windowed(left, 16, 260), heads=1, heads_k=1) for left in (8, 100)],
        exact_window,
    ),
    "varlen": (
        [suites_packed.packed(mix, lengths, 64, causal, heads=2)
         for mix, lengths in (("16 x 1024", (24, 24)), ("64 lognormal", (3, 40, 1, 12))) for causal in (False, True)],
        exact_packed,
    ),
    "scores": (
        [suites_scores.scored(change, 128, True, 1, 40) for change in ("softcap 50", "sink", "ALiBi")],
        exact_scores,
    ),
}  # fmt: skip


def run_small(monkeypatch, tmp_path, name):
    """A whole run of a suite but for its sizes and the GPU; (exit code, result file without ending)."""
    cases, exact = SMALL[name]
    public = bench.OURS._replace(kernel=suites.ours_public)
    suite = bench.SUITES[name]
    ours = suite.ours if name == "varlen" else suite.ours._replace(kernel=suite.ours.public)
    monkeypatch.setattr(hopper_fa3, "launch_packed", PackedLaunches, raising=False)
    peer = Peer("fa4", lambda: None, peers_features.fa4_refuses if name == "scores" else peers.never, exact, exact)
    calls = {"replay": lambda entrant, tensors: entrant.public(*tensors), "replayed": lambda case: True}
    (gradients,) = suite.also
    small = suite._replace(
        cases=lambda options: cases, peers={"fa4": peer}, ours=ours, also=(gradients._replace(**calls),), **calls
    )
    monkeypatch.setitem(bench.SUITES, name, small)
    monkeypatch.setattr(bench, "OURS", public)
    monkeypatch.setattr(bench, "EventClock", FakeClock)
    monkeypatch.setattr(bench, "Inputs", functools.partial(suites.Inputs, device="cpu"))
    monkeypatch.setattr(bench, "ceilings", lambda: dict.fromkeys(("matmul", "copy"), Launch(lambda: None)))
    monkeypatch.setattr(bench.environment, "obstacle", lambda verb, folder: None)
    monkeypatch.setattr(bench.environment, "describe", lambda versions, commit: FACTS)
    words = ["--suite", name, "--peers", "fa4", "--rounds", "1", "--graph", "--out", str(tmp_path)]
    return bench.main(words), tmp_path / f"{name}-some-gpu-2026-11-30"


def check_redrawn(stem, tmp_path):
    """--from makes the same page, and the picture."""
    again = tmp_path / "again"
    assert bench.main(["--from", str(stem.with_suffix(".json")), "--out", str(again)]) == 0
    assert (again / stem.name).with_suffix(".md").read_text() == stem.with_suffix(".md").read_text()
    pytest.importorskip("matplotlib")
    assert (again / stem.name).with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def kinds_of(rows):
    """kind -> names of its rows, in order."""
    found = {}
    for row in rows:
        found.setdefault(row.kind, {})[row.name] = None
    return {kind: list(names) for kind, names in found.items()}


def test_a_run_of_windows(monkeypatch, tmp_path):
    code, stem = run_small(monkeypatch, tmp_path, "windows")
    _, rows = tables.read(stem.with_suffix(".json"))
    assert code == 0
    own, beside = ["ours dense", "ours causal"], ["ours", "fa4"]
    assert kinds_of(rows) == {
        "kernel": [*beside, *own, "matmul"], "graph": [*beside, "matmul"],
        "autograd": [*beside, *own, "matmul"], "autograd graph": [*beside, "matmul"],
    }  # fmt: skip
    assert [(row.feature, row.name) for row in rows if row.kind == "kernel"][0::5] == [
        ("window 8", "ours"), ("window 100", "ours")
    ]  # fmt: skip
    first = {row.name: row for row in rows if (row.kind, row.feature) == ("kernel", "window 8")}
    share = suites_windows.visited(SMALL["windows"][0][0])
    assert first["ours"].work == share and first["ours dense"].work == 1.0 and first["fa4"].work is None
    assert first["ours dense"].teraflops / first["ours"].teraflops == pytest.approx(260 * 260 / (260 * 9 - 36))
    text = stem.with_suffix(".md").read_text()
    assert share < 0.7
    # Every fake launch takes the same time: of the dense speed as little is kept as the window's blocks are few
    kernel, graph, gradients, _ = text.split("### ")[1:]
    assert "| D | case | ours | fa4 | ours dense | ours causal | matmul | ours / fa4 | ours / matmul | blo" in kernel
    assert f"| {share:.2%} | {share:.2f} |" in kernel and f"| {share:.2%} | {share:.2f} |" in graph
    assert (
        "- geometric mean of ours / ours dense by blocks: " in kernel
        and f"; least {share:.2f} (D 16, window 8)" in kernel
    )
    assert f"| {suites_windows.visited_backward(SMALL['windows'][0][0]):.2%} |" in gradients
    assert "- geometric mean of ours / fa4 over all cells: 1.00; least 1.00 (D 16, window 8)" in gradients
    assert "- blocks visited: pairs of a Q tile" in text
    check_redrawn(stem, tmp_path)


def test_a_run_of_packed_sequences(monkeypatch, tmp_path):
    code, stem = run_small(monkeypatch, tmp_path, "varlen")
    _, rows = tables.read(stem.with_suffix(".json"))
    assert code == 0
    assert list(kinds_of(rows)) == ["kernel", "public", "graph", "autograd", "autograd graph"]
    assert kinds_of(rows)["public"] == ["ours"]  # what stands for fa4 has one way only
    assert kinds_of(rows)["kernel"] == ["ours", "fa4", "ours batched", "matmul"]
    kernel = stem.with_suffix(".md").read_text().split("### ")[1]
    for line in (
        "| D | case | mask | ours | fa4 | ours batched | matmul | ours / fa4 | ours / matmul | ours / ours batch",
        "| 64 | 16 x 1024 | causal |", "| 64 | 64 lognormal | dense |", "| 1.00 | 0.97 kept, 1.15; 1.00 | least |",
        "- goals, unrounded: 0 of 4 cells meet the goal, 4 only the least, 0 neither",
    ):  # fmt: skip
        assert line in kernel
    check_redrawn(stem, tmp_path)


def test_a_run_of_changed_scores(monkeypatch, tmp_path):
    code, stem = run_small(monkeypatch, tmp_path, "scores")
    facts, rows = tables.read(stem.with_suffix(".json"))
    assert code == 0 and "FlashAttention-4 has no ALiBi slopes" in facts["left out"]
    assert kinds_of(rows)["public"] == ["ours", "fa4", "ours plain", "matmul"]
    public = stem.with_suffix(".md").read_text().split("### ")[1]
    for line in (
        "| 128 | ALiBi |", "| 1.00 | 0.85 kept | goal |", "| 1.00 | 0.98 kept | goal |",
        "- geometric mean of ours / ours plain at equal work: 1.00; least 1.00 (D 128, softcap 50)",
        "- goals, unrounded: 3 of 3 cells meet the goal, 0 only the least, 0 neither",
    ):  # fmt: skip
        assert line in public
    check_redrawn(stem, tmp_path)


def test_a_wrong_window_is_found_and_the_yardsticks_are_not(monkeypatch, tmp_path):
    """ "ours dense" computes something else, which is no fault; a peer that looks at one key more is."""
    cases, exact = SMALL["windows"]
    wide = lambda q, k, v, causal, window: exact(q, k, v, causal, (window[0] + 1, 0))  # noqa: E731
    monkeypatch.setitem(SMALL, "windows", (cases[:1], wide))
    code, stem = run_small(monkeypatch, tmp_path, "windows")
    assert code == 1 and stem.with_suffix(".json").exists()
    run = bench.Bench(bench.parser().parse_args(["--suite", "windows"]), [], None, None)
    assert run.name(cases[0]).endswith("d16_16-causal-window-8")


def test_gradients_include_that_of_a_sink():
    case = suites_scores.scored("sink", 64, False, 1, 16)
    inputs = suites.Inputs([case], device="cpu")
    with torch.no_grad():
        found = suites.gradient(bench.SUITES["scores"].ours, suites_scores.arguments(inputs, case)).call()
    assert [tuple(one.shape) for one in found] == [(1, 16, 32, 64)] * 3 + [(32,)] and found[3].abs().max() > 0


def rows(kind, feature, times, work=None, head_dim=128):
    """Rows of one cell: name -> µs, at 1 TFLOP/s in 1000 µs."""
    shape = {
        "kind": kind,
        "head_dim": head_dim,
        "seqlen": 16384,
        "causal": True,
        "batch": 1,
        "heads": 16,
        "heads_k": 16,
    }
    shape |= {"spread": 0.01, "sm_clock": None, "power": None, "feature": feature}
    return [
        tables.Row(name=name, microseconds=time, teraflops=1000 / time, work=(work or {}).get(name), **shape)
        for name, time in times.items()
    ]


def judged(found):
    cells = tables.cells(found)
    beside = {key: (tables.speed_ratio(cell, "fa4"), key.feature) for key, cell in cells.items()}
    columns, _ = goals.columns(cells, cells, beside)
    return [(columns["goal; least"][key], columns["met"][key]) for key in cells]


def test_what_is_asked_of_windows_is_decided_by_blocks():
    work = {"ours": 0.1, "ours dense": 1.0}
    goal = "0.87 kept, 1.40; 1.00"
    for ours, fa4, word in ((114, 160, "goal"), (116, 163, "least"), (114, 159, "least"), (50, 49, "neither")):
        found = rows("kernel", "window 128", {"ours": ours, "fa4": fa4, "ours dense": 1000}, work)
        assert judged(found) == [(goal, word)]
    wide = rows("kernel", "window 1024", {"ours": 114, "fa4": 114, "ours dense": 1000}, work)
    assert judged(wide) == [("0.87 kept; 1.00", "goal")]
    graphs = rows("graph", "window 1024", {"ours": 100, "fa4": 115}, work)  # by the dense call beside its kernel row
    assert judged(wide + graphs)[1] == ("0.87 kept; 1.00", "goal")
    assert judged(graphs) == [("0.87 kept; 1.00", "least")]  # nothing to measure by
    assert judged(rows("kernel", "window 128", {"ours": 115, "ours dense": 1000}, work)) == [(goal, "")]


def test_what_is_asked_of_scores_needs_no_peer():
    for ours, word in ((1000, "goal"), (1170, "goal"), (1180, "neither")):
        assert judged(rows("public", "softcap 50", {"ours": ours, "ours plain": 1000})) == [("0.85 kept", word)]
    missed = rows("autograd", "sink", {"ours": 1100, "ours plain": 1000})
    assert "- goals, unrounded: 0 of 1 cells meet the goal, 0 only the least, 1 neither (D 128, sink: 0.909)" in (
        tables.markdown(missed)
    )
    assert goals.goal(missed[0].cell._replace(kind="kernel")) is None
    assert goals.goal(missed[0].cell._replace(head_dim=64)) is None


def test_a_cell_is_summed_up_with_what_it_keeps():
    found = rows("kernel", "16 x 1024", {"ours": 100, "fa4": 110, "ours batched": 95})
    (cell,) = tables.cells(found).values()
    assert tables.summary(cell) == "ours 10 TFLOP/s, 1.10 x fa4, 0.95 x ours batched at equal work"
    assert yardsticks.share({"fa4": cell["fa4"]}, cell) is None


def test_the_picture_says_what_it_shows():
    pytest.importorskip("matplotlib")
    from test_plots import words_of

    work = {"ours": 0.1, "ours dense": 1.0}
    times = {"ours": 125, "fa4": 200, "ours dense": 1000, "matmul": 90}
    found = [
        row for kind in ("kernel", "autograd") for feature in ("window 128", "window 1024") for head_dim in (64, 128)
        for row in rows(kind, feature, times, work, head_dim)
    ]  # fmt: skip
    figure = bench.picture(found, FACTS | {"suite": "windows"})
    words = words_of(figure)
    for word in ("Sliding windows", "head_dim 64, forward", "head_dim 128, gradients", "window 1024", "0.80",
                 "share of the speed of hopper_fa3, dense, by blocks", "FlashAttention-4"):  # fmt: skip
        assert word in words
    assert len(figure.axes) == 4
    heights = sorted(bar.get_height() for container in figure.axes[0].containers for bar in container)
    assert heights == sorted(2 * [8.0, 5.0, 1.0])
    replayed = rows("graph", "window 128", {"ours": 100, "fa4": 160}, work, 64)
    figure = bench.picture(found + replayed, FACTS | {"suite": "windows"})
    heights = sorted(bar.get_height() for container in figure.axes[0].containers for bar in container)
    assert heights == [1.0, 1.0, 5.0, 6.25, 8.0, 10.0] and "1.00" in words_of(figure)

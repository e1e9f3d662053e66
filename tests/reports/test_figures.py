"""Pictures: right numbers, one colour an implementation, nothing together that must not be compared."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
from spikemark.harness.errors import UsageError
from spikemark.harness.records import STATUSES, Case
from spikemark.reports import answers, cli, figures, words
from spikemark.reports.figures import bars, charts, heat, palette
from spikemark.reports.figures.canvas import Canvas, Scale, StyleSheet
from spikemark.reports.figures.picture import Picture
from spikemark.reports.rows import Report, Row, read


def drawn(report: Report, kind: str) -> list[Picture]:
    return [p for p in figures.pictures(report, answers.answers(report)) if p.kind == kind]


def texts(picture: Picture) -> list[str]:
    svg = picture.draw().svg(StyleSheet(), "p")
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.fixture(scope="module")
def report(everyday: Path) -> Report:
    return read([everyday])


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """One layer over batches, times, sizes and firing rates."""
    rates, every = (0.02, 0.05, 0.1, 0.2, 0.35), []
    every += synthetic.cases(workloads={"a/conv": ((32, 16, 16), 8)}, batches=(1, 4, 16), rates=rates)
    every += synthetic.cases(workloads={"b/conv": ((32, 16, 16), 32), "c/conv": ((128, 16, 16), 8)}, batches=(4,))
    path = tmp_path_factory.mktemp("swept") / "run"
    return read([synthetic.write(path, [synthetic.record(c, p) for p in range(3) for c in every], passes=3)])


def test_numbers_in_a_picture_are_those_of_the_table(report: Report) -> None:
    picture = drawn(report, "speed")[0]
    shown = [t for t in texts(picture) if " · " in t or "s" in t]
    rows = [
        r
        for r in report.rows
        if r["operator"] == "srm_neuron" and r["phase"] == "forward" and r["environment"] == "cpu"
    ]
    times = {words.seconds(r["median_s"], r["ci_low_s"], r["ci_high_s"]) for r in rows if r["median_s"]}
    gains = {words.factor(r["speedup"], r["speedup_low"], r["speedup_high"]) for r in rows if r["median_s"]}
    labels = [t for t in shown if re.match(r"[\d.,]+ (ns|µs|ms|s)", t)]
    assert len(labels) == len(picture.table) == 32
    for label in labels:
        time, _, gain = label.partition(" · ")
        assert time in times and (not gain or gain in gains)


def test_every_kind_of_picture_is_there(report: Report, swept: Report) -> None:
    kinds = {p.kind for p in figures.pictures(swept, answers.answers(swept))}
    assert kinds == {"speed", "memory", "heat", "pareto", "sweep", "rate", "roofline", "samples"}
    assert len(drawn(report, "devices")) == 1
    for variable in ("batch", "time steps T", "neurons a sample"):
        assert any(f"against {variable}" in p.title for p in drawn(swept, "sweep"))


def test_the_break_even_rate_is_found(swept: Report) -> None:
    """aten takes (0.2 + 8 rate) / 2.1 of the baseline's time: they meet at a rate of 23.75 %."""
    picture = next(p for p in drawn(swept, "rate") if "conv_backward input" in p.title)
    words = r"Break-even at about ([\d.]+) % \(between [12]0 % and 35 %\): aten below, torch_autograd above"
    found = re.search(words, picture.note)
    assert found and float(found[1]) == pytest.approx(23.75, rel=0.05)
    assert found[0] in picture.alt and f"{found[1]} %" in texts(picture)


def test_every_layer_with_several_rates_has_a_picture_of_its_own(tmp_path: Path) -> None:
    rates, layers = (0.05, 0.1, 0.5), {f"net/conv{n}": ((32, 16, 16), 8) for n in range(8)}
    every = list(synthetic.cases(workloads=layers, batches=(1, 2), rates=rates, operators=("conv_backward",)))
    run = synthetic.write(tmp_path / "run", [synthetic.record(c, p) for p in range(3) for c in every], passes=3)
    pictures = [p for p in drawn(read([run]), "rate") if "input" in p.title]
    assert len({p.title for p in pictures}) == len({p.name for p in pictures}) == len(pictures) == charts.MOST_RATES
    assert all(p.title.startswith("conv_backward input: time against firing rate, net/conv") for p in pictures)
    assert [p.left_out for p in pictures[:-1]] == [""] * (len(pictures) - 1)
    assert pictures[-1].left_out == "10 more series"
    assert all("batch 2, " in p.note for p in pictures), "of the two batches the larger"


def test_the_pareto_front_holds_what_nothing_beats() -> None:
    points = [(1.0, 9.0), (2.0, 5.0), (3.0, 5.0), (4.0, 1.0), (5.0, 2.0), (1.0, 10.0)]
    assert charts.pareto_front(points) == [0, 1, 3]
    assert charts.pareto_front([]) == []


def test_devices_are_divided_right_and_only_under_one_software(tmp_path: Path, report: Report) -> None:
    (picture,) = drawn(report, "devices")
    assert picture.title == "cpu:1 against cpu"
    numbers = [c for row in picture.table for c in row[1:] if c != "–"]
    assert (numbers and all(1.7 < float(c.rstrip("×")) < 2.3 for c in numbers if "mnist" not in c)) or numbers
    middle = sorted(float(c.rstrip("×")) for c in numbers)[len(numbers) // 2]
    assert middle == pytest.approx(2.0, rel=0.1)
    every = [synthetic.record(c, 0) for c in synthetic.cases(workloads={"a": ((8, 8, 8), 5)})]
    newer = synthetic.environment(machine="Other CPU", versions={"torch": "2.14.0"})
    one = synthetic.write(tmp_path / "one", every, passes=1)
    two = synthetic.write(tmp_path / "two", every, passes=1, environments={"cpu": newer})
    both = read([one, two])
    assert drawn(both, "devices") == []
    assert heat.refused_pairs(both) == [
        "one · cpu and two · cpu are not compared: versions.torch (2.13.0 and 2.14.0) differs."
    ]


def test_why_chosen_devices_are_not_divided_is_said(tmp_path: Path, report: Report) -> None:
    assert heat.why_not(report, ("cpu:1", "cpu")) == ""
    every = [synthetic.record(c, 0) for c in synthetic.cases(("cpu", "cpu:1"), {"a": ((8, 8, 8), 5)})]
    newer = synthetic.environment("cpu:1", threads=1, versions={"torch": "2.14.0"})
    run = synthetic.write(tmp_path / "r", every, environments={"cpu": synthetic.environment(), "cpu:1": newer})
    wanted = "cpu and cpu:1 are not compared: versions.torch (2.13.0 and 2.14.0) differs."
    assert heat.why_not(read([run]), ("cpu:1", "cpu")) == wanted
    with pytest.raises(UsageError, match=r"no ratio of two devices: cpu and cpu:1 are not compared"):
        cli.report([run], tmp_path / "x.html", devices=["cpu", "cpu:1"])


def test_two_chosen_devices_and_their_order(report: Report) -> None:
    found = [
        p.title for p in figures.pictures(report, answers.answers(report), ("cpu:1", "cpu")) if p.kind == "devices"
    ]
    assert found == ["cpu against cpu:1"]


def test_different_environments_never_share_a_picture(tmp_path: Path) -> None:
    every = [synthetic.record(c, 0) for c in synthetic.cases(workloads={"a": ((8, 8, 8), 5)}, batches=(1, 2, 4))]
    other = synthetic.environment(machine="Other CPU")
    one = synthetic.write(tmp_path / "one", every, passes=1)
    two = synthetic.write(tmp_path / "two", every, passes=1, environments={"cpu": other})
    both = read([one, two])
    pictures = figures.pictures(both, answers.answers(both))
    sections = {p.section for p in pictures if p.kind != "devices"}
    assert sections == {f"{s} · {r} · cpu" for s in (*synthetic.OPERATORS, "All operators") for r in ("one", "two")}
    alone = figures.pictures(read([one]), answers.answers(read([one])))
    assert len([p for p in pictures if p.kind != "devices"]) == 2 * len(alone)


def test_implementations_have_colours_of_their_own_everywhere() -> None:
    looks = palette.looks(["native", "torch_eager", "mine", "yours", "aten", "native+aten", "torch_eager+aten"])
    assert looks["native"].color == palette.KNOWN["native"]
    singles = [looks[n].color for n in ("native", "torch_eager", "mine", "yours", "aten")]
    assert len(set(singles)) == 5 and looks["native+aten"].color != looks["torch_eager+aten"].color
    assert len({look.marker for look in looks.values()}) == 7
    many = palette.looks([f"x{i}" for i in range(40)])
    assert len({(v.color, v.marker) for v in many.values()}) > 11


def test_heat_cells_have_the_digits_that_their_intervals_allow(report: Report) -> None:
    picture = drawn(report, "heat")[0]
    allowed = {words.factor(r["speedup"], r["speedup_low"], r["speedup_high"]) for r in report.rows if r["speedup"]}
    cells = {c for row in picture.table for c in row[1:]}
    assert cells - {"1×", "–", *STATUSES} <= allowed and len(cells & allowed) > 10
    assert cells - {"–"} <= set(texts(picture))


def test_no_name_of_a_layers_pair_is_cut(tmp_path: Path) -> None:
    names = ("torch_eager+torch_autograd", "native_compact+native_event")
    cases = [replace(c, implementation=n) for n in names for c in _one_operator(tmp_path) if c.phase == "forward"]
    records = [
        synthetic.record(c, p, details={"baseline": c.implementation == names[0]}) for c in cases for p in (0, 1)
    ]
    run = read([synthetic.write(tmp_path / "r", records)])
    for kind in ("speed", "memory", "heat", "pareto", "samples", "roofline"):
        (picture,) = drawn(run, kind)
        assert set(names) <= set(texts(picture)), kind


def _one_operator(tmp_path: Path) -> list[Case]:
    layers = {"a": ((8, 8, 8), 5), "b": ((16, 8, 8), 5)}
    every = synthetic.cases(workloads=layers, operators=("srm_neuron",), batches=(1,))
    return [c for c in every if c.implementation == "torch_eager"]


def test_bars_that_go_on_end_in_an_arrow_and_others_in_a_cap() -> None:
    looks = palette.looks(["a", "b"])
    within = [bars.Bar("a", 1.0, 0.9, 1.5, "1 s"), bars.Bar("b", 0.5, 0.4, 0.6, "0.5 s")]
    beyond = [bars.Bar("a", 1.0, 0.9, 9.0, "1 s"), bars.Bar("b", 0.5, 0.4, 0.6, "0.5 s")]
    drawings = [bars.draw([("g", group)], looks).svg(StyleSheet(), "p") for group in (within, beyond)]
    assert drawings[0].count("<use") == 0 and drawings[1].count("<use") == 1


def test_the_memory_pictures_table_says_what_its_diamonds_show(report: Report) -> None:
    picture = drawn(report, "memory")[0]
    assert picture.header[-1] == "saved for backward"
    saved = {words.size(r["saved_bytes"]) for r in report.rows if r["status"] == "ok"}
    assert {row[-1] for row in picture.table} <= saved


def test_time_axes_show_whole_intervals_but_no_absurd_ones() -> None:
    def row(median: float, low: float | None, high: float | None) -> Row:
        return {"median_s": median, "ci_low_s": low, "ci_high_s": high}

    assert charts.time_span([row(1.0, 0.5, 2.0), row(4.0, None, None)]) == [1.0, 4.0, 0.5, 2.0]
    assert charts.time_span([row(1.0, 1e-9, 1e9)]) == [1.0, 0.1, 10.0]


def test_marks_that_would_cover_each_other_stand_apart() -> None:
    assert charts.apart([10.0, 50.0, 90.0]) == [10.0, 50.0, 90.0]
    moved = charts.apart([50.0, 10.0, 51.0, 50.0])
    assert moved[1] == 10.0 and sorted(moved)[1:] == pytest.approx([50.333 - 4, 50.333, 50.333 + 4], abs=0.01)
    assert moved[0] < moved[3] < moved[2]


@pytest.mark.parametrize("span", [(3e-4, 0.05), (40e-3, 85e-3), (0.9e-3, 1.1e-3), (1e-9, 1e3), (2e-3, 3.1e-3)])
@pytest.mark.parametrize("wanted", [2, 4, 6])
def test_a_log_axis_has_at_least_three_ticks(span: tuple[float, float], wanted: int) -> None:
    ticks = Scale(span, 0, 100, log=True).ticks(wanted)
    assert min(wanted, 3) <= len(ticks) <= wanted + 1 and ticks == sorted(ticks)


def test_shipped_rivals_never_share_a_colour() -> None:
    cpu = ["torch_eager", "torch_vectorized", "torch_compile", "native", "native_compact"]
    cuda = [
        "torch_eager",
        "torch_vectorized",
        "torch_compile",
        "cupy_raw",
        "cupy_vectorized",
        "cupy_compact",
        "triton_fused",
    ]
    conv = ["torch_autograd", "torch_unfold", "aten", "native_event", "native_auto"]
    conv_cuda = [
        "torch_autograd",
        "torch_unfold",
        "aten",
        "cudnn_aten",
        "cudnn_transpose",
        "cudnn_frontend",
        "cupy_event",
    ]
    pairs = [n for n in palette.KNOWN if "+" in n]
    assert len(pairs) == 13
    for rivals in (cpu, cuda, conv, conv_cuda, pairs):
        assert len({palette.KNOWN[n] for n in rivals}) == len(rivals)


def test_a_page_draws_the_most_important_kinds_first(report: Report) -> None:
    every = figures.pictures(report, answers.answers(report))
    shown, left = figures.choose(every, 10)
    assert len(shown) == 10 and len(left) == len(every) - 10
    assert {p.kind for p in shown} >= {"speed", "memory", "heat", "pareto", "sweep", "roofline", "devices", "samples"}
    assert [id(p) for p in shown] == [id(p) for p in every if p in shown]


@pytest.mark.parametrize(("values", "log"), [([1e-6, 1e-3], True), ([5.0], True), ([3, 3], False), ([0.9, 1.1], True)])
def test_scales_have_ticks_inside_and_keep_their_ends(values: list[float], log: bool) -> None:
    scale = Scale(values, 10, 110, log=log)
    ticks = scale.ticks(5)
    assert 1 <= len(ticks) <= 8 and all(scale.low <= t <= scale.high for t in ticks)
    assert 10 <= scale(min(values)) <= scale(max(values)) <= 110


def test_inline_svg_has_no_style_and_keeps_its_texts() -> None:
    canvas = Canvas(100, 50)
    canvas.text(5, 5, "1.23456 ms <b> & $x$ \u202e", weight="bold")
    canvas.curve([1, 2], [3, 4], "#0072b2", "o")
    sheet = StyleSheet()
    svg = canvas.svg(sheet, "q")
    assert "style=" not in svg and "1.23456 ms &lt;b&gt; &amp; $x$ \ufffd" in svg
    assert "var(--ink)" in sheet.css() and "#0072b2" in sheet.css() and "url(" not in sheet.css()

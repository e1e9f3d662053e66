"""Pictures: right numbers, one colour an implementation, nothing together that must not be compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import synthetic
from spikemark.reports import answers, figures, words
from spikemark.reports.figures import charts, heat, palette
from spikemark.reports.figures.canvas import Canvas, Scale, StyleSheet
from spikemark.reports.figures.picture import Picture
from spikemark.reports.rows import Report, read


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
    found = re.search(r"Break-even at ([\d.]+) %: aten below, torch_autograd above", picture.note)
    assert found and float(found[1]) == pytest.approx(23.75, rel=0.05)
    assert found[0] in picture.alt and f"{found[1]} %" in texts(picture)


def test_break_even_interpolates_in_logarithms() -> None:
    lines = {
        "a": [{"rate_asked": 0.01, "median_s": 1.0}, {"rate_asked": 0.04, "median_s": 4.0}],
        "b": [{"rate_asked": 0.01, "median_s": 2.0}, {"rate_asked": 0.04, "median_s": 2.0}],
    }
    (crossing,) = charts.break_even(lines)
    assert crossing.x == pytest.approx(0.02)
    assert charts.break_even({"a": lines["a"]}) == []


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
    assert heat.refused_pairs(both) == ["one · cpu and two · cpu are not compared: versions.torch differ."]


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
    for rivals in (cpu, cuda, conv, conv_cuda):
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

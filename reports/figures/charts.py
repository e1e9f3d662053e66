"""Charts with two axes: time against a size or rate, time against memory, share of the roofline."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from spikemark.reports import break_even, words
from spikemark.reports.answers import Answer, timed
from spikemark.reports.break_even import BreakEven
from spikemark.reports.figures.canvas import GRID, INK, MUTED, WIDTH, Canvas, Scale, longest_width
from spikemark.reports.figures.palette import Look
from spikemark.reports.figures.picture import Picture
from spikemark.reports.rows import Row

HEIGHT = 236.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 12.0, 10.0, 36.0
LEGEND, SIZE = 14.0, 9.0
BESIDE = 4.0
"""Points between marks that would cover each other."""
MOST_RATES = 6
"""Layers of one operator and phase whose firing rates are drawn."""


@dataclass(frozen=True)
class Axis:
    """A title, whether it is logarithmic, and how its ticks are written."""

    title: str
    write: Callable[[Any], str]
    log: bool = True
    exact: bool = False
    """Ticks stand at the measured values, if there are few."""


@dataclass
class Plot:
    """A canvas with its two scales, ready to draw into."""

    canvas: Canvas
    x: Scale
    y: Scale
    bottom: float


def frame(
    xs: Sequence[float], ys: Sequence[float], x: Axis, y: Axis, names: Sequence[str], looks: dict[str, Look]
) -> Plot:
    """Axes, grid, ticks and a legend of implementations above."""
    labels = [words.short(name, 28) for name in names]
    columns = max(int((WIDTH - LEFT) / (longest_width(labels, SIZE) + 20)), 1)
    lines = math.ceil(len(names) / columns)
    top = TOP + LEGEND * lines
    canvas = Canvas(WIDTH, HEIGHT + LEGEND * lines)
    bottom = canvas.height - BOTTOM
    for n, (name, label) in enumerate(zip(names, labels, strict=True)):
        at = (LEFT + (n % columns) * (WIDTH - LEFT) / columns + 6, TOP + (n // columns) * LEGEND)
        canvas.curve([at[0]], [at[1]], looks[name].color, looks[name].marker, linestyle="none")
        canvas.text(at[0] + 8, at[1], label, SIZE)
    plot = Plot(
        canvas,
        Scale(xs, LEFT, WIDTH - RIGHT, log=x.log),
        Scale(ys, bottom, top, log=y.log),
        bottom,
    )
    measured = sorted(set(xs))
    x_ticks = measured if x.exact and len(measured) <= 6 else plot.x.ticks(4)
    y_ticks = plot.y.ticks(6)
    grid = [(plot.x(t), top, plot.x(t), bottom) for t in x_ticks]
    grid += [(LEFT, plot.y(t), WIDTH - RIGHT, plot.y(t)) for t in y_ticks]
    canvas.lines(grid, GRID, 0.7)
    canvas.lines([(LEFT, top, LEFT, bottom), (LEFT, bottom, WIDTH - RIGHT, bottom)], INK, 0.8)
    for t in x_ticks:
        canvas.text(plot.x(t), bottom + 9, x.write(t), SIZE, MUTED, ha="center")
    for t in y_ticks:
        canvas.text(LEFT - 5, plot.y(t), y.write(t), SIZE, MUTED, ha="right")
    canvas.text((LEFT + WIDTH - RIGHT) / 2, bottom + 25, x.title, 9, ha="center")
    canvas.text(7, (top + bottom) / 2, y.title, 9, ha="center", rotation=90)
    return plot


def tick_seconds(value: float) -> str:
    """A tick's time without superfluous zeros: "20 µs"."""
    scale, unit = words.time_unit(value * (1 + 1e-9))
    return f"{value * scale:.6g} {unit}"


def tick_size(value: float) -> str:
    """A tick's bytes: "50 MB"."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= limit * (1 - 1e-9):
            return f"{value / limit:.6g} {unit}"
    return f"{value:.6g} B"


def tick_count(value: float) -> str:
    """A tick's count: "2M", "16"."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit * (1 - 1e-9):
            return f"{value / limit:.6g}{unit}"
    return f"{value:.6g}"


def tick_percent(value: float) -> str:
    """A tick's fraction in percent."""
    return f"{value * 100:.6g} %"


TIME = Axis("median time", tick_seconds)
VARIABLES: dict[str, tuple[Axis, tuple[str, ...]]] = {
    "batch": (Axis("batch", tick_count, exact=True), ("workload", "time_steps", "rate_asked", "dtype")),
    "time_steps": (Axis("time steps T", tick_count, exact=True), ("shape", "batch", "rate_asked", "dtype")),
    "neurons": (Axis("neurons a sample", tick_count), ("batch", "time_steps", "rate_asked", "dtype", "family")),
    "rate": (Axis("firing rate", tick_percent, exact=True), ("workload", "batch", "time_steps", "dtype")),
}
"""What time is drawn against, and what must be equal along a line."""


def _value(row: Row, name: str) -> Any:
    problem = row["case"].problem
    if name == "shape":
        return (problem.in_shape, problem.out_shape, problem.kernel, problem.geometry)
    if name == "family":
        # A convolution's work is not set by its neurons alone; layers of one kernel and depth are alike.
        return (problem.kind, problem.kernel)
    return row["rate_asked" if name == "rate" else name]


def sweeps(section: str, found: list[Answer], looks: dict[str, Look]) -> Iterable[Picture]:
    """Time against batch, T, neurons and firing rate, for each phase of one operator in one environment."""
    by_phase: dict[str, list[Row]] = {}
    for answer in found:
        by_phase.setdefault(answer.first["phase"], []).extend(r for r in answer.rows if timed(r))
    for phase, rows in by_phase.items():
        for variable in VARIABLES:
            yield from _sweep(section, phase, variable, rows, looks)


def _sweep(section: str, phase: str, variable: str, rows: list[Row], looks: dict[str, Look]) -> Iterable[Picture]:
    """The longest series; of firing rates the longest of each layer, for each has a break-even of its own."""
    _, fixed = VARIABLES[variable]
    families: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        x = words.number(_value(row, variable))
        if x is not None and x > 0:
            families.setdefault(tuple(_value(row, n) for n in fixed), []).append(row)
    spans = {key: {_value(r, variable) for r in rows} for key, rows in families.items()}
    useful = [key for key, values in spans.items() if len(values) > 1]
    useful.sort(key=lambda k: (len(spans[k]), max(r["median_s"] for r in families[k])), reverse=True)
    shown = useful[:1]
    if variable == "rate":
        best = {families[key][0]["workload"]: key for key in reversed(useful)}
        shown = [key for key in useful if key in best.values()][:MOST_RATES]
    for number, key in enumerate(shown):
        left = len(useful) - len(shown) if number == len(shown) - 1 else 0
        yield _series(section, phase, variable, families[key], looks, number, left)


def _series(
    section: str, phase: str, variable: str, rows: list[Row], looks: dict[str, Look], number: int, left: int
) -> Picture:
    """One picture of ``rows``, the ``number``-th of its kind; ``left`` further series have none."""
    axis, fixed = VARIABLES[variable]
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: (_value(r, variable), r["workload"])):
        lines.setdefault(row["implementation"], []).append(row)
    operator, first = words.short(rows[0]["operator"]), rows[0]
    by_rate = variable == "rate"
    title = f"{operator} {words.clean(phase)}: time against {axis.title}"
    if by_rate:
        title += f", {words.short(first['workload'], 40)}"
    crossings = break_even.break_evens(lines) if by_rate else []
    told = f" {break_even.sentence(lines)}" if by_rate else ""
    table = [
        [words.clean(name), axis.write(_value(r, variable)), *_time_and_interval(r)]
        for name, members in lines.items()
        for r in members
    ]
    kept = [f"{_FIXED[n]} {_fixed_text(first, n)}".strip() for n in fixed if n in _FIXED]
    return Picture(
        "rate" if by_rate else "sweep",
        f"{variable}-{operator}-{words.clean(phase)}{f'-{number + 1}' if number else ''}",
        section,
        title,
        f"Lines of median time against {axis.title} for {words.listed(list(lines), 6)}, both axes logarithmic.{told}",
        ["implementation", axis.title, "time", "95 % interval"],
        table,
        lambda: _draw_sweep(lines, variable, axis, crossings, looks),
        f"{', '.join(kept)}{': the longest series' if left else ''}. Whisker: 95 % interval.{told}",
        words.count(left, "more series", "more series") if left else "",
    )


def _time_and_interval(row: Row) -> tuple[str, str]:
    known = (row["median_s"], row["ci_low_s"], row["ci_high_s"])
    return words.seconds(*known), words.seconds_interval(*known)


_FIXED = {"workload": "", "batch": "batch", "time_steps": "T", "rate_asked": "rate", "dtype": ""}


def _fixed_text(row: Row, name: str) -> str:
    return words.rate(row[name]) if name == "rate_asked" else words.short(row[name], 40)


def _draw_sweep(
    lines: dict[str, list[Row]], variable: str, axis: Axis, crossings: list[BreakEven], looks: dict[str, Look]
) -> Canvas:
    every = [r for members in lines.values() for r in members]
    plot = frame([_value(r, variable) for r in every], time_span(every), axis, TIME, list(lines), looks)
    for n, (name, members) in enumerate(lines.items()):
        # Beside each other: at one x the whiskers of several implementations would cover each other.
        aside = (n - (len(lines) - 1) / 2) * BESIDE
        xs, ys = [plot.x(_value(r, variable)) + aside for r in members], [plot.y(r["median_s"]) for r in members]
        for x, r in zip(xs, members, strict=True):
            _whisker(plot, x, r, looks[name].color)
        middle = {x: [y for at, y in zip(xs, ys, strict=True) if at == x] for x in xs}
        plot.canvas.curve(list(middle), [sum(v) / len(v) for v in middle.values()], looks[name].color)
        plot.canvas.curve(xs, ys, looks[name].color, looks[name].marker, linestyle="none")
    for crossing in crossings:
        x = plot.x(crossing.rate)
        plot.canvas.lines([(x, plot.y(plot.y.high), x, plot.bottom)], INK, 1.0, linestyles="dashed")
        plot.canvas.text(x + 3, plot.bottom - 8, crossing.about, SIZE)
    return plot.canvas


def time_span(rows: Sequence[Row]) -> list[float]:
    """What a time axis must show: every median, and of the intervals what lies within ten times of the medians."""
    medians = [r["median_s"] for r in rows]
    least, most = min(medians) / 10, max(medians) * 10
    ends = (words.number(r[name]) for r in rows for name in ("ci_low_s", "ci_high_s"))
    return [*medians, *(min(max(end, least), most) for end in ends if end is not None)]


def _whisker(plot: Plot, x: float, row: Row, color: str) -> None:
    low, high = words.number(row["ci_low_s"]), words.number(row["ci_high_s"])
    if low is not None and high is not None:
        plot.canvas.lines([(x, plot.y(low), x, plot.y(high))], color, 1.0)


def apart(points: Sequence[float]) -> list[float]:
    """``points`` with those less than ``BESIDE`` from their neighbour moved aside, around where they were."""
    order = sorted(range(len(points)), key=lambda i: points[i])
    runs: list[list[int]] = []
    for i in order:
        if runs and points[i] - points[runs[-1][-1]] < BESIDE:
            runs[-1].append(i)
        else:
            runs.append([i])
    out = list(points)
    for run in runs:
        middle = sum(points[i] for i in run) / len(run)
        for place, i in enumerate(run):
            out[i] = middle + (place - (len(run) - 1) / 2) * BESIDE if len(run) > 1 else points[i]
    return out


def pareto(section: str, found: list[Answer], looks: dict[str, Look]) -> Iterable[Picture]:
    """Time against memory of the biggest comparison of each phase, with the front of what nothing beats in both."""
    by_phase: dict[str, list[Answer]] = {}
    for answer in found:
        by_phase.setdefault(answer.first["phase"], []).append(answer)
    for phase, answers in by_phase.items():
        usable = [(a, points) for a in answers if len(points := _weighed(a.rows)) > 1]
        if not usable:
            continue
        answer, points = max(usable, key=lambda item: max(r["median_s"] for r in item[1]))
        front = pareto_front([(r["median_s"], r["peak_bytes"]) for r in points])
        operator, workload = words.short(answer.first["operator"]), words.short(answer.first["workload"], 30)
        best = [words.clean(points[i]["implementation"]) for i in front]
        table = [
            [words.clean(r["implementation"]), words.seconds(r["median_s"], r["ci_low_s"], r["ci_high_s"]),
             words.size(r["peak_bytes"]), "yes" if i in front else "no"]
            for i, r in enumerate(points)
        ]  # fmt: skip
        yield Picture(
            "pareto",
            f"pareto-{operator}-{words.clean(phase)}",
            section,
            f"{operator} {words.clean(phase)}: speed against memory",
            f"Time against peak memory on {workload}. On the front: {words.listed(best, 9)}.",
            ["implementation", "time", "peak memory", "on the front"],
            table,
            functools.partial(_draw_pareto, points, front, looks),
            f"{workload}, batch {answer.first['batch']}{': the slowest comparison' if len(usable) > 1 else ''}. "
            "Left and down is better; the line joins what nothing beats in both. Whisker: 95 % interval of the time.",
            words.count(len(usable) - 1, "other comparison") if len(usable) > 1 else "",
        )


def _weighed(rows: list[Row]) -> list[Row]:
    return [r for r in rows if timed(r) and (words.number(r["peak_bytes"]) or 0) > 0]


def pareto_front(points: list[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats or equals in one direction without losing in the other, by time."""
    order = sorted(range(len(points)), key=lambda i: points[i])
    front: list[int] = []
    for i in order:
        if not front or points[i][1] < points[front[-1]][1]:
            front.append(i)
    return front


def _draw_pareto(points: list[Row], front: list[int], looks: dict[str, Look]) -> Canvas:
    names = [r["implementation"] for r in points]
    sizes, times = [r["peak_bytes"] for r in points], [r["median_s"] for r in points]
    plot = frame(sizes, time_span(points), Axis("peak memory of the call", tick_size), TIME, names, looks)
    xs = apart([plot.x(size) for size in sizes])
    steps = [(xs[i], plot.y(times[i])) for i in front]
    plot.canvas.curve([s[0] for s in steps], [s[1] for s in steps], MUTED, linestyle=":", linewidth=1.5)
    for r, x, time in zip(points, xs, times, strict=True):
        look = looks[r["implementation"]]
        _whisker(plot, x, r, INK)
        plot.canvas.curve([x], [plot.y(time)], look.color, look.marker, linestyle="none", markersize=8)
    return plot.canvas

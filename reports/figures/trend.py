"""A case's times run by run with its levels and change points: one picture a case, and a small one for a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup
from spikemark.reports import words
from spikemark.reports.figures.canvas import GRID, INK, MUTED, WIDTH, Canvas, Scale, longest_width
from spikemark.reports.figures.charts import tick_seconds
from spikemark.reports.figures.palette import BLUE, RED
from spikemark.reports.figures.picture import Picture
from spikemark.reports.history import History, Series
from spikemark.reports.history_text import commits, date, on

HEIGHT, TOP, BOTTOM, RIGHT, SIZE = 170.0, 18.0, 34.0, 12.0, 9.0
MOST_DOTS = 250
"""Dots in one picture; of more runs, neighbours share a dot at their median."""
SMALL_WIDTH, SMALL_HEIGHT, SMALL_DOTS = 240, 36, 120
SPAN = 0.2
"""The least height of a picture, as a share of the time: noise must not look like mountains."""


def picture(history: History, series: Series) -> Picture:
    """Times against runs, in order; a line at each level and at each change point."""
    case = series.case
    name = f"{words.short(case['operator'], 30)} {words.clean(case['phase'])}"
    where = f"{words.short(case['workload'], 40)}, {words.short(case['implementation'], 40)}, {on(series)}"
    rows = []
    for (first, after, level), step in zip(series.levels, [None, *series.steps], strict=True):
        when = [date(history.runs[series.runs[i]].started) for i in (first, after - 1)]
        changed = (f"{100 * (step.ratio.value - 1):+.1f} %", commits(history, series, step)) if step else ("", "")
        rows.append([f"{when[0]} to {when[1]}", str(after - first), words.seconds(level), *changed])
    group = math.ceil(len(series.runs) / MOST_DOTS)
    place = f" · {history.places[series.place].title}" if len(history.places) > 1 else ""
    said = "; ".join(f"{row[3]} from {row[0][:10]} on" for row in rows[1:]) or "no change point"
    dots = "Each dot is a run" if group == 1 else f"Each dot is the median of {group} neighbouring runs"
    return Picture(
        "trend",
        f"trend-{name}-{words.clean(case['workload'])}-{words.clean(case['implementation'])}",
        f"{case['operator']}{place}",
        f"{name}: {where}",
        f"Median time of {len(series.runs)} runs in order, logarithmic, from {rows[0][0][:10]} on: {said}.",
        ["runs from, to", "runs", "level", "change", "commits"],
        rows,
        lambda: _draw(history, series, group),
        f"{dots}; lines are levels between change points.",
    )


def _shared(times: Sequence[float], most: int) -> list[tuple[float, float]]:
    """(position, log time) of at most ``most`` dots: neighbours share one at their median."""
    group = max(math.ceil(len(times) / most), 1)
    logs = np.log(np.array(times))
    return [
        ((start + min(start + group, len(times)) - 1) / 2, float(np.median(logs[start : start + group])))
        for start in range(0, len(times), group)
    ]


def _draw(history: History, series: Series, group: int) -> Canvas:
    canvas = Canvas(WIDTH, HEIGHT)
    dots = [(x, math.exp(y)) for x, y in _shared(series.times, MOST_DOTS)]
    values = [y for _, y in dots] + [level for _, _, level in series.levels]
    middle = math.sqrt(min(values) * max(values))
    bottom, last = HEIGHT - BOTTOM, max(len(series.runs) - 1, 1)
    y = Scale([*values, middle / math.sqrt(1 + SPAN), middle * math.sqrt(1 + SPAN)], bottom, TOP, log=True)
    ticks = y.ticks(4)
    left = longest_width([tick_seconds(t) for t in ticks], SIZE) + 8

    def x(position: float) -> float:
        return left + 4 + position / last * (WIDTH - RIGHT - left - 8)

    canvas.lines([(left, y(t), WIDTH - RIGHT, y(t)) for t in ticks], GRID, 0.7)
    canvas.lines([(left, TOP, left, bottom), (left, bottom, WIDTH - RIGHT, bottom)], INK, 0.8)
    for t in ticks:
        canvas.text(left - 4, y(t), tick_seconds(t), SIZE, MUTED, ha="right")
    for i, align in {0: "left", last // 2: "center", last: "right"}.items():
        canvas.text(x(i), bottom + 9, date(history.runs[series.runs[i]].started), 8, MUTED, ha=align)
    canvas.text((left + WIDTH - RIGHT) / 2, bottom + 23, "runs, by date", SIZE, ha="center")
    style = {"linestyle": "none", "markersize": 3.2 if group == 1 else 3.8, "alpha": 0.75, "markeredgewidth": 0.2}
    canvas.curve([x(i) for i, _ in dots], [y(time) for _, time in dots], BLUE, "o", **style)
    canvas.lines([(x(a - 0.5), y(t), x(b - 0.5), y(t)) for a, b, t in series.levels], INK, 1.6)
    for (first, _, _), step in zip(series.levels[1:], series.steps, strict=True):
        here = x(first - 0.5)
        canvas.lines([(here, TOP - 4, here, bottom)], RED, 1.1, linestyles="dashed")
        align = "right" if here > WIDTH - 60 else "left" if here < left + 30 else "center"
        canvas.text(here, TOP - 10, f"{100 * (step.ratio.value - 1):+.1f} %", SIZE, INK, ha=align)
    return canvas


def small(series: Series) -> Markup:
    """The trend as a small inline picture: dots, levels, change points. Empty without a time."""
    if not series.times:
        return Markup("")
    dots = _shared(series.times, SMALL_DOTS)
    logs = [y for _, y in dots] + [math.log(level) for _, _, level in series.levels]
    room = max(max(logs) - min(logs), math.log1p(SPAN)) * 1.1
    middle, last = (max(logs) + min(logs)) / 2, max(len(series.times) - 1, 1)

    def across(position: float) -> float:
        return 4 + min(max(position / last, 0.0), 1.0) * (SMALL_WIDTH - 8)

    def down(log: float) -> float:
        return SMALL_HEIGHT * (0.5 - (log - middle) / room)

    steps = "".join(f"M{across(first - 0.5):.1f} 0V{SMALL_HEIGHT}" for first, _, _ in series.levels[1:])
    marks = "".join(f"M{across(x):.1f} {down(y):.1f}h0" for x, y in dots)
    levels = "".join(
        f"M{across(first - 0.5):.1f} {down(math.log(level)):.1f}H{across(after - 0.5):.1f}"
        for first, after, level in series.levels
    )
    shapes = {"step": steps, "dots": marks, "level": levels}
    paths = "".join(f'<path class="{name}" d="{path}"/>' for name, path in shapes.items() if path)
    box = f'width="{SMALL_WIDTH}" height="{SMALL_HEIGHT}" viewBox="0 0 {SMALL_WIDTH} {SMALL_HEIGHT}"'
    return Markup(f'<svg class="trend" {box} aria-hidden="true" focusable="false">{paths}</svg>')

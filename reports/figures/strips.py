"""Strips of dots: samples by pass, and the share of the copy bandwidth by operator."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from spikemark.reports import words
from spikemark.reports.answers import Answer, timed
from spikemark.reports.figures.canvas import GRID, INK, MUTED, WIDTH, Canvas, Scale, longest_width
from spikemark.reports.figures.charts import tick_percent, tick_seconds
from spikemark.reports.figures.palette import Look
from spikemark.reports.figures.picture import Picture
from spikemark.reports.rows import Row

ROW, SIZE = 11.5, 9.0
MOST_DOTS = 60
"""Dots in one strip; more only cover each other. Their ranks are evenly spread, so the shape stays."""
MOST_STRIPS = 24


def samples(section: str, found: list[Answer], looks: dict[str, Look]) -> Iterable[Picture]:
    """Samples of every pass and implementation in the slowest comparison of one operator."""
    usable = [a for a in found if any(map(timed, a.rows))]
    if not usable:
        return
    answer = max(usable, key=lambda a: max(r["median_s"] for r in a.rows if timed(r)))
    strips: list[tuple[str, str, np.ndarray]] = []
    for row in filter(timed, answer.rows):
        for record in row["records"]:
            values = np.sort([s for s in record.samples if words.number(s) is not None and s > 0])
            if values.size:
                strips.append((row["implementation"], f"pass {record.pass_index + 1}", values))
    if not strips:
        return
    operator, first = words.short(answer.first["operator"]), answer.first
    table = [
        [words.clean(n), p, str(v.size), words.seconds(v[0]), words.seconds(float(np.median(v))), words.seconds(v[-1])]
        for n, p, v in strips[:MOST_STRIPS]
    ]
    where = f"{words.short(first['workload'], 30)}, {words.clean(first['phase'])}, batch {first['batch']}"
    left = max(len(strips) - MOST_STRIPS, 0)
    yield Picture(
        "samples",
        f"samples-{operator}",
        section,
        f"{operator}: samples by pass",
        f"Every cold sample of {where} as a dot, one strip a pass, with the pass's median; time is logarithmic.",
        ["implementation", "pass", "samples", "least", "median", "most"],
        table,
        lambda: _draw_samples(strips[:MOST_STRIPS], looks),
        f"{where}: the slowest comparison. Each dot is a cold sample, the bar its pass’s median. "
        "Strips that do not overlap within one implementation mean that passes differ more than samples.",
        (words.count(left, "more strip") + "; " if left else "") + "other cases: open their row in the table",
    )


def _draw_samples(strips: list[tuple[str, str, np.ndarray]], looks: dict[str, Look]) -> Canvas:
    canvas = Canvas(WIDTH, ROW * len(strips) + 34)
    labels = longest_width([label for _, label, _ in strips], 8)
    gutter = longest_width([words.short(name, 28) for name, _, _ in strips], SIZE) + labels + 12
    scale = Scale([x for _, _, v in strips for x in (v[0], v[-1])], gutter, WIDTH - 18, log=True)
    bottom = ROW * len(strips) + 6
    ticks = scale.ticks(3 if gutter < 150 else 2)
    canvas.lines([(scale(t), 2, scale(t), bottom) for t in ticks], GRID, 0.7)
    middles, last = [], ""
    for n, (name, label, values) in enumerate(strips):
        y = 4 + ROW * (n + 0.5)
        if name != last:
            canvas.text(2, y, words.short(name, 28), SIZE)
        last = name
        canvas.text(gutter - 5, y, label, 8, MUTED, ha="right")
        if values.size > MOST_DOTS:
            middle = float(np.median(values))
            values = values[np.linspace(0, values.size - 1, MOST_DOTS).round().astype(int)]
        else:
            middle = float(np.median(values))
        canvas.curve([scale(v) for v in values], [y] * len(values), looks[name].color, "o",
                     linestyle="none", markersize=3.6, alpha=0.7, markeredgewidth=0.3)  # fmt: skip
        middles.append((scale(middle), y - 4.5, scale(middle), y + 4.5))
    canvas.lines(middles, INK, 1.6)
    for t in ticks:
        canvas.text(scale(t), bottom + 8, tick_seconds(t), SIZE, MUTED, ha="center")
    canvas.text((gutter + WIDTH) / 2, bottom + 21, "time", 9, ha="center")
    return canvas


def roofline(section: str, rows: list[Row], looks: dict[str, Look]) -> Iterable[Picture]:
    """Share of the measured copy bandwidth that the least possible traffic needs, by implementation."""
    strips: dict[tuple[str, str, str], list[tuple[float, Row]]] = {}
    for row in filter(timed, rows):
        share = words.number(row["roofline"])
        if share is not None and share > 0:
            strips.setdefault((row["operator"], row["phase"], row["implementation"]), []).append((share, row))
    if not strips:
        return
    shown = list(strips.items())[: 2 * MOST_STRIPS]
    table = []
    for (operator, phase, name), points in shown:
        shares = [p[0] for p in points]
        best = max(points, key=lambda p: p[0])[1]
        table.append(
            [words.clean(operator), words.clean(phase), words.clean(name), str(len(shares)), words.percent(min(shares)),
             words.percent(float(np.median(shares))), words.percent(max(shares)), words.short(best["workload"], 30)]
        )  # fmt: skip
    left = len(strips) - len(shown)
    top = max(strips, key=lambda key: max(p[0] for p in strips[key]))
    yield Picture(
        "roofline",
        "roofline",
        section,
        "Share of the roofline",
        "Dots of each implementation’s share of the measured copy bandwidth, one dot a workload. "
        f"Highest: {words.clean(top[2])}, {words.percent(max(p[0] for p in strips[top]))}.",
        ["operator", "phase", "implementation", "cases", "least", "median", "most", "most on"],
        table,
        lambda: _draw_roofline(shown, looks),
        "Time that moving the least possible bytes would take at this device’s measured copy bandwidth, over the time "
        "taken. Beyond 100 % the data came from a cache or the cost model is wrong.",
        words.count(left, "more implementation") if left else "",
    )


def _draw_roofline(shown: list[tuple[tuple[str, str, str], list[tuple[float, Row]]]], looks: dict[str, Look]) -> Canvas:
    heads = len({key[:2] for key, _ in shown})
    height = ROW * len(shown) + 15 * heads + 36
    canvas = Canvas(WIDTH, height)
    shares = [p[0] for _, points in shown for p in points]
    gutter = longest_width([words.short(name, 28) for (_, _, name), _ in shown], SIZE) + 6
    scale = Scale([*shares, 1.0], gutter, WIDTH - 18, log=True)
    bottom = height - 30
    ticks = scale.ticks(4)
    canvas.lines([(scale(t), 2, scale(t), bottom) for t in ticks], GRID, 0.7)
    canvas.lines([(scale(1.0), 2, scale(1.0), bottom)], INK, 1.1, linestyles="dashed")
    y, last = 3.0, ("", "")
    for (operator, phase, name), points in shown:
        if (operator, phase) != last:
            last = (operator, phase)
            canvas.text(2, y + 8, f"{words.short(operator, 26)} {words.clean(phase)}", SIZE, MUTED)
            y += 15
        canvas.text(gutter - 5, y + ROW / 2, words.short(name, 28), SIZE, ha="right")
        xs = [scale(p[0]) for p in points[:MOST_DOTS]]
        canvas.curve(xs, [y + ROW / 2] * len(xs), looks[name].color, looks[name].marker, linestyle="none", markersize=5)
        y += ROW
    for t in ticks:
        canvas.text(scale(t), bottom + 8, tick_percent(t), SIZE, MUTED, ha="center")
    canvas.text((gutter + WIDTH) / 2, bottom + 21, "share of the copy bandwidth", 9, ha="center")
    return canvas

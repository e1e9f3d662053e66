"""Heat maps: implementation x comparison within one environment, and the ratio of two devices."""

from __future__ import annotations

import math
from collections.abc import Iterable

import matplotlib as mpl
from spikemark.reports import environments, words
from spikemark.reports.answers import Answer, timed, varying
from spikemark.reports.figures.bars import comparison_name, spread
from spikemark.reports.figures.canvas import MUTED, Canvas
from spikemark.reports.figures.picture import Picture
from spikemark.reports.rows import Report, Row

MOST_ROWS, MOST_COLUMNS = 24, 9
WIDTH, GUTTER, CELL, HEAD = 388.0, 178.0, 17.0, 58.0
_FULL = math.log(16.0)
"""Ratios of 16 and more have the strongest colour."""


def heat_color(ratio: float) -> tuple[str, str]:
    """(cell colour, text colour) of a ratio: blue where it is above 1, orange below, white at 1."""
    part = max(-1.0, min(1.0, math.log(ratio) / _FULL))
    cell = mpl.colormaps["PuOr"](0.5 + 0.45 * part)
    light = 0.2126 * cell[0] ** 2.2 + 0.7152 * cell[1] ** 2.2 + 0.0722 * cell[2] ** 2.2
    return mpl.colors.to_hex(cell), "#000000" if light > 0.18 else "#ffffff"


def pictures(section: str, found: list[Answer]) -> Iterable[Picture]:
    """Speed-up over the baseline of every implementation in every comparison of one operator and environment."""
    usable = [a for a in found if a.baseline and timed(a.baseline) and sum(map(timed, a.rows)) > 1]
    if len(usable) < 2:
        return
    usable, left = spread(usable, MOST_ROWS * 4)
    usable, more = usable[:MOST_ROWS], len(usable[MOST_ROWS:])
    names = varying([row for a in found for row in a.rows])
    columns = list(dict.fromkeys(r["implementation"] for a in usable for r in a.rows))[:MOST_COLUMNS]
    cells = [{r["implementation"]: r for r in a.rows} for a in usable]
    rows = [(comparison_name(a, names), [_gain(c.get(n)) for n in columns]) for a, c in zip(usable, cells, strict=True)]
    operator = words.short(found[0].first["operator"])
    note = "Above 1 (purple) is faster than the baseline, below (orange) slower. A word: why there is no number."
    title = f"{operator}: speed-up over the baseline"
    yield _picture("heat", f"heat-{operator}", section, title, columns, rows, note, left + more)


def _gain(row: Row | None) -> float | str:
    if row is None:
        return ""
    gain = words.number(row["speedup"])
    return gain if gain is not None and gain > 0 else row["status"]


def _picture(
    kind: str,
    name: str,
    section: str,
    title: str,
    columns: list[str],
    rows: list[tuple[str, list[float | str]]],
    note: str,
    left: int,
) -> Picture:
    shown = rows[:MOST_ROWS]
    left += len(rows) - len(shown)
    numbers = [v for _, values in shown for v in values if isinstance(v, float)]
    alt = f"Heat map of {title}, {len(shown)} rows by {words.listed(columns, 9)}."
    if numbers:
        alt += f" From {words.factor(min(numbers))} to {words.factor(max(numbers))}."
    table = [
        [label, *(words.factor(v) if isinstance(v, float) else v or "–" for v in values)] for label, values in shown
    ]
    return Picture(
        kind,
        name,
        section,
        title,
        alt,
        ["comparison", *(words.short(c, 40) for c in columns)],
        table,
        lambda: draw(columns, shown),
        note,
        words.count(left, "more comparison") if left else "",
    )


def draw(columns: list[str], rows: list[tuple[str, list[float | str]]]) -> Canvas:
    """The grid with slanted column names."""
    canvas = Canvas(WIDTH, HEAD + CELL * len(rows) + 4)
    room = WIDTH - GUTTER - 34
    width = min(room / len(columns), 64.0)
    for n, name in enumerate(columns):
        canvas.text(GUTTER + width * (n + 0.4), HEAD - 4, words.short(name, 15), 8.5,
                    rotation=28, ha="left", va="bottom", rotation_mode="anchor")  # fmt: skip
    boxes, colors = [], []
    for m, (label, values) in enumerate(rows):
        y = HEAD + m * CELL
        canvas.text(GUTTER - 5, y + CELL / 2, words.short(label, 44), 8, ha="right")
        for n, value in enumerate(values):
            x = GUTTER + width * n
            if isinstance(value, float):
                cell, ink = heat_color(value)
                boxes.append((x, y, width, CELL))
                colors.append(cell)
                canvas.text(
                    x + width / 2, y + CELL / 2, words.factor(value), 8 if width > 30 else 6.5, ink, ha="center"
                )
            elif value:
                short = value if width > 50 else value[:5]
                canvas.text(x + width / 2, y + CELL / 2, short, 6.5, MUTED, ha="center")
    if boxes:
        canvas.bars(boxes, colors)
    return canvas


def device_pictures(report: Report, wanted: tuple[str, str] | None = None, most: int = 3) -> Iterable[Picture]:
    """For pairs of environments the ratio of times of the same cases; refused where more than the device differs.

    ``wanted`` names two devices (``cpu``, ``cpu:1``); otherwise the first ``most`` pairs that share cases.
    """
    times: dict[tuple[int, str], dict[tuple[str, ...], Row]] = {}
    for row in filter(timed, report.rows):
        key = tuple(
            str(row[n]) for n in ("operator", "phase", "workload", "dtype", "batch", "time_steps", "rate_asked")
        )
        times.setdefault((row["run_index"], row["environment"]), {})[*key, row["implementation"]] = row
    places = list(times)
    pairs = [(a, b) for i, a in enumerate(places) for b in places[i + 1 :] if times[a].keys() & times[b].keys()]
    if wanted:
        pairs = [(a, b) for a in places for b in places if (a[1], b[1]) == wanted]
    for a, b in pairs[:most]:
        yield from _ratio(report, a, b, times[a], times[b])


def _ratio(
    report: Report,
    a: tuple[int, str],
    b: tuple[int, str],
    under: dict[tuple[str, ...], Row],
    over: dict[tuple[str, ...], Row],
) -> Iterable[Picture]:
    described = environments.named(report)
    titles = [words.short(environments.title(report, *place), 40) for place in (a, b)]
    one, other = described.get(a, {}), described.get(b, {})
    differing = environments.software_differences(one, other)
    shared = [key for key in under if key in over]
    if differing or not shared or environments.identity(one) == environments.identity(other):
        return
    all_rows = [under[k] for k in shared]
    names = varying(all_rows)
    columns = list(dict.fromkeys(k[-1] for k in shared))[:MOST_COLUMNS]
    grid: dict[tuple[str, ...], dict[str, float]] = {}
    for key in shared:
        grid.setdefault(key[:-1], {})[key[-1]] = over[key]["median_s"] / under[key]["median_s"]
    rows = []
    for group, ratios in grid.items():
        row = next(under[k] for k in shared if k[:-1] == group)
        label = f"{words.short(row['operator'], 12)} {comparison_name(Answer([row]), names)}"
        rows.append((label, [ratios.get(c, "") for c in columns]))
    note = f"Time on {titles[1]} divided by time on {titles[0]}: above 1 (purple) {titles[0]} is faster."
    name = f"devices-{a[0]}-{a[1]}-{b[0]}-{b[1]}"
    yield _picture("devices", name, "Across devices", f"{titles[1]} against {titles[0]}", columns, rows, note, 0)


def refused_pairs(report: Report) -> list[str]:
    """One line for each pair of environments whose ratio would mix the device with something else."""
    places = list(environments.named(report).items())
    out = []
    for i, (a, one) in enumerate(places):
        for b, other in places[i + 1 :]:
            fields = environments.software_differences(one, other)
            if fields:
                titles = [words.short(environments.title(report, *p), 40) for p in (a, b)]
                out.append(f"{titles[0]} and {titles[1]} are not compared: {words.listed(fields)} differ.")
    return out

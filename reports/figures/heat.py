"""Heat maps: implementation x comparison within one environment, and the ratio of two devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import matplotlib as mpl
from spikemark.harness.environment import describe_differences
from spikemark.reports import environments, words
from spikemark.reports.answers import Answer, time_ratio, timed, varying
from spikemark.reports.figures.bars import comparison_name, spread
from spikemark.reports.figures.canvas import MUTED, Canvas, longest_width, text_width
from spikemark.reports.figures.picture import Picture
from spikemark.reports.rows import Report, Row

MOST_ROWS, MOST_COLUMNS = 24, 9
CELL, SIZE = 17.0, 8.5
SLANT = math.radians(50)
_FULL = math.log(16.0)
"""Ratios of 16 and more have the strongest colour."""


@dataclass(frozen=True)
class Ratio:
    """A cell: a ratio, and how it is written with the digits that its interval allows."""

    value: float
    text: str


Cell = Ratio | str
"""A ratio, or the word for why there is none."""


def heat_color(ratio: float) -> tuple[str, str]:
    """(cell colour, text colour) of a ratio: blue where it is above 1, orange below, white at 1."""
    part = max(-1.0, min(1.0, math.log(ratio) / _FULL))
    cell = _colors()(0.5 + 0.45 * part)
    light = 0.2126 * cell[0] ** 2.2 + 0.7152 * cell[1] ** 2.2 + 0.0722 * cell[2] ** 2.2
    return mpl.colors.to_hex(cell), "#000000" if light > 0.18 else "#ffffff"


@functools.cache
def _colors() -> mpl.colors.Colormap:
    """Looked up once: matplotlib hands out a copy, whose table of colours is then computed anew."""
    return mpl.colormaps["PuOr"]


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


def _gain(row: Row | None) -> Cell:
    if row is None:
        return ""
    gain = words.number(row["speedup"])
    if gain is None or gain <= 0:
        return str(row["status"])
    text = "1×" if row["baseline"] else words.factor(gain, row["speedup_low"], row["speedup_high"])
    return Ratio(gain, text)


def _picture(
    kind: str,
    name: str,
    section: str,
    title: str,
    columns: list[str],
    rows: list[tuple[str, list[Cell]]],
    note: str,
    left: int,
) -> Picture:
    shown = rows[:MOST_ROWS]
    left += len(rows) - len(shown)
    numbers = sorted((v for _, values in shown for v in values if isinstance(v, Ratio)), key=lambda v: v.value)
    alt = f"Heat map of {title}, {len(shown)} rows by {words.listed(columns, 9)}."
    if numbers:
        alt += f" From {numbers[0].text} to {numbers[-1].text}."
    table = [[label, *(v.text if isinstance(v, Ratio) else v or "–" for v in values)] for label, values in shown]
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


def draw(columns: list[str], rows: list[tuple[str, list[Cell]]]) -> Canvas:
    """The grid with slanted column names; as wide as its texts need."""
    names = [words.short(name, 28) for name in columns]
    gutter = longest_width([label for label, _ in rows], SIZE) + 8
    texts = [v.text if isinstance(v, Ratio) else v for _, values in rows for v in values]
    width = min(max(longest_width(texts, SIZE) + 6, 30.0), 64.0)
    head = longest_width(names, SIZE) * math.sin(SLANT) + 14
    # The last names reach beyond their columns.
    reach = max(width * (n + 0.4) + text_width(name, SIZE) * math.cos(SLANT) for n, name in enumerate(names))
    canvas = Canvas(gutter + max(reach, width * len(names)) + 4, head + CELL * len(rows) + 4)
    for n, name in enumerate(names):
        canvas.text(gutter + width * (n + 0.4), head - 4, name, SIZE,
                    rotation=math.degrees(SLANT), ha="left", va="bottom", rotation_mode="anchor")  # fmt: skip
    boxes, colors = [], []
    for m, (label, values) in enumerate(rows):
        y = head + m * CELL
        canvas.text(gutter - 5, y + CELL / 2, label, SIZE, ha="right")
        for n, value in enumerate(values):
            x = gutter + width * n
            if isinstance(value, Ratio):
                cell, ink = heat_color(value.value)
                boxes.append((x, y, width, CELL))
                colors.append(cell)
                canvas.text(x + width / 2, y + CELL / 2, value.text, SIZE, ink, ha="center")
            elif value:
                small = min(SIZE, SIZE * (width - 2) / text_width(value, SIZE))
                canvas.text(x + width / 2, y + CELL / 2, value, small, MUTED, ha="center")
    if boxes:
        canvas.bars(boxes, colors)
    return canvas


def device_pictures(report: Report, wanted: tuple[str, str] | None = None, most: int = 3) -> Iterable[Picture]:
    """For pairs of environments the ratio of times of the same cases; refused where more than the device differs.

    ``wanted`` names two devices (``cpu``, ``cpu:1``); otherwise the first ``most`` pairs that share cases.
    """
    times: dict[str, dict[tuple[str, ...], Row]] = {}
    for row in filter(timed, report.rows):
        key = tuple(
            str(row[n]) for n in ("operator", "phase", "workload", "dtype", "batch", "time_steps", "rate_asked")
        )
        times.setdefault(row["environment"], {})[*key, row["implementation"]] = row
    places = list(times)
    pairs = [(a, b) for i, a in enumerate(places) for b in places[i + 1 :] if times[a].keys() & times[b].keys()]
    if wanted:
        pairs = [(a, b) for a in places for b in places if (a, b) == wanted]
    for a, b in pairs[:most]:
        yield from _ratio(report, a, b, times[a], times[b])


def _ratio(
    report: Report,
    a: str,
    b: str,
    under: dict[tuple[str, ...], Row],
    over: dict[tuple[str, ...], Row],
) -> Iterable[Picture]:
    described = environments.named(report)
    titles = [words.short(environments.title(report, place), 40) for place in (a, b)]
    one, other = described.get(a, {}), described.get(b, {})
    differing = environments.software_differences(one, other)
    shared = [key for key in under if key in over]
    if differing or not shared or environments.identity(one) == environments.identity(other):
        return
    all_rows = [under[k] for k in shared]
    names = varying(all_rows)
    columns = list(dict.fromkeys(k[-1] for k in shared))[:MOST_COLUMNS]
    grid: dict[tuple[str, ...], dict[str, Ratio]] = {}
    for key in shared:
        grid.setdefault(key[:-1], {})[key[-1]] = Ratio(
            over[key]["median_s"] / under[key]["median_s"], words.factor(*time_ratio(over[key], under[key]))
        )
    rows: list[tuple[str, list[Cell]]] = []
    for group, ratios in grid.items():
        row = next(under[k] for k in shared if k[:-1] == group)
        label = f"{words.short(row['operator'], 19)} {comparison_name(Answer([row]), names)}"
        rows.append((label, [ratios.get(c, "") for c in columns]))
    note = f"Time on {titles[1]} divided by time on {titles[0]}: above 1 (purple) {titles[0]} is faster."
    name = f"devices-{a}-{b}"
    yield _picture("devices", name, "Across devices", f"{titles[1]} against {titles[0]}", columns, rows, note, 0)


def refused_pairs(report: Report) -> list[str]:
    """One line for each pair of environments whose ratio would mix the device with something else."""
    places = list(environments.named(report).items())
    out = []
    for i, (a, one) in enumerate(places):
        for b, other in places[i + 1 :]:
            found = environments.software_differences(one, other)
            if found:
                titles = [words.short(environments.title(report, p), 40) for p in (a, b)]
                differ = "differs" if len(found) == 1 else "differ"
                fields = words.listed([words.short(describe_differences([f]), 120) for f in found])
                out.append(f"{titles[0]} and {titles[1]} are not compared: {fields} {differ}.")
    return out


def why_not(report: Report, wanted: tuple[str, str]) -> str:
    """Why two devices' times are not divided, in one line; empty if some are."""
    if any(True for _ in device_pictures(report, wanted)):
        return ""
    of_these = [f"{a} and {b} are not compared" for a, b in (wanted, wanted[::-1])]
    reasons = [line for line in refused_pairs(report) if any(o in line for o in of_these)]
    return reasons[0] if reasons else f"{wanted[0]} and {wanted[1]} have no timed case in common."

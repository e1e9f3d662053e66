"""Speed and memory bars: one picture an operator and environment, one group of bars a workload and phase."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spikemark.reports import words
from spikemark.reports.answers import Answer, size_words, timed, varying
from spikemark.reports.figures.canvas import GRID, INK, MUTED, WIDTH, Canvas, longest_width
from spikemark.reports.figures.palette import Look
from spikemark.reports.figures.picture import Picture
from spikemark.reports.rows import Row

MOST_BARS = 32
"""Bars in one picture: what fits a printed page and is read in one look."""
BAR, HEADER, SIZE = 12.5, 17.0, 9.0
LONGEST_NAME = 28
"""Characters of an implementation's name that fit beside its bar: all of a layer's pair of names."""


@dataclass(frozen=True)
class Bar:
    """One bar: its implementation, length, interval, what is written at its end, and a mark within it."""

    name: str
    value: float
    low: float
    high: float
    label: str
    mark: float | None = None


def comparison_name(answer: Answer, names: list[str]) -> str:
    """ "cifar10-vgg/conv2 · forward, batch 8"."""
    row = answer.first
    size = size_words(row, names)
    return f"{words.short(row['workload'], 30)} · {words.clean(row['phase'])}" + (f", {size}" if size else "")


def speed_bars(rows: list[Row]) -> list[Bar]:
    """Bars of the median times of one comparison."""
    out = []
    for row in filter(timed, rows):
        low, high = (words.number(row[name]) for name in ("ci_low_s", "ci_high_s"))
        label = words.seconds(row["median_s"], low, high)
        if words.number(row["speedup"]) is not None and not row["baseline"]:
            label += f" · {words.factor(row['speedup'], row['speedup_low'], row['speedup_high'])}"
        value = row["median_s"]
        bounds = (value if low is None else low, value if high is None else high)
        out.append(Bar(row["implementation"], value, *bounds, label))
    return out


def memory_bars(rows: list[Row]) -> list[Bar]:
    """Bars of the peak memory of one comparison: whisker over the passes, mark at what is saved for backward."""
    out = []
    for row in rows:
        peak = words.number(row["peak_bytes"])
        if row["status"] != "ok" or peak is None:
            continue
        passes = [p for p in (words.number(r.memory.get("peak_bytes")) for r in row["records"]) if p is not None]
        saved = words.number(row["saved_bytes"])
        bounds = (min(passes, default=peak), max(passes, default=peak))
        out.append(Bar(row["implementation"], peak, *bounds, words.size(peak), saved or None))
    return out


def pictures(section: str, found: list[Answer], looks: dict[str, Look]) -> Iterable[Picture]:
    """The speed and the memory picture of one operator in one environment; one a phase if they do not fit into one."""
    if sum(timed(r) for a in found for r in a.rows) > MOST_BARS:
        phases: dict[str, list[Answer]] = {}
        for answer in found:
            phases.setdefault(answer.first["phase"], []).append(answer)
        if len(phases) > 1:
            for members in phases.values():
                yield from pictures(section, members, looks)
            return
    if not found:
        return
    names = varying([row for a in found for row in a.rows])
    operator = words.short(found[0].first["operator"])
    if len({a.first["phase"] for a in found}) == 1:
        operator += f" {words.short(found[0].first['phase'])}"
    kinds: list[tuple[str, str, str, Callable[[list[Row]], list[Bar]]]] = [
        ("speed", "time", "Length: median time as a share of the slowest in its group; shorter is better. "
         "Whisker: 95 % interval, an arrow where it goes on. Right: time and speed-up over the baseline.", speed_bars),
        ("memory", "peak memory", "Length: peak above what the call found allocated, as a share of the largest in its "
         "group; shorter is better. Diamond: saved for backward. Whisker: range over passes, where they differ.",
         memory_bars),
    ]  # fmt: skip
    for kind, noun, note, bars_of in kinds:
        shown: list[tuple[str, list[Bar]]] = []
        chosen, missing = spread(found, MOST_BARS)
        for answer in chosen:
            if bars := bars_of(answer.rows):
                shown.append((comparison_name(answer, names), bars))
        if not shown:
            continue
        header = ["comparison", "implementation", noun]
        header += ["95 % interval", "over the baseline"] if kind == "speed" else ["over passes", "saved for backward"]
        table = [
            [title, words.clean(b.name), *(_speed_cells(b) if kind == "speed" else _memory_cells(b))]
            for title, bars in shown
            for b in bars
        ]
        yield Picture(
            kind,
            f"{kind}-{operator}".replace(" ", "-"),
            section,
            f"{operator}: {noun}",
            _alt(operator, noun, shown),
            header,
            table,
            functools.partial(draw, shown, looks),
            note,
            f"{words.count(missing, 'more comparison')} of this operator in the table below" if missing else "",
        )


def _speed_cells(bar: Bar) -> list[str]:
    time, _, gain = bar.label.partition(" · ")
    return [time, words.seconds_interval(bar.value, bar.low, bar.high), gain or "–"]


def _memory_cells(bar: Bar) -> list[str]:
    low, high = words.size(bar.low), words.size(bar.high)
    return [bar.label, low if low == high else f"{low} to {high}", words.size(bar.mark)]


def spread(found: list[Answer], most: int) -> tuple[list[Answer], int]:
    """Comparisons with at most ``most`` timed rows together, in their order, and how many are left out.

    Each workload is visited before any is visited twice, its slowest comparison first: those decide a training's time.
    """
    usable = {id(a): max(r["median_s"] for r in a.rows if timed(r)) for a in found if any(map(timed, a.rows))}
    queues: dict[str, list[Answer]] = {}
    for answer in sorted((a for a in found if id(a) in usable), key=lambda a: -usable[id(a)]):
        queues.setdefault(answer.first["workload"], []).append(answer)
    kept: set[int] = set()
    room = most
    for turn in range(max(map(len, queues.values()), default=0)):
        for queue in queues.values():
            size = sum(map(timed, queue[turn].rows)) if turn < len(queue) else 0
            if size and (size <= room or not kept):
                kept.add(id(queue[turn]))
                room -= size
    return [a for a in found if id(a) in kept], len(usable) - len(kept)


def _alt(operator: str, noun: str, groups: list[tuple[str, list[Bar]]]) -> str:
    best = [f"{title}: {words.clean(min(bars, key=lambda b: b.value).name)}" for title, bars in groups]
    return (
        f"Bars of {noun} for {operator} in {words.count(len(groups), 'comparison')}. Smallest: {'; '.join(best[:8])}."
    )


def draw(groups: list[tuple[str, list[Bar]]], looks: dict[str, Look]) -> Canvas:
    """Groups of horizontal bars, each on its own scale from zero to the longest."""
    height = sum(HEADER + BAR * len(bars) + 5 for _, bars in groups) + 4
    canvas = Canvas(WIDTH, height)
    every = [bar for _, bars in groups for bar in bars]
    gutter = longest_width([words.short(b.name, LONGEST_NAME) for b in every], SIZE) + 6
    span = WIDTH - gutter - longest_width([b.label for b in every], SIZE) - 6
    y, boxes, colors, whiskers, caps, arrows, marks = 2.0, [], [], [], [], [], []
    edges = []
    for title, bars in groups:
        canvas.text(2, y + HEADER / 2, title, SIZE, MUTED)
        y += HEADER
        edges.append((y, y + BAR * len(bars)))
        longest = max(b.value for b in bars)
        full = max(min(max(b.high for b in bars), 1.6 * longest), *(b.mark or 0.0 for b in bars)) or 1.0
        for bar in bars:
            middle = y + BAR / 2
            canvas.text(gutter - 5, middle, words.short(bar.name, LONGEST_NAME), SIZE, ha="right")
            boxes.append((gutter, y + 1, span * bar.value / full, BAR - 2))
            colors.append(looks[bar.name].color)
            if bar.high > bar.low:
                low, high = gutter + span * bar.low / full, gutter + span * min(bar.high / full, 1)
                whiskers.append((low, middle, high, middle))
                caps.append((low, middle - 2.5, low, middle + 2.5))
                if bar.high > full:
                    arrows.append((high - 2, middle))
                else:
                    caps.append((high, middle - 2.5, high, middle + 2.5))
            if bar.mark is not None:
                marks.append((gutter + span * bar.mark / full, middle))
            canvas.text(gutter + span + 5, middle, bar.label, SIZE)
            y += BAR
        y += 5
    canvas.lines([(gutter + span, top, gutter + span, bottom) for top, bottom in edges], GRID, 0.7)
    canvas.bars(boxes, colors)
    canvas.lines(whiskers, INK, 1.3)
    canvas.lines(caps, INK, 1.3)
    for points, color, marker in ((marks, "#ffffff", "D"), (arrows, INK, ">")):
        if points:
            xs, ys = ([p[axis] for p in points] for axis in (0, 1))
            canvas.curve(xs, ys, color, marker, linestyle="none", markersize=4.5)
    canvas.lines([(gutter, top, gutter, bottom) for top, bottom in edges], INK, 0.8)
    return canvas

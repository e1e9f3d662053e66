"""Speed and memory bars: one picture an operator and environment, one group of bars a workload and phase."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spikemark.reports import words
from spikemark.reports.answers import Answer, size_words, timed, varying
from spikemark.reports.figures.canvas import GRID, INK, MUTED, Canvas
from spikemark.reports.figures.palette import Look
from spikemark.reports.figures.picture import Picture
from spikemark.reports.rows import Row

MOST_BARS = 32
"""Bars in one picture: what fits a printed page and is read in one look."""
WIDTH, GUTTER, LABELS, BAR, HEADER = 388.0, 112.0, 96.0, 12.0, 17.0


@dataclass(frozen=True)
class Bar:
    """One bar: its implementation, length, interval, what is written at its end."""

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
        out.append(Bar(row["implementation"], peak, *bounds, words.size(peak), saved))
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
         "Whisker: 95 % interval. Right: time and speed-up over the baseline.", speed_bars),
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
        header = ["comparison", "implementation", noun, "low", "high"]
        write = words.seconds if kind == "speed" else words.size
        table = [
            [title, words.clean(b.name), write(b.value), write(b.low), write(b.high)]
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
    span = WIDTH - GUTTER - LABELS
    y, boxes, colors, whiskers, marks = 2.0, [], [], [], []
    edges = []
    for title, bars in groups:
        canvas.text(2, y + HEADER / 2, title, 8.5, MUTED)
        y += HEADER
        edges.append((y, y + BAR * len(bars)))
        longest = max(b.value for b in bars)
        full = max(min(max(b.high for b in bars), 1.25 * longest), *(b.mark or 0.0 for b in bars)) or 1.0
        for bar in bars:
            middle = y + BAR / 2
            canvas.text(GUTTER - 5, middle, words.short(bar.name, 18), 8.5, ha="right")
            boxes.append((GUTTER, y + 1, span * bar.value / full, BAR - 2))
            colors.append(looks[bar.name].color)
            if bar.high > bar.low:
                whiskers.append(
                    (GUTTER + span * bar.low / full, middle, GUTTER + span * min(bar.high / full, 1), middle)
                )
            if bar.mark is not None:
                marks.append((GUTTER + span * bar.mark / full, middle))
            canvas.text(GUTTER + span + 5, middle, bar.label, 8.5)
            y += BAR
        y += 5
    canvas.lines([(GUTTER + span, top, GUTTER + span, bottom) for top, bottom in edges], GRID, 0.7)
    canvas.bars(boxes, colors)
    canvas.lines(whiskers, INK, 1.3)
    caps = [(x, m - 2.5, x, m + 2.5) for x0, m, x1, _ in whiskers for x in (x0, x1)]
    canvas.lines(caps, INK, 1.3)
    if marks:
        canvas.curve([m[0] for m in marks], [m[1] for m in marks], "#ffffff", "D", linestyle="none", markersize=4.5)
    canvas.lines([(GUTTER, top, GUTTER, bottom) for top, bottom in edges], INK, 0.8)
    return canvas

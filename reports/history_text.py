"""A history written for people and programs: a terminal's tables, JSON, CSV. Torch-free."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from spikemark.harness.changes import LEAST
from spikemark.harness.intervals import Interval
from spikemark.harness.records import OK
from spikemark.reports import words
from spikemark.reports.compare_text import change, interval
from spikemark.reports.history import GAUGE, NEAR, History, Series, Step

TABLE_ROWS = 60
"""Cases beyond which those without a change are only counted."""
CASE = ("Operator", "Phase", "Workload", "Implementation", "On")
CHANGES = ("Since", "Change", *CASE, "95 % interval", "Beside", "Commit")
CASES = (*CASE, "Runs", "Trend", "First", "Now", "In all", "Changes")
_RIGHT = {"Change", "95 % interval", "Runs", "First", "Now", "In all"}
SPARK = "▁▂▃▄▅▆▇█"
SPARK_WIDTH, SPARK_SPAN = 16, 0.2
"""Characters of a trend; its full height is at least this much, so that noise does not look like mountains."""


def date(started: str) -> str:
    """The day of a moment in ISO 8601, or a dash."""
    return words.clean(started[:10]) or words.ABSENT


def on(series: Series) -> str:
    """Where and at what size: ``cpu float32 b8 t5``."""
    case = series.case
    if case["operator"] == GAUGE:
        return ""
    return f"{words.clean(case['device'])} {words.clean(case['dtype'])} b{case['batch']} t{case['time_steps']}"


def names(series: Series) -> list[str]:
    """Operator, phase, workload, implementation."""
    return [words.clean(series.case[name]) for name in ("operator", "phase", "workload", "implementation")]


def spark(times: Sequence[float]) -> str:
    """The trend as blocks, equal shares of the runs side by side, on the logarithm of time."""
    if not times:
        return ""
    parts = np.array_split(np.log(np.array(times)), min(SPARK_WIDTH, len(times)))
    levels = np.array([np.median(part) for part in parts])
    low, high = float(levels.min()), float(levels.max())
    room = max(high - low, math.log1p(SPARK_SPAN))
    bottom = (low + high - room) / 2
    return "".join(SPARK[min(int((level - bottom) / room * len(SPARK)), len(SPARK) - 1)] for level in levels)


def commits(history: History, series: Series, step: Step) -> str:
    """``old..new`` of the runs on either side of a change; what is known of it."""
    before, after = history.commit(series, step.before), history.commit(series, step.run)
    return words.clean(f"{before}..{after}" if before != after else after)


def beside(step: Step) -> str:
    """How many cases changed together."""
    if step.shared == 1:
        return "alone"
    return f"{step.shared} of {step.cases}" + (": the machine?" if step.common else "")


def overall(series: Series) -> Interval | None:
    """The level now over the first level; None without a change point."""
    if not series.steps:
        return None
    (_, _, first), *_, (_, _, last) = series.levels
    return Interval(last / first, math.nan, math.nan)


def change_rows(history: History) -> list[tuple[bool, list[str]]]:
    """Rows of ``CHANGES``, the latest first, each with whether it is slower now.

    Where half of a machine's cases or more changed together they share a row: geometric mean, smallest to largest.
    """
    out: list[tuple[bool, list[str]]] = []
    groups: dict[tuple[int, bool], list[tuple[Step, Series]]] = {}
    group_at: dict[tuple[int, bool], int] = {}
    for step, series in history.steps:
        slower = step.ratio.value > 1
        group = groups.get((series.place, slower))
        if not step.common:
            out.append((slower, _change_cells(history, step, series)))
        elif group is not None and group[-1][0].run - step.run <= NEAR:
            group.append((step, series))
            out[group_at[series.place, slower]] = (slower, _common_cells(history, group))
        else:
            groups[series.place, slower] = group = [(step, series)]
            group_at[series.place, slower] = len(out)
            out.append((slower, _common_cells(history, group)))
    return out


def _change_cells(history: History, step: Step, series: Series) -> list[str]:
    where = on(series) if len(history.places) < 2 else f"{on(series)} [{series.place + 1}]"
    first = [date(history.runs[step.run].started), change(step.ratio)]
    return [*first, *names(series), where, interval(step.ratio), beside(step), commits(history, series, step)]


def _common_cells(history: History, group: Sequence[tuple[Step, Series]]) -> list[str]:
    """The row of changes that came together."""
    ratios = sorted(step.ratio.value for step, _ in group)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    run = Counter(step.run for step, _ in group).most_common(1)[0][0]
    step, series = next(pair for pair in group if pair[0].run == run)
    place = "" if len(history.places) < 2 else f"[{series.place + 1}]"
    what = [f"{len(group)} of {step.cases} cases", "", "", "", place]
    span = interval(Interval(mean, ratios[0], ratios[-1]))
    first = [date(history.runs[run].started), change(Interval(mean, mean, mean))]
    return [*first, *what, span, "together: the machine?", commits(history, series, step)]


def case_cells(history: History, series: Series) -> list[str]:
    """One row of ``CASES``."""
    where = on(series) if len(history.places) < 2 else f"{on(series)} [{series.place + 1}]"
    levels = series.levels if series.runs else []
    first, now = (words.seconds(levels[i][2]) if levels else words.ABSENT for i in (0, -1))
    found = [f"{date(history.runs[s.run].started)} {change(s.ratio)}" for s in series.steps]
    said = words.listed(found, 4) if found else "" if series.enough else f"fewer than {2 * LEAST} runs"
    if series.last != OK:
        said = f"last run: {words.short(series.last, 20)}" + (f"; {said}" if said else "")
    trend = spark(series.times)
    return [*names(series), where, str(len(series.runs)), trend, first, now, change(overall(series)), said]


def ordered(history: History) -> list[Series]:
    """Those that changed most first, then the others by name."""

    def size(series: Series) -> float:
        return max((abs(math.log(step.ratio.value)) for step in series.steps), default=0.0)

    return sorted(history.series, key=lambda s: (-size(s), s.last == OK, s.place, s.case["key"]))


def headline(history: History) -> str:
    """One sentence that answers."""
    cases = [series for series in history.series if series.steps]
    times = sorted(run.started for run in history.runs if run.started)
    when = f", {date(times[0])} to {date(times[-1])}" if times else ""
    what = f"{words.count(len(history.runs), 'run')}{when}, {words.count(len(history.series), 'case')}"
    found = len(history.steps)
    if not found:
        return f"{what}: no change point of {words.rate(history.least)} or more."
    late, where = history.runs[history.steps[0][0].run].started, words.count(len(cases), "case")
    return f"{what}: {words.count(found, 'change point')} in {where}, the latest on {date(late)}."


def remarks(history: History) -> list[str]:
    """Sentences on what the marks rest on: method, noise, the machine, environments, what was left out."""
    out = [
        f"A change point is marked where the level of a case changed by {words.rate(history.least)} or more with its "
        "whole 95 % interval, by seeded binary segmentation with a chance of at most 1 % of any false one in all cases "
        f"of a machine. A level needs {LEAST} runs."
    ]
    scatters = sorted(s.scatter for s in history.series if s.enough)
    if scatters:
        usual = words.percent(scatters[len(scatters) // 2])
        out.append(f"Between runs, the median of a case varies by {usual} (median over cases).")
    for number, place in enumerate(history.places):
        mark = f"[{number + 1}] {words.clean(place.title)}" if len(history.places) > 1 else words.clean(place.title)
        text = f"{mark}."
        if place.resemblance > 0.3:
            text += f" Neighbouring runs resemble each other ({place.resemblance:.2f}): it drifts, so small steps hide"
            text += ", and a mark may be of the drift." if place.resemblance > 0.55 else "."
        for name, gauge in place.gauges.items():
            moved = [f"{date(history.runs[s.run].started)} {change(s.ratio)}" for s in gauge.steps]
            if moved:
                text += f" The machine itself changed: its calibration ({name}) took {words.listed(moved, 4)}."
        out.append(text)
    if any(step.common for step, _ in history.steps):
        out.append("Where half of all cases or more changed together, the machine is as likely a cause as the code.")
    if len(history.places) > 1:
        out.append("Environments that do not match are separate series.")
    if history.copies:
        out.append(f"{words.count(history.copies, 'copy', 'copies')} of runs counted once.")
    if history.left_out:
        out.append(f"Left out: {words.listed([words.short(text, 200) for text in history.left_out], 3)}.")
    return out


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = zip(header, row, widths, strict=True)
        lines.append("  ".join(c.rjust(w) if name in _RIGHT else c.ljust(w) for name, c, w in cells).rstrip())
    return lines


def table(history: History, limit: int | None = TABLE_ROWS) -> str:
    """The terminal's form. Beyond ``limit`` cases, those without a change are only counted."""
    lines = []
    rows = [cells for _, cells in change_rows(history)]
    if rows:
        lines += [*_table(CHANGES, rows[:limit]), ""]
        if limit is not None and len(rows) > limit:
            lines += [f"and {len(rows) - limit} earlier ones (--all shows them)", ""]
    shown = ordered(history)
    if limit is not None and len(shown) > limit:
        shown = [s for s in shown if s.steps or s.last != OK][:limit]
    if shown:
        lines += [*_table(CASES, [case_cells(history, series) for series in shown]), ""]
    if len(shown) < len(history.series):
        lines += [f"and {words.count(len(history.series) - len(shown), 'more case')} (--all shows them)", ""]
    return "\n".join([*lines, headline(history), *remarks(history)])


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def to_json(history: History) -> dict[str, Any]:
    """For programs. Times in seconds; ``ratio`` is new time / old time; runs are named by their index."""
    return {
        "schema": 1,
        "least": history.least,
        "runs": [{"id": run.id, "name": run.name, "started": run.started or None} for run in history.runs],
        "environments": [
            {"title": p.title, "device": p.device, "resemblance": round(p.resemblance, 4), "described": p.described}
            for p in history.places
        ],
        "cases": [_case(history, series) for series in history.series],
        "machine": [_case(history, s) for place in history.places for s in place.gauges.values()],
        "copies": history.copies,
        "left_out": history.left_out,
    }


def _case(history: History, series: Series) -> dict[str, Any]:
    return series.case | {
        "environment": series.place,
        "runs": series.runs,
        "median_s": series.times,
        "commits": [history.runs[run].commit(key) for run, key in zip(series.runs, series.keys, strict=True)],
        "status": series.last,
        "reason": series.reason,
        "scatter": _number(series.scatter),
        "looked_for_changes": series.enough,
        "levels": [{"first": series.runs[a], "last": series.runs[b - 1], "median_s": t} for a, b, t in series.levels]
        if series.runs
        else [],
        "changes": [
            {
                "run": step.run,
                "before": step.before,
                "commits": [history.commit(series, step.before), history.commit(series, step.run)],
                "ratio": step.ratio.value,
                "low": step.ratio.low,
                "high": step.ratio.high,
                "changed_together": step.shared,
                "of_cases": step.cases,
            }
            for step in series.steps
        ],
    }


def to_csv(history: History) -> str:
    """One tidy row a case and run; ``change`` is new / old time where the run is the first of a new level."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    first = list(history.series[0].case)
    writer.writerow(["run", "started", "commit", "environment", *first, "median_s", "change"])
    for series in history.series:
        steps = {step.run: step.ratio.value for step in series.steps}
        for run, key, time in zip(series.runs, series.keys, series.times, strict=True):
            made = history.runs[run]
            told = [made.name, made.started, made.commit(key), history.places[series.place].title]
            cells = [c.encode("utf-8", "replace").decode() if isinstance(c, str) else c for c in series.case.values()]
            writer.writerow([*told, *cells, time, steps.get(run, "")])
    return out.getvalue()

"""A comparison written for people and programs: a terminal table, a Markdown comment for a pull request, JSON."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from spikemark.harness.intervals import INCONCLUSIVE, SAME, Interval
from spikemark.reports import words
from spikemark.reports.compare import Change, Comparison

COMMENT_LIMIT = 60_000
"""GitHub refuses comments of more than 65,536 characters; some room is left for what a job adds around it."""
MARKDOWN_ROWS = 20
TABLE_ROWS = 60
_LIMITS = {"slower": "slower", "memory": "more peak memory"}
HEADER = ("Operator", "Phase", "Workload", "Implementation", "On", "Old", "New", "Change", "95 % interval", "Verdict")


def change(ratio: Interval | None) -> str:
    """New time / old time as what happened to the time: ``+12.3 %``."""
    return "" if ratio is None else _signed(ratio.value)


def _signed(ratio: float) -> str:
    percent = 100 * (ratio - 1)
    if not math.isfinite(percent):
        return words.ABSENT
    if abs(percent) >= 100:
        return f"×{ratio:.2f}" if ratio < 1000 else f"×{ratio:.3g}"
    return f"{percent:+.1f} %"


def interval(ratio: Interval | None) -> str:
    """The interval of ``change``: ``+8.1 % to +15.0 %``."""
    return "" if ratio is None else f"{_signed(ratio.low)} to {_signed(ratio.high)}"


def cells(one: Change) -> list[str]:
    """One row of ``HEADER``."""
    row = one.new
    names = [words.clean(row[name]) for name in ("operator", "phase", "workload", "implementation")]
    size = f"b{row['batch']} t{row['time_steps']}"
    if row["spike_rate"] is not None:
        size += f" {words.percent(row['spike_rate'])}"
    on = f"{words.clean(row['device'])} {words.clean(row['dtype'])} {size}"
    times = [words.seconds(side["median_s"]) for side in (one.base, one.new)]
    verdict = f"{one.verdict}: {words.clean(one.reason)}" if one.reason else one.verdict
    if one.memory is not None and not 0.99 <= one.memory <= 1.01:
        verdict += f"; peak memory {_signed(one.memory)}"
    return [*names, on, *times, change(one.ratio), interval(one.ratio), verdict]


def headline(comparison: Comparison) -> str:
    """One sentence that answers."""
    counts = comparison.counts
    said = ", ".join(f"{n} {name}" for name, n in counts.items())
    mean, used, left = comparison.mean
    average = f"; on average (geometric) {_signed(mean)} over {words.count(used, 'case')}" if used else ""
    without = f", {left} without a pair of times" if left else ""
    bad = len(comparison.regressions)
    verdict = words.count(bad, "regression") if bad else "No regression found"
    return f"{verdict}: {said}{average}{without}."


def remarks(comparison: Comparison) -> list[str]:
    """Sentences on what the numbers rest on: threshold, drift, environments, cases that only one run has."""
    limits = " or ".join(f"{_LIMITS[what]} by {100 * limit:g} %" for what, limit in comparison.fail_on.items())
    out = [f"A regression is: {limits}, with the whole 95 % interval beyond it; or a case that was ok and is not."]
    drift = comparison.drift
    if drift is None:
        passes = [c.ratio.passes for c in comparison.changes if c.ratio]
        out.append(
            f"Both versions were measured in turns of a few milliseconds, {min(passes, default=0)} passes or more, "
            "each in processes of its own: drift of the machine falls on both. The change is the median over pairs of "
            "turns, so on an unsteady machine it is not the ratio of the two medians shown."
        )
        spreads = sorted(c.ratio.spread for c in comparison.changes if c.ratio and math.isfinite(c.ratio.spread))
        if spreads:
            out.append(
                f"Between passes the ratio of a case varied by {words.percent(spreads[len(spreads) // 2])} (median)."
            )
    else:
        gauges = ", ".join(f"a {name} {_signed(math.exp(moved))}" for name, moved in drift.gauges.items())
        out.append(
            "These are two runs made at different times, so drift of the machine is in every change. In the new run "
            f"the calibration took: {gauges or 'not measured'}; {words.count(drift.cases, 'case')} together took "
            f"{_signed(math.exp(drift.common))} and scatter by {words.percent(drift.scatter)} around that. Every "
            f"interval was widened by it. A slowdown below about {_signed(1 + drift.blind)} cannot be told from drift "
            "this way: `spikemark compare --measure` can."
        )
    out += [
        f"Environments differ on {words.clean(d)}: {words.clean(text)}." for d, text in comparison.differing.items()
    ]
    for side, keys in (("old", comparison.only_base), ("new", comparison.only_new)):
        if keys:
            out.append(f"Only in the {side} run: {words.listed(keys, 3)}.")
    return out


def table(comparison: Comparison, limit: int | None = TABLE_ROWS) -> str:
    """The terminal's form. Beyond ``limit`` rows, cases that stayed the same are only counted."""
    shown = comparison.changes
    if limit is not None and len(shown) > limit:
        shown = [c for c in shown if c.verdict != SAME]
    names = " → ".join(words.clean(n) for n in comparison.names)
    lines = [f"{names} (time, new against old)", ""]
    rows = [cells(c) for c in shown]
    if rows:
        widths = [max(len(row[i]) for row in (list(HEADER), *rows)) for i in range(len(HEADER))]
        for row in (list(HEADER), *rows):
            padded = [
                c.rjust(w) if 5 <= i <= 8 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(padded).rstrip())
        lines.append("")
    if len(shown) < len(comparison.changes):
        lines += [f"and {len(comparison.changes) - len(shown)} that stayed the same (--all shows them)", ""]
    return "\n".join([*lines, headline(comparison), *remarks(comparison)])


def _markdown_cell(text: str) -> str:
    """``text`` as literal text of a Markdown table cell: no markup, no mention, no cell border."""
    out = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"&#{ord(c)};" if c in "|@`\\[]*_~$" else c for c in out)


def _markdown_table(changes: Sequence[Change]) -> list[str]:
    lines = ["| Case | Old | New | Change | 95 % interval | Verdict |", "|---|--:|--:|--:|--:|---|"]
    for one in changes:
        row = [_markdown_cell(c) for c in cells(one)]
        lines.append(f"| {' '.join(row[:4])} ({row[4]}) | {' | '.join(row[5:])} |")
    return lines


def markdown(comparison: Comparison) -> str:
    """The form that fits a pull-request comment: the answer, what changed, the rest folded away."""
    names = " → ".join(_markdown_cell(words.clean(n)) for n in comparison.names)
    mark = "❌" if comparison.regressions else "⚠️" if comparison.counts.get(INCONCLUSIVE) else "✅"
    first = [f"### {mark} Spikemark: {names}", "", headline(comparison), ""]
    changed = [c for c in comparison.changes if c.verdict not in (SAME, INCONCLUSIVE)]
    rest = [c for c in comparison.changes if c.verdict in (SAME, INCONCLUSIVE)]
    rest, changed = [*changed[MARKDOWN_ROWS:], *rest], changed[:MARKDOWN_ROWS]
    last = ["", *(f"<sub>{_markdown_cell(text)}</sub>  " for text in remarks(comparison))]
    body = [*_markdown_table(changed), ""] if changed else []
    used = sum(len(line) + 1 for line in (*first, *body, *last)) + 200
    kept: list[str] = []
    for line in _markdown_table(rest) if rest else []:
        used += len(line) + 1
        if used > COMMENT_LIMIT:
            break
        kept.append(line)
    if len(kept) > 2:
        left = len(rest) - (len(kept) - 2)
        more = [f"and {words.count(left, 'case')} more", ""] if left else []
        body += ["<details><summary>The other cases</summary>", "", *kept, "", *more, "</details>"]
    return "\n".join([*first, *body, *last]).strip()[: COMMENT_LIMIT + 4000] + "\n"


def _number(value: Any) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _ratio(ratio: Interval | None) -> dict[str, Any] | None:
    if ratio is None:
        return None
    out = {name: _number(getattr(ratio, name)) for name in ("value", "low", "high", "spread")}
    return {**out, "passes": ratio.passes}


def to_json(comparison: Comparison, strict: bool = False) -> dict[str, Any]:
    """For programs. ``ratio`` is new time / old time with its interval; times in seconds, sizes in bytes."""
    kept = ("key", "operator", "phase", "workload", "implementation", "device", "dtype", "batch", "time_steps")
    figures = ("status", "reason", "median_s", "ci_low_s", "ci_high_s", "samples", "passes", "peak_bytes")
    mean, used, left = comparison.mean
    drift = comparison.drift
    return {
        "schema": 1,
        "base": comparison.names[0],
        "new": comparison.names[1],
        "measured": "in turns in one run" if drift is None else "in two runs",
        "fail_on": comparison.fail_on,
        "counts": comparison.counts,
        "regressions": [c.key for c in comparison.regressions],
        "geometric_mean": {"ratio": _number(mean), "cases": used, "left_out": left},
        "drift": None if drift is None else {**vars(drift), "blind": drift.blind},
        "only_base": comparison.only_base,
        "only_new": comparison.only_new,
        "differing": comparison.differing,
        "about": comparison.about,
        "exit_code": comparison.exit_code(strict),
        "cases": [
            {name: c.new[name] for name in kept}
            | {"verdict": c.verdict, "reason": c.reason, "ratio": _ratio(c.ratio), "memory_ratio": _number(c.memory)}
            | {side: {f: row[f] for f in figures} for side, row in (("base", c.base), ("new", c.new))}
            for c in comparison.changes
        ],
    }

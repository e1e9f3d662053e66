"""The report's section of traces: where a traced case's time went, its files, and a timeline for who has no viewer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup, escape
from spikemark.harness.parts import log_name
from spikemark.harness.runfolder import Run
from spikemark.harness.trace.summary import Timeline, TraceSummary, read_all
from spikemark.reports import words
from spikemark.reports.rows import Report, Row
from spikemark.reports.words import number

MOST_TRACES = 60
MOST_DRAWN = 300
TOOLS = {"torch": "torch.profiler", "nsys": "Nsight Systems", "ncu": "Nsight Compute"}
COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#d55e00",
    "#56b4e9",
    "#882255",
    "#8c8c8c",
)  # the last: all others
TOGETHER = "all.torch.json.gz"
"""The trace of a whole selection; in a merged folder the mark of its part stands before."""
WIDTH, LANE, LEFT, MEMORY = 900, 18, 120, 60
CSS = (
    ".timeline svg{display:block;width:100%;height:auto}.timeline text{font-size:11px;fill:var(--ink)}"
    ".timeline .memory{fill:none;stroke:var(--link);stroke-width:1.5}.timeline .lane{stroke:var(--grid)}"
    "details.trace{margin:.4rem 0}" + "".join(f".timeline .c{i}{{fill:{colour}}}" for i, colour in enumerate(COLOURS))
)


@dataclass(frozen=True)
class Traces:
    """What the page shows: ``entries`` for the template."""

    entries: list[dict[str, Any]]
    left_out: int
    damaged: list[str]
    merged: list[dict[str, str]]


def collect(report: Report, page_folder: Path | None = None) -> Traces:
    """The traces of all runs. ``page_folder`` is where the page will lie: links to files are relative to it.

    Rows of ``report.rows`` get ``traces``: pairs (name of the tool, address within the page).
    """
    entries: list[dict[str, Any]] = []
    damaged: list[str] = []
    merged: list[dict[str, str]] = []
    of_case: dict[str, list[Row]] = {}
    for row in report.rows:
        row["traces"] = []
        of_case.setdefault(row["key"], []).append(row)
    base = page_folder or report.folder
    for run, places in report.sources:
        folder = run.path / "traces"
        found, bad = read_all(folder)
        damaged += [words.short(name, 80) for name in bad]
        for together in sorted(folder.glob(f"*{TOGETHER}")):
            merged.append({"href": _address(together, base), "label": words.short(_maker(report, run, together), 40)})
        for one in found:
            anchor = f"trace-{len(entries) + 1}"
            here = [places.get(one.environment)] if one.environment else list(places.values())
            rows = [row for row in of_case.get(one.key, []) if row["environment"] in here]
            entries.append(_entry(one, anchor, folder, base, bool(rows)))
            for row in rows if len(entries) <= MOST_TRACES else ():
                row["traces"].append([TOOLS.get(one.tool, one.tool), f"#{anchor}"])
    shown = entries[:MOST_TRACES]
    return Traces(shown, len(entries) - len(shown), damaged, merged)


def _maker(report: Report, run: Run, together: Path) -> str:
    """Name of the run that made a trace of a whole selection."""
    mark = together.name.removesuffix(TOGETHER)
    return next((str(p["name"]) for p in report.parts if mark and log_name(p["id"], "") == mark), run.path.name)


def _address(path: Path, base: Path) -> str:
    return quote(os.path.relpath(path.resolve(), base.resolve()).replace(os.sep, "/"))


def _entry(one: TraceSummary, anchor: str, folder: Path, base: Path, has_row: bool) -> dict[str, Any]:
    files = [
        {"href": _address(folder / f["name"], base), "what": words.short(f["what"], 60)}
        for f in one.files
        if (folder / f["name"]).is_file()
    ]
    return {
        "anchor": anchor,
        "tool": TOOLS.get(one.tool, words.short(one.tool, 20)),
        "title": words.short(one.key or one.title, 160),
        "status": words.short(one.status, 20),
        "reason": words.short(one.reason, 700),
        "ok": one.status == "ok",
        "unmeasured": bool(one.key) and not has_row,
        "files": files,
        "facts": _facts(one),
        "kernels": _kernels(one),
        "more_kernels": words.count(one.kernels_left_out, "more name") if one.kernels_left_out > 0 else "",
        "unit": words.clean(one.unit),
        "others": [(title, _plain(rows)) for title, rows in _others(one) if rows],
        "timeline": _picture(one.timeline) if one.timeline else "",
        "timeline_note": _timeline_note(one),
        "notes": [words.short(note, 400) for note in one.notes],
    }


def _others(one: TraceSummary) -> list[tuple[str, list[dict[str, Any]]]]:
    return [
        ("Copies", one.copies),
        ("In no measured call" if one.key else "In no NVTX range", one.outside),
        ("NVTX ranges", one.ranges),
    ]


def _facts(one: TraceSummary) -> list[tuple[str, str]]:
    """What the trace says in a few numbers."""
    out = []
    calls = one.calls or 1
    per = " a call" if one.calls else ""
    if number(one.wall_s) is not None and one.wall_s is not None:
        out.append((f"time{per}, traced", words.seconds(one.wall_s / calls)))
    if one.not_in_kernels is not None:
        what = "outside torch’s operators (native kernels, Python)" if one.unit == "operator" else "without a kernel"
        out.append((f"share {what}", words.percent(one.not_in_kernels)))
    for title, value in (("idle device", one.idle_s), ("of it between kernels", one.gap_s)):
        if number(value) is not None and value is not None:
            out.append((f"{title}{per}", words.seconds(value / calls)))
    if one.peak_bytes is not None:
        out.append(("peak memory of a call", words.size(one.peak_bytes)))
    return out + _bytes(one)


def _bytes(one: TraceSummary) -> list[tuple[str, str]]:
    """Measured against ideal bytes, and against what the design says that it moves."""
    out = []
    if one.measured_bytes is not None:
        out.append(("DRAM bytes of a call, measured", words.size(one.measured_bytes)))
    models = (("ideal bytes (cost model)", one.ideal_bytes), ("bytes that the design moves", one.moved_bytes))
    for title, value in models:
        if value is not None:
            known = one.measured_bytes is not None and value > 0
            times = f", measured {words.factor((one.measured_bytes or 0) / value)}" if known else ""
            out.append((title, words.size(value) + times))
    return out


def _kernels(one: TraceSummary) -> dict[str, Any]:
    """Header and rows of the kernel table; columns that no row has are left out."""
    total = sum(row["total_s"] for row in one.kernels)
    columns: list[tuple[str, Any]] = [
        ("count", lambda r: f"{r['count']:,}"),
        ("time", lambda r: words.seconds(r["total_s"])),
        ("share", lambda r: words.percent(r["total_s"] / total) if total else "–"),
    ]
    if any(number(r.get("launch_s")) is not None for r in one.kernels):
        columns.append(("launch to start", lambda r: words.seconds(number(r.get("launch_s")))))
    if any(number(r.get("bytes")) is not None for r in one.kernels):
        columns.append(("DRAM bytes", lambda r: words.size(number(r.get("bytes")))))
    if any(r.get("metrics") for r in one.kernels):
        columns.append(("occupancy and stalls", _metrics))
    return {
        "header": [title for title, _ in columns],
        "rows": [(words.short(r["name"], 120), [write(r) for _, write in columns]) for r in one.kernels],
    }


def _metrics(row: dict[str, Any]) -> str:
    metrics = row.get("metrics")
    if not isinstance(metrics, dict):
        return "–"
    parts = []
    for name, value in metrics.items():
        known = number(value)
        if known is not None:
            unit = " %" if name == "occupancy" else ""
            parts.append(f"{words.short(name, 40)} {known:.3g}{unit}")
    return ", ".join(parts) or "–"


def _plain(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    out = []
    for row in rows:
        name = words.short(row["name"], 120)
        size = number(row.get("bytes"))
        time = words.seconds(row["total_s"]) + (f", {words.size(size)}" if size else "")
        kernels = number(row.get("kernels"))
        time += "" if kernels is None else f", {words.count(int(kernels), 'kernel')}"
        out.append((name, f"{row['count']:,}", time))
    return out


def _timeline_note(one: TraceSummary) -> str:
    if one.timeline is None:
        return ""
    what = "One traced call" if one.calls else "The whole trace"
    left = one.timeline.left_out + max(0, sum(len(s) for _, s in one.timeline.lanes) - MOST_DRAWN)
    text = f"{what}, {words.seconds(one.timeline.span_s)} from left to right."
    return text + (f" {words.count(left, 'shorter span')} are not drawn." if left else "")


def _picture(timeline: Timeline) -> Markup:
    """The timeline as inline SVG: a lane a thread or stream, and what the allocator held below."""
    span = timeline.span_s if number(timeline.span_s) and timeline.span_s > 0 else 1.0
    scale = (WIDTH - LEFT - 8) / span
    shortest = sorted((s[1] for _, spans in timeline.lanes for s in spans), reverse=True)[:MOST_DRAWN]
    least = shortest[-1] if len(shortest) == MOST_DRAWN else 0.0
    colours = _colours(timeline)
    parts: list[str] = []
    y = 4
    drawn = 0
    for lane, spans in timeline.lanes:
        parts.append(f'<line class="lane" x1="{LEFT}" x2="{WIDTH - 8}" y1="{y + LANE - 2}" y2="{y + LANE - 2}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 12}" text-anchor="end">{escape(words.short(lane, 18))}</text>')
        for start, length, name in spans:
            if length < least or drawn >= MOST_DRAWN:
                continue
            drawn += 1
            text = escape(f"{words.short(timeline.names[int(name)], 80)}, {words.seconds(length)}")
            where = f'x="{LEFT + start * scale:.1f}" y="{y}" width="{max(length * scale, 0.6):.1f}" height="{LANE - 4}"'
            parts.append(f'<rect class="c{colours[int(name)]}" {where}><title>{text}</title></rect>')
        y += LANE
    y += 4
    peak = max((b for _, b in timeline.memory), default=0.0)
    if peak > 0:
        points = _steps(timeline.memory, scale, y, peak, span)
        parts.append(f'<text x="{LEFT - 6}" y="{y + 12}" text-anchor="end">memory</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 26}" text-anchor="end">{escape(words.size(peak))}</text>')
        parts.append(f'<polyline class="memory" points="{points}"/>')
        y += MEMORY
    for index, colour in colours.items():  # those that have a colour of their own, as a legend
        if colour < len(COLOURS) - 1:
            parts.append(f'<rect class="c{colour}" x="{LEFT}" y="{y + 2}" width="10" height="10"/>')
            parts.append(f'<text x="{LEFT + 16}" y="{y + 11}">{escape(words.short(timeline.names[index], 110))}</text>')
            y += 15
    return Markup(f'<svg viewBox="0 0 {WIDTH} {y}" role="img" aria-label="Timeline">{"".join(parts)}</svg>')


def _colours(timeline: Timeline) -> dict[int, int]:
    """A colour for each name: those with most time have their own, the rest share the last."""
    total = dict.fromkeys(range(len(timeline.names)), 0.0)
    for _, spans in timeline.lanes:
        for _, length, name in spans:
            total[int(name)] += length
    ranked = sorted(total, key=lambda i: (-total[i], i))
    return {name: min(rank, len(COLOURS) - 1) for rank, name in enumerate(ranked)}


def _steps(memory: list[list[float]], scale: float, top: int, peak: float, span: float) -> str:
    """Points of a step curve: the allocator holds what it held until the next event."""
    out: list[str] = []
    height = MEMORY - 8
    before: float | None = None
    for time, held in memory:
        x = LEFT + min(max(time, 0.0), span) * scale
        level = top + height * (1 - max(0.0, held) / peak)
        if before is not None:
            out.append(f"{x:.1f},{before:.1f}")
        out.append(f"{x:.1f},{level:.1f}")
        before = level
    if before is not None:
        out.append(f"{LEFT + span * scale:.1f},{before:.1f}")
    return " ".join(out)

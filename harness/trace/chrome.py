"""Chrome traces (the JSON that torch.profiler writes and Perfetto opens): what a case's trace says, and several as one.

Torch-free. A trace holds the range of its case (``user_annotation`` named by the case's key) and in it one range
``call N`` for each measured call. Kernels belong to the call in which they were launched: joined by correlation id.
Times in files are microseconds.
"""

from __future__ import annotations

import bisect
import gzip
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spikemark.harness.errors import UsageError
from spikemark.harness.trace import CALL, FLUSH
from spikemark.harness.trace.summary import MOST_SPANS, Timeline, TraceSummary

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
MOST_MEMORY_POINTS = 400
PRIVATE = ("host_name", "traceName")

Event = dict[str, Any]
Span = tuple[float, float]


def load(path: Path) -> dict[str, Any]:
    """A trace file, packed (.gz) or not. Raises ``UsageError``, one line, for anything else."""
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        if isinstance(data, list):
            data = {"traceEvents": data}
        events = data["traceEvents"]
        data["traceEvents"] = [e for e in events if isinstance(e, dict)]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, EOFError, RecursionError):
        raise UsageError(f"{path} is no Chrome trace") from None
    return dict(data)


def save(path: Path, data: dict[str, Any]) -> None:
    """Write a trace, packed, without what tells who made it and where."""
    kept = {key: value for key, value in data.items() if key not in PRIVATE}
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(kept, file, separators=(",", ":"))


@dataclass
class _Reading:
    """A trace's events sorted into what the summary needs; spans are (start, end) in µs."""

    calls: list[Span] = field(default_factory=list)
    flushes: list[Span] = field(default_factory=list)
    operators: list[Event] = field(default_factory=list)
    device: list[Event] = field(default_factory=list)
    launches: dict[int, float] = field(default_factory=dict)
    memory: list[tuple[float, int, int]] = field(default_factory=list)  # time, total, device type


def _read(data: dict[str, Any]) -> _Reading:
    out = _Reading()
    for event in data["traceEvents"]:
        kind, category, name = event.get("ph"), event.get("cat"), str(event.get("name"))
        arguments = event.get("args") or {}
        try:
            start = float(event["ts"])
            if kind == "X":
                span = (start, start + float(event["dur"]))
                if category == "user_annotation" and name.startswith(CALL):
                    out.calls.append(span)
                elif category == "user_annotation" and name == FLUSH:
                    out.flushes.append(span)
                elif category == "cpu_op":
                    out.operators.append(event | {"span": span, "name": name})
                elif category in ON_DEVICE:
                    out.device.append(event | {"span": span, "name": name})
                elif category in LAUNCHES and "correlation" in arguments:
                    out.launches.setdefault(int(arguments["correlation"]), start)
            elif name == "[memory]":
                out.memory.append((start, int(arguments["Total Allocated"]), int(arguments["Device Type"])))
        except (KeyError, TypeError, ValueError):
            continue  # an event without what its kind has: of a newer version, or of another program
    out.calls.sort()
    out.flushes.sort()
    return out


def _call_of(time: float, calls: Sequence[Span]) -> int | None:
    """Which of these spans, in order and apart, a time lies in."""
    place = bisect.bisect_right(calls, (time, float("inf"))) - 1
    return place if place >= 0 and time <= calls[place][1] else None


def length_of_union(spans: Iterable[Span]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _clipped(spans: Iterable[Span], window: Span) -> list[Span]:
    low, high = window
    return [(max(s, low), min(e, high)) for s, e in spans if e > low and s < high]


def self_times(operators: list[Event]) -> list[tuple[Event, float, bool]]:
    """(operator, µs in itself and not in operators that it called, whether none encloses it)."""
    out: list[list[Any]] = []
    for thread in {(e.get("pid"), e.get("tid")) for e in operators}:
        stack: list[list[Any]] = []
        mine = [e for e in operators if (e.get("pid"), e.get("tid")) == thread]
        for event in sorted(mine, key=lambda e: (e["span"][0], -e["span"][1])):
            start, end = event["span"]
            while stack and stack[-1][0]["span"][1] <= start:
                stack.pop()
            entry = [event, end - start, not stack]
            if stack:
                stack[-1][1] -= end - start
            stack.append(entry)
            out.append(entry)
    return [(event, max(0.0, own), top) for event, own, top in out]


def summarise(data: dict[str, Any], key: str, tool: str = "torch") -> TraceSummary:
    """What one case's trace says of its measured calls."""
    found = _read(data)
    out = TraceSummary(tool, key, calls=len(found.calls))
    if not found.calls:
        out.notes.append("the trace has no measured call")
        return out
    if found.device:
        windows = _on_device(found, out)
    else:
        windows = _on_host(found, out)
    out.wall_s = sum(end - start for start, end in windows) * 1e-6
    lengths = [end - start for start, end in windows]
    shown = lengths.index(statistics.median_low(lengths))
    out.timeline = _timeline(found, windows[shown])
    _memory(found, windows[shown], out)
    return out


def _rows(events: list[tuple[str, float, float | None]]) -> list[dict[str, Any]]:
    """(name, µs, µs from launch to start) summed by name, most time first."""
    named: dict[str, list[tuple[float, float | None]]] = {}
    for name, length, delay in events:
        named.setdefault(name, []).append((length, delay))
    rows: list[dict[str, Any]] = []
    for name, values in named.items():
        delays = [d for _, d in values if d is not None]
        row: dict[str, Any] = {"name": name, "count": len(values), "total_s": sum(v for v, _ in values) * 1e-6}
        rows.append(row | ({"launch_s": statistics.median(delays) * 1e-6} if delays else {}))
    return sorted(rows, key=lambda r: (-r["total_s"], r["name"]))


def _on_device(found: _Reading, out: TraceSummary) -> list[Span]:
    """Fill in what ran on a GPU; the calls' windows, each until its last kernel has ended."""
    inside: dict[int, list[Event]] = {}
    outside = []
    unknown = 0
    for event in found.device:
        launch = found.launches.get(int((event.get("args") or {}).get("correlation", -1)))
        unknown += launch is None
        event["launch"] = launch
        when = event["span"][0] if launch is None else launch
        call = _call_of(when, found.calls)
        if call is None and _call_of(when, found.flushes) is None:
            outside.append(event)
        elif call is not None:
            inside.setdefault(call, []).append(event)
    if unknown:
        out.notes.append(f"{unknown} kernels or copies have no launch in the trace: assigned to calls by their start")

    def row(event: Event) -> tuple[str, float, float | None]:
        start, end = event["span"]
        return event["name"], end - start, None if event["launch"] is None else start - event["launch"]

    everything = [e for events in inside.values() for e in events]
    out.keep("kernels", _rows([row(e) for e in everything if e["cat"] == "kernel"]))
    out.keep("copies", _rows([row(e) for e in everything if e["cat"] != "kernel"]))
    out.keep("outside", _rows([row(e) for e in outside]))
    windows, busy, idle = [], 0.0, 0.0
    for number, (start, end) in enumerate(found.calls):
        spans = [e["span"] for e in inside.get(number, [])]
        window = (start, max([end, *(s[1] for s in spans)]))
        windows.append(window)
        busy += length_of_union(e["span"] for e in inside.get(number, []) if e["cat"] == "kernel")
        idle += window[1] - window[0] - length_of_union(spans)
    out.busy_s, out.idle_s = busy * 1e-6, idle * 1e-6
    return windows


def _on_host(found: _Reading, out: TraceSummary) -> list[Span]:
    """Fill in torch's operators; the calls are the windows."""
    out.unit = "operator"
    rows: list[tuple[str, float, float | None]] = []
    outside: list[tuple[str, float, float | None]] = []
    tops: list[Span] = []
    for event, own, top in self_times(found.operators):
        if _call_of(event["span"][0], found.calls) is None:
            if _call_of(event["span"][0], found.flushes) is None:
                outside.append((event["name"], own, None))
            continue
        rows.append((event["name"], own, None))
        if top:
            tops.append(event["span"])
    out.keep("kernels", _rows(rows))
    out.keep("outside", _rows(outside))
    out.busy_s = sum(length_of_union(_clipped(tops, call)) for call in found.calls) * 1e-6
    return list(found.calls)


def _timeline(found: _Reading, window: Span) -> Timeline:
    """The spans of one call: outermost operators by thread, kernels by stream; the longest if there are too many."""
    spans: list[tuple[str, Event]] = []
    threads: dict[Any, str] = {}
    for event, _, top in self_times(found.operators):
        if top and event["span"][1] > window[0] and event["span"][0] < window[1]:
            lane = threads.setdefault(event.get("tid"), f"CPU thread {len(threads) + 1}")
            spans.append((lane, event))
    for event in found.device:
        if event["span"][1] > window[0] and event["span"][0] < window[1]:
            spans.append((f"GPU {event.get('pid')} stream {event.get('tid')}", event))
    kept = sorted(spans, key=lambda s: s[1]["span"][0] - s[1]["span"][1])[:MOST_SPANS]
    out = Timeline((window[1] - window[0]) * 1e-6, left_out=len(spans) - len(kept))
    names: dict[str, int] = {}
    lanes: dict[str, list[list[float]]] = {}
    for lane, event in sorted(kept, key=lambda s: s[1]["span"]):
        ((start, end),) = _clipped([event["span"]], window) or [(window[0], window[0])]
        index = names.setdefault(event["name"], len(names))
        lanes.setdefault(lane, []).append([(start - window[0]) * 1e-6, (end - start) * 1e-6, index])
    out.names, out.lanes = list(names), sorted(lanes.items())
    return out


def _memory(found: _Reading, window: Span, out: TraceSummary) -> None:
    """What the allocator of the device held during a call, above what it held at the call's start."""
    kinds = {kind for _, _, kind in found.memory}
    wanted = 1 if found.device and 1 in kinds else 0
    events = sorted((time, total) for time, total, kind in found.memory if kind == wanted)
    before = [total for time, total in events if time <= window[0]]
    base = before[-1] if before else 0
    points = [
        [(time - window[0]) * 1e-6, float(total - base)] for time, total in events if window[0] < time <= window[1]
    ]
    if not points:
        return
    out.peak_bytes = int(max(0.0, *(p[1] for p in points)))
    step = max(1, -(-len(points) // MOST_MEMORY_POINTS))
    # Of each run of points the highest is kept, so that thinning never hides the peak.
    thin = [max(points[i : i + step], key=lambda p: p[1]) for i in range(0, len(points), step)]
    assert out.timeline is not None
    out.timeline.memory = [[0.0, 0.0], *thin]


def merge(traces: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Several cases' traces (title, trace) as one: each case a process of its own, named by its title, in real time."""
    events: list[Event] = []
    for number, (title, data) in enumerate(traces):
        base = int(data.get("baseTimeNanoseconds") or 0)
        first = int(traces[0][1].get("baseTimeNanoseconds") or 0)
        shift = (base - first) * 1e-3
        processes: dict[Any, int] = {}
        devices = {e.get("pid") for e in data["traceEvents"] if e.get("cat") in ON_DEVICE}
        for event in data["traceEvents"]:
            pid = processes.setdefault(event.get("pid"), (number + 1) * 1000 + len(processes))
            moved = event | {"pid": pid}
            if isinstance(event.get("ts"), (int, float)):
                moved["ts"] = event["ts"] + shift
            if "id" in event:  # ends of arrows: unique in their own file only
                moved["id"] = f"{number}.{event['id']}"
            if event.get("ph") == "M" and event.get("name") == "process_name":
                gpu = f" (GPU {event['pid']})" if event.get("pid") in devices else ""
                moved["args"] = {"name": title + gpu}
            elif event.get("ph") == "M" and event.get("name") == "process_sort_index":
                moved["args"] = {"sort_index": pid}
            events.append(moved)
    kept = {k: v for k, v in (traces[0][1] if traces else {}).items() if k not in (*PRIVATE, "trace_id")}
    return kept | {"traceEvents": events}

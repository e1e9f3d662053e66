"""Nsight Systems: the commands that collect and export, and what an export says of a case. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from spikemark.harness.records import Case
from spikemark.harness.trace import CAPTURE, profiled
from spikemark.harness.trace.nsys_events import COPY, GRAPH, KERNEL, SET
from spikemark.harness.trace.nsys_sqlite import KernelUse, RangeUse, Trace, read, union
from spikemark.harness.trace.nsys_tables import Array
from spikemark.harness.trace.summary import MOST_SPANS, Timeline, TraceSummary

DOMAIN = "spikemark"
PHASES = (profiled(""), "measure cold ", "measure warm ", "flush ", "verify ", "warm-up ")
"""How names of our ranges begin, before the case's key."""
UNNAMED = re.compile(r"domain \d+")


def capture(case: Case) -> str:
    """How a case tells nsys when to collect: CUDA's profiler API, or on a CPU an NVTX range."""
    return "cuda" if case.device.startswith("cuda") else "nvtx"


def profile_command(program: str, case: Case, report: Path, target: Sequence[str]) -> list[str]:
    """Collect exactly the measured calls of ``target`` into ``report`` (.nsys-rep)."""
    how = ["--capture-range=cudaProfilerApi"]
    if capture(case) == "nvtx":
        # Without the variable nsys looks only at registered strings; nvtx registers them, other versions may not.
        variable = "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0"
        how = ["--capture-range=nvtx", f"--nvtx-capture={CAPTURE}@{DOMAIN}", variable]
    return [
        program, "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node",
        *how, "--capture-range-end=stop", "--force-overwrite=true", f"--output={report}", *target,
    ]  # fmt: skip


def export_command(program: str, report: Path, database: Path) -> list[str]:
    """Export a report as SQLite."""
    return [program, "export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(report)]


def summarise_case(path: Path, key: str) -> TraceSummary:
    """What an export says of the traced calls of one case. Raises ``UsageError`` for a file that is no export."""
    trace = read(path)
    # A domain whose name is not in the export was created before collecting began; the key says whose range it is.
    ours = [g for g in trace.groups() if _is_ours(g) or UNNAMED.fullmatch(g.domain)]
    groups = [g for g in ours if g.name == profiled(key)]
    out = TraceSummary("nsys", key)
    if not groups:
        trace.notes.append("the export has no range of this case's calls: everything in it is listed as outside")
    _fill(out, trace, groups)
    _fill_outside(out, trace, [*groups, *(g for g in ours if g.name == f"flush {key}")])
    return out


def summarise_file(path: Path) -> list[TraceSummary]:
    """What an export made elsewhere says: one summary for each case traced in it, or one for the whole file.

    What ran in no range of any case stands with the case, or after several cases in a summary of its own: it is no
    more one's than another's, and looking for it once a case took hours.
    """
    trace = read(path)
    groups = trace.groups()
    ours = [g for g in groups if _is_ours(g)]
    cases: dict[str, list[RangeUse]] = {}
    for prefix in PHASES[:2]:  # traced calls, or else the samples of a run
        for group in ours:
            if group.name.startswith(prefix):
                cases.setdefault(group.name.removeprefix(prefix), []).append(group)
        if cases:
            break
    files = [{"name": path.name, "what": "SQLite export of Nsight Systems"}]
    whole = TraceSummary("nsys", "", path.name, files=files)
    if not cases:
        if len(trace.ranges):
            trace.notes.append(f"no range of the domain {DOMAIN}: a trace of another program, shown whole")
        _fill_whole(whole, trace, groups)
        return [whole]
    out = []
    for key, its in cases.items():
        one = TraceSummary("nsys", key, files=files)
        _fill(one, trace, its)
        out.append(one)
    rest = out[0] if len(out) == 1 else whole
    _fill_outside(rest, trace, [g for g in ours if g.name.startswith(PHASES)])
    return [*out, whole] if whole.outside else out


def _is_ours(group: RangeUse) -> bool:
    """Whether a range is of our domain, or of another of that name in its process (``nsys_events`` numbers them)."""
    return group.domain == DOMAIN or group.domain.startswith(f"{DOMAIN} #")


def _row(use: KernelUse) -> dict[str, Any]:
    return {name: value for name, value in asdict(use).items() if value not in (None, 0) or name == "total_s"}


def _sum(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if values and len(known) == len(values) else None


def _fill(out: TraceSummary, trace: Trace, groups: list[RangeUse]) -> None:
    """The figures of the calls in ``groups``. Costs what they hold, not what the file does: there are many cases."""
    inside = np.unique(np.concatenate([trace.within(g) for g in groups])) if groups else np.empty(0, np.int64)
    out.calls = sum(g.count for g in groups)
    out.wall_s, out.busy_s = _sum([g.window_s for g in groups]), _sum([g.busy_s for g in groups])
    out.idle_s, out.gap_s = _sum([g.idle_s for g in groups]), _sum([g.gap_s for g in groups])
    out.keep("kernels", [_row(k) for k in trace.table(inside)])
    out.keep("copies", [_row(k) for k in trace.table(inside, COPY, SET)])
    if groups:
        first = int(np.flatnonzero(trace.group_of == groups[0].index)[0])
        start = int(trace.ranges.start[first])
        out.timeline = timeline(trace, trace.members(first), start, int(trace.ranges.end[first]))
    out.notes += trace.notes


def _fill_outside(out: TraceSummary, trace: Trace, groups: Sequence[RangeUse] | None) -> None:
    """List what ran in none of these ``groups``, or in no range at all."""
    outside = trace.outside(groups)
    out.keep("outside", [_row(k) for k in [*trace.table(outside), *trace.table(outside, COPY, SET)]])


def _fill_whole(out: TraceSummary, trace: Trace, groups: list[RangeUse]) -> None:
    """The figures of a whole file, whatever made it."""
    acts = trace.activities
    everything = np.arange(len(acts))
    out.keep("kernels", [_row(k) for k in trace.table(everything)])
    out.keep("copies", [_row(k) for k in trace.table(everything, COPY, SET)])
    _fill_outside(out, trace, None)
    rows = []
    for g in groups:
        name = f"{g.domain}: {g.name}" if g.domain else g.name
        row = {"name": name, "kind": g.kind, "count": g.count, "total_s": g.wall_s, "kernels": g.kernels}
        rows.append(row | {"kernel_s": g.kernel_s})
    out.keep("ranges", rows)
    if len(acts):
        start, end = int(acts.start.min()), int(acts.end.max())
        kernels = np.flatnonzero((acts.kind == KERNEL) | (acts.kind == GRAPH))
        segment = np.zeros(len(acts), np.int64)
        busy, _ = union(segment[kernels], acts.start[kernels], acts.end[kernels], 1)
        anything, _ = union(segment, acts.start, acts.end, 1)
        out.wall_s, out.busy_s = (end - start) * 1e-9, float(busy[0]) * 1e-9
        out.idle_s = out.wall_s - float(anything[0]) * 1e-9
        out.timeline = timeline(trace, everything, start, end)
    out.notes += trace.notes


def timeline(trace: Trace, positions: Array, start: int, end: int) -> Timeline:
    """Activities as spans by stream, from ``start`` ns until the later of ``end`` and the last of them."""
    acts = trace.activities
    end = max([end, *(int(e) for e in acts.end[positions])])
    order = positions[np.argsort(acts.start[positions] - acts.end[positions], kind="stable")]
    kept = np.sort(order[:MOST_SPANS])
    out = Timeline((end - start) * 1e-9, left_out=len(order) - len(kept))
    names: dict[str, int] = {}
    lanes: dict[str, list[list[float]]] = {}
    for i in kept[np.argsort(acts.start[kept], kind="stable")]:
        lane = f"GPU {_number(acts.device[i])} stream {_number(acts.stream[i])}"
        name = names.setdefault(trace.names.texts[acts.name[i]], len(names))
        begin = max(int(acts.start[i]), start)
        lanes.setdefault(lane, []).append([(begin - start) * 1e-9, (int(acts.end[i]) - begin) * 1e-9, name])
    out.names, out.lanes = list(names), sorted(lanes.items())
    return out


def _number(value: int) -> str:
    return "?" if value < 0 else str(value)

"""Nsight Compute: the commands that collect, and what a report says of a case's kernels. Torch-free.

Reports are read with NVIDIA's package ``ncu-report`` where it is installed, else as CSV printed by ``ncu --import``.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spikemark.harness.errors import UsageError
from spikemark.harness.trace import CAPTURE
from spikemark.harness.trace.summary import TraceSummary

TIME = "gpu__time_duration.sum"
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
STALL_REASONS = (
    "barrier branch_resolving dispatch_stall drain imc_miss lg_throttle long_scoreboard math_pipe_throttle membar "
    "mio_throttle misc no_instruction not_selected short_scoreboard sleeping tex_throttle wait"
).split()
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS = (TIME, READ, WRITTEN, OCCUPANCY, *(STALL.format(reason) for reason in STALL_REASONS))
"""The default set: time, DRAM bytes, achieved occupancy, reasons for stalls."""
SECONDS = {
    "s": 1.0,
    "second": 1.0,
    "ms": 1e-3,
    "msecond": 1e-3,
    "us": 1e-6,
    "usecond": 1e-6,
    "ns": 1e-9,
    "nsecond": 1e-9,
}
BYTES = {"byte": 1.0, "b": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12}
MOST_STALLS = 3


@dataclass
class Kernel:
    """One profiled launch; ``metrics`` as collected, times in seconds and sizes in bytes."""

    name: str
    metrics: dict[str, float] = field(default_factory=dict)


def profile_command(program: str, report: Path, target: Sequence[str], metrics: Iterable[str] = METRICS) -> list[str]:
    """Profile the kernels of the measured calls of ``target`` into ``report`` (.ncu-rep), each with cold caches.

    The filter names a start/end range (no ``/`` at its end), which holds autograd's thread too.
    """
    return [
        program, "--nvtx", "--nvtx-include", f"spikemark@{CAPTURE}", "--metrics", ",".join(metrics),
        "--target-processes", "all", "--replay-mode", "kernel", "--cache-control", "all", "--clock-control", "none",
        "--force-overwrite", "--export", str(report), *target,
    ]  # fmt: skip


def csv_command(program: str, report: Path) -> list[str]:
    """Print a report as CSV, a row a kernel, in base units."""
    return [program, "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]


def package() -> bool:
    """Whether the package ``ncu-report`` is installed."""
    return importlib.util.find_spec("ncu_report") is not None


def read_report(path: Path) -> list[Kernel]:
    """The kernels of a report, with the package ``ncu-report``. Raises ``UsageError`` for a file that holds none."""
    try:
        context = importlib.import_module("ncu_report").load_report(str(path))
        ranges = [context.range_by_idx(i) for i in range(context.num_ranges())]
        actions = [r.action_by_idx(i) for r in ranges for i in range(r.num_actions())]
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not actions:
        raise UsageError(f"{path} holds no profiled kernel: no report, cut off, or nothing ran in the measured calls")
    kernels = []
    for action in actions:
        kernel = Kernel(str(action.name(action.NameBase_DEMANGLED)))
        for name in action.metric_names():
            metric = action.metric_by_name(name)
            value = metric.value() if metric is not None and metric.has_value() else None
            if isinstance(value, (int, float)):
                kernel.metrics[name] = _base(float(value), str(metric.unit() or ""))
        kernels.append(kernel)
    return kernels


def parse_csv(text: str, source: str) -> list[Kernel]:
    """The kernels in what ``csv_command`` prints: a line of names, a line of units, a line a kernel.

    Lines before the header are the tool's messages. Raises ``UsageError`` naming ``source`` if there is no kernel.
    """
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"') and '"Kernel Name"' in line), None)
    if head is None:
        raise UsageError(f"{source} gave no table of kernels")
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[head:]))))
    units = rows.pop(0) if rows and not (rows[0]["ID"] or "").strip() else {}
    kernels = []
    for row in rows:
        if not (row.get("ID") or "").strip().isdigit() or not row.get("Kernel Name"):
            continue  # messages after the table
        kernel = Kernel(str(row["Kernel Name"]))
        for name, cell in row.items():
            if isinstance(name, str) and "__" in name and isinstance(cell, str):
                value = _number(cell)
                if value is not None:
                    kernel.metrics[name] = _base(value, units.get(name) or "")
        kernels.append(kernel)
    if not kernels:
        raise UsageError(f"{source} holds no profiled kernel")
    return kernels


def _number(cell: str) -> float | None:
    try:
        value = float(cell.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _base(value: float, unit: str) -> float:
    """A time in seconds, a size in bytes, anything else as it is."""
    return value * (SECONDS.get(unit) or BYTES.get(unit.lower()) or 1.0)


def summarise(kernels: Sequence[Kernel], key: str, calls: int) -> TraceSummary:
    """What the profiled kernels of ``calls`` calls say of a case."""
    out = TraceSummary("ncu", key, calls=calls)
    named: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        named.setdefault(kernel.name, []).append(kernel)
    rows = []
    for name, group in named.items():
        times = [k.metrics[TIME] for k in group if TIME in k.metrics]
        row: dict[str, Any] = {"name": name, "count": len(group), "total_s": math.fsum(times)}
        moved = _moved(group)
        metrics = {"occupancy": _weighted(group, OCCUPANCY)}
        stalls = {reason: _weighted(group, STALL.format(reason)) for reason in STALL_REASONS}
        found = sorted(((v, r) for r, v in stalls.items() if v), reverse=True)[:MOST_STALLS]
        metrics |= {f"stall {reason.replace('_', ' ')}": value for value, reason in found}
        extra = {} if moved is None else {"bytes": moved}
        rows.append(row | extra | {"metrics": {k: v for k, v in metrics.items() if v is not None}})
    out.keep("kernels", sorted(rows, key=lambda r: (-r["total_s"], r["name"])))
    whole = _moved(kernels)
    if whole is None:
        out.notes.append("DRAM bytes were not collected for every kernel: measured and ideal bytes cannot be compared")
    elif calls:
        out.measured_bytes = round(whole / calls)
    return out


def _moved(kernels: Sequence[Kernel]) -> int | None:
    """DRAM bytes read and written by all of them; None unless each has both figures."""
    if not kernels or not all(READ in k.metrics and WRITTEN in k.metrics for k in kernels):
        return None
    return round(math.fsum(k.metrics[READ] + k.metrics[WRITTEN] for k in kernels))


def _weighted(kernels: Sequence[Kernel], metric: str) -> float | None:
    """Mean of a metric by time; None unless every kernel has it and a time."""
    pairs = [(k.metrics.get(metric), k.metrics.get(TIME)) for k in kernels]
    known = [(v, t) for v, t in pairs if v is not None and t]
    if len(known) < len(pairs) or not known:
        return None
    return math.fsum(v * t for v, t in known) / math.fsum(t for _, t in known)

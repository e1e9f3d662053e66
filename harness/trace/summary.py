"""What a trace said about one case: the file that ``profile`` writes beside each trace and that reports read.

Torch-free. ``traces/<case>.<tool>.summary.json`` in a run folder; times in seconds, sizes in bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spikemark.harness.journal import StorageError, dumps, storage_error

SCHEMA = 1
SUFFIX = ".summary.json"
TOOLS = ("torch", "nsys", "ncu")
MOST_KERNELS = 40
MOST_SPANS = 600


@dataclass
class Timeline:
    """One measured call as a picture: ``lanes`` of ``(name, [[start_s, length_s, index into names], ...])``.

    ``left_out`` spans were too short to draw. ``memory`` are ``[time_s, bytes]`` of what the allocator held.
    """

    span_s: float
    names: list[str] = field(default_factory=list)
    lanes: list[tuple[str, list[list[float]]]] = field(default_factory=list)
    left_out: int = 0
    memory: list[list[float]] = field(default_factory=list)


@dataclass
class TraceSummary:
    """A trace of one case (``key``), or of a whole file made elsewhere (``key`` is empty).

    ``environment`` is the one of ``run.json`` that it was made in, where a folder has several of one device.

    ``wall_s`` are the measured calls, each until its last kernel has ended; ``busy_s`` of it something of ``kernels``
    ran. ``unit`` says what the kernels are: on a CPU they are torch's operators. ``kernels``, ``outside`` (in no
    measured call), ``copies`` and ``ranges`` (NVTX, of a whole file) are rows with ``name, count, total_s`` and what
    the tool knows besides: ``launch_s`` (median from launch to start), ``bytes``, ``metrics``. ``measured_bytes`` is
    DRAM traffic of one call.
    """

    tool: str
    key: str = ""
    title: str = ""
    environment: str = ""
    status: str = "ok"
    reason: str = ""
    files: list[dict[str, str]] = field(default_factory=list)
    unit: str = "kernel"
    calls: int = 0
    wall_s: float | None = None
    busy_s: float | None = None
    idle_s: float | None = None
    gap_s: float | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)
    kernels_left_out: int = 0
    outside: list[dict[str, Any]] = field(default_factory=list)
    copies: list[dict[str, Any]] = field(default_factory=list)
    ranges: list[dict[str, Any]] = field(default_factory=list)
    peak_bytes: int | None = None
    measured_bytes: int | None = None
    ideal_bytes: int | None = None
    moved_bytes: int | None = None
    timeline: Timeline | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def not_in_kernels(self) -> float | None:
        """Share of the measured calls' time in which no kernel ran; None if unknown."""
        if self.wall_s is None or self.busy_s is None or self.wall_s <= 0:
            return None
        return max(0.0, 1 - self.busy_s / self.wall_s)

    def keep(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Store the first ``MOST_KERNELS`` rows as ``kernels``, ``outside`` or ``copies`` and say how many are left."""
        setattr(self, name, rows[:MOST_KERNELS])
        left = len(rows) - MOST_KERNELS
        if name == "kernels":
            self.kernels_left_out = max(0, left)
        elif left > 0:
            what = {"outside": "names of what ran outside", "copies": "kinds of copies", "ranges": "names of ranges"}
            self.notes.append(f"{left:,} more {what[name]} are in the trace")


def stem(key: str) -> str:
    """A file name, short and unique, for a case's key."""
    safe = re.sub(r"[^A-Za-z0-9.-]+", "_", key).strip("_.") or "trace"
    return f"{safe[:100]}-{hashlib.sha256(key.encode('utf-8', 'replace')).hexdigest()[:8]}"


def path(folder: Path, tool: str, name: str) -> Path:
    """Where the summary of a case (its key), or of a file (its title), lies in the folder ``traces``."""
    return folder / f"{stem(name)}.{tool}{SUFFIX}"


def write(folder: Path, summary: TraceSummary) -> Path:
    """Write ``summary`` into the folder ``traces``; the file. Raises ``StorageError``."""
    where = path(folder, summary.tool, summary.key or summary.title)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        where.write_text(dumps({"schema": SCHEMA} | asdict(summary)) + "\n", encoding="utf-8")
    except OSError as error:
        raise storage_error(where, error) from None
    return where


def read_all(folder: Path) -> tuple[list[TraceSummary], list[str]]:
    """The summaries in a run folder's ``traces``, and the names of files that cannot be read as one."""
    found, damaged = [], []
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            found.append(_parse(json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            damaged.append(file.name)
    return found, damaged


def _parse(data: dict[str, Any]) -> TraceSummary:
    """A summary from JSON; raises the usual errors for anything else."""
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']!r}")
    known = {name: data[name] for name in TraceSummary.__dataclass_fields__ if name in data}
    timeline = known.pop("timeline", None)
    out = TraceSummary(**known)
    if timeline is not None:
        lanes = [(str(name), [[float(a), float(b), int(i)] for a, b, i in spans]) for name, spans in timeline["lanes"]]
        memory = [[float(t), float(b)] for t, b in timeline["memory"]]
        names = [str(name) for name in timeline["names"]]
        if any(not 0 <= span[2] < len(names) for _, spans in lanes for span in spans):
            raise ValueError("a span has no name")
        numbers = [value for _, spans in lanes for span in spans for value in span[:2]]
        if not all(math.isfinite(value) for value in [*numbers, *(v for point in memory for v in point)]):
            raise ValueError("a time or size in the timeline is no number")
        out.timeline = Timeline(float(timeline["span_s"]), names, lanes, int(timeline["left_out"]), memory)
    for name in ("tool", "key", "title", "environment", "status", "reason", "unit"):
        if not isinstance(getattr(out, name), str):
            raise TypeError(name)
    for name in ("wall_s", "busy_s", "idle_s", "gap_s", "peak_bytes", "measured_bytes", "ideal_bytes", "moved_bytes"):
        if not isinstance(getattr(out, name), (int, float, type(None))):
            raise TypeError(name)
    rows = [*out.kernels, *out.outside, *out.copies, *out.ranges]
    for row in rows:
        row["name"], row["count"], row["total_s"] = str(row["name"]), int(row["count"]), float(row["total_s"])
    out.files = [{"name": Path(str(f["name"])).name, "what": str(f["what"])} for f in out.files]
    out.notes = [str(note) for note in out.notes]
    return out


__all__ = ["SUFFIX", "TOOLS", "StorageError", "Timeline", "TraceSummary", "read_all", "stem", "write"]

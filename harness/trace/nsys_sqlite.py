"""Reads an Nsight Systems SQLite export: which kernels ran in which NVTX range, for how long, and what ran in none.

Torch-free. A kernel belongs to the ranges that were open when its launch was called: kernel and launch are joined by
process and correlation id, launch and range by time, in the launching thread for push/pop ranges and in the whole
process for start/end ranges. Nothing is counted off. Because launches are sorted by time a range's kernels are a slice,
so a million kernels in a hundred thousand ranges take seconds.

Times are nanoseconds since the session's start in arrays, seconds in results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from spikemark.harness.errors import UsageError
from spikemark.harness.trace import nsys_events
from spikemark.harness.trace.nsys_events import COPY, GRAPH, KERNEL, PUSH_POP, START_END, Activities, Ranges
from spikemark.harness.trace.nsys_tables import MISSING, Array, Names, Tables

KINDS = {PUSH_POP: "push/pop", START_END: "start/end"}
MAX_GATHERED = 64_000_000
"""Pairs of range and activity that are looked at for busy times; beyond it the ranges left are without them (noted)."""


@dataclass(frozen=True)
class RangeUse:
    """All ranges of one domain, name and kind. Seconds, bytes.

    ``wall_s`` is the host's, start to end. ``window_s`` goes on until the last thing launched inside has ended on the
    device; ``busy_s`` of it at least one kernel ran, ``idle_s`` of it neither kernel nor copy. The three are None
    where ranges overlap so much that they were not computed. ``gap_s`` is the part of the idle time that lies between
    two activities of a range.
    """

    domain: str
    name: str
    kind: str
    category: str
    count: int
    unclosed: int
    wall_s: float
    kernels: int
    kernel_s: float
    copies: int
    copy_s: float
    copy_bytes: int
    window_s: float | None
    busy_s: float | None
    idle_s: float | None
    gap_s: float | None
    index: int = field(compare=False, default=-1)


@dataclass(frozen=True)
class KernelUse:
    """All kernels (or copies) of one name. ``launch_s`` is the median from launching call to start, None if unknown."""

    name: str
    count: int
    total_s: float
    min_s: float
    median_s: float
    max_s: float
    launch_s: float | None
    bytes: int = 0


class Trace:
    """An export as read by ``read``. ``notes`` says in lines for a person what is missing or was left out."""

    def __init__(self, activities: Activities, ranges: Ranges, names: Names, facts: dict[str, str], notes: list[str]):
        self.activities, self.ranges, self.names, self.facts, self.notes = activities, ranges, names, facts, notes
        self.group_of: Array = np.empty(0, np.int64)
        """For each range the ``index`` of its group; made by ``groups``."""
        self._lane_of = np.full(len(ranges), -1)
        self._low, self._high = np.zeros(len(ranges), np.int64), np.zeros(len(ranges), np.int64)
        self._lane_list: list[Array] = []
        self._slice()

    @property
    def schema(self) -> str:
        """Version of the export's schema; '' where it does not say."""
        return self.facts.get("EXPORT_SCHEMA_VERSION", "")

    def _slice(self) -> None:
        """Each range's activities as a slice of its thread's, or its process's, activities in order of launch."""
        acts, ranges = self.activities, self.ranges
        local = (ranges.kind == PUSH_POP) & acts.joined.any()  # without launches nobody knows the thread
        owner = np.where(local, ranges.thread, ranges.process)
        keys = np.stack([local.astype(np.int64), owner], axis=1) if len(ranges) else np.empty((0, 2), np.int64)
        lanes, which = np.unique(keys, axis=0, return_inverse=True)
        which = which.reshape(-1)
        for number, (is_thread, who) in enumerate(lanes):
            inside = np.flatnonzero((acts.thread if is_thread else acts.process) == who)
            times = acts.launch[inside]
            mine = np.flatnonzero(which == number)
            self._lane_list.append(inside)
            self._lane_of[mine] = number
            self._low[mine] = np.searchsorted(times, ranges.start[mine], "left")
            self._high[mine] = np.searchsorted(times, ranges.end[mine], "right")
        self._high = np.maximum(self._low, self._high)

    def members(self, index: int) -> Array:
        """Positions of one range's activities."""
        if self._lane_of[index] < 0:
            return np.empty(0, np.int64)
        return self._lane_list[self._lane_of[index]][self._low[index] : self._high[index]]

    def _sums(self, values: Array) -> Array:
        """Sum of ``values`` (one an activity) over each range."""
        out = np.zeros(len(self.ranges), np.int64)
        for number, inside in enumerate(self._lane_list):
            total = np.concatenate([[0], np.cumsum(values[inside])])
            mine = self._lane_of == number
            out[mine] = total[self._high[mine]] - total[self._low[mine]]
        return out

    def _windows(self) -> tuple[Array, Array, Array, Array, Array]:
        """For each range in ns: known?, window, kernel time, time of anything, gaps between activities."""
        acts, ranges = self.activities, self.ranges
        sizes = self._high - self._low
        window = np.maximum(ranges.end - ranges.start, 0)
        busy, any_, gaps = (np.zeros(len(ranges), np.int64) for _ in range(3))
        affordable = np.cumsum(np.sort(sizes)) <= MAX_GATHERED
        known = np.zeros(len(ranges), bool)
        known[np.argsort(sizes, kind="stable")[affordable]] = True
        todo = np.flatnonzero(known & (sizes > 0))
        bounds = np.searchsorted(np.cumsum(sizes[todo]), np.arange(1, 2 + sizes[todo].sum() // (1 << 21)) * (1 << 21))
        for batch in np.split(todo, np.unique(bounds)):
            if not len(batch):
                continue
            segment, which = self._gather(batch)
            start, end, kernel = acts.start[which], acts.end[which], acts.kind[which] == KERNEL
            kernel |= acts.kind[which] == GRAPH
            last = np.full(len(batch), MISSING)
            np.maximum.at(last, segment, end)
            window[batch] = np.maximum(ranges.end[batch], last) - ranges.start[batch]
            busy[batch], _ = union(segment[kernel], start[kernel], end[kernel], len(batch))
            any_[batch], gaps[batch] = union(segment, start, end, len(batch))
        return known, window, busy, any_, gaps

    def _gather(self, batch: Array) -> tuple[Array, Array]:
        """(place in ``batch``, position of the activity) for every activity of the ranges in ``batch``."""
        sizes = self._high[batch] - self._low[batch]
        segment = np.repeat(np.arange(len(batch)), sizes)
        offset = np.arange(len(segment)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        where = np.repeat(self._low[batch], sizes) + offset
        out = np.empty(len(segment), np.int64)
        lane = np.repeat(self._lane_of[batch], sizes)
        for number in np.unique(lane):
            mine = lane == number
            out[mine] = self._lane_list[number][where[mine]]
        return segment, out

    def groups(self) -> list[RangeUse]:
        """Ranges of the same domain, name and kind together, those with most kernel time first."""
        ranges, acts = self.ranges, self.activities
        if not len(ranges):
            return []
        keys = np.stack([ranges.domain, ranges.name, ranges.kind], axis=1)
        found, self._first, self.group_of = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        self.group_of = self.group_of.reshape(-1)
        length = acts.end - acts.start
        is_kernel, is_copy = (acts.kind == KERNEL) | (acts.kind == GRAPH), acts.kind == COPY
        columns = [
            np.ones(len(ranges), np.int64), ~ranges.closed, np.maximum(ranges.end - ranges.start, 0),
            self._sums(is_kernel.astype(np.int64)), self._sums(np.where(is_kernel, length, 0)),
            self._sums(is_copy.astype(np.int64)), self._sums(np.where(is_copy, length, 0)),
            self._sums(np.where(is_copy, acts.bytes, 0)),
        ]  # fmt: skip
        known, window, busy, any_, gaps = self._windows()
        if not known.all():
            self._note(f"{int((~known).sum()):,} ranges overlap too much: without busy and idle times")
        sums = [np.bincount(self.group_of, c.astype(np.float64), len(found)) for c in columns]
        windows = [
            np.bincount(self.group_of, c.astype(np.float64), len(found)) for c in (window, busy, window - any_, gaps)
        ]
        unknown = np.bincount(self.group_of, ~known, len(found)) > 0
        out = []
        for i, (domain, name, kind) in enumerate(found):
            count, unclosed, wall, kernels, kernel_ns, copies, copy_ns, size = (float(s[i]) for s in sums)
            window_s, busy_s, idle_s, gap_s = (None if unknown[i] else float(w[i]) * 1e-9 for w in windows)
            out.append(
                RangeUse(
                    domain=self.names.texts[domain],
                    name=self.names.texts[name],
                    kind=KINDS[int(kind)],
                    category=ranges.category[self._first[i]],
                    count=int(count),
                    unclosed=int(unclosed),
                    wall_s=wall * 1e-9,
                    kernels=int(kernels),
                    kernel_s=kernel_ns * 1e-9,
                    copies=int(copies),
                    copy_s=copy_ns * 1e-9,
                    copy_bytes=int(size),
                    window_s=window_s,
                    busy_s=busy_s,
                    idle_s=idle_s,
                    gap_s=gap_s,
                    index=i,
                )
            )
        return sorted(out, key=lambda g: (-g.kernel_s, -g.wall_s, g.domain, g.name))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def within(self, group: RangeUse) -> Array:
        """Positions of the activities in any range of a group that ``groups`` gave, each once."""
        indices = np.flatnonzero(self.group_of == group.index)
        sizes = self._high[indices] - self._low[indices]
        kept = indices[np.cumsum(sizes) <= MAX_GATHERED]
        if len(kept) < len(indices):
            self._note(f"ranges {group.name!r} overlap too much: the kernel table has the first {len(kept):,} of them")
        return np.unique(self._gather(kept)[1])

    def outside(self, groups: Sequence[RangeUse] | None = None) -> Array:
        """Positions of the activities launched in no range at all, or in none of these ``groups``."""
        covered = np.zeros(len(self.activities), bool)
        chosen = np.ones(len(self.ranges), bool)
        if groups is not None:
            chosen = np.isin(self.group_of, [group.index for group in groups])
        for number, inside in enumerate(self._lane_list):
            mine = chosen & (self._lane_of == number)
            steps = np.zeros(len(inside) + 1, np.int64)
            np.add.at(steps, self._low[mine], 1)
            np.add.at(steps, self._high[mine], -1)
            covered[inside] |= np.cumsum(steps)[:-1] > 0
        return np.flatnonzero(~covered)

    def table(self, positions: Array, *kinds: int) -> list[KernelUse]:
        """Activities of these ``kinds`` (default: kernels and graphs) by name, most time first."""
        acts = self.activities
        chosen = positions[np.isin(acts.kind[positions], kinds or (KERNEL, GRAPH))]
        order = chosen[np.argsort(acts.name[chosen], kind="stable")]
        cuts = np.flatnonzero(np.diff(acts.name[order])) + 1
        out = []
        for part in np.split(order, cuts) if len(order) else []:
            length = (acts.end[part] - acts.start[part]) * 1e-9
            joined = part[acts.joined[part]]
            delay = float(np.median(acts.start[joined] - acts.launch[joined])) * 1e-9 if len(joined) else None
            spread = float(length.min()), float(np.median(length)), float(length.max())
            name = self.names.texts[acts.name[part[0]]]
            out.append(KernelUse(name, len(part), float(length.sum()), *spread, delay, int(acts.bytes[part].sum())))
        return sorted(out, key=lambda k: (-k.total_s, k.name))


def union(segment: Array, start: Array, end: Array, count: int) -> tuple[Array, Array]:
    """For each of ``count`` segments: length of the union of its intervals, and of the gaps between them."""
    if not len(segment):
        return np.zeros(count, np.int64), np.zeros(count, np.int64)
    order = np.lexsort((start, segment))
    segment, start, end = segment[order], start[order], end[order]
    # Segments are laid end to end on one time axis, so that one running maximum serves them all.
    origin = start.min()
    stride = end.max() - origin + 1
    shift = segment * stride - origin
    begin, finish = start + shift, end + shift
    reached = np.maximum.accumulate(finish)
    before = np.concatenate([[begin[0]], reached[:-1]])
    first = np.concatenate([[True], segment[1:] != segment[:-1]])
    before = np.where(first, begin, before)
    new = np.maximum(finish - np.maximum(begin, before), 0)
    gap = np.maximum(begin - before, 0)
    return tuple(np.bincount(segment, c.astype(np.float64), count).astype(np.int64) for c in (new, gap))  # type: ignore[return-value]


def read(path: str | Path) -> Trace:
    """Read an export made by any version of Nsight Systems.

    Raises ``UsageError``, one line, for a file that is no SQLite database or holds neither device activities nor NVTX
    ranges. Anything less is a partial result: see ``Trace.notes``.
    """
    tables = Tables(path)
    try:
        names = Names()
        activities = nsys_events.join(
            nsys_events.read_activities(tables, names), nsys_events.read_launches(tables), tables.notes
        )
        last = int(activities.end.max()) if len(activities) else 0
        ranges = nsys_events.read_ranges(tables, names, last, np.unique(activities.process))
        if not len(activities) and not len(ranges):
            said = f" ({tables.notes[0]})" if tables.notes else ""
            raise UsageError(f"{path} holds neither CUDA activities nor NVTX ranges: no Nsight Systems export?{said}")
        if not len(activities):
            tables.notes.append("no kernel, copy or graph was recorded: nothing ran on a GPU, or CUDA was not traced")
        if not len(ranges):
            tables.notes.append("no NVTX range was recorded: kernels cannot be assigned to cases")
        return Trace(activities, ranges, names, tables.facts(), tables.notes)
    finally:
        tables.close()

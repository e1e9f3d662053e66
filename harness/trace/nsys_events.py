"""Device activities and NVTX ranges of an Nsight Systems export as arrays, each activity joined to its launching call.

Torch-free. Kernel and launch are joined by process and correlation id. Times are nanoseconds since the session's start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from spikemark.harness.trace.nsys_tables import MISSING, Array, Names, Tables

KERNEL, COPY, SET, GRAPH = range(4)
TABLES = {
    KERNEL: "CUPTI_ACTIVITY_KIND_KERNEL",
    COPY: "CUPTI_ACTIVITY_KIND_MEMCPY",
    SET: "CUPTI_ACTIVITY_KIND_MEMSET",
    GRAPH: "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
}
RUNTIME, NVTX = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
CATEGORY_NAME, PUSH_POP, START_END, DOMAIN = 33, 59, 60, 75
COPY_KINDS = {
    0: "unknown", 1: "host to device", 2: "device to host", 8: "device to device", 9: "host to host",
    10: "device to another device",
}  # fmt: skip
THREAD_BITS = 0xFFFFFF  # a globalTid's lowest 24 bits are the thread; the rest is the process's globalPid
PAYLOADS = ("uint64Value", "int64Value", "uint32Value", "int32Value", "doubleValue", "floatValue")


@dataclass
class Activities:
    """What ran on devices, in order of launch; arrays of one length.

    ``launch`` is when the launching call began, ``joined`` whether that is known: otherwise it is the start on the
    device. ``names`` are codes, ``bytes`` 0 for kernels.
    """

    kind: Array
    start: Array
    end: Array
    launch: Array
    joined: Array
    process: Array
    thread: Array
    device: Array
    stream: Array
    name: Array
    bytes: Array

    def __len__(self) -> int:
        return len(self.kind)


@dataclass
class Ranges:
    """NVTX ranges; arrays of one length. ``closed`` is False where ``end`` is that of the whole trace instead."""

    kind: Array
    start: Array
    end: Array
    closed: Array
    process: Array
    thread: Array
    domain: Array
    name: Array
    category: list[str]
    payload: list[int | float | None]

    def __len__(self) -> int:
        return len(self.kind)


def read_activities(tables: Tables, names: Names) -> dict[str, Array]:
    """Columns of kernels, copies, memsets and graphs one after the other; rows that make no sense are noted."""
    optional = ("correlationId", "globalPid", "deviceId", "streamId", "bytes", "copyKind")
    parts = []
    for kind, table in TABLES.items():
        found = tables.integers(table, ("start", "end"), optional)
        found["kind"] = np.full(len(found["start"]), kind)
        found["name"] = _activity_names(tables, names, kind, found)
        negative = found["end"] < found["start"]
        if negative.any():
            tables.notes.append(f"{int(negative.sum()):,} rows of {table} end before they start: left out")
            found = {key: value[~negative] for key, value in found.items()}
        parts.append(found)
    return {key: np.concatenate([p[key] for p in parts]) for key in parts[0]}


def _activity_names(tables: Tables, names: Names, kind: int, found: dict[str, Array]) -> Array:
    """A code for each row's name; kernels have the full one where there is one."""
    if kind == COPY:
        known = {
            int(k): names.code(COPY_KINDS.get(int(k), f"copy of kind {int(k)}")) for k in np.unique(found["copyKind"])
        }
        known[int(MISSING)] = names.code("copy")
        return np.array([known[int(k)] for k in found["copyKind"]], np.int64)
    if kind == SET:
        return np.full(len(found["start"]), names.code("memset"))
    if kind == GRAPH:
        return np.full(len(found["start"]), names.code("CUDA graph (its kernels were not traced one by one)"))
    codes: dict[Any, int] = {}
    by_row: dict[int, int] = {}
    for rowid, full, short in tables.values(TABLES[KERNEL], "demangledName", "shortName"):
        value = full if full is not None else short
        if value not in codes:
            codes[value] = names.code(tables.text(value) or "(kernel without a name)")
        by_row[rowid] = codes[value]
    if not len(by_row):
        return np.empty(0, np.int64)
    rows = np.fromiter(by_row, np.int64, len(by_row))
    values = np.fromiter(by_row.values(), np.int64, len(by_row))
    unnamed = names.code("(kernel without a name)")
    place = np.minimum(np.searchsorted(rows, found["rowid"]), len(rows) - 1)
    return np.where(rows[place] == found["rowid"], values[place], unnamed)


def read_launches(tables: Tables) -> dict[str, Array]:
    """Calls that may have launched something: the outermost of those with one process and correlation id."""
    found = tables.integers(RUNTIME, ("start", "correlationId"), ("globalTid",))
    found["process"] = np.where(found["globalTid"] == MISSING, MISSING, found["globalTid"] & ~THREAD_BITS)
    order = np.argsort(found["start"], kind="stable")
    return {key: value[order] for key, value in found.items()}


def join(raw: dict[str, Array], launches: dict[str, Array], notes: list[str]) -> Activities:
    """Give each activity the time and thread of its launch."""
    count = len(raw["start"])
    process = raw["globalPid"]
    callers = np.unique(launches["process"])
    if (process == MISSING).any() and len(callers) == 1:  # an old schema, or one process: there is no doubt whose
        process = np.where(process == MISSING, callers[0], process)
    launch, thread, joined = raw["start"].copy(), np.full(count, MISSING), np.zeros(count, bool)
    if count and len(launches["start"]):
        pids = np.unique(np.concatenate([process, launches["process"]]))
        limit = (1 << 62) // len(pids)

        def keys(pid: Array, correlation: Array) -> Array:
            return correlation * len(pids) + np.searchsorted(pids, pid)

        usable = (raw["correlationId"] >= 0) & (raw["correlationId"] < limit) & (process != MISSING)
        of_calls = (launches["correlationId"] >= 0) & (launches["correlationId"] < limit)
        calls, first = np.unique(
            keys(launches["process"][of_calls], launches["correlationId"][of_calls]), return_index=True
        )
        starts, threads = launches["start"][of_calls][first], launches["globalTid"][of_calls][first]
        wanted = keys(process, np.where(usable, raw["correlationId"], 0))
        place = np.minimum(np.searchsorted(calls, wanted), max(len(calls) - 1, 0))
        if len(calls):
            joined = usable & (calls[place] == wanted)
            launch = np.where(joined, starts[place], launch)
            thread = np.where(joined, threads[place], thread)
    lost = int((~joined).sum())
    by_time = "by their time on the device, to ranges of the whole process only"
    if lost and lost == count:
        notes.append("launching calls were not recorded: kernels are assigned to ranges by their time on the device")
    elif lost:
        notes.append(f"{lost:,} activities have no launching call: assigned {by_time}")
    if count and (process == MISSING).any() and len(callers) > 1:
        notes.append("kernels do not tell their process, and there are several: they are in no range")
    order = np.argsort(launch, kind="stable")
    size = np.where(raw["bytes"] == MISSING, 0, raw["bytes"])
    columns = (raw["kind"], raw["start"], raw["end"], launch, joined, process, thread, raw["deviceId"], raw["streamId"])
    return Activities(*(c[order] for c in (*columns, raw["name"], size)))


def read_ranges(tables: Tables, names: Names, last: int, processes: Array) -> Ranges:
    """Push/pop and start/end ranges, with the names of their domains and categories.

    ``last`` is when the last activity ended, ``processes`` those of the activities.
    """
    found = tables.integers(NVTX, ("start", "eventType"), ("end", "globalTid", "domainId", "category"))
    chosen = (found["eventType"] == PUSH_POP) | (found["eventType"] == START_END)
    closed = found["end"] != MISSING
    negative = chosen & closed & (found["end"] < found["start"])
    if negative.any():
        tables.notes.append(f"{int(negative.sum()):,} NVTX ranges end before they start: left out")
    chosen &= ~negative
    texts = {row[0]: row[1:] for row in tables.values(NVTX, "text", "textId", *PAYLOADS)}
    only = processes[0] if len(processes) == 1 else MISSING
    process = np.where(found["globalTid"] == MISSING, only, found["globalTid"] & ~THREAD_BITS)
    domain_id = np.where(found["domainId"] == MISSING, 0, found["domainId"])
    rows = np.flatnonzero(chosen)
    open_ = int((~closed[rows]).sum())
    if open_:
        tables.notes.append(f"{open_:,} NVTX ranges were never closed: taken to last until the end of the trace")
    last = max([last, *(int(found[k].max()) for k in ("start", "end") if len(found[k]))])
    labels = _labels(tables, found, process, domain_id, texts)
    codes: dict[str, int] = {}
    name, domain = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    category, payload = [], []
    for i, row in enumerate(rows):
        text, text_id, *values = texts.get(int(found["rowid"][row]), (None,) * (2 + len(PAYLOADS)))
        said = text if text is not None else tables.text(text_id)
        name[i] = codes[said] if said in codes else codes.setdefault(said, names.code(said))
        where = (int(process[row]), int(domain_id[row]))
        domain[i] = names.code(labels.get((*where, None), f"domain {where[1]}" if where[1] else ""))
        number = int(found["category"][row])
        category.append(labels.get((*where, number), "" if number in (0, MISSING) else str(number)))
        payload.append(next((v for v in values if v is not None), None))
    end = np.where(closed, found["end"], last)
    thread = found["globalTid"][rows]
    return Ranges(
        found["eventType"][rows], found["start"][rows], end[rows], closed[rows], process[rows], thread,
        domain, name, category, payload,
    )  # fmt: skip


def _labels(
    tables: Tables, found: dict[str, Array], process: Array, domain_id: Array, texts: dict[int, Any]
) -> dict[tuple[int, int, int | None], str]:
    """Names of domains, by (process, domain id, None), and of categories, by (process, domain id, category).

    Two domains of one process that have the same name are kept apart: the second is ``name #2``.
    """
    labels: dict[tuple[int, int, int | None], str] = {}
    same: dict[tuple[int, str], list[int]] = {}
    for row in np.flatnonzero((found["eventType"] == DOMAIN) | (found["eventType"] == CATEGORY_NAME)):
        text, text_id, *_ = texts.get(int(found["rowid"][row]), (None, None))
        said = text if text is not None else tables.text(text_id)
        where = (int(process[row]), int(domain_id[row]))
        if found["eventType"][row] == CATEGORY_NAME:
            labels[(*where, int(found["category"][row]))] = said
            continue
        ids = same.setdefault((where[0], said), [])
        if where[1] not in ids:
            ids.append(where[1])
        labels[(*where, None)] = said if ids[0] == where[1] else f"{said} #{ids.index(where[1]) + 1}"
    for (_, said), ids in same.items():
        if len(ids) > 1:
            tables.notes.append(f"{len(ids)} domains have the name {said!r}: told apart as {said!r}, '{said} #2', ...")
    return labels

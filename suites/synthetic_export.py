"""Writes SQLite files like those that Nsight Systems exports, of any size; as a program it times how they are read.

``python -m spikemark.suites.synthetic_export FILE`` writes a million kernels in a hundred thousand ranges and prints
the seconds and the memory that reading took. (No test times this: speed figures in tests are flaky.)
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PROCESS = 0x1000000 * 4711
THREAD = PROCESS + 4711
_READ = """
import json, resource, sys, time
from pathlib import Path
from spikemark.harness.trace import nsys
start = time.perf_counter()
found = nsys.summarise_file(Path(sys.argv[1]))
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
count = lambda rows: sum(row["count"] for row in rows)
print(json.dumps({"seconds": seconds, "peak_bytes": peak, "cases": sum(bool(one.key) for one in found),
    "calls": sum(one.calls for one in found), "kernels in calls": sum(count(one.kernels) for one in found),
    "outside": sum(count(one.outside) for one in found), "notes": sorted({n for one in found for n in one.notes})}))
"""
"""Everything that ``spikemark profile --from`` does before it prints."""


class Export:
    """A file under construction; tables exist as soon as they get a row, as in real exports.

    ``text_names``: names of kernels and ranges are text in the rows themselves, not ids into ``StringIds``.
    """

    def __init__(self, path: str | Path, text_names: bool = False) -> None:
        self.connection = sqlite3.connect(path)
        self.connection.execute("PRAGMA journal_mode = OFF")
        self.text_names = text_names
        self._strings: dict[str, int] = {}
        self._columns: dict[str, list[str]] = {}

    def rows(self, table: str, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
        """Add rows; the first call for a table fixes its columns (those of its first row, unless given)."""
        rows = iter(rows)
        if table not in self._columns:
            first = next(rows, None)
            if first is None:
                return
            self._columns[table] = list(columns or first)
            self.connection.execute(f"CREATE TABLE {table} ({', '.join(self._names(table))})")
            self._insert(table, [first])
        self._insert(table, rows)

    def _names(self, table: str) -> list[str]:
        return [f'"{name}"' for name in self._columns[table]]

    def _insert(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        names = self._columns[table]
        marks = ", ".join("?" * len(names))
        values = (tuple(row.get(name) for name in names) for row in rows)
        self.connection.executemany(f"INSERT INTO {table} VALUES ({marks})", values)

    def name(self, text: str) -> int | str:
        """``text`` as rows refer to it."""
        if self.text_names:
            return text
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self.rows("StringIds", [{"id": self._strings[text], "value": text}])
        return self._strings[text]

    def range(self, name: str, start: int, end: int | None, **more: Any) -> dict[str, Any]:
        """A row of ``NVTX_EVENTS``: push/pop in the default domain unless ``more`` says otherwise."""
        said = self.name(name)
        row: dict[str, Any] = {"start": start, "end": end, "eventType": 59, "category": None, "globalTid": THREAD}
        row |= {"text": None if isinstance(said, int) else said, "textId": said if isinstance(said, int) else None}
        return row | {"domainId": 0, "int64Value": None} | more

    def domain(self, name: str, number: int, **more: Any) -> dict[str, Any]:
        """The row of ``NVTX_EVENTS`` that names a domain."""
        return self.range(name, 0, None, eventType=75, domainId=number, **more)

    def kernel(self, name: str, start: int, end: int, correlation: int, **more: Any) -> dict[str, Any]:
        """A row of the kernel table."""
        said = self.name(name)
        row: dict[str, Any] = {"start": start, "end": end, "deviceId": 0, "contextId": 1, "streamId": 7}
        row |= {"correlationId": correlation, "globalPid": PROCESS, "demangledName": said, "shortName": said}
        return row | more

    def launch(self, start: int, end: int, correlation: int, **more: Any) -> dict[str, Any]:
        """A row of the table of CUDA calls."""
        row = {"start": start, "end": end, "globalTid": THREAD, "correlationId": correlation, "nameId": 1}
        return row | more

    def close(self) -> None:
        """Write everything."""
        self.connection.commit()
        self.connection.close()


def build(path: str | Path, kernels: int, ranges: int) -> None:
    """``kernels`` kernels, launched in ``ranges`` measured ranges of 1000 cases, a tenth of them outside any."""
    export = Export(path)
    step, every = 10_000, max(1, kernels // ranges)
    names = [f"void kernel_{i}<float>(float const*, float*, int)" for i in range(50)]
    spikemark = export.domain("spikemark", 1)

    def range_rows() -> Iterable[dict[str, Any]]:
        yield spikemark
        for i in range(ranges):
            start = i * every * step
            end = start + int(0.85 * every * step)
            name = f"measure cold case/{i * 1000 // ranges}"
            yield export.range(name, start, end, eventType=60, domainId=1, int64Value=i, category=4)

    export.rows("NVTX_EVENTS", range_rows())
    runtime = (export.launch(i * step, i * step + 3000, i + 1) for i in range(kernels))
    export.rows("CUPTI_ACTIVITY_KIND_RUNTIME", runtime)
    ran = (export.kernel(names[i % 50], i * step + 4000, i * step + 9000, i + 1) for i in range(kernels))
    export.rows("CUPTI_ACTIVITY_KIND_KERNEL", ran)
    export.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Build a big export and read it in a fresh process; prints what that cost."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--ranges", type=int, default=100_000)
    given = parser.parse_args(arguments)
    build(given.file, given.kernels, given.ranges)
    done = subprocess.run([sys.executable, "-c", _READ, str(given.file)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    size = f"{given.file.stat().st_size / 1e6:.0f} MB"
    print(f"{size}: read in {found.pop('seconds'):.1f} s with {found.pop('peak_bytes') / 1e9:.2f} GB; {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

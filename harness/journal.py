"""The journal of a run (``cases.jsonl``): one JSON line a finished case, on disk before the next case starts.

Torch-free. JSON has no NaN and no infinity: a float that is not finite is written as the string ``"NaN"``,
``"Infinity"`` or ``"-Infinity"``, so any JSON reader takes the file, and ``read`` makes floats of them again
in the fields that hold numbers. A line that was cut (kill -9, full disk) is skipped and counted.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spikemark.harness.errors import UsageError
from spikemark.harness.records import SCHEMA_VERSION, STATUSES, Record

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NUMBER_FIELDS = (
    "spike_rate samples warm_samples call_samples first_call_s memory verification cost started_s elapsed_s details"
).split()
_SAMPLE_FIELDS = ("samples", "warm_samples", "call_samples")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "pass_index": int,
    "reason": str,
    "memory": dict,
    "verification": dict,
    "cost": dict,
    "stop": str,
    "flags": list,
    "environment": str,
    "details": dict,
    "spike_rate": (float, int, type(None)),
    "first_call_s": (float, int, type(None)),
}


class StorageError(UsageError):
    """The run folder cannot be written (full disk, no permission). What was written before is intact."""


def storage_error(path: Path, error: OSError) -> StorageError:
    """``error`` as one line that names the file's last part and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageError(
            f"no space left to write {path}: free some and continue with --resume; earlier rows are kept"
        )
    return StorageError(f"cannot write {path}: {error.strerror or error}")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {k: _restored(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_restored(v) for v in value]
    return value


def dumps(value: Any, indent: int | None = None) -> str:
    """``value`` as standard JSON; floats that are not finite become strings (see the module's docstring)."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _parse_record(data: dict[str, Any], line: str) -> Record:
    if "NaN" in line or "Infinity" in line:
        data = data | {k: _restored(data[k]) for k in _NUMBER_FIELDS if k in data}
    record = Record.from_json(data)
    if record.status not in STATUSES:
        raise ValueError(f"unknown status {record.status!r}")
    for name, kind in _TYPES.items():
        if not isinstance(getattr(record, name), kind):
            raise TypeError(f"{name} is not {kind}")
    for name in _SAMPLE_FIELDS:
        values = getattr(record, name)
        if not isinstance(values, list) or not {type(v) for v in values} <= {float, int}:
            raise TypeError(f"{name} is no list of numbers")
    return record


@dataclass
class Contents:
    """What a journal holds: records and calibrations in file order, and how many lines could not be read."""

    records: list[Record] = field(default_factory=list)
    calibrations: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0


def read(path: Path) -> Contents:
    """Read a journal; a missing file is an empty one. Unreadable lines are counted, not raised.

    Raises ``UsageError`` naming file, line and number for a schema this version does not read.
    """
    out = Contents()
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    _read_line(raw, path, number, out)
    except FileNotFoundError:
        return out
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    return out


def _read_line(raw: bytes, path: Path, number: int, out: Contents) -> None:
    try:
        line = raw.decode("utf-8")
        data = json.loads(line)
        kind = data["kind"]
    except (ValueError, KeyError, TypeError, RecursionError):
        out.damaged += 1
        return
    schema = data.get("schema")
    if schema != SCHEMA_VERSION:
        raise UsageError(f"{path} line {number} has schema {schema!r}; this version reads schema {SCHEMA_VERSION}")
    try:
        if kind == "record":
            out.records.append(_parse_record(data, line))
        elif kind == "calibration":
            out.calibrations.append(_parse_calibration(data))
        else:
            out.damaged += 1
    except (ValueError, KeyError, TypeError, AttributeError):
        out.damaged += 1


def _parse_calibration(data: dict[str, Any]) -> dict[str, Any]:
    samples = data["samples"]
    if not isinstance(samples, list) or not {type(v) for v in samples} <= {float, int}:
        raise TypeError("samples is no list of numbers")
    if not isinstance(data["pass_index"], int) or not isinstance(data["environment"], str):
        raise TypeError("pass_index or environment")
    if not isinstance(data["copy_bytes_per_s"], (int, float)):
        raise TypeError("copy_bytes_per_s")
    return data


def _lock(fd: int, path: Path) -> None:
    """One writer a journal; the lock goes with the process, so a killed run leaves none behind."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UsageError(f"another run is writing to {path.parent} now: wait for it or choose another --out") from None


class JournalWriter:
    """Appends lines to a journal, each on disk (fsync) before ``append`` returns.

    A line that an earlier process left cut is closed with a newline first, so that it spoils no other.
    Raises ``StorageError`` when the disk is full or the file cannot be written; a half-written line is removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            _lock(self._fd, path)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                self._write(b"\n", size)
        except OSError as error:
            raise storage_error(path, error) from None

    def append(self, data: dict[str, Any]) -> None:
        """Write ``data`` as one line and wait until the disk has it."""
        line = (dumps(data) + "\n").encode("utf-8", "backslashreplace")
        try:
            self._write(line, os.fstat(self._fd).st_size)
        except OSError as error:
            raise storage_error(self.path, error) from None

    def extend(self, lines: Iterable[dict[str, Any]]) -> None:
        """Write many lines and wait once."""
        try:
            for data in lines:
                self._put((dumps(data) + "\n").encode("utf-8", "backslashreplace"))
            os.fsync(self._fd)
        except OSError as error:
            raise storage_error(self.path, error) from None

    def _put(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._fd, left) :]

    def _write(self, data: bytes, size_before: int) -> None:
        try:
            self._put(data)
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, size_before)
            raise

    def close(self) -> None:
        """Close the file; more than once is once."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

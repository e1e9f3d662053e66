"""The run folder: create it, add a finished case, finish it, read it back.

Torch-free. ``run.json`` says what was asked for and where it ran, ``cases.jsonl`` is the journal (see
``journal``), ``benchmarks.json`` and ``results.csv`` are derived from it by ``finish``, ``logs/`` holds what workers
printed and ``traces/`` what ``profile`` collected. No host name, user name or absolute path is stored.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

from spikemark.harness import journal, results
from spikemark.harness.errors import UsageError
from spikemark.harness.journal import StorageError, dumps, storage_error
from spikemark.harness.records import SCHEMA_VERSION, Record
from spikemark.harness.results import JOURNAL, RESULTS_CSV

__all__ = ["JOURNAL", "Run", "RunFolder", "StorageError", "new_meta"]

RUN_JSON = "run.json"
BENCHMARKS_JSON = "benchmarks.json"
CALIBRATION = {"kind": "calibration", "schema": SCHEMA_VERSION}


def now() -> str:
    """This moment in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def without_folders(argument: str) -> str:
    """A command-line word with absolute paths cut to their last part: they tell who ran where.

    ``--out=/home/me/runs/a`` -> ``--out=a``, ``-o/home/me/runs/a`` -> ``-oa``; relative paths and everything else stay.
    """
    if argument[:1] == "-" and argument[1:2].isalpha() and PurePath(argument[2:]).is_absolute():
        return argument[:2] + PurePath(argument).name
    option, equals, value = argument.partition("=")
    if option.startswith("-") and equals:
        return f"{option}={without_folders(value)}"
    return PurePath(argument).name if PurePath(argument).is_absolute() else argument


def new_meta(
    arguments: list[str],
    *,
    seed: int,
    preset: str,
    passes: int,
    planned: int,
    environments: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A fresh ``run.json``: what was asked for (argv after ``spikemark``), started now, not yet ended."""
    from spikemark import __version__

    return {
        "schema": SCHEMA_VERSION,
        "id": secrets.token_hex(8),
        "spikemark": __version__,
        "arguments": [without_folders(a) for a in arguments],
        "seed": seed,
        "preset": preset,
        "passes": passes,
        "started": now(),
        "ended": None,
        "interrupted": False,
        "environments": environments or {},
        "selftest": None,
        "planned": planned,
        "unmeasured": [],
    }


@dataclass
class Run:
    """A run folder as read: its ``run.json``, records and calibrations in journal order.

    ``damaged`` counts journal lines that could not be read (cut by a kill or a full disk).
    """

    path: Path
    meta: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    calibrations: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0

    @property
    def variants(self) -> list[str]:
        """Labels of the code versions an A/B run measured, in order of appearance; empty for a plain run."""
        labels = (r.details.get("variant") for r in self.records)
        return list(dict.fromkeys(label for label in labels if label))

    def only_variant(self, label: str) -> Run:
        """The records and calibrations of one code version of an A/B run, as a run of its own."""
        records = [r for r in self.records if r.details.get("variant") == label]
        calibrations = [c for c in self.calibrations if c.get("variant") == label]
        return replace(self, records=records, calibrations=calibrations)


def _write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader, or a kill at any moment, sees the old content or the new, never half of it."""
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # on a read-only file system that fails too
            temporary.unlink(missing_ok=True)
        raise storage_error(path, error) from None


def read_meta(path: Path) -> dict[str, Any]:
    """``run.json`` of the run folder ``path``, absent fields filled in. Raises as ``RunFolder.load`` does."""
    file = path / RUN_JSON
    if not path.exists():
        raise UsageError(f"run folder {path} does not exist")
    if not path.is_dir():
        raise UsageError(f"{path} is a file, not a run folder")
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} is no run folder: it has no {RUN_JSON}") from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{file} is not valid JSON") from None
    if not isinstance(meta, dict) or "schema" not in meta:
        raise UsageError(f"{file} is not a run description: it has no schema number")
    if meta["schema"] != SCHEMA_VERSION:
        raise UsageError(f"{file} has schema {meta['schema']!r}; this version reads schema {SCHEMA_VERSION}")
    return _checked_meta(meta, file)


def _checked_meta(meta: dict[str, Any], file: Path) -> dict[str, Any]:
    """``meta`` with absent fields filled in; a field of the wrong type is refused by name."""
    blank = new_meta([], seed=0, preset="", passes=0, planned=0) | {"id": None, "started": None}
    meta = blank | meta
    wanted: dict[str, type] = {"arguments": list, "seed": int, "preset": str, "passes": int, "environments": dict}
    wanted |= {"planned": int, "unmeasured": list, "interrupted": bool}
    for name, kind in wanted.items():
        if not isinstance(meta[name], kind):
            raise UsageError(f"{file}: {name} is not a {kind.__name__}")
    if not isinstance(meta["id"], (str, type(None))):
        raise UsageError(f"{file}: id is not a str")
    if not all(isinstance(e, dict) for e in meta["environments"].values()):
        raise UsageError(f"{file}: environments does not hold one description a device")
    if "parts" in meta:
        meta["parts"] = [_checked_part(part, file) for part in _list(meta["parts"])]
    return meta


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _checked_part(part: Any, file: Path) -> dict[str, Any]:
    """A description of one of the runs that a folder was merged from."""
    if not isinstance(part, dict) or not all(isinstance(part.get(name), str) for name in ("id", "name")):
        raise UsageError(f"{file}: parts does not hold one description a run")
    return _checked_meta({k: v for k, v in part.items() if k != "parts"}, file)


def refuse_taken(path: Path, other_way: str = "") -> None:
    """Raise ``UsageError`` if a new run cannot be made at ``path``; ``other_way`` is what else to do with a run."""
    try:
        if (path / RUN_JSON).is_file():
            raise UsageError(f"{path} already holds a run: choose another --out{other_way}")
        if path.is_dir() and any(path.iterdir()):
            raise UsageError(f"{path} exists and is no run folder: choose another --out")
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file, not a folder: choose another --out")
    except OSError as error:
        raise storage_error(path, error) from None


class RunFolder:
    """A run folder open for writing. Make one with ``create`` or ``reopen``; read one with ``load``."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self._journal = journal.JournalWriter(path / JOURNAL)

    @classmethod
    def create(cls, path: str | Path, meta: dict[str, Any]) -> RunFolder:
        """Make the folder (parents too) and its ``run.json``; an existing empty folder is used.

        Raises ``UsageError`` if it holds a run already, holds anything else, or cannot be written.
        """
        path = Path(path)
        refuse_taken(path, ", or continue it with --resume")
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "logs").mkdir(exist_ok=True)
            (path / "traces").mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(path, error) from None
        try:
            _write_atomically(path / RUN_JSON, dumps(meta, indent=1) + "\n")
        except StorageError as error:  # it is no run yet, and must not be in the way of the next attempt
            for folder in (path / "logs", path / "traces", path):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise StorageError(str(error).partition(": free some")[0]) from None
        return cls(path, meta)

    @classmethod
    def reopen(cls, path: str | Path) -> tuple[RunFolder, Run]:
        """Open an existing run to add to it (``--resume``), and what it holds so far. Raises as ``load`` does."""
        run = cls.load(path)
        return cls(run.path, run.meta), run

    @staticmethod
    def load(path: str | Path) -> Run:
        """Read a run folder. Raises ``UsageError``, one line, for something that is no run or of another schema."""
        path = Path(path)
        meta = read_meta(path)
        found = journal.read(path / JOURNAL)
        return Run(path, meta, found.records, found.calibrations, found.damaged)

    def append(self, record: Record) -> None:
        """Add a finished case; it is on disk when this returns. Raises ``StorageError`` on a full disk."""
        self._journal.append(_line(record))

    def append_calibration(self, calibration: dict[str, Any]) -> None:
        """Add one pass's calibration of one device (fields: see the module ``records`` and the design)."""
        self._journal.append(CALIBRATION | calibration)

    def extend(self, calibrations: Iterable[dict[str, Any]], records: Iterable[Record]) -> None:
        """Add what other folders hold; all of it is on disk when this returns."""
        self._journal.extend(itertools.chain((CALIBRATION | c for c in calibrations), map(_line, records)))

    def new_log(self, stem: str) -> Path:
        """A file in ``logs/`` with a name that is free: no run, resumed or not, overwrites what a process printed."""
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in stem)
        folder = self.path / "logs"
        folder.mkdir(exist_ok=True)
        taken = {p.name for p in folder.iterdir()}
        return folder / next(n for i in range(len(taken) + 1) if (n := f"{safe}-{i}.log") not in taken)

    def update(self, **changes: Any) -> None:
        """Change fields of ``run.json``, at once and whole."""
        self.meta.update(changes)
        _write_atomically(self.path / RUN_JSON, dumps(self.meta, indent=1) + "\n")

    def finish(self, **changes: Any) -> Run:
        """Close the journal, mark the run ended (and ``changes``), write ``benchmarks.json`` and ``results.csv``.

        Returns the run as read back from disk, so what is derived is derived from what is stored.
        """
        self.close()
        self.update(**({"ended": now()} | changes))
        state = results.state(self.path)
        run = self.load(self.path)
        write_derived(run)
        self.update(derived=results.stamp(run, state))
        run.meta["derived"] = self.meta["derived"]
        return run

    def close(self) -> None:
        """Close the journal; more than once is once."""
        self._journal.close()


def _line(record: Record) -> dict[str, Any]:
    """A record as the journal has it; of a recording's file the name, not the folder."""
    data = {"kind": "record"} | record.to_json()
    recording = data["case"]["problem"].get("recording")
    if recording:
        recording["path"] = PurePath(recording["path"]).name
    return data


def write_derived(run: Run) -> None:
    """(Re)write ``benchmarks.json`` and ``results.csv`` of ``run`` from its journal."""
    from spikemark.harness.benchmarks_json import benchmarks_json

    _write_atomically(run.path / BENCHMARKS_JSON, dumps(benchmarks_json(run)) + "\n")
    _write_atomically(run.path / RESULTS_CSV, results.results_csv(run))

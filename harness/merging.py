"""Several runs as one: the same measurement counts once, passes add up, environments that differ stay apart.

Torch-free. A *part* is a run as it was made, with an identifier of its own; a folder made of several keeps what each
part's ``run.json`` said in ``parts``, and every record says in ``details["origin"]`` which part and pass it is from.

* The same pass of the same case of the same part is one measurement, however often it is met: in a copy of a folder,
  or in a folder merged before. If two of them differ, that is a conflict, and nothing is joined.
* Parts measured by the same device and the same code (``MUST_MATCH_IN_ONE_RUN``) add up: each is more passes. Passes
  of different parts get different numbers, so that nothing is paired that was not measured side by side.
* Anything else is another environment of the one run: ``cpu``, ``cpu (2)``. Its rows stay apart.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spikemark.harness.carry import carry
from spikemark.harness.errors import UsageError
from spikemark.harness.journal import dumps, storage_error
from spikemark.harness.parts import (
    Part,
    base_key,
    common_arguments,
    device_of,
    free_key,
    log_name,
    missing,
    origin,
    origin_of,
    parts,
    run_id,
    same_environment,
    times,
)
from spikemark.harness.records import SCHEMA_VERSION, UNMEASURED, Record
from spikemark.harness.runfolder import Run, RunFolder, StorageError, refuse_taken


@dataclass
class Joined:
    """``run`` is all runs as one; ``places[i]`` maps environments of the i-th run to those of ``run``.

    ``twice`` counts records that were met more than once.
    """

    run: Run
    places: list[dict[str, str]]
    twice: int = 0


def join(runs: Sequence[Run], names: Sequence[str] | None = None) -> Joined:
    """All ``runs`` as one, in memory; ``names`` is what to call them (default: their folders). One run stays as it is.

    Raises ``UsageError`` naming the first case for records that claim to be the same measurement and differ.
    """
    if len(runs) == 1:
        keys = dict.fromkeys([*runs[0].meta.get("environments", {}), *_used(runs[0])])
        return Joined(runs[0], [{key: key for key in keys}])
    work = _Join()
    called = list(names or [run.path.name for run in runs])
    places = [work.add(run, name) for run, name in zip(runs, called, strict=True)]
    work.refuse_conflicts()
    return Joined(Run(runs[0].path, work.meta(), work.records, work.calibrations), places, work.twice)


def _used(run: Run) -> list[str]:
    """Keys of environments that records and calibrations name, in order."""
    of_records = (r.environment or r.case.device for r in run.records)
    return list(dict.fromkeys([*of_records, *(str(c["environment"]) for c in run.calibrations)]))


def merge(paths: Sequence[str | Path], out: str | Path) -> Joined:
    """Join the run folders ``paths`` into a new one at ``out``, with their logs and traces; what was joined.

    Raises ``UsageError`` for fewer than two, for one given twice, for what is no run, for a conflict (see ``join``) and
    for a place that is taken, ``StorageError`` where it cannot be written. In each case nothing is left at ``out``.
    """
    out = Path(out)
    if len(paths) < 2:
        raise UsageError(f"merge needs two run folders or more, got {len(paths)}")
    refuse_twice(paths)
    refuse_taken(out)
    runs = [RunFolder.load(path) for path in paths]
    joined = join(runs, labels(paths))
    place = out.parent / f".{out.name}-{secrets.token_hex(4)}"  # it appears whole or not at all
    try:
        folder = RunFolder.create(place, joined.run.meta)
        try:
            folder.extend(joined.run.calibrations, joined.run.records)
            for run, places in zip(runs, joined.places, strict=True):
                carry(run, places, place)
            folder.finish(ended=joined.run.meta["ended"])
        finally:
            folder.close()
        place.replace(out)
    except BaseException as error:
        shutil.rmtree(place, ignore_errors=True)
        if isinstance(error, StorageError):
            raise StorageError(str(error).partition(": free some")[0].replace(f"{place}", f"{out}")) from None
        if isinstance(error, OSError):
            raise storage_error(out, error) from None
        raise
    return replace(joined, run=replace(joined.run, path=out))


def refuse_twice(paths: Sequence[str | Path]) -> None:
    """Raise ``UsageError`` naming the first of ``paths`` that is given twice."""
    resolved = [Path(path).resolve() for path in paths]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise UsageError(f"run folder {paths[index]} is given twice")


def labels(paths: Sequence[str | Path]) -> list[str]:
    """Folder names, numbered where two are the same."""
    names = [Path(path).resolve().name for path in paths]
    return [f"{n} ({names[:i].count(n) + 1})" if n in names[:i] else n for i, n in enumerate(names)]


@dataclass
class _Join:
    """The joined run while it grows."""

    calibrations: list[dict[str, Any]] = field(default_factory=list)
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    twice: int = 0
    _parts: dict[str, Part] = field(default_factory=dict)
    _passes: dict[tuple[str, str, int], int] = field(default_factory=dict)
    _taken: dict[str, set[int]] = field(default_factory=dict)
    _seen: dict[tuple[Any, ...], tuple[Record, str]] = field(default_factory=dict)
    _lines: set[tuple[Any, ...]] = field(default_factory=set)
    _conflicts: list[tuple[Record, str, str, str]] = field(default_factory=list)

    def add(self, run: Run, name: str) -> dict[str, str]:
        """Take in one run; where its environments are now."""
        own = run_id(run)
        places = self._place(run)
        for part in parts(run, name):
            self._add_part(part, places)
        self._number_passes(run, own, places)
        latest: dict[tuple[Any, ...], Record] = {}
        for record in run.records:
            moved = self._moved(record, own, places)
            told = moved.details["origin"]
            variant = moved.details.get("variant") or ""
            latest[told["run"], told["pass"], moved.environment, variant, moved.case.key] = moved
        for identity, record in latest.items():
            self._add_record(identity, record, name)
        for line in run.calibrations:
            self._add_calibration(line, own, places)
        return places

    def _place(self, run: Run) -> dict[str, str]:
        """Each environment of ``run`` -> one that is the same, or a new one. Two of one run are never the same."""
        described: dict[str, Any] = run.meta.get("environments") or {}
        places: dict[str, str] = {}
        for key in dict.fromkeys([*described, *_used(run)]):
            found = described.get(key) or {}
            alike = (
                k
                for k, known in self.environments.items()
                if base_key(k) == base_key(key) and k not in places.values() and same_environment(known, found)
            )
            place = next(alike, None)
            if place is None:
                place = free_key(key, self.environments)
                self.environments[place] = found
            places[key] = place
        return places

    def _add_part(self, part: Part, places: dict[str, str]) -> None:
        moved, lost = (
            {places.get(key, key): value for key, value in (part.get(name) or {}).items()}
            for name in ("environments", "lost")
        )
        part = part | ({"lost": lost} if lost else {})
        before = self._parts.get(part["id"])
        if before is None or str(part.get("ended") or "") > str(before.get("ended") or ""):
            name = part["name"] if before is None else before["name"]
            self._parts[part["id"]] = part | {"name": name, "environments": moved}
        self._parts[part["id"]]["environments"] = (before or {}).get("environments", {}) | moved

    def _number_passes(self, run: Run, own: str, places: dict[str, str]) -> None:
        """Give every pass of every part a number of its own on its device: its own number, or the next one free.

        The versions of an A/B run are measured in turns in one pass, so they keep one number.
        """
        told = [(*origin(r, own), r.environment or r.case.device) for r in run.records]
        told += [(*origin_of(c.get("origin"), own, c["pass_index"]), str(c["environment"])) for c in run.calibrations]
        groups: dict[tuple[str, str], dict[int, set[str]]] = {}
        for part, number, key in told:
            groups.setdefault((part, device_of(key)), {}).setdefault(number, set()).add(places[key])
        for group, passes in groups.items():
            for number, keys in sorted(passes.items()):
                taken = set[int]().union(*(self._taken.get(key, set()) for key in keys))
                free = number if number not in taken else max(taken) + 1
                index = self._passes.setdefault((*group, number), free)
                for key in keys:
                    self._taken.setdefault(key, set()).add(index)

    def _moved(self, record: Record, own: str, places: dict[str, str]) -> Record:
        part, number = origin(record, own)
        key = record.environment or record.case.device
        details = record.details | {"origin": {"run": part, "pass": number}}
        if "log" in details and "origin" not in record.details:
            details["log"] = log_name(part, str(details["log"]))
        index = self._passes[part, device_of(key), number]
        return replace(record, pass_index=index, environment=places[key], details=details)

    def _add_record(self, identity: tuple[Any, ...], record: Record, name: str) -> None:
        before = self._seen.get(identity)
        if before is None or before[0].details.get(UNMEASURED):
            self._seen[identity] = (record, name)
        elif _content(before[0]) == _content(record):
            self.twice += 1
        elif not record.details.get(UNMEASURED):
            self._conflicts.append((record, before[1], name, identity[0]))

    def _add_calibration(self, line: dict[str, Any], own: str, places: dict[str, str]) -> None:
        part, number = origin_of(line.get("origin"), own, line["pass_index"])
        key = str(line["environment"])
        plain = {k: v for k, v in line.items() if k not in ("origin", "pass_index", "environment")}
        identity = (part, number, places[key], dumps(plain))
        if identity not in self._lines:
            self._lines.add(identity)
            index = self._passes[part, device_of(key), number]
            moved = {"pass_index": index, "environment": places[key], "origin": {"run": part, "pass": number}}
            self.calibrations.append(line | moved)

    @property
    def records(self) -> list[Record]:
        """All records, in the order first seen. A row that only says that a device was lost yields to any other."""
        every = [record for record, _ in self._seen.values()]
        told = {_row(record) for record in every if not record.details.get(UNMEASURED)}
        return [r for r in every if not r.details.get(UNMEASURED) or _row(r) not in told]

    def refuse_conflicts(self) -> None:
        """Raise ``UsageError`` if two records claim to be one measurement and differ."""
        if not self._conflicts:
            return
        record, one, other, part = self._conflicts[0]
        number = record.details["origin"]["pass"] + 1
        started = self._parts[part].get("started") or "at an unknown time" if part in self._parts else "elsewhere"
        more = f", and {len(self._conflicts) - 1} more" if len(self._conflicts) > 1 else ""
        raise UsageError(
            f"conflict: {one} and {other} both hold pass {number} of {record.case.key} of the run started {started}, "
            f"and they differ{more}: one folder was changed, or both continued the same run; nothing was written"
        )

    def meta(self) -> dict[str, Any]:
        """``run.json`` of the joined run."""
        every = list(self._parts.values())
        first = every[0]
        arguments = common_arguments(every, dict.fromkeys(device_of(key) for key in self.environments))
        starts, ends = ([str(p[n]) for p in every if p.get(n)] for n in ("started", "ended"))
        baselines, lost = dict[str, str](), dict[str, str]()
        for part in every:
            baselines |= part.get("baselines") or {}
            lost |= part.get("lost") or {}
        records = self.records
        versions = list(dict.fromkeys(str(p.get("spikemark")) for p in every))
        out: dict[str, Any] = {
            "schema": SCHEMA_VERSION,
            "id": secrets.token_hex(8),
            "spikemark": versions[0] if len(versions) == 1 else ", ".join(versions),
            "arguments": arguments or [],
            "seed": first.get("seed", 0),
            "preset": str(first.get("preset") or "") if len({p.get("preset") for p in every}) == 1 else "",
            "passes": max((len(taken) for taken in self._taken.values()), default=0),
            "started": min(starts, default=None),
            "ended": max(ends, default=None),
            "interrupted": any(p.get("interrupted") or not p.get("ended") for p in every),
            "environments": self.environments,
            "selftest": None,
            "unmeasured": [],
            "baselines": baselines,
            "time": times(every),
            "parts": every,
        }
        if arguments and "options" in first:
            out["options"] = first["options"]
        refs = [p["ab"] for p in every if p.get("ab")]
        if refs and all(ref == refs[0] for ref in refs):
            out["ab"] = refs[0]
        if lost:
            out["lost"] = lost
        out["unmeasured"] = missing(Run(Path(), out, records))
        rows = {(r.environment, r.case.key) for r in records}
        return out | {"planned": len(rows) + len(out["unmeasured"])}


def _row(record: Record) -> tuple[str, str, str]:
    return record.case.key, record.environment, str(record.details.get("variant") or "")


def _content(record: Record) -> str:
    """What was measured, without where it lies: equal for the same record in two folders, NaN included."""
    details = {k: v for k, v in record.details.items() if k not in ("origin", "log")}
    return dumps(replace(record, pass_index=0, environment="", details=details).to_json())

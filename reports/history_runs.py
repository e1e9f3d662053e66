"""The runs in a folder of runs, each once, with the figures that a history is made of.

``results.csv`` is read in place of the journal only where ``harness.results`` proves it to be of that journal. A merged
folder holds the runs that it was merged from; copies of a run, alone or in such a folder, count once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from spikemark.harness import results
from spikemark.harness.errors import UsageError
from spikemark.harness.parts import origin, parts, run_id
from spikemark.harness.records import OK
from spikemark.harness.runfolder import RUN_JSON, Run, RunFolder, read_meta
from spikemark.harness.statistics import summarise

DEEPEST = 3
"""Folders within folders that are searched for runs, such as one a commit."""
CASE = ("operator", "phase", "workload", "implementation", "device", "dtype", "batch", "time_steps", "key")
FIGURES = ("environment", "variant", "status", "reason", "median_s", "ci_low_s", "ci_high_s", "passes", "samples")
VERSIONS = "two versions measured in turns, no point of a history"
Case = dict[str, Any]


class Point(NamedTuple):
    """A case in a run: seconds (None without a time) and the standard error of their log, NaN where not known."""

    key: str
    environment: str
    status: str
    reason: str
    time: float | None
    error: float
    samples: int


@dataclass
class Made:
    """A run as it was made: its name, when it began (ISO 8601, UTC), its ``environments`` by key, its ``points``.

    ``gauges`` are seconds of the machine's calibrations by environment and name.
    """

    id: str
    name: str
    started: str
    environments: dict[str, Any]
    points: list[Point]
    gauges: dict[str, dict[str, float]] = field(default_factory=dict)

    def commit(self, key: str) -> str:
        """The commit that was measured, shortened; ``+`` behind it: with local changes. Empty if unknown."""
        project = (self.environments.get(key) or {}).get("project") or {}
        commit = str(project.get("commit") or "")[:10]
        return f"{commit}+" if commit and project.get("dirty") else commit


@dataclass
class Runs:
    """``made`` in order of time, the ``cases`` they measured by key, folders ``left_out`` with reasons, ``copies``."""

    made: list[Made]
    cases: dict[str, Case]
    left_out: list[str]
    copies: int


def read(folder: Path, tell: Callable[[int, int], None] = lambda done, of: None) -> Runs:
    """Every run in ``folder``. ``tell`` hears how many folders are read.

    Raises ``UsageError`` for a folder that is none, is a run itself or holds no run that can be read.
    """
    paths = find(folder)
    cases: dict[str, Case] = {}
    left_out: list[str] = []
    made: list[Made] = []
    with ThreadPoolExecutor(min(8, (os.cpu_count() or 1) + 2)) as pool:  # digests and reading leave Python's lock free
        for number, found in enumerate(pool.map(lambda path: _read_one(path, cases), paths)):
            if isinstance(found, str):
                left_out.append(f"{paths[number].relative_to(folder)}: {found}")
            else:
                made += found
            tell(number + 1, len(paths))
    runs, copies = _once(made)
    if not runs:
        raise UsageError(f"{folder} holds no run of a history: {left_out[0]}")
    return Runs(runs, cases, left_out, copies)


def find(folder: Path) -> list[Path]:
    """The run folders in ``folder``, also within others, sorted by name. ``UsageError`` if there is none."""
    if not folder.exists():
        raise UsageError(f"folder {folder} does not exist")
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder of runs")
    if (folder / RUN_JSON).is_file():
        raise UsageError(f"{folder} is a run itself: name the folder that holds the runs")
    found = sorted(_within(folder, DEEPEST))
    if not found:
        raise UsageError(f"{folder} holds no run folder")
    return found


def _within(folder: Path, depth: int) -> Iterable[Path]:
    try:
        inside = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."]
    except OSError as error:
        if depth == DEEPEST:
            raise UsageError(f"cannot read {folder}: {error.strerror or error}") from None
        yield folder  # whoever reads it says why it cannot
        return
    for path in inside:
        if (path / RUN_JSON).is_file():
            yield path
        elif depth > 1:
            yield from _within(path, depth - 1)


def _read_one(path: Path, cases: dict[str, Case]) -> list[Made] | str:
    """The runs in a run folder (several if it was merged), or why there is none."""
    try:
        meta = read_meta(path)
        known = None if "parts" in meta or not meta["id"] else results.proven(path, meta, (*CASE, *FIGURES))
        if known is not None:
            try:
                points = _points((dict(zip((*CASE, *FIGURES), row, strict=True)) for row in known), cases)
            except UsageError:
                raise
            except ValueError:
                points = None  # proven, and yet no figures: nothing of ours wrote it, so the journal decides
            if points is not None:
                gauges = _gauges(meta["derived"].get("gauges"))
                return [Made(meta["id"], path.name, str(meta["started"] or ""), meta["environments"], points, gauges)]
        run = RunFolder.load(path)
        if run.variants:
            raise UsageError(VERSIONS)
    except UsageError as error:
        return str(error)
    return _parts(run, cases)


def _parts(run: Run, cases: dict[str, Case]) -> list[Made]:
    own, out = run_id(run), []
    for part in parts(run):
        records = [r for r in run.records if origin(r, own)[0] == part["id"]]
        lines = [c for c in run.calibrations if (c.get("origin") or {}).get("run", own) == part["id"]]
        alone = replace(run, records=records, calibrations=lines)
        points = _points(summarise(alone), cases)
        told = (str(part["name"]), str(part["started"] or ""), part["environments"])
        out.append(Made(part["id"], *told, points, results.gauges(alone)))
    return out


def _points(rows: Iterable[Mapping[str, Any]], cases: dict[str, Case]) -> list[Point]:
    """Rows of ``results.csv``, as text or as values. Raises ``ValueError`` for what are no figures."""
    out = []
    for row in rows:
        if row["variant"]:
            raise UsageError(VERSIONS)
        key, status = str(row["key"]), str(row["status"])
        if key not in cases:
            sizes = {name: int(row[name]) for name in ("batch", "time_steps")}
            cases[key] = {name: str(row[name]) for name in CASE} | sizes
        time, low, high = (float(row[name] or 0) for name in ("median_s", "ci_low_s", "ci_high_s"))
        timed = status == OK and 0 < time < math.inf
        # A single pass only assumes how far passes differ: what is known then is how far runs do.
        sure = timed and int(row["passes"]) > 1 and 0 < low < high < math.inf
        error = math.log(high / low) / (2 * 1.96) if sure else math.nan
        told = (key, str(row["environment"]), status, str(row["reason"] or ""))
        out.append(Point(*told, time if timed else None, error, int(row["samples"] or 0)))
    return out


def _gauges(told: Any) -> dict[str, dict[str, float]]:
    """The calibrations that ``run.json`` tells, as far as they are positive numbers."""
    out: dict[str, dict[str, float]] = {}
    for key, values in told.items() if isinstance(told, dict) else ():
        for name, value in values.items() if isinstance(values, dict) else ():
            if name in results.GAUGES and isinstance(value, (int, float)) and 0 < value < math.inf:
                out.setdefault(key, {})[name] = float(value)
    return out


def _once(made: list[Made]) -> tuple[list[Made], int]:
    """Each run once, the copy that holds most, in order of time; and how many copies there were."""
    best: dict[str, Made] = {}
    for one in made:
        before = best.get(one.id)
        if before is None or _measured(one) > _measured(before):
            best[one.id] = one
    return sorted(best.values(), key=lambda one: (one.started, one.name)), len(made) - len(best)


def _measured(one: Made) -> int:
    return sum(point.samples for point in one.points)

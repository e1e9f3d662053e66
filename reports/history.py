"""A folder of runs as a history: each case's times run by run on like environments, and where they changed.

A run is a point, placed by when it began; its figure is the median that ``statistics.summarise`` gives it. Runs whose
environments do not match (``environment.MUST_MATCH``: machine, driver, torch and the like, not the code) are separate
series. The machine's own calibrations are series too, so that a change of the machine can be told from one of the code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from spikemark.harness import changes
from spikemark.harness.changes import Found
from spikemark.harness.environment import MUST_MATCH, describe_differences, differences
from spikemark.harness.errors import NothingMeasured
from spikemark.harness.intervals import Interval
from spikemark.harness.parts import base_key
from spikemark.harness.records import OK
from spikemark.reports import history_runs
from spikemark.reports.history_runs import CASE, Case, Made, Point

SHARED = 0.5
"""From this share of an environment's cases on a change at one run is the machine's as likely as the code's."""
NEAR = 2
"""Runs by which the places of one change may differ from case to case: noise moves them."""
GAUGE = "calibration"
"""Operator of the machine's own series."""


@dataclass(frozen=True)
class Step:
    """A change point. ``run`` is the first run of the new level, ``before`` the last of the old (indices of runs).

    ``ratio`` is new time / old time. ``shared`` of ``cases`` in the environment changed the same way beside it.
    """

    run: int
    before: int
    ratio: Interval
    shared: int = 1
    cases: int = 1

    @property
    def common(self) -> bool:
        """Whether so many cases changed together that it may well be the machine."""
        return self.cases > 2 and self.shared >= SHARED * self.cases


@dataclass
class Series:
    """One case on like environments: ``runs`` are indices of the history's runs, ``times`` seconds, ``errors`` logs.

    ``keys`` are the runs' own names of the environment. ``last`` is the status in the latest run that has the case,
    ``reason`` why. ``enough``: whether there are runs enough to look for changes.
    """

    case: Case
    place: int
    runs: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    enough: bool = False
    scatter: float = math.nan
    last: str = OK
    reason: str = ""

    def add(self, run: int, key: str, time: float, error: float = math.nan) -> None:
        """Add a point."""
        self.runs.append(run)
        self.keys.append(key)
        self.times.append(time)
        self.errors.append(error)

    @property
    def levels(self) -> list[tuple[int, int, float]]:
        """(first point, point after the last, median seconds) between change points."""
        at = [0, *(self.runs.index(step.run) for step in self.steps), len(self.runs)]
        return [(a, b, float(np.median(self.times[a:b]))) for a, b in itertools.pairwise(at)]


@dataclass
class Place:
    """Environments that match: their description, a title, how neighbouring runs resemble, the machine's own series."""

    device: str
    described: dict[str, Any]
    title: str = ""
    resemblance: float = 0.0
    gauges: dict[str, Series] = field(default_factory=dict)


@dataclass
class History:
    """``runs`` in order of time, the ``places`` they were measured in, and a series for every case and place.

    ``least`` is the smallest change that is marked. ``left_out`` names folders and why, ``copies`` counts others.
    """

    folder: Path
    runs: list[Made]
    least: float
    places: list[Place] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    copies: int = 0

    @property
    def steps(self) -> list[tuple[Step, Series]]:
        """All change points, the latest first, then the largest."""
        found = [(step, series) for series in self.series for step in series.steps]
        return sorted(found, key=lambda f: (-f[0].run, -abs(math.log(f[0].ratio.value)), f[1].case["key"]))

    def commit(self, series: Series, run: int) -> str:
        """The commit of a series' point in ``run``."""
        return self.runs[run].commit(series.keys[series.runs.index(run)])


def read(
    folder: str | Path,
    least: float,
    wanted: Callable[[Case], bool] = lambda case: True,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> History:
    """The history in ``folder``: change points of at least ``least`` (0.03: 3 %) in the cases that are ``wanted``.

    ``tell`` hears how many folders are read. Raises ``UsageError`` for a folder that is none, is a run itself or holds
    no run that can be read, and ``NothingMeasured`` if no wanted case has a time.
    """
    folder = Path(folder)
    found = history_runs.read(folder, tell)
    history = History(folder, found.made, least, left_out=found.left_out, copies=found.copies)
    keys = {key for key, case in found.cases.items() if wanted(case)}
    _collect(history, found.cases, keys)
    if not history.series:
        raise NothingMeasured(f"nothing to show: no run in {folder} has a case that was asked for")
    if not any(series.runs for series in history.series):
        raise NothingMeasured(f"nothing to show: no run in {folder} has a time of a case that was asked for")
    _mark(history)
    return history


def _collect(history: History, cases: dict[str, Case], keys: set[str]) -> None:
    """Fill ``places`` and ``series`` with the cases of these ``keys``."""
    series: dict[tuple[str, int], Series] = {}
    for index, one in enumerate(history.runs):
        place_of: dict[str, int] = {}
        for point in one.points:
            if point.key not in keys:
                continue
            where = point.environment
            if where not in place_of:
                place_of[where] = _place(history.places, where, one.environments.get(where) or {})
            name = (point.key, place_of[where])
            if name not in series:
                series[name] = Series(cases[point.key], place_of[where])
            _add(series[name], index, point)
        for where, place in place_of.items():
            own = history.places[place].gauges
            for gauge, seconds in (one.gauges.get(where) or {}).items():
                blank = dict.fromkeys(CASE, "") | {"operator": GAUGE, "phase": gauge, "key": f"{GAUGE}/{gauge}"}
                own.setdefault(gauge, Series(blank, place)).add(index, where, seconds)
    history.series = list(series.values())
    _name(history.places)


def _add(series: Series, index: int, point: Point) -> None:
    series.last, series.reason = point.status, point.reason
    if point.time is not None:
        series.add(index, point.environment, point.time, point.error)


def _place(places: list[Place], key: str, described: dict[str, Any]) -> int:
    """Index of the place whose environment matches, which learns what it did not know; or of a new one."""
    device = str(described.get("device") or base_key(key))
    for index, place in enumerate(places):
        alike = place.device == device and bool(place.described) == bool(described)
        if alike and not differences(place.described, described, MUST_MATCH):
            place.described = _filled(place.described, described)
            return index
    places.append(Place(device, described))
    return len(places) - 1


def _filled(known: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``known`` with what only ``new`` tells."""
    out = dict(known)
    for key, value in new.items():
        if out.get(key) is None:
            out[key] = value
        elif isinstance(out[key], dict) and isinstance(value, dict):
            out[key] = _filled(out[key], value)
    return out


def _name(places: list[Place]) -> None:
    """Titles: the device and its name, and what tells a place from the first of the same title."""
    first: dict[str, Place] = {}
    for place in places:
        title = place.title = f"{place.device} · {place.described.get('device_name') or 'unknown device'}"
        if title in first:
            found = differences(first[title].described, place.described, MUST_MATCH)
            what = describe_differences([(name, "", value) for name, _, value in found[:3]]).replace("( and ", "(")
            place.title = f"{title}, {what}"
        first.setdefault(title, place)


def _mark(history: History) -> None:
    """Find the change points of every series, place by place, and how many changed together."""
    for index, place in enumerate(history.places):
        cases = [s for s in history.series if s.place == index and s.runs]
        every = [*cases, *place.gauges.values()]
        logs = [np.log(np.array(s.times)) for s in every]
        found, place.resemblance = changes.find(logs, [np.array(s.errors) for s in every], history.least)
        for series, one in zip(every, found, strict=True):
            _take(series, one)
        _share(cases)


def _take(series: Series, found: Found) -> None:
    series.scatter, series.enough = found.scatter, found.enough
    series.steps = [Step(series.runs[c.at], series.runs[c.at - 1], c.ratio) for c in found.changes]


def _share(cases: Sequence[Series]) -> None:
    """Say of each change how many cases changed the same way at that run, of those that were measured around it."""
    changed: dict[tuple[int, bool], set[int]] = {}
    for index, series in enumerate(cases):
        for step in series.steps:
            changed.setdefault((step.run, step.ratio.value > 1), set()).add(index)
    for series in cases:
        for at, step in enumerate(series.steps):
            runs = range(step.run - NEAR, step.run + NEAR + 1)
            near = set[int]().union(*(changed.get((run, step.ratio.value > 1), set()) for run in runs))
            there = sum(other.runs[0] < step.run <= other.runs[-1] for other in cases)
            series.steps[at] = replace(step, shared=len(near), cases=max(there, len(near)))

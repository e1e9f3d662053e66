"""Compare two runs, or the two versions of an A/B run: what became slower, faster, wrong, and what cannot be told.

``compare`` makes a ``Comparison``; ``compare_text`` writes it for people. Verdicts on new time / old time: ``slower``
needs the whole interval beyond the threshold, see ``harness.intervals``. A case that was ok and is now incorrect,
crashed or out of memory is ``broken``, which is a regression too. Geometric means are over the cases that both
measured; all others are counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from spikemark.harness import contrast
from spikemark.harness.contrast import Drift
from spikemark.harness.environment import describe_differences, differences
from spikemark.harness.errors import NothingMeasured, UsageError
from spikemark.harness.intervals import FASTER, INCONCLUSIVE, SAME, SLOWER, Interval, geometric_mean, verdict
from spikemark.harness.records import OK, UNAVAILABLE, UNSUPPORTED, Record
from spikemark.harness.results import GAUGES
from spikemark.harness.runfolder import Run
from spikemark.harness.statistics import PassTable, Row, summarise

BROKEN = "broken"
FAIL_ON = {"slower": 0.03}
ORDER = (BROKEN, SLOWER, INCONCLUSIVE, FASTER, SAME)


@dataclass(frozen=True)
class Change:
    """One case in both runs. ``ratio`` is new time / old time; None unless both have times. ``reason`` says why not."""

    base: Row
    new: Row
    verdict: str
    ratio: Interval | None = None
    memory: float | None = None
    reason: str = ""

    @property
    def key(self) -> str:
        """Name of the case in the new run."""
        return str(self.new["key"])


@dataclass
class Comparison:
    """The outcome. ``changes`` worst first; ``only_base`` and ``only_new`` are keys; ``drift`` is None in one run.

    ``differing`` maps a device to the fields of its environment that do not match (``across``). ``about`` says what the
    two versions of an A/B run were.
    """

    changes: list[Change]
    fail_on: dict[str, float]
    names: tuple[str, str]
    drift: Drift | None = None
    only_base: list[str] = field(default_factory=list)
    only_new: list[str] = field(default_factory=list)
    differing: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """How many cases have each verdict, worst first."""
        found = Counter(c.verdict for c in self.changes)
        return {v: found[v] for v in (*ORDER, *sorted(set(found) - set(ORDER))) if found[v]}

    @property
    def mean(self) -> tuple[float, int, int]:
        """Geometric mean of new / old time over the cases both measured, their number, and the number of all others."""
        mean, used, left = geometric_mean([c.ratio.value if c.ratio else None for c in self.changes])
        return mean, used, left + len(self.only_base) + len(self.only_new)

    @property
    def regressions(self) -> list[Change]:
        """Cases that make the exit code 1."""
        limit = self.fail_on.get("memory")
        grown = [c for c in self.changes if limit is not None and c.memory is not None and c.memory > 1 + limit]
        return [c for c in self.changes if c.verdict in (SLOWER, BROKEN) or c in grown]

    def exit_code(self, strict: bool = False) -> int:
        """1 for a regression; under ``strict`` 5 if any case is inconclusive; else 0."""
        if self.regressions:
            return 1
        return 5 if strict and self.counts.get(INCONCLUSIVE) else 0


def parse_fail_on(texts: list[str]) -> dict[str, float]:
    """``["slower:3%", "memory:10%"]`` -> ``{"slower": 0.03, "memory": 0.1}``; nothing is ``slower:3%``.

    ``UsageError`` names what it cannot read.
    """
    out = dict(FAIL_ON)
    for text in texts:
        found = re.fullmatch(r"(slower|memory):(\d+(?:\.\d+)?)%", text.strip())
        if not found:
            raise UsageError(f"--fail-on {text!r} is not understood: write slower:3% or memory:10%")
        out[found[1]] = float(found[2]) / 100
    return out


def compare(
    base: Run, new: Run, fail_on: Mapping[str, float] | None = None, *, across: bool = False, one_run: bool = False
) -> Comparison:
    """Compare two runs case by case. ``one_run``: they are the two versions of one A/B run, measured in turns.

    Raises ``UsageError`` naming the fields if their environments do not match, unless ``across`` says that this is the
    point; ``NothingMeasured`` if they have no case in common.
    """
    limits = dict(FAIL_ON if fail_on is None else fail_on)
    places, differing = _pair_environments(base, new)
    if differing and not across and not one_run:
        where = "; ".join(f"{device}: {text}" for device, text in differing.items())
        raise UsageError(f"refused, the environments do not match (--across compares them anyway): {where}")
    any_device = across and len(_devices(base)) == len(_devices(new)) == 1
    old, now = (
        {_key(row, any_device, where): row for row in summarise(r)}
        for r, where in zip((base, new), places, strict=True)
    )
    common = [key for key in old if key in now]
    if not common:
        raise NothingMeasured(f"nothing to compare: {base.path.name} and {new.path.name} have no case in common")
    timed = [key for key in common if old[key]["median_s"] is not None and now[key]["median_s"] is not None]
    drift = None
    if one_run:
        sides = [(_by_pass(r), rows) for r, rows in ((base, old), (new, now))]
        passes = [
            [{p: contrast.timed(r) for p, r in side[_name_of(rows[key])].items()} for key in timed]
            for side, rows in sides
        ]
        ratios = contrast.together(passes[0], passes[1])
    else:
        # Raw samples by pass: the drift is judged on all cases at once.
        tables = [_table(r, rows, timed) for r, rows in ((base, old), (new, now))]
        gauges = {name: (_gauge(base, name), _gauge(new, name)) for name in GAUGES}
        pairs = [(i, i) for i in range(len(timed))]
        ratios, drift = contrast.apart(tables[0], tables[1], pairs, gauges)
    by_key = dict(zip(timed, ratios, strict=True))
    changes = [_change(old[key], now[key], by_key.get(key), limits["slower"]) for key in common]
    changes.sort(key=lambda c: (ORDER.index(c.verdict) if c.verdict in ORDER else len(ORDER), -_size(c), c.key))
    if not any(c.ratio or c.verdict == BROKEN for c in changes):
        raise NothingMeasured("nothing to compare: no case was measured in both runs")
    return Comparison(
        changes,
        limits,
        (_name(base, "base"), _name(new, "new")),
        None if one_run else drift,
        [str(row["key"]) for k, row in old.items() if k not in now],
        [str(row["key"]) for k, row in now.items() if k not in old],
        differing,
        dict(new.meta.get("ab") or {}) if one_run else {},
    )


def _name(run: Run, side: str) -> str:
    about = (run.meta.get("ab") or {}).get(side)
    return str(about["ref"]) if about else run.path.name


def _size(change: Change) -> float:
    return abs(math.log(change.ratio.value)) if change.ratio else 0.0


def _devices(run: Run) -> set[str]:
    return {record.case.device for record in run.records}


Key = tuple[str, str]


def _key(row: Row, any_device: bool, places: Mapping[str, str]) -> Key:
    """What must be equal: the case's key and where it was measured. Without the device where each run has just one
    (``--across``)."""
    if any_device:
        return str(row["key"]).replace(f"/{row['device']}/", "/*/", 1), ""
    return str(row["key"]), places[row["environment"]]


def _name_of(row: Row) -> Key:
    return str(row["key"]), str(row["environment"])


def _pair_environments(base: Run, new: Run) -> tuple[tuple[dict[str, str], dict[str, str]], dict[str, str]]:
    """What each environment of the two runs is called in both, and device -> fields that must match and do not.

    Where each run has one of a device, it is the other's counterpart, whether or not they match. Of several (a run of
    several machines) those that match are counterparts; the others have none.
    """
    sides = (_used(base), _used(new))
    places: tuple[dict[str, str], dict[str, str]] = ({}, {})
    differing: dict[str, str] = {}
    for device in dict.fromkeys(d for side in sides for d in side):
        one, other = (list(side.get(device, {}).items()) for side in sides)
        single = len(one) == len(other) == 1
        for number, (key, _) in enumerate(one):
            places[0][key] = device if single else f"{device} #{number}"
        for number, (key, described) in enumerate(other):
            alike = [k for k, d in one if not differences(d, described) and places[0][k] not in places[1].values()]
            places[1][key] = device if single else places[0][alike[0]] if alike else f"{device} #new {number}"
        matched = any(places[1][key] in places[0].values() for key, _ in other)
        if one and other and (single or not matched) and (found := differences(one[0][1], other[0][1])):
            differing[device] = describe_differences(found)
    return places, differing


def _used(run: Run) -> dict[str, dict[str, dict[str, Any]]]:
    """device -> environments of it that the run's records were measured in, with their descriptions."""
    out: dict[str, dict[str, dict[str, Any]]] = {}
    described = run.meta.get("environments") or {}
    for record in run.records:
        key = record.environment or record.case.device
        out.setdefault(record.case.device, {})[key] = described.get(key) or described.get(record.case.device) or {}
    return out


def _by_pass(run: Run) -> dict[Key, dict[int, Record]]:
    out: dict[Key, dict[int, Record]] = {}
    for record in run.records:
        key = (record.case.key, record.environment or record.case.device)
        out.setdefault(key, {})[record.pass_index] = record
    return out


def _table(run: Run, rows: Mapping[Key, Row], keys: list[Key]) -> PassTable:
    records = _by_pass(run)
    return PassTable([{p: r.samples for p, r in records[_name_of(rows[key])].items()} for key in keys])


def _gauge(run: Run, name: str) -> list[float]:
    """Median seconds of one calibration in each pass."""
    return [median(c[GAUGES[name]]) for c in run.calibrations if c.get(GAUGES[name])]


def _change(base: Row, new: Row, ratio: Interval | None, slower: float) -> Change:
    """The verdict on one case: by its interval, or by what it is now if it has no times."""
    memory = None
    if base["peak_bytes"] and new["peak_bytes"] is not None:
        memory = new["peak_bytes"] / base["peak_bytes"]
    if ratio is not None and math.isfinite(ratio.value):
        return Change(base, new, verdict(ratio, slower), ratio, memory)
    if base["status"] == OK and new["status"] not in (OK, UNAVAILABLE, UNSUPPORTED):
        return Change(base, new, BROKEN, None, memory, f"{new['status']}: {new['reason']}")
    for side, row in (("base", base), ("new", new)):
        if row["status"] != OK:
            return Change(base, new, "not measured", None, memory, f"{side} {row['status']}: {row['reason']}")
    return Change(base, new, "not measured", None, memory, "no pass has both")

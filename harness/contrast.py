"""New time / old time of every case: of two versions measured in turns in one run, or of two runs made apart.

In one run (``together``) the unit is the pass and its figure is the median over pairs of bursts: the two versions'
n-th bursts lie milliseconds apart, so the machine's jumps fall on both and leave the ratio. Medians of all samples
would not do: a machine that is slow for half a pass puts one version's median here and the other's there.

Runs made at different times (``apart``) cannot be told from drift case by case: whole runs differ by up to 1.7x on a
shared machine. What can be seen is a case that stands out from all others. Three things say how far the machine itself
may have moved: the calibration of every pass (``gauges``: a plain copy, a fixed computation), the common shift of all
cases (``common``) and their scatter around it. None is proof, so none is subtracted as a correction: each interval is
stretched to hold both the figure as measured and the figure with the shift taken out, and then by the scatter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from spikemark.harness.intervals import Array, Interval, centre_intervals, median_errors, t_quantile, unpaired
from spikemark.harness.records import Record
from spikemark.harness.statistics import PassTable

FEW_CASES = 8
"""With fewer cases in common their scatter is not known and one real change moves the common shift."""
FLOOR = 0.02
"""Least scatter assumed between runs made apart: a fresh boot, another kernel layout, warmer air."""
FALSE_ALARMS = 0.01
"""Wanted chance of any false alarm in a comparison of runs made apart, over all its cases."""


Timed = tuple[Sequence[float], Sequence[int]]
"""One version of a case in one pass: its samples in seconds, and the indices at which its bursts begin (or nothing)."""


def timed(record: Record) -> Timed:
    """What ``together`` needs of a record."""
    return record.samples, record.details.get("bursts") or []


def burst_ratios(base: Timed, new: Timed) -> Array:
    """Log ratios new / base of the medians of the n-th bursts; one ratio of all samples if there are no bursts."""
    sides = [_burst_medians(*side) for side in (base, new)]
    count = min(len(side) for side in sides)
    return np.log(sides[1][:count]) - np.log(sides[0][:count])


def _burst_medians(values: Sequence[float], begins: Sequence[int]) -> Array:
    samples = np.asarray(values, dtype=float)
    starts = [int(i) for i in begins or [0]]
    parts = [samples[a:b] for a, b in zip(starts, [*starts[1:], samples.size], strict=True)]
    good = [part[np.isfinite(part) & (part > 0)] for part in parts]
    return np.array([np.median(part) if part.size else np.nan for part in good])


def together(base: Sequence[Mapping[int, Timed]], new: Sequence[Mapping[int, Timed]]) -> list[Interval]:
    """Ratio new / base of each case from its passes in one A/B run; NaN where no pass has both."""
    passes = sorted({p for side in (base, new) for case in side for p in case})
    values = np.full((len(base), len(passes)), np.nan)
    errors = np.full_like(values, np.nan)
    for i, (a, b) in enumerate(zip(base, new, strict=True)):
        for j, p in enumerate(passes):
            if p not in a or p not in b:
                continue
            logs = burst_ratios(a[p], b[p])
            logs = logs[np.isfinite(logs)]
            if logs.size:
                values[i, j] = np.median(logs)
                errors[i, j] = median_errors(logs[None])[0]
    counts = np.isfinite(values).sum(axis=1)
    rows = centre_intervals(values, errors)
    return [
        Interval(float(np.exp(row[0])), float(np.exp(row[1])), float(np.exp(row[2])), float(row[3]), int(count))
        for row, count in zip(rows, counts, strict=True)
    ]


@dataclass(frozen=True)
class Drift:
    """How far the machine may have moved between two runs, in logs of time; positive: it was slower in the new run.

    ``gauges``: by each calibration that both runs have. ``common``: median shift of ``cases`` cases.
    ``scatter``: robust deviation of the cases around it. ``reach``: how far one case may stray by scatter alone.
    """

    gauges: dict[str, float]
    common: float
    scatter: float
    reach: float
    cases: int

    def widen(self, ratio: Interval) -> Interval:
        """``ratio`` stretched to hold it as measured and without the shifts, and by the scatter."""
        shifts = [0.0, self.common, *self.gauges.values()]
        below = math.hypot(math.log(ratio.value / ratio.low), self.reach)
        above = math.hypot(math.log(ratio.high / ratio.value), self.reach)
        low = math.log(ratio.value) - max(shifts) - below
        high = math.log(ratio.value) - min(shifts) + above
        return Interval(ratio.value, math.exp(low), math.exp(high), ratio.spread, ratio.passes)

    @property
    def blind(self) -> float:
        """The smallest slowdown (0.2: 20 %) that could be told from drift, beside a case's own noise."""
        return math.expm1(max(0.0, self.common, *self.gauges.values()) + self.reach)


def apart(
    base: PassTable,
    new: PassTable,
    pairs: Sequence[tuple[int, int]],
    gauges: Mapping[str, tuple[Sequence[float], Sequence[float]]],
) -> tuple[list[Interval], Drift]:
    """Ratio new / base of each pair of rows, widened by the drift between the runs, and that drift.

    ``gauges`` are seconds of the calibrations in every pass, old and new. With fewer than FEW_CASES pairs, the scatter
    is taken to be what passes (of cases or of a gauge) differ by within a run.
    """
    a, b = base.intervals(), new.intervals()
    counts = [np.isfinite(t.logs).sum(axis=1) for t in (base, new)]
    raw = [unpaired(b[j], a[i], (int(counts[1][j]), int(counts[0][i]))) for i, j in pairs]
    shifts = np.log([r.value for r in raw])
    shifts = shifts[np.isfinite(shifts)]
    common = float(np.median(shifts)) if shifts.size else 0.0
    within = [float(np.nanmedian(rows[:, 3])) for rows in (a, b) if np.isfinite(rows[:, 3]).any()]
    moved = {}
    for name, sides in gauges.items():
        logs = [np.log([s for s in side if 0 < s < math.inf]) for side in sides]
        within += [float(np.std(side, ddof=1)) for side in logs if side.size > 1]
        if all(side.size for side in logs):
            moved[name] = float(np.median(logs[1]) - np.median(logs[0]))
    own = max([FLOOR, *within])
    if shifts.size >= FEW_CASES:
        # Half the width of the middle 80 % as well as the middle 50 %: drift has long tails.
        low, high = np.quantile(shifts, [0.1, 0.9])
        scatter = max(FLOOR, 1.4826 * float(np.median(np.abs(shifts - common))), float(high - low) / 2.563)
        freedom = shifts.size - 1
    else:
        scatter, freedom = math.sqrt(2) * own, 2
    reach = t_quantile(1 - FALSE_ALARMS / 2 / max(1, shifts.size), freedom) * scatter
    drift = Drift(moved, common, scatter, reach, int(shifts.size))
    return [drift.widen(r) if math.isfinite(r.value) else r for r in raw], drift

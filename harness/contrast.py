"""New time / old time of every case: of two versions measured in turns in one run, or of two runs made apart.

In one run (``pairing.together``) the unit is the pass and its figure is the median over pairs of bursts.

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
from spikemark.harness.intervals import Interval, t_quantile, unpaired
from spikemark.harness.pairing import Timed, burst_ratios, timed, together
from spikemark.harness.statistics import PassTable

__all__ = ["Drift", "Timed", "apart", "burst_ratios", "timed", "together"]

FEW_CASES = 8
"""With fewer cases in common their scatter is not known and one real change moves the common shift."""
FLOOR = 0.02
"""Least scatter assumed between runs made apart: a fresh boot, another kernel layout, warmer air."""
FALSE_ALARMS = 0.01
"""Wanted chance of any false alarm in a comparison of runs made apart, over all its cases."""


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

"""Ratios of things that were measured in turns: burst by burst, so that the machine's jumps cancel. numpy only.

Two things that take turns of a few milliseconds see the same machine: the n-th burst of one lies beside the n-th of the
other, and a jump in speed falls on both. So the figure of a pass is the median over pairs of bursts. Medians of all
samples would not do: a machine that is slow for half a pass puts one thing's median here and the other's there.
Implementations of one comparison take turns in one process (``measure``), versions of the code in two (``turns``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from spikemark.harness.intervals import Array, Interval, centre_intervals, median_errors
from spikemark.harness.records import Record

Timed = tuple[Sequence[float], Sequence[int]]
"""One thing in one pass: its samples in seconds, and the indices at which its bursts begin (or nothing)."""


def timed(record: Record) -> Timed:
    """The samples of a record and where its bursts begin."""
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


def in_turns(a: Record, b: Record) -> bool:
    """Whether two implementations' records come from one round of turns: their n-th bursts lie side by side."""
    block = a.details.get("block")
    return block is not None and block == b.details.get("block")


def pass_ratio(base: Timed, new: Timed) -> tuple[float, float]:
    """Log ratio new / base of one pass and its standard error: the median over pairs of bursts. NaN for no pair."""
    logs = burst_ratios(base, new)
    logs = logs[np.isfinite(logs)]
    if not logs.size:
        return float("nan"), float("nan")
    return float(np.median(logs)), float(median_errors(logs[None])[0])


def together(base: Sequence[Mapping[int, Timed]], new: Sequence[Mapping[int, Timed]]) -> list[Interval]:
    """Ratio new / base of each case from its passes in one A/B run; NaN where no pass has both."""
    passes = sorted({p for side in (base, new) for case in side for p in case})
    values = np.full((len(base), len(passes)), np.nan)
    errors = np.full_like(values, np.nan)
    for i, (a, b) in enumerate(zip(base, new, strict=True)):
        for j, p in enumerate(passes):
            if p in a and p in b:
                values[i, j], errors[i, j] = pass_ratio(a[p], b[p])
    counts = np.isfinite(values).sum(axis=1)
    rows = centre_intervals(values, errors)
    return [
        Interval(float(np.exp(row[0])), float(np.exp(row[1])), float(np.exp(row[2])), float(row[3]), int(count))
        for row, count in zip(rows, counts, strict=True)
    ]

"""Where a series of times changed its level: change points with a known rate of false alarms. numpy only.

The method is seeded binary segmentation (Kovács, Bühlmann, Li and Munk, Biometrika 110, 2023: "Seeded binary
segmentation: a general methodology for fast and optimal changepoint detection") with narrowest-over-threshold selection
(Baranowski, Chen and Fryzlewicz, JRSS B 81, 2019): a deterministic set of windows of all lengths is searched, and the
narrowest that shows a change is believed first, so that a slowdown mended a week later does not hide in the average.
Four things make it fit measured times:

* Everything is on the logarithm of time, and values are clipped at some deviations from their window's median (Huber's
  psi, as in Fearnhead and Rigaill, JASA 114, 2019): a few wild runs are no change.
* The scale is measured, never assumed: from differences of neighbouring runs, which a step hardly inflates, moderated
  by the other cases of the machine (``intervals.prior_variance``), never below what a run says of its own median.
* Neighbouring runs resemble each other, and a slow swell is no step: the resemblance is estimated from differences over
  one and two runs (as in Tecuapetla-Gómez and Munk, Scand. J. Stat. 44, 2017) of all cases together, and the scale made
  that of the mean of such runs.
* The threshold is Student's quantile, by Bonferroni's rule over every split of every window of every case, so that the
  chance of *any* false alarm on a machine is at most ``FALSE_ALARMS``. A short level must pass a second test that asks
  nothing of the noise but that it is the same throughout: so many runs beyond the middle of the step must be as
  unlikely as that, given how often the other runs of the case stray so far (``_by_chance``).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from spikemark.harness.contrast import FALSE_ALARMS
from spikemark.harness.intervals import FASTER, SLOWER, Array, Interval, prior_variance, t_quantile, verdict

LEAST = 5
"""Runs that a level needs. Fewer cannot be told from a bad day at the wanted rate of false alarms."""
CLIP = 0.5
"""Share of the threshold (in deviations) beyond which a value counts no more: five such values in a row are a change,
sqrt(5) / 2 > 1; four are not, 4 / sqrt(5) / 2 < 1."""
LARGEST = 3.0
"""Deviations of a difference between neighbouring runs beyond which it counts no more for the scale: it is a step."""
SHORT = 30
"""Runs up to which a level is short: its mean is not yet normal, whatever the noise."""
SCALE_FLOOR = 0.002
"""Least scatter between runs (log) that is believed, should runs agree by luck or be copies."""
MOST_RESEMBLANCE = 0.8
"""Correlation of neighbouring runs beyond which nothing would be found; a machine that drifts so is said to."""
DECAY = math.sqrt(2)
"""Ratio of the lengths of neighbouring layers of windows."""


@dataclass(frozen=True)
class Change:
    """The level changed with run ``at`` (an index into the series), the first of the new level.

    ``ratio`` is new time / old time between the levels before and after, with its 95 % interval.
    """

    at: int
    ratio: Interval


@dataclass(frozen=True)
class Found:
    """What a series shows: its ``changes`` in order, the scatter of a run (log), and whether it was long enough."""

    changes: tuple[Change, ...]
    scatter: float
    enough: bool


def find(series: Sequence[Array], errors: Sequence[Array], least: float) -> tuple[list[Found], float]:
    """Change points of each of ``series`` (log times in order, any lengths), and how neighbouring runs resemble.

    ``errors[i]`` are standard errors of the values, NaN where not known. Only changes whose whole 95 % interval is
    beyond ``least`` (0.03: 3 %) are marked. All series must be of one machine: they lend each other scale and
    resemblance.
    """
    if not series:
        return [], 0.0
    resemblance = _resemblance(series)
    near = [_near(values) for values in series]
    freedom = np.array([max(values.size - 1, 0) / 2 for values in series])  # fewer than differences: these overlap
    prior, lent = prior_variance(np.array(near), freedom)
    splits = sum(_splits(values.size) for values in series)
    rare = FALSE_ALARMS / 2 / max(sum(values.size for values in series), 1)
    out = []
    for values, noise, variance, own in zip(series, errors, near, freedom, strict=True):
        if values.size < 2 * LEAST:
            out.append(Found((), math.sqrt(variance), False))
            continue
        pooled = variance if not lent else (lent * prior + own * variance) / (lent + own)
        scale = math.sqrt(pooled / (1 - resemblance))
        long_run = math.sqrt((1 + resemblance) / (1 - resemblance))
        typical = float(np.nanmedian(noise)) if np.isfinite(noise).any() else 0.0
        sigma = np.maximum(np.where(np.isfinite(noise), noise, 0.0), max(scale, typical, SCALE_FLOOR)) * long_run
        threshold = t_quantile(1 - FALSE_ALARMS / 2 / max(splits, 1), own + lent)
        out.append(Found(_segment(values, sigma, threshold, least, rare, long_run**2), scale, True))
    return out, resemblance


def _near(values: Array, lag: int = 1, limit: float | None = None) -> float:
    """Variance of a value from differences over ``lag`` runs, clipped at ``limit`` (default: by themselves)."""
    if values.size <= lag:
        return 0.0
    steps = values[lag:] - values[:-lag]
    limit = _limit(values) if limit is None else limit
    return float(np.mean(np.clip(steps, -limit, limit) ** 2) / 2)


def _limit(values: Array) -> float:
    """What a difference between neighbouring runs counts at most."""
    return LARGEST * 1.4826 * float(np.median(np.abs(np.diff(values))))


def _resemblance(series: Sequence[Array]) -> float:
    """Correlation of neighbouring runs, over all series: differences over two runs are larger if it is positive.

    The median over the series, less its error: cases of a run share its mood, so many series are few witnesses.
    """
    found = []
    for values in series:
        limit = _limit(values) if values.size >= 2 * LEAST else 0.0
        if limit > 0:
            found.append((_near(values, 2, limit) / _near(values, 1, limit) - 1, values.size))
    if not found:
        return 0.0
    ratios, sizes = zip(*found, strict=True)
    error = 1.3 / math.sqrt(float(np.median(sizes)) * min(len(found), 4))
    return min(max(float(np.median(ratios)) - error, 0.0), MOST_RESEMBLANCE)


@functools.lru_cache(maxsize=4096)
def _layers(size: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(length, starts) of the windows of a series of ``size``, longest first; they overlap by half."""
    out, length = [], float(size)
    while round(length) >= 2 * LEAST:
        whole = round(length)
        count = 2 * math.ceil(size / whole - 1e-9) - 1
        starts = {round(i * (size - whole) / max(count - 1, 1)) for i in range(count)}
        out.append((whole, tuple(sorted(starts))))
        length /= DECAY
    return tuple(out)


def _splits(size: int) -> int:
    """How many splits are looked at in a series of ``size``."""
    return sum(len(starts) * (length - 2 * LEAST + 1) for length, starts in _layers(size))


def _contrasts(values: Array, sigma: Array, clip: float) -> Array:
    """Difference of the weighted means behind and before each split of windows [N, L], in its standard errors.

    [N, L - 2 LEAST + 1]: column j is the split before element ``LEAST + j``.
    """
    middle = np.median(values, axis=1, keepdims=True)
    clipped = np.clip(values - middle, -clip * sigma, clip * sigma)
    weight = 1 / sigma**2
    weights, sums = np.cumsum(weight, axis=1), np.cumsum(weight * clipped, axis=1)
    left = slice(LEAST - 1, values.shape[1] - LEAST)
    before, behind = weights[:, left], weights[:, -1:] - weights[:, left]
    difference = (sums[:, -1:] - sums[:, left]) / behind - sums[:, left] / before
    found: Array = difference / np.sqrt(1 / before + 1 / behind)
    return found


def _candidates(values: Array, sigma: Array, threshold: float) -> Iterator[tuple[int, float, int, int]]:
    """(length, strength, start, split) of every window that shows a change."""
    for length, starts in _layers(values.size):
        at = list(starts)
        times, wide = (sliding_window_view(series, length)[at] for series in (values, sigma))
        found = np.abs(_contrasts(times, wide, CLIP * threshold))
        best = found.argmax(axis=1)
        for row in np.flatnonzero(found.max(axis=1) > threshold):
            yield length, float(found[row, best[row]]), at[row], at[row] + LEAST + int(best[row])


def _segment(
    values: Array, sigma: Array, threshold: float, least: float, rare: float, alike: float
) -> tuple[Change, ...]:
    """Change points: the narrowest windows first, then each moved to its best place and asked again.

    ``rare`` is how unlikely a short level must be; ``alike`` neighbouring runs are one witness.
    """
    cuts: list[int] = []
    for length, _, start, split in sorted(_candidates(values, sigma, threshold), key=lambda c: (c[0], -c[1], c[2])):
        if not any(start < cut < start + length for cut in cuts):
            cuts.append(split)
    cuts.sort()
    clip = CLIP * threshold
    for _ in range(2):
        cuts = _moved(cuts, values, sigma, clip)
    while cuts:
        strengths = [_between(cuts, i, values, sigma, clip) for i in range(len(cuts))]
        weakest = min(range(len(cuts)), key=lambda i: strengths[i][0])
        if strengths[weakest][0] > threshold:
            small = [
                i
                for i, (_, ratio) in enumerate(strengths)
                if verdict(ratio, least) not in (SLOWER, FASTER) or _by_chance(cuts, i, values, alike) > rare
            ]
            if not small:
                return tuple(Change(cut, ratio) for cut, (_, ratio) in zip(cuts, strengths, strict=True))
            weakest = min(small, key=lambda i: strengths[i][0])
        del cuts[weakest]
    return ()


def _neighbours(cuts: list[int], i: int, size: int) -> tuple[int, int]:
    return (cuts[i - 1] if i else 0), (cuts[i + 1] if i + 1 < len(cuts) else size)


def _moved(cuts: list[int], values: Array, sigma: Array, clip: float) -> list[int]:
    """Each change where the levels on its two sides fit best; a value counts at most as much as one at the clip."""
    out = list(cuts)
    for i in range(len(out)):
        start, end = _neighbours(out, i, values.size)
        if end - start < 2 * LEAST:
            continue
        part, wide = values[start:end], sigma[start:end]
        levels = [np.median(values[a:b]) for a, b in ((start, out[i]), (out[i], end))]
        before, behind = (np.minimum(((part - level) / wide) ** 2, clip**2) for level in levels)
        cost = np.cumsum(before - behind)[LEAST - 1 : part.size - LEAST]
        out[i] = start + LEAST + int(cost.argmin())
    return out


def _between(cuts: list[int], i: int, values: Array, sigma: Array, clip: float) -> tuple[float, Interval]:
    """How strong a change is beside its neighbours, in standard errors, and its ratio of levels."""
    start, end = _neighbours(cuts, i, values.size)
    levels, variances = [], []
    for a, b in ((start, cuts[i]), (cuts[i], end)):
        if b - a < LEAST:
            return 0.0, Interval(1.0, 0.0, math.inf)
        part, wide = values[a:b], sigma[a:b]
        middle = np.median(part)
        weight = 1 / wide**2
        levels.append(float(middle + np.average(np.clip(part - middle, -clip * wide, clip * wide), weights=weight)))
        variances.append(float(1 / weight.sum()))
    error = math.sqrt(sum(variances))
    step = levels[1] - levels[0]
    found = np.abs(_contrasts(values[None, start:end], sigma[None, start:end], clip))[0]
    ratio = Interval(math.exp(step), math.exp(step - 1.96 * error), math.exp(step + 1.96 * error))
    return float(found[cuts[i] - start - LEAST]), ratio


def _by_chance(cuts: list[int], i: int, values: Array, alike: float) -> float:
    """How likely a level as short as the shorter side of a change is to come about by runs that stray.

    A run of it strays if it lies beyond the middle between the two levels. How often runs do so is asked of all other
    runs of the case, each about its own level, so that neither other changes nor the form of the noise matter.
    """
    start, end = _neighbours(cuts, i, values.size)
    sides = [(start, cuts[i]), (cuts[i], end)]
    (a, b), other = sorted(sides, key=lambda side: side[1] - side[0])
    if b - a >= SHORT:
        return 0.0
    bounds = [0, *cuts, values.size]
    levels = np.concatenate([np.full(q - p, np.median(values[p:q])) for p, q in itertools.pairwise(bounds)])
    base = float(np.median(values[other[0] : other[1]]))
    half = (float(np.median(values[a:b])) - base) / 2
    strays = np.sign(half) * (values - levels) > abs(half)
    share = (np.delete(strays, slice(a, b)).sum() + 1) / (values.size - (b - a) + 1)
    beyond = int((np.sign(half) * (values[a:b] - base) > abs(half)).sum())
    witnesses, told = int((b - a) / alike), int(beyond / alike)
    return sum(
        math.comb(witnesses, k) * share**k * (1 - share) ** (witnesses - k) for k in range(told, witnesses + 1)
    )  # fmt: skip

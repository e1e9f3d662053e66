"""Intervals and verdicts from a few passes: what a handful of noisy medians can and cannot say. numpy only.

The unit is the pass: a fresh process, with its own memory layout and its own moment on a shared machine.
Samples within a pass repeat each other's accidents, so they are reduced to the pass's median first and only bound
the noise from below. Two exact forms of "bootstrap over passes, then samples" are used in place of drawing random
replicates, which makes the same data give the same verdict and costs nothing at ten thousand cases:

* the bootstrap variance of a median over samples has a closed form (Maritz & Jarrett 1978);
* the percentile bootstrap of a median over passes is an order-statistic interval, whose coverage is known exactly
  for any distribution, heavy tails and two modes included. It exists at 95 % from six passes on and bears one wild
  pass on either side from nine on.

With fewer passes a plain bootstrap is far too narrow (three passes: 95 % becomes about 75 %), so a Student interval
around the median is used, its scale moderated by the spread of all other cases of the run (Smyth 2004, "limma"):
three passes say little about their own noise, eighty cases say much about the machine's.

Everything is on the logarithm of time: noise multiplies, and a ratio and its inverse are then the same question.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FASTER, SLOWER, SAME, INCONCLUSIVE, REFUSED = "faster", "slower", "same", "inconclusive", "refused"
VERDICTS = (FASTER, SLOWER, SAME, INCONCLUSIVE, REFUSED)

LEVEL = 0.95
RANK_PASSES = 6
"""From this many passes on smallest to largest hold the median at 95 %, whatever the distribution."""
ONE_PASS_SPREAD = 0.15
"""Assumed log deviation between passes when there is only one: on shared machines passes differ by that much."""
PRIOR_LIMIT = 8.0
"""Most degrees of freedom that other cases may lend: a case's own passes must be able to say that it is noisier."""
MEDIAN_VARIANCE = {1: 1.0, 2: 1.0, 3: 1.346, 4: 1.193, 5: 1.434, 6: 1.288, 7: 1.473, 8: 1.346}
"""Variance of the median of n normal values over the variance of their mean."""


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval; for ratios 1.0 means equal. ``spread`` is the log deviation of a pass."""

    value: float
    low: float
    high: float
    spread: float = math.nan
    passes: int = 0

    def inverse(self) -> Interval:
        """The interval of ``1 / value``."""
        return Interval(1 / self.value, 1 / self.high, 1 / self.low, self.spread, self.passes)

    def widened(self, log_amount: float) -> Interval:
        """The interval made wider by the factor ``exp(log_amount)`` on either side."""
        factor = math.exp(log_amount)
        return Interval(self.value, self.low / factor, self.high * factor, self.spread, self.passes)


@functools.lru_cache(maxsize=4096)
def t_quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t for ``probability`` > 0.5 and any ``freedom`` > 0, by bisection on its distribution."""
    low, high = 0.0, 1e8
    for _ in range(120):
        middle = (low + high) / 2 if high < 1e3 else math.sqrt(max(low, 1e-3) * high)
        tail = 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + middle * middle))
        low, high = (middle, high) if 1 - tail < probability else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function by Lentz's continued fraction (Abramowitz & Stegun 26.5.8)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 300):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + numerator * d or tiny)
            c = 1 + numerator / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * fraction


@functools.lru_cache(maxsize=1024)
def _maritz_jarrett_weights(n: int) -> tuple[Array, Array]:
    """Weights [n] of the sorted values in the exact bootstrap moments of the median (lower, upper middle averaged)."""
    edges = np.linspace(0.0, 1.0, n + 1)

    def weights(a: float, b: float) -> Array:
        return np.diff([_incomplete_beta(a, b, float(x)) for x in edges])

    if n % 2:
        return weights((n + 1) / 2, (n + 1) / 2), weights((n + 1) / 2, (n + 1) / 2)
    return weights(n / 2, n / 2 + 1), weights(n / 2 + 1, n / 2)


def median_errors(logs: Array) -> Array:
    """Bootstrap standard errors [N] of the medians of the rows of ``logs`` [N, n], exactly, without drawing.

    For even ``n`` the mean of the two middle order statistics' variances is used (an upper bound on that of
    their average). A single sample has no error to speak of: NaN.
    """
    n = logs.shape[1]
    if n < 2:
        return np.full(logs.shape[0], np.nan)
    ordered = np.sort(logs, axis=1)
    if n > 256:  # the weights are a narrow normal curve by then: read its width off the order statistics
        reach = math.ceil(1.96 * math.sqrt(n) / 2)
        return (ordered[:, n // 2 + reach] - ordered[:, n // 2 - reach]) / (2 * 1.96)
    variance = np.zeros(logs.shape[0])
    for weight in _maritz_jarrett_weights(n):
        mean = ordered @ weight
        variance += ((ordered - mean[:, None]) ** 2) @ weight / 2
    return np.sqrt(np.maximum(variance, 0.0))


@functools.lru_cache(maxsize=256)
def rank_for(passes: int, level: float = LEVEL) -> int:
    """Largest k such that the k-th smallest to the k-th largest of ``passes`` values hold their median; 0 if none."""
    tail, k = 0.0, 0
    while k < passes // 2:
        tail += math.comb(passes, k) / 2.0**passes
        if 2 * tail > 1 - level:
            break
        k += 1
    return k


def _trigamma(x: float) -> float:
    total = 0.0
    while x < 10:
        total += 1 / (x * x)
        x += 1
    return total + 1 / x + 1 / (2 * x**2) + 1 / (6 * x**3) - 1 / (30 * x**5) + 1 / (42 * x**7)


def _digamma(x: float) -> float:
    total = 0.0
    while x < 10:
        total -= 1 / x
        x += 1
    return total + math.log(x) - 1 / (2 * x) - 1 / (12 * x**2) + 1 / (120 * x**4) - 1 / (252 * x**6)


def prior_variance(variances: Array, freedoms: Array) -> tuple[float, float]:
    """(variance, degrees of freedom) that all cases together lend to each one (Smyth 2004, section 6.2).

    ``variances`` [N] were each estimated with ``freedoms`` [N] degrees of freedom. If the cases' own noise
    differs much, the lent freedom is small. (nan, 0) for fewer than five usable cases: then nothing is lent.
    """
    use = np.isfinite(variances) & (variances > 0) & (freedoms > 0)
    if use.sum() < 5:
        return math.nan, 0.0
    half = freedoms[use] / 2
    excess = np.log(variances[use]) - np.array([_digamma(h) - math.log(h) for h in half])
    wanted = float(np.var(excess, ddof=1) - np.mean([_trigamma(h) for h in half]))
    freedom = PRIOR_LIMIT
    if wanted > _trigamma(PRIOR_LIMIT / 2):
        low, high = 1e-3, PRIOR_LIMIT
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _trigamma(middle / 2) > wanted else (low, middle)
        freedom = high
    half_prior = freedom / 2
    return math.exp(float(np.mean(excess)) + _digamma(half_prior) - math.log(half_prior)), freedom


def centre_intervals(values: Array, errors: Array | None = None, level: float = LEVEL) -> Array:
    """Median and interval of every row of log ``values`` [N, P] (NaN where a pass is missing): [N, 4].

    Columns: median, low, high (logs), spread (log deviation of one pass). ``errors`` [N, P] are standard errors of the
    values from their samples (``median_errors``): passes that agree by luck are not believed beyond them.
    Rows without any value are NaN.
    """
    out = np.full((values.shape[0], 4), np.nan)
    counts = np.sum(np.isfinite(values), axis=1)
    if errors is None:
        errors = np.zeros_like(values)
    within = np.zeros(values.shape[0])
    variance = np.full(values.shape[0], np.nan)
    some = counts > 0
    known = np.isfinite(errors) & np.isfinite(values)
    squares = np.where(known, errors, 0.0) ** 2
    within[some] = squares[some].sum(axis=1) / np.maximum(known[some].sum(axis=1), 1)
    out[some, 0] = np.nanmedian(values[some], axis=1)
    several = counts > 1
    variance[several] = np.maximum(np.nanvar(values[several], axis=1, ddof=1), within[several])
    prior, freedom = prior_variance(variance, counts - 1.0)
    for count in np.unique(counts[some]):
        rows = np.flatnonzero(counts == count)
        if count == 1:
            spread = np.sqrt(np.maximum(ONE_PASS_SPREAD**2, within[rows]))
            half = -t_quantile(0.5 + level / 2, 1e6) * spread
            out[rows, 1], out[rows, 2], out[rows, 3] = out[rows, 0] + half, out[rows, 0] - half, np.nan
            continue
        out[rows, 3] = np.sqrt(variance[rows])
        k = rank_for(int(count), level)
        if count >= RANK_PASSES and k:
            ordered = np.sort(values[rows], axis=1)
            # Never narrower than the samples allow, should the passes agree by luck or by a coarse clock.
            floor = 1.96 * np.sqrt(within[rows] / count)
            out[rows, 1] = np.minimum(ordered[:, k - 1], out[rows, 0] - floor)
            out[rows, 2] = np.maximum(ordered[:, count - k], out[rows, 0] + floor)
            continue
        own = count - 1
        pooled = variance[rows] if not freedom else (freedom * prior + own * variance[rows]) / (freedom + own)
        half = t_quantile(0.5 + level / 2, own + freedom) * np.sqrt(
            pooled * MEDIAN_VARIANCE.get(int(count), math.pi / 2) / count
        )
        out[rows, 1], out[rows, 2] = out[rows, 0] - half, out[rows, 0] + half
    return out


def ratio_interval(
    over: Sequence[float], under: Sequence[float], *, paired: bool = True, level: float = LEVEL
) -> Interval:
    """Interval of ``over / under`` from the pass medians (seconds) of two things.

    ``paired``: the i-th values were measured in the same pass, so its ratio is free of the pass's drift.
    Otherwise the passes are independent and the two medians' errors add (Welch). Raises ``ValueError`` for times
    that are not positive, for nothing to compare and for pairs of different length.
    """
    a, b = np.asarray(over, dtype=float), np.asarray(under, dtype=float)
    if not (a.size and b.size and np.all(a > 0) and np.all(b > 0)):
        raise ValueError("a ratio needs at least one positive time on either side")
    if paired:
        if a.size != b.size:
            raise ValueError(f"paired passes must be as many on either side, got {a.size} and {b.size}")
        centre, low, high, spread = centre_intervals(np.log(a / b)[None], level=level)[0]
        return Interval(math.exp(centre), math.exp(low), math.exp(high), float(spread), a.size)
    rows = [centre_intervals(np.log(side)[None], level=level)[0] for side in (a, b)]
    return unpaired(rows[0], rows[1], (a.size, b.size))


def unpaired(over: Array, under: Array, passes: tuple[int, int]) -> Interval:
    """Ratio of two independent rows of ``centre_intervals``; half-widths add as squares, side by side."""
    centre = over[0] - under[0]
    low = centre - math.hypot(over[0] - over[1], under[2] - under[0])
    high = centre + math.hypot(over[2] - over[0], under[0] - under[1])
    spread = float(np.sqrt(np.nanmean([over[3] ** 2, under[3] ** 2]))) if min(passes) > 1 else math.nan
    return Interval(math.exp(centre), math.exp(low), math.exp(high), spread, min(passes))


def verdict(time_ratio: Interval, slower: float = 0.03, faster: float | None = None) -> str:
    """Verdict on new time / old time: ``slower`` only if the whole interval is beyond ``1 + slower``.

    ``faster`` likewise below ``1 / (1 + faster)`` (default: the same threshold); ``same`` if the whole interval
    is within both; ``inconclusive`` otherwise, and for NaN.
    """
    faster = slower if faster is None else faster
    if time_ratio.low > 1 + slower:
        return SLOWER
    if time_ratio.high < 1 / (1 + faster):
        return FASTER
    if time_ratio.low >= 1 / (1 + faster) and time_ratio.high <= 1 + slower:
        return SAME
    return INCONCLUSIVE


def geometric_mean(ratios: Sequence[float | None]) -> tuple[float, int, int]:
    """(geometric mean, cases averaged, cases left out): None, NaN and non-positive values are counted, never averaged.

    The mean of nothing is NaN.
    """
    good = [r for r in ratios if r is not None and math.isfinite(r) and r > 0]
    mean = math.exp(sum(map(math.log, good)) / len(good)) if good else math.nan
    return mean, len(good), len(ratios) - len(good)


def binomial_interval(found: int, trials: int, level: float = LEVEL) -> tuple[float, float]:
    """Clopper-Pearson interval of a proportion, exact at small counts."""
    if trials < 1 or not 0 <= found <= trials:
        raise ValueError(f"found must be 0..trials with trials >= 1, got {found} of {trials}")
    alpha = (1 - level) / 2

    def solve(a: float, b: float, target: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _incomplete_beta(a, b, middle) < target else (low, middle)
        return (low + high) / 2

    low = 0.0 if found == 0 else solve(found, trials - found + 1, alpha)
    high = 1.0 if found == trials else solve(found + 1, trials - found, 1 - alpha)
    return low, high

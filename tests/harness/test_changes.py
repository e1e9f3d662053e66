"""Change points: how often identical runs give one (by simulation), what is found, what noise and wild runs hide."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from spikemark.harness import changes
from spikemark.harness.changes import LEAST, find
from spikemark.harness.intervals import Array

Noise = Callable[[np.random.Generator, int, int], Array]
STEP = math.log(1.1)


def _resembling(share: float) -> Noise:
    def noise(rng: np.random.Generator, count: int, runs: int) -> Array:
        fresh = rng.normal(size=(count, runs))
        out = fresh.copy()
        for i in range(1, runs):
            out[:, i] = share * out[:, i - 1] + math.sqrt(1 - share**2) * fresh[:, i]
        return out

    return noise


NOISE: dict[str, Noise] = {
    "normal": lambda rng, count, runs: rng.normal(size=(count, runs)),
    "heavy tails": lambda rng, count, runs: rng.standard_t(3, (count, runs)),
    "one wild run in twenty": lambda rng, count, runs: (
        rng.normal(size=(count, runs)) + 10 * (rng.random((count, runs)) < 0.05)
    ),
    "skewed": lambda rng, count, runs: rng.exponential(size=(count, runs)),
    "two modes": lambda rng, count, runs: (
        0.2 * rng.normal(size=(count, runs)) + 1.5 * (rng.random((count, runs)) < 0.3)
    ),
    "a mood of each run": lambda rng, count, runs: (
        rng.normal(size=(1, runs)) + 0.3 * rng.normal(size=(count, runs))
    ),
    "each case its own": lambda rng, count, runs: (
        rng.normal(size=(count, runs)) * np.exp(rng.normal(0, 0.8, (count, 1)))
    ),
    "neighbours alike": _resembling(0.5),
}  # fmt: skip


def found(series: list[Array], least: float = 0.03, errors: float = math.nan) -> list[list[tuple[int, float]]]:
    """(run, ratio) of the change points of each series."""
    results, _ = find(series, [np.full(values.size, errors) for values in series], least)
    return [[(c.at, c.ratio.value) for c in one.changes] for one in results]


# -- false alarms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize(("runs", "count", "histories"), [(12, 40, 40), (40, 20, 40), (200, 20, 8)])
def test_identical_runs_give_no_change_point(noise: str, runs: int, count: int, histories: int) -> None:
    """The promise is at most 1 % of histories with any; the threshold is Bonferroni's, so it is far fewer.

    Even the smallest change counts here: what is tested is significance alone.
    """
    rng = np.random.default_rng(runs)
    alarms = sum(
        any(found(list(0.03 * NOISE[noise](rng, count, runs)), least=1e-6)) for _ in range(histories)
    )  # fmt: skip
    assert alarms <= 1


def test_a_thousand_runs_of_two_hundred_cases_give_no_false_one_and_every_true_one() -> None:
    """3 % noise between runs. Every tenth case becomes 10 % slower at run 600; the others stay as they are."""
    rng = np.random.default_rng(5)
    series = list(0.03 * rng.normal(size=(200, 1000)))
    for values in series[::10]:
        values[600:] += STEP
    for index, steps in enumerate(found(series)):
        if index % 10:
            assert steps == []
        else:
            ((at, ratio),) = steps
            assert abs(at - 600) <= 3
            assert ratio == pytest.approx(1.1, abs=0.01)


def test_copies_and_coarse_clocks_give_none() -> None:
    constant = [np.full(50, math.log(1e-3)) for _ in range(20)]
    assert found(constant) == [[]] * 20
    ticks = [np.log(1e-6 * np.random.default_rng(i).integers(20, 22, 100)) for i in range(20)]
    assert found(ticks) == [[]] * 20


def test_a_slow_swell_is_told_as_resemblance() -> None:
    rng = np.random.default_rng(2)
    series = list(0.03 * _resembling(0.7)(rng, 20, 400))
    results, resemblance = find(series, [np.full(400, math.nan)] * 20, 1e-6)
    assert not any(one.changes for one in results)
    assert 0.55 < resemblance < 0.8
    _, nothing = find(list(0.03 * rng.normal(size=(20, 400))), [np.full(400, math.nan)] * 20, 0.03)
    assert nothing < 0.1


# -- what is found -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["normal", "heavy tails", "one wild run in twenty"])
def test_a_slowdown_that_was_mended_is_two_changes(noise: str) -> None:
    """20 of 400 runs: in the average of all runs before or after either change it would not show."""
    rng = np.random.default_rng(7)
    series = list(0.02 * NOISE[noise](rng, 10, 400))
    series[4][200:220] += STEP
    steps = found(series)
    assert [i for i, one in enumerate(steps) if one] == [4]
    (up, more), (down, less) = steps[4]
    assert abs(up - 200) <= 2 and abs(down - 220) <= 2
    assert more > 1.05 and less < 0.95


def test_the_latest_runs_count_as_soon_as_they_are_enough() -> None:
    rng = np.random.default_rng(8)
    for late, wanted in ((LEAST - 2, 0), (LEAST + 1, 1)):
        series = list(0.02 * rng.normal(size=(20, 300)))
        series[3][-late:] += math.log(1.2)
        assert [len(one) for one in found(series)] == [wanted if i == 3 else 0 for i in range(20)]


@pytest.mark.parametrize("wild", [1, 2, 3, 4])
def test_wild_runs_are_no_change(wild: int) -> None:
    """Even three times slower, as on a machine that somebody else used for an afternoon."""
    rng = np.random.default_rng(wild)
    series = list(0.02 * rng.normal(size=(20, 200)))
    series[0][100 : 100 + wild] += math.log(3)
    assert found(series) == [[]] * 20


def test_several_steps_have_their_sizes_and_places() -> None:
    rng = np.random.default_rng(9)
    truth = {60: 1.2, 130: 0.7, 150: 1.5, 240: 1.1}
    values = 0.02 * rng.normal(size=300)
    for at, ratio in truth.items():
        values[at:] += math.log(ratio)
    steps = found([values, *(0.02 * rng.normal(size=(9, 300)))])[0]
    assert len(steps) == len(truth)
    for (at, ratio), (where, size) in zip(steps, truth.items(), strict=True):
        assert abs(at - where) <= 1
        assert ratio == pytest.approx(size, rel=0.02)


def test_intervals_of_the_ratio_hold_the_truth() -> None:
    rng = np.random.default_rng(10)
    series = list(0.03 * rng.normal(size=(150, 80)))
    for values in series:
        values[40:] += STEP
    results, _ = find(series, [np.full(80, math.nan)] * 150, 0.03)
    ratios = [one.changes[0].ratio for one in results if one.changes]
    assert len(ratios) >= 145
    assert np.mean([r.low <= 1.1 <= r.high for r in ratios]) > 0.9


# -- what noise and size hide --------------------------------------------------------------------------------------


def test_small_changes_are_marked_only_if_asked_for() -> None:
    rng = np.random.default_rng(11)
    series = list(0.004 * rng.normal(size=(10, 100)))
    series[0][50:] += math.log(1.02)
    assert found(series) == [[]] * 10
    assert [len(one) for one in found(series, least=0.01)] == [1] + [0] * 9
    ratio = found(series, least=0.01)[0][0][1]
    assert found(series, least=ratio - 1 - 0.0005)[0] == [], "its interval reaches below"


def test_what_the_runs_say_of_their_own_noise_is_respected() -> None:
    """Runs that agree by luck: each says that its median may be 8 % off, so 10 % between twenty of them are little."""
    rng = np.random.default_rng(12)
    series = list(0.01 * rng.normal(size=(10, 40)))
    for values in series:
        values[20:] += STEP
    assert all(len(one) == 1 for one in found(series))
    assert found(series, errors=0.08) == [[]] * 10


def test_a_run_that_is_less_sure_counts_less() -> None:
    """Five runs of one pass each among forty sure ones: they are no new level if their own error is as large."""
    rng = np.random.default_rng(13)
    series = list(0.01 * rng.normal(size=(10, 80)))
    series[0][40:46] += math.log(1.15)
    errors = [np.full(80, 0.005) for _ in series]
    steps = [len(one.changes) for one in find(series, errors, 0.03)[0]]
    assert steps[0] == 2
    errors[0][40:46] = 0.2
    steps = [len(one.changes) for one in find(series, errors, 0.03)[0]]
    assert steps == [0] * 10


@pytest.mark.parametrize("size", [0, 1, 2, 2 * LEAST - 1])
def test_few_runs_are_not_judged(size: int) -> None:
    results, _ = find([np.linspace(0, 5, size)], [np.full(size, math.nan)], 0.03)
    assert results[0].changes == ()
    assert not results[0].enough
    assert math.isfinite(results[0].scatter)


def test_nothing_at_all() -> None:
    assert find([], [], 0.03) == ([], 0.0)


def test_series_of_different_lengths_go_together() -> None:
    rng = np.random.default_rng(14)
    series = [0.02 * rng.normal(size=n) for n in (4, 10, 11, 50, 333)]
    series[3][25:] += math.log(1.3)
    results, _ = find(series, [np.full(v.size, math.nan) for v in series], 0.03)
    assert [len(one.changes) for one in results] == [0, 0, 0, 1, 0]
    assert [one.enough for one in results] == [False, True, True, True, True]


def test_windows_cover_the_series_and_their_splits_are_counted() -> None:
    for size in (10, 11, 37, 100, 1000):
        layers = changes._layers(size)
        assert layers[0] == (size, (0,))
        for length, starts in layers:
            covered = {i for start in starts for i in range(start, start + length)}
            assert covered == set(range(size)), (size, length)
            steps = np.diff(starts)
            assert (steps <= math.ceil(length / 2)).all(), "neighbours overlap by half"
        values = np.zeros((1, size))
        shapes = [changes._contrasts(values[:, :n], np.ones((1, n)), 3.0).shape[1] * len(s) for n, s in layers]
        assert sum(shapes) == changes._splits(size)

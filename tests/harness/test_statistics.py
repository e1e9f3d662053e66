"""Intervals at few passes (coverage by simulation), verdicts, and the rows that a run is summarised in."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spikemark.harness import intervals, statistics
from spikemark.harness.intervals import Interval, centre_intervals, ratio_interval, verdict
from spikemark.harness.records import COLUMNS, Case, Record
from spikemark.harness.runfolder import Run
from spikemark.harness.statistics import summarise, winners
from spikemark.kernels.types import Problem

TRIALS = 3000


def case(name: str = "torch_eager", workload: str = "w", operator: str = "srm_neuron", device: str = "cpu") -> Case:
    return Case(operator, "forward", name, device, "float32", Problem(workload, "conv", 2, 3, (1, 2, 2), (1, 2, 2)))


def run(records: list[Record], copies: dict[int, float] | None = None, **meta: Any) -> Run:
    calibrations = [
        {"pass_index": p, "environment": "cpu", "copy_bytes_per_s": rate, "samples": [1.0]}
        for p, rate in (copies or {}).items()
    ]
    meta = {"environments": {"cpu": {"device_name": "CPU"}}, "baselines": {"srm_neuron": "torch_eager"}} | meta
    return Run(Path("r"), meta, records, calibrations)


def passes(name: str, medians: list[float], **fields: Any) -> list[Record]:
    """One record a pass, its samples spread symmetrically around the median."""
    spread = (0.99, 0.995, 1.0, 1.005, 1.01)
    return [
        Record(case(name), p, "ok", samples=[m * s for s in spread], environment="cpu", **fields)
        for p, m in enumerate(medians)
    ]


# -- numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probability", "freedom", "wanted"),
    # From published tables of Student's t.
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 8, 2.30600), (0.995, 30, 2.74999), (0.975, 1e6, 1.95997)],
)
def test_t_quantile(probability: float, freedom: float, wanted: float) -> None:
    assert intervals.t_quantile(probability, freedom) == pytest.approx(wanted, rel=2e-5)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_median_error_is_the_bootstrap_deviation_counted_out(n: int) -> None:
    """All n**n resamples of distinct values, exactly; for even n the module promises an upper bound."""
    values = np.array([0.3, 1.1, 1.2, 2.0, 4.5])[:n]
    resamples = np.array(list(itertools.product(values, repeat=n)))
    exact = np.median(resamples, axis=1).std()
    found = intervals.median_errors(values[None])[0]
    if n % 2:
        assert found == pytest.approx(exact, rel=1e-9)
    else:
        assert exact <= found <= 1.6 * exact


def test_median_errors_of_many_samples_agree_with_theory() -> None:
    """Standard error of the median of n normal values: sqrt(pi / 2 / n), either side of the change of method."""
    rng = np.random.default_rng(0)
    for n in (200, 1001):
        found = np.mean(intervals.median_errors(rng.normal(size=(300, n))))
        assert found == pytest.approx(math.sqrt(math.pi / 2 / n), rel=0.1)


def test_a_million_samples_take_no_time() -> None:
    """The weights of the exact formula are not computed for them: each is an incomplete beta function."""
    rng = np.random.default_rng(0)
    assert 0 < intervals.median_errors(rng.normal(size=(1, 1_000_000)))[0] < 0.01
    assert intervals._maritz_jarrett_weights.cache_info().currsize < 1000


def test_rank_interval_is_the_binomial_one() -> None:
    assert [intervals.rank_for(n) for n in (5, 6, 8, 9, 11, 12, 20)] == [0, 1, 1, 2, 2, 3, 6]


@pytest.mark.parametrize(("found", "trials", "low", "high"), [(0, 20, 0.0, 0.16843), (1, 20, 0.00127, 0.24873)])
def test_binomial_interval(found: int, trials: int, low: float, high: float) -> None:
    """Clopper & Pearson's table."""
    assert intervals.binomial_interval(found, trials) == pytest.approx((low, high), abs=1e-5)
    assert intervals.binomial_interval(trials - found, trials) == pytest.approx((1 - high, 1 - low), abs=1e-5)


# -- coverage -----------------------------------------------------------------------------------------------------

NOISE = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy tails": lambda rng, shape: rng.standard_t(2, shape),
    "one wild pass in twenty": lambda rng, shape: rng.normal(size=shape) + 30 * (rng.random(shape) < 0.05),
    "skewed": lambda rng, shape: rng.exponential(size=shape) - math.log(2),
    "each case its own noise": lambda rng, shape: rng.normal(size=shape) * np.exp(rng.normal(0, 0.8, (shape[0], 1))),
}


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 8, 9, 12])
def test_coverage(noise: str, count: int) -> None:
    """95 % intervals hold the true median in 95 % of cases, less two points and the simulation's own error."""
    values = NOISE[noise](np.random.default_rng(count), (TRIALS, count))
    found = centre_intervals(0.03 * values)
    held = np.mean((found[:, 1] <= 0) & (found[:, 2] >= 0))
    assert held >= 0.93
    assert np.mean(found[:, 1] > 0) <= 0.04  # the false-alarm side alone


@pytest.mark.parametrize("count", [2, 3, 5])
def test_coverage_of_a_case_alone(count: int) -> None:
    """With nothing to borrow from, the interval is Student's around the median."""
    values = np.random.default_rng(1).normal(size=(1500, count))
    rows = np.concatenate([centre_intervals(row[None]) for row in values])
    assert np.mean((rows[:, 1] <= 0) & (rows[:, 2] >= 0)) >= 0.93


@pytest.mark.parametrize("count", [6, 8, 9, 12])
def test_coverage_of_two_modes(count: int) -> None:
    """A pass is in a slow or a fast mode by a coin toss: any value between the modes is a median."""
    rng = np.random.default_rng(count)
    values = rng.choice([-1.0, 1.0], (TRIALS, count)) + rng.normal(0, 0.05, (TRIALS, count))
    found = centre_intervals(values)
    assert np.mean((found[:, 1] <= 0) & (found[:, 2] >= 0)) >= 0.94


def test_one_wild_pass_does_not_hide_a_difference() -> None:
    """Nine passes bear one pass that went wrong in either direction."""
    ratios = np.log([1.10, 1.09, 1.11, 1.10, 0.55, 1.12, 1.10, 1.08, 1.9])
    assert verdict(ratio_interval(np.exp(ratios), np.ones(9))) == "slower"


def test_passes_that_agree_by_luck_are_not_believed_beyond_their_samples() -> None:
    values = np.zeros((1, 3))
    loose = centre_intervals(values, np.full((1, 3), 0.1))
    assert loose[0, 2] > 0.1
    assert centre_intervals(np.zeros((1, 9)), np.full((1, 9), 0.1))[0, 2] > 0.05


def test_one_pass_is_not_evidence_of_a_small_difference() -> None:
    assert verdict(ratio_interval([1.2], [1.0])) == "inconclusive"
    assert verdict(ratio_interval([2.0], [1.0])) == "slower"


def test_drift_cancels_pass_by_pass_only() -> None:
    """The machine's speed wanders by half; the second is truly 10 % slower."""
    rng = np.random.default_rng(5)
    mood = np.exp(rng.normal(0, 0.4, 9))
    base, new = mood * np.exp(rng.normal(0, 0.01, 9)), 1.1 * mood * np.exp(rng.normal(0, 0.01, 9))
    paired, apart = ratio_interval(new, base), ratio_interval(new, base, paired=False)
    assert verdict(paired) == "slower"
    assert 1.08 < paired.value < 1.12
    assert apart.high / apart.low > 1.3
    assert verdict(apart) == "inconclusive"


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (1.031, 1.2, "slower"),
        (1.029, 1.2, "inconclusive"),
        (0.98, 1.02, "same"),
        (0.8, 0.96, "faster"),
        (0.8, 0.98, "inconclusive"),
    ],
)
def test_verdict_needs_the_whole_interval(low: float, high: float, wanted: str) -> None:
    assert verdict(Interval((low * high) ** 0.5, low, high), 0.03) == wanted


def test_verdict_of_nothing_is_inconclusive() -> None:
    assert verdict(Interval(math.nan, math.nan, math.nan)) == "inconclusive"


def test_inverse_of_an_interval() -> None:
    other = Interval(2.0, 1.0, 4.0).inverse()
    assert (other.value, other.low, other.high) == (0.5, 0.25, 1.0)


@pytest.mark.parametrize(("a", "b"), [([], [1.0]), ([1.0, 2.0], [1.0]), ([0.0], [1.0]), ([-1.0], [1.0])])
def test_ratio_of_bad_times_is_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match=r"time|many"):
        ratio_interval(a, b)


def test_geometric_mean_counts_what_it_leaves_out() -> None:
    mean, used, left = statistics.geometric_mean([2.0, 0.5, None, math.nan, 0.0])
    assert (mean, used, left) == (pytest.approx(1.0), 2, 3)
    assert math.isnan(statistics.geometric_mean([])[0])


# -- rows ---------------------------------------------------------------------------------------------------------


def test_row_has_the_columns_first_and_the_medians_of_its_passes() -> None:
    (row,) = summarise(run(passes("torch_eager", [1.0, 3.0, 2.0])))
    assert tuple(row)[: len(COLUMNS)] == COLUMNS
    assert row["median_s"] == pytest.approx(2.0)
    assert row["ci_low_s"] < 2.0 < row["ci_high_s"]
    assert (row["samples"], row["passes"], row["speedup"]) == (15, 3, 1.0)
    assert row["pass_medians_s"] == pytest.approx([1.0, 3.0, 2.0])
    assert row["device_name"] == "CPU"


def test_speedup_is_against_the_baseline_of_the_same_pass() -> None:
    """Passes differ by 3x, yet the ratio is 4 in each of them."""
    moods = [1.0, 3.0, 2.0]
    rows = summarise(run(passes("torch_eager", moods) + passes("native", [m / 4 for m in moods])))
    native = rows[1]
    assert native["speedup"] == pytest.approx(4.0)
    assert 3.9 < native["speedup_low"] < 4.0 < native["speedup_high"] < 4.1
    assert (native["verdict"], rows[0]["verdict"]) == ("faster", "")


def test_who_is_slower_than_the_baseline_is_told_so() -> None:
    records = passes("torch_eager", [1.0, 1.01, 0.99]) + passes("native", [1.5, 1.5, 1.5]) + passes("other", [1.01] * 3)
    found = {row["implementation"]: (row["verdict"], row["flags"]) for row in summarise(run(records))}
    assert found["native"] == ("slower", ["slower-than-baseline"])
    assert found["torch_eager"] == ("", []) and found["other"][1] == []


def test_no_speedup_without_a_measured_baseline() -> None:
    rows = summarise(run([*passes("native", [1.0, 1.0]), Record(case(), 0, "crashed", "signal 11", environment="cpu")]))
    assert rows[0]["speedup"] is None
    assert rows[0]["verdict"] == ""


@pytest.mark.parametrize(
    ("statuses", "wanted"),
    [
        (["ok", "incorrect", "crashed"], "incorrect"),
        (["ok", "crashed", "timed-out"], "crashed"),
        (["ok", "ok", "error"], "error"),
    ],
)
def test_worst_status_of_all_passes_counts_and_leaves_no_times(statuses: list[str], wanted: str) -> None:
    records = [
        Record(case(), p, s, "" if s == "ok" else f"why {s}", samples=[1.0] if s == "ok" else [], environment="cpu")
        for p, s in enumerate(statuses)
    ]
    (row,) = summarise(run(records))
    assert row["status"] == wanted
    assert row["reason"] == f"in 1 of 3 passes: why {wanted}"
    assert row["median_s"] is row["speedup"] is row["roofline"] is None
    assert row["samples"] == 0


def test_ok_without_a_usable_time_is_an_error_not_a_nan() -> None:
    (row,) = summarise(run([Record(case(), 0, "ok", samples=[0.0, math.nan, math.inf], environment="cpu")]))
    assert (row["status"], row["median_s"]) == ("error", None)
    assert "positive" in row["reason"]


def test_roofline_uses_the_bandwidth_of_the_same_pass() -> None:
    """The second pass is half as fast, in the kernel and in the copy: the share is the same."""
    records = passes("torch_eager", [1.0, 2.0], cost={"bytes": 50})
    (row,) = summarise(run(records, {0: 100.0, 1: 50.0}))
    assert row["roofline"] == pytest.approx(0.5)
    assert "above-copy-bandwidth" not in row["flags"]


def test_above_copy_bandwidth_is_flagged() -> None:
    (row,) = summarise(run(passes("torch_eager", [1.0], cost={"bytes": 300}), {0: 100.0}))
    assert row["roofline"] == pytest.approx(3.0)
    assert "above-copy-bandwidth" in row["flags"]
    assert "one-pass" in row["flags"]
    assert "noisy" not in row["flags"], "the interval of a single pass is assumed, not found wide"


@pytest.mark.parametrize(
    ("environment", "flags"),
    [
        ({"cpu": {"caches": {"L2": 100, "L3": 300}}}, ["in-cache"]),
        ({"cpu": {"caches": {"L2": 100, "L3": 299}}}, ["above-copy-bandwidth"]),
        ({"cpu": {"caches": {"L3": 9999}}, "gpu": {"l2_bytes": 50}}, ["above-copy-bandwidth"]),
        ({"cpu": {"caches": None}, "gpu": None}, ["above-copy-bandwidth"]),
    ],
)
def test_what_fits_the_last_cache_is_not_bound_by_memory(environment: dict[str, Any], flags: list[str]) -> None:
    environments = {"cpu": {"device_name": "CPU"} | environment}
    records = passes("torch_eager", [1.0, 1.0], cost={"bytes": 300})
    (row,) = summarise(run(records, {0: 100.0, 1: 200.0}, environments=environments))
    assert [f for f in row["flags"] if f != "noisy"] == flags
    (row,) = summarise(run(records, {0: 100.0, 1: 310.0}, environments=environments))
    assert [f for f in row["flags"] if f != "noisy"] == [], "not above it in every pass"


def test_noisy_is_a_wide_interval_not_a_budget_that_was_used_up() -> None:
    (row,) = summarise(run(passes("torch_eager", [1.0, 1.001, 1.002, 1.0, 1.001, 1.0], flags=["noisy"])))
    assert row["noise"] < 0.02 and "noisy" not in row["flags"]
    (row,) = summarise(run(passes("torch_eager", [1.0, 1.4, 1.0, 1.3, 0.8, 1.1])))
    assert row["noise"] > 0.1 and "noisy" in row["flags"]


def test_memory_and_errors_are_the_worst_of_all_passes() -> None:
    records = passes("torch_eager", [1.0, 1.0], memory={"peak_bytes": 5, "saved_bytes": 3, "workspace_bytes": 1})
    records[1].memory = {"peak_bytes": 9}
    records[0].verification = {"max_error": math.nan, "ambiguous": 0}
    records[1].verification = {"max_error": 0.5, "ambiguous": 4}
    (row,) = summarise(run(records))
    assert (row["peak_bytes"], row["saved_bytes"], row["workspace_bytes"]) == (9, 3, 1)
    assert (row["max_error"], row["ambiguous"]) == (0.5, 4)


def test_winner_alone_when_clearly_ahead_else_all_that_tie() -> None:
    group = case().group
    clear = passes("torch_eager", [1.0] * 3) + passes("native", [0.5] * 3) + passes("other", [0.9] * 3)
    assert winners(summarise(run(clear))) == {group: ["native"]}
    close = (
        passes("torch_eager", [1.0] * 3) + passes("native", [0.50, 0.51, 0.52]) + passes("other", [0.52, 0.51, 0.50])
    )
    assert winners(summarise(run(close))) == {group: ["native", "other"]}
    assert winners(summarise(run(passes("native", [1.0] * 3)))) == {}


def test_two_honest_runs_name_the_same_winners() -> None:
    """Two names for one kernel, one 30 % slower, one 5x slower: fifty runs of three passes, 3 % noise, all agree."""
    seen = set()
    for seed in range(50):
        rng = np.random.default_rng(seed)
        records: list[Record] = []
        for workload in range(8):
            for name, true in (("torch_eager", 5.0), ("a", 1.0), ("b", 1.0), ("c", 1.4)):
                for p in range(3):
                    centre = true * math.exp(rng.normal(0, 0.02))
                    samples = (centre * np.exp(rng.normal(0, 0.02, 12))).tolist()
                    records.append(Record(case(name, f"w{workload}"), p, "ok", samples=samples, environment="cpu"))
        rows = summarise(run(records))
        seen.add(str((winners(rows), [row["verdict"] for row in rows])))
    assert len(seen) == 1


def test_versions_of_an_ab_run_stay_apart() -> None:
    records = passes("torch_eager", [1.0, 1.0], details={"variant": "base"})
    records += passes("torch_eager", [2.0, 2.0], details={"variant": "new"})
    rows = summarise(run(records))
    assert [(row["variant"], row["median_s"]) for row in rows] == [
        ("base", pytest.approx(1.0)),
        ("new", pytest.approx(2.0)),
    ]


def test_runs_are_merged_as_more_passes_and_machines_stay_apart() -> None:
    one, two = run(passes("torch_eager", [1.0, 1.2])), run(passes("torch_eager", [1.1]))
    (row,) = summarise([one, two])
    assert (row["passes"], row["median_s"]) == (3, pytest.approx(1.1))
    two.meta["environments"] = {"cpu": {"device_name": "another CPU"}}
    assert [r["device_name"] for r in summarise([one, two])] == ["CPU", "another CPU"]


def test_same_data_same_rows() -> None:
    records = passes("torch_eager", [1.0, 1.3, 0.9]) + passes("native", [0.5, 0.6, 0.55])
    assert summarise(run(records)) == summarise(run(records))


# -- turns ---------------------------------------------------------------------------------------------------------


def in_turns(slow: list[float], ratio: float, block: str = "b", pass_index: int = 0) -> list[Record]:
    """Baseline and native in one pass: turns of one sample on a machine that is ``slow[n]`` times slower in turn n.

    The baseline's first turns are cut into two samples each, so that the medians of all samples mislead.
    """
    base = [s for i, s in enumerate(slow) for _ in range(2 if i < len(slow) // 2 else 1)]
    begins, position = [], 0
    for i in range(len(slow)):
        begins.append(position)
        position += 2 if i < len(slow) // 2 else 1
    shared = {"block": block}
    return [
        Record(case(), pass_index, "ok", samples=base, environment="cpu", details=shared | {"bursts": begins}),
        Record(
            case("native"),
            pass_index,
            "ok",
            samples=[s / ratio for s in slow],
            environment="cpu",
            details=shared | {"bursts": list(range(len(slow)))},
        ),
    ]


def test_speedups_are_paired_turn_by_turn() -> None:
    """Slow in the first half of the pass: turns tell 2.0 exactly, medians of all samples something else."""
    slow = [3.0] * 10 + [1.0] * 11
    records = [r for p in range(3) for r in in_turns(slow, 2.0, f"b{p}", p)]
    row = next(r for r in summarise(run(records)) if r["implementation"] == "native")
    assert row["speedup"] == pytest.approx(2.0)
    assert row["speedup_low"] == pytest.approx(2.0, rel=0.02)
    assert row["verdict"] == "faster"
    assert winners(summarise(run(records))) == {case().group: ["native"]}
    for record in records:
        record.details.pop("block")
    row = next(r for r in summarise(run(records)) if r["implementation"] == "native")
    assert row["speedup"] == pytest.approx(6.0), "without turns: one median is a slow moment's, the other a fast one's"


def test_other_turns_are_not_paired() -> None:
    """A case that was measured anew in another process shares the pass, not the moments."""
    slow = [3.0] * 10 + [1.0] * 11
    first, second = in_turns(slow, 2.0, "a"), in_turns(slow, 2.0, "b")
    mixed = summarise(run([first[0], second[1]]))
    assert next(r for r in mixed if r["implementation"] == "native")["speedup"] == pytest.approx(6.0)


def test_rows_say_which_kernel_ran() -> None:
    records = passes("native", [1.0, 1.0], details={"ran": "tiled<8>"})
    (row,) = summarise(run(records))
    assert row["ran"] == "tiled<8>"
    (row,) = summarise(run(passes("torch_eager", [1.0])))
    assert row["ran"] == ""

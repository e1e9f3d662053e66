"""The self-test: its counting on made-up passes, its delay, and one real pair of processes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from spikemark.harness import ab, selftest
from spikemark.harness.selftest import Plan, judge, trial_key


def passes(plan: Plan, seen: dict[float, float], seed: int = 0, noise: float = 0.01) -> list[selftest.Sides]:
    """Passes in which a delay of ``d`` makes the new version ``seen[d]`` times as slow, while the machine jumps."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(plan.passes):
        sides: selftest.Sides = {ab.BASE: {}, ab.NEW: {}}
        for delay in plan.delays:
            for trial in range(plan.trials):
                moods = np.exp(rng.choice([0.0, 0.5], 20))
                for label, factor in ((ab.BASE, 1.0), (ab.NEW, seen[delay] * math.exp(rng.normal(0, noise)))):
                    samples = (1e-3 * moods * factor).tolist()
                    sides[label][trial_key(trial, delay)] = (samples, list(range(20)))
        out.append(sides)
    return out


def test_counts_false_alarms_and_finds_the_smallest_difference() -> None:
    plan = Plan(trials=40, delays=(0.0, 0.02, 0.05, 0.10), passes=9)
    found = judge(plan, passes(plan, {0.0: 1.0, 0.02: 1.02, 0.05: 1.05, 0.10: 1.10}, noise=0.02))
    assert found["false_alarms"]["trials"] == 40
    assert found["false_alarms"]["slower"] == 0
    assert found["false_alarms"]["share_high"] == pytest.approx(0.0881, abs=1e-4)  # Clopper-Pearson for 0 of 40
    assert [entry["slower"] >= 38 for entry in found["delays"]] == [False, False, True]
    assert found["smallest_difference"] == 0.10
    assert found["delays"][2]["median_ratio"] == pytest.approx(1.10, abs=0.01)
    assert found["noise"] == pytest.approx(0.02, rel=0.3)
    json.dumps(found, allow_nan=False)


def test_false_alarms_are_counted_when_there_are_any() -> None:
    """A harness with a bias of 10 % between its two sides must be found out by its own test."""
    plan = Plan(trials=10, delays=(0.0, 0.1), passes=9)
    found = judge(plan, passes(plan, {0.0: 1.1, 0.1: 1.0}))
    assert found["false_alarms"]["slower"] == 10
    assert found["smallest_difference"] is None


def test_text_tells_counts_and_intervals() -> None:
    plan = Plan(trials=10, delays=(0.0, 0.1), passes=9)
    found = judge(plan, passes(plan, {0.0: 1.0, 0.1: 1.1})) | {"kernel": "k", "load": 0.5}
    text = selftest.text(found)
    assert "slower by more than 3%: 0 of 10" in text
    assert "Slower by 10%: found in 10 of 10" in text
    assert "at least 95% of trials: 10%" in text


def test_both_sides_draw_the_same_order_and_passes_differ() -> None:
    plan = Plan(trials=25)
    groups = selftest._groups(plan)
    assert [t for group in groups for t in group] == list(range(25)) and len(groups) == 2
    first = selftest._order(plan, 0, groups[0])
    assert first == selftest._order(plan, 0, groups[0])
    assert first != selftest._order(plan, 1, groups[0])
    assert [d for _, d in first] != [d for _, d in selftest._order(plan, 0, groups[1])]
    assert sorted(first) == sorted((t, d) for t in range(20) for d in plan.delays)


def test_delays_are_tried_a_hundred_times_at_most() -> None:
    plan = Plan(trials=130, delays=(0.0, 0.1))
    order = [slot for group in selftest._groups(plan) for slot in selftest._order(plan, 0, group)]
    assert [t for t, d in order if d == 0] == list(range(130))
    assert [t for t, d in order if d == 0.1] == list(range(100))
    found = judge(plan, passes(plan, {0.0: 1.0, 0.1: 1.1}))
    assert (found["false_alarms"]["trials"], found["delays"][0]["trials"], found["groups"]) == (130, 100, 7)


def test_the_delay_is_a_fraction_of_the_call_and_plain_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves 100 ns a look, every call takes half as long again as it would, however long that is."""
    from spikemark.harness import selftest_worker

    now = [0]

    def look() -> int:
        now[0] += 100
        return now[0]

    def kernel(duration: int) -> str:
        now[0] += duration - 100
        return "result"

    monkeypatch.setattr(selftest_worker, "now_ns", look)
    call = selftest_worker.delayed(kernel, 0.5)
    for duration in (1000, 1000, 5000, 90_000):
        before = now[0]
        assert call(duration) == "result"
        assert now[0] - before - duration == pytest.approx(duration / 2, abs=300)
    plain = selftest_worker.delayed(kernel, 0.0)
    before = now[0]
    plain(1000)
    assert now[0] - before - 1000 <= 300


def test_one_real_pass() -> None:
    """Two processes, in turns, through the same sampling as a run: samples in bursts on both sides."""
    seen: list[Any] = []
    found = selftest.run(Plan(trials=1, delays=(0.0,), passes=1), seen.append)
    assert found["kernel"].startswith("srm_neuron/forward/selftest/")
    assert found["false_alarms"]["trials"] == 1
    assert 0 < found["kernel_s"] < 10
    assert len(seen) == 1
    assert found["noise"] is None
    assert "unknown (one pass)" in selftest.text(found)
    # One pass is no evidence of anything below tens of percent, and says so by finding nothing.
    assert found["false_alarms"]["slower"] == 0

"""Comparing runs: what is a regression, what is drift, what is refused, and how it reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spikemark.harness.contrast import burst_ratios, together
from spikemark.harness.errors import NothingMeasured, UsageError
from spikemark.harness.records import Case, Record
from spikemark.harness.runfolder import Run
from spikemark.kernels.types import Problem
from spikemark.reports import compare as comparing
from spikemark.reports import compare_text
from spikemark.reports.compare import compare, parse_fail_on

ENVIRONMENT = {"device": "cpu", "device_name": "CPU", "kind": "cpu", "threads": 2, "versions": {"torch": "2.13.0"}}
HOSTILE = "<img src=x onerror=1>|`a`|@everyone [x](http://y) \x1b[31m\nnext"


def case(index: int = 0, name: str = "native", device: str = "cpu", workload: str | None = None) -> Case:
    problem = Problem(workload or f"net/layer{index}", "conv", 2, 3, (1, 2, 2), (1, 2, 2))
    return Case("srm_neuron", "forward", name, device, "float32", problem)


def run(records: list[Record], copies: dict[int, float] | None = None, name: str = "r", **meta: Any) -> Run:
    lines = [
        {"pass_index": p, "environment": "cpu", "copy_bytes_per_s": 1 / s, "samples": [s], "compute_samples": [2 * s]}
        for p, s in (copies or {}).items()
    ]
    return Run(Path(name), {"environments": {"cpu": ENVIRONMENT}} | meta, records, lines)


def measured(
    rng: np.random.Generator,
    slower: Callable[[int], float] = lambda index: 1.0,
    *,
    cases: int = 30,
    drift: float = 1.0,
    scatter: float = 0.02,
    passes: int = 3,
) -> Run:
    """A run of ``cases`` cases of about a millisecond; ``drift`` is how much slower the whole machine is."""
    records = []
    for index in range(cases):
        centre = 1e-3 * (1 + index) * slower(index) * drift * math.exp(rng.normal(0, scatter))
        for p in range(passes):
            samples = centre * math.exp(rng.normal(0, 0.01)) * np.exp(rng.normal(0, 0.02, 12))
            records.append(Record(case(index), p, "ok", samples=samples.tolist(), environment="cpu"))
    return run(records, {p: drift * math.exp(rng.normal(0, 0.02)) for p in range(passes)})


def interleaved(
    rng: np.random.Generator, true: float = 1.0, passes: int = 9, cases: int = 1, noise: float = 0.02
) -> tuple[Run, Run]:
    """Both versions of an A/B run: the machine's speed jumps from burst to burst, for both alike."""
    sides: tuple[list[Record], list[Record]] = ([], [])
    for index in range(cases):
        for p in range(passes):
            moods = np.exp(rng.choice([0.0, 0.6], 20) + rng.normal(0, 0.1, 20))
            layout = math.exp(rng.normal(0, noise))
            for side, factor in zip(sides, (1.0, true * layout), strict=True):
                samples = (1e-3 * moods * factor * np.exp(rng.normal(0, 0.05, 20))).tolist()
                details = {"bursts": list(range(20))}
                side.append(Record(case(index), p, "ok", samples=samples, environment="cpu", details=details))
    return run(sides[0], name="base"), run(sides[1], name="new")


# -- in one run ----------------------------------------------------------------------------------------------------


def test_bursts_are_compared_with_their_neighbours() -> None:
    """The machine is twice as slow for half of the time, but the change falls between different samples of the two."""
    base = ([1.0, 1.0, 1.0, 2.0], [0, 3])
    new = ([1.0, 2.0, 2.0, 2.0], [0, 1])
    assert burst_ratios(base, new) == pytest.approx([0.0, 0.0])
    assert np.median(new[0]) / np.median(base[0]) == 2.0  # what all samples together would say
    assert burst_ratios(([1.0, 3.0], []), ([4.0], [])) == pytest.approx([math.log(2)])


def test_pairs_that_miss_a_side_are_left_out() -> None:
    (ratio,) = together([{0: ([1.0], []), 1: ([1.0], [])}], [{1: ([2.0], []), 2: ([9.0], [])}])
    assert (ratio.value, ratio.passes) == (pytest.approx(2.0), 1)
    (nothing,) = together([{0: ([1.0], [])}], [{1: ([1.0], [])}])
    assert math.isnan(nothing.value)
    assert nothing.passes == 0


def test_false_alarms_and_power_in_one_run() -> None:
    """Jumps of 1.8x, 2 % between processes: 200 identical pairs, 100 that are 10 % slower, as the goal is put."""
    rng = np.random.default_rng(11)
    same = compare(*interleaved(rng, cases=200), one_run=True)
    assert same.counts.get("slower", 0) <= 2
    slow = compare(*interleaved(rng, 1.10, cases=100), one_run=True)
    assert slow.counts.get("slower", 0) >= 95
    assert slow.mean[0] == pytest.approx(1.10, abs=0.01)
    assert slow.exit_code() == 1


# -- made apart ----------------------------------------------------------------------------------------------------


def test_runs_apart_almost_never_cry_wolf() -> None:
    """200 pairs of identical runs of 12 cases, on a machine that drifts by up to 1.7x: at most 1 % have any alarm."""
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(200):
        drift = 1.7 ** rng.uniform(-1, 1)
        pair = [measured(rng, cases=12, drift=d, scatter=0.05) for d in (1.0, drift)]
        alarms += bool(compare(*pair).counts.get("slower"))
    assert alarms <= 2


def test_a_case_that_stands_out_is_seen_and_the_drift_is_said() -> None:
    rng = np.random.default_rng(4)
    slower = lambda index: 2.0 if index == 7 else 1.0  # noqa: E731
    found = compare(measured(rng), measured(rng, slower, drift=1.3))
    assert [c.new["workload"] for c in found.changes if c.verdict == "slower"] == ["net/layer7"]
    assert found.drift is not None
    assert math.exp(found.drift.common) == pytest.approx(1.3, rel=0.05)
    assert set(found.drift.gauges) == {"copy", "computation"}
    assert math.exp(found.drift.gauges["copy"]) == pytest.approx(1.3, rel=0.1)
    said = " ".join(compare_text.remarks(found))
    assert "made at different times" in said
    assert "compare --measure" in said
    assert re.search(r"30 cases together took \+(2[5-9]|3[0-5])", said)


def test_a_shift_of_everything_is_not_called_a_regression() -> None:
    """Nothing can tell a slower machine from slower code when all cases move alike, with calibration or without."""
    rng = np.random.default_rng(5)
    base, new = measured(rng), measured(rng, drift=1.4)
    assert "slower" not in compare(base, new).counts
    base.calibrations, new.calibrations = [], []
    found = compare(base, new)
    assert "slower" not in found.counts
    assert found.drift is not None
    assert found.drift.gauges == {}


def test_a_single_case_apart_can_only_be_inconclusive_or_huge() -> None:
    rng = np.random.default_rng(6)
    found = compare(measured(rng, cases=1), measured(rng, lambda index: 1.3, cases=1))
    assert found.counts == {"inconclusive": 1}
    assert found.exit_code() == 0
    assert found.exit_code(strict=True) == 5


# -- what is not measured -------------------------------------------------------------------------------------------


def test_what_was_ok_and_is_not_is_a_regression() -> None:
    rng = np.random.default_rng(7)
    base, new = measured(rng, cases=10), measured(rng, cases=10)
    new.records = [r for r in new.records if r.case.workload != "net/layer3"]
    new.records.append(Record(case(3), 0, "incorrect", "grad_t differs", environment="cpu"))
    found = compare(base, new)
    assert found.counts["broken"] == 1
    assert found.exit_code() == 1
    assert found.changes[0].reason == "incorrect: grad_t differs"
    assert found.mean[1:] == (9, 1)


def test_what_was_never_ok_is_counted_and_not_averaged() -> None:
    rng = np.random.default_rng(8)
    sides = [measured(rng, cases=10) for _ in range(2)]
    for side in sides:
        side.records.append(Record(case(99), 0, "unavailable", "no compiler", environment="cpu"))
    sides[1].records += [Record(case(98), 0, "ok", samples=[1.0], environment="cpu")]
    found = compare(*sides)
    assert found.counts["not measured"] == 1
    assert found.only_new == [case(98).key]
    assert found.mean[1:] == (10, 2)
    assert "slower" not in found.counts


def test_nothing_in_common_measures_nothing() -> None:
    one = run([Record(case(1), 0, "ok", samples=[1.0], environment="cpu")])
    with pytest.raises(NothingMeasured, match="no case in common"):
        compare(one, run([Record(case(2), 0, "ok", samples=[1.0], environment="cpu")]))
    failed = run([Record(case(1), 0, "unavailable", "why", environment="cpu")])
    with pytest.raises(NothingMeasured, match="no case was measured in both"):
        compare(failed, one)


def test_environments_that_do_not_match_are_refused_by_field() -> None:
    records = [Record(case(), 0, "ok", samples=[1.0], environment="cpu")]
    other = {"cpu": ENVIRONMENT | {"threads": 4, "versions": {"torch": "2.6.0"}}}
    with pytest.raises(UsageError) as caught:
        compare(run(records), run(records, environments=other))
    assert re.search(r"threads \(2 and 4\)", str(caught.value))
    assert re.search(r"versions.torch \(2.13.0 and 2.6.0\)", str(caught.value))
    found = compare(run(records), run(records, environments=other), across=True)
    assert "threads" in found.differing["cpu"]
    assert any("Environments differ on cpu" in text for text in compare_text.remarks(found))


def test_across_compares_two_devices() -> None:
    records = [Record(case(device=d), 0, "ok", samples=[t], environment=d) for d, t in (("cpu", 1.0), ("cpu:1", 3.0))]
    sides = [run([r], environments={r.environment: ENVIRONMENT | {"device": r.environment}}) for r in records]
    with pytest.raises(NothingMeasured):
        compare(*sides)
    (change,) = compare(*sides, across=True).changes
    assert change.ratio is not None
    assert change.ratio.value == pytest.approx(3.0)


def test_memory_can_be_a_regression_too() -> None:
    rng = np.random.default_rng(9)
    base, new = interleaved(rng, cases=3)
    for side, size in ((base, 100), (new, 130)):
        for record in side.records:
            record.memory = {"peak_bytes": size if record.case.workload == "net/layer1" else 100}
    assert compare(base, new, one_run=True).exit_code() == 0
    found = compare(base, new, parse_fail_on(["memory:20%"]), one_run=True)
    assert [c.new["workload"] for c in found.regressions] == ["net/layer1"]
    assert "peak memory +30.0 %" in compare_text.table(found)


@pytest.mark.parametrize("text", ["slower", "slower:3", "slower:-3%", "faster:3%", "slower:x%", "memory:%", ""])
def test_fail_on_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="slower:3%"):
        parse_fail_on([text])


def test_fail_on() -> None:
    assert parse_fail_on([]) == {"slower": 0.03}
    assert parse_fail_on(["slower:7.5%", "memory:10%"]) == {"slower": 0.075, "memory": 0.1}


# -- how it reads -----------------------------------------------------------------------------------------------------


def hostile() -> comparing.Comparison:
    rng = np.random.default_rng(10)
    sides = [measured(rng, cases=10) for _ in range(2)]
    for side, samples in zip(sides, ([1.0], []), strict=True):
        status = "ok" if samples else "crashed"
        side.records.append(
            Record(case(name=HOSTILE, workload=HOSTILE), 0, status, HOSTILE, samples=samples, environment="cpu")
        )
    return compare(*sides)


def test_table_has_one_line_a_case_and_no_control_character() -> None:
    text = compare_text.table(hostile())
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert text.count("\n") < 20
    assert "1 regression: 1 broken" in text


def test_markdown_is_literal_and_fits_a_comment() -> None:
    text = compare_text.markdown(hostile())
    assert "<img" not in text
    assert "@everyone" not in text
    row = next(line for line in text.splitlines() if "img" in line)
    assert row.count("|") == 7
    rng = np.random.default_rng(12)
    many = measured(rng, cases=3000, passes=1), measured(rng, lambda i: 1 + i % 7, cases=3000, passes=1)
    long = compare_text.markdown(compare(*many))
    assert len(long) < 65_536
    assert re.search(r"and [\d,]+ cases more", long)
    assert long.count("<details>") == long.count("</details>") == 1


def test_json_says_everything_and_is_json() -> None:
    found = hostile()
    data = json.loads(json.dumps(compare_text.to_json(found), allow_nan=False))
    assert data["exit_code"] == 1
    assert data["regressions"] == [case(name=HOSTILE, workload=HOSTILE).key]
    one = next(c for c in data["cases"] if c["workload"] == "net/layer4")
    assert one["ratio"]["low"] <= one["ratio"]["value"] <= one["ratio"]["high"]
    assert one["base"]["median_s"] > 0
    assert data["drift"]["cases"] == 10
    assert data["measured"] == "in two runs"


def test_a_long_table_leaves_out_only_what_stayed_the_same() -> None:
    versions = interleaved(np.random.default_rng(13), cases=12, noise=0.001)
    found = compare(*versions, {"slower": 0.1}, one_run=True)
    assert found.counts == {"same": 12}
    short = compare_text.table(found, limit=10)
    assert "12 that stayed the same" in short
    assert "net/layer3" not in short
    assert "net/layer3" in compare_text.table(found, limit=None)

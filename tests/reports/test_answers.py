"""The first screen: winners, ties, how sure, warnings, and what must not be compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
from spikemark.harness.records import Record
from spikemark.reports import answers, environments
from spikemark.reports.rows import Report, read
from spikemark.reports.warnings import warnings

ONE = {"mnist/conv1": ((15, 24, 24), 5)}


def run(path: Path, passes: int = 3, change: Any = lambda r: r, **meta: Any) -> Report:
    """A run of the neuron's forward on one workload; ``change`` edits its records."""
    every = [c for c in synthetic.cases(workloads=ONE, batches=(8,), operators=("srm_neuron",)) if c.phase == "forward"]
    records = [change(synthetic.record(c, p, noise=0.01)) for p in range(passes) for c in every]
    return read([synthetic.write(path, records, passes=passes, **meta)])


def answer(report: Report) -> answers.Answer:
    (only,) = answers.answers(report)
    return only


def test_the_fastest_right_implementation_wins(tmp_path: Path) -> None:
    found = answer(run(tmp_path / "r"))
    assert found.names == ["native"] and found.baseline and found.baseline["implementation"] == "torch_eager"
    assert found.lead == pytest.approx(11 / 4, rel=0.15) and found.surety == answers.UNCHECKED


def test_a_wrong_one_never_wins(tmp_path: Path) -> None:
    def spoil(record: Record) -> Record:
        wrong = record.case.implementation == "native" and record.pass_index == 1
        return replace(record, status="incorrect", reason="differs") if wrong else record

    assert answer(run(tmp_path / "r", change=spoil)).names == ["torch_compile"]


def test_intervals_that_do_not_separate_are_a_tie(tmp_path: Path) -> None:
    def equal(record: Record) -> Record:
        if record.case.implementation == "torch_compile":
            return synthetic.record(
                replace(record.case, implementation="native"), record.pass_index, seed=1, noise=0.01
            )
        return record

    def renamed(record: Record) -> Record:
        out = equal(record)
        return replace(out, case=record.case)

    found = answer(run(tmp_path / "r", change=renamed))
    assert set(found.names) == {"native", "torch_compile"} and found.surety == answers.TIE


@pytest.mark.parametrize(
    ("smallest", "surety"), [(0.05, answers.CLEAR), (5.0, answers.NOISE), (None, answers.UNCHECKED)]
)
def test_the_self_test_decides_whether_a_lead_is_claimed(tmp_path: Path, smallest: float | None, surety: str) -> None:
    report = run(tmp_path / "r", selftest={"smallest_difference": smallest})
    assert answer(report).surety == surety
    texts = " ".join(w.text for w in warnings(report))
    assert ("found none of its delays" in texts) == (smallest is None)


def test_disturbed_and_single_passes_are_not_called_clear(tmp_path: Path) -> None:
    def flag(record: Record) -> Record:
        return replace(record, flags=["shared-device"]) if record.case.implementation == "native" else record

    assert answer(run(tmp_path / "a", change=flag)).surety == answers.DISTURBED
    assert answer(run(tmp_path / "b", passes=1)).surety in (answers.ONE_PASS, answers.TIE)


def test_a_section_is_summed_up_in_one_line(everyday: Path) -> None:
    report = read([everyday])
    sections = answers.sections(report, answers.answers(report), lambda key: key)
    assert [(s.operator, s.phase, s.title) for s in sections][:2] == [
        ("srm_neuron", "forward", "cpu"),
        ("srm_neuron", "backward", "cpu"),
    ]
    assert sections[0].summary.startswith("native fastest in 8 of 8, 9.")


def test_every_failure_is_warned_of(everyday: Path) -> None:
    found = warnings(read([everyday]))
    assert [w.level for w in found] == sorted((w.level for w in found), key=["bad", "care", "note"].index)
    texts = " ".join(w.text for w in found)
    for word in ("wrong result", "crashed", "raised an error", "ran out of memory", "ran out of time", "not supported"):
        assert word in texts
    assert {"status": "incorrect"} in [w.query for w in found]


def test_what_was_planned_and_not_measured_is_said(tmp_path: Path) -> None:
    texts = " ".join(w.text for w in warnings(run(tmp_path / "a", planned=9, unmeasured=["x"] * 5, interrupted=True)))
    assert "5 planned cases not measured" in texts and "Interrupted before" in texts


def test_what_holds_for_several_runs_is_said_once(tmp_path: Path) -> None:
    busy = synthetic.environment(cpu={"model": "X", "cores": 4, "load": 3.5})
    busier = synthetic.environment(cpu={"model": "X", "cores": 4, "load": 7.25})
    records = [synthetic.record(c, 0) for c in synthetic.cases(workloads=ONE, batches=(8,))]
    one = synthetic.write(tmp_path / "one", records, passes=1, environments={"cpu": busy})
    two = synthetic.write(tmp_path / "two", records, passes=1, environments={"cpu": busier})
    texts = [w.text for w in warnings(read([one, two]))]
    assert sum("no self-test" in t for t in texts) == 1 and any(
        t.startswith("Runs one and two: no self") for t in texts
    )
    assert [t for t in texts if "busy" in t] == [
        "The machine was busy before the run began (two · cpu: load 7.2 on 4 cores; 1 other)."
    ]


@pytest.mark.parametrize(
    ("over", "under", "wanted"),
    [
        ((6.0, 4.0, 9.0), (2.0, 1.0, 3.0), (3.0, 4 / 3, 9.0)),
        ((6.0, None, None), (2.0, 1.0, 3.0), (3.0, None, None)),
        ((6.0, 4.0, 9.0), (2.0, 0.0, 3.0), (3.0, None, None)),
    ],
)
def test_a_ratio_of_times_has_the_widest_interval(over: Any, under: Any, wanted: Any) -> None:
    rows = [dict(zip(("median_s", "ci_low_s", "ci_high_s"), times, strict=True)) for times in (over, under)]
    assert answers.time_ratio(*rows) == wanted


def _two_runs(tmp_path: Path, **second: Any) -> Report:
    records = [synthetic.record(c, 0) for c in synthetic.cases(workloads=ONE, batches=(8,))]
    times = {"started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:05:00+00:00"}
    paths = [
        synthetic.write(tmp_path / "one", records, passes=1, **times),
        synthetic.write(tmp_path / "two", records, passes=1, **(times | second)),
    ]
    return read(list(paths))


def test_two_runs_at_once_are_told(tmp_path: Path) -> None:
    overlap = {"started": "2026-01-01T00:04:00+00:00", "ended": "2026-01-01T00:09:00+00:00"}
    assert "at the same time" in " ".join(w.text for w in warnings(_two_runs(tmp_path / "a", **overlap)))
    later = {"started": "2026-01-01T00:06:00+00:00", "ended": "2026-01-01T00:09:00+00:00"}
    assert "at the same time" not in " ".join(w.text for w in warnings(_two_runs(tmp_path / "b", **later)))
    elsewhere = {"cpu": synthetic.environment(machine="Other CPU")}
    other = _two_runs(tmp_path / "c", **overlap, environments=elsewhere)
    assert "at the same time" not in " ".join(w.text for w in warnings(other))


def test_what_differs_between_environments_is_listed(tmp_path: Path) -> None:
    other = synthetic.environment(
        machine="Other CPU", versions={"python": "3.12.1", "torch": "2.6.0", "numpy": "2.4.6"}
    )
    report = _two_runs(tmp_path, environments={"cpu": other})
    titles, rows = environments.differing(report)
    assert titles == ["one · cpu", "two · cpu"]
    fields = dict(rows)
    assert fields["device_name"] == ["Synthetic CPU 3000", "Other CPU"] and fields["versions.torch"] == [
        "2.13.0",
        "2.6.0",
    ]
    assert "versions.numpy" not in fields


def test_only_devices_under_one_software_are_divided() -> None:
    one, other = synthetic.environment(), synthetic.environment("cpu:1", threads=1)
    assert environments.software_differences(one, other) == []
    newer = synthetic.environment("cpu:1", versions={"torch": "2.14.0"}, project={"commit": "fff", "dirty": False})
    assert [f[0] for f in environments.software_differences(one, newer)] == ["versions.torch", "project.commit"]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    assert other["switches"]["variables"] == threads and one["switches"]["variables"] == {}
    other["switches"]["variables"] = threads | {"MKL_CBWR": "AVX2"}
    ((name, here, there),) = environments.software_differences(one, other)
    assert (name, here, there) == ("switches.variables", {}, {"MKL_CBWR": "AVX2"})
    assert environments.identity(one) == environments.identity(synthetic.environment(cpu=one["cpu"] | {"load": 9.0}))
    assert environments.identity(one) != environments.identity(other)


def _flatten_keys() -> Iterator[str]:
    yield from environments.flatten({"a": {"b": 1, "c": {}}, "d": None})


def test_nested_fields_are_dotted() -> None:
    assert list(_flatten_keys()) == ["a.b", "d"]

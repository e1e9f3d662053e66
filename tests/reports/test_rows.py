"""``load``: one tidy row a case and run, and the command that measures it again."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
from spikemark import reports
from spikemark.harness.errors import UsageError
from spikemark.harness.records import COLUMNS
from spikemark.kernels.types import Recording
from spikemark.reports.rows import command, order, read


def test_load_gives_a_tidy_frame(everyday: Path) -> None:
    table = reports.load(everyday)
    assert list(table.columns[: len(COLUMNS)]) == list(COLUMNS)
    assert len(table) == 295 and set(table["run"]) == {"everyday"}
    assert table["median_s"].dtype == float and table["median_s"].notna().sum() == 288
    assert set(table["environment.threads"]) == {1, 2}
    native = table[(table.operator == "srm_neuron") & (table.implementation == "native") & (table.batch == 8)]
    assert native["speedup"].between(6, 12).all()
    slow, fast = (native[native.device == d].set_index(["workload", "phase"])["median_s"] for d in ("cpu:1", "cpu"))
    assert ((slow / fast).round(1) == 2.0).mean() > 0.5


def test_load_stays_callable_after_the_reading_module_is_imported(everyday: Path) -> None:
    import spikemark.reports.rows  # noqa: F401

    assert len(reports.load(everyday)) == 295


def test_several_runs_are_one_report(tmp_path: Path, everyday: Path) -> None:
    """Passes of the same machine and code add up in one row; of other code they are rows of their own."""
    few = list(synthetic.cases())[:4]
    newer = {"cpu": synthetic.environment(project={"commit": "fff", "dirty": False})}
    one, two = (
        synthetic.write(tmp_path / n / "run", [synthetic.record(c, 0) for c in few], passes=1) for n in ("a", "b")
    )
    three = synthetic.write(tmp_path / "c", [synthetic.record(c, 0) for c in few], passes=1, environments=newer)
    table = reports.load(one, two, three)
    assert list(table["run"]) == ["run, run (2)"] * 4 + ["c"] * 4
    assert list(table["passes"]) == [2] * 4 + [1] * 4
    assert list(table["environment"]) == ["cpu"] * 4 + ["cpu (2)"] * 4
    assert list(table["environment.project.commit"]) == ["0123456"] * 4 + ["fff"] * 4
    assert read([one, two, three]).titles == {"cpu": "run and run (2) · cpu", "cpu (2)": "c · cpu"}
    with pytest.raises(UsageError, match="given twice"):
        reports.load(one, one)


def test_environments_of_one_device_in_one_run_are_told_apart(tmp_path: Path) -> None:
    """As a run over several machines has them: by the device's name, or by the key where that is the same."""
    case = next(synthetic.cases())
    names = {"cpu": "X", "cpu (2)": "Y", "cpu (3)": "Y", "cpu:1": "X"}
    found = {key: synthetic.environment(machine=name) for key, name in names.items()}
    run = synthetic.write(tmp_path / "r", [synthetic.record(case, 0, environment=k) for k in found], environments=found)
    report = read([run])
    assert report.titles == {"cpu": "cpu · X", "cpu (2)": "cpu (2)", "cpu (3)": "cpu (3)", "cpu:1": "cpu:1"}
    assert [row["passes"] for row in report.rows] == [1] * 4


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    for bad in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError) as error:
            reports.load(bad)
        assert "\n" not in str(error.value) and str(bad) in str(error.value)
    with pytest.raises(UsageError, match="no run folder given"):
        reports.load()


def test_rows_come_sorted_for_reading_whatever_the_order_of_measuring(tmp_path: Path) -> None:
    every = list(synthetic.cases(workloads={f"net/conv{i}": ((8, 8, 8), 5) for i in (10, 2)}, batches=(8, 1)))
    run = synthetic.write(tmp_path / "r", [synthetic.record(c, 0) for c in reversed(every)], passes=1)
    rows = read([run]).rows
    assert rows == sorted(rows, key=order)
    first = [r for r in rows if r["operator"] == "srm_neuron" and r["phase"] == "forward"]
    assert rows[: len(first)] == first
    assert [r["workload"] for r in first] == ["net/conv2"] * 8 + ["net/conv10"] * 8
    assert [r["batch"] for r in first[:8]] == [1] * 4 + [8] * 4
    assert first[0]["implementation"] == "torch_eager"


def test_the_command_survives_the_shell() -> None:
    case = next(synthetic.cases(workloads={"$(touch x) it's": ((4, 8, 8), 5)}, rates=(0.05,)))
    words = shlex.split(command(case, 7, ["run", "--plugin", "my file.py"]))
    assert words[:2] == ["spikemark", "run"] and words[words.index("--workload") + 1] == "$(touch x) it's"
    assert words[words.index("--spike-rate") + 1] == "0.05" and words[-4:] == ["--seed", "7", "--plugin", "my file.py"]


def test_the_command_carries_what_the_run_was_given(tmp_path: Path) -> None:
    records = [synthetic.record(c, 0) for c in list(synthetic.cases())[:1]]
    own = replace(records[0].case.problem, workload="recording:mine/conv", recording=Recording("mine.npz", 2))
    records.append(synthetic.record(replace(records[0].case, problem=own), 0))
    arguments = ["run", "--spikes", "mine.npz", "--time-axis=2", "--plugin=p.py", "--workload-file", "w.toml"]
    run = synthetic.write(tmp_path / "r", records, passes=1, arguments=arguments)
    built_in, recorded = (row["command"] for row in read([run]).rows)
    assert built_in.endswith("--batch 1 --spike-rate 0.1 --seed 7 --plugin=p.py --workload-file w.toml")
    tail = "float32 --seed 7 --spikes mine.npz --time-axis=2 --plugin=p.py --workload-file w.toml"
    assert recorded.endswith(tail)


def test_the_command_asks_for_the_very_rate_that_was_measured() -> None:
    case = next(synthetic.cases(rates=(1 / 3,)))
    words = shlex.split(command(case, 0, []))
    assert float(words[words.index("--spike-rate") + 1]) == 1 / 3


def test_a_share_is_as_sharp_as_the_time_it_comes_from(everyday: Path) -> None:
    row = next(r for r in read([everyday]).rows if r["roofline"])
    for share, time in (("roofline_low", "ci_high_s"), ("roofline_high", "ci_low_s")):
        assert row[share] * row[time] == pytest.approx(row["roofline"] * row["median_s"])

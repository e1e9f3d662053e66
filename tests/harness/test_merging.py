"""Runs as one: what counts once, what adds up, what stays apart, what is refused, what is carried along."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spikemark.harness import parts
from spikemark.harness.errors import UsageError
from spikemark.harness.merging import join, merge
from spikemark.harness.records import UNMEASURED, Case, Record
from spikemark.harness.runfolder import Run, RunFolder, StorageError, new_meta
from spikemark.harness.statistics import summarise
from spikemark.harness.trace import summary
from spikemark.harness.trace.summary import TraceSummary
from spikemark.kernels.types import Problem

ENVIRONMENT = {"device": "cpu", "device_name": "CPU", "kind": "cpu", "threads": 2, "project": {"commit": "c0ffee"}}
OTHER = ENVIRONMENT | {"device_name": "Other CPU"}


def case(name: str = "native", workload: str = "net/layer", device: str = "cpu") -> Case:
    problem = Problem(workload, "neuron", 2, 3, (4,), (4,))
    return Case("srm_neuron", "forward", name, device, "float32", problem)


def record(
    centre: float, index: int = 0, name: str = "native", status: str = "ok", environment: str = "cpu", **fields: Any
) -> Record:
    """Samples around ``centre``, three of them; none for a failure."""
    samples = [centre * f for f in (0.99, 1.0, 1.01)] if status == "ok" else []
    one = Record(case(name, device=parts.device_of(environment)), index, status, environment=environment, **fields)
    one.samples, one.reason = samples, "" if status == "ok" else "why"
    return one


def write(path: Path, records: list[Record], environments: dict[str, Any] | None = None, **meta: Any) -> Path:
    """A finished run folder; a calibration for each environment and pass."""
    environments = {"cpu": ENVIRONMENT} if environments is None else environments
    fields = new_meta(["run", "--preset", "quick"], seed=0, preset="quick", passes=2, planned=1)
    folder = RunFolder.create(path, fields | {"environments": environments} | meta)
    for key, index in dict.fromkeys((r.environment, r.pass_index) for r in records):
        line = {"pass_index": index, "environment": key, "samples": [1e-3], "bytes": 10, "clock": {}}
        folder.append_calibration(line | {"copy_bytes_per_s": 1e4 * (1 + index)})
    for one in records:
        folder.append(one)
    folder.finish(**{name: meta[name] for name in ("ended", "interrupted", "unmeasured") if name in meta})
    return path


def passes(centre: float, count: int = 2, **fields: Any) -> list[Record]:
    return [record(centre * (1 + p / 100), p, **fields) for p in range(count)]


def rows(run: Run) -> list[tuple[str, int, float]]:
    """(environment, passes, median) of each row."""
    return [(r["environment"], r["passes"], pytest.approx(r["median_s"], rel=5e-3)) for r in summarise(run)]


# -- what counts once ---------------------------------------------------------------------------------------------


def test_a_copy_and_a_folder_merged_before_count_once(tmp_path: Path) -> None:
    a = write(tmp_path / "a", passes(1.0))
    shutil.copytree(a, tmp_path / "copy")
    b = write(tmp_path / "b", passes(1.1))
    once = merge([a, b], tmp_path / "c")
    assert once.twice == 0
    again = merge([tmp_path / "c", a, tmp_path / "copy", b], tmp_path / "d")
    assert again.twice == 2 + 2 + 2
    assert again.run.records == once.run.records
    assert again.run.calibrations == once.run.calibrations
    assert [p["name"] for p in again.run.meta["parts"]] == ["a", "b"]
    assert rows(RunFolder.load(tmp_path / "d")) == [("cpu", 4, 1.055)]


def test_equal_figures_of_two_runs_are_two_measurements(tmp_path: Path) -> None:
    """A coarse clock, or a failure, gives the same line in two runs: only their identifiers tell."""
    a, b = (write(tmp_path / n, passes(1.0)) for n in "ab")
    joined = join([RunFolder.load(a), RunFolder.load(b)])
    assert (joined.twice, len(joined.run.records)) == (0, 4)


def test_runs_made_before_there_were_identifiers_are_told_by_their_first_figures(tmp_path: Path) -> None:
    for name, centre in (("a", 1.0), ("b", 2.0)):
        write(tmp_path / name, passes(centre), id=None, started="2026-01-01T00:00:00+00:00")
        journal = tmp_path / name / "cases.jsonl"
        journal.write_text(journal.read_text().replace('"samples": [0.001]', f'"samples": [{centre}]'))
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    joined = merge([tmp_path / n for n in ("a", "copy", "b")], tmp_path / "c")
    assert joined.twice == 2
    assert rows(joined.run) == [("cpu", 4, math.sqrt(1.01 * 2.0))]


def test_a_copy_that_was_continued_brings_what_is_new(tmp_path: Path) -> None:
    a = write(tmp_path / "a", passes(1.0, 2))
    shutil.copytree(a, tmp_path / "more")
    folder, _ = RunFolder.reopen(tmp_path / "more")
    folder.append(record(1.3, 2))
    folder.finish()
    b = write(tmp_path / "b", passes(1.1, 1))
    joined = merge([a, b, tmp_path / "more"], tmp_path / "c")
    found = [(r.details["origin"]["pass"], r.pass_index) for r in joined.run.records]
    assert sorted(found) == [(0, 0), (0, 2), (1, 1), (2, 3)], "its third pass finds the number taken by b's"


def test_not_a_number_is_itself(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [record(1.0, spike_rate=math.nan, first_call_s=math.inf)])
    shutil.copytree(a, tmp_path / "copy")
    assert merge([a, tmp_path / "copy"], tmp_path / "c").twice == 1


# -- what adds up, what stays apart -------------------------------------------------------------------------------


def test_passes_of_one_machine_and_code_add_up_under_new_numbers(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", passes(1.0, 2)), write(tmp_path / "b", passes(2.0, 3))
    run = RunFolder.load(merge([a, b], tmp_path / "c").run.path)
    assert [r.pass_index for r in run.records] == [0, 1, 2, 3, 4]
    assert [(c["pass_index"], c["copy_bytes_per_s"]) for c in run.calibrations] == [
        (0, 1e4), (1, 2e4), (2, 1e4), (3, 2e4), (4, 3e4)
    ]  # fmt: skip
    assert run.meta["passes"] == 5
    assert rows(run) == [("cpu", 5, 2.0)]
    assert sorted(summarise(run)[0]["pass_medians_s"]) == pytest.approx([1.0, 1.01, 2.0, 2.02, 2.04])


def test_cases_of_different_runs_are_never_paired(tmp_path: Path) -> None:
    """The machine is three times slower in one pass than in another. Measured side by side, that cancels; a baseline of
    one run and its rival of another have only their numbers of passes in common."""
    moods, meta = [1.0, 3.0, 2.0], {"baselines": {"srm_neuron": "torch_eager"}}
    base = [record(mood, p, "torch_eager") for p, mood in enumerate(moods)]
    rival = [record(2 * mood, p) for p, mood in enumerate(moods)]
    width = {}
    for name, runs in {"together": [base + rival], "apart": [base, rival]}.items():
        paths = [write(tmp_path / f"{name}{i}", records, **meta) for i, records in enumerate(runs)]
        row = summarise(join([RunFolder.load(path) for path in paths]).run)[1]
        assert row["speedup"] == pytest.approx(0.5)
        width[name] = row["speedup_high"] / row["speedup_low"]
    assert width["together"] < 1.1
    assert width["apart"] > 3


@pytest.mark.parametrize(
    "change",
    [{"device_name": "Other CPU"}, {"threads": 4}, {"project": {"commit": "decaf"}}, {"versions": {"numpy": "2"}}],
    ids=lambda change: next(iter(change)),
)
def test_what_must_match_and_does_not_is_an_environment_of_its_own(tmp_path: Path, change: dict[str, Any]) -> None:
    known = ENVIRONMENT | {"versions": {"numpy": "1"}}
    a = write(tmp_path / "a", passes(1.0), {"cpu": known})
    b = write(tmp_path / "b", passes(2.0), {"cpu": known | change})
    joined = merge([a, b], tmp_path / "c")
    assert joined.places == [{"cpu": "cpu"}, {"cpu": "cpu (2)"}]
    assert rows(joined.run) == [("cpu", 2, 1.005), ("cpu (2)", 2, 2.01)]
    assert [r.pass_index for r in joined.run.records] == [0, 1, 0, 1]
    assert joined.run.meta["environments"]["cpu (2)"] == known | change
    c = write(tmp_path / "d", passes(3.0), {"cpu": known | {"cpu": {"model": "Third"}, "device_name": "Third"}})
    third = merge([tmp_path / "c", c], tmp_path / "e")
    assert third.places == [{"cpu": "cpu", "cpu (2)": "cpu (2)"}, {"cpu": "cpu (3)"}]


def test_equal_gpus_stay_apart(tmp_path: Path) -> None:
    gpu = {"device": "cuda:0", "device_name": "H100", "kind": "cuda"}
    each = {n: {"cuda:0": gpu | {"gpu": {"uuid_hash": n}}} for n in "ab"}
    paths = [write(tmp_path / n, passes(1.0, environment="cuda:0"), found) for n, found in each.items()]
    assert [r[0] for r in rows(merge(paths, tmp_path / "c").run)] == ["cuda:0", "cuda:0 (2)"]


def test_a_load_or_a_date_is_no_other_environment(tmp_path: Path) -> None:
    a = write(tmp_path / "a", passes(1.0), {"cpu": ENVIRONMENT | {"cpu": {"load": 0.1}}})
    b = write(tmp_path / "b", passes(1.0), {"cpu": ENVIRONMENT | {"cpu": {"load": 7.0}}})
    joined = merge([a, b], tmp_path / "c").run
    assert list(joined.meta["environments"]) == ["cpu"]
    assert [p["environments"]["cpu"]["cpu"]["load"] for p in joined.meta["parts"]] == [0.1, 7.0], "each part's is kept"


def test_versions_of_ab_runs_keep_their_pass_together(tmp_path: Path) -> None:
    both = {"cpu [base]": ENVIRONMENT, "cpu [new]": ENVIRONMENT | {"project": {"commit": "new"}}}
    paths = []
    for n in "ab":
        records = [
            record(1.0, p, environment=f"cpu [{label}]", details={"variant": label})
            for p in range(2)
            for label in ("base", "new")
        ]
        changed = both | ({"cpu [new]": ENVIRONMENT | {"project": {"commit": "newer"}}} if n == "b" else {})
        paths.append(write(tmp_path / n, records, changed))
    found = merge(paths, tmp_path / "c").run.records
    assert {(r.environment, r.pass_index) for r in found} == {
        *(("cpu [base]", p) for p in range(4)),
        *(("cpu [new]", p) for p in range(2)),
        *(("cpu [new] (2)", p) for p in (2, 3)),
    }


# -- what is refused ----------------------------------------------------------------------------------------------


def _continued_apart(tmp_path: Path) -> tuple[Path, Path]:
    a = write(tmp_path / "a", passes(1.0, 2))
    shutil.copytree(a, tmp_path / "b")
    for name, centre in (("a", 1.2), ("b", 1.3)):
        folder, _ = RunFolder.reopen(tmp_path / name)
        folder.append(record(centre, 2))
        folder.finish()
    return a, tmp_path / "b"


def test_two_that_claim_to_be_one_measurement_are_a_conflict(tmp_path: Path) -> None:
    a, b = _continued_apart(tmp_path)
    with pytest.raises(UsageError) as caught:
        merge([a, b], tmp_path / "c")
    text = str(caught.value)
    assert text.startswith(f"conflict: a and b both hold pass 3 of {case().key} of the run started 2")
    assert "\n" not in text and "nothing was written" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_changed_figure_is_a_conflict(tmp_path: Path) -> None:
    a = write(tmp_path / "a", passes(1.0))
    shutil.copytree(a, tmp_path / "b")
    journal = (tmp_path / "b" / "cases.jsonl").read_text()
    (tmp_path / "b" / "cases.jsonl").write_text(journal.replace("0.99", "0.98"))
    with pytest.raises(UsageError, match=r"conflict: a and b both hold pass 1 .* they differ, and 1 more:"):
        merge([a, tmp_path / "b"], tmp_path / "c")


def test_a_row_of_a_lost_device_yields_to_a_measurement(tmp_path: Path) -> None:
    """In the copy the run was continued and the case measured: that is no contradiction, whatever the order."""
    lost = record(1.0, 0, status="unavailable", details={UNMEASURED: True})
    a = write(tmp_path / "a", [lost], lost={"cpu": "fell off the bus"})
    shutil.copytree(a, tmp_path / "b")
    folder, _ = RunFolder.reopen(tmp_path / "b")
    folder.append(record(1.0, 0))
    folder.finish()
    for order in ((a, tmp_path / "b"), (tmp_path / "b", a)):
        joined = join([RunFolder.load(p) for p in order]).run
        assert [r.status for r in joined.records] == ["ok"]
    elsewhere = write(tmp_path / "c", passes(1.0))
    joined = join([RunFolder.load(a), RunFolder.load(elsewhere)]).run
    assert [r.status for r in joined.records] == ["ok", "ok"]
    assert joined.meta["lost"] == {"cpu": "fell off the bus"}


@pytest.mark.parametrize(
    ("paths", "out", "message"),
    [
        (["a"], "c", "two run folders or more, got 1"),
        (["a", "a"], "c", "a is given twice"),
        (["a", "./b/../a"], "c", "b/../a is given twice"),
        (["a", "none"], "c", "run folder none does not exist"),
        (["a", "plain"], "c", "plain is no run folder"),
        (["a", "b"], "a", "a already holds a run: choose another --out"),
        (["a", "b"], "plain", "plain exists and is no run folder"),
        (["a", "b"], "plain/file", "plain/file is a file, not a folder"),
        (["a", "b"], "plain/file/c", "cannot write plain/file/c"),
        (["a", "strange"], "c", "strange/run.json: parts does not hold one description a run"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: list[str], out: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write(Path(name), passes(1.0))
    write(Path("strange"), passes(1.0))
    Path("strange/run.json").write_text('{"schema": 1, "parts": [3]}')
    Path("plain").mkdir()
    Path("plain/file").write_text("dear")
    before = sorted(Path().rglob("*"))
    with pytest.raises(UsageError) as caught:
        merge(paths, out)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and "continue it" not in str(caught.value)
    assert sorted(Path().rglob("*")) == before


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (write(tmp_path / n, passes(1.0)) for n in "ab")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", full)
        (a / "logs" / "x.log").write_text("x")
        with pytest.raises(StorageError, match=r"^no space left to write \S+$"):
            merge([a, b], tmp_path / "c")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
    merge([a, b], tmp_path / "c")


# -- what is carried ----------------------------------------------------------------------------------------------


def test_what_the_runs_said_is_kept(tmp_path: Path) -> None:
    early = {"started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T01:00:00+00:00"}
    late = {"started": "2026-01-02T00:00:00+00:00", "ended": "2026-01-02T01:00:00+00:00"}
    selftest = {"smallest_difference": 0.05}
    a = write(tmp_path / "a", passes(1.0), arguments=["run", "--seed", "3"], selftest=selftest, seed=3, **late)
    gone = {"interrupted": True, "unmeasured": [case("gone").key, case("native").key]}
    b = write(tmp_path / "b", passes(1.0, name="other"), time={"wall_s": 4.0, "kernel_s": 1.0}, **gone, **early)
    meta = RunFolder.load(merge([a, b], tmp_path / "c").run.path).meta
    assert (meta["started"], meta["ended"], meta["interrupted"]) == (early["started"], late["ended"], True)
    assert meta["unmeasured"] == [case("gone").key], "what b lacked and a has is not missing"
    assert meta["planned"] == 3
    assert meta["time"]["wall_s"] == 4.0
    first, second = meta["parts"]
    assert (first["name"], first["seed"], first["selftest"]) == ("a", 3, selftest)
    assert (second["name"], second["interrupted"], second["unmeasured"]) == ("b", True, gone["unmeasured"])
    assert first["arguments"] == ["run", "--seed", "3"]
    assert meta["arguments"] == [], "two that asked for different things are not continued by one command"


def test_the_same_command_on_two_machines_is_continued_by_one(tmp_path: Path) -> None:
    asked = ["run", "--operator", "srm_neuron", "--device"]
    a = write(tmp_path / "a", passes(1.0), arguments=[*asked, "cpu", "-oa"])
    gpu = {"cuda:0": {"device": "cuda:0", "device_name": "H100", "kind": "cuda"}}
    b = write(tmp_path / "b", passes(1.0, environment="cuda:0"), gpu, arguments=[*asked, "cuda", "--out=b", "--resume"])
    arguments = merge([a, b], tmp_path / "c").run.meta["arguments"]
    assert arguments == ["run", "--operator", "srm_neuron", "--device", "cpu", "--device", "cuda:0"]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (["run", "--implementation=native", "--batch", "2", "--implementation", "torch_eager"], True),
        (["run", "--implementation", "native", "--batch", "2"], False),
        (["run", "--implementation", "2", "--batch", "native", "--implementation", "torch_eager"], False),
    ],
)
def test_a_selection_may_be_given_in_any_order(tmp_path: Path, other: list[str], same: bool) -> None:
    first = ["run", "--implementation", "torch_eager", "--implementation", "native", "--batch", "2"]
    a = write(tmp_path / "a", passes(1.0), arguments=first)
    b = write(tmp_path / "b", passes(1.1), arguments=other)
    arguments = merge([a, b], tmp_path / "c").run.meta["arguments"]
    assert arguments == ([*first, "--device", "cpu"] if same else [])


def test_logs_and_traces_are_carried_under_names_of_their_own(tmp_path: Path) -> None:
    paths = []
    for name, environment in (("a", ENVIRONMENT), ("b", OTHER)):
        dead = record(1.0, 0, "dead", "crashed", details={"log": "pass0-cpu-0.log"})
        path = write(tmp_path / name, [*passes(1.0), dead], {"cpu": environment}, id=f"{name}{'0' * 15}")
        (path / "logs" / "pass0-cpu-0.log").write_text(f"last words of {name}")
        (path / "traces" / "all.torch.json.gz").write_bytes(name.encode())
        (path / "traces" / "t.json").write_text(name)
        summary.write(path / "traces", TraceSummary("torch", case().key, files=[{"name": "t.json", "what": "trace"}]))
        summary.write(path / "traces", TraceSummary("torch", case("never measured").key))
        (path / "traces" / "bad.torch.summary.json").write_text("{")
        (path / "logs" / "link.log").symlink_to("/etc/hostname")
        paths.append(path)
    c = merge(paths, tmp_path / "c").run
    merge([c.path, paths[0]], tmp_path / "d")
    names = {kind: sorted(p.name for p in (tmp_path / "d" / kind).iterdir()) for kind in ("logs", "traces")}
    assert names["logs"] == ["a0000000-pass0-cpu-0.log", "b0000000-pass0-cpu-0.log"]
    assert names["traces"] == sorted(p.name for p in (c.path / "traces").iterdir())
    assert len(names["traces"]) == 2 * 5
    run = RunFolder.load(tmp_path / "d")
    for one in run.records:
        if one.status == "crashed":
            words = (run.path / "logs" / one.details["log"]).read_text()
            assert words == f"last words of {one.details['origin']['run'][0]}"
    found, bad = summary.read_all(run.path / "traces")
    assert len(bad) == 2
    told = {(t.environment, (run.path / "traces" / t.files[0]["name"]).read_text()) for t in found if t.files}
    assert told == {("cpu", "a"), ("cpu (2)", "b")}


def test_nothing_private_comes_with_it(tmp_path: Path) -> None:
    a, b = (write(tmp_path / n, passes(1.0)) for n in "ab")
    c = merge([a, b], tmp_path / "c").run.path
    assert not any(str(tmp_path) in p.read_text() for p in c.rglob("*") if p.is_file())
    assert c.stat().st_mode == a.stat().st_mode


def test_damaged_lines_are_said_and_left_out(tmp_path: Path) -> None:
    a, b = (write(tmp_path / n, passes(1.0)) for n in "ab")
    with (a / "cases.jsonl").open("a") as file:
        file.write('{"kind": "record", "cut')
    run = RunFolder.load(merge([a, b], tmp_path / "c").run.path)
    assert run.damaged == 0
    assert [p["damaged"] for p in run.meta["parts"]] == [1, 0]


@pytest.mark.parametrize(
    "strange", [{"origin": 3}, {"origin": {"run": "x"}}, {"origin": {"run": 1, "pass": 2}}, {"origin": {"pass": [1]}}]
)
def test_a_strange_origin_is_none(tmp_path: Path, strange: dict[str, Any]) -> None:
    a, b = write(tmp_path / "a", passes(1.0, details=strange)), write(tmp_path / "b", passes(1.0))
    assert rows(join([RunFolder.load(a), RunFolder.load(b)]).run) == [("cpu", 4, 1.005)]


def test_every_field_of_a_record_survives(tmp_path: Path) -> None:
    whole = record(1.0, first_call_s=2.0, memory={"peak_bytes": 3}, verification={"max_error": math.nan}, flags=["x"])
    whole.details = {"bursts": [0, 1], "block": "b", "deep": {"er": [1, None]}}
    a, b = write(tmp_path / "a", [whole]), write(tmp_path / "b", passes(1.0, name="other"))
    kept = RunFolder.load(merge([a, b], tmp_path / "c").run.path).records[0]
    kept.details.pop("origin")
    assert json.dumps(kept.to_json()) == json.dumps(whole.to_json())


Order = Callable[[list[Path]], list[Path]]


@pytest.mark.parametrize("order", [list, lambda p: p[::-1], lambda p: [p[1], p[2], p[0]]], ids=["abc", "cba", "bca"])
def test_the_order_changes_numbers_not_figures(tmp_path: Path, order: Order) -> None:
    both = passes(1.0, 3) + passes(2.0, 3, name="torch_eager")
    paths = [
        write(tmp_path / "a", both, baselines={"srm_neuron": "torch_eager"}),
        write(tmp_path / "b", passes(1.2, 2)),
        write(tmp_path / "c", passes(4.0, 2), {"cpu": OTHER}),
    ]
    found = {
        (r["device_name"], r["implementation"]): (r["passes"], round(r["median_s"], 4), r["speedup"])
        for r in summarise(join([RunFolder.load(p) for p in order(paths)]).run)
    }
    assert found == {
        ("CPU", "native"): (5, 1.02, pytest.approx(2.0)),
        ("CPU", "torch_eager"): (3, 2.02, 1.0),
        ("Other CPU", "native"): (2, 4.02, None),
    }

"""The run folder: nothing is lost, nothing private is stored, broken ones are refused in one line."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from spikemark.harness import journal
from spikemark.harness.errors import UsageError
from spikemark.harness.records import COLUMNS, Case, Record
from spikemark.harness.runfolder import RunFolder, StorageError, new_meta, without_folders
from spikemark.kernels.types import Problem, Recording


def case(implementation: str = "native", workload: str = "a/b", recording: Recording | None = None) -> Case:
    """A small case."""
    problem = Problem(workload, "neuron", 2, 3, (4,), (4,), recording=recording)
    return Case("srm_neuron", "forward", implementation, "cpu", "float32", problem)


def meta(**changes: object) -> dict:
    """A fresh run description."""
    return new_meta(["run"], seed=1, preset="quick", passes=2, planned=2) | changes


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """An empty run."""
    return RunFolder.create(tmp_path / "deep" / "run", meta())


def test_what_is_appended_is_read_back(folder: RunFolder) -> None:
    record = Record(case(), 1, "ok", samples=[1e-3, 2e-3], verification={"max_error": 0.5}, flags=["noisy"])
    folder.append(record)
    folder.append_calibration({"pass_index": 1, "environment": "cpu", "copy_bytes_per_s": 1e10, "samples": [1e-3]})
    run = RunFolder.load(folder.path)
    assert run.records == [record]
    assert run.calibrations[0]["copy_bytes_per_s"] == 1e10
    assert run.damaged == 0
    assert run.meta["ended"] is None


def test_each_record_is_on_disk_before_append_returns(tmp_path: Path) -> None:
    """A process that is killed right after ``append`` has lost nothing."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from test_runfolder import *\n"
        "folder = RunFolder.create(sys.argv[1], meta())\n"
        "folder.append(Record(case(), 0, 'ok', samples=[1.0]))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run"), str(here)], check=False)
    assert done.returncode == -9
    assert [r.samples for r in RunFolder.load(tmp_path / "run").records] == [[1.0]]


def test_a_cut_line_is_counted_and_spoils_no_other(folder: RunFolder) -> None:
    folder.append(Record(case(), 0, "ok", samples=[1.0]))
    folder.close()
    file = folder.path / "cases.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: len(whole) // 2])
    again, before = RunFolder.reopen(folder.path)
    assert (len(before.records), before.damaged) == (1, 1)
    again.append(Record(case("torch_eager"), 0, "ok", samples=[2.0]))
    run = RunFolder.load(folder.path)
    assert [r.case.implementation for r in run.records] == ["native", "torch_eager"]
    assert run.damaged == 1


@pytest.mark.parametrize("line", [b"\xff\xfe\x00", b"[]", b"3", b'{"kind": "record", "schema": 1}', b'{"a": ' * 5000])
def test_rubbish_lines_are_counted(folder: RunFolder, line: bytes) -> None:
    (folder.path / "cases.jsonl").write_bytes(line + b"\n")
    assert RunFolder.load(folder.path).damaged == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("samples", ["fast"]), ("samples", "1"), ("status", "great"), ("flags", "x"), ("memory", []), ("pass_index", "0")],
)
def test_a_record_of_wrong_types_is_damaged(folder: RunFolder, name: str, value: object) -> None:
    data = {"kind": "record"} | Record(case(), 0, "ok").to_json() | {name: value}
    (folder.path / "cases.jsonl").write_text(json.dumps(data) + "\n")
    run = RunFolder.load(folder.path)
    assert (run.records, run.damaged) == ([], 1)


def test_not_finite_numbers_are_valid_json_and_come_back(folder: RunFolder) -> None:
    errors = {"max_error": math.inf, "other": -math.inf, "nan": math.nan}
    folder.append(Record(case(), 0, "incorrect", "NaN", verification=errors, spike_rate=math.nan))
    text = (folder.path / "cases.jsonl").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    record = RunFolder.load(folder.path).records[0]
    assert record.verification["max_error"] == math.inf
    assert record.verification["other"] == -math.inf
    assert math.isnan(record.verification["nan"])
    assert record.spike_rate is not None
    assert math.isnan(record.spike_rate)
    assert record.reason == "NaN", "text stays text"


def test_other_schemas_are_refused_by_number(folder: RunFolder) -> None:
    line = {"kind": "record"} | Record(case(), 0, "ok").to_json() | {"schema": 0}
    (folder.path / "cases.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(UsageError, match=r"cases\.jsonl line 1 has schema 0; this version reads schema 1"):
        RunFolder.load(folder.path)
    folder.update(schema=99)
    with pytest.raises(UsageError, match=r"run\.json has schema 99"):
        RunFolder.load(folder.path)


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, text in (("bad", "{"), ("list", "[]"), ("deep", "[" * 100_000), ("typed", '{"schema": 1, "seed": "x"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    for name in ("missing", "file", "empty", "bad", "list", "deep", "typed"):
        with pytest.raises(UsageError) as caught:
            RunFolder.load(tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_create_refuses_what_it_would_overwrite(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="already holds a run"):
        RunFolder.create(folder.path, meta())
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    with pytest.raises(UsageError, match="no run folder"):
        RunFolder.create(tmp_path / "thesis", meta())
    with pytest.raises(UsageError, match="is a file"):
        RunFolder.create(tmp_path / "thesis" / "chapter.tex", meta())
    with pytest.raises(UsageError, match="cannot write"):
        RunFolder.create(tmp_path / "thesis" / "chapter.tex" / "run", meta())


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self").exists(), reason="root may write everywhere here")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    parent = Path("/proc/self") if os.geteuid() == 0 else locked
    with pytest.raises(UsageError, match="cannot write") as caught:
        RunFolder.create(parent / "run", meta())
    assert "\n" not in str(caught.value)


def test_two_writers_of_one_run_are_refused(folder: RunFolder) -> None:
    with pytest.raises(UsageError, match="another run is writing"):
        RunFolder.reopen(folder.path)
    folder.close()
    RunFolder.reopen(folder.path)[0].close()


def test_a_disk_that_is_full_from_the_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(StorageError, match=r"no space left to write .*run\.json$"):
            RunFolder.create(tmp_path / "run", meta())
    assert list(tmp_path.iterdir()) == []
    RunFolder.create(tmp_path / "run", meta()).close()


def test_a_full_disk_keeps_whole_lines(folder: RunFolder) -> None:
    """A file-size limit fails in the middle of a write, as a full disk does."""
    small = Record(case(), 0, "ok", samples=[1.0])
    folder.append(small)
    size = (folder.path / "cases.jsonl").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
    try:
        with pytest.raises(StorageError, match=r"no space left to write .*cases\.jsonl"):
            folder.append(Record(case("torch_eager"), 0, "ok", samples=[1.0] * 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (folder.path / "cases.jsonl").stat().st_size == size, "the half-written line is gone"
    folder.append(small)
    run = RunFolder.load(folder.path)
    assert (len(run.records), run.damaged) == (2, 0)


def test_run_json_is_replaced_whole(folder: RunFolder) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        with pytest.raises(StorageError):
            folder.update(unmeasured=["x"] * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert RunFolder.load(folder.path).meta["unmeasured"] == []
    assert not list(folder.path.glob("*.part"))


def test_no_path_is_stored(tmp_path: Path) -> None:
    arguments = ["run", "--out=/home/me/runs/a", "--plugin", "/home/me/k.py", "--spikes", "data/s.npz", "--tau=3"]
    folder = RunFolder.create(tmp_path / "r", new_meta(arguments, seed=0, preset="p", passes=1, planned=1))
    folder.append(Record(case(recording=Recording("/home/me/spikes.npz")), 0, "ok", samples=[1.0]))
    folder.finish()
    text = "".join(p.read_text() for p in folder.path.iterdir() if p.is_file())
    assert "/home" not in text
    assert str(tmp_path) not in text
    assert RunFolder.load(folder.path).meta["arguments"][1:] == [
        "--out=a", "--plugin", "k.py", "--spikes", "data/s.npz", "--tau=3"
    ]  # fmt: skip
    assert RunFolder.load(folder.path).records[0].case.problem.recording == Recording("spikes.npz")
    assert without_folders("--include=a=/b/c") == "--include=a=/b/c", "only whole words and values are paths"


@pytest.fixture
def finished(folder: RunFolder) -> RunFolder:
    """A run of two passes: two cases that are ok, one that is not."""
    for pass_index in (0, 1):
        for name, base in (("torch_eager", 2e-3), ("native", 1e-4)):
            samples = [base * (1 + (7 * i % 10) / 100) for i in range(10)]
            folder.append(Record(case(name), pass_index, "ok", samples=samples, memory={"peak_bytes": 8}))
    folder.append(Record(case("broken"), 0, "crashed", "killed by SIGSEGV"))
    cpu = {"model": "Fake", "architecture": "x86_64", "threads": 2}
    environment = {"cpu": cpu, "versions": {"python": "3.11.7"}, "project": {"commit": "c0ffee", "dirty": True}}
    folder.update(environments={"cpu": environment})
    folder.finish()
    return folder


def test_benchmarks_json_is_what_pytest_benchmark_writes(finished: RunFolder, tmp_path: Path) -> None:
    """Same fields as a file that the installed pytest-benchmark has just written, and every sample in it."""
    (tmp_path / "test_one.py").write_text("def test_one(benchmark): benchmark(int)\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-json=own.json"]
    options = ["--benchmark-max-time=0.01", "--benchmark-min-rounds=1", "--rootdir=.", "test_one.py"]
    subprocess.run([*command, *options], cwd=tmp_path, check=True, capture_output=True)
    own = json.loads((tmp_path / "own.json").read_text())
    ours = json.loads((finished.path / "benchmarks.json").read_text())
    assert set(own) == set(ours)
    assert set(own["machine_info"]) <= set(ours["machine_info"])
    assert set(own["commit_info"]) == set(ours["commit_info"])
    assert set(own["benchmarks"][0]) <= set(ours["benchmarks"][0])
    assert set(own["benchmarks"][0]["stats"]) == set(ours["benchmarks"][0]["stats"])
    assert [b["name"].split("/")[-1] for b in ours["benchmarks"]] == ["torch_eager", "native"]
    stats = ours["benchmarks"][0]["stats"]
    assert stats["data"] == [s for r in RunFolder.load(finished.path).records[0:4:2] for s in r.samples]
    assert stats["rounds"] == 20
    assert stats["min"] == 2e-3
    assert ours["commit_info"]["id"] == "c0ffee"
    assert ours["commit_info"]["dirty"] is True


def test_pytest_benchmark_compares_our_file(finished: RunFolder, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("pytest-benchmark")
    file = str(finished.path / "benchmarks.json")
    command = [str(program), "compare", file, "--csv=out.csv", "--columns=min,median,rounds"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "native" in done.stdout
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert sorted(float(r["min"]) for r in rows) == [1e-4, 2e-3]
    assert {r["rounds"] for r in rows} == {"20"}


def test_results_csv_has_the_columns_in_order(finished: RunFolder) -> None:
    with (finished.path / "results.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert tuple(rows[0][: len(COLUMNS)]) == COLUMNS
    table = {row[3]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}
    assert table["broken"]["status"] == "crashed"
    assert table["broken"]["reason"] == "killed by SIGSEGV"
    assert table["broken"]["median_s"] == "", "a failed case has no time, not 0"
    assert float(table["native"]["median_s"]) == pytest.approx(1.045e-4, rel=1e-4)
    assert table["native"]["samples"] == "20"


def test_an_ab_run_has_one_row_a_variant(folder: RunFolder) -> None:
    for label, base in (("base", 1e-3), ("new", 2e-3)):
        folder.append(Record(case(), 0, "ok", samples=[base] * 10, details={"variant": label}))
    run = folder.finish()
    assert run.variants == ["base", "new"]
    assert [r.samples[0] for r in run.only_variant("new").records] == [2e-3]
    with (folder.path / "results.csv").open(newline="") as file:
        found = {row["variant"]: float(row["median_s"]) for row in csv.DictReader(file)}
    assert found == pytest.approx({"base": 1e-3, "new": 2e-3})
    names = [b["name"] for b in json.loads((folder.path / "benchmarks.json").read_text())["benchmarks"]]
    assert len(set(names)) == 2


def test_a_million_samples_are_read_in_seconds(tmp_path: Path) -> None:
    """100 MB; the limit is some ten times what a slow machine needs, and an accidental O(n^2) takes hours."""
    folder = RunFolder.create(tmp_path / "big", meta())
    line = journal.dumps(
        {"kind": "record"} | Record(case(), 0, "ok", samples=[1.0000000000000123e-3] * 10**4).to_json()
    )
    pad = json.dumps({"pad": "x" * 760_000})
    line = line.replace('"details": {}', f'"details": {pad}')
    (folder.path / "cases.jsonl").write_text((line + "\n") * 100)
    assert (folder.path / "cases.jsonl").stat().st_size > 95e6
    started = time.monotonic()
    run = RunFolder.load(folder.path)
    assert sum(len(r.samples) for r in run.records) == 10**6
    assert time.monotonic() - started < 30

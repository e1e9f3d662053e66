"""The real worker under supervision: kernels of ``tests/hostile.py`` that kill, hang, flood or spoil their process."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from spikemark.harness.plan import RunOptions
from spikemark.harness.progress import Quiet
from spikemark.harness.records import Case, Record
from spikemark.harness.runfolder import Run, RunFolder
from spikemark.harness.supervisor import run
from spikemark.kernels.types import Problem
from spikemark.suites.worker import worker_command

HOSTILE = Path(__file__).parents[1] / "hostile.py"
DEADLY = {
    "hostile_segfault": ("crashed", "SIGSEGV.*first-call: Fatal Python error: Segmentation fault"),
    "hostile_exit": ("crashed", "ended itself with exit code 0"),
    "hostile_abort": ("crashed", "SIGABRT.*Fatal Python error: Aborted"),
    "hostile_hangs": ("timed-out", "took longer than 12 s, in stage first-call"),
    "hostile_hog": ("out-of-memory", "grew to .*more than .* free: choose a smaller batch"),
}
SPOILS = {"hostile_starts_threads": ("error", "threads running")}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One pass over all of them and two honest ones; a worker may grow to 1.5 GB, ten times what the others need."""
    problem = Problem("tiny/n", "neuron", 2, 12, (40,), (40,))
    names = [*DEADLY, *SPOILS, "torch_eager", "hostile_binary"]
    cases = [Case("srm_neuron", "forward", name, "cpu", "float32", problem) for name in names]
    options = RunOptions(
        out=tmp_path_factory.mktemp("hostile") / "run",
        passes=1,
        budget_s=0.01,
        max_samples=20,
        case_timeout_s=12.0,
        stage_limits_s={},
        memory_fraction=1.5e9 / psutil.virtual_memory().available,
        plugins=(str(HOSTILE),),
    )
    result = run(cases, options, worker_command, ["run"], Quiet())
    assert result.exit_code == 0
    assert result.counts["ok"] == 2
    return RunFolder.load(options.out)


def row(measured: Run, name: str) -> Record:
    """The one row of an implementation."""
    (record,) = [r for r in measured.records if r.case.implementation == name]
    return record


@pytest.mark.parametrize("name", [*DEADLY, *SPOILS])
def test_each_gives_one_row_with_its_reason(measured: Run, name: str) -> None:
    status, reason = (DEADLY | SPOILS)[name]
    record = row(measured, name)
    assert record.status == status
    assert re.search(reason, record.reason), record.reason
    assert record.reason.isprintable()
    assert not record.samples


@pytest.mark.parametrize("name", ["torch_eager", "hostile_binary"])
def test_the_honest_are_measured_as_if_alone(measured: Run, name: str) -> None:
    record = row(measured, name)
    assert record.status == "ok"
    assert len(record.samples) >= 10
    assert record.verification["checked"] == record.verification["total"] > 0
    assert record.memory["peak_bytes"] > 0


def test_the_folder_tells_where(measured: Run) -> None:
    environment = measured.meta["environments"]["cpu"]
    assert environment["kind"] == "cpu"
    assert list(environment["project"]["plugins"]) == ["hostile.py"]
    assert len(measured.calibrations) == 1, "one pass, however many processes it took"
    assert measured.calibrations[0]["copy_bytes_per_s"] > 1e8
    workers = {r.details["worker"] for r in measured.records}
    assert len(workers) >= len(DEADLY), "each death was followed by a new process"

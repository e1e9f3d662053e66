"""Runs with the fake worker: cases whose implementation's name says what it does, and what became of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from spikemark.harness.plan import RunOptions, RunResult
from spikemark.harness.progress import Quiet
from spikemark.harness.records import Case, Record
from spikemark.harness.runfolder import RunFolder
from spikemark.harness.supervisor import run
from spikemark.kernels.types import Problem

FAKE = Path(__file__).with_name("fake_worker.py")


def case(implementation: str, workload: str = "net/layer", device: str = "cpu") -> Case:
    """A case whose implementation's name tells the fake worker what to do."""
    problem = Problem(workload, "neuron", 2, 3, (4,), (4,))
    return Case("srm_neuron", "forward", implementation, device, "float32", problem)


def fake_command(plan: Path, events_fd: int) -> list[str]:
    """The fake worker's command line."""
    return [sys.executable, str(FAKE), str(plan), str(events_fd)]


def measure(out: Path, cases: list[Case], **changes: Any) -> RunResult:
    """Run with the fake worker, quietly; timeouts are generous unless a test is about them."""
    return run(cases, RunOptions(out=out, **({"passes": 1} | changes)), fake_command, ["run"], Quiet())


def rows(out: Path) -> dict[str, Record]:
    """The last record of each implementation."""
    return {r.case.implementation: r for r in RunFolder.load(out).records}

"""Measuring and tracing processes work under the same conditions: what is set, and that the tracing ones set it too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from spikemark.harness import allocator
from spikemark.harness.records import SCHEMA_VERSION, Case
from spikemark.kernels import Problem

PROBLEM = Problem("mnist/tiny", "neuron", 1, 2, (8,), (8,), spike_rate=0.1)


def test_a_tracing_process_has_the_switches_of_a_measuring_one(tmp_path: Path) -> None:
    """A trace under another malloc or another float32 would explain times that nobody measured."""
    case = Case("srm_neuron", "forward", "torch_eager", "cpu", "float32", PROBLEM)
    plan = {"schema": SCHEMA_VERSION, "pass_index": 0, "seed": 0, "device": "cpu", "environment": "cpu", "plugins": []}
    plan |= {"calibrate": False, "cases": [case.to_json()], "options": {"budget_s": 0.001, "max_samples": 10}}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    found = []
    for module, more in (("suites.worker", []), ("harness.trace.worker", [str(tmp_path), "1"])):
        reader, writer = os.pipe()
        command = [sys.executable, "-m", f"spikemark.{module}", str(file), str(writer), *more]
        with os.fdopen(reader) as events:
            process = subprocess.Popen(command, pass_fds=[writer], cwd=tmp_path, stdout=subprocess.DEVNULL)
            os.close(writer)
            lines = [json.loads(line) for line in events]
        assert process.wait() == 0
        found.append(next(e["environment"]["switches"] for e in lines if e["event"] == "ready"))
    measuring, tracing = found
    assert tracing == measuring
    assert not any(measuring["tf32"].values())
    if allocator._glibc("mallopt") and not any(os.environ.get(name) for name in allocator.VARIABLES):
        assert measuring["malloc"] == allocator.KEEPS

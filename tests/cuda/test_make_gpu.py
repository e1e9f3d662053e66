"""``make gpu`` where there is no GPU: one line, exit code 4, nothing left behind; with one, every step is logged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from spikemark.kernels import registry

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu.sh"


def run(tmp_path: Path, python: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": python, "OUT": str(tmp_path / "check")}
    return subprocess.run([str(SCRIPT)], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_without_a_gpu_it_says_so_and_leaves_nothing(tmp_path):
    if registry.gpu_missing() is None:
        pytest.skip("there is a GPU")
    done = run(tmp_path, sys.executable)
    assert done.returncode == 4 and done.stderr.startswith("nothing was run: no CUDA device: ")
    assert not (tmp_path / "check").exists()


# A Python that only records what it is asked for: torch with CUDA 12 on an sm_90, and failing tests.
RECORDER = """#!/bin/sh
case "$*" in
    *gpu_missing*) echo ;;
    *version.cuda*) echo 12 ;;
    *get_device_capability*) echo sm_90 ;;
    *"pytest tests/gpu"*) echo "1 failed"; exit 1 ;;
    *) echo "asked: $*" ;;
esac
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_every_step_is_run_and_logged_and_a_failure_is_kept(tmp_path):
    python = tmp_path / "python"
    python.write_text(RECORDER)
    python.chmod(0o755)
    done = run(tmp_path, str(python))
    assert done.returncode == 1
    folder = tmp_path / "check"
    steps = ("install", "environment", "implementations", "inspect", "tests", "verify", "run")
    codes = dict(line.split(": exit code ") for line in (folder / "summary.txt").read_text().splitlines())
    assert codes == dict.fromkeys(steps, "0") | {"tests": "1"}
    said = {name: (folder / f"{name}.txt").read_text() for name in steps}
    assert ".[test,cuda12]" in said["install"] and "--arch sm_90" in said["inspect"] and "1 failed" in said["tests"]
    assert "--preset full --device cuda --out" in said["run"]
    assert all(f"--dtype {d}" in said["verify"] for d in ("float32", "float16", "bfloat16", "float64"))

"""``spikemark profile`` that is stopped, or that cannot write: exit codes, and what is left in the run folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import synthetic
from spikemark import runner
from spikemark.harness.trace import summary

FAKE = Path(__file__).parents[1] / "harness" / "fake_nsight.py"
WORDS = ("--operator", "clamped_sign", "--phase", "forward", "--implementation", "torch", "--device", "cpu")
TWO = (*WORDS, "--workload", "mnist/conv*")


def fake(folder: Path) -> Path:
    """A fake nsys in a folder whose name has a space."""
    program = folder / "my tools" / "nsys"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    program.chmod(0o755)
    return program


def interrupted(words: list[str], environment: dict[str, str], started: Path, interrupts: int) -> tuple[int, str]:
    """Exit code and output of a profile that gets ``interrupts`` Ctrl-C once the file ``started`` is there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "spikemark", "profile", *words],
        env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    limit = time.monotonic() + 120
    while not started.exists() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    for _ in range(interrupts):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    said, _ = process.communicate(timeout=120)
    psutil.wait_procs(family, timeout=10)
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], "nothing runs on"
    return process.returncode, said


def test_a_profile_that_is_stopped_says_so_and_describes_no_file_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was exit code 4, 'nothing was measured', or even 0; the case it was at kept figures of a deleted report."""
    out, log = tmp_path / "my run", tmp_path / "log"
    monkeypatch.setenv("FAKE_NSIGHT_LOG", str(log))
    monkeypatch.setenv("FAKE_NSIGHT", "quick")
    words = ["--tool", "nsys", "--nsys", str(fake(tmp_path)), *TWO, "--calls", "3", "--out", str(out)]
    assert runner.main(["profile", *words]) == 0
    assert len(summary.read_all(out / "traces")[0]) == 2
    log.unlink()
    code, said = interrupted(words, {"FAKE_NSIGHT": "hangs"}, log, 2)
    assert code == 130 and "interrupted: 0 of 2 cases were traced" in said and "Traceback" not in said
    left, damaged = summary.read_all(out / "traces")
    assert damaged == [] and len(left) == 1, "the case at which it hung has no summary"
    assert all((out / "traces" / file["name"]).is_file() for one in left for file in one.files)
    assert len(list((out / "traces").iterdir())) == 3 * len(left), "a report, its export and its summary each"


def test_a_run_whose_traces_cannot_be_written_is_refused_before_anything_is_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spikemark.harness import supervisor

    out = tmp_path / "run"
    synthetic.everyday(out)
    shutil.rmtree(out / "traces", ignore_errors=True)
    (out / "traces").write_text("a file, for root may write everywhere")

    def never(*words: object) -> None:
        raise AssertionError("traced in vain")

    monkeypatch.setattr(supervisor, "run", never)
    export = tmp_path / "theirs.sqlite"
    export.write_text("not looked at")
    for words in ([*WORDS], ["--from", str(export)]):
        code = runner.main(["profile", *words, "--out", str(out)])
        shown, said = capsys.readouterr()
        assert (code, shown) == (2, "") and said.count("\n") == 1
        assert f"cannot write {out / 'traces'}: File exists" in said

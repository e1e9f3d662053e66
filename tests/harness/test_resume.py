"""Interruption and what comes after: Ctrl-C once and twice, kill -9 of the runner, resuming, refusing to mix."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from fake_runs import case, fake_command, measure
from spikemark.harness.errors import UsageError
from spikemark.harness.plan import RunOptions
from spikemark.harness.progress import Quiet
from spikemark.harness.runfolder import RunFolder
from spikemark.harness.supervisor import run

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of others on this machine are not seen: whether rows are flagged is part of what is tested."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


RUNNER = """
import sys; sys.path.insert(0, sys.argv[1])
from fake_runs import *
options = RunOptions(out=Path(sys.argv[2]), passes=2)
result = run([case(n) for n in sys.argv[3:]], options, fake_command, ["run"], Quiet())
print(result.exit_code, result.message, flush=True)
"""


def runner(out: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """A runner in a process of its own, for what would end this one; ``names`` are what its workers do."""
    command = [sys.executable, "-c", RUNNER, str(HERE), str(out), *names]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def measured(out: Path) -> list[tuple[int, str]]:
    """(pass, implementation) of every row, sorted."""
    return sorted((r.pass_index, r.case.implementation) for r in RunFolder.load(out).records)


def all_of(*names: str, passes: int = 2) -> list[tuple[int, str]]:
    """Every pass of every name, sorted."""
    return sorted((p, n) for p in range(passes) for n in names)


def test_control_c_once_finishes_the_case_and_the_folder(tmp_path: Path) -> None:
    """The case that interrupts the runner is the one in progress: it gets its row, and nothing after it."""
    done = runner(tmp_path / "r", "interrupts_runner", "ok")
    assert done.stdout.startswith("130 interrupted"), done.stderr
    assert "Traceback" not in done.stderr
    loaded = RunFolder.load(tmp_path / "r")
    assert loaded.records[-1].case.implementation == "interrupts_runner"
    assert loaded.records[-1].status == "ok"
    assert len(loaded.records) < 4
    assert loaded.meta["interrupted"] is True
    assert loaded.meta["ended"] is not None
    assert (tmp_path / "r" / "results.csv").is_file()


def test_control_c_twice_stops_now(tmp_path: Path) -> None:
    """The case never ends by itself; its limit is a minute."""
    started = time.monotonic()
    done = runner(tmp_path / "r", "interrupts_twice")
    assert done.stdout.startswith("130 interrupted"), done.stderr
    assert time.monotonic() - started < 30
    loaded = RunFolder.load(tmp_path / "r")
    assert loaded.records == []
    assert loaded.meta["unmeasured"] == [case("interrupts_twice").key]
    assert loaded.meta["interrupted"] is True


def test_handlers_are_as_before_after_a_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    measure(tmp_path / "r", [case("ok")])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.skipif(sys.platform != "linux", reason="ties workers to the runner by a Linux call")
def test_kill_of_the_runner_leaves_no_orphan_and_can_be_resumed(tmp_path: Path) -> None:
    """The worker kills its runner with SIGKILL and then waits for ever: the kernel must end it."""
    out = tmp_path / "r"
    names = ("ok", "fine", "kills_runner")
    done = runner(out, *names)
    assert done.returncode == -signal.SIGKILL
    worker = int(next((out / "logs").iterdir()).read_text().split()[-1])
    end = time.monotonic() + 10
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the worker outlives its runner"
    before = measured(out)
    assert RunFolder.load(out).meta["ended"] is None
    survivors = [case(n) for n in ("ok", "fine", "absent")]
    result = measure(out, survivors, passes=2, resume=True)
    assert result.exit_code == 0
    assert set(before) <= set(measured(out))
    assert measured(out) == sorted([*all_of("ok", "fine"), (0, "absent")])
    assert RunFolder.load(out).meta["interrupted"] is False


def test_resume_measures_only_what_is_missing(tmp_path: Path) -> None:
    out, cases = tmp_path / "r", [case(n, w) for w in "xy" for n in ("ok", "fine", "exits")]
    measure(out, cases, passes=2)
    whole = (out / "cases.jsonl").read_bytes().splitlines(keepends=True)
    lines = [json.loads(line) for line in whole]
    gone = [i for i, line in enumerate(lines) if line["kind"] == "record"][2::3]
    kept = [line for i, line in enumerate(whole) if i not in gone]
    (out / "cases.jsonl").write_bytes(b"".join(kept) + whole[gone[0]][:50])
    result = measure(out, cases, passes=2, resume=True)
    now = (out / "cases.jsonl").read_bytes()
    assert now.startswith(b"".join(kept)), "what was there is untouched"
    loaded = RunFolder.load(out)
    assert loaded.damaged == 1
    wanted = sorted((r["pass_index"], r["case"]["problem"]["workload"], r["case"]["implementation"])
                    for r in lines if r["kind"] == "record")  # fmt: skip
    assert sorted((r.pass_index, r.case.workload, r.case.implementation) for r in loaded.records) == wanted
    assert result.counts == {"crashed": 2, "ok": 4}
    again = measure(out, cases, passes=2, resume=True)
    assert (out / "cases.jsonl").read_bytes() == now, "nothing was missing, nothing is measured"
    assert again.counts == result.counts


def test_resume_may_add_passes(tmp_path: Path) -> None:
    measure(tmp_path / "r", [case("ok")], passes=1)
    measure(tmp_path / "r", [case("ok")], passes=3, resume=True)
    assert measured(tmp_path / "r") == all_of("ok", passes=3)
    assert RunFolder.load(tmp_path / "r").meta["passes"] == 3


def test_resume_refuses_to_mix_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(tmp_path / "r", [case("ok")], passes=1)
    before = (tmp_path / "r" / "cases.jsonl").read_bytes()
    monkeypatch.setenv("FAKE_TORCH", "2.0")
    monkeypatch.setenv("FAKE_COMMIT", "decaf")
    with pytest.raises(UsageError, match=r"another environment.*versions\.torch \(1\.0 and 2\.0\)") as caught:
        measure(tmp_path / "r", [case("ok")], passes=2, resume=True)
    assert "project.commit (c0ffee and decaf)" in str(caught.value)
    assert (tmp_path / "r" / "cases.jsonl").read_bytes() == before
    monkeypatch.delenv("FAKE_TORCH")
    monkeypatch.delenv("FAKE_COMMIT")
    measure(tmp_path / "r", [case("ok")], passes=2, resume=True)
    assert measured(tmp_path / "r") == all_of("ok")


def test_a_change_while_measuring_is_flagged_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pass's worker reports other code: rows of that pass say so."""

    def command(plan: Path, events_fd: int) -> list[str]:
        second = json.loads(plan.read_text())["pass_index"] == 1
        changed = ["env", "FAKE_COMMIT=decaf", "FAKE_TORCH=2.0"] if second else []
        return [*changed, *fake_command(plan, events_fd)]

    options = RunOptions(out=tmp_path / "r", passes=2)
    run([case("ok")], options, command, ["run"], Quiet())
    first, second = RunFolder.load(tmp_path / "r").records
    assert first.flags == []
    assert second.flags == ["code-changed", "environment-changed"]
    assert second.details["changed"] == ["versions.torch", "project.commit"]


def test_resume_refuses_other_options(tmp_path: Path) -> None:
    measure(tmp_path / "r", [case("ok")], passes=1, seed=1)
    with pytest.raises(UsageError, match=r"other options.*seed \(1 and 2\), precision \(0\.01 and 0\.5\)"):
        measure(tmp_path / "r", [case("ok")], passes=1, seed=2, precision=0.5, resume=True)
    with pytest.raises(UsageError, match="does not exist"):
        measure(tmp_path / "missing", [case("ok")], resume=True)
    with pytest.raises(UsageError, match="already holds a run"):
        measure(tmp_path / "r", [case("ok")])

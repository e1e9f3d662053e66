"""``run`` and ``verify`` as a person types them: a recording is measured, a plug-in is wrong, a run is resumed."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from spikemark import kernels
from spikemark.harness.records import COLUMNS

COMMAND = [sys.executable, "-m", "spikemark"]
COMPILED = kernels.get("srm_neuron", "torch_compile")
PLUGIN = """
import ctypes, torch
from spikemark import kernels

@kernels.implementation("clamped_sign", device="cpu")
class Wrong:
    '''Forgets to clamp.'''
    def forward(self, x): return torch.sign(x).contiguous()
    def backward(self, grad): return grad.contiguous() * 3

@kernels.implementation("clamped_sign", device="cpu")
class Crashes:
    '''Reads from nowhere.'''
    def forward(self, x): return torch.sign(x).contiguous()
    def backward(self, grad): return ctypes.string_at(0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    spikes = np.random.default_rng(1).random((2, 5, 6, 7)) < 0.1
    np.savez(tmp_path / "mine.npz", spikes=spikes)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    return tmp_path


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=300)


SELECT = (
    *("--preset", "smoke", "--spikes", "mine.npz", "--plugin", "plugin.py", "--device", "cpu"),
    *("--operator", "clamped_sign", "--operator", "adjusted_avg_pool2d"),
    *("--implementation", "torch", "--implementation", "wrong", "--implementation", "crashes"),
)


@pytest.mark.skipif(bool(COMPILED.reason), reason=str(COMPILED.reason))
def test_what_a_compiler_does_in_the_process_is_not_the_kernels_fault(tmp_path, monkeypatch) -> None:
    """With nothing compiled before, inductor raises the recursion limit and starts threads; presets skip it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    select = ("--preset", "smoke", "--operator", "srm_neuron", "--implementation", "torch_compile", "--device", "cpu")
    done = command(tmp_path, "run", *select, "--out", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        assert {(row["phase"], row["status"]) for row in csv.DictReader(file)} == {
            ("forward", "ok"),
            ("backward", "ok"),
        }


def test_a_run_and_its_resumption(folder: Path) -> None:
    done = command(folder, "run", *SELECT, "--passes", "1", "--out", "out")
    assert done.returncode == 3, done.stdout + done.stderr  # wrong is incorrect, everything else was measured
    lines = done.stdout.splitlines()
    report = folder / lines[-1]
    assert report == folder / "out" / "report.html" and report.stat().st_size > 10_000
    table = [line.split() for line in lines if "recording:mine/pool" in line]
    assert {(words[0], words[1]) for words in table} == {("adjusted_avg_pool2d", p) for p in ("forward", "backward")}
    assert any("1 incorrect" in line for line in lines)
    with (folder / "out" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0])[: len(COLUMNS)] == COLUMNS
    found = {(r["operator"], r["phase"], r["workload"], r["implementation"]): r for r in rows}
    pool = found["adjusted_avg_pool2d", "backward", "recording:mine/pool", "torch"]
    with np.load(folder / "mine.npz") as recorded:
        assert float(pool["spike_rate"]) == pytest.approx(recorded["spikes"].mean())
    assert (pool["status"], pool["batch"], pool["time_steps"]) == ("ok", "1", "5") and float(pool["median_s"]) > 0
    assert found["clamped_sign", "backward", "mnist/conv2", "wrong"]["status"] == "incorrect"
    assert found["clamped_sign", "forward", "mnist/conv2", "wrong"]["status"] == "ok"
    crashed = found["clamped_sign", "backward", "mnist/conv2", "crashes"]
    assert crashed["status"] == "crashed" and "SIGSEGV" in crashed["reason"] and crashed["median_s"] == ""
    journal = (folder / "out" / "cases.jsonl").read_text()
    assert str(folder) not in journal + (folder / "out" / "run.json").read_text()

    again = command(folder, "run", "--resume", "--out", "out")
    assert again.returncode == 3, again.stderr
    assert again.stdout == done.stdout
    assert (folder / "out" / "cases.jsonl").read_text() == journal, "nothing was missing, so nothing was measured"


def test_verify_tells_right_from_wrong_and_times_nothing(folder: Path) -> None:
    done = command(folder, "verify", *SELECT, "--json")
    assert done.returncode == 3, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    status = {(r["operator"], r["phase"], r["workload"], r["implementation"]): r["status"] for r in records}
    assert status["clamped_sign", "backward", "mnist/conv2", "wrong"] == "incorrect"
    assert status["clamped_sign", "backward", "mnist/conv2", "crashes"] == "crashed"
    assert status["adjusted_avg_pool2d", "backward", "recording:mine/pool", "torch"] == "ok"
    wrong = next(r for r in records if r["status"] == "incorrect")
    assert wrong["implementation"] == "wrong" and wrong["reason"]
    assert all(r["checked"] == r["total"] > 0 for r in records if r["status"] == "ok")
    assert {p.name for p in folder.iterdir()} == {"mine.npz", "plugin.py"}, "verify leaves nothing behind"


def test_interrupted_once_it_finishes_the_case_and_writes_the_report(folder: Path) -> None:
    words = ("run", "--preset", "smoke", "--workload", "mnist/conv1", "--operator", "clamped_sign", "--passes", "500")
    process = subprocess.Popen(
        [*COMMAND, *words, "--out", "out"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    journal = folder / "out" / "cases.jsonl"
    deadline = time.monotonic() + 120
    while not (journal.exists() and '"record"' in journal.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert out.splitlines()[-1] == "out/report.html" and (folder / "out" / "report.html").exists()
    assert "Traceback" not in err
    assert json.loads((folder / "out" / "run.json").read_text())["interrupted"] is True


WAITS = """
import pathlib, time
from spikemark import kernels

@kernels.implementation("clamped_sign", device="cpu")
class Waits:
    'Waits for ever.'
    def forward(self, x):
        pathlib.Path("waits").touch()
        time.sleep(600)
    def backward(self, grad): raise NotImplementedError
"""


def test_an_interrupted_verify_does_not_say_that_all_is_right(folder: Path) -> None:
    """The kernel waits for ever: nothing was compared, and that is what is said."""
    (folder / "waits.py").write_text(WAITS.replace('"waits"', repr(str(folder / "waits"))))
    words = ("verify", "--workload", "mnist/conv1", "--operator", "clamped_sign", "--phase", "forward")
    more = ("--implementation", "waits", "--plugin", "waits.py", "--device", "cpu")
    process = subprocess.Popen(
        [*COMMAND, *words, *more], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (folder / "waits").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert out == "" and err.splitlines()[-1] == "interrupted: 0 of 1 cases were compared"


def test_a_reader_that_is_gone_loses_no_report(folder: Path) -> None:
    """As with ``| head`` where Python does not buffer: the page is there, and nothing is told of the pipe."""
    words = (
        "run",
        "--preset",
        "smoke",
        "--operator",
        "clamped_sign",
        "--phase",
        "forward",
        "--implementation",
        "torch",
    )
    process = subprocess.Popen(
        [*COMMAND, *words, "--out", "out"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) == 0 and "spikemark:" not in err and "Traceback" not in err
    assert (folder / "out" / "report.html").exists()


@pytest.mark.skipif(os.name != "posix", reason="only a POSIX shell closes streams so")
@pytest.mark.parametrize(("line", "code"), [("list operators >&-", 0), ("lst 2>&-", 2), ("lst >&- 2>&-", 2)])
def test_closed_streams_are_no_crash(line: str, code: int) -> None:
    done = subprocess.run(
        f"'{sys.executable}' -m spikemark {line}", shell=True, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_interrupted_while_the_report_is_written_it_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spikemark import runner
    from spikemark.harness import supervisor
    from spikemark.harness.plan import RunResult
    from spikemark.reports import html

    pages: list[Path] = []

    def write(runs: list[Path], out: Path | None) -> Path:
        pages.append(runs[0])
        if len(pages) == 1:
            raise KeyboardInterrupt
        return runs[0] / "report.html"

    monkeypatch.setattr(supervisor, "run", lambda *given: RunResult(0, tmp_path))
    monkeypatch.setattr(html, "write", write)
    monkeypatch.setattr("spikemark.commands.run.summary", lambda path: "")
    words = ("--operator=clamped_sign", "--workload=mnist/conv2", "--batch=1", f"--out={tmp_path}")
    assert runner.main(["run", *words]) == 130
    assert pages == [tmp_path, tmp_path]

"""``suites/`` as a worker with a plan and events, and as plain pytest-benchmark for whoever likes that better."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from spikemark.harness.records import Case, Record
from spikemark.kernels import Problem
from spikemark.suites.worker import SUITES, worker_command

ROOT = Path(__file__).parents[2]
PROBLEM = Problem("mnist/tiny", "conv", 2, 5, (1, 12, 12), (4, 8, 8), kernel=(5, 5), spike_rate=0.12)
OPTIONS = {"precision": 0.5, "budget_s": 0.005, "min_samples": 24, "max_samples": 25, "gate_limit": None}


def make_plan(folder: Path, cases: list[Case], plugins: tuple[Path, ...] = (), **more: Any) -> Path:
    plan = {"schema": 1, "pass_index": 2, "seed": 0, "device": "cpu", "environment": "cpu", "calibrate": True}
    plan |= {"plugins": [str(p) for p in plugins], "cases": [c.to_json() for c in cases], "options": OPTIONS} | more
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    return path


def run_worker(plan: Path, *more: str) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[bytes]]:
    """Events and process of one worker, started as the supervisor does."""
    reader, writer = os.pipe()
    here = plan.parent / "here"
    here.mkdir()
    with os.fdopen(reader, "rb") as events:
        process = subprocess.Popen(
            [*worker_command(plan, writer), *more], pass_fds=[writer], stdout=-1, stderr=-1, cwd=here
        )
        os.close(writer)
        lines = events.read().splitlines()
    out, err = process.communicate()
    return [json.loads(line) for line in lines], subprocess.CompletedProcess([], process.returncode, out, err)


def neuron(implementation: str, phase: str = "forward") -> Case:
    return Case("srm_neuron", phase, implementation, "cpu", "float32", PROBLEM)


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Case], list[dict[str, Any]], Path]:
    """One worker over a plan with operators out of order, a kernel that is wrong and one that is missing."""
    cases = [
        neuron("torch_eager", "backward"),
        Case("conv_backward", "weight", "torch_autograd", "cpu", "float32", PROBLEM),
        neuron("hostile_raises"),
        neuron("hostile_binary"),
        neuron("no_such"),
        neuron("torch_eager"),
    ]
    folder = tmp_path_factory.mktemp("worker")
    events, process = run_worker(make_plan(folder, cases, (ROOT / "tests" / "hostile.py",)))
    assert events, process.stderr.decode(errors="replace")
    return cases, events, folder


Worked = tuple[list[Case], list[dict[str, Any]], Path]


def test_a_worker_tells_what_it_does(worked: Worked) -> None:
    cases, events, _ = worked
    kinds = [e["event"] for e in events]
    assert kinds[:2] == ["ready", "calibration"]
    assert kinds[-1] == "end"
    assert events[0]["environment"]["device"] == "cpu"
    assert events[0]["environment"]["switches"]["tf32"] == {"matmul": False, "cudnn": False}  # torch's default has one
    assert events[1]["copy_bytes_per_s"] > 0
    assert [(e["index"], e["key"]) for e in events if e["event"] == "start"] == [
        (i, c.key) for i, c in enumerate(cases)
    ]
    for index in (0, 1, 5):
        stages = [e["stage"] for e in events if e["event"] == "stage" and e["index"] == index]
        assert stages == ["inputs", "first-call", "verify", "warm-up", "measure", "recheck", "ledger"]


def test_every_case_has_its_row_whatever_the_others_do(worked: Worked) -> None:
    cases, events, _ = worked
    records = [Record.from_json(e["record"]) for e in events if e["event"] == "record"]
    by_case = {r.case.key: r for r in records}
    assert len(records) == len(by_case) == len(cases)
    found = [by_case[c.key] for c in cases]
    assert [r.status for r in found] == ["ok", "ok", "error", "ok", "unavailable", "ok"]
    assert found[2].reason == "ZeroDivisionError: no such kernel"
    assert {r.pass_index for r in records} == {2}
    assert all(24 <= len(r.samples) <= 25 for r in records if r.status == "ok")


def test_implementations_take_turns_and_the_worker_says_whose_turn_it_is(worked: Worked) -> None:
    """The two that are right of the neuron's forward: cases 3 and 5."""
    events = worked[1]
    records = {r["index"]: Record.from_json(r["record"]) for r in events if r["event"] == "record"}
    blocks = {i: r.details.get("block") for i, r in records.items() if r.details.get("block")}
    assert list(blocks) == [3, 5] and len(set(blocks.values())) == 1
    order = [e["index"] for e in events if e["event"] == "turn"]
    assert set(order) == {3, 5}
    assert sum(a != b for a, b in itertools.pairwise(order)) >= 4, "neither is sampled in one go"
    for record in (records[3], records[5]):
        bursts = record.details["bursts"]
        assert bursts[0] == 0 and bursts == sorted(set(bursts)) and bursts[-1] < len(record.samples)
        assert len(bursts) > 1


def test_a_worker_leaves_nothing_in_the_folder_it_runs_in(worked: Worked) -> None:
    assert list((worked[2] / "here").iterdir()) == []


def test_a_spoilt_worker_ends_early_and_says_why(tmp_path: Path) -> None:
    cases = [neuron("torch_eager"), neuron("hostile_starts_threads"), neuron("torch_eager", "backward")]
    events, _ = run_worker(make_plan(tmp_path, cases, (ROOT / "tests" / "hostile.py",), calibrate=False))
    rows = [e["record"] for e in events if e["event"] == "record"]
    assert [(r["case"]["implementation"], r["status"]) for r in rows] == [("hostile_starts_threads", "error")]
    assert {e["index"] for e in events if e["event"] == "start"} == {0, 1}, "the first was begun: it is left to others"
    assert events[-1]["event"] == "end"
    assert "thread" in events[-1]["spoilt"]
    assert "calibration" not in [e["event"] for e in events]


def test_verification_alone(tmp_path: Path) -> None:
    events, _ = run_worker(make_plan(tmp_path, [neuron("torch_eager")], calibrate=False), "--benchmark-disable")
    record = next(e["record"] for e in events if e["event"] == "record")
    assert (record["status"], record["samples"]) == ("ok", [])
    checks = record["verification"]["checks"]
    assert len(checks) > 5
    assert all(check["ok"] for check in checks)


@pytest.mark.parametrize(
    ("change", "words"), [({"schema": 99}, "schema 99"), ({"plugins": ["nowhere.py"]}, "nowhere.py is not a file")]
)
def test_a_bad_plan_is_one_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    plan = make_plan(tmp_path, [neuron("torch_eager")])
    plan.write_text(json.dumps(json.loads(plan.read_text()) | change))
    events, process = run_worker(plan)
    assert events == []
    assert process.returncode == 4
    assert words in process.stderr.decode()
    assert "Traceback" not in process.stderr.decode()


# -- plain pytest --------------------------------------------------------------------------------------------------


def pytest_suites(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", str(SUITES), "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_plain_pytest_selects_saves_and_compares(tmp_path: Path) -> None:
    """The benchmark file holds the samples of the record, and pytest-benchmark's compare finds the case again."""
    plan, file = (
        make_plan(tmp_path, [neuron("torch_eager"), neuron("hostile_nan")], (ROOT / "tests" / "hostile.py",)),
        {},
    )
    storage = f"--benchmark-storage=file://{tmp_path / 'store'}"
    arguments = (f"--spikemark-plan={plan}", storage, "--benchmark-autosave", "-k", "srm_neuron and (eager or nan)")
    first = pytest_suites(*arguments, f"--benchmark-json={tmp_path / 'b.json'}")
    assert "1 failed, 1 passed" in first.stdout, first.stdout + first.stderr
    assert "incorrect: delta_u: 1 of" in first.stdout
    file = json.loads((tmp_path / "b.json").read_text())
    [bench] = file["benchmarks"]
    assert bench["fullname"].endswith("[srm_neuron-forward-mnist/tiny-torch_eager-cpu-float32-b2-t5-r0.12]")
    assert bench["group"] == "srm_neuron/forward/mnist/tiny/cpu/float32/b2/t5/r0.12"
    assert bench["options"]["timer"] == "DeviceClock"
    record = Record.from_json(bench["extra_info"]["spikemark"] | {"samples": bench["stats"]["data"]})
    assert record.status == "ok"
    assert 24 <= bench["stats"]["rounds"] == len(record.samples) <= 25
    assert "node" not in file["machine_info"]
    second = pytest_suites(*arguments, "--benchmark-compare")
    assert "(NOW)" in second.stdout and "(0001_" in second.stdout, second.stdout + second.stderr


def test_the_preset_is_the_suite_and_an_unknown_one_is_one_line() -> None:
    listed = pytest_suites("--collect-only", "-q", "-k", "conv2 and backward and native", "--spikemark-preset=smoke")
    assert "srm_neuron-backward-mnist/conv2-native-cpu-float32" in listed.stdout, listed.stdout + listed.stderr
    bad = pytest_suites("--collect-only", "--spikemark-preset=smok")
    assert bad.returncode == 4
    assert "did you mean 'smoke'" in bad.stderr
    assert "Traceback" not in bad.stderr + bad.stdout


def test_a_forked_copy_of_the_measuring_process_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from spikemark.suites.plugin import Suite

    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        raise Ended

    reading, writing = os.pipe()
    suite = Suite([], events=writing)
    suite.emit("one")
    monkeypatch.setattr(os, "getpid", lambda: suite.process + 1)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended):
        suite.emit("two")
    os.close(writing)
    with os.fdopen(reading) as stream:
        assert stream.read() == '{"event": "one"}\n'

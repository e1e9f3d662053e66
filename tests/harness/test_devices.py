"""Several devices in one run: which may be measured at the same time, how each is pinned, and what one's loss costs.

The GPUs are a list (``Machine``) and a worker that needs none (``fake_worker``); the two CPU devices are real.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from fake_runs import case, fake_command
from spikemark.harness import devices, gpu, supervisor
from spikemark.harness.devices import Machine, Pin, side_by_side
from spikemark.harness.errors import UsageError
from spikemark.harness.plan import RunOptions, Variant, worker_env
from spikemark.harness.progress import Quiet
from spikemark.harness.records import UNMEASURED, Case, Record
from spikemark.harness.runfolder import Run, RunFolder
from spikemark.harness.statistics import summarise
from spikemark.harness.supervisor import WorkerFailed

HERE = Path(__file__).parent
GPUS = ("cuda:0", "cuda:1", "cuda:2")


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of others on this machine are not seen; what fake workers tell each other has a folder of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "place").mkdir()
    monkeypatch.setenv("FAKE_PLACE", str(tmp_path / "place"))
    monkeypatch.setenv("FAKE_COUNT", str(len(GPUS)))


def pins(*names: str, cpus: frozenset[int] = frozenset()) -> dict[str, Pin]:
    """A GPU for each name, all of one model."""
    return {name: Pin(f"GPU-{name[-1] * 4}", gpu.uuid_hash(name[-1] * 4), cpus) for name in names}


class Fakes(Machine):
    """GPUs that are on a list, on a machine with ``cores``; ``gone`` is the file that says that cuda:1 is lost."""

    def __init__(self, *names: str, cores: int = 64, gone: Path | None = None) -> None:
        super().__init__(pins(*names), cores=lambda cpus: cores)
        self.gone = gone

    def lost(self, device: str) -> str:
        """As NVML would say it."""
        there = self.gone is None or device != "cuda:1" or not self.gone.exists()
        return "" if there else "the GPU cuda:1 has fallen off the bus"


def measure(out: Path, cases: list[Case], machine: Machine, **changes: Any) -> Any:
    """Run with the fake worker on stand-ins for GPUs."""
    options = RunOptions(out=out, **({"passes": 1, "case_timeout_s": 20.0, "stage_limits_s": {}} | changes))
    return supervisor.run(cases, options, fake_command, ["run"], Quiet(), machine)


def test_gpus_are_measured_side_by_side_and_the_cpu_has_the_machine_alone(tmp_path: Path) -> None:
    """``meets`` waits for its like on the other GPUs: one after another each would be timed out."""
    cases = [case("meets", device=d) for d in GPUS] + [case("alone", w, d) for d in ("cpu", "cpu:1") for w in "ab"]
    result = measure(tmp_path / "r", cases, Fakes(*GPUS), devices=("cpu", *GPUS, "cpu:1"), passes=2)
    assert result.counts == {"ok": 7}
    order = [(r.pass_index, r.environment[:3]) for r in RunFolder.load(tmp_path / "r").records]
    assert order == [(p, d) for p in (0, 1) for d in ("cpu", "cpu", "cud", "cud", "cud", "cpu", "cpu")]


def test_as_many_gpus_at_once_as_the_cpu_can_feed(tmp_path: Path) -> None:
    """Three cores feed one GPU; with four the first two meet, and the third has nobody to wait for but their traces."""
    measure(tmp_path / "one", [case("alone", w, d) for d in GPUS for w in "abc"], Fakes(*GPUS, cores=3))
    assert [r.status for r in RunFolder.load(tmp_path / "one").records] == ["ok"] * 9
    measure(tmp_path / "two", [case("meets", device=d) for d in GPUS], Fakes(*GPUS, cores=4), case_timeout_s=1.0)
    statuses = {r.case.device: r.status for r in RunFolder.load(tmp_path / "two").records}
    assert statuses["cuda:2"] == "ok"
    assert "timed-out" in statuses.values(), "the first two wait for the third, which may not begin yet"


def test_equal_gpus_are_told_apart(tmp_path: Path) -> None:
    """By their hashed UUIDs, in a run and when runs are joined; each process sees its own GPU as the first."""
    cards = {"a": pins("cuda:0", "cuda:1"), "b": {"cuda:0": Pin("GPU-bbbb", gpu.uuid_hash("bbbb"))}}
    cards["c"] = {"cuda:0": cards["a"]["cuda:0"]}  # the first one once more
    for name, found in cards.items():
        machine = Fakes()
        machine.pins = found
        measure(tmp_path / name, [case("tells", device=d) for d in found], machine, passes=2)
    one, *others = (RunFolder.load(tmp_path / name) for name in cards)
    assert {r.case.device: r.details["visible"] for r in one.records} == {"cuda:0": "GPU-0000", "cuda:1": "GPU-1111"}
    assert {e["gpu"]["index"] for e in one.meta["environments"].values()} == {0}
    rows = summarise([one, *others])
    assert {(r["device"], r["device_id"], r["passes"]) for r in rows} == {
        ("cuda:0", gpu.uuid_hash("0000"), 4),
        ("cuda:1", gpu.uuid_hash("1111"), 2),
        ("cuda:0", gpu.uuid_hash("bbbb"), 2),
    }
    assert len(rows) == 3
    assert {r["device_name"] for r in rows} == {"Fake GPU"}
    assert "0000" not in (tmp_path / "a" / "run.json").read_text(), "no UUID in results"


def test_a_process_on_another_gpu_than_its_own_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VISIBLE", "GPU-ffff")
    with pytest.raises(WorkerFailed, match="cuda:0 finds itself on another GPU"):
        measure(tmp_path / "r", [case("ok", device="cuda:0")], Fakes("cuda:0"))
    assert RunFolder.load(tmp_path / "r").records == []


def test_a_lost_gpu_ends_its_rows_with_the_reason_and_costs_no_other(tmp_path: Path) -> None:
    """What it had measured stays, with fewer passes; the run is continued when it is back in its slot."""
    gone, out = tmp_path / "place" / "gone", tmp_path / "r"
    machine = Fakes("cuda:0", "cuda:1", gone=gone)
    first = [case("ok", w, d) for d in ("cuda:0", "cuda:1") for w in ("a", "b")]
    measure(out, first, machine, passes=1)
    both = first + [case("falls_off", "c", d) for d in ("cuda:0", "cuda:1")]
    result = measure(out, both, machine, passes=2, resume=True)
    run = RunFolder.load(out)

    def found(run: Run) -> dict[tuple[str, str], tuple[str, int, bool]]:
        rows = summarise(run)
        return {(r["device"], r["workload"]): (r["status"], r["passes"], "incomplete" in r["flags"]) for r in rows}

    assert found(run) == {("cuda:0", w): ("ok", 2, False) for w in "abc"} | {
        ("cuda:1", "a"): ("ok", 1, True),
        ("cuda:1", "b"): ("ok", 1, True),
        ("cuda:1", "c"): ("unavailable", 0, False),
    }
    why = "the GPU cuda:1 has fallen off the bus"
    assert [r.reason for r in run.records if r.status != "ok"] == [why], "the kernel is not blamed"
    assert run.meta["lost"] == {"cuda:1": why}
    assert run.meta["unmeasured"] == []
    assert result.exit_code == 0
    assert f"cuda:1: {why}" in result.message

    gone.unlink()
    machine.gone = None
    measure(out, both, machine, passes=2, resume=True)
    run = RunFolder.load(out)
    assert run.meta["lost"] == {}
    assert found(run)["cuda:1", "a"] == found(run)["cuda:1", "b"] == ("ok", 2, False)
    assert found(run)["cuda:1", "c"][0] == "crashed", "with the GPU there, it is the kernel's fault"


def test_a_failure_on_a_gpu_that_is_gone_is_not_the_kernels(tmp_path: Path) -> None:
    """A process may live on where every call fails: its first row of that kind ends the device's rows."""
    gone, out = tmp_path / "place" / "gone", tmp_path / "r"
    gone.touch()
    machine = Fakes("cuda:0", "cuda:1", gone=gone)
    cases = [case("fails", w, d) for w in "ab" for d in ("cuda:0", "cuda:1")]
    result = measure(out, cases, machine, passes=2)
    records = RunFolder.load(out).records
    assert (
        sorted((r.case.device, r.status) for r in records)
        == [("cuda:0", "error")] * 2 + [("cuda:1", "unavailable")] * 2
    )
    assert {r.reason for r in records if r.case.device == "cuda:1"} == {"the GPU cuda:1 has fallen off the bus"}
    assert result.exit_code == 4
    gone.unlink()
    measure(out, cases, machine, passes=2, resume=True)
    rows = summarise(RunFolder.load(out))
    assert {(r["status"], r["reason"]) for r in rows} == {("error", "CUDA error: unknown error")}


def test_a_device_whose_workers_do_not_start_costs_only_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_BROKEN", "1")
    monkeypatch.setenv("FAKE_BROKEN_DEVICE", "cuda:1")
    cases = [case("ok", device=d) for d in GPUS]
    result = measure(tmp_path / "r", cases, Fakes(*GPUS), passes=2)
    assert (result.exit_code, result.counts) == (0, {"error": 1, "ok": 2})
    (row,) = [r for r in RunFolder.load(tmp_path / "r").records if r.case.device == "cuda:1"]
    assert "exit code 1 before it was ready: ImportError: no module named kaputt" in row.reason
    assert row.details[UNMEASURED] is True

    monkeypatch.delenv("FAKE_BROKEN_DEVICE")
    with pytest.raises(WorkerFailed, match="kaputt"):
        measure(tmp_path / "none", cases, Fakes(*GPUS))
    assert len(RunFolder.load(tmp_path / "none").records) == 3
    with pytest.raises(WorkerFailed, match="kaputt"):
        measure(tmp_path / "alone", cases[:1], Fakes(*GPUS))


def test_two_versions_take_turns_on_each_gpu(tmp_path: Path) -> None:
    variants = (Variant("base"), Variant("new"))
    gpus = ("cuda:0", "cuda:1")
    measure(tmp_path / "r", [case(n, device=d) for d in gpus for n in ("ok", "exits")], Fakes(*gpus),
            passes=2, variants=variants)  # fmt: skip
    run = RunFolder.load(tmp_path / "r")
    ok = sorted((r.environment, r.pass_index) for r in run.records if r.status == "ok")
    assert ok == sorted((f"{d} [{v}]", p) for d in gpus for v in ("base", "new") for p in (0, 1))
    assert sum(r.status == "crashed" for r in run.records) == 4


def test_control_c_once_lets_every_gpu_finish_its_case(tmp_path: Path) -> None:
    """Neither begins another once the interrupt was heard, and what both had begun has its row."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_devices import *\n"
        "cases = [case('interrupts_runner', 'a', 'cuda:0'), case('meets', 'a', 'cuda:1')]\n"
        "cases += [case('ok', w, d) for w in 'bcdefgh' for d in ('cuda:0', 'cuda:1')]\n"
        "result = measure(Path(sys.argv[2]), cases, Fakes('cuda:0', 'cuda:1'), passes=200)\n"
        "print(result.exit_code, result.message)\n"
    )
    environment = os.environ | {"FAKE_COUNT": "1"}
    command = [sys.executable, "-c", code, str(HERE), str(tmp_path / "r")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.stdout.startswith("130 interrupted"), done.stderr
    run = RunFolder.load(tmp_path / "r")
    assert run.meta["interrupted"] is True
    assert {r.status for r in run.records} == {"ok"}
    assert {r.pass_index for r in run.records} == {0}, "no GPU goes on to its next pass"


def test_cpu_and_one_thread_for_real(tmp_path: Path) -> None:
    """The command line, the real worker: two CPU devices, one after another, with their own rows and environments."""
    words = ["run", "--preset", "smoke", "--operator", "clamped_sign", "--phase", "forward", "--passes", "1"]
    words += ["--device", "all", "--device", "cpu:1", "--implementation", "torch", "--out", str(tmp_path / "r")]
    done = subprocess.run(
        [sys.executable, "-m", "spikemark", *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    run = RunFolder.load(tmp_path / "r")
    assert set(run.meta["environments"]) >= {"cpu", "cpu:1"}
    assert run.meta["environments"]["cpu:1"]["threads"] == 1
    on_cpu = [(r.pass_index, r.environment) for r in run.records if r.environment.startswith("cpu")]
    assert list(dict.fromkeys(on_cpu)) == [(0, "cpu"), (0, "cpu:1")]
    assert {(r["status"], r["passes"]) for r in summarise(run)} == {("ok", 1)}
    assert "#" not in done.stdout.splitlines()[0]


# What a machine tells.


def test_waves_keep_the_order_asked_for() -> None:
    machine = Machine(pins("cuda:0", "cuda:1"))
    assert machine.waves(["cpu", "cuda:1", "cpu:1", "cuda:0"]) == [["cpu"], ["cuda:1", "cuda:0"], ["cpu:1"]]
    assert machine.waves(["cuda:5", "cpu"]) == [["cuda:5"], ["cpu"]], "a GPU that is not known is measured alone"
    assert machine.waves([]) == []


def test_near_cpus_bound_who_is_measured_beside_whom() -> None:
    """Two nodes of four CPUs: two GPUs at each, no third at one of them."""
    left, right = frozenset(range(4)), frozenset(range(4, 8))
    four = {f"cuda:{i}": Pin(f"GPU-{i}", f"{i}", (left, left, right, right)[i]) for i in range(4)}
    four["cuda:4"] = Pin("GPU-4", "4", left)
    machine = Machine(four, usable=left | right, cores=len)
    assert machine.fits("cuda:1", ["cuda:0"])
    assert machine.fits("cuda:3", ["cuda:0", "cuda:1", "cuda:2"])
    assert not machine.fits("cuda:4", ["cuda:0", "cuda:1"])
    assert machine.affinity("cuda:2") == "4,5,6,7"
    assert machine.affinity("cpu") == ""
    narrowed = Machine(four, usable=frozenset({0, 1}), cores=len)
    assert narrowed.affinity("cuda:2") == "", "a batch system gave none of its near CPUs"
    assert narrowed.fits("cuda:2", []), "the last resort: alone"
    assert not narrowed.fits("cuda:2", ["cuda:0"])


def test_a_worker_is_kept_on_the_cpus_near_its_gpu(tmp_path: Path) -> None:
    usable = devices.usable_cpus()
    if len(usable) < 2:
        pytest.skip("needs two CPUs to choose from")
    machine = Machine({"cuda:0": Pin("GPU-0000", gpu.uuid_hash("0000"), frozenset({max(usable)}))})
    measure(tmp_path / "r", [case("tells", device="cuda:0")], machine)
    (record,) = RunFolder.load(tmp_path / "r").records
    assert record.details["cpus"] == [max(usable)]


def test_a_pinned_process_knows_its_gpu_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from spikemark.harness.clock import torch_device

    assert devices.cuda_index("cuda:3") == 3
    pinned = worker_env("cuda:3", Variant(), pins("cuda:3")["cuda:3"])
    assert pinned["CUDA_VISIBLE_DEVICES"] == "GPU-3333"
    monkeypatch.setenv(devices.PINNED, pinned[devices.PINNED])
    assert devices.cuda_index("cuda:3") == 0
    assert str(torch_device("cuda:3")) == "cuda:0"
    assert str(torch_device("cpu:2")) == "cpu"
    for other in ("cuda:0", "cuda"):
        with pytest.raises(ValueError, match="this process sees cuda:3 only"):
            torch_device(other)
    assert devices.PINNED not in worker_env("cpu", Variant()), "a runner that is pinned itself does not pass it on"


def test_what_the_child_process_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU torch names none; what it would say is read from a stand-in, MIG slices by their own names."""
    assert devices.here(["cpu", "cpu:1"]).pins == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,MIG-5555")
    answers = SimpleNamespace(stdout='warning\n[{"uuid": "aaaa", "bus": null}, {"uuid": "GPU-bb", "bus": "x"}]\n')
    monkeypatch.setattr(devices.subprocess, "run", lambda *a, **k: answers)
    found = devices.here(["cuda:0"]).pins
    assert found == {
        "cuda:0": Pin("GPU-aaaa", gpu.uuid_hash("aaaa")),
        "cuda:1": Pin("MIG-5555", gpu.uuid_hash("bb")),
    }
    for stdout in ("", "no json", '[{"bus": 1}]'):
        answers.stdout = stdout
        with pytest.raises(UsageError, match="torch cannot say which GPUs are here"):
            devices.here(["cuda:0"])


def test_the_child_process_lists_gpus_in_torchs_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    told = [
        SimpleNamespace(uuid="aa", pci_domain_id=0, pci_bus_id=59, pci_device_id=0),
        SimpleNamespace(uuid="bb"),  # torch before 2.8 does not tell
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told[index])
    monkeypatch.setattr(gpu.Gpu, "bus", lambda self: f"of {self.uuid}")
    devices.main()
    assert capsys.readouterr().out == '[{"uuid": "aa", "bus": "0000:3b:00.0"}, {"uuid": "bb", "bus": "of GPU-bb"}]\n'
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    devices.main()
    assert capsys.readouterr().out == "[]\n"


def test_what_the_system_tells_of_near_cpus(tmp_path: Path) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text("0-2,8\n")
    for bus in ("0000:3b:00.0", "00000000:3B:00.0"):
        assert devices.local_cpus(bus, tmp_path) == {0, 1, 2, 8}
    for bus in ("0000:3c:00.0", "../x", ""):
        assert devices.local_cpus(bus, tmp_path) == frozenset()
    assert devices.parse_cpus("") == frozenset()
    with pytest.raises(ValueError, match="invalid literal"):
        devices.parse_cpus("a-b")


def test_two_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    for number in range(4):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 2},{number % 2 + 2}\n")
    assert devices.count_cores(frozenset(range(4)), tmp_path) == 2
    assert devices.count_cores(frozenset({0, 1, 2, 3, 9}), tmp_path) == 3


class _Nvml:
    """NVML whose device answers or fails with ``code``."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        """Any failure."""

        value = 0

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return "handle"

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        if self.code:
            error = self.NVMLError()
            error.value = self.code
            raise error
        return 41


def test_nvml_says_that_a_gpu_is_lost() -> None:
    assert gpu.lost("GPU-a", _Nvml()) == ""
    assert gpu.lost("GPU-a", _Nvml(3)) == "", "not supported: it does not tell"
    assert gpu.lost("GPU-a", _Nvml(15)) == "has fallen off the bus"
    assert gpu.lost("GPU-a", _Nvml(6)) == "is no longer there"


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost. Reboot", "has fallen off the bus"),
        ("No devices were found", "is no longer there"),
        ("GPU-aaaa", ""),
    ],
)
def test_nvidia_smi_says_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, why: str) -> None:
    monkeypatch.setattr(gpu, "_load_nvml", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.lost("GPU-aaaa") == "", "nobody to ask"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    assert gpu.lost("GPU-aaaa") == why
    machine = Machine({"cuda:1": Pin("GPU-aaaa", "a")})
    assert machine.lost("cuda:1") == (f"the GPU cuda:1 {why}" if why else "")
    assert machine.lost("cpu") == ""


def test_what_one_raises_closes_the_others() -> None:
    closed = []

    def work(name: str) -> Generator[None]:
        try:
            yield
            if name == "b":
                raise RuntimeError("b")
            yield
            yield
        finally:
            closed.append(name)

    with pytest.raises(RuntimeError, match="b"):
        side_by_side("abc", work, lambda name, running: True)
    assert sorted(closed) == ["a", "b", "c"]


def test_a_process_that_cannot_be_killed_does_not_hold_up_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one inside the driver of a GPU that is gone: the kernel ends it when the driver answers, if ever."""
    from spikemark.harness import process

    monkeypatch.setattr(process, "STOP_LIMIT_S", 0.3)
    monkeypatch.setattr(process, "_kill", lambda action: None)
    monkeypatch.setattr("spikemark.harness.session.HANG_UP_GRACE_S", 0.1)
    started = time.monotonic()
    cases = [case("hangs_up", device="cuda:0"), case("ok", device="cuda:1")]
    result = measure(tmp_path / "r", cases, Fakes("cuda:0", "cuda:1"))
    assert time.monotonic() - started < 15
    assert result.counts.get("ok") == 1
    run = RunFolder.load(tmp_path / "r")
    assert run.meta["lost"] == {"cuda:0": "its process cannot be ended: the driver does not answer"}
    monkeypatch.undo()
    for child in psutil.Process().children():
        child.kill()
        child.wait()


def test_a_row_that_says_the_device_was_lost_is_a_record_like_any_other() -> None:
    record = Record(case("ok"), 0, "unavailable", "lost", details={UNMEASURED: True})
    assert Record.from_json(record.to_json()) == record

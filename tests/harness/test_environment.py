"""The environment: complete, private, and named where it differs. GPUs through a stand-in for NVML and nvidia-smi."""

from __future__ import annotations

import copy
import getpass
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from spikemark.harness import environment, gpu


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The environment of this machine's processor."""
    return environment.collect("cpu")


def test_what_matters_is_there(found: dict[str, Any]) -> None:
    import torch

    assert found["device"] == "cpu"
    assert found["kind"] == "cpu"
    assert found["gpu"] is None
    assert found["threads"] == torch.get_num_threads()
    assert found["device_name"] == found["cpu"]["model"] != "unknown"
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["cpu"]["available"] >= 1
    assert found["cpu"]["load"] >= 0
    assert set(found["switches"]) >= {"tf32", "deterministic", "cudnn_benchmark"}
    assert len(found["project"]["source"]) == 16


def test_it_follows_torchs_switches(found: dict[str, Any]) -> None:
    import torch

    benchmark, threads = torch.backends.cudnn.benchmark, torch.get_num_threads()
    torch.backends.cudnn.benchmark = not benchmark
    torch.set_num_threads(threads + 1)
    try:
        changed = environment.collect("cpu")
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.set_num_threads(threads)
    different = environment.differences(found, changed)
    assert different == [("threads", threads, threads + 1), ("switches.cudnn_benchmark", benchmark, not benchmark)]


def test_nothing_personal(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/home/someone/lib/libjemalloc.so.2")
    text = json.dumps([found, environment.variables()])
    assert "libjemalloc.so.2" in text
    assert "/home" not in text
    names = [platform.node(), str(Path.home()), str(environment.PACKAGE), os.getcwd()]  # noqa: PTH109
    user = getpass.getuser()
    for name in names + ([user] if len(user) > 4 else []):
        assert name not in text or name in ("", "/")
    assert "/" not in text.replace("application/", ""), "no path of any kind"


def test_the_same_environment_has_no_differences(found: dict[str, Any]) -> None:
    other = copy.deepcopy(found)
    other["cpu"]["load"] += 3
    other["project"]["commit"] = "other"
    assert environment.differences(found, other) == [], "load and commit may differ between runs that are compared"
    strict = environment.differences(found, other, environment.MUST_MATCH_IN_ONE_RUN)
    assert [name for name, _, _ in strict] == (["project.commit"] if found["project"]["commit"] else [])


@pytest.mark.parametrize("name", environment.MUST_MATCH)
def test_each_field_that_must_match_is_named(name: str) -> None:
    one: dict[str, Any] = {}
    inner = one
    *folders, last = name.split(".")
    for folder in folders:
        inner = inner.setdefault(folder, {})
    inner[last] = "a"
    other = json.loads(json.dumps(one).replace('"a"', '"b"'))
    assert environment.differences(one, other) == [(name, "a", "b")]
    assert environment.differences(one, {}) == [], "what one side does not know is not held against it"
    assert environment.describe_differences([(name, "a", "b")]) == f"{name} (a and b)"


def test_an_environment_of_the_wrong_shape_is_no_traceback(found: dict[str, Any]) -> None:
    assert environment.differences(found, {"cpu": "fast", "versions": None, "switches": []}) == []


def test_torch_free_parts_import_no_torch() -> None:
    code = (
        "import sys; from spikemark.harness import environment, supervisor, progress, runfolder, benchmarks_json\n"
        "environment.cpu(), environment.versions(), environment.project()\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_project_sees_commits_edits_and_plugins(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    (root / "kernels").mkdir(parents=True)
    kernel, plugin = root / "kernels" / "k.cpp", tmp_path / "mine.py"
    kernel.write_text("one")
    plugin.write_text("a")
    bare = environment.project(root, [plugin])
    assert (bare["commit"], bare["dirty"]) == (None, None)
    _git(root, "init", "-q")
    _git(root, "add", ".")
    _git(root, "commit", "-qm", "x")
    clean = environment.project(root, [plugin])
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    assert clean["source"] == bare["source"]
    kernel.write_text("two")
    plugin.write_text("b")
    edited = environment.project(root, [plugin])
    assert (edited["commit"], edited["dirty"]) == (clean["commit"], True)
    assert edited["source"] != clean["source"]
    assert list(edited["plugins"]) == ["mine.py"]
    assert edited["plugins"] != clean["plugins"]


class FakeNvml:
    """NVML as ``pynvml`` presents it, for one device; names that it lacks are attributes the real one must have."""

    class NVMLError(Exception):
        """Any failure."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, mask: int = 0, old_driver: bool = False) -> None:
        self.mask, self.old_driver = mask, old_driver

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-aaaa":
            raise self.NVMLError("not found")
        return "handle"

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        if self.old_driver:
            raise self.NVMLError("function not found")
        return self.mask

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.mask

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {1: 1980, 2: 2619}[kind]

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 41

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 120_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetApplicationsClock(self, handle: str, kind: int) -> int:
        raise self.NVMLError("not supported")

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA H200"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(total=141 * 2**30)

    def nvmlDeviceGetEccMode(self, handle: str) -> tuple[int, int]:
        return (1, 1)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=1)]


def test_a_gpu_through_nvml() -> None:
    described = gpu.Gpu("aaaa", FakeNvml(mask=0x1 | 0x4 | 0x40)).describe()
    assert described["name"] == "NVIDIA H200"
    assert described["source"] == "nvml"
    assert described["power_limit_w"] == pytest.approx(700)
    assert described["application_sm_clock_mhz"] is None, "not supported by this device"
    assert described["ecc"] is True
    assert described["other_processes"] == 1
    assert described["state"] == {
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "temperature_c": 41,
        "power_w": pytest.approx(120.5),
        "throttle": ["power-cap", "hardware-thermal"],
    }
    assert "aaaa" not in json.dumps(described), "the UUID is hashed"
    assert described["uuid_hash"] == gpu.uuid_hash("GPU-AAAA") != gpu.uuid_hash("GPU-aaab")
    old = gpu.Gpu("GPU-aaaa", FakeNvml(mask=0x20, old_driver=True))
    assert old.state()["throttle"] == ["software-thermal"]
    assert set(old.state()["throttle"]) <= gpu.THROTTLED


def test_the_installed_nvml_has_every_name_we_use() -> None:
    pynvml = pytest.importorskip("pynvml", reason="the extras cuda12, cuda13 and test bring nvidia-ml-py")
    names = [n for n in vars(FakeNvml) if n.startswith(("nvml", "NVML"))]
    assert len(names) > 10
    assert [n for n in names if not hasattr(pynvml, n)] == []
    documented = {v for k, v in vars(pynvml).items() if k.startswith("nvmlClocksEventReason") and isinstance(v, int)}
    assert set(gpu.CLOCK_REASONS) <= documented
    assert pynvml.nvmlClocksEventReasonSwPowerCap == 0x4
    assert pynvml.nvmlClocksEventReasonHwThermalSlowdown == 0x40


SMI = "NVIDIA H200, 570.1, 143771, 1980, 1980, 2619, 700.00, 120.50, 41, 0x0000000000000004\n"


def test_a_gpu_through_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--id=GPU-aaaa*) ;; *) exit 6;; esac\n'
        f'case "$*" in *compute-apps*) echo 77;; *--query-gpu=name,driver*) printf "{SMI.strip()}\\n";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu, "_load_nvml", lambda: None)
    described = gpu.Gpu("aaaa").describe()
    assert described["source"] == "nvidia-smi"
    assert (described["name"], described["driver"]) == ("NVIDIA H200", "570.1")
    assert described["memory_bytes"] == 143771 * 2**20
    assert described["other_processes"] == 1
    assert described["state"]["throttle"] == ["power-cap"]
    unknown = gpu.Gpu("bbbb").describe()
    assert unknown["name"] is None
    assert unknown["other_processes"] is None
    assert unknown["state"]["temperature_c"] is None


def test_nothing_known_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu, "_load_nvml", lambda: None)
    described = gpu.Gpu("aaaa").describe()
    assert described["source"] == "none"
    assert set(described["state"].values()) == {None}
    assert gpu.Gpu("bbbb", FakeNvml()).source == "none", "NVML does not know this device"


def test_nvidia_smi_lines() -> None:
    reading = gpu.parse_smi("A, 1, [N/A], 2, 3, 4, [Not Supported], 5.5, N/A, Not Active")
    assert reading["memory_bytes"] is None
    assert reading["power_limit_w"] is None
    assert reading["temperature_c"] is None
    assert reading["throttle"] is None
    assert reading["power_w"] == 5.5
    assert gpu.parse_smi("too, short") == {}
    assert gpu.throttle_names(0x1) == [], "idle holds nothing back"
    assert gpu.throttle_names(0x202) == ["application-clocks", "bit 0x200"]

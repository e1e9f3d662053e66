"""Nsight's drivers, with a fake tool on PATH: arguments, exit codes, time-outs, partial output, advice."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from spikemark.harness.errors import UsageError
from spikemark.harness.records import CRASHED, ERROR, TIMED_OUT, Case
from spikemark.harness.trace import driver, ncu, nsys, tools
from spikemark.harness.trace.driver import Failed
from spikemark.harness.trace.summary import TraceSummary
from spikemark.suites import selection

FAKE = Path(__file__).with_name("fake_nsight.py")


class Fake:
    """A fake tool in a folder, and what it was called with."""

    def __init__(self, folder: Path, tool: str) -> None:
        self.tool, self.log, self.traces = tool, folder / "log", folder / "traces"
        self.program = folder / "bin" / tool
        self.program.parent.mkdir()
        self.program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
        self.program.chmod(0o755)

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def trace(self, case: Case, limit_s: float = 120.0) -> TraceSummary:
        """Trace a case; returns the summary."""
        settings = {"tool": self.tool, "program": str(self.program), "limit_s": limit_s, "metrics": []}
        return driver.trace(case, [], self.traces, 3, settings, lambda stage: None)


@pytest.fixture(params=["nsys"])
def fake(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    found = Fake(tmp_path, request.param)
    monkeypatch.setenv("FAKE_NSIGHT_LOG", str(found.log))
    return found


both = pytest.mark.parametrize("fake", ["nsys", "ncu"], indirect=True)


@pytest.fixture(scope="module")
def case() -> Case:
    names: dict[str, Any] = {"operators": ["clamped_sign"], "phases": ["forward"], "implementations": ["torch"]}
    return selection.build("smoke", devices=["cpu"], **names)[0]


def failure(fake: Fake, case: Case, **options: Any) -> Failed:
    with pytest.raises(Failed) as error:
        fake.trace(case, **options)
    assert "\n" not in error.value.reason
    return error.value


def test_nsys_collects_exports_and_is_read_back(fake: Fake, case: Case) -> None:
    found = fake.trace(case)
    profile, export = fake.calls
    assert profile[0] == "profile" and profile[-3:-1] == ["-m", "spikemark.harness.trace.target"]
    assert {"--trace=cuda,nvtx", "--sample=none", "--capture-range=nvtx", "--nvtx-capture=capture@spikemark",
            "--capture-range-end=stop"} <= set(profile)  # fmt: skip
    assert export[:2] == ["export", "--type=sqlite"]
    assert (found.key, found.calls, found.status) == (case.key, 3, "ok")
    assert [(k["name"], k["count"]) for k in found.kernels] == [("neuron_kernel", 3)]
    # windows: 100, 130 (its kernel runs on until 2130) and 100 ns; kernels 50 + 100 + 50
    assert (found.wall_s, found.busy_s) == (pytest.approx(330e-9), pytest.approx(200e-9))
    assert found.not_in_kernels == pytest.approx(130 / 330)
    assert [k["name"] for k in found.outside] == ["stray"], "what ran outside is listed; the flush is expected"
    assert [f["name"].rsplit(".", 1)[1] for f in found.files] == ["nsys-rep", "sqlite"]
    assert all((fake.traces / f["name"]).is_file() for f in found.files), "the report is kept"
    assert found.ideal_bytes and found.ideal_bytes > 0
    assert found.notes == []


def test_on_cuda_nsys_listens_to_the_profiler_api(case: Case) -> None:
    on_gpu = Case.from_json(case.to_json() | {"device": "cuda:0"})
    command = nsys.profile_command("nsys", on_gpu, Path("a.nsys-rep"), ["python"])
    assert "--capture-range=cudaProfilerApi" in command and nsys.capture(on_gpu) == "cuda"
    assert not any(word.startswith("--nvtx-capture") for word in command)


def test_ncus_commands_as_text(case: Case) -> None:
    settings = {"tool": "ncu", "program": "ncu", "limit_s": 1, "metrics": ["a.sum", "b.avg"]}
    collect, back = driver.commands(case, settings, Path("traces"), Path("PLAN"))
    words = " ".join(collect)
    assert words.startswith("ncu --nvtx --nvtx-include spikemark@capture --metrics a.sum,b.avg --target-processes all ")
    assert " --export traces/clamped_sign_forward_" in words and words.endswith("spikemark.harness.trace.target PLAN")
    assert (
        back[0] == "ncu"
        and back[2].endswith(".ncu-rep")
        and back[3:] == ["--csv", "--page", "raw", "--print-units", "base"]
    )


@pytest.mark.parametrize("fake", ["ncu"], indirect=True)
def test_ncu_filters_by_nvtx_and_its_table_is_read(fake: Fake, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "package", lambda: False)
    found = fake.trace(case)
    profile, table = fake.calls
    assert profile[:3] == ["--nvtx", "--nvtx-include", "spikemark@capture"], "a start/end range: no slash"
    metrics = profile[profile.index("--metrics") + 1].split(",")
    assert {ncu.TIME, ncu.READ, ncu.WRITTEN, ncu.OCCUPANCY, ncu.STALL.format("long_scoreboard")} <= set(metrics)
    assert table[:1] == ["--import"] and "--csv" in table and table[table.index("--page") + 1] == "raw"
    (kernel,) = found.kernels
    assert (kernel["name"], kernel["count"]) == ("neuron_kernel(float const*, int)", 2)
    assert kernel["total_s"] == pytest.approx(4e-6) and kernel["bytes"] == 2400
    assert kernel["metrics"]["occupancy"] == pytest.approx((50 * 3 + 90) / 4), "weighted by time"
    assert list(kernel["metrics"]) == ["occupancy", "stall long scoreboard", "stall wait"]
    assert found.measured_bytes == 800, "bytes of one of three calls"
    assert found.ideal_bytes is not None


@both
def test_a_tool_that_fails_is_quoted_with_advice(fake: Fake, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NSIGHT", "fails")
    failed = failure(fake, case)
    assert failed.status == ERROR
    assert failed.reason.startswith("this version of the tool does not know an option that is needed")
    assert "unrecognised option '--nvtx-capture'" in failed.reason


@both
def test_a_tool_that_writes_nothing(fake: Fake, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NSIGHT", "nothing")
    name = {"nsys": "Nsight Systems (nsys)", "ncu": "Nsight Compute (ncu)"}[fake.tool]
    assert failure(fake, case).reason == f"{name} wrote no report"


@pytest.mark.parametrize(("mode", "kept"), [("hangs", False), ("partial", True)])
def test_a_tool_that_hangs_is_stopped_with_all_it_started(
    fake: Fake, case: Case, monkeypatch: pytest.MonkeyPatch, mode: str, kept: bool
) -> None:
    import psutil

    monkeypatch.setenv("FAKE_NSIGHT", mode)
    others = set(psutil.Process().children(recursive=True))  # what another test has left is not this tool's
    started = time.monotonic()
    failed = failure(fake, case, limit_s=1.0)
    assert time.monotonic() - started < 30
    assert failed.status == TIMED_OUT and "took longer than 1 s and was stopped" in failed.reason
    assert ("is kept" in failed.reason) == kept == any(fake.traces.iterdir())
    left = set(psutil.Process().children(recursive=True)) - others
    assert not [c for c in left if c.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("fake", ["ncu"], indirect=True)
def test_without_permission_for_counters_there_is_advice(
    fake: Fake, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NSIGHT", "permission")
    reason = failure(fake, case).reason
    assert "ERR_NVGPUCTRPERM" in reason and "NVreg_RestrictProfilingToAdminUsers=0" in reason
    assert "--cap-add=SYS_ADMIN" in reason


def test_an_export_that_is_cut_off_keeps_the_report(fake: Fake, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NSIGHT", "truncated")
    failed = failure(fake, case)
    assert failed.status == ERROR and "cut off or damaged" in failed.reason and "is kept" in failed.reason


def test_a_traced_process_that_dies_is_a_crash(fake: Fake, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NSIGHT", "no-target")
    failed = failure(fake, case)
    assert failed.status == CRASHED and failed.reason.startswith("the traced process ended before its calls did")


def test_a_case_that_is_refused_says_why_not_the_tool(fake: Fake, case: Case) -> None:
    unknown = Case.from_json(case.to_json() | {"implementation": "nobody's"})
    failed = failure(fake, unknown)
    assert failed.status == "unavailable" and "nobody's" in failed.reason
    assert not list(fake.traces.iterdir()), "no trace of nothing"


def test_tools_are_found_by_option_path_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(*parts: str) -> str:
        path = tmp_path.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return str(path)

    old, new = program("nsight", "2023.4", "nsys"), program("nsight", "2024.10", "nsys")
    on_path = program("bin", "nsys")
    monkeypatch.setitem(tools.FOLDERS, "nsys", (str(tmp_path / "nsight" / "*" / "nsys"),))
    assert tools.find("nsys", path=str(tmp_path / "bin")) == on_path
    assert tools.find("nsys", path="") == new, "the newest of several"
    assert tools.find("nsys", old, path="") == old
    with pytest.raises(UsageError, match=r"^--nsys .*/none: no such program$"):
        tools.find("nsys", str(tmp_path / "none"))
    monkeypatch.setitem(tools.FOLDERS, "ncu", ())
    with pytest.raises(UsageError, match=r"^Nsight Compute \(ncu\) is not installed, .*nsight-compute.*--ncu PATH$"):
        tools.find("ncu", path="")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("==ERROR== Profiling failed because a driver resource was unavailable. Ensure ...", "dcgmi profile --pause"),
        ("==ERROR== Failed to find metric dram__bytes_read.sum", "choose others with --metrics"),
        ("==ERROR== Profiling is not supported on this device", "needs Volta or newer"),
        ("CUDA driver version is insufficient for CUDA runtime version", "update the driver"),
        ("write failed: No space left on device", "no space left on the disk"),
        ("ncu: /lib/libc.so.6: version `GLIBC_2.34' not found", "use an older one"),
        ("==WARNING== No kernels were profiled.", "no CUDA kernel ran in the measured calls"),
    ],
)
def test_usual_failures_become_advice(text: str, said: str) -> None:
    reason = tools.Outcome(1, f"banner\n{text}\n").problem("ncu", 1)
    assert said in reason and "\n" not in reason


def test_an_unknown_failure_is_quoted() -> None:
    assert tools.Outcome(7, "\x1b[31mthe widget broke\n").problem("nsys", 1) == (
        "Nsight Systems (nsys) ended itself with exit code 7: [31mthe widget broke"
    )
    assert tools.Outcome(0, "all fine").problem("nsys", 1) == ""
    assert tools.run(["/nonexistent/nsys", "profile"], 5).problem("nsys", 5).startswith("Nsight Systems (nsys) ended")


@pytest.mark.parametrize(
    "text", ["", "==ERROR== no", '"ID","Kernel Name"\n', '"ID","Kernel Name"\n"",""\n==PROF== x\n']
)
def test_a_table_without_kernels_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"ncu gave no table of kernels|ncu holds no profiled kernel"):
        ncu.parse_csv(text, "ncu")


def test_missing_metrics_are_not_zero() -> None:
    found = ncu.summarise(
        [ncu.Kernel("k", {ncu.TIME: 1e-6}), ncu.Kernel("k", {ncu.TIME: 1e-6, ncu.READ: 5.0})], "key", 1
    )
    assert found.measured_bytes is None and "bytes" not in found.kernels[0]
    assert "cannot be compared" in found.notes[0] and found.kernels[0]["metrics"] == {}


def test_a_report_is_read_by_nvidias_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interface, on stand-ins: a context of ranges of actions, each with metrics that may have no value."""

    def metric(value: Any, unit: str) -> SimpleNamespace:
        return SimpleNamespace(value=lambda: value, unit=lambda: unit, has_value=lambda: value is not None)

    metrics = {ncu.TIME: metric(2.0, "us"), ncu.READ: metric(3, "Kbyte"), ncu.WRITTEN: metric(500, "byte"),
               "launch__name": metric("text", ""), "empty": metric(None, "")}  # fmt: skip
    action = SimpleNamespace(
        NameBase_DEMANGLED=1, name=lambda base: "k(int)", metric_names=lambda: list(metrics), metric_by_name=metrics.get
    )
    one_range = SimpleNamespace(num_actions=lambda: 1, action_by_idx=lambda i: action)
    context = SimpleNamespace(num_ranges=lambda: 1, range_by_idx=lambda i: one_range)
    monkeypatch.setitem(sys.modules, "ncu_report", SimpleNamespace(load_report=lambda path: context))
    (kernel,) = ncu.read_report(tmp_path / "a.ncu-rep")
    assert kernel == ncu.Kernel("k(int)", {ncu.TIME: pytest.approx(2e-6), ncu.READ: 3000.0, ncu.WRITTEN: 500.0})


@pytest.mark.skipif(not ncu.package(), reason="the package ncu-report (extra nsight) is not installed")
def test_nvidias_package_refuses_bad_reports_in_one_line(tmp_path: Path) -> None:
    for name, content in {"text": b"hello", "empty": b""}.items():
        (tmp_path / f"{name}.ncu-rep").write_bytes(content)
        with pytest.raises(UsageError, match=rf"{name}\.ncu-rep holds no profiled kernel"):
            ncu.read_report(tmp_path / f"{name}.ncu-rep")
    with pytest.raises(UsageError, match=r"cannot read .*absent\.ncu-rep"):
        ncu.read_report(tmp_path / "absent.ncu-rep")

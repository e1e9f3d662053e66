"""Finds Nsight Systems and Nsight Compute, runs them, and says in one line what went wrong. Torch-free."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from spikemark.harness.errors import UsageError
from spikemark.harness.process import describe_exit, telling_line

NAMES = {"nsys": "Nsight Systems", "ncu": "Nsight Compute"}
FOLDERS = {
    "nsys": (
        "/opt/nvidia/nsight-systems/*/bin/nsys",
        "/opt/nvidia/nsight-systems/*/target-linux-*/nsys",
        "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
        "/usr/local/cuda*/bin/nsys",
        "/opt/nvidia/hpc_sdk/*/*/profilers/Nsight_Systems/bin/nsys",
    ),
    "ncu": (
        "/opt/nvidia/nsight-compute/*/ncu",
        "/usr/local/cuda*/bin/ncu",
        "/usr/local/cuda*/nsight-compute-*/ncu",
        "/opt/nvidia/hpc_sdk/*/*/profilers/Nsight_Compute/ncu",
    ),
}
INSTALL = {
    "nsys": "install the package nsight-systems-cli or nsight-systems (or the CUDA toolkit)",
    "ncu": "install the package nsight-compute (or the CUDA toolkit)",
}
PERMISSION = (
    "the driver lets only administrators read performance counters (ERR_NVGPUCTRPERM): as root put `options nvidia "
    "NVreg_RestrictProfilingToAdminUsers=0` into /etc/modprobe.d/nvidia-profiling.conf and reboot, or start the "
    "container with --cap-add=SYS_ADMIN; without that, --tool nsys and --tool torch still work"
)
ADVICE = (
    (r"ERR_NVGPUCTRPERM", PERMISSION),
    (
        r"driver resource was unavailable|MULTIPLE_SUBSCRIBERS|another (?:profiler|instance of)|being profiled already",
        "another profiler has the GPU's counters: stop it (data-center monitoring: `dcgmi profile --pause`)",
    ),
    (
        r"Failed to find metric\S* .*|metric\S* .* (?:is|are) not (?:available|supported).*",
        "this GPU or version of ncu does not know a metric: choose others with --metrics",
    ),
    (r"Profiling is not supported on (?:this )?device.*", "this GPU is too old for ncu (it needs Volta or newer)"),
    (
        r"(?:insufficient|incompatible|unsupported)[^\n]*driver|driver version is insufficient|InsufficientDriver",
        "the NVIDIA driver is too old for this version of the tool: update the driver, or use an older tool",
    ),
    (r"unrecogni[sz]ed option.*|unknown option.*", "this version of the tool does not know an option that is needed"),
    (r"No space left on device", "no space left on the disk: choose another --out, or fewer --calls"),
    (r"No kernels were profiled", "no CUDA kernel ran in the measured calls"),
    (r"GLIBC_[\d.]+' not found", "this version of the tool is too new for the system's C library: use an older one"),
    (r"perf_event_paranoid", "sampling is not allowed here, but it is not needed: the trace may still be whole"),
)


def find(tool: str, given: str | None = None, path: str | None = None) -> str:
    """The program of ``tool`` (nsys or ncu): as given, on PATH, or in the usual install folders, newest first.

    ``path`` replaces PATH. Raises ``UsageError``, one line, that says what to install.
    """
    if given is not None:
        found = shutil.which(given, path=path)
        if found is None:
            raise UsageError(f"--{tool} {given}: no such program")
        return found
    found = shutil.which(tool, path=path)
    if found is None:
        there = [p for pattern in FOLDERS[tool] for p in glob.glob(pattern) if os.access(p, os.X_OK)]  # noqa: PTH207
        found = max(there, key=_version, default=None)
    if found is None:
        where = "it is neither on PATH nor in the usual install folders"
        raise UsageError(f"{NAMES[tool]} ({tool}) is not installed, {where}: {INSTALL[tool]}, or give --{tool} PATH")
    return found


def _version(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path)]


@dataclass(frozen=True)
class Outcome:
    """How a tool ended. ``code`` is None if it was stopped for taking too long; ``text`` is all it printed."""

    code: int | None
    text: str

    def problem(self, tool: str, limit_s: float) -> str:
        """One line on what went wrong and what to do; '' if nothing did."""
        name = f"{NAMES[tool]} ({tool})"
        if self.code is None:
            return (
                f"{name} took longer than {limit_s:g} s and was stopped: choose a longer --time-limit or fewer --calls"
            )
        advice = self.advice()
        if self.code == 0:
            return advice if "ERR_NVGPUCTRPERM" in self.text else ""
        if advice:
            return advice
        words = telling_line(self.text)
        return f"{name} {describe_exit(self.code)}" + (f": {words}" if words else "")

    def advice(self) -> str:
        """What is known about a message in the output, and the message; or ''."""
        for pattern, text in ADVICE:
            found = re.search(pattern, self.text, re.IGNORECASE)
            if found:
                said = " ".join(found[0].split())
                return text if said in text else f"{text} ({said[:200]})"
        return ""


def run(command: Sequence[str], limit_s: float) -> Outcome:
    """Run a tool to its end, or stop it and all it started after ``limit_s``; what it prints is shown and returned."""
    with tempfile.TemporaryFile() as out:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        except OSError as error:
            return Outcome(127, f"cannot start {command[0]}: {error.strerror or error}")
        code: int | None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            _stop(process)
        out.seek(0)
        text = out.read().decode("utf-8", "replace")
    print("$ " + shlex.join(Path(word).name if word.startswith("/") else word for word in command))
    print(text, end="", flush=True)
    return Outcome(code, text)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Kill a tool and everything below it: Nsight's daemons leave its process group."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()
    process.wait()


def target_command(plan: str | os.PathLike[str]) -> list[str]:
    """The process that a tool traces: one case, as its plan says (see ``target``)."""
    return [sys.executable, "-m", "spikemark.harness.trace.target", os.fspath(plan)]

"""What a GPU says of itself: name, driver, clocks, power, temperature, why its clock is held back, who else uses it.

Torch-free. Read through NVML where ``pynvml`` (package nvidia-ml-py) is installed, else through ``nvidia-smi``, else
nothing is known and every reading is None. A device is named by its UUID, never by its index: NVML and nvidia-smi count
physical devices whatever CUDA_VISIBLE_DEVICES says. Only a hash of the UUID is recorded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from typing import Any

# Bits of nvmlDeviceGetCurrentClocksEventReasons (NVML reference, "nvmlClocksEventReasons"); 1 is "idle", no hold-back.
CLOCK_REASONS = {
    0x002: "application-clocks",
    0x004: "power-cap",
    0x008: "hardware-slowdown",
    0x010: "sync-boost",
    0x020: "software-thermal",
    0x040: "hardware-thermal",
    0x080: "power-brake",
    0x100: "display-clock",
}
THROTTLED = frozenset(CLOCK_REASONS.values()) - {"application-clocks", "display-clock"}
"""Reasons that make a time untrustworthy. A clock the user has fixed is a setting, recorded but no throttling."""

_SMI_FIELDS = {
    "name": "name",
    "driver": "driver_version",
    "memory_bytes": "memory.total",
    "sm_clock_mhz": "clocks.sm",
    "max_sm_clock_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
    "throttle": "clocks_throttle_reasons.active",
}


def uuid_hash(uuid: str) -> str:
    """Twelve hex digits that tell one device from another and nobody which one it is."""
    return hashlib.sha256(uuid.removeprefix("GPU-").lower().encode()).hexdigest()[:12]


def throttle_names(mask: int) -> list[str]:
    """Names of the bits of an NVML clocks-event mask, idle left out; unknown bits as ``bit 0x...``."""
    bits = [1 << i for i in range(1, 64) if mask >> i & 1]
    return [CLOCK_REASONS.get(bit, f"bit {bit:#x}") for bit in bits]


class Gpu:
    """One GPU, found by its UUID (with or without the prefix ``GPU-``). ``state()`` is cheap enough for every case."""

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self.uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._nvml = nvml if nvml is not None else _load_nvml()
        self._handle: Any = None
        if self._nvml is not None:
            try:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self.uuid)
            except self._nvml.NVMLError:
                self._nvml = None

    @property
    def source(self) -> str:
        """Where readings come from: ``nvml``, ``nvidia-smi`` or ``none``."""
        if self._nvml is not None:
            return "nvml"
        return "nvidia-smi" if shutil.which("nvidia-smi") else "none"

    def _ask(self, function: str, *arguments: Any) -> Any:
        """An NVML reading, or None where this device or driver does not give it."""
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def state(self) -> dict[str, Any]:
        """Clocks (MHz), temperature (degrees C), power (W), ``throttle`` (names) now; values unknown here are None."""
        if self._nvml is not None:
            n = self._nvml
            mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
            if mask is None:  # drivers before R535 know it by its former name
                mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
            return {
                "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", n.NVML_CLOCK_SM),
                "memory_clock_mhz": self._ask("nvmlDeviceGetClockInfo", n.NVML_CLOCK_MEM),
                "temperature_c": self._ask("nvmlDeviceGetTemperature", n.NVML_TEMPERATURE_GPU),
                "power_w": _scaled(self._ask("nvmlDeviceGetPowerUsage"), 1e-3),
                "throttle": None if mask is None else throttle_names(mask),
            }
        reading = self._smi()
        names = ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "throttle")
        return {name: reading.get(name) for name in names}

    def describe(self) -> dict[str, Any]:
        """What does not change while measuring, with the present ``state``; values unknown here are None."""
        out: dict[str, Any] = {"uuid_hash": uuid_hash(self.uuid), "source": self.source}
        if self._nvml is None:
            reading = self._smi()
            names = ("name", "driver", "memory_bytes", "max_sm_clock_mhz", "power_limit_w")
            out |= {name: reading.get(name) for name in names}
            return out | {"other_processes": self._smi_others(), "state": {k: reading.get(k) for k in self.state()}}
        n = self._nvml
        try:
            driver = n.nvmlSystemGetDriverVersion()
        except n.NVMLError:
            driver = None
        memory, ecc = self._ask("nvmlDeviceGetMemoryInfo"), self._ask("nvmlDeviceGetEccMode")
        return out | {
            "name": _text(self._ask("nvmlDeviceGetName")),
            "driver": _text(driver),
            "memory_bytes": getattr(memory, "total", None),
            "max_sm_clock_mhz": self._ask("nvmlDeviceGetMaxClockInfo", n.NVML_CLOCK_SM),
            "application_sm_clock_mhz": self._ask("nvmlDeviceGetApplicationsClock", n.NVML_CLOCK_SM),
            "power_limit_w": _scaled(self._ask("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
            "ecc": None if ecc is None else bool(ecc[0]),
            "other_processes": self.other_processes(),
            "state": self.state(),
        }

    def other_processes(self) -> int | None:
        """How many other processes compute on the device now; None where the driver does not tell."""
        if self._nvml is None:
            return self._smi_others()
        found = self._ask("nvmlDeviceGetComputeRunningProcesses")
        return None if found is None else sum(p.pid != os.getpid() for p in found)

    def bus(self) -> str | None:
        """The PCI address, such as ``00000000:3B:00.0``; None where the driver does not tell."""
        if self._nvml is not None:
            return _text(getattr(self._ask("nvmlDeviceGetPciInfo"), "busId", None))
        return (_nvidia_smi(f"--id={self.uuid}", "--query-gpu=pci.bus_id") or "").strip() or None

    def _smi(self) -> dict[str, Any]:
        text = _nvidia_smi(f"--id={self.uuid}", f"--query-gpu={','.join(_SMI_FIELDS.values())}")
        return parse_smi(text) if text else {}

    def _smi_others(self) -> int | None:
        text = _nvidia_smi(f"--id={self.uuid}", "--query-compute-apps=pid")
        return None if text is None else sum(p.strip() not in ("", str(os.getpid())) for p in text.splitlines())


# NVML's error codes (nvml.h) that say that a device is gone, and not that it does not tell.
_GONE = {6: "is no longer there", 15: "has fallen off the bus", 16: "needs a reset"}


def lost(uuid: str, nvml: Any = None) -> str:
    """Why the GPU no longer answers: ``has fallen off the bus``; empty if it does, or if nobody can say."""
    n = nvml if nvml is not None else _load_nvml()
    if n is not None:
        try:
            n.nvmlDeviceGetTemperature(n.nvmlDeviceGetHandleByUUID(uuid), n.NVML_TEMPERATURE_GPU)
        except n.NVMLError as error:
            return _GONE.get(getattr(error, "value", 0), "")
        return ""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, f"--id={uuid}", "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True, text=True, errors="replace", timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    text = f"{done.stdout} {done.stderr}".lower()
    if "is lost" in text or "fallen off the bus" in text:
        return _GONE[15]
    return _GONE[6] if "no devices were found" in text else ""


def parse_smi(text: str) -> dict[str, Any]:
    """One line of ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``; ``[N/A]`` becomes None."""
    cells = [cell.strip() for cell in text.strip().splitlines()[0].split(",")]
    if len(cells) != len(_SMI_FIELDS):
        return {}
    reading: dict[str, Any] = {}
    for name, cell in zip(_SMI_FIELDS, cells, strict=True):
        if cell.startswith("[") or cell.lower() in ("n/a", "not active", ""):
            reading[name] = None
        elif name in ("name", "driver"):
            reading[name] = cell
        elif name == "throttle":
            reading[name] = throttle_names(int(cell, 16))
        else:
            value = float(cell)
            reading[name] = int(value * 2**20) if name == "memory_bytes" else value
    return reading


def _nvidia_smi(*arguments: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _load_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _text(value: Any) -> str | None:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _scaled(value: Any, factor: float) -> float | None:
    return None if value is None else value * factor

"""Which GPUs this machine has, which CPUs lie near them, and what may be measured at the same time.

Torch-free. CUDA's order of devices is not NVML's, so a short child process with torch says which UUID is ``cuda:I``
(``python -m spikemark.harness.devices``); the runner itself never touches CUDA. A measuring process sees its GPU alone
(``CUDA_VISIBLE_DEVICES`` is the UUID), where it is the first: ``cuda_index`` is the one place that knows.

Different GPUs are measured side by side, as many as the CPU can feed. All of ``cpu``, ``cpu:1``, ... are one device:
they follow one another, with no GPU beside them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spikemark.harness import gpu
from spikemark.harness.errors import UsageError

PINNED = "SPIKEMARK_DEVICE"
"""Environment variable of a measuring process that sees one GPU only: that GPU's name in results, ``cuda:I``."""
CORES_PER_GPU = 2
"""Cores that a measured GPU needs: one launches its kernels, the other has everything else."""
PROBE_LIMIT_S = 120.0


@dataclass(frozen=True)
class Pin:
    """How a measuring process is tied to one GPU.

    ``uuid`` is what ``CUDA_VISIBLE_DEVICES`` takes, ``hash`` what results call the device, ``cpus`` the CPUs of its
    NUMA node (empty where the system does not tell).
    """

    uuid: str
    hash: str
    cpus: frozenset[int] = frozenset()

    def environment(self, device: str) -> dict[str, str]:
        """Variables of a process that measures on this GPU, called ``device`` in results."""
        return {"CUDA_VISIBLE_DEVICES": self.uuid, PINNED: device}


def cuda_index(device: str) -> int:
    """Index of ``cuda`` or ``cuda:I`` in this process. ``ValueError`` in a process that sees another GPU only."""
    index, mine = int(device.partition(":")[2] or 0), os.environ.get(PINNED)
    if mine is None:
        return index
    if mine != f"cuda:{index}":
        raise ValueError(f"device {device!r}: this process sees {mine} only")
    return 0


class Machine:
    """The devices of a run. ``pins`` maps ``cuda:I`` to its GPU; ``usable`` are the CPUs this process may use."""

    def __init__(
        self,
        pins: Mapping[str, Pin] | None = None,
        usable: frozenset[int] | None = None,
        cores: Callable[[frozenset[int]], int] | None = None,
    ) -> None:
        self.pins = dict(pins or {})
        self.usable = usable_cpus() if usable is None else usable
        self._cores = cores or count_cores

    def near(self, device: str) -> frozenset[int]:
        """Usable CPUs near a device; all usable ones where that is not known."""
        pin = self.pins.get(device)
        return (pin.cpus & self.usable if pin else frozenset()) or self.usable

    def affinity(self, device: str) -> str:
        """CPUs that a process of this device is kept on, as a list for the kernel; empty: as the runner itself."""
        near = self.near(device)
        return "" if near == self.usable else ",".join(map(str, sorted(near)))

    def waves(self, devices: Sequence[str]) -> list[list[str]]:
        """``devices`` in their order, those together that may be measured side by side."""
        gpus = [device for device in devices if device in self.pins]
        return [gpus if d in self.pins else [d] for d in devices if d not in self.pins or d == gpus[0]]

    def fits(self, device: str, running: Collection[str]) -> bool:
        """Whether the CPU, and the part of it near ``device``, can feed it beside those ``running``."""
        if not running:
            return True
        for cpus in {self.usable, self.near(device)}:
            beside = sum(bool(self.near(other) & cpus) for other in running)
            if (beside + 1) * CORES_PER_GPU > self._cores(cpus):
                return False
        return True

    def lost(self, device: str) -> str:
        """Why a GPU is no longer there, in one line; empty if it is, or if nobody can say."""
        pin = self.pins.get(device)
        why = gpu.lost(pin.uuid) if pin else ""
        return f"the GPU {device} {why}" if why else ""


def side_by_side(
    order: Sequence[str], start: Callable[[str], Generator[None]], fits: Callable[[str, Collection[str]], bool]
) -> None:
    """Run ``start(name)`` of each name to its end, as many at once as fit, taking turns at every yield.

    What one raises ends the others too: their generators are closed.
    """
    waiting, running = list(order), dict[str, Generator[None]]()
    try:
        while waiting or running:
            while waiting and fits(waiting[0], running):
                running[waiting[0]] = start(waiting[0])
                del waiting[0]
            for name, work in list(running.items()):
                try:
                    next(work)
                except StopIteration:
                    del running[name]
    finally:
        for work in running.values():
            work.close()


def here(devices: Sequence[str]) -> Machine:
    """This machine; which GPU is which is asked only if ``devices`` names one. ``UsageError`` if torch cannot say."""
    if not any(device.startswith("cuda") for device in devices):
        return Machine()
    command = [sys.executable, "-m", "spikemark.harness.devices"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PROBE_LIMIT_S, check=False
        )
        found = [(str(one["uuid"]), one["bus"]) for one in json.loads(done.stdout.strip().splitlines()[-1])]
    except subprocess.TimeoutExpired:
        raise UsageError(f"torch does not say within {PROBE_LIMIT_S:g} s which GPUs are here") from None
    except (OSError, ValueError, LookupError, TypeError):
        raise UsageError("torch cannot say which GPUs are here: try `spikemark env --device cuda`") from None
    return Machine({f"cuda:{i}": _pin(uuid, bus, i) for i, (uuid, bus) in enumerate(found)})


def _pin(uuid: str, bus: str | None, index: int) -> Pin:
    """A slice of a GPU (MIG) is named by the entry that made it visible, since torch tells no prefix."""
    entries = [e.strip() for e in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    slice_ = entries[index] if index < len(entries) and entries[index].startswith("MIG-") else None
    cpus = local_cpus(bus) if bus else frozenset[int]()
    return Pin(slice_ or (uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"), gpu.uuid_hash(uuid), cpus)


def local_cpus(bus: str, root: Path = Path("/sys/bus/pci/devices")) -> frozenset[int]:
    """CPUs of the NUMA node of the PCI device ``bus`` (``0000:3b:00.0``, or with NVML's longer domain)."""
    found = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])", bus.lower())
    try:
        text = (root / f"{found[1][-4:]}:{found[2]}" / "local_cpulist").read_text("ascii") if found else ""
        return parse_cpus(text)
    except (OSError, ValueError):
        return frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """The kernel's list of CPUs, ``0-3,8``, as numbers. ``ValueError`` for anything else."""
    parts = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(n for first, _, last in parts for n in range(int(first), int(last or first) + 1))


def usable_cpus() -> frozenset[int]:
    """CPUs this process may be scheduled on, which a container or a batch system may have narrowed."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def count_cores(cpus: frozenset[int], root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Cores that ``cpus`` lie on: two threads of one core are one; a CPU that does not tell is a core."""
    cores = set()
    for number in cpus:
        try:
            cores.add((root / f"cpu{number}" / "topology" / "thread_siblings_list").read_text("ascii").strip())
        except OSError:
            cores.add(str(number))
    return len(cores)


def main() -> None:
    """The child process: UUID and PCI bus of each GPU that torch sees, in torch's order, as one line of JSON."""
    import torch

    found: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        numbers = [int(getattr(properties, f"pci_{part}_id", -1)) for part in ("domain", "bus", "device")]
        told = "{:04x}:{:02x}:{:02x}.0".format(*numbers) if min(numbers) >= 0 else None
        found.append({"uuid": str(properties.uuid), "bus": told or gpu.Gpu(str(properties.uuid)).bus()})
    print(json.dumps(found))


if __name__ == "__main__":
    main()

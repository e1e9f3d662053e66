"""``DeviceClock``: a clock that advances only while the kernel under test runs. Caches, cold and warm.

pytest-benchmark is given this clock as its ``timer``, so its rounds are kernel times: preparing a call, flushing
caches and dropping results happen between rounds and cost nothing.

What the figures mean. On a CPU the kernel runs on the host, so device time and call time are one figure: from just
before the Python call until it returns, dispatch by torch and the interpreter included (about 0.1 µs of it is the
clock's own two readings and the call between them; nothing is subtracted). On CUDA device time lies between two
events on torch's current stream, with the queue held back by a spinning kernel so that slow launches do not
count (a call that synchronises inside cannot be hidden this way); call time is the host's, from an idle device to
completion.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from spikemark.harness.devices import cuda_index

# Bound once, before any kernel runs: a kernel that replaces time.perf_counter* cannot reach these.
now_ns = time.perf_counter_ns
MIN_FLUSH, MAX_FLUSH = 8 << 20, 512 << 20
FLUSH_FACTOR = 1.5
"""A flush streams over this many times the last-level cache: replacement is not exactly least recently used."""
MAX_SPIN_S = 0.005


class DeviceClock:
    """Seconds that kernels ran on ``device`` (``cpu``, ``cpu:N``, ``cuda:I``); calling it reads it.

    It advances in ``with clock.running():`` and in ``clock.run(call, argument)``, which also returns the call's
    result. ``last_s`` is what the last of either added.
    """

    __name__ = "DeviceClock"  # pytest-benchmark shows and stores a timer's name

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch_device(device)
        self.cuda = self.device.type == "cuda"
        self.last_s = 0.0
        self.spin_s = 0.0
        self._total_ns = 0
        self._started_ns = 0
        if self.cuda:
            self._begin, self._finish = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self) -> float:
        """Seconds so far."""
        return self._total_ns * 1e-9

    def running(self) -> DeviceClock:
        """A context manager: the clock advances inside it."""
        return self

    def __enter__(self) -> DeviceClock:
        if self.cuda:
            stream = torch.cuda.current_stream(self.device)
            if self.spin_s:
                with torch.cuda.device(self.device):
                    torch.cuda._sleep(int(min(self.spin_s, MAX_SPIN_S) * _cycles_per_second(self.device)))
            self._begin.record(stream)
        else:
            self._started_ns = now_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.cuda:
            self._finish.record(torch.cuda.current_stream(self.device))
            self._finish.synchronize()
            self._add(round(self._begin.elapsed_time(self._finish) * 1e6))
        else:
            self._add(now_ns() - self._started_ns)

    def run(self, call: Callable[[Any], Any], argument: Any) -> Any:
        """``call(argument)`` with the clock running; the result."""
        if self.cuda:
            with self:
                return call(argument)
        start = now_ns()
        result = call(argument)
        end = now_ns()
        self._add(end - start)
        return result

    def call_time(self, call: Callable[[Any], Any], argument: Any) -> tuple[Any, float]:
        """``(result, seconds)`` on the host from an idle device to completion. Does not advance the clock."""
        self.synchronize()
        start = now_ns()
        result = call(argument)
        self.synchronize()
        return result, (now_ns() - start) * 1e-9

    def _add(self, ns: int) -> None:
        self._total_ns += ns
        self.last_s = ns * 1e-9

    def synchronize(self) -> None:
        """Wait until the device is idle (nothing to do on a CPU)."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def flush(self) -> None:
        """Push everything out of the caches by reading a buffer larger than them.

        Reading, not writing: lines left dirty would be written back during the next sample, at its cost.
        """
        buffer, out = _flush_buffer(self.device)
        torch.sum(buffer, dim=0, out=out)

    def describe(self) -> dict[str, Any]:
        """What was used to measure: JSON-able."""
        resolution = 500e-9 if self.cuda else time.get_clock_info("perf_counter").resolution
        return {
            "kind": "cuda-events" if self.cuda else "perf_counter_ns",
            "resolution_s": resolution,
            "cache_bytes": cache_bytes(self.device),
            "flush_bytes": flush_bytes(self.device),
        }


def clock_for(device: str) -> DeviceClock:
    """The clock of ``device``, or a CPU's where there is no such device: the gate then refuses the case."""
    return DeviceClock(device if torch_device(device).type != "cuda" or torch.cuda.is_available() else "cpu")


def torch_device(device: str) -> torch.device:
    """``cpu:4`` (four threads) is torch's ``cpu``; ``cuda`` is ``cuda:0``; a pinned process's own GPU is its first."""
    kind = device.partition(":")[0]
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, cuda_index(device))


def thread_count(device: str) -> int | None:
    """Threads that ``cpu:N`` asks for; None for other devices. ValueError for ``cpu:0`` and non-numbers."""
    kind, _, count = device.partition(":")
    if kind != "cpu" or not count:
        return None
    if not count.isdigit() or int(count) < 1:
        raise ValueError(f"device {device!r}: the number of threads must be a positive integer")
    return int(count)


@functools.cache
def cache_bytes(device: torch.device) -> int:
    """Bytes of the device's largest cache: all last-level caches of a CPU together, the L2 of a GPU.

    0 if the machine does not say (a flush then uses its smallest buffer).
    """
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    return _host_cache_bytes(Path("/sys/devices/system/cpu"))


def _host_cache_bytes(root: Path) -> int:
    """Sum of the distinct last-level caches of the CPUs under ``root`` (sysfs) that this process may use."""
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return 0
    found: dict[tuple[int, str], int] = {}
    for cpu in sorted(usable):
        for index in root.glob(f"cpu{cpu}/cache/index*"):
            try:
                level = int((index / "level").read_text())
                size = (index / "size").read_text().strip()
                shared = (index / "shared_cpu_list").read_text().strip()
            except (OSError, ValueError):
                continue
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 1)
            digits = size.rstrip("KMG")
            found[(level, shared)] = (int(digits) if digits.isdigit() else 0) * unit
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last)


def flush_bytes(device: torch.device) -> int:
    """Size of the buffer that a flush reads: one and a half times the caches, between 8 and 512 MiB."""
    return min(max(int(FLUSH_FACTOR * cache_bytes(device)), MIN_FLUSH), MAX_FLUSH) // 4 * 4


@functools.cache
def _flush_buffer(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The buffer and where its sum goes, one pair a device for the life of the process."""
    buffer = torch.ones(flush_bytes(device) // 4, dtype=torch.float32, device=device)
    return buffer, torch.empty((), dtype=torch.float32, device=device)


@functools.cache
def _cycles_per_second(device: torch.device) -> float:
    """Rate of ``torch.cuda._sleep``'s counter, measured once."""
    begin, finish = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 2_000_000
    with torch.cuda.device(device):
        torch.cuda._sleep(1000)
        begin.record()
        torch.cuda._sleep(cycles)
        finish.record()
        finish.synchronize()
    seconds = begin.elapsed_time(finish) * 1e-3
    return cycles / seconds if seconds > 0 and math.isfinite(seconds) else 1e9

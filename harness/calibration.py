"""What the device can do right now: copy bandwidth and a small fixed computation, by the same clock as the cases.

Measured once a worker. Bandwidth bounds what any kernel can reach; both tell the drift between passes and between runs.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from spikemark.harness.clock import DeviceClock, flush_bytes

SAMPLES = 12
COMPUTE_SIZE = 384
"""Side of the square float32 matrices whose product is the fixed computation: 113 MFLOP, fits a large cache."""


def calibrate(device: str) -> dict[str, Any]:
    """Copy a buffer larger than the caches and multiply two small matrices, ``SAMPLES`` times each.

    Returns ``copy_bytes_per_s`` (bytes read plus bytes written, a second, at the median sample), ``samples`` (s),
    ``bytes`` (read plus written a copy), ``compute_samples`` (s) and ``clock`` (how it was measured).
    """
    clock = DeviceClock(device)
    size = flush_bytes(clock.device)
    source = torch.ones(size // 4, dtype=torch.float32, device=clock.device)
    target = torch.zeros_like(source)
    samples = _time(clock, lambda _: target.copy_(source))
    a = torch.full((COMPUTE_SIZE, COMPUTE_SIZE), 0.5, device=clock.device)
    out = torch.empty_like(a)
    compute = _time(clock, lambda _: torch.mm(a, a, out=out))
    return {
        "copy_bytes_per_s": 2 * size / statistics.median(samples),
        "samples": samples,
        "bytes": 2 * size,
        "compute_samples": compute,
        "clock": clock.describe(),
    }


def _time(clock: DeviceClock, call: Any) -> list[float]:
    for _ in range(2):
        call(None)
    samples = []
    for _ in range(SAMPLES):
        clock.run(call, None)
        samples.append(clock.last_s)
    return samples

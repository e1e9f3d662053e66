"""What the device can do right now: copy bandwidth and a small fixed computation, by the same clock as the cases.

Measured once a worker. Bandwidth bounds what any kernel can reach; torch's copy and the computation tell the drift
between passes and between runs. The bound is the faster of two copies: torch's, which on a CPU reads the lines that it
is about to overwrite, may take a third longer than need be, and a kernel that stores past the caches would then seem to
be faster than memory.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from spikemark.harness.clock import DeviceClock, flush_bytes
from spikemark.kernels._build import NativeLibrary
from torch import Tensor

SAMPLES = 12
COMPUTE_SIZE = 384
"""Side of the square float32 matrices whose product is the fixed computation: 113 MFLOP, fits a large cache."""
_COPYING = NativeLibrary(Path(__file__).resolve().parent, ("copying.cpp",))
_ALIGNMENT = 64


def calibrate(device: str) -> dict[str, Any]:
    """Copy a buffer larger than the caches and multiply two small matrices, ``SAMPLES`` times each.

    Returns ``copy_bytes_per_s`` (bytes read plus bytes written, a second, at the median sample of the faster copy),
    ``samples`` (s, of torch's copy), ``streaming_samples`` (s, of a copy that stores past the caches where the
    processor can; CPUs only) or ``streaming_unavailable`` (why there is none), ``bytes`` (read plus written a copy),
    ``compute_samples`` (s) and ``clock`` (how it was measured).
    """
    clock = DeviceClock(device)
    size = flush_bytes(clock.device) // _ALIGNMENT * _ALIGNMENT
    source = torch.ones(size // 4, dtype=torch.float32, device=clock.device)
    target = torch.zeros_like(source)
    torch_samples = _time(clock, lambda _: target.copy_(source))
    fastest = statistics.median(torch_samples)
    a = torch.full((COMPUTE_SIZE, COMPUTE_SIZE), 0.5, device=clock.device)
    out = torch.empty_like(a)
    compute = _time(clock, lambda _: torch.mm(a, a, out=out))
    found: dict[str, Any] = {"samples": torch_samples}
    if not clock.cuda:  # last, so that it moves no gauge of drift
        try:
            found["streaming_samples"] = _time(clock, streaming_copy(target.zero_(), source))
            fastest = min(fastest, statistics.median(found["streaming_samples"]))
        except (RuntimeError, ValueError, OSError) as error:  # nothing can be built: BuildError, no home, no room
            found["streaming_unavailable"] = str(error)
    return found | {
        "copy_bytes_per_s": 2 * size / fastest,
        "bytes": 2 * size,
        "compute_samples": compute,
        "clock": clock.describe(),
    }


def streaming_copy(target: Tensor, source: Tensor) -> Callable[[Any], None]:
    """A call that copies ``source`` to ``target`` past the caches on torch's threads; its argument is ignored.

    Both are contiguous on the CPU, of one dtype and size. It was tried once: ``ValueError`` if it did not copy, or for
    memory that is not aligned to 64 bytes in place and size; ``BuildError`` where nothing can be built.
    """
    size = source.numel() * source.element_size()
    pointers = target.data_ptr(), source.data_ptr()
    if any(value % _ALIGNMENT for value in (size, *pointers)):
        raise ValueError(f"memory is not aligned to {_ALIGNMENT} bytes")
    function = _COPYING.load().streaming_copy
    function.restype, function.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    threads = torch.get_num_threads()

    def copy(_: Any) -> None:
        function(*pointers, size, threads)

    copy(None)
    if not torch.equal(target, source):
        raise ValueError("the streaming copy did not copy")
    return copy


def _time(clock: DeviceClock, call: Callable[[Any], Any]) -> list[float]:
    for _ in range(2):
        call(None)
    samples = []
    for _ in range(SAMPLES):
        clock.run(call, None)
        samples.append(clock.last_s)
    return samples

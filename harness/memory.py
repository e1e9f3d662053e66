"""The memory ledger of one call: baseline, peak above it, saved for backward, workspace.

CPU figures come from torch's own allocator records (torch's profiler with ``profile_memory``: one record for every
allocation and free), CUDA figures from the caching allocator's statistics. What each figure misses:

* ``peak_bytes`` (allocator): memory that a kernel takes from ``malloc`` or ``cudaMalloc`` itself, numpy's, and on a CPU
  what threads that torch does not know allocate. CUDA: blocks are rounded up to 512 bytes by the allocator.
* ``process_peak_bytes`` (peak resident set of the process during the call, less what was resident before): memory that
  was resident already and is reused, so it may be smaller; it counts code that is loaded and compiled, and pages
  touched by any other thread, so it may be larger. It is a cross-check, not a measurement.
* ``saved_bytes``: what ``BoundCall.saved`` names, autograd's saved tensors and tensors on the attributes of
  ``torch.autograd.Function`` contexts. State hidden in an implementation's own globals is seen as ``kept_bytes``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from spikemark.harness.clock import now_ns
from spikemark.kernels.definition import BoundCall
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclasses.dataclass(frozen=True)
class Peak:
    """What the allocator did: most bytes live at once above the start; blocks live at the end, by address;
    all addresses that it ever gave out."""

    peak: int
    live: dict[int, int]
    seen: frozenset[int] = frozenset()


class MemoryLedger:
    """Weighs one call: ``ledger.weigh(bound, held)`` -> dict of bytes. ``call_s`` is what that call took."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.call_s = 0.0

    def weigh(self, bound: BoundCall, held: Iterable[Tensor]) -> dict[str, int]:
        """Run ``bound`` once (after an untimed ``prepare``) and account for it; storages are counted once.

        ``held`` are the tensors the caller has anyway (the inputs). Keys, all in bytes:
        ``baseline_bytes``: the caller's tensors on a CPU (torch keeps no total there), allocated bytes on CUDA;
        ``peak_bytes``: highest total above the baseline during the call, results included;
        ``output_bytes``: new storages of the results;
        ``saved_bytes``: storages kept for backward, the caller's own not counted;
        ``saved_held_bytes``: storages kept for backward that the caller holds anyway (listed apart);
        ``saved_result_bytes``: the part of ``saved_bytes`` that is also a result handed to the caller;
        ``workspace_bytes``: peak less results and saved (0 where results reuse memory of what was saved);
        ``kept_bytes``: still allocated after the call, neither result nor saved (a cache, or a leak);
        ``unrecorded_bytes``: results that the allocator has no record of (made outside torch); they are added
        to the peak, since they are alive at the end;
        ``process_peak_bytes``: growth of the process's peak resident set, or CUDA's peak reserved bytes.
        """
        caller = _storages(held)
        prepared = bound.prepare()
        prepared_storages = _storages(_tensors_in(prepared))
        before = _resident_peak_reset()
        result, by_autograd, peak, baseline = self._call(bound, prepared)
        process_peak = self._process_peak(before)
        outputs = _storages([*bound.outputs(result).values(), *_tensors_in(result)])
        kept_for_backward = by_autograd | _storages([*bound.saved(result), *context_tensors(result)])
        known = caller | prepared_storages
        new_outputs = {p: n for p, n in outputs.items() if p not in known}
        new_saved = {p: n for p, n in kept_for_backward.items() if p not in known}
        results = new_outputs | new_saved
        unrecorded = 0 if self._cuda else sum(n for p, n in results.items() if p not in peak.seen)
        kept = sum(n for p, n in peak.live.items() if p not in results)
        if self._cuda:
            kept = max(0, kept - sum(results.values()) - 512 * len(results))
        total = max(peak.peak, sum(peak.live.values()) + unrecorded)
        return {
            "baseline_bytes": baseline if self._cuda else sum((caller | prepared_storages).values()),
            "peak_bytes": total,
            "output_bytes": sum(new_outputs.values()),
            "saved_bytes": sum(new_saved.values()),
            "saved_held_bytes": sum(n for p, n in kept_for_backward.items() if p in known),
            "saved_result_bytes": sum(n for p, n in new_saved.items() if p in new_outputs),
            "workspace_bytes": max(0, total - sum(results.values())),
            "kept_bytes": kept,
            "unrecorded_bytes": unrecorded,
            "process_peak_bytes": process_peak,
        }

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda"

    def _call(self, bound: BoundCall, prepared: Any) -> tuple[Any, dict[int, int], Peak, int]:
        """(result, storages that autograd saved, the allocator's peak, bytes allocated before)."""
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved.update(_storages([tensor]))  # addresses only: holding the tensor would raise the peak
            return tensor.detach()  # the tensor itself would make a cycle with its own node

        if self._cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            baseline = torch.cuda.memory_stats(self.device)["allocated_bytes.all.current"]
            with saved_tensors_hooks(pack, lambda t: t):
                result = self._timed(bound, prepared)
            torch.cuda.synchronize(self.device)
            stats = torch.cuda.memory_stats(self.device)
            grown = stats["allocated_bytes.all.current"] - baseline
            # Without addresses, what is live at the end is one block; results are taken off it below.
            return result, saved, Peak(stats["allocated_bytes.all.peak"] - baseline, {0: grown}), baseline
        with (
            saved_tensors_hooks(pack, lambda t: t),
            # Not torch.profiler.profile: entering that imports the compiler, for more than a second.
            torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile,
        ):
            result = self._timed(bound, prepared)
        return result, saved, replay(allocations(profile.kineto_results)), 0

    def _timed(self, bound: BoundCall, prepared: Any) -> Any:
        start = now_ns()
        result = bound.call(prepared)
        self.call_s = (now_ns() - start) * 1e-9
        return result

    def _process_peak(self, before: int) -> int:
        if self._cuda:
            return int(torch.cuda.memory_stats(self.device)["reserved_bytes.all.peak"])
        return max(0, _resident_peak() - before)


def allocations(results: Any) -> list[tuple[int, int]]:
    """``(address, bytes)`` of the CPU allocator's records in order of time; frees are negative."""
    found: list[tuple[int, int, int]] = []
    stack = list(results.experimental_event_tree())
    while stack:
        event = stack.pop()
        fields = event.extra_fields
        if hasattr(fields, "alloc_size") and fields.device.type == "cpu":
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        stack.extend(event.children)
    # Two records may share a nanosecond: an allocation then comes before a free, which can only raise the peak.
    found.sort(key=lambda e: (e[0], -e[2]))
    return [(address, size) for _, address, size in found]


def replay(records: Iterable[tuple[int, int]]) -> Peak:
    """The peak of a sequence of allocations; frees of blocks that were there before are not counted."""
    live: dict[int, int] = {}
    seen: set[int] = set()
    total = peak = 0
    for address, size in records:
        if size >= 0:
            live[address] = size
            seen.add(address)
            total += size
            peak = max(peak, total)
        else:
            total -= live.pop(address, 0)
    return Peak(peak, live, frozenset(seen))


def context_tensors(result: Any) -> list[Tensor]:
    """Tensors on attributes of the ``autograd.Function`` contexts in the graph behind ``result``."""
    nodes = [t.grad_fn for t in _tensors_in(result) if t.grad_fn is not None]
    found: list[Tensor] = []
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        found.extend(_tensors_in(getattr(node, "__dict__", {})))
        nodes.extend(n for n, _ in node.next_functions if n is not None)
    return found


def _tensors_in(value: Any, depth: int = 4) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if depth == 0:
        return []
    if isinstance(value, Mapping):
        items: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, set)):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, f.name) for f in dataclasses.fields(value)]
    else:
        return []
    return [t for item in items for t in _tensors_in(item, depth - 1)]


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of the distinct storages behind ``tensors``."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def resident() -> int:
    """Resident bytes of this process now."""
    return int(psutil.Process().memory_info().rss)


def _resident_peak_reset() -> int:
    """Reset the process's peak resident set where the system allows it; resident bytes now."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return resident()
    return _resident_peak()


def _resident_peak() -> int:
    """Peak resident bytes since the last reset (``VmHWM``); without /proc what is resident now."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resident()

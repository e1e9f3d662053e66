"""What a kernel may have changed in its process: detected, named in one line, and undone.

``GlobalState`` is taken before an implementation's calls and compared after them. Every difference is an ``error`` of
the case, except those a first call may rightly make (``notes``: warning filters, build variables of compilers).
Threads and growing memory cannot be undone: the case is an ``error`` and the process is spoilt for the cases
after it (``Leftover.spoils``), so the worker makes way for a fresh one.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

BUILD_VARIABLES = tuple(
    "TORCHINDUCTOR_ _TORCHINDUCTOR_ TRITON_ TORCH_ PYTORCH_ CUPY_ CUDA_CACHE KMP_ OMP_ MKL_".split()
)
"""Prefixes of variables that compilers set on first use; they may appear, but not change."""
WORKER_MODULES = ("torch", "concurrent.futures", "multiprocessing", "triton", "tqdm")
"""Threads whose function comes from these belong to compilers' worker pools (or an executor's) and may stay."""
CLOCKS = tuple("perf_counter perf_counter_ns time time_ns monotonic monotonic_ns process_time sleep".split())
SIGNALS = tuple(s for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP))
LEAK_BYTES = 8 << 20
LEAK_PER_CALL = 128 << 10

_threads_alive = threading.enumerate
_real_clocks = {name: getattr(time, name) for name in CLOCKS}


def _tensor_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _cuda_seed_states() -> list[bytes]:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    return [_tensor_bytes(s) for s in torch.cuda.get_rng_state_all()]


def _restore_cuda_seeds(states: list[bytes]) -> None:
    if states:
        torch.cuda.set_rng_state_all([torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in states])


def _set_clocks(clocks: dict[str, Any]) -> None:
    for name, function in clocks.items():
        setattr(time, name, function)


def _set_signals(handlers: dict[Any, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _set_streams(streams: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = streams


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return (kind, np.asarray(keys).tobytes(), *rest)


def _set_numpy_state(state: tuple[Any, ...]) -> None:
    np.random.set_state((state[0], np.frombuffer(state[1], dtype=np.uint32), *state[2:]))


@dataclass(frozen=True)
class _Watch:
    """One piece of global state: how a reason names it, how it is read and how it is put back."""

    label: str
    read: Callable[[], Any]
    restore: Callable[[Any], object]
    shown: bool = True


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])
    else:  # the public function would import the compiler, for more than a second
        torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _cudnn() -> tuple[bool, ...]:
    flags = torch.backends.cudnn
    return flags.enabled, flags.benchmark, flags.deterministic


def _set_cudnn(values: tuple[bool, ...]) -> None:
    torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = values


def _cudnn_tf32() -> bool | None:
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # newer torch refuses the old name once the new one was used
        return None


def _set_cudnn_tf32(value: bool | None) -> None:
    if value is not None:
        torch.backends.cudnn.allow_tf32 = value


def _set_cuda_device(value: int | None) -> None:
    if value is not None:
        torch.cuda.set_device(value)


WATCHES: tuple[_Watch, ...] = (
    _Watch("torch's thread count", torch.get_num_threads, torch.set_num_threads),
    _Watch("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Watch("torch's default device", torch.get_default_device, torch.set_default_device),
    _Watch("grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled),
    _Watch("autocast", lambda: torch.is_autocast_enabled("cpu"), lambda v: torch.set_autocast_enabled("cpu", v)),
    _Watch("torch's random state", lambda: _tensor_bytes(torch.get_rng_state()),
           lambda v: torch.set_rng_state(torch.frombuffer(bytearray(v), dtype=torch.uint8)), shown=False),
    _Watch("CUDA's random state", _cuda_seed_states, _restore_cuda_seeds, shown=False),
    _Watch("Python's random state", random.getstate, random.setstate, shown=False),
    _Watch("numpy's random state", _numpy_state, _set_numpy_state, shown=False),
    _Watch("the deterministic-algorithms switch", _deterministic, _set_deterministic),
    _Watch("the float32 matmul precision (TF32)", torch.get_float32_matmul_precision,
           torch.set_float32_matmul_precision),
    _Watch("cuDNN's TF32 switch", _cudnn_tf32, _set_cudnn_tf32),
    _Watch("cuDNN's switches (enabled, benchmark, deterministic)", _cudnn, _set_cudnn),
    _Watch("the current CUDA device",
           lambda: torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
           _set_cuda_device),
    _Watch("the clocks of module time", lambda: {n: getattr(time, n) for n in CLOCKS}, _set_clocks, shown=False),
    _Watch("signal handlers", lambda: {s: signal.getsignal(s) for s in SIGNALS}, _set_signals, shown=False),
    _Watch("the working directory", os.getcwd, os.chdir, shown=False),
    _Watch("environment variables", lambda: dict(os.environ), _set_environment, shown=False),
    _Watch("sys.stdout or sys.stderr", lambda: (sys.stdout, sys.stderr), _set_streams, shown=False),
    _Watch("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    _Watch("the trace function", sys.gettrace, sys.settrace, shown=False),
    _Watch("the profile function", sys.getprofile, sys.setprofile, shown=False),
    _Watch("garbage collection", gc.isenabled, lambda v: gc.enable() if v else gc.disable()),
)  # fmt: skip


class GlobalState:
    """A snapshot of what ``WATCHES`` lists; ``settle()`` says what changed since, and undoes it."""

    def __init__(self) -> None:
        self._values = [(watch, watch.read()) for watch in WATCHES]
        self._filters = list(warnings.filters)
        self.notes: list[str] = []

    def settle(self) -> str:
        """One line that names everything that changed since the snapshot, now put back; or ''."""
        changed = []
        for watch, before in self._values:
            try:
                after = watch.read()
            except OSError as error:  # a working directory that was deleted
                after = error
            if after == before:
                continue
            if watch.label == "environment variables":
                named = self._environment_changes(before, after)
                if not named:
                    continue
                changed.append(f"environment variables ({', '.join(named)})")
            elif watch.label == "the clocks of module time":
                changed.append("time." + ", time.".join(n for n in CLOCKS if after[n] is not before[n]))
            else:
                changed.append(f"{watch.label} ({before} -> {after})" if watch.shown else watch.label)
            watch.restore(before)
        if list(warnings.filters) != self._filters:
            warnings.filters[:] = self._filters  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]
            self.notes.append("changed the warning filters (undone)")
        return f"changes global state: {'; '.join(changed)}" if changed else ""

    def _environment_changes(self, before: dict[str, str], after: dict[str, str]) -> list[str]:
        names = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
        built = [n for n in names if n not in before and n.startswith(BUILD_VARIABLES)]
        for name in built:
            self.notes.append(f"set the environment variable {name}")
        # Accepted ones join the snapshot, so that restoring it later keeps them.
        before.update({n: after[n] for n in built})
        return [n for n in names if n not in built]


@dataclass
class Leftover:
    """Threads that were there before an implementation ran, to find those that it leaves behind."""

    before: set[int] = field(default_factory=lambda: {id(t) for t in _threads_alive()})

    def threads(self) -> str:
        """One line naming the Python threads that are new and still alive; or ''.

        Threads of compilers' worker pools may stay. A thread that is about to end gets 50 ms to do so.
        """
        fresh = [t for t in _threads_alive() if id(t) not in self.before and not _is_worker(t)]
        for thread in fresh:
            thread.join(0.05 / len(fresh))
        alive = [t.name for t in fresh if t.is_alive()]
        if not alive:
            return ""
        shown = ", ".join(repr(name) for name in alive[:3]) + (", ..." if len(alive) > 3 else "")
        return f"leaves {len(alive)} thread{'s' if len(alive) > 1 else ''} running after its calls: {shown}"


def _is_worker(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    module = getattr(target, "__module__", None) or type(thread).__module__
    return any(module == known or module.startswith(f"{known}.") for known in WORKER_MODULES)


def native_threads() -> int:
    """Threads of this process that the system sees, Python's and others."""
    return int(psutil.Process().num_threads())


def leak(resident: list[int], calls: list[int]) -> str:
    """One line if resident memory grew with every call; or ''.

    ``resident`` are bytes at three or more moments after warm-up and ``calls`` the calls made up to each. Between
    all moments it must have grown by 128 KiB a call, and by 8 MiB in all: less is allocator noise.
    """
    made, grown = calls[-1] - calls[0], resident[-1] - resident[0]
    rates = [
        (b - a) / max(1, n - m)
        for (a, b), (m, n) in zip(itertools.pairwise(resident), itertools.pairwise(calls), strict=True)
    ]
    if len(rates) < 2 or min(rates) < LEAK_PER_CALL or grown < LEAK_BYTES:
        return ""
    return f"leaks memory: the process grew by {grown >> 20} MiB in {made} calls, {grown / made / 2**20:.2g} MiB each"

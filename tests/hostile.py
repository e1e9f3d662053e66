"""Implementations of the neuron that do what no kernel may: a plug-in file for tests of the gate and the supervisor.

All are named ``hostile_*``, for ``srm_neuron``, and run only when named. Each is right but for its one fault, so that
a test sees that fault and no other. ``EXPECTED`` says what a worker must make of those that it can catch;
``DEADLY`` kill, hang or flood their process, which only the supervisor survives.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from spikemark.kernels import implementation
from spikemark.kernels.srm_neuron.torch_eager import TorchEager
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import SrmParams
from torch import Tensor

EXPECTED: dict[str, tuple[str, str]] = {}
"""Name -> (status, words that the reason must have) of what a worker catches."""
DEADLY: dict[str, tuple[str, ...]] = {}
"""Name -> statuses that the supervisor may give."""
HARMLESS: list[str] = []
"""Names of those that are odd but right: they must be ``ok``."""
FIRST_CALL_S = 0.3


class Right:
    """A correct neuron; ``spoil`` is called with every forward's result, ``before`` ahead of every call."""

    calls = 0

    def before(self, given: Tensor) -> None:
        """Ahead of a forward, with its current, or of a backward, with its gradient."""

    def spoil(self, state: SrmState) -> Any:
        """What a forward returns."""
        return state

    def spoil_gradients(self, gradients: tuple[Tensor, Tensor]) -> Any:
        """What a backward returns."""
        return gradients

    def forward(self, current: Tensor, params: SrmParams) -> Any:
        """As ``torch_eager``, with the fault."""
        self.calls += 1
        self.before(current)
        return self.spoil(TorchEager().forward(current, params))

    def backward(self, grad_out: Tensor, state: SrmState, params: SrmParams) -> Any:
        """As ``torch_eager``, with the fault."""
        self.calls += 1
        self.before(grad_out)
        return self.spoil_gradients(TorchEager().backward(grad_out, state, params))


def hostile(status: str, words: str) -> Any:
    """Register a class whose row must have ``status`` and a reason with ``words``."""

    def register(cls: type) -> Any:
        made = implementation("srm_neuron", default=False)(cls)
        EXPECTED[made.name] = (status, words)
        return made

    return register


def deadly(*statuses: str) -> Any:
    """Register a class that its process does not survive."""

    def register(cls: type) -> Any:
        made = implementation("srm_neuron", default=False)(cls)
        DEADLY[made.name] = statuses
        return made

    return register


def harmless(cls: type) -> Any:
    """Register a class that is right whatever it looks like."""
    made = implementation("srm_neuron", default=False)(cls)
    HARMLESS.append(made.name)
    return made


# -- wrong results -------------------------------------------------------------------------------------------------


@hostile("error", "ZeroDivisionError: no such kernel")
class HostileRaises(Right):
    """Raises."""

    def before(self, given: Tensor) -> None:
        raise ZeroDivisionError("no such kernel\nsecond line")


@hostile("error", "SystemExit")
class HostileSystemExit(Right):
    """Calls sys.exit."""

    def before(self, given: Tensor) -> None:
        sys.exit(3)


@hostile("out-of-memory", "memory")
class HostileAsksTooMuch(Right):
    """Asks torch for more memory than any machine has."""

    def before(self, given: Tensor) -> None:
        torch.empty(1 << 60)


@hostile("incorrect", "delta_u")
class HostileNan(Right):
    """Returns NaN in one element."""

    def spoil(self, state: SrmState) -> Any:
        assert state.delta_u is not None
        state.delta_u.view(-1)[0] = float("nan")
        return state


@hostile("incorrect", "shape")
class HostileShape(Right):
    """Returns the wrong shape."""

    def spoil(self, state: SrmState) -> Any:
        return SrmState(state.spikes[:, :-1].contiguous(), state.delta_u, state.delta_ut)


@hostile("incorrect", "dtype")
class HostileDtype(Right):
    """Returns the wrong dtype."""

    def spoil(self, state: SrmState) -> Any:
        return SrmState(state.spikes.double(), state.delta_u, state.delta_ut)


@hostile("incorrect", "meta device")
class HostileDevice(Right):
    """Returns a tensor on another device."""

    def spoil(self, state: SrmState) -> Any:
        return SrmState(state.spikes.to("meta"), state.delta_u, state.delta_ut)


@hostile("incorrect", "not a tensor")
class HostileNumpy(Right):
    """Returns numpy arrays."""

    def spoil(self, state: SrmState) -> Any:
        return SrmState(state.spikes.numpy(), state.delta_u, state.delta_ut)  # type: ignore[arg-type]


@hostile("incorrect", "returned a NoneType")
class HostileNone(Right):
    """Returns nothing."""

    def spoil(self, state: SrmState) -> Any:
        return None


@hostile("incorrect", "not contiguous")
class HostileStrided(Right):
    """Returns the right values with other strides."""

    def spoil(self, state: SrmState) -> Any:
        return SrmState(state.spikes.transpose(0, 1).contiguous().transpose(0, 1), state.delta_u, state.delta_ut)


@hostile("incorrect", "view of an input")
class HostileView(Right):
    """Returns a view of its input."""

    def forward(self, current: Tensor, params: SrmParams) -> Any:
        state = super().forward(current, params)
        return SrmState(state.spikes, current[:], state.delta_ut)


@hostile("incorrect", "writes to its input current")
class HostileWritesInput(Right):
    """Writes to its input through its address, so that torch does not count it."""

    def before(self, given: Tensor) -> None:
        given.numpy()[..., -1] += 1


@hostile("incorrect", "writes to its input grad_out")
class HostileWritesGradient(Right):
    """Writes to the incoming gradient after it has read it."""

    def backward(self, grad_out: Tensor, state: SrmState, params: SrmParams) -> Any:
        gradients = super().backward(grad_out, state, params)
        grad_out.mul_(0.5)
        return gradients


@hostile("incorrect", "wrong on a second")
class HostileCached(Right):
    """Returns copies of its first result for ever."""

    kept: SrmState | None = None

    def spoil(self, state: SrmState) -> Any:
        self.kept = self.kept or state
        parts = (self.kept.spikes, self.kept.delta_u, self.kept.delta_ut)
        return SrmState(*(p.clone() for p in parts if p is not None))


@hostile("incorrect", "wrong on a second after its timed calls")
class HostileCachedLater(Right):
    """Computes its first few results, and returns copies of the last of them ever after."""

    kept: SrmState | None = None

    def spoil(self, state: SrmState) -> Any:
        if self.calls <= 4:
            self.kept = state
        assert self.kept is not None
        parts = (self.kept.spikes, self.kept.delta_u, self.kept.delta_ut)
        return SrmState(*(p.clone() for p in parts if p is not None))


@hostile("incorrect", "writes to its input")
class HostileWritesInWarmUp(Right):
    """Leaves its inputs alone while it is verified, and writes to them from its third call on."""

    def before(self, given: Tensor) -> None:
        if self.calls > 2:
            given.view(-1)[0] += 1


@hostile("incorrect", "memory")
class HostileSameBuffer(Right):
    """Returns the same buffers at every call."""

    kept: SrmState | None = None

    def spoil(self, state: SrmState) -> Any:
        self.kept = self.kept or state
        for mine, new in zip(self.kept.for_backward(), state.for_backward(), strict=True):
            mine.copy_(new)
        return self.kept


@hostile("incorrect", "compute lazily")
class HostileLazyTensor(Right):
    """Returns a tensor subclass."""

    class Lazy(Tensor):
        """A tensor that might compute when it is read."""

    def spoil(self, state: SrmState) -> Any:
        return SrmState(state.spikes.as_subclass(self.Lazy), state.delta_u, state.delta_ut)


@hostile("incorrect", "returned a LazyState")
class HostileLazyState(Right):
    """Returns an object that computes when it is read."""

    class LazyState:
        """Computes on access."""

        def __init__(self, made: Any) -> None:
            self._made = made

        def __getattr__(self, name: str) -> Any:
            return getattr(self._made(), name)

    def forward(self, current: Tensor, params: SrmParams) -> Any:
        return self.LazyState(lambda: TorchEager().forward(current, params))


@hostile("incorrect", "")
class HostileLater(Right):
    """Returns at once and fills its result from a thread a little later."""

    def spoil(self, state: SrmState) -> Any:
        late = state.spikes.clone()
        state.spikes.zero_()
        threading.Timer(0.02, state.spikes.copy_, (late,)).start()
        return state


@hostile("incorrect", "")
class HostileUnwritten(Right):
    """Leaves silent places of the last step unwritten and hopes that fresh memory is zero."""

    def spoil(self, state: SrmState) -> Any:
        fresh = torch.empty_like(state.spikes)
        fresh[state.spikes != 0] = 1
        fresh[:, :-1] = state.spikes[:, :-1]
        return SrmState(fresh, state.delta_u, state.delta_ut)


@hostile("incorrect", "right when verified, wrong in")
class HostileWrongLater(Right):
    """Right for five calls, wrong in all after."""

    def spoil(self, state: SrmState) -> Any:
        if self.calls > 5:
            state.spikes.view(-1)[-1] = 1 - state.spikes.view(-1)[-1]
        return state


@hostile("incorrect", "right when verified, wrong in")
class HostileWrongOnce(Right):
    """Wrong in the eighth call only: neither verified nor last."""

    def spoil(self, state: SrmState) -> Any:
        if self.calls == 8:
            state.spikes.zero_()
        return state


@hostile("incorrect", "")
class HostileCorruptsLater(Right):
    """Right, but after ten calls it zeroes its input through its address: whoever shares the input goes wrong too."""

    def spoil(self, state: SrmState) -> Any:
        if self.calls > 10:
            self.given.numpy()[...] = 0
        return state

    def before(self, given: Tensor) -> None:
        self.given = given


# -- changes to the process ----------------------------------------------------------------------------------------


def changes(name: str, words: str, *actions: Callable[[], object]) -> None:
    """Register ``Hostile<name>``, right but for ``actions`` ahead of every call, which change the process."""

    def before(self: Right, given: Tensor) -> None:
        for action in actions:
            action()

    hostile("error", words)(type(f"Hostile{name}", (Right,), {"before": before, "__doc__": f"Changes the {words}."}))


def _slow_clock() -> None:
    start = time.perf_counter
    time.perf_counter = lambda: start() / 1000  # looks a thousand times faster
    time.perf_counter_ns = lambda: 0


changes("Threads", "thread count", lambda: torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2))
changes("DefaultDtype", "default dtype", lambda: torch.set_default_dtype(torch.float64))
changes("GradMode", "grad mode", lambda: torch._C._set_grad_enabled(False))
changes("Seed", "torch's random state", lambda: torch.manual_seed(12345))
changes("NumpySeed", "numpy's random state", np.random.random, random.random)
changes("Clock", "time.perf_counter", _slow_clock)
changes(
    "Deterministic",
    "deterministic",
    lambda: torch._C._set_deterministic_algorithms(True),  # the public function imports the compiler first
    lambda: torch.set_float32_matmul_precision("medium"),
)
changes("Signals", "signal handlers", lambda: signal.signal(signal.SIGUSR1, lambda number, frame: None))
changes("Directory", "working directory", lambda: os.chdir("/"))
changes("Environment", "HOSTILE", lambda: os.environ.update(HOSTILE="1"))


@hostile("error", "thread")
class HostileStartsThreads(Right):
    """Starts a thread in every call and leaves it running."""

    stop = threading.Event()

    def before(self, given: Tensor) -> None:
        threading.Thread(target=lambda: self.stop.wait(), name="hostile", daemon=True).start()


@hostile("error", "leaks memory")
class HostileLeaks(Right):
    """Keeps two MiB of every call."""

    kept: list[Tensor] = []  # noqa: RUF012

    def before(self, given: Tensor) -> None:
        self.kept.append(torch.ones(2 << 18))


# -- odd, but right ------------------------------------------------------------------------------------------------


@harmless
class HostileBinary(Right):
    """Prints binary to both streams."""

    def before(self, given: Tensor) -> None:
        for stream in (1, 2):
            with contextlib.suppress(OSError):
                os.write(stream, b'\xff\xfe\x00\x1b[31m{"event": "end"}\n\x80\r')


@harmless
class HostileSlowFirst(Right):
    """Takes long for its first call (compilers do)."""

    slept = False

    def before(self, given: Tensor) -> None:
        if not self.slept:
            HostileSlowFirst.slept = True
            time.sleep(FIRST_CALL_S)


@harmless
class HostileWarns(Right):
    """Warns, and changes the warning filters."""

    def before(self, given: Tensor) -> None:
        warnings.simplefilter("ignore")
        warnings.warn("hostile", stacklevel=1)


# -- deadly --------------------------------------------------------------------------------------------------------


@deadly("crashed")
class HostileSegfault(Right):
    """Reads address 0."""

    def before(self, given: Tensor) -> None:
        ctypes.string_at(0)


@deadly("crashed")
class HostileExit(Right):
    """Leaves the process without a word."""

    def before(self, given: Tensor) -> None:
        os._exit(0)


@deadly("crashed")
class HostileAbort(Right):
    """Aborts, as a failed assertion in C does."""

    def before(self, given: Tensor) -> None:
        os.abort()


@deadly("crashed", "out-of-memory")
class HostileKilled(Right):
    """Is killed, as the system does when memory runs out."""

    def before(self, given: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@deadly("timed-out")
class HostileHangs(Right):
    """Never returns."""

    def before(self, given: Tensor) -> None:
        while True:
            time.sleep(60)


@deadly("out-of-memory", "crashed")
class HostileHog(Right):
    """Takes memory, 64 MiB at a time, until it is stopped or has 64 GiB."""

    def before(self, given: Tensor) -> None:
        kept = []
        for _ in range(1024):
            kept.append(torch.ones(16 << 20))
            time.sleep(0.01)

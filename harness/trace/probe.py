"""One case, verified and warmed up, called under a tool: what all three tools trace. Imports torch.

The same steps and the same NVTX ranges as in a measuring run, so that what is found in a trace is what was timed: the
gate first, then warm-up, then ``calls`` cold calls in ranges ``profile <key>`` with the call's number as payload.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from spikemark.harness import verify
from spikemark.harness.annotate import Annotation, annotated
from spikemark.harness.clock import DeviceClock, clock_for
from spikemark.harness.records import UNAVAILABLE, Case
from spikemark.harness.trace import CALL, CAPTURE, FLUSH, profiled
from spikemark.harness.verify import Refused
from spikemark.kernels import registry
from spikemark.kernels.definition import BoundCall
from torch.profiler import record_function

WARM_UP_CALLS = 3
GATE_LIMIT = 1 << 18


class Probe:
    """A case that may be traced. Raises ``Refused`` (from the gate) or whatever the implementation raises."""

    def __init__(self, case: Case, stage: Callable[[str], None]) -> None:
        self.case = case
        try:
            implementation = registry.get(case.operator, case.implementation)
        except KeyError as error:
            raise Refused(UNAVAILABLE, str(error.args[0])) from None
        verify.admit(case, implementation)
        stage("inputs")
        self.clock: DeviceClock = clock_for(case.device)
        self.block = verify.block_for(case, GATE_LIMIT)
        rate = self.block.inputs.spike_rate
        self.cost = self.block.definition.cost(case.phase, case.problem, self.block.dtype, rate)
        self.moved_bytes: int | None = implementation.moved_bytes(case.problem, case.phase, case.dtype, rate)
        stage("first-call")
        with annotated(f"verify {case.key}", "verify"):
            self.bound: BoundCall = verify.gate(self.block, implementation, self.clock, stage).bound
        stage("warm-up")
        with annotated(f"warm-up {case.key}", "warm-up"):
            for _ in range(WARM_UP_CALLS):
                self.bound.call(self.bound.prepare())
            self.clock.flush()
            self.clock.synchronize()
        self._result: Any = None
        self._flushing = Annotation(f"flush {case.key}", "flush")
        self._calling = Annotation(profiled(case.key), "profile")

    def calls(self, count: int, capture: str = "") -> None:
        """``count`` cold calls, the device idle before and after each; ``recheck`` then compares the last result.

        What a call consumes is made before the first: nothing but flushes lies between the calls. ``capture`` is what
        tells an outside tool to begin and to stop: ``cuda`` (the profiler API), ``nvtx`` (one range ``capture`` round
        all calls), ``call`` (one round each), or nothing.
        """
        prepared = [self.bound.prepare() for _ in range(count)]
        self.clock.synchronize()
        outer = {"cuda": _profiler_api(), "nvtx": annotated(CAPTURE, "profile")}
        inner = Annotation(CAPTURE, "profile") if capture == "call" else None
        collecting = outer.get(capture, contextlib.nullcontext())
        with annotated(self.case.key, "case"), record_function(self.case.key), collecting:
            for number in range(count):
                self._result = None
                token = self._flushing.start()
                with record_function(FLUSH):
                    self.clock.flush()
                    self.clock.synchronize()
                self._flushing.end(token)
                self._result = self._call(prepared, number, inner)

    def recheck(self) -> None:
        """Compare the result of the last traced call in full. Raises ``Refused``."""
        verify.recheck(self.block, self.bound, self._result, "a traced call")

    def _call(self, prepared: list[Any], number: int, inner: Annotation | None) -> Any:
        argument, prepared[number] = prepared[number], None
        captured = inner.start() if inner else None
        with record_function(f"{CALL}{number}"):
            token = self._calling.start(number)
            result = self.bound.call(argument)
            self.clock.synchronize()
            self._calling.end(token)
        if inner:
            inner.end(captured)
        return result


@contextlib.contextmanager
def _profiler_api() -> Any:
    """``cudaProfilerStart`` and ``cudaProfilerStop`` round a block."""
    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.profiler.stop()

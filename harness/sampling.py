"""Samples of one verified call: warm-up, cold and warm rounds, when to stop.

Samples stop by noise or by budget, whichever comes first, and ``stop`` says which. Every sample is kept. The interval
that stops sampling is that of the median within this pass; how much passes differ only several passes can tell.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from spikemark.harness import guards, turns
from spikemark.harness.annotate import Annotation
from spikemark.harness.clock import DeviceClock, now_ns
from spikemark.harness.intervals import median_errors
from spikemark.harness.memory import resident
from spikemark.kernels.definition import BoundCall

NORMAL_95 = 1.96
BESIDE_S = 0.08
"""Wall time that flushing and preparing may take in a case's cold samples beyond the first ``min_samples``."""
WARM_SHARE = 0.25
"""Warm samples may take this share of the kernel-time budget."""
WARM_UP_CALLS = 5
MAX_LEAK_CALLS = 64


class Benchmark(Protocol):
    """The part of pytest-benchmark's fixture that is used."""

    enabled: bool
    stats: Any
    extra_info: dict[str, Any]

    def pedantic(self, target: Callable[..., Any], **settings: Any) -> Any:
        """Run rounds of ``setup``, timed ``target``, ``teardown``."""


@dataclass(frozen=True)
class Options:
    """How a case is measured; the plan's ``options``.

    Samples are taken until the half-width of the median's 95 % interval is ``precision`` of it, at least
    ``min_samples`` and at most ``max_samples`` or ``budget_s`` seconds of kernel time. ``gate_limit`` is how many
    elements the gate compares (None: all). ``ledger`` and ``call_time`` switch those figures. ``first`` is for the
    first pass: the first call's time is kept, and the gate uses a second input.
    """

    precision: float = 0.01
    budget_s: float = 0.1
    min_samples: int = 10
    max_samples: int = 1000
    gate_limit: int | None = 1 << 18
    ledger: bool = True
    call_time: bool = True
    first: bool = True

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Options:
        """From a plan's ``options``; unknown keys are for others."""
        return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data})


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside: a pass over torch's many objects takes tens of milliseconds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def half_width(samples: list[float]) -> float:
    """Half-width of the 95 % interval of the median, as a fraction of it (exact bootstrap error, on logarithms)."""
    if len(samples) < 2:
        return float("inf")
    logs = np.log(np.maximum(np.asarray(samples, dtype=np.float64), 1e-9))[None, :]
    return NORMAL_95 * float(median_errors(logs)[0])


class Sampler:
    """Takes the samples of ``bound``. ``result`` is that of the last call; ``check`` is given each cold one's.

    After ``warm_up()``, ``cold()`` and ``warm()``, ``stop``, ``flags`` and ``details`` are those of the record.
    """

    def __init__(
        self,
        key: str,
        bound: BoundCall,
        clock: DeviceClock,
        options: Options,
        check: Callable[[Any], None],
        benchmark: Benchmark | None = None,
    ) -> None:
        self.key, self.bound, self.clock, self.options, self.benchmark = key, bound, clock, options, benchmark
        self.result: Any = None
        self.prepare_s = 0.0
        self.stop, self.flags = "", list[str]()
        self.details: dict[str, Any] = {}
        self._check_result = check
        self._prepared: Any = None
        self._least = max(1, options.min_samples)
        self._calls = 0
        self._wall = self._turn_ends = 0
        self._resident: list[int] = []
        self._calls_then: list[int] = []
        self._flushing = Annotation(f"flush {key}", "flush")
        self._measuring = Annotation(f"warm-up {key}", "warm-up")

    def prepare(self, flush: bool = False) -> None:
        """Everything before a call that is not timed; drops the last result."""
        self.result = None
        start = now_ns()
        self._prepared = self.bound.prepare()
        self.prepare_s += (now_ns() - start) * 1e-9
        if flush:
            self._hand_over()
            token = self._flushing.start()
            self.clock.flush()
            self._flushing.end(token)

    def _hand_over(self) -> None:
        """In an A/B run, let the other version sample every few milliseconds; ``details`` say where bursts begin."""
        turn, now = turns.mine(), now_ns()
        if turn.shared and now >= self._turn_ends:
            bursts = self.details.setdefault("bursts", [])
            bursts.append(self._calls)
            turn.pause(self.key, len(bursts))
            self._wall += now_ns() - now
            self._turn_ends = now_ns() + turns.BURST_NS

    def call(self) -> None:
        """The timed call."""
        token = self._measuring.start(self._calls)
        self.result = self.clock.run(self.bound.call, self._prepared)
        self._measuring.end(token)
        self._calls += 1
        self._prepared = None

    def warm_up(self) -> None:
        """Calls until two in a row agree within 10 %, at most five or a tenth of the budget."""
        times: list[float] = []
        while len(times) < WARM_UP_CALLS and sum(times) < self.options.budget_s / 10:
            self.prepare()
            self.call()
            times.append(self.clock.last_s)
            if len(times) > 1 and abs(times[-1] - times[-2]) <= 0.1 * times[-2]:
                break
        if self.clock.cuda:
            self.prepare()
            start = now_ns()
            self.result = self.bound.call(self._prepared)
            self.clock.spin_s = 2e-9 * (now_ns() - start) + 20e-6
            self.clock.synchronize()
        self.clock.flush()  # makes the buffer, before memory is looked at
        self._calls = 0
        self._look()

    def _look(self) -> None:
        self._resident.append(resident())
        self._calls_then.append(self._calls)

    def cold(self) -> list[float]:
        """Cold samples; pytest-benchmark's rounds where it is given, so that its table holds these very numbers."""
        self._measuring = Annotation(f"measure cold {self.key}", "measure")
        self._wall = now_ns()
        samples: list[float] = []
        if self.benchmark is not None:
            self.benchmark.pedantic(
                self.call,
                setup=lambda: self.prepare(flush=True),
                teardown=lambda: self._check_result(self.result),
                rounds=self._least,
            )
            samples = self.benchmark.stats.stats.data
        check_at = self._least
        while not self._enough(samples, check_at):
            check_at = check_at + max(2, check_at // 4) if len(samples) >= check_at else check_at
            self.prepare(flush=True)
            start = self.clock()
            self.call()
            seconds = self.clock() - start
            if self.benchmark is None:
                samples.append(seconds)
            else:
                self.benchmark.stats.update(seconds)
            self._check_result(self.result)
        self._look()
        return list(samples)

    def _enough(self, samples: list[float], check_at: int) -> bool:
        """Whether sampling ends; fills ``stop``, ``flags`` and the details that say why."""
        count, spent = len(samples), sum(samples)
        if count < self._least:
            return False
        beside = (now_ns() - self._wall) * 1e-9 - spent
        limit = ""
        if spent >= self.options.budget_s:
            limit = "kernel time"
        elif count >= self.options.max_samples:
            limit = "samples"
        elif beside >= BESIDE_S:
            limit = "time beside the kernel"
        if not limit and count < check_at:
            return False
        width = half_width(samples)
        narrow = width <= self.options.precision
        if not (narrow or limit):
            return False
        self.stop = "narrow" if narrow else "budget"
        self.details |= {"half_width": width} | ({} if narrow else {"limit": limit})
        if not narrow:
            self.flags.append("noisy")
        return True

    def warm(self, cold: list[float]) -> list[float]:
        """Back-to-back samples, at most as many as cold ones and for a quarter of the budget; none for long calls."""
        self._measuring = Annotation(f"measure warm {self.key}", "measure")
        budget = WARM_SHARE * self.options.budget_s
        samples: list[float] = []
        if statistics.median(cold) > budget:
            self.details["warm"] = "not taken: one call is over the budget for warm samples"
            return samples
        started = now_ns()
        while len(samples) < len(cold) and (now_ns() - started) * 1e-9 < budget + BESIDE_S and sum(samples) < budget:
            self.prepare()
            self.call()
            samples.append(self.clock.last_s)
            if len(samples) == len(cold) // 2:
                self._look()
        self._look()
        return samples

    def call_times(self) -> list[float]:
        """Host times of whole calls, from an idle device to completion."""
        samples = []
        for _ in range(self._least):
            self.prepare()
            self.result, seconds = self.clock.call_time(self.bound.call, self._prepared)
            samples.append(seconds)
        return samples

    def leak(self, kept: int) -> str:
        """One line if the process grows with every call; or ''. ``kept`` are bytes the ledger saw kept by one call.

        Who is suspected, by the ledger or by the looks taken so far, is watched once more, exactly.
        """
        if kept < guards.LEAK_PER_CALL and not guards.leak(self._resident, self._calls_then):
            return ""
        self._resident, self._calls_then = [], []
        calls = min(MAX_LEAK_CALLS, max(5, guards.LEAK_BYTES // max(kept, 1)))
        for _ in range(3):
            guards.trim()
            self._look()
            for _ in range(calls):
                self.prepare()
                self.call()
        return guards.leak(self._resident, self._calls_then)

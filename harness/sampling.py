"""Samples of one verified call: warm-up, turns of cold samples, warm samples, when to stop.

Cold samples are taken in bursts of a few milliseconds (``turn``), between which others may have their turn. Samples
stop by noise or by budget, whichever comes first, and ``stop`` says which. Every sample is kept. The interval that
stops sampling is that of the median within this pass; how much passes differ only several passes can tell.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from spikemark.harness import allocator, guards, turns
from spikemark.harness.annotate import Annotation
from spikemark.harness.clock import DeviceClock, now_ns
from spikemark.harness.intervals import median_errors
from spikemark.harness.memory import resident
from spikemark.kernels.definition import BoundCall

NORMAL_95 = 1.96
BESIDE_S = 0.08
"""Wall time that flushing and preparing may take in a case's cold samples beyond the first ``min_samples``, unless the
budget for kernel time is less: then that."""
WARM_SHARE = 0.25
"""Warm samples may take this share of the kernel-time budget."""
WARM_UP_CALLS = 5


@dataclass(frozen=True)
class Options:
    """How a case is measured; the plan's ``options``.

    Samples are taken until the half-width of the median's 95 % interval is ``precision`` of it, at least
    ``min_samples`` and at most ``max_samples`` or ``budget_s`` seconds of kernel time. ``gate_limit`` is how many
    elements the gate compares (None: all). ``ledger`` and ``call_time`` switch those figures. ``first`` is for the
    first pass: the first call's time is kept, and the gate uses a second input. Without ``timed`` cases are verified
    (layouts and ends as well) and not sampled.
    """

    precision: float = 0.01
    budget_s: float = 0.1
    min_samples: int = 10
    max_samples: int = 1000
    gate_limit: int | None = 1 << 18
    ledger: bool = True
    call_time: bool = True
    first: bool = True
    timed: bool = True

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


@dataclass(frozen=True)
class _Look:
    """The process's memory at a moment: resident bytes, the growth so far in this case's turns, its calls so far."""

    resident: int
    own: int
    calls: int


class Sampler:
    """Takes the samples of ``bound``; ``check`` is given each cold one's result.

    ``samples`` are the cold ones so far; ``stop``, ``flags`` and ``details`` are those of the record after
    ``conclude``. ``details["bursts"]`` are the indices at which turns begin. A result lives until its turn ends.
    """

    def __init__(
        self, key: str, bound: BoundCall, clock: DeviceClock, options: Options, check: Callable[[Any], None]
    ) -> None:
        self.key, self.bound, self.clock, self.options = key, bound, clock, options
        self.result: Any = None
        self.samples: list[float] = []
        self.prepare_s = self.flush_s = 0.0
        self.stop, self.flags = "", list[str]()
        self.details: dict[str, Any] = {}
        self._check_result = check
        self._prepared: Any = None
        self._least = max(1, options.min_samples)
        self._beside_s = min(BESIDE_S, options.budget_s)
        self._check_at = self._least
        self._limit = ""
        self._narrow = False
        self._calls = 0
        self._wall_ns = 0
        self._looks: list[_Look] = []
        self._flushing = Annotation(f"flush {key}", "flush")
        self._measuring = Annotation(f"warm-up {key}", "warm-up")

    @property
    def exhausted(self) -> bool:
        """Whether a budget is used up: no more cold samples."""
        return bool(self._limit)

    @property
    def content(self) -> bool:
        """Whether this case by itself needs no more cold samples: its median is narrow, or its budget used up."""
        return self._narrow or self.exhausted

    def prepare(self, flush: bool = False) -> None:
        """Everything before a call that is not timed; drops the last result."""
        self.result = None
        start = now_ns()
        self._prepared = self.bound.prepare()
        end = now_ns()
        self.prepare_s += (end - start) * 1e-9
        if flush:
            token = self._flushing.start()
            self.clock.flush()
            self._flushing.end(token)
            self.flush_s += (now_ns() - end) * 1e-9

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
        self.result = None
        self._calls = 0
        self._measuring = Annotation(f"measure cold {self.key}", "measure")

    def turn(self) -> None:
        """A burst of cold samples: about ``BURST_NS``, flushing included, and one sample at least.

        A case that is content takes one: what others need of it is a pair for each of their bursts. In an A/B run the
        other version's process has its turn first or next.
        """
        bursts = self.details.setdefault("bursts", [])
        other = turns.mine()
        if other.shared:
            other.pause(self.key, len(bursts) + 1)
            self.prepare(flush=True)
            self.call()  # not a sample: threads that slept through the other's turn are woken at its cost
            self._check_result(self.result)
        self._look()
        bursts.append(len(self.samples))
        started = now_ns()
        while True:
            self.prepare(flush=True)
            self.call()
            self.samples.append(self.clock.last_s)
            self._check_result(self.result)
            elapsed = now_ns() - started
            self._judge((self._wall_ns + elapsed) * 1e-9)
            if self.content or elapsed >= turns.BURST_NS:
                break
        self._wall_ns += now_ns() - started
        self.result = None
        self._look(own=True)

    def _look(self, own: bool = False) -> None:
        """Note the process's memory; ``own``: what it grew by since the last look was this case's doing."""
        now, last = resident(), self._looks[-1] if self._looks else None
        grown = (last.own + (now - last.resident if own else 0)) if last else 0
        self._looks.append(_Look(now, grown, self._calls))

    def _judge(self, wall_s: float) -> None:
        """Look whether sampling may end. Looks get rarer as samples get more: each is a chance to stop by luck."""
        count, spent = len(self.samples), sum(self.samples)
        if count < self._least:
            return
        if spent >= self.options.budget_s:
            self._limit = "kernel time"
        elif count >= self.options.max_samples:
            self._limit = "samples"
        elif wall_s - spent >= self._beside_s:
            self._limit = "time beside the kernel"
        if self._narrow or self._limit or count >= self._check_at:
            self._check_at = count + max(2, count // 4)
            self.details["half_width"] = half_width(self.samples)
            self._narrow = self.details["half_width"] <= self.options.precision

    def conclude(self) -> None:
        """No more cold samples: say why."""
        self.stop = "narrow" if self._narrow else "budget"
        if not self._narrow:
            self.details["limit"] = self._limit
            self.flags.append("noisy")

    def cold(self) -> list[float]:
        """All cold samples, alone."""
        while not self.content:
            self.turn()
        self.conclude()
        return self.samples

    def warm(self) -> list[float]:
        """Back-to-back samples, at most as many as cold ones and for a quarter of the budget; none for long calls.

        The last call's ``result`` is kept; if there are no samples, that of an untimed call.
        """
        self._measuring = Annotation(f"measure warm {self.key}", "measure")
        budget = WARM_SHARE * self.options.budget_s
        samples: list[float] = []
        self.prepare()
        self.call()  # what ran last was another's turn: this call finds the caches as others left them
        if statistics.median(self.samples) > budget:
            self.details["warm"] = "not taken: one call is over the budget for warm samples"
            return samples
        started = now_ns()
        while len(samples) < len(self.samples) and sum(samples) < budget:
            self.prepare()
            self.call()
            samples.append(self.clock.last_s)
            if (now_ns() - started) * 1e-9 >= budget + self._beside_s:
                break
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

        Who is suspected, by the ledger or because the process grew and did so in its turns, is watched once more, alone
        and exactly: twice as many calls as the leak would need to show.
        """
        looks = [self._looks[i] for i in (0, len(self._looks) // 2, -1)] if self._looks else []
        calls = [look.calls for look in looks]
        grew = bool(looks) and all(
            guards.leak([getattr(look, name) for look in looks], calls) for name in ("resident", "own")
        )
        if kept < guards.LEAK_PER_CALL and not grew:
            return ""
        rate = max(kept, guards.LEAK_PER_CALL, (looks[-1].own // max(1, calls[-1])) if looks else 0)
        calls, then = [], []
        for number in range(3):
            for _ in range(max(3, math.ceil(guards.LEAK_BYTES / rate)) if number else 0):
                self.prepare()
                self.call()
            self.result = None
            allocator.trim()
            then.append(resident())
            calls.append(self._calls)
        return guards.leak(then, calls)

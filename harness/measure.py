"""Measures one case in this process: inputs, gate, warm-up, samples, memory ledger, recheck -> one ``Record``.

Samples stop by noise or by budget, whichever comes first, and the record says which. Every sample is kept. The
``samples`` are cold (caches flushed before each), ``warm_samples`` back to back. The interval that stops sampling
is that of the median within this pass; how much passes differ from one another only several passes can tell.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from spikemark.harness import guards, records, turns, verify
from spikemark.harness.annotate import Annotation, annotated
from spikemark.harness.clock import DeviceClock, now_ns, thread_count
from spikemark.harness.intervals import median_errors
from spikemark.harness.memory import MemoryLedger, resident
from spikemark.harness.records import Case, Record
from spikemark.harness.verify import Refused, Verification
from spikemark.kernels import registry

NORMAL_95 = 1.96
HARNESS_BUDGET_S = 0.15
"""Wall time that flushing and preparing may take in a case's cold samples beyond the first ``min_samples``."""
WARM_SHARE = 0.25
"""Warm samples may take this share of the kernel-time budget."""
FULL_RECHECKS = 3
LEAK_CALLS = 5
OUT_OF_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "alloc_cpu")

_called: set[tuple[str, str, str]] = set()
_default_threads = torch.get_num_threads()


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
    elements the gate compares (None: all). ``ledger``, ``call_time`` and ``first`` switch those figures.
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


Emit = Callable[[str], None]


def measure_case(
    case: Case,
    options: Options,
    *,
    pass_index: int = 0,
    environment: str = "",
    clock: DeviceClock | None = None,
    benchmark: Benchmark | None = None,
    emit: Emit = lambda stage: None,
) -> Record:
    """Verify and time ``case``. Always returns a record: what a kernel does wrong is its status and reason.

    ``clock`` is the one that ``benchmark`` (pytest-benchmark's fixture) was given as its timer. ``emit`` is called
    with the name of each stage as it begins. ``record.details["spoilt"]`` is set if the process should measure no more.
    """
    _load(case.operator)
    record = Record(case, pass_index, records.OK, environment=environment or case.device, started_s=time.time())
    started = now_ns()
    with placed(case.device):
        state, leftover = guards.GlobalState(), guards.Leftover()
        _attempt(case, options, record, clock or DeviceClock(case.device), benchmark, emit, state)
        _settle(record, state, leftover)
    record.elapsed_s = (now_ns() - started) * 1e-9
    if record.status != records.OK:
        _withdraw(record, benchmark)
    return record


def _attempt(
    case: Case,
    options: Options,
    record: Record,
    clock: DeviceClock,
    benchmark: Benchmark | None,
    emit: Emit,
    state: guards.GlobalState,
) -> None:
    """Measure into ``record``; an exception becomes its status and reason."""
    try:
        with annotated(case.key, "case"):
            _Run(case, options, record, clock, benchmark, emit, state).measure()
    except Refused as refused:
        _fail(record, refused.status, refused.reason)
    except (MemoryError, torch.OutOfMemoryError) as error:
        _fail(record, records.OUT_OF_MEMORY, describe(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a kernel raises is its result
        text = describe(error)
        short = any(words in text.lower() for words in OUT_OF_MEMORY_WORDS)
        _fail(record, records.OUT_OF_MEMORY if short else records.ERROR, text)


@functools.cache
def _load(operator: str) -> None:
    """Import an operator's implementations before the process's state is noted: imports may change it rightly."""
    registry.implementations(operator)


def _fail(record: Record, status: str, reason: str) -> None:
    record.status, record.reason = status, one_line(reason)


def _settle(record: Record, state: guards.GlobalState, leftover: guards.Leftover) -> None:
    """Undo what the implementation changed, and let it show in the record unless something worse does."""
    changed = state.settle()
    threads = leftover.threads()
    if threads:
        record.details["spoilt"] = threads
    if state.notes:
        record.details["notes"] = list(dict.fromkeys(state.notes))
    found = "; ".join(filter(None, (changed, threads)))
    if found and record.status == records.OK:
        _fail(record, records.ERROR, found)
    elif found:
        record.reason = one_line(f"{record.reason}; also {found}")


def _withdraw(record: Record, benchmark: Benchmark | None) -> None:
    """A case that is not ok has no times, here and in pytest-benchmark's table."""
    record.samples, record.warm_samples, record.call_samples = [], [], []
    record.first_call_s, record.stop = None, ""
    if benchmark is not None and benchmark.stats is not None:
        benchmark.stats.stats.data.clear()


def describe(error: BaseException) -> str:
    """``Type: first line of the message``."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def one_line(text: str, limit: int = 400) -> str:
    """``text`` on one line of printable characters, at most ``limit`` of them."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= limit else line[: limit - 3] + "..."


@contextmanager
def placed(device: str) -> Iterator[None]:
    """Run with the threads that ``cpu:N`` asks for (``cpu``: torch's default); restores the count after."""
    before = torch.get_num_threads()
    wanted = thread_count(device) or _default_threads
    if wanted != before:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection between here and the end: a pass over torch's many objects takes tens of milliseconds."""
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


class _Run:
    """One measurement under way."""

    def __init__(
        self,
        case: Case,
        options: Options,
        record: Record,
        clock: DeviceClock,
        benchmark: Benchmark | None,
        emit: Emit,
        state: guards.GlobalState,
    ) -> None:
        self.case, self.options, self.record, self.clock = case, options, record, clock
        self.benchmark, self.state = benchmark, state
        self._emit = emit
        self._result: Any = None
        self._prepared: Any = None
        self._calls = 0
        self._bursts: list[int] = []
        self._turn_ends = 0
        self._rechecks = 0

    def measure(self) -> None:
        """All stages; raises what a kernel raises, and ``Refused``."""
        case, record = self.case, self.record
        try:
            self.implementation = registry.get(case.operator, case.implementation)
        except KeyError as error:
            raise Refused(records.UNAVAILABLE, str(error.args[0])) from None
        record.details["baseline"] = bool(self.implementation.baseline)
        verify.admit(case, self.implementation)
        self._stage("inputs")
        self.block = verify.block_for(case, self.options.gate_limit)
        record.spike_rate = self.block.inputs.spike_rate
        self._cost()
        self._gate()
        if self.benchmark is not None and not self.benchmark.enabled:
            self.benchmark.pedantic(lambda: None)  # --benchmark-disable: verified, not timed
            return
        with _no_collection():
            self._warm_up()
            self._cold()
            self._warm()
        self._recheck()
        self._look_for_leaks()
        if self.options.call_time and self.clock.cuda:
            self._call_times()
        if self.options.ledger:
            self._ledger()
        if reason := self.block.changed_inputs():
            verify.forget_block()
            raise verify.incorrect(f"{reason} (not in its first calls)")

    def _stage(self, name: str) -> None:
        self._emit(name)

    def _cost(self) -> None:
        case, rate = self.case, self.block.inputs.spike_rate
        cost = self.block.definition.cost(case.phase, case.problem, self.block.dtype, rate)
        self.record.cost = {"bytes": cost.bytes, "operations": cost.operations}
        moved = self.implementation.moved_bytes(case.problem, case.phase, case.dtype, rate)
        if moved is not None:
            self.record.cost["moved_bytes"] = int(moved)

    def _gate(self) -> None:
        key = (self.case.operator, self.case.phase, self.case.implementation)
        self.record.details["first_of_process"] = key not in _called
        _called.add(key)
        self._stage("first-call")
        try:
            with annotated(f"verify {self.case.key}", "verify"):
                found: Verification = verify.gate(self.block, self.implementation, self.clock, self._stage)
        except BaseException:
            verify.forget_block()  # inputs may have been written to
            raise
        self.marks, self.bound = found.fingerprint, found.bound
        self.record.verification = found.figures()
        if self.options.first:
            self.record.first_call_s = found.first_call_s
        self._settled()

    def _settled(self) -> None:
        """End here if global state was changed: a kernel that does that is not timed."""
        changed = self.state.settle()
        if changed:
            raise Refused(records.ERROR, changed)

    # -- rounds ------------------------------------------------------------------------------------------------

    def _prepare(self, flush: bool) -> None:
        self._result = None
        self._prepared = self.bound.prepare()
        if flush:
            self._hand_over()
            token = self._flushing.start()
            self.clock.flush()
            self._flushing.end(token)

    def _hand_over(self) -> None:
        """In an A/B run, let the other variant sample every few milliseconds; where bursts begin is in ``details``."""
        turn, now = turns.mine(), now_ns()
        if turn.shared and now >= self._turn_ends:
            self._bursts.append(self._calls)
            turn.pause(self.case.key, len(self._bursts))
            self._wall += now_ns() - now
            self._turn_ends = now_ns() + turns.BURST_NS

    def _call(self) -> None:
        token = self._measuring.start(self._calls)
        self._result = self.clock.run(self.bound.call, self._prepared)
        self._measuring.end(token)
        self._calls += 1
        self._prepared = None

    def _warm_up(self) -> None:
        """Calls until two in a row agree within 10 %, at most five or a tenth of the budget."""
        self._stage("warm-up")
        self._flushing = Annotation(f"flush {self.case.key}", "flush")
        self._measuring = Annotation(f"warm-up {self.case.key}", "warm-up")
        times: list[float] = []
        while len(times) < 5 and sum(times) < self.options.budget_s / 10:
            self._prepare(flush=False)
            self._call()
            times.append(self.clock.last_s)
            if len(times) > 1 and abs(times[-1] - times[-2]) <= 0.1 * times[-2]:
                break
        if self.clock.cuda:
            self._prepare(flush=False)
            start = now_ns()
            self._result = self.bound.call(self._prepared)
            self.clock.spin_s = 2e-9 * (now_ns() - start) + 20e-6
            self.clock.synchronize()
        self._measuring = Annotation(f"measure {self.case.key}", "measure")
        self._calls = 0
        self.clock.flush()  # makes the buffer, before memory is looked at
        self._resident, self._calls_then = [], []
        self._look()

    def _look(self) -> None:
        self._result = None
        self._resident.append(resident())
        self._calls_then.append(self._calls)

    def _cold(self) -> None:
        """Cold samples; as pytest-benchmark's rounds where it is given, so that its table holds these very numbers."""
        self._stage("measure")
        self._wall = now_ns()
        if self.benchmark is None:
            samples: list[float] = []
        else:
            self.benchmark.pedantic(
                self._call, setup=lambda: self._prepare(flush=True), teardown=self._check, rounds=self._minimum()
            )
            samples = self.benchmark.stats.stats.data
        self._check_at = self._minimum()
        while not self._enough(samples):
            self._prepare(flush=True)
            start = self.clock()
            self._call()
            seconds = self.clock() - start
            if self.benchmark is None:
                samples.append(seconds)
            else:
                self.benchmark.stats.update(seconds)
            self._check()
        self.record.samples = list(samples)
        if self._bursts:
            self.record.details["bursts"] = self._bursts

    def _minimum(self) -> int:
        return max(1, self.options.min_samples)

    def _check(self) -> None:
        """Compare a sample of the result's bits with the verified call's; if they differ, all of it."""
        outputs = verify.read_outputs(self.bound, self._result)
        if self._rechecks < FULL_RECHECKS and not verify.same_bits(verify.fingerprint(outputs), self.marks):
            self._rechecks += 1
            verify.recheck(self.block, self.bound, self._result, "a timed sample")

    def _enough(self, samples: list[float]) -> bool:
        """Whether sampling ends; fills ``stop``, ``flags`` and the details that say why."""
        count, spent = len(samples), sum(samples)
        if count < self._minimum():
            return False
        beside = (now_ns() - self._wall) * 1e-9 - spent
        limit = ""
        if spent >= self.options.budget_s:
            limit = "kernel time"
        elif count >= self.options.max_samples:
            limit = "samples"
        elif beside >= HARNESS_BUDGET_S:
            limit = "time beside the kernel"
        if not limit and count < self._check_at:
            return False
        self._check_at = count + max(2, count // 4)
        width = half_width(samples)
        narrow = width <= self.options.precision
        if not (narrow or limit):
            return False
        self.record.stop = "narrow" if narrow else "budget"
        self.record.details |= {"half_width": width, "beside_s": beside} | ({} if narrow else {"limit": limit})
        if not narrow:
            self.record.flags.append("noisy")
        return True

    def _warm(self) -> None:
        """Back-to-back samples, at most as many as cold ones and for a quarter of the budget."""
        budget = WARM_SHARE * self.options.budget_s
        warm = self.record.warm_samples
        self._measuring = Annotation(f"measure warm {self.case.key}", "measure")
        if statistics.median(self.record.samples) > budget:
            self.record.details["warm"] = "not taken: one call is over the budget for warm samples"
            return
        self._look()
        half = len(self.record.samples) // 2
        while len(warm) < len(self.record.samples) and sum(warm) < budget:
            self._prepare(flush=False)
            self._call()
            warm.append(self.clock.last_s)
            if len(warm) == half:
                self._look()

    def _recheck(self) -> None:
        """Compare the result of the last timed call in full."""
        self._stage("recheck")
        verify.recheck(self.block, self.bound, self._result, "its last timed call")
        self._look()

    # -- after the samples -------------------------------------------------------------------------------------

    def _look_for_leaks(self) -> None:
        found = guards.leak(self._resident, self._calls_then)
        if found:  # an accusation is made twice: as many calls again must leak again
            for _ in range(2):
                for _ in range(LEAK_CALLS):
                    self._prepare(flush=False)
                    self._call()
                self._look()
            found = found and guards.leak(self._resident, self._calls_then)
        if found:
            self.record.details["spoilt"] = found
            raise Refused(records.ERROR, found)

    def _call_times(self) -> None:
        """Host time of whole calls, from an idle device to completion; flags launch-bound ones. CUDA only."""
        for _ in range(self._minimum()):
            self._prepare(flush=False)
            self._result, seconds = self.clock.call_time(self.bound.call, self._prepared)
            self.record.call_samples.append(seconds)
        device, call = (statistics.median(s) for s in (self.record.samples, self.record.call_samples))
        if device < call / 2:
            self.record.flags.append("launch-bound")

    def _ledger(self) -> None:
        self._stage("ledger")
        self._result = self._prepared = None
        self.record.memory = MemoryLedger(self.clock.device).weigh(self.bound, self.block.inputs.tensors.values())
        if self.record.memory["kept_bytes"]:
            self.record.flags.append("keeps-memory")

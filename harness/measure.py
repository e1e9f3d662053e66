"""Measures one case in this process: inputs, gate, warm-up, samples, recheck, memory ledger -> one ``Record``.

The record's ``samples`` are cold (caches flushed before each), its ``warm_samples`` back to back. Whatever a kernel
does is caught here and becomes the row's status and reason, unless it kills the process: see ``supervisor``.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from spikemark.harness import checks, guards, records, verify
from spikemark.harness.annotate import annotated
from spikemark.harness.clock import DeviceClock, clock_for, now_ns, thread_count
from spikemark.harness.memory import MemoryLedger
from spikemark.harness.records import Case, Record
from spikemark.harness.sampling import Benchmark, Options, Sampler, no_collection
from spikemark.harness.verify import Refused, Verification
from spikemark.kernels import registry

FULL_RECHECKS = 3
OUT_OF_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "alloc_cpu")

_called: set[tuple[str, str, str]] = set()
_default_threads = torch.get_num_threads()


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
    with the name of each stage as it begins. ``record.details``: ``harness_s`` is the time beside all kernel calls,
    beside ``prepare_s`` (what a call consumes: the forward before a layer's backward) and beside ``block_s`` (inputs
    and references, shared by a comparison's implementations); ``spoilt`` is set if the process should measure no more.
    """
    _load(case.operator)
    record = Record(case, pass_index, records.OK, environment=environment or case.device, started_s=time.time())
    started = now_ns()
    with placed(case.device):
        clock = clock or clock_for(case.device)
        kernel_s = clock()
        state, leftover = guards.GlobalState(), guards.Leftover()
        _attempt(case, options, record, clock, benchmark, emit, state)
        _settle(record, state, leftover)
    record.elapsed_s = (now_ns() - started) * 1e-9
    own = record.elapsed_s - (clock() - kernel_s) - record.details.get("block_s", 0.0)
    record.details["harness_s"] = (
        own - sum(record.call_samples) - sum(record.details.get(name, 0.0) for name in ("ledger_call_s", "prepare_s"))
    )
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
        started = now_ns()
        self.block = verify.block_for(case, self.options.gate_limit)
        record.details["block_s"] = (now_ns() - started) * 1e-9
        record.spike_rate = self.block.inputs.spike_rate
        self._cost()
        self._gate()
        if self.benchmark is not None and not self.benchmark.enabled:
            self.benchmark.pedantic(lambda: None)  # --benchmark-disable: verified, not timed
            self._check_further()
            return
        self._sample()
        self._recheck()
        if self.options.call_time and self.clock.cuda:
            self._call_times()
        if self.options.ledger:
            self._ledger()
        self._look_for_leaks()
        if reason := self.block.changed_inputs():
            verify.forget_block()
            raise verify.incorrect(f"{reason} (not in its first calls)")

    def _check_further(self) -> None:
        """Layouts and ends, for a case that is verified only."""
        self._stage("verify")
        found = checks.further(self.case, self.implementation, self.clock)
        self.record.verification["checks"] = [dataclasses.asdict(check) for check in found]
        for check in found:
            if not check.ok:
                raise verify.incorrect(f"{check.name}: {check.reason}")

    def _stage(self, name: str) -> None:
        self._emit(name)
        if name == "verify":  # the first call is over
            self._settled()

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
                found: Verification = verify.gate(
                    self.block, self.implementation, self.clock, self._stage, second=self.options.first
                )
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

    def _sample(self) -> None:
        self.sampler = Sampler(self.case.key, self.bound, self.clock, self.options, self._check, self.benchmark)
        with no_collection():
            self._stage("warm-up")
            self.sampler.warm_up()
            self._stage("measure")
            self.record.samples = self.sampler.cold()
            self.record.warm_samples = self.sampler.warm(self.record.samples)
        self.record.stop = self.sampler.stop
        self.record.flags += self.sampler.flags
        self.record.details |= self.sampler.details

    def _check(self, result: Any) -> None:
        """Compare a sample of a result's bits with the verified call's; if they differ, all of it."""
        outputs = verify.read_outputs(self.bound, result)
        if self._rechecks < FULL_RECHECKS and not verify.same_bits(verify.fingerprint(outputs), self.marks):
            self._rechecks += 1
            verify.recheck(self.block, self.bound, result, "a timed sample")

    def _recheck(self) -> None:
        """Compare the result of the last timed call in full."""
        self._stage("recheck")
        verify.recheck(self.block, self.bound, self.sampler.result, "its last timed call")

    def _call_times(self) -> None:
        """Host times of whole calls; flags those that the device spends less than half of. CUDA only."""
        self.record.call_samples = self.sampler.call_times()
        device, call = (statistics.median(s) for s in (self.record.samples, self.record.call_samples))
        if device < call / 2:
            self.record.flags.append("launch-bound")

    def _ledger(self) -> None:
        self._stage("ledger")
        self.sampler.result = None
        ledger = MemoryLedger(self.clock.device)
        self.record.memory = ledger.weigh(self.bound, self.block.inputs.tensors.values())
        self.record.details["ledger_call_s"] = ledger.call_s

    def _look_for_leaks(self) -> None:
        kept = self.record.memory.get("kept_bytes", 0)
        if found := self.sampler.leak(kept):
            self.record.details["spoilt"] = found
            raise Refused(records.ERROR, found)
        if kept:
            self.record.flags.append("keeps-memory")
        self.record.details["prepare_s"] = self.sampler.prepare_s

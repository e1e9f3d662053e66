"""Measures the cases of one comparison in this process: each is gated, then all take turns -> one ``Record`` a case.

The record's ``samples`` are cold (caches flushed before each), its ``warm_samples`` back to back. Whatever a kernel
does is caught here and becomes the row's status and reason, unless it kills the process: see ``supervisor``.

Why turns: on a shared machine the speed of everything jumps by tens of percent from one second to the next. Cases that
are sampled one after another are compared under different machines; in turns of a few milliseconds all see every jump,
and ``pairing`` takes it out of their ratio. A case takes turns until every case of the comparison is content (its
median is narrow, or its budget used up): one that was narrow early goes on with one sample a turn, since what the
others need of it is a partner for each of their bursts. A case whose own budget is used up takes no more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from spikemark.harness import guards, records, verify
from spikemark.harness.annotate import annotated
from spikemark.harness.clock import clock_for, now_ns, thread_count
from spikemark.harness.records import Case, Record
from spikemark.harness.sampling import Options
from spikemark.harness.stages import Stages
from spikemark.harness.verify import Refused
from spikemark.kernels import registry

OUT_OF_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "alloc_cpu")

_default_threads = torch.get_num_threads()


class Tell(Protocol):
    """Is told what happens, as it happens: ``start``, ``turn`` (the process is this case's again), ``stage`` (with
    ``stage``, its name) and ``record`` (with ``record``)."""

    def __call__(self, event: str, case: Case, **data: Any) -> None:
        """One event."""


def _tell_nobody(event: str, case: Case, **data: Any) -> None:
    pass


def measure_case(
    case: Case,
    options: Options,
    *,
    pass_index: int = 0,
    environment: str = "",
    emit: Callable[[str], None] = lambda stage: None,
) -> Record:
    """Verify and time one case alone: ``measure_block`` of one. ``emit`` is called with the name of each stage."""

    def tell(event: str, case: Case, **data: Any) -> None:
        if event == "stage":
            emit(data["stage"])

    (record,) = measure_block([case], options, pass_index=pass_index, environment=environment, tell=tell)
    return record


def measure_block(
    cases: Sequence[Case],
    options: Options,
    *,
    pass_index: int = 0,
    environment: str = "",
    seed: int = 0,
    tell: Tell = _tell_nobody,
    leave_when_spoilt: bool = False,
) -> list[Record]:
    """Verify and time ``cases``, which share ``group`` and problem, in turns. What a kernel does wrong is its row.

    The order within each round of turns is drawn from ``seed``. A record is returned for every case, in the order of
    ``cases``; but with ``leave_when_spoilt``, once a kernel has spoilt the process (threads, growing memory), only
    for those that were complete before: the others are to be measured in another process.

    ``record.details``: ``block`` names the turns that samples were taken in, ``bursts`` where each turn begins.
    ``kernel_s`` is the time in all kernel calls, timed or not, with ``prepare_s`` (what a call consumes: the forward
    before a layer's backward). ``harness_s`` is all other time but ``block_s`` (inputs and references, shared by a
    comparison's implementations); of it ``flush_s`` went into flushing caches and ``gate_s`` into comparing results.
    ``spoilt`` says why the process should measure no more.
    """
    if len({case.group for case in cases}) > 1:
        raise ValueError("cases that take turns must be of one comparison")
    registry.implementations(cases[0].operator)  # imports may rightly change the state that is noted next
    with placed(cases[0].device):
        block = _Block(cases, options, pass_index, environment, seed, tell, leave_when_spoilt)
        block.measure()
    return [block.records[case.key] for case in cases if case.key in block.records]


class _Left(Exception):
    """The process is spoilt: what is not complete is left to another."""


class _Case:
    """A case in its block: its stages, its clock, and the time that was its own."""

    def __init__(self, block: _Block, case: Case) -> None:
        self.case = case
        self.record = Record(
            case, block.pass_index, records.OK, environment=block.environment or case.device, started_s=time.time()
        )
        self.clock = clock_for(case.device)
        self.own_ns = 0
        self.stages = Stages(
            self.record,
            block.options,
            self.clock,
            lambda stage: block.tell("stage", case, stage=stage),
            lambda: block.settle(self.record),
        )

    @property
    def ok(self) -> bool:
        return self.record.status == records.OK

    def account(self) -> None:
        """Say where the time went; a case that is not ok has no times of its kernel."""
        record = self.record
        record.elapsed_s = self.own_ns * 1e-9
        kernel_s = self.clock() + sum(record.call_samples)
        kernel_s += sum(record.details.get(name, 0.0) for name in ("ledger_call_s", "prepare_s"))
        record.details["kernel_s"] = kernel_s
        record.details["harness_s"] = record.elapsed_s - kernel_s - record.details.get("block_s", 0.0)
        if not self.ok:
            record.samples, record.warm_samples, record.call_samples = [], [], []
            record.first_call_s, record.stop = None, ""


class _Block:
    """One comparison under way."""

    def __init__(
        self,
        cases: Sequence[Case],
        options: Options,
        pass_index: int,
        environment: str,
        seed: int,
        tell: Tell,
        leave_when_spoilt: bool,
    ) -> None:
        self.cases, self.options, self.tell = list(cases), options, tell
        self.pass_index, self.environment = pass_index, environment
        self.records: dict[str, Record] = {}
        self._leave = leave_when_spoilt
        self._random = random.Random(f"{seed} {pass_index} {cases[0].group}")
        self._state, self._leftover = guards.GlobalState(), guards.Leftover()
        self._name = f"{pass_index}-{time.time_ns()}"
        self._started: set[str] = set()
        self._present: _Case | None = None

    def measure(self) -> None:
        """All cases; fills ``records``."""
        with suppress(_Left):
            self._together(self.cases)

    def _together(self, cases: list[Case]) -> None:
        going = []
        for case in cases:
            one = _Case(self, case)
            with self._own(one):
                one.stages.begin()
            if not one.ok or not self.options.timed:
                self._close(one)
            else:
                going.append(one)
        if not self._take_turns(going):
            # Somebody has written to the inputs that all share, and nobody can tell who: alone, each tells on itself.
            for one in going:
                one.stages.release()
            verify.forget_block()
            for one in going:
                if one.case.key not in self.records:
                    self._together([one.case])
            return
        for one in going:
            if one.ok:
                with self._own(one):
                    one.stages.finish()
                self._close(one)

    def _take_turns(self, going: list[_Case]) -> bool:
        """Rounds of turns until all are content; whether the inputs are what they were. Closes those that fail."""
        if len(going) > 1:
            for one in going:
                one.record.details["block"] = self._name
        while any(one.ok and not one.stages.sampler.content for one in going):
            order = [one for one in going if one.ok and not one.stages.sampler.exhausted]
            self._random.shuffle(order)
            for one in order:
                with self._own(one):
                    one.stages.turn()
                if one.ok:
                    continue
                if len(going) > 1 and "spoilt" not in one.record.details and one.stages.changed_inputs():
                    return False
                self._close(one)
        return len(going) < 2 or not any(one.stages.changed_inputs() for one in going[:1])

    @contextmanager
    def _own(self, one: _Case) -> Iterator[None]:
        """What happens inside is this case's: its time, its faults, its changes of the process."""
        if one.case.key not in self._started:
            self._started.add(one.case.key)
            self.tell("start", one.case)
        elif self._present is not one:
            self.tell("turn", one.case)
        self._present = one
        started, record = now_ns(), one.record
        try:
            with annotated(one.case.key, "case"):
                yield
        except Refused as refused:
            _fail(record, refused.status, refused.reason)
        except (MemoryError, torch.OutOfMemoryError) as error:
            _fail(record, records.OUT_OF_MEMORY, describe(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a kernel raises is its result
            text = describe(error)
            short = any(words in text.lower() for words in OUT_OF_MEMORY_WORDS)
            _fail(record, records.OUT_OF_MEMORY if short else records.ERROR, text)
        self._look_after(record)
        one.own_ns += now_ns() - started

    def settle(self, record: Record) -> str:
        """Undo what an implementation changed in the process; what that was, in one line, or ''."""
        self._state.notes.clear()
        changed = self._state.settle()
        if self._state.notes:
            record.details["notes"] = list(dict.fromkeys([*record.details.get("notes", []), *self._state.notes]))
        return changed

    def _look_after(self, record: Record) -> None:
        """What an implementation leaves behind shows in its row, unless something worse does."""
        changed, threads = self.settle(record), self._leftover.threads()
        if threads:
            record.details["spoilt"] = threads
            self._leftover = guards.Leftover()  # no other case is to blame for them
        found = "; ".join(filter(None, (changed, threads)))
        if found and record.status == records.OK:
            _fail(record, records.ERROR, found)
        elif found:
            record.reason = one_line(f"{record.reason}; also {found}")

    def _close(self, one: _Case) -> None:
        """The row is complete. Inputs that it has written to are put right for the others."""
        if not one.ok:
            try:
                one.stages.restore_inputs()
            except RuntimeError as error:  # it has resized them, or a GPU no longer answers
                one.record.details.setdefault("spoilt", f"inputs that cannot be put right: {one_line(describe(error))}")
        one.stages.release()
        one.account()
        self.records[one.case.key] = one.record
        self.tell("record", one.case, record=one.record)
        if self._leave and one.record.details.get("spoilt"):
            raise _Left


def _fail(record: Record, status: str, reason: str) -> None:
    record.status, record.reason = status, one_line(reason)


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

"""The stages of one case: admission, inputs, gate, warm-up; turns of samples; warm samples, recheck, memory ledger.

Nothing is caught here: whatever a kernel raises passes through, and what is wrong with it is a ``Refused``. See
``measure`` for what becomes of either.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from spikemark.harness import checks, records, verify
from spikemark.harness.annotate import annotated
from spikemark.harness.clock import DeviceClock, now_ns
from spikemark.harness.memory import MemoryLedger
from spikemark.harness.records import Record
from spikemark.harness.sampling import Options, Sampler, no_collection
from spikemark.harness.verify import Refused
from spikemark.kernels import registry

FULL_RECHECKS = 3

_called: set[tuple[str, str, str]] = set()


class Stages:
    """One case under way into ``record``: ``begin``, then ``turn`` after turn, then ``finish``.

    ``emit`` is told the name of each stage as it begins; ``changed`` says what the process's global state has changed
    by (and undoes it): a kernel that does that is not timed.
    """

    def __init__(
        self,
        record: Record,
        options: Options,
        clock: DeviceClock,
        emit: Callable[[str], None],
        changed: Callable[[], str],
    ) -> None:
        self.case, self.record, self.options, self.clock = record.case, record, options, clock
        self._emit, self._changed = emit, changed
        self._rechecks = 0
        self.block: verify.Block | None = None
        self.sampler: Sampler

    def begin(self) -> None:
        """Everything before the first sample."""
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
        if not self.options.timed:
            self._check_further()
            return
        self.sampler = Sampler(case.key, self.bound, self.clock, self.options, self._check)
        self._stage("warm-up")
        with no_collection():
            self.sampler.warm_up()
        self._leave_inputs_alone()

    def turn(self) -> None:
        """A few cold samples."""
        if not self.sampler.samples:
            self._stage("measure")
        with no_collection():
            self.sampler.turn()

    def finish(self) -> None:
        """Everything after the last cold sample."""
        record, sampler = self.record, self.sampler
        sampler.conclude()
        record.samples = sampler.samples
        with no_collection():
            record.warm_samples = sampler.warm()
        record.stop = sampler.stop
        record.flags += sampler.flags
        record.details |= sampler.details | {"flush_s": sampler.flush_s}
        self._note_what_ran()
        self._stage("recheck")
        assert self.block is not None
        verify.recheck(self.block, self.bound, sampler.result, "its last timed call", self.verified.checksums)
        sampler.result = None
        if self.verified.second_input:  # one that has seen this input often enough may have stopped computing
            verify.second_call(self.block, self.implementation, self.clock, {}, " after its timed calls")
        if self.options.call_time and self.clock.cuda:
            self._call_times()
        if self.options.ledger:
            self._ledger()
        self._look_for_leaks()
        record.details["prepare_s"] = sampler.prepare_s
        self._leave_inputs_alone()

    def _leave_inputs_alone(self) -> None:
        """End here if inputs were written to: the next to read them would be blamed for it."""
        if reason := self.changed_inputs():
            raise verify.incorrect(f"{reason} (not in its first calls)")

    def changed_inputs(self) -> str:
        """One line naming the inputs that are not what they were, or ''."""
        return self.block.changed_inputs() if self.block is not None else ""

    def restore_inputs(self) -> None:
        """Put right inputs that were written to. Raises what torch raises if they cannot be."""
        if self.block is not None and self.block.changed_inputs():
            self.block.restore()

    def release(self) -> None:
        """Let go of inputs, bound calls and results; the record stays."""
        self.block = None
        for name in ("sampler", "bound", "verified"):
            self.__dict__.pop(name, None)

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

    def _settled(self) -> None:
        """End here if global state was changed."""
        if changed := self._changed():
            raise Refused(records.ERROR, changed)

    def _cost(self) -> None:
        assert self.block is not None
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
        assert self.block is not None
        started, kernel_s = now_ns(), self.clock()
        with annotated(f"verify {self.case.key}", "verify"):
            found = verify.gate(self.block, self.implementation, self.clock, self._stage, second=self.options.first)
        self.record.details["gate_s"] = (now_ns() - started) * 1e-9 - (self.clock() - kernel_s)
        self._note_what_ran()
        self.verified, self.bound = found, found.bound
        self.record.verification = found.figures()
        if self.options.first:
            self.record.first_call_s = found.first_call_s
        self._settled()

    def _note_what_ran(self) -> None:
        """An implementation that has a choice says which kernel its last call took."""
        if ran := str(self.implementation.ran or ""):
            self.record.details["ran"] = ran

    def _check(self, result: Any) -> None:
        """Compare a sample of a result's bits with the verified call's; if they differ, all of it."""
        outputs = verify.read_outputs(self.bound, result)
        if self._rechecks < FULL_RECHECKS and not verify.same_bits(
            verify.fingerprint(outputs), self.verified.fingerprint
        ):
            self._rechecks += 1
            assert self.block is not None
            verify.recheck(self.block, self.bound, result, "a timed sample")

    def _call_times(self) -> None:
        """Host times of whole calls; flags those that the device spends less than half of. CUDA only."""
        self.record.call_samples = self.sampler.call_times()
        device, call = (statistics.median(s) for s in (self.record.samples, self.record.call_samples))
        if device < call / 2:
            self.record.flags.append("launch-bound")

    def _ledger(self) -> None:
        self._stage("ledger")
        assert self.block is not None
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

"""One measuring process from its start to its end, as the supervisor sees it: protocol, limits, and rows for the dead.

Torch-free. The protocol is JSON lines on a pipe: ``ready`` with the environment, ``calibration``, then for each case
``start``, ``stage``..., ``record``, and ``end``. The cases of one comparison may be under way together: ``turn`` says
which of them the process works on from now on. A worker may ``end`` early, after a case that has spoilt its process;
the supervisor gives the rest, begun or not, to a new one. A stream that stops without ``end`` is a death in the case
whose turn it was: the others begun get no row, so a new worker measures them anew.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from spikemark.harness.plan import RunOptions
from spikemark.harness.process import Worker, available_memory_bytes, describe_exit, one_line, oom_kills
from spikemark.harness.records import CRASHED, OUT_OF_MEMORY, TIMED_OUT, Case, Record

TICK_S = 0.1
END_GRACE_S = 10.0
HANG_UP_GRACE_S = 1.0


@dataclass
class Ready:
    """The worker can measure; ``environment`` is that of its device."""

    environment: dict[str, Any]
    torch_import_s: float = 0.0


@dataclass
class Calibration:
    """How fast a plain copy was in this process."""

    line: dict[str, Any]


@dataclass
class Started:
    """A case begins."""

    case: Case


@dataclass
class Stage:
    """The present case has reached a stage."""

    name: str


Message = Ready | Calibration | Started | Stage | Record


@dataclass
class _Running:
    """A case under way. ``spent_s`` is its time so far, beside stages with limits of their own and others' turns."""

    case: Case
    started: float = field(default_factory=time.monotonic)
    stage: str = "start"
    since: float = field(default_factory=time.monotonic)
    spent_s: float = 0.0


class Session:
    """Follows ``worker`` through ``pending`` (its plan's cases, in order)."""

    def __init__(
        self, worker: Worker, pending: list[Case], pass_index: int, options: RunOptions, tick_s: float = TICK_S
    ) -> None:
        """``tick_s``: how long to listen before others have their turn."""
        self.worker = worker
        self.tick_s = tick_s
        self.pending = pending
        self.pass_index = pass_index
        self.options = options
        self.ready = False
        self.ended = False
        self.progressed = False
        self.killed: tuple[str, str] | None = None
        self.waits: Callable[[], bool] = lambda: False  # whether another's turn keeps the worker waiting now
        self._watched = time.monotonic()
        self._running: _Running | None = None
        self._open: dict[str, _Running] = {}
        self._limit_s = 0.0
        self._limit_end = 0.0
        self._allow(options.start_timeout_s)
        self._memory_limit = int(options.memory_fraction * available_memory_bytes())
        self._oom_before = oom_kills()

    @property
    def in_case(self) -> bool:
        """Whether a case has been started and has no record yet."""
        return bool(self._open)

    def _allow(self, seconds: float) -> None:
        """The worker must say something within ``seconds`` from now."""
        self._limit_s, self._limit_end = seconds, time.monotonic() + seconds

    def follow(self, tick: Callable[[], None]) -> Iterator[Message | None]:
        """Messages until the worker has ended; a death gives the row of the case it was in.

        ``tick`` is called several times a second and may raise to leave; None follows it, so that a caller can attend
        to another session meanwhile. The caller closes the worker.
        """
        while not (self.worker.closed or self.ended):
            for event in self.worker.poll(self.tick_s):
                if self.killed:  # what it said after its offence does not count
                    break
                message = self._understand(event)
                if message is not None:
                    yield message
            tick()
            if time.monotonic() - self._watched >= TICK_S:
                self._watch()
            yield None
        if self.ended:
            yield from self._end_by_itself(END_GRACE_S)  # threads it leaves do not matter: its rows are complete
            return
        yield from self._end_by_itself(HANG_UP_GRACE_S)
        code = self.worker.process.returncode
        self.worker.stop()
        if self._running is not None:
            yield self._obituary(self._running, code)
            self.progressed = True

    def _end_by_itself(self, seconds: float) -> Iterator[None]:
        """Give the process so long to end."""
        end = time.monotonic() + seconds
        while not self.worker.wait(self.tick_s) and time.monotonic() < end:
            yield None

    def _understand(self, event: dict[str, Any]) -> Message | None:
        """The message in an event; one that makes no sense is the end of this worker."""
        try:
            return self._message(event)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            self._kill(CRASHED, f"its process sent an event that cannot be understood ({type(error).__name__})")
            return None

    def _message(self, event: dict[str, Any]) -> Message | None:
        kind = event["event"]
        if kind == "ready":
            self.ready = True
            self._allow(self.options.start_timeout_s)
            return Ready(dict(event["environment"]), float(event.get("torch_import_s", 0.0)))
        if kind == "calibration":
            return Calibration({k: v for k, v in event.items() if k not in ("event", "kind")})
        if kind == "start":
            return self._start(self.pending[int(event["index"])], int(event.get("log", 0)))
        if kind == "turn":
            self.worker.mark(int(event.get("log", 0)))
            self._turn_to(self._open[self.pending[int(event["index"])].key])
            return None
        if kind == "stage":
            return self._stage(str(event["stage"]))
        if kind == "record":
            return self._record(event["record"])
        if kind == "end":
            self.ended = not self._open or bool(event.get("spoilt"))
        return None

    def _start(self, case: Case, log: int) -> Started | None:
        if any(running.case.group != case.group for running in self._open.values()):
            self._kill(CRASHED, "its process went on to the next comparison without a result")
            return None
        self.worker.mark(log)
        self._open[case.key] = _Running(case)
        self._turn_to(self._open[case.key])
        return Started(case)

    def _turn_to(self, running: _Running) -> None:
        """From now on the process works on ``running``."""
        now = time.monotonic()
        if self._running is not None:
            self._book(self._running, now)
        self._running, running.since = running, now
        self._allow(self.options.stage_limit_s(running.stage))

    def _book(self, running: _Running, now: float) -> None:
        """Add the time since ``since`` to what the case has spent, unless its stage has a limit of its own."""
        if running.stage not in self.options.stage_limits_s:
            running.spent_s += now - running.since
        running.since = now

    def _stage(self, name: str) -> Stage | None:
        if self._running is None:
            return None
        self._book(self._running, time.monotonic())
        self._running.stage = name
        self._allow(self.options.stage_limit_s(name))
        return Stage(name)

    def _record(self, data: dict[str, Any]) -> Record:
        record = Record.from_json(data)
        if self._running is None or record.case.key != self._running.case.key:
            raise ValueError("record of a case whose turn it is not")
        record.case = self._running.case
        del self._open[record.case.key]
        self._running, self.progressed = None, True
        self._allow(self.options.case_timeout_s)
        return record

    def _watch(self) -> None:
        """Kill the worker if it takes too long or too much. Waiting for another's turn is not its own time."""
        before, self._watched = self._watched, time.monotonic()
        if self.waits():
            self._limit_end += self._watched - before
            if self._running:
                self._running.since += self._watched - before
        self.worker.limit_log()
        rss = self.worker.rss_bytes()
        if rss > self._memory_limit:
            share = f"{self.options.memory_fraction:.0%}"
            free = _size(self._memory_limit / self.options.memory_fraction)
            self._kill(
                OUT_OF_MEMORY, f"grew to {_size(rss)}, more than {share} of the {free} free: choose a smaller batch"
            )
        elif time.monotonic() > self._limit_end:
            self._kill(TIMED_OUT, f"took longer than {self._limit_s:g} s")
        elif self._running and self._own_time(self._running) > 2 * self.options.case_timeout_s:
            self._kill(TIMED_OUT, f"took longer than {2 * self.options.case_timeout_s:g} s in all")

    def _own_time(self, running: _Running) -> float:
        """Seconds in the case so far, beside others' turns and the stages that have limits of their own."""
        self._book(running, time.monotonic())
        return running.spent_s

    def _kill(self, status: str, why: str) -> None:
        if self.killed is None:
            self.killed = (status, why)
            self.worker.stop()

    def _obituary(self, running: _Running, code: int | None) -> Record:
        """The row of the case in which the worker died, with a reason a person can act on."""
        where = f"in stage {running.stage}" if running.stage != "start" else "at its start"
        if self.killed:
            status, why = self.killed[0], f"{self.killed[1]}, {where}"
        elif code == -signal.SIGKILL and oom_kills() > self._oom_before:
            status, why = OUT_OF_MEMORY, f"killed by the system for want of memory, {where}: choose a smaller batch"
        elif code is None:
            status, why = CRASHED, f"its process closed its event channel {where}"
        elif code < 0:
            status, why = CRASHED, f"its process was {describe_exit(code)} {where}"
        else:
            status, why = CRASHED, f"its process {describe_exit(code)} {where}"
        words = self.worker.last_words()
        record = Record(running.case, self.pass_index, status, f"{why}: {words}" if words else why)
        record.elapsed_s = time.monotonic() - running.started
        record.details = {"stage": running.stage, "exit_code": code, "log": self.worker.log.name}
        return record

    def why_barren(self) -> str:
        """One line on why this worker measured nothing."""
        code = self.worker.process.returncode
        if self.killed:
            how = self.killed[1]
        elif self.ended:
            how = "ended without a row"
        else:
            how = "hung up" if code is None else describe_exit(code)
        when = "" if self.ended else " before its first case" if self.ready else " before it was ready"
        words = self.worker.last_words()
        said = f": {words}" if words else ""
        return one_line(f"the measuring process {how}{when}{said} (see logs/{self.worker.log.name})", 500)


def _size(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"

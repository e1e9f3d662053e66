"""Runs the passes: starts measuring processes, survives their deaths, writes each result down before the next begins.

Torch-free. Each pass is a fresh process a device (and code variant). A case that kills, hangs or floods its process
gets a row that says so; a new process measures the rest as if it had not been there; later passes leave it out.
"""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from spikemark.harness import environment as env
from spikemark.harness.errors import NothingMeasured, UsageError
from spikemark.harness.locks import SHARED_DEVICE, DeviceLock
from spikemark.harness.plan import (
    RunOptions,
    RunResult,
    Variant,
    devices_of,
    environment_key,
    visit_order,
    worker_env,
    write_plan,
)
from spikemark.harness.process import Worker, WorkerCommand, one_line
from spikemark.harness.progress import Progress, Quiet, make_progress
from spikemark.harness.records import INCORRECT, OK, Case, Record
from spikemark.harness.runfolder import Run, RunFolder, StorageError, new_meta, now
from spikemark.harness.session import Calibration, Ready, Session, Stage, Started
from spikemark.harness.turns import Turnstile

__all__ = ["RunOptions", "RunResult", "Supervisor", "Variant", "WorkerFailed", "run"]

CODE_CHANGED = "code-changed"
ENVIRONMENT_CHANGED = "environment-changed"


class WorkerFailed(UsageError):
    """Measuring processes end before they measure anything; the message says how, and what they printed."""


class _Stop(Exception):
    """Leave all loops: the user asked for it."""


class Supervisor:
    """Measures ``cases`` into ``folder``. ``before`` is what an earlier part of the same run has measured."""

    def __init__(
        self,
        cases: Sequence[Case],
        options: RunOptions,
        worker_command: WorkerCommand,
        folder: RunFolder,
        before: Run | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.cases = list(cases)
        self.options = options
        self.folder = folder
        self.progress = progress if progress is not None else Quiet()
        self.interrupts = 0
        self._told = False
        self._command = worker_command
        self._resumed = set(folder.meta["environments"]) if before else set()
        self._done: set[tuple[str, str, int]] = set()
        self._failed: set[tuple[str, str]] = set()
        self._locks: dict[str, DeviceLock] = {}
        self._sessions: list[Session] = []
        self._turnstile: Turnstile | None = None
        self._remaining = 0
        self._began = time.monotonic()
        self._time = {"wall_s": 0.0, "kernel_s": 0.0, "torch_import_s": 0.0} | dict(folder.meta.get("time") or {})
        for record in before.records if before else []:
            self._note(record)

    def _note(self, record: Record) -> int:
        """Remember what a record settles; how many measurements that is: a failure settles its later passes too."""
        label, key = record.details.get("variant") or "", record.case.key
        self._done.add((label, key, record.pass_index))
        if record.status == OK or (label, key) in self._failed:
            return 1
        self._failed.add((label, key))
        return 1 + sum((label, key, p) not in self._done for p in range(self.options.passes))

    def _left(self, pass_index: int, device: str, variant: Variant) -> list[Case]:
        """Cases of this device still to measure in this pass, in visit order."""
        label = variant.label
        order = visit_order([c for c in self.cases if c.device == device], self.options.seed, pass_index)
        return [c for c in order if (label, c.key, pass_index) not in self._done and (label, c.key) not in self._failed]

    def _count_left(self) -> int:
        passes, devices = range(self.options.passes), devices_of(self.cases, self.options)
        return sum(len(self._left(p, d, v)) for p in passes for d in devices for v in self.options.variants)

    def run(self) -> bool:
        """Measure everything that is missing; whether it came to the end (False: interrupted).

        Raises ``StorageError`` (full disk), ``WorkerFailed`` (no process starts) and ``UsageError`` (environments that
        must not mix). In each case the folder keeps what was measured.
        """
        self._remaining = self._count_left()
        self.progress.begin(len(self._done) + self._remaining, len(self._done))
        with tempfile.TemporaryDirectory(prefix="spikemark-") as temporary, self._signals():
            try:
                for pass_index in range(self.options.passes):
                    for device in devices_of(self.cases, self.options):
                        self._measure(Path(temporary), pass_index, device)
            except _Stop:
                return False
            finally:
                self._release()
        return True

    def _measure(self, temporary: Path, pass_index: int, device: str) -> None:
        """One pass of one device; two variants side by side, taking turns burst by burst (see ``turns``)."""
        variants = self.options.variants
        if len(variants) == 1:
            deque(self._lane(temporary / "plan.json", pass_index, device, variants[0]), maxlen=0)
            return
        order = visit_order([c for c in self.cases if c.device == device], self.options.seed, pass_index)
        labels, seed = [v.label for v in variants], f"{self.options.seed} {pass_index} {device}"
        with Turnstile(temporary, labels, [c.key for c in order], seed) as self._turnstile:
            plans = [temporary / f"plan-{i}.json" for i in range(len(variants))]
            lanes = [self._lane(p, pass_index, device, v) for p, v in zip(plans, variants, strict=True)]
            try:
                for _ in zip_longest(*lanes):
                    pass
            finally:
                for lane in lanes:
                    lane.close()
                self._turnstile = None

    def _lane(self, plan: Path, pass_index: int, device: str, variant: Variant) -> Generator[None]:
        """One pass of one device and variant: as many processes as it takes. Yields when there is time for others."""
        number = barren = 0
        while pending := self._left(pass_index, device, variant):
            self._check_stop()
            write_plan(plan, pending, self.options, pass_index=pass_index, variant=variant, calibrate=number == 0)
            session = self._start(plan, pass_index, variant, pending)
            self._sessions.append(session)
            try:
                yield from self._listen(session, variant, number)
            finally:
                self._sessions.remove(session)
                session.worker.close()
            number += 1
            barren = 0 if session.progressed else barren + 1
            if barren == 2:  # once may be an accident, e.g. a machine short of memory
                raise WorkerFailed(session.why_barren())
        if self._turnstile is not None:
            self._turnstile.leave(variant.label)

    def _start(self, plan: Path, pass_index: int, variant: Variant, pending: list[Case]) -> Session:
        device = pending[0].device
        where = environment_key(device, variant)
        self.progress.case("starting", self._where(pass_index, where))
        try:
            log = _new_log(self.folder.path / "logs", f"pass{pass_index}-{where}")
            turns = self._turnstile.environment(variant.label) if self._turnstile else {}
            worker = Worker(self._command, plan, log, worker_env(device, variant) | turns)
        except OSError as error:
            raise WorkerFailed(f"cannot start a measuring process: {error.strerror or error}") from None
        session = Session(worker, pending, pass_index, self.options)
        if self._turnstile is not None:
            session.waits = partial(self._turnstile.waiting, variant.label)
        return session

    def _where(self, pass_index: int, environment: str) -> str:
        return f"pass {pass_index + 1}/{self.options.passes} {environment}"

    def _listen(self, session: Session, variant: Variant, number: int) -> Iterator[None]:
        """Follow one worker to its end and write down what it says."""
        device, pass_index = session.pending[0].device, session.pass_index
        key = environment_key(device, variant)
        label = {"variant": variant.label} if variant.label else {}
        shared, changed = False, list[str]()
        for message in session.follow(self._check_stop):
            match message:
                case None:
                    yield
                case Ready():
                    changed = self._check_environment(key, variant, message.environment)
                    self._time["torch_import_s"] += message.torch_import_s
                case Calibration():
                    own = {"pass_index": pass_index, "environment": key}
                    self.folder.append_calibration(message.line | own | label)
                case Started():
                    shared = bool(self._lock(key, device).others())
                    self.progress.case(message.case.key, self._where(pass_index, key))
                case Stage():
                    self.progress.stage(message.name)
                case Record():
                    message.pass_index, message.environment = pass_index, key
                    message.details |= {"worker": number} | label
                    _flag(message, shared or bool(self._lock(key, device).others()), changed)
                    self.folder.append(message)
                    self._time["kernel_s"] += float(message.details.get("kernel_s", 0.0))
                    self._remaining -= self._note(message)
                    self.progress.advance(left=self._remaining)
                    self._check_stop()

    def _check_environment(self, key: str, variant: Variant, found: dict[str, Any]) -> list[str]:
        """Store a device's environment. Names of fields that have changed since this run began to use it.

        Raises ``UsageError`` naming them if an earlier part of a resumed run was measured in another environment.
        """
        plugins = [*self.options.plugins, *variant.plugins]
        hashes = {Path(p).name: env.file_hash(Path(p)) for p in plugins}
        found["project"] = (found.get("project") or {}) | {"plugins": hashes}
        known = self.folder.meta["environments"].get(key)
        if known is None:
            self.folder.update(environments=self.folder.meta["environments"] | {key: found})
            return []
        different = env.differences(known, found, env.MUST_MATCH_IN_ONE_RUN)
        if different and key in self._resumed:
            what = env.describe_differences(different)
            raise UsageError(
                one_line(f"{self.folder.path.name} was measured in another environment, start a new run: {what}", 1000)
            )
        self._resumed.discard(key)
        return [name for name, _, _ in different]

    def _lock(self, key: str, device: str) -> DeviceLock:
        """This run's mark on the device: a GPU by its hashed UUID, since its index depends on CUDA_VISIBLE_DEVICES."""
        gpu = (self.folder.meta["environments"].get(key) or {}).get("gpu") or {}
        name = gpu.get("uuid_hash") or ("cpu" if device.startswith("cpu") else device)
        if name not in self._locks:
            self._release()
            self._locks[name] = DeviceLock(name)
        return self._locks[name]

    def _release(self) -> None:
        while self._locks:
            self._locks.popitem()[1].release()

    def times(self) -> dict[str, float]:
        """Where this run's seconds went so far, its earlier parts included: ``run.json``'s field ``time``.

        ``wall_s`` is from the first process's start on, ``kernel_s`` the part in kernels, ``torch_import_s`` what
        importing torch took in all processes. ``harness_share`` is what remains, as a fraction of ``wall_s``.
        """
        found = self._time | {"wall_s": self._time["wall_s"] + time.monotonic() - self._began}
        found["harness_share"] = 1 - (found["kernel_s"] + found["torch_import_s"]) / found["wall_s"]
        return {name: round(value, 4) for name, value in found.items()}

    def _check_stop(self) -> None:
        """Leave if asked to: after one interrupt when no session is in a case."""
        if self.interrupts and self._turnstile is not None:
            self._turnstile.finish_cases()
        in_case = any(s.in_case for s in self._sessions)
        if self.interrupts >= 2 or (self.interrupts == 1 and not in_case):
            raise _Stop
        if self.interrupts and not self._told:
            self._told = True
            self.progress.message("finishing the present comparison, then stopping; Ctrl-C again stops now")

    def _interrupt(self, number: int, frame: object) -> None:
        self.interrupts += 2 if number == signal.SIGTERM else 1

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C once: finish the case and stop. Twice, or SIGTERM: stop now. Workers get neither: own group."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {n: signal.signal(n, self._interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _flag(record: Record, shared: bool, changed: list[str]) -> None:
    """Mark a row measured beside another run, or after the code or the environment changed (fields ``changed``)."""
    flags = [SHARED_DEVICE] if shared else []
    if changed:
        record.details["changed"] = changed
        code = [name for name in changed if name.startswith("project.")]
        flags += ([CODE_CHANGED] if code else []) + ([ENVIRONMENT_CHANGED] if code != changed else [])
    record.flags = list(dict.fromkeys([*record.flags, *flags]))


def _new_log(folder: Path, stem: str) -> Path:
    """A log file name that is free: no run, resumed or not, overwrites what an earlier process printed."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in stem)
    folder.mkdir(exist_ok=True)
    taken = {p.name for p in folder.iterdir()}
    return folder / next(n for i in range(len(taken) + 1) if (n := f"{safe}-{i}.log") not in taken)


def run(
    cases: Sequence[Case],
    options: RunOptions,
    worker_command: WorkerCommand,
    argv: Sequence[str],
    progress: Progress | None = None,
) -> RunResult:
    """Measure ``cases`` into the folder ``options.out`` (or continue it) and finish the folder.

    Exit code: 0; 3 if a row is incorrect; 4 if no row is ok; 130 if interrupted. Raises ``NothingMeasured`` for no
    cases, ``UsageError`` for a folder that cannot be used, environments that must not mix, and (with everything
    measured so far kept and derived) for a disk that fills up or workers that do not start.
    """
    if not cases:
        raise NothingMeasured("nothing to measure: the selection matches no case")
    twice = [key for key, count in Counter(c.key for c in cases).items() if count > 1]
    if twice:
        raise ValueError(f"case {twice[0]} is planned twice: two results must never share a name")
    folder, before = _open(cases, options, argv)
    with progress or make_progress() as shown:
        supervisor = Supervisor(cases, options, worker_command, folder, before, shown)
        try:
            complete = supervisor.run()
        except (UsageError, StorageError):
            with suppress(StorageError):  # a full disk again: the journal is what matters, and it is closed whole
                _finish(folder, cases, interrupted=True, times=supervisor.times())
            raise
        finally:
            folder.close()
    return _result(_finish(folder, cases, interrupted=not complete, times=supervisor.times()), complete)


def _open(cases: Sequence[Case], options: RunOptions, argv: Sequence[str]) -> tuple[RunFolder, Run | None]:
    if not options.resume:
        meta = new_meta(list(argv), seed=options.seed, preset=options.preset, passes=options.passes, planned=len(cases))
        meta |= {"options": options.measuring(), "baselines": options.baselines}
        return RunFolder.create(options.out, meta), None
    folder, before = RunFolder.reopen(options.out)
    asked: dict[str, Any] = {"seed": options.seed, "preset": options.preset} | options.measuring()
    had: dict[str, Any] = {"seed": before.meta["seed"], "preset": before.meta["preset"]}
    had |= before.meta.get("options") or {}
    different = [(name, had[name], value) for name, value in asked.items() if name in had and had[name] != value]
    if different:
        folder.close()
        what = env.describe_differences(different)
        raise UsageError(f"{options.out} was measured with other options, resume it with the same: {what}")
    changes = {"interrupted": False, "ended": None, "passes": max(options.passes, before.meta["passes"])}
    folder.update(**changes, resumed=[*before.meta.get("resumed", []), now()])
    return folder, before


def _finish(folder: RunFolder, cases: Sequence[Case], interrupted: bool, times: dict[str, float]) -> Run:
    folder.close()
    measured = {record.case.key for record in RunFolder.load(folder.path).records}
    missing = [case.key for case in cases if case.key not in measured]
    planned = len(measured) + len(missing)
    return folder.finish(interrupted=interrupted, unmeasured=missing, planned=planned, time=times)


def _result(run: Run, complete: bool) -> RunResult:
    from spikemark.harness.statistics import status_counts, summarise

    counts = status_counts(row for label in run.variants or [""] for row in _rows(summarise, run, label))
    if not complete:
        code, message = 130, "interrupted: the folder is complete so far; continue it with --resume"
    elif counts.get(INCORRECT):
        code, message = 3, f"{counts[INCORRECT]} incorrect"
    elif not counts.get(OK):
        code, message = 4, "nothing was measured"
    else:
        code, message = 0, ""
    return RunResult(code, run.path, counts, message)


def _rows(summarise: Any, run: Run, label: str) -> list[dict[str, Any]]:
    return list(summarise(run.only_variant(label) if label else run))

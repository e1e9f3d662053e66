"""Runs the passes: starts measuring processes, survives their deaths, writes each result down before the next begins.

Torch-free. Each pass is a fresh process a device (and code variant); different GPUs are measured side by side (see
``devices``). A case that kills, hangs or floods its process gets a row that says so; a new process measures the rest as
if it had not been there; later passes leave it out. A GPU that is lost, or beside others a device whose processes do
not start, is given up: what it has not measured gets rows with that reason, which a resumed run measures anew.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from spikemark.harness import environment as env
from spikemark.harness import places
from spikemark.harness.devices import Machine, side_by_side
from spikemark.harness.errors import UsageError
from spikemark.harness.interrupts import TOLD, Interrupts
from spikemark.harness.locks import SHARED_DEVICE, DeviceLock
from spikemark.harness.plan import (
    RunOptions,
    RunResult,
    Variant,
    environment_key,
    worker_env,
    write_plan,
)
from spikemark.harness.process import Worker, WorkerCommand
from spikemark.harness.progress import Progress, Quiet
from spikemark.harness.records import CRASHED, ERROR, TIMED_OUT, UNAVAILABLE, UNMEASURED, Case, Record
from spikemark.harness.remaining import Remaining
from spikemark.harness.runfolder import Run, RunFolder
from spikemark.harness.runs import run
from spikemark.harness.session import TICK_S, Calibration, Ready, Session, Stage, Started
from spikemark.harness.turns import Turnstile

__all__ = ["RunOptions", "RunResult", "Supervisor", "Variant", "WorkerFailed", "run"]

SUSPECT = (CRASHED, TIMED_OUT, ERROR)
"""Statuses that a device which is gone may give a case."""
CODE_CHANGED = "code-changed"
ENVIRONMENT_CHANGED = "environment-changed"


class WorkerFailed(UsageError):
    """Measuring processes end before they measure anything; the message says how, and what they printed."""


class _Stop(Exception):
    """Leave all loops: the user asked for it."""


class _Idle(Exception):
    """Leave this device: the user asked for it, and it is in no case."""


class _Lost(Exception):
    """The device does not answer any more; the message says how that shows."""


class _Foreign(Exception):
    """The run that is continued measured this device in another environment; the message says what differs."""


class _Place:
    """A device in one pass: its processes, and the turnstile where two variants take turns."""

    def __init__(self, device: str, folder: Path, beside: int) -> None:
        self.device, self.folder, self.beside = device, folder, beside
        self.sessions: list[Session] = []
        self.turnstile: Turnstile | None = None
        folder.mkdir(exist_ok=True)

    @property
    def in_case(self) -> bool:
        """Whether one of the processes has begun a case and not ended it."""
        return any(session.in_case for session in self.sessions)


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
        machine: Machine | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """``names`` maps a device to the key of its environment in ``run.json``, where that is not its own name."""
        self.options = options
        self.left_to_others: list[str] = []
        self._names = dict(names or {})
        self.folder = folder
        self.progress = progress if progress is not None else Quiet()
        self.machine = machine if machine is not None else Machine()
        self.interrupts = Interrupts()
        self._told = False
        self._command = worker_command
        self._resumed = set(folder.meta["environments"]) if before else set()
        self._remaining = Remaining(cases, options, before.records if before else ())
        self._gone: dict[str, WorkerFailed | None] = {}
        self._foreign: dict[str, str] = {}
        self._locks: dict[str, DeviceLock] = {}
        self._began = time.monotonic()
        zero = {"wall_s": 0.0, "device_s": 0.0, "kernel_s": 0.0, "torch_import_s": 0.0}
        self._time = zero | dict(folder.meta.get("time") or {})

    def run(self) -> bool:
        """Measure everything that is missing; whether it came to the end (False: interrupted).

        Raises ``StorageError`` (full disk), ``WorkerFailed`` (no process starts) and ``UsageError`` (environments that
        must not mix). In each case the folder keeps what was measured.
        """
        done, devices = self._remaining.done, self._remaining.devices
        self.progress.begin(done + self._remaining.count(), done)
        with tempfile.TemporaryDirectory(prefix="spikemark-") as temporary, self.interrupts.heard():
            try:
                for pass_index in range(self.options.passes):
                    for wave in self.machine.waves(devices):
                        self._measure(Path(temporary), pass_index, wave)
            except _Stop:
                return False
            finally:
                self._release(())
        if self._foreign and set(self._foreign) == set(devices):
            raise UsageError(places.refusal(self.folder.path.name, next(iter(self._foreign.values()))))
        failures = [error for error in self._gone.values() if error is not None]
        if len(failures) == len(devices):
            raise failures[0]
        return True

    def _measure(self, temporary: Path, pass_index: int, wave: Sequence[str]) -> None:
        """One pass of some devices, side by side as far as the machine can feed them."""
        self._release(wave)

        def start(device: str) -> Generator[None]:
            return self._device(_Place(device, temporary / str(wave.index(device)), len(wave)), pass_index)

        side_by_side(wave, start, self.machine.fits)
        if self.interrupts.count and self._remaining.count():
            raise _Stop

    def _device(self, place: _Place, pass_index: int) -> Generator[None]:
        """One pass of one device, to its end or to the device's."""
        began = time.monotonic()
        try:
            yield from self._lanes(place, pass_index)
        except _Idle:
            return
        except _Foreign as foreign:
            self._leave(place.device, str(foreign))
        except _Lost as lost:
            self._give_up(place.device, UNAVAILABLE, str(lost), None)
        except WorkerFailed as error:
            if len(self._remaining.devices) == 1:
                raise
            self._give_up(place.device, ERROR, str(error), error)
        finally:
            self._time["device_s"] += time.monotonic() - began

    def _lanes(self, place: _Place, pass_index: int) -> Generator[None]:
        """One pass of one device; two variants side by side, taking turns burst by burst (see ``turns``)."""
        variants, device = self.options.variants, place.device
        if len(variants) == 1:
            yield from self._lane(place.folder / "plan.json", place, pass_index, variants[0])
            return
        order = self._remaining.order(device, pass_index)
        labels, seed = [v.label for v in variants], f"{self.options.seed} {pass_index} {device}"
        with Turnstile(place.folder, labels, [c.key for c in order], seed) as place.turnstile:
            plans = [place.folder / f"plan-{i}.json" for i in range(len(variants))]
            lanes = [self._lane(p, place, pass_index, v) for p, v in zip(plans, variants, strict=True)]
            try:
                for _ in zip_longest(*lanes):
                    yield
            finally:
                for lane in lanes:
                    lane.close()

    def _lane(self, plan: Path, place: _Place, pass_index: int, variant: Variant) -> Generator[None]:
        """One pass of one device and variant: as many processes as it takes. Yields when there is time for others."""
        number = barren = 0
        while pending := self._remaining.left(pass_index, place.device, variant):
            self._check_stop(place)
            write_plan(plan, pending, self.options, pass_index=pass_index, variant=variant, calibrate=number == 0)
            session = self._start(plan, place, pass_index, variant, pending)
            place.sessions.append(session)
            try:
                yield from self._listen(session, place, variant, number)
            finally:
                place.sessions.remove(session)
                session.worker.close()
            number += 1
            barren = 0 if session.progressed else barren + 1
            lost = "" if session.ended else self.machine.lost(place.device)
            if lost or session.worker.stuck:
                raise _Lost(lost or "its process cannot be ended: the driver does not answer")
            if barren == 2:  # once may be an accident, e.g. a machine short of memory
                raise WorkerFailed(session.why_barren())
        if place.turnstile is not None:
            place.turnstile.leave(variant.label)

    def _key(self, device: str, variant: Variant) -> str:
        name = environment_key(device, variant)
        return self._names.get(name, name)

    def _leave(self, device: str, what: str) -> None:
        """Measure nothing on a device whose environment is not the folder's; its cases stay unmeasured."""
        variants, passes = self.options.variants, range(self.options.passes)
        cases = {c.key for p in passes for v in variants for c in self._remaining.left(p, device, v)}
        key = self._key(device, variants[0])
        described = self.folder.meta["environments"].get(key) or {}
        self._foreign[device] = what
        self.left_to_others.append(places.left_line(key, described, len(cases), what))
        self._remaining.give_up(device)

    def _give_up(self, device: str, status: str, reason: str, error: WorkerFailed | None) -> None:
        """What the device has not measured gets a row with the reason; what it has measured in a pass stays."""
        self._gone[device] = error
        keys = [self._key(device, variant) for variant in self.options.variants]
        self.folder.update(lost=(self.folder.meta.get("lost") or {}) | dict.fromkeys(keys, reason))
        for variant, case in self._remaining.give_up(device):
            record = Record(case, 0, status, reason, environment=self._key(device, variant))
            record.details = {UNMEASURED: True} | ({"variant": variant.label} if variant.label else {})
            self.folder.append(record)
        self.progress.message(f"{device}: {reason}")

    def _start(self, plan: Path, place: _Place, pass_index: int, variant: Variant, pending: list[Case]) -> Session:
        device, turnstile = place.device, place.turnstile
        where = self._key(device, variant)
        self.progress.case("starting", self._where(pass_index, where))
        try:
            log = self.folder.new_log(f"pass{pass_index}-{where}")
            variables = worker_env(device, variant, self.machine.pins.get(device))
            variables |= turnstile.environment(variant.label) if turnstile else {}
            worker = Worker(self._command, plan, log, variables, self.machine.affinity(device))
        except OSError as error:
            raise WorkerFailed(f"cannot start a measuring process: {error.strerror or error}") from None
        session = Session(worker, pending, pass_index, self.options, TICK_S / place.beside)
        if turnstile is not None:
            session.waits = partial(turnstile.waiting, variant.label)
        return session

    def _where(self, pass_index: int, environment: str) -> str:
        return f"pass {pass_index + 1}/{self.options.passes} {environment}"

    def _listen(self, session: Session, place: _Place, variant: Variant, number: int) -> Iterator[None]:
        """Follow one worker to its end and write down what it says."""
        device, pass_index, check = place.device, session.pass_index, partial(self._check_stop, place)
        key = self._key(device, variant)
        label = {"variant": variant.label} if variant.label else {}
        shared, changed = False, list[str]()
        for message in session.follow(check):
            match message:
                case None:
                    yield
                case Ready():
                    self._check_pin(device, message.environment)
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
                    if message.status in SUSPECT and (lost := self.machine.lost(device)):
                        raise _Lost(lost)  # not the kernel's fault, as far as can be told
                    _flag(message, shared or bool(self._lock(key, device).others()), changed)
                    self.folder.append(message)
                    self._time["kernel_s"] += float(message.details.get("kernel_s", 0.0))
                    self._remaining.note(message)
                    self.progress.advance(left=self._remaining.count())
                    check()

    def _check_pin(self, device: str, found: dict[str, Any]) -> None:
        """Raise ``WorkerFailed`` if a process is on another GPU than the one that its rows are to be of."""
        pin, gpu = self.machine.pins.get(device), found.get("gpu") or {}
        if pin and gpu.get("uuid_hash", pin.hash) != pin.hash:
            raise WorkerFailed(f"the measuring process of {device} finds itself on another GPU")

    def _check_environment(self, key: str, variant: Variant, found: dict[str, Any]) -> list[str]:
        """Store a device's environment. Names of fields that have changed since this run began to use it.

        Raises ``_Foreign`` naming them if an earlier part of a resumed run was measured in another environment.
        """
        found = places.with_plugins(found, [*self.options.plugins, *variant.plugins])
        known = self.folder.meta["environments"].get(key)
        if known is None:
            self.folder.update(environments=self.folder.meta["environments"] | {key: found})
            return []
        different = env.differences(known, found, env.MUST_MATCH_IN_ONE_RUN)
        if different and key in self._resumed:
            raise _Foreign(env.describe_differences(different))
        self._resumed.discard(key)
        return [name for name, _, _ in different]

    def _lock(self, key: str, device: str) -> DeviceLock:
        """This run's mark on the device: a GPU by its hashed UUID, since its index depends on CUDA_VISIBLE_DEVICES."""
        gpu = (self.folder.meta["environments"].get(key) or {}).get("gpu") or {}
        name = gpu.get("uuid_hash") or ("cpu" if device.startswith("cpu") else device)
        if device not in self._locks:
            self._locks[device] = DeviceLock(name)
        return self._locks[device]

    def _release(self, keep: Collection[str]) -> None:
        """Take this run's mark away from all devices but ``keep``."""
        for device in [d for d in self._locks if d not in keep]:
            self._locks.pop(device).release()

    def times(self) -> dict[str, float]:
        """Where this run's seconds went so far, its earlier parts included: ``run.json``'s field ``time``.

        ``wall_s`` is from the first process's start on, ``kernel_s`` the part in kernels, ``torch_import_s`` what
        importing torch took in all processes. ``device_s`` adds up devices, measured side by side or not;
        ``harness_share`` is what remains of it, as a fraction.
        """
        found = self._time | {"wall_s": self._time["wall_s"] + time.monotonic() - self._began}
        busy = max(found["wall_s"], found["device_s"])
        found["harness_share"] = 1 - (found["kernel_s"] + found["torch_import_s"]) / busy
        return {name: round(value, 4) for name, value in found.items()}

    def _check_stop(self, place: _Place) -> None:
        """Leave if asked to: after one interrupt the device as soon as it is in no case."""
        if self.interrupts.count and place.turnstile is not None:
            place.turnstile.finish_cases()
        if self.interrupts.count >= 2:
            raise _Stop
        if self.interrupts.count == 1 and not place.in_case:
            raise _Idle
        if self.interrupts.count and not self._told:
            self._told = True
            self.progress.message(TOLD)


def _flag(record: Record, shared: bool, changed: list[str]) -> None:
    """Mark a row measured beside another run, or after the code or the environment changed (fields ``changed``)."""
    flags = [SHARED_DEVICE] if shared else []
    if changed:
        record.details["changed"] = changed
        code = [name for name in changed if name.startswith("project.")]
        flags += ([CODE_CHANGED] if code else []) + ([ENVIRONMENT_CHANGED] if code != changed else [])
    record.flags = list(dict.fromkeys([*record.flags, *flags]))

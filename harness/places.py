"""Which environments of a run folder that is continued are this machine's, and which are left to others. Torch-free.

A folder that was merged may have several environments of one device: ``cpu``, ``cpu (2)``. Then a measuring process of
that device is asked what its environment is, before anything is planned: only what is missing in the environment that
matches is measured. Where there is one environment of a device, the process that measures finds out if it matches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spikemark.harness import environment as env
from spikemark.harness.devices import Machine
from spikemark.harness.errors import UsageError
from spikemark.harness.parts import base_key
from spikemark.harness.plan import RunOptions, Variant, devices_of, worker_env, write_plan
from spikemark.harness.process import Worker, WorkerCommand, one_line
from spikemark.harness.records import OK, UNMEASURED, Case
from spikemark.harness.runfolder import Run
from spikemark.harness.session import Ready, Session


@dataclass
class Here:
    """What of a continued run is this machine's: ``cases`` to measure, and what ``before`` it has measured of them.

    ``names`` maps a device to the key of its environment in ``run.json`` where there are several. ``left`` are lines on
    what is left to other machines.
    """

    cases: list[Case]
    before: Run | None
    names: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def here(
    cases: Sequence[Case], options: RunOptions, before: Run | None, command: WorkerCommand, machine: Machine
) -> Here:
    """This machine's part of continuing ``before``. Raises ``UsageError`` naming what differs if it has none."""
    found = Here(list(cases), before)
    if before is None or len(options.variants) > 1:
        return found
    strange: dict[str, str] = {}
    for device in devices_of(cases, options):
        known = {k: d for k, d in before.meta["environments"].items() if base_key(k) == device}
        lacking = {key: _lacking(cases, device, key, before, options.passes) for key in known}
        some = next((case for of_key in lacking.values() for case in of_key), None)
        if len(known) < 2 or some is None:
            continue
        told = ask(command, options, device, machine, some)
        if told is None:
            continue  # its process does not start: the supervisor says why
        differing = {k: env.differences(d, told, env.MUST_MATCH_IN_ONE_RUN) for k, d in known.items()}
        mine = next((key for key, fields in differing.items() if not fields), None)
        if mine is None:
            strange[device] = env.describe_differences(min(differing.values(), key=len))
        else:
            found.names[device] = mine
        found.left += [left_line(key, known[key], len(n)) for key, n in lacking.items() if n and key != mine]
    if strange and set(strange) == {case.device for case in cases}:
        raise UsageError(refusal(before.path.name, next(iter(strange.values()))))
    names = found.names
    records = [r for r in before.records if r.environment == names.get(r.case.device, r.environment)]
    found.cases = [case for case in cases if case.device not in strange]
    found.before = replace(before, records=records)
    return found


def refusal(name: str, what: str) -> str:
    """Why a run is not continued here, in one line."""
    return one_line(f"{name} was measured in another environment, start a new run: {what}", 1000)


def left_line(key: str, described: dict[str, Any], count: int, what: str = "") -> str:
    """One line on ``count`` cases of an environment that another machine must measure."""
    name = described.get("device_name") or "another machine"
    text = f"left to others: {count} {'case' if count == 1 else 'cases'} of {key} ({name})"
    return one_line(f"{text}, whose environment is another: {what}" if what else text, 500)


def _lacking(cases: Sequence[Case], device: str, key: str, before: Run, passes: int) -> list[Case]:
    """Cases of ``device`` that were not measured to the end in the environment ``key``."""
    done: dict[str, set[int]] = {}
    for record in before.records:
        if record.environment == key and not record.details.get(UNMEASURED):
            settled = [record.pass_index] if record.status == OK else range(passes)
            done.setdefault(record.case.key, set()).update(settled)
    return [case for case in cases if case.device == device and len(done.get(case.key, ())) < passes]


def ask(
    command: WorkerCommand, options: RunOptions, device: str, machine: Machine, case: Case
) -> dict[str, Any] | None:
    """The environment that a measuring process of ``device`` finds itself in; None if it does not come so far."""
    with tempfile.TemporaryDirectory(prefix="spikemark-") as temporary:
        plan, log = Path(temporary, "plan.json"), Path(temporary, "log")
        write_plan(plan, [case], options, pass_index=0, variant=Variant(), calibrate=False)
        variables = worker_env(device, Variant(), machine.pins.get(device))
        try:
            worker = Worker(command, plan, log, variables, machine.affinity(device))
        except OSError:
            return None
        session = Session(worker, [case], 0, options)
        try:
            for message in session.follow(lambda: None):
                if isinstance(message, Ready):
                    return with_plugins(message.environment, options.plugins)
        finally:
            worker.close()
    return None


def with_plugins(found: dict[str, Any], plugins: Sequence[str]) -> dict[str, Any]:
    """``found``, an environment, with the hashes of the plug-in files that are measured in it."""
    hashes = {Path(p).name: env.file_hash(Path(p)) for p in plugins}
    return found | {"project": (found.get("project") or {}) | {"plugins": hashes}}

"""A run from its first line to its last: opens the folder or continues it, has it measured, and finishes it.

Torch-free. ``supervisor`` measures on this machine; an engine (``engines``) has other machines do so. Both share the
ends of a run, which are here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from spikemark.harness import devices, parts, places
from spikemark.harness import environment as env
from spikemark.harness.errors import NothingMeasured, UsageError
from spikemark.harness.plan import RunOptions, RunResult, devices_of
from spikemark.harness.process import WorkerCommand
from spikemark.harness.progress import Progress, make_progress
from spikemark.harness.records import INCORRECT, OK, Case
from spikemark.harness.runfolder import Run, RunFolder, StorageError, new_meta, now


def run(
    cases: Sequence[Case],
    options: RunOptions,
    worker_command: WorkerCommand,
    argv: Sequence[str],
    progress: Progress | None = None,
    machine: devices.Machine | None = None,
) -> RunResult:
    """Measure ``cases`` into the folder ``options.out`` (or continue it) and finish the folder.

    ``machine`` stands in for this one's devices. Exit code: 0; 3 if a row is incorrect; 4 if no row is ok; 130 if
    interrupted. Raises ``NothingMeasured`` for no cases, ``UsageError`` for a folder that cannot be used, environments
    that must not mix, and (with everything measured so far kept and derived) for a disk that fills up or workers that
    do not start.
    """
    from spikemark.harness.supervisor import Supervisor

    check(cases)
    machine = machine or devices.here(devices_of(cases, options))
    folder, before = open_folder(cases, options, argv)
    with progress or make_progress() as shown:
        times, names = dict[str, float](), dict[str, str]()
        try:
            mine = places.here(cases, options, before, worker_command, machine)
            names = mine.names
            supervisor = Supervisor(mine.cases, options, worker_command, folder, mine.before, shown, machine, names)
            try:
                complete = supervisor.run()
            finally:
                times = supervisor.times()
        except (UsageError, StorageError):
            with suppress(StorageError):  # a full disk again: the journal is what matters, and it is closed whole
                finish(folder, cases, interrupted=True, times=times or folder.meta.get("time") or {}, names=names)
            raise
        finally:
            folder.close()
    done = finish(folder, cases, interrupted=not complete, times=times, names=names)
    return result(done, complete, [*mine.left, *supervisor.left_to_others])


def check(cases: Sequence[Case]) -> None:
    """Raise ``NothingMeasured`` for no cases; two of one name are a fault of the caller's."""
    if not cases:
        raise NothingMeasured("nothing to measure: the selection matches no case")
    twice = [key for key, count in Counter(c.key for c in cases).items() if count > 1]
    if twice:
        raise ValueError(f"case {twice[0]} is planned twice: two results must never share a name")


def open_folder(cases: Sequence[Case], options: RunOptions, argv: Sequence[str]) -> tuple[RunFolder, Run | None]:
    """The folder to write to, and what it holds already if it is continued. ``UsageError`` if it does not fit."""
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
    # Devices of this machine may be back; whether those of other machines are, an engine finds out.
    lost = {key: why for key, why in (before.meta.get("lost") or {}).items() if "@" in key}
    changes = {"interrupted": False, "ended": None, "passes": max(options.passes, before.meta["passes"]), "lost": lost}
    folder.update(**changes, resumed=[*before.meta.get("resumed", []), now()])
    return folder, before


def finish(
    folder: RunFolder,
    cases: Sequence[Case],
    interrupted: bool,
    times: dict[str, float],
    names: Mapping[str, str] | None = None,
) -> Run:
    """Say in the folder how the run ended and which cases have no row, and derive what is derived.

    Of ``cases`` those count that were measured in the environment that ``names`` has for their device. What an earlier
    part of the run, or a part it was merged from, was to measure and nobody has is still missing.
    """
    folder.close()
    run = RunFolder.load(folder.path)
    rows = {(record.case.key, record.environment) for record in run.records}
    measured, asked = {key for key, _ in rows}, {case.key for case in cases}
    named = dict(names or {})
    missing = [
        case.key
        for case in cases
        if not ((case.key, named[case.device]) in rows if case.device in named else case.key in measured)
    ]
    earlier = [key for key in run.meta["unmeasured"] if key not in measured and key not in asked]
    missing = list(dict.fromkeys([*missing, *earlier, *parts.missing(run)]))
    planned = len(rows) + len(missing)
    return folder.finish(interrupted=interrupted, unmeasured=missing, planned=planned, time=times)


def result(run: Run, complete: bool, left: Sequence[str] = ()) -> RunResult:
    """Exit code and last words of a finished run; ``left`` are lines on what is left to other machines."""
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
    lost = [f"{where}: {why}" for where, why in (run.meta.get("lost") or {}).items()]
    return RunResult(code, run.path, counts, "\n".join(filter(None, [message, *lost, *left])))


def _rows(summarise: Any, run: Run, label: str) -> list[dict[str, Any]]:
    return list(summarise(run.only_variant(label) if label else run))

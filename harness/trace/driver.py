"""Runs Nsight round one process a case; for the supervisor it is a measuring process like any other (``session``).

``python -m spikemark.harness.trace.driver PLAN EVENTS_FD TRACES CALLS SETTINGS``, with SETTINGS a JSON object of
``tool`` (nsys or ncu), ``program``, ``limit_s`` and, for ncu, ``metrics``. Torch-free: the traced process imports it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spikemark.harness.errors import UsageError
from spikemark.harness.journal import StorageError, storage_error
from spikemark.harness.process import log_position
from spikemark.harness.records import CRASHED, ERROR, OK, TIMED_OUT, Case, Record
from spikemark.harness.trace import ncu, nsys, summary, target, tools
from spikemark.harness.trace.summary import TraceSummary
from spikemark.harness.trace.worker import Channel

SUFFIXES = {"nsys": ".nsys-rep", "ncu": ".ncu-rep"}
READ_LIMIT_S = 300.0


class Failed(Exception):
    """A case without a trace: ``status`` and a one-line reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def commands(case: Case, settings: dict[str, Any], folder: Path, plan: Path) -> list[list[str]]:
    """What would be run for a case, in order: collecting, and what reads the report back."""
    tool, program = settings["tool"], settings["program"]
    report = folder / f"{summary.stem(case.key)}{SUFFIXES[tool]}"
    if tool == "nsys":
        collect = nsys.profile_command(program, case, report, tools.target_command(plan))
        return [collect, nsys.export_command(program, report, report.with_suffix(".sqlite"))]
    metrics = settings.get("metrics") or ncu.METRICS
    return [ncu.profile_command(program, report, tools.target_command(plan), metrics), ncu.csv_command(program, report)]


def trace(
    case: Case, plugins: list[str], folder: Path, calls: int, settings: dict[str, Any], stage: Callable[[str], None]
) -> TraceSummary:
    """Collect and read back one case; the report stays in ``folder``. Raises ``Failed``, also after partial output."""
    tool, limit_s = settings["tool"], float(settings["limit_s"])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="spikemark-trace-") as temporary:
        how = nsys.capture(case) if tool == "nsys" else "call"
        plan, outcome = target.write_plan(Path(temporary), case, plugins, calls, how)
        collect, back = commands(case, settings, folder, plan)
        report = folder / f"{summary.stem(case.key)}{SUFFIXES[tool]}"
        # An older trace goes with what was read of it: stopped half-way, no page may describe a file that is gone.
        for old in (summary.path(folder, tool, case.key), report.with_suffix(".sqlite"), report):
            old.unlink(missing_ok=True)
        stage("profile")
        ended = tools.run(collect, limit_s)
        said = target.read_outcome(outcome)
    if said is not None and said["status"] != OK:
        report.unlink(missing_ok=True)
        raise Failed(str(said["status"]), str(said["reason"]))
    problem = ended.problem(tool, limit_s)
    there = report.is_file() and report.stat().st_size > 0
    if not there or said is None or ended.code is None:
        kept = f" (what it wrote is kept: {report.name})" if there else ""
        status = TIMED_OUT if ended.code is None else CRASHED if said is None and not problem else ERROR
        if not problem:
            died = "the traced process ended before its calls did" if said is None else ""
            problem = died or f"{tools.NAMES[tool]} ({tool}) wrote no report" + _advised(ended)
        raise Failed(status, problem + kept)
    stage("read")
    try:
        found = (_read_nsys if tool == "nsys" else _read_ncu)(case, report, back, calls)
    except UsageError as error:
        reason = problem or str(error)
        raise Failed(ERROR, f"{reason} (what it wrote is kept: {report.name})") from None
    if problem:
        found.notes.append(problem)
    found.ideal_bytes, found.moved_bytes = said.get("ideal_bytes"), said.get("moved_bytes")
    what = {"nsys": "Nsight Systems report", "ncu": "Nsight Compute report"}[tool]
    found.files.insert(0, {"name": report.name, "what": what})
    return found


def _advised(ended: tools.Outcome) -> str:
    advice = ended.advice()
    return f": {advice}" if advice else ""


def _read_nsys(case: Case, report: Path, export: list[str], calls: int) -> TraceSummary:
    """Export as SQLite and read it."""
    database = report.with_suffix(".sqlite")
    database.unlink(missing_ok=True)
    ended = tools.run(export, READ_LIMIT_S)
    if not database.is_file():
        problem = ended.problem("nsys", READ_LIMIT_S) or "Nsight Systems (nsys) exported nothing"
        raise UsageError(problem)
    found = nsys.summarise_case(database, case.key)
    if found.calls != calls:
        found.notes.append(f"{found.calls} of {calls} calls are in the trace")
    found.files = [{"name": database.name, "what": "its SQLite export"}]
    return found


def _read_ncu(case: Case, report: Path, table: list[str], calls: int) -> TraceSummary:
    """Read the report with NVIDIA's package, or let ncu print it."""
    if ncu.package():
        return ncu.summarise(ncu.read_report(report), case.key, calls)
    ended = tools.run(table, READ_LIMIT_S)
    if ended.code != 0:
        raise UsageError(ended.problem("ncu", READ_LIMIT_S))
    return ncu.summarise(ncu.parse_csv(ended.text, f"ncu --import {report.name}"), case.key, calls)


def main(arguments: list[str]) -> int:
    """Trace the plan's cases in its order."""
    plan_path, descriptor, folder, calls, text = arguments
    channel, settings = Channel(int(descriptor)), json.loads(text)
    plan = json.loads(Path(plan_path).read_text(encoding="utf-8"))
    channel.say("ready", environment={"device": plan["device"]})
    for index, data in enumerate(plan["cases"]):
        case = Case.from_json(data)
        channel.say("start", index=index, key=case.key, log=log_position())
        record = Record(case, plan["pass_index"], OK, environment=plan["environment"], started_s=time.time())

        def stage(name: str, index: int = index) -> None:
            channel.say("stage", index=index, stage=name)

        try:
            found = trace(case, plan.get("plugins", []), Path(folder), int(calls), settings, stage)
            summary.write(Path(folder), found)
        except Failed as failed:
            record.status, record.reason = failed.status, " ".join(failed.reason.split())[:600]
        except StorageError as error:
            record.status, record.reason = ERROR, str(error)
        except OSError as error:
            record.status, record.reason = ERROR, str(storage_error(Path(folder), error))
        record.elapsed_s = time.time() - record.started_s
        channel.say("record", index=index, record=record.to_json())
    channel.say("end")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

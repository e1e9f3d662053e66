"""``spikemark profile``: why is it slow? Traces of the selected cases, in a run folder and its report.

``--out`` may be a run that exists: its report then links each row to its traces. A new folder first gets one measured
pass, so that the report has times that no profiler has slowed down.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spikemark.commands import arguments as shared
from spikemark.commands import run as running
from spikemark.commands import terminal
from spikemark.harness.errors import NothingMeasured, UsageError
from spikemark.harness.records import INCORRECT, OK, Case, Record

if TYPE_CHECKING:
    from spikemark.harness.trace.summary import TraceSummary

EXIT_INCORRECT, EXIT_NOTHING, EXIT_INTERRUPTED = 3, 4, 130
GRACE_S = 330.0  # beside the tool's own limit: export and reading
READING = ("--from", "--out", "--tool")
MERGED = "all.torch.json.gz"


def run(arguments: argparse.Namespace) -> int:
    """Trace the selected cases; prints a line a case and, last, the path of report.html."""
    from spikemark.reports import html

    if arguments.from_file is not None:
        return _read_back(arguments)
    command, settings = _tool(arguments)
    cases = shared.cases(arguments, _elsewhere(arguments))
    _refuse(cases, arguments)
    out = Path(arguments.out or f"runs/{datetime.now():%Y%m%d-%H%M%S}-profile")
    traces = out / "traces"
    if arguments.dry_run:
        print(_commands(cases, arguments, settings, traces))
        return 0
    measured, stopped = _measure(cases, arguments, out)
    if stopped:
        return _interrupted(out, 0, len(cases))
    chosen = [case for case in cases if measured.get(case.key, OK) == OK]
    if not chosen:
        html.write([out], None)
        raise NothingMeasured(f"no case can be traced: {_first_reason(out)} (all reasons are in {out / 'report.html'})")
    records, stopped = _trace(chosen, arguments, command, traces)
    found = _summaries(records, traces, arguments.tool)
    if arguments.tool == "torch":
        _merge(found, traces)
    print(_table(found))
    failed = Counter(status for status in measured.values() if status != OK)
    if failed:
        said = ", ".join(f"{n} {status}" for status, n in failed.items())
        print(f"not traced: {said} (reasons in the report)")
    if stopped:
        return _interrupted(out, len(found), len(chosen))
    print(html.write([out], None))
    statuses = {record.status for record in records} | set(measured.values())
    return EXIT_INCORRECT if INCORRECT in statuses else 0 if any(s.status == OK for s in found) else EXIT_NOTHING


def _interrupted(out: Path, traced: int, planned: int) -> int:
    """The report as far as it got; what is missing needs no option to be continued."""
    from spikemark.reports import html

    print(html.write([out], None))
    print(f"interrupted: {traced} of {planned} cases were traced", file=sys.stderr)
    return EXIT_INTERRUPTED


def _tool(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """What makes the command line of a tracing process, and the tool's settings. ``UsageError`` if it is absent."""
    calls = str(arguments.calls)
    folder = "traces"
    options = {"--metrics": "ncu", "--nsys": "nsys", "--ncu": "ncu"}
    for option, tool in options.items():
        if getattr(arguments, option[2:]) and arguments.tool != tool:
            raise UsageError(f"{option} is for --tool {tool}")
    if arguments.tool == "torch":
        module = "spikemark.harness.trace.worker"
        return lambda plan, events: [sys.executable, "-m", module, str(plan), str(events), folder, calls], {}
    settings: dict[str, Any] = {
        "tool": arguments.tool,
        "program": _program(arguments),
        "limit_s": arguments.time_limit,
        "metrics": arguments.metrics,
    }
    module, text = "spikemark.harness.trace.driver", json.dumps(settings)
    return lambda plan, events: [sys.executable, "-m", module, str(plan), str(events), folder, calls, text], settings


def _elsewhere(arguments: argparse.Namespace) -> list[str] | None:
    """Devices whose commands are only shown, so that they need not be here; None: they must be."""
    from spikemark.suites import selection

    if not arguments.dry_run or not arguments.devices or "all" in arguments.devices:
        return None
    selection.check_names(arguments.devices)
    return ["cuda:0" if name == "cuda" else name for name in arguments.devices]


def _program(arguments: argparse.Namespace) -> str:
    """The tool to start. Commands that are only shown may be meant for another machine: there its name will do."""
    from spikemark.harness.trace import tools

    given = getattr(arguments, arguments.tool)
    try:
        return tools.find(arguments.tool, given)
    except UsageError:
        if not arguments.dry_run:
            raise
        return str(given or arguments.tool)


def _refuse(cases: Sequence[Case], arguments: argparse.Namespace) -> None:
    on_cpu = [case for case in cases if not case.device.startswith("cuda")]
    if arguments.tool == "ncu" and on_cpu:
        raise UsageError(f"Nsight Compute profiles CUDA kernels only, not {on_cpu[0].device}: choose --device cuda")


def _commands(cases: Sequence[Case], arguments: argparse.Namespace, settings: dict[str, Any], traces: Path) -> str:
    """The commands that would be run, quoted for a shell; PLAN stands for a file that says what one process does."""
    from spikemark.harness.trace import driver

    lines = []
    if arguments.tool == "torch":
        command, _ = _tool(arguments)
        lines.append(f"# torch.profiler, {arguments.calls} calls a case, {len(cases)} cases, into {traces}")
        lines += [f"#   {case.key}" for case in cases]
        lines.append(shlex.join(_placed(command("PLAN", "EVENTS"), traces)))
    for case in cases if settings else []:
        lines.append(f"# {case.key}")
        lines += [shlex.join(words) for words in driver.commands(case, settings, traces, Path("PLAN"))]
    return "\n".join(lines)


def _placed(words: list[str], traces: Path) -> list[str]:
    return [str(traces) if word == "traces" else word for word in words]


def _measure(cases: Sequence[Case], arguments: argparse.Namespace, out: Path) -> tuple[dict[str, str], bool]:
    """Statuses by key of a run that exists, or of one measured pass into a new folder; whether it was interrupted."""
    from spikemark.harness import supervisor
    from spikemark.harness.runfolder import RunFolder

    if (out / "run.json").is_file():
        wanted = {case.key for case in cases}
        _writable(out / "traces")
        return {r.case.key: r.status for r in RunFolder.load(out).records if r.case.key in wanted}, False
    options = replace(running.options(arguments, cases, out), passes=1)
    result = supervisor.run(cases, options, running.worker_command(), arguments.argv)
    stopped = result.exit_code == EXIT_INTERRUPTED
    return {record.case.key: record.status for record in RunFolder.load(out).records}, stopped


def _writable(traces: Path) -> None:
    """Make the folder and try it: minutes of tracing that nobody can write down are too late to say so."""
    from spikemark.harness.journal import storage_error

    try:
        traces.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=traces):
            pass
    except OSError as error:
        raise storage_error(traces, error) from None


def _first_reason(out: Path) -> str:
    from spikemark.harness.runfolder import RunFolder

    failed = [r for r in RunFolder.load(out).records if r.status != OK]
    return f"{failed[0].status}, {failed[0].reason}" if failed else "nothing was measured"


def _trace(
    cases: Sequence[Case], arguments: argparse.Namespace, command: Any, traces: Path
) -> tuple[list[Record], bool]:
    """Trace under supervision: a kernel that kills or hangs its process costs its own trace only.

    The records of the cases that were tried, and whether a person stopped it before the others.
    """
    from spikemark.harness import supervisor
    from spikemark.harness.runfolder import RunFolder

    where = traces.resolve()
    with tempfile.TemporaryDirectory(prefix="spikemark-profile-") as folder:
        options = replace(
            running.options(arguments, cases, Path(folder) / "run"),
            passes=1,
            case_timeout_s=arguments.time_limit + (0 if arguments.tool == "torch" else GRACE_S),
        )
        result = supervisor.run(cases, options, lambda plan, fd: _placed(command(plan, fd), where), arguments.argv)
        records = RunFolder.load(options.out).records
        for log in sorted((options.out / "logs").glob("*")):
            if log.stat().st_size:
                _keep_log(log, traces.parent / "logs", arguments.tool)
    order = {case.key: i for i, case in enumerate(cases)}
    stopped = result.exit_code == EXIT_INTERRUPTED
    return sorted(records, key=lambda record: order[record.case.key]), stopped


def _keep_log(log: Path, logs: Path, tool: str) -> None:
    logs.mkdir(exist_ok=True)
    names = (logs / f"profile-{tool}-{i}.log" for i in range(100_000))
    shutil.copyfile(log, next(name for name in names if not name.exists()))


def _summaries(records: Sequence[Record], traces: Path, tool: str) -> list[TraceSummary]:
    """What was found of each case; a case without a trace gets a summary that says why."""
    from spikemark.harness.trace import summary

    for record in records:
        if record.status != OK:
            failed = summary.TraceSummary(tool, record.case.key, status=record.status, reason=record.reason)
            summary.write(traces, failed)
    place = {record.case.key: i for i, record in enumerate(records)}
    found = [s for s in summary.read_all(traces)[0] if s.tool == tool and s.key in place]
    return sorted(found, key=lambda s: place[s.key])


def _merge(found: Sequence[TraceSummary], traces: Path) -> None:
    """One trace of the whole selection, each case a group of its own."""
    from spikemark.harness.trace import chrome

    files = [(s.key, traces / s.files[0]["name"]) for s in found if s.status == OK and s.files]
    if files:
        chrome.save(traces / MERGED, chrome.merge([(key, chrome.load(path)) for key, path in files]))


def _read_back(arguments: argparse.Namespace) -> int:
    """``--from FILE``: what an export made elsewhere says; with ``--out RUN`` its report shows it as well."""
    from spikemark.harness.runfolder import RunFolder
    from spikemark.harness.trace import nsys, summary

    given = [word.split("=")[0] for word in arguments.argv if word.startswith("--")]
    odd = next((word for word in given if word not in READING), None) or (
        f"--tool {arguments.tool}" if "--tool" in given and arguments.tool != "nsys" else None
    )
    if odd:
        raise UsageError(f"--from reads a file that Nsight Systems exported and traces nothing: {odd} has no use there")
    path = Path(arguments.from_file)
    out = None if arguments.out is None else RunFolder.load(arguments.out).path
    if out is not None:
        _writable(out / "traces")
    found = nsys.summarise_file(path)
    print("\n\n".join(_details(one) for one in found))
    if out is None:
        return 0
    from spikemark.reports import html

    if path.resolve().parent != (out / "traces").resolve():
        shutil.copyfile(path, out / "traces" / path.name)
    for one in found:
        summary.write(out / "traces", one)
    print(html.write([out], None))
    return 0


def _table(found: Sequence[TraceSummary]) -> str:
    """A line a case: where its time went."""
    from spikemark.reports import words

    rows = []
    for one in found:
        first = one.kernels[0] if one.kernels else {"name": "", "total_s": None}
        total = sum(row["total_s"] for row in one.kernels)
        share = f"{first['total_s'] / total:.0%} {first['name']}" if total else ""
        free = "" if one.not_in_kernels is None else f"{one.not_in_kernels:.0%}"
        per_call = "" if not one.calls or one.wall_s is None else words.seconds(one.wall_s / one.calls)
        size = "" if one.measured_bytes is None else words.size(one.measured_bytes)
        rows.append([one.key, one.status, per_call, free, size, share or one.reason])
    unit = "operators" if found and found[0].unit == "operator" else "kernels"
    header = ["Case", "Trace", "Call, traced", f"Not in {unit}", "DRAM bytes", f"Most of the {unit}' time, or why not"]
    return terminal.table(header, rows, right=[2, 3, 4])


def _details(one: TraceSummary) -> str:
    """Everything a summary holds, for a terminal."""
    from spikemark.reports import words

    lines = [one.key or one.title]
    if one.wall_s is not None:
        over = f" over {one.calls} calls" if one.calls else ""
        free = "" if one.not_in_kernels is None else f", {one.not_in_kernels:.1%} of it without a running kernel"
        lines.append(f"{words.seconds(one.wall_s)}{over}{free}")
    for title, rows in (("Kernels", one.kernels), ("Copies", one.copies), ("In no measured range", one.outside)):
        if rows:
            table = [[r["name"], r["count"], words.seconds(r["total_s"]), _optional(r, "launch_s")] for r in rows]
            lines += ["", terminal.table([title, "Count", "Time", "After launch"], table, right=[1, 2, 3])]
    if one.ranges:
        table = [
            [r["name"], r["kind"], r["count"], words.seconds(r["total_s"]), r["kernels"], _optional(r, "kernel_s")]
            for r in one.ranges
        ]
        header = ["NVTX range", "Kind", "Count", "Time", "Kernels", "In kernels"]
        lines += ["", terminal.table(header, table, right=[2, 3, 4, 5])]
    lines += [f"note: {terminal.inert(note, 300)}" for note in one.notes]
    return "\n".join(lines)


def _optional(row: dict[str, Any], name: str) -> str:
    from spikemark.reports import words

    return "" if row.get(name) is None else words.seconds(row[name])

"""``spikemark run``: plan, measure under supervision, write the report, say who won."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spikemark.commands import arguments as shared
from spikemark.commands import terminal
from spikemark.harness.errors import UsageError
from spikemark.harness.records import OK

if TYPE_CHECKING:
    from spikemark.harness.plan import RunOptions, RunResult
    from spikemark.harness.process import WorkerCommand

EXIT_INTERRUPTED = 130
CONTINUING = {"--out", "--resume", "--time-limit", "--address"}


def run(arguments: argparse.Namespace) -> int:
    """Measure the selected cases into a run folder; prints the winners and, last, the path of report.html."""
    from spikemark.harness import supervisor
    from spikemark.reports import html

    if arguments.resume:
        arguments = _resumed(arguments)
    out = Path(arguments.out or f"runs/{datetime.now():%Y%m%d-%H%M%S}-{arguments.preset}")

    def settings(cases: Sequence[Any]) -> RunOptions:
        found = options(arguments, cases, out)
        return replace(found, passes=arguments.passes or found.passes, resume=arguments.resume)

    if arguments.engine:
        result = _elsewhere(arguments, settings)
    else:
        _refuse_cluster_options(arguments)
        cases = shared.cases(arguments)
        result = supervisor.run(cases, settings(cases), worker_command(), arguments.argv)
    code = result.exit_code
    try:  # before anything is printed: a reader such as `head` may be gone
        page = html.write([result.path], None)
    except KeyboardInterrupt:  # once is for stopping to measure: the report is still wanted
        page, code = html.write([result.path], None), EXIT_INTERRUPTED
    said = [*result.message.splitlines(), *getattr(arguments, "left_to_others", [])]
    said = [terminal.inert(line, 1000) for line in said]
    print("\n".join(filter(None, [summary(result.path), *said, str(page)])))
    return code


def _elsewhere(arguments: argparse.Namespace, settings: Callable[[Sequence[Any]], RunOptions]) -> RunResult:
    """Measure on the nodes of a cluster."""
    from spikemark.harness.engines import cluster
    from spikemark.suites import selection

    selection.check_names(arguments.devices)
    shared.load_plugins(arguments.plugins)  # one that is missing is said before a cluster is looked for
    return cluster.run(
        arguments.address,
        arguments.kinds,
        arguments.every_gpu,
        arguments.devices,
        lambda devices: shared.cases(arguments, devices),
        settings,
        worker_command(),
        _without_address(arguments.argv),
    )


def _without_address(argv: Sequence[str]) -> list[str]:
    """The command line without where the cluster is: results name no machine."""
    kept, words = list[str](), iter(argv)
    for word in words:
        if word == "--address":
            next(words, None)
        elif not word.startswith("--address="):
            kept.append(word)
    return kept


def _refuse_cluster_options(arguments: argparse.Namespace) -> None:
    given = {"--address": arguments.address, "--kind": arguments.kinds, "--every-gpu": arguments.every_gpu}
    for option, value in given.items():
        if value:
            raise UsageError(f"{option} is about a cluster: it needs --engine ray")


def _resumed(arguments: argparse.Namespace) -> argparse.Namespace:
    """``--resume --out DIR`` without a selection repeats the one that the run was started with."""
    from spikemark.harness.runfolder import RunFolder

    if not arguments.out:
        raise UsageError("--resume needs --out DIR: the run folder to continue")
    given = {word.split("=")[0] for word in arguments.argv if word.startswith("--")}
    if not given <= CONTINUING:
        return arguments
    meta = RunFolder.load(arguments.out).meta
    stored: list[str] = meta["arguments"]
    if not stored and meta.get("parts"):
        raise UsageError(f"{arguments.out} is of runs that asked for different things: continue those, and merge again")
    again = arguments.parse(stored)
    if again.command != "run":
        raise UsageError(f"{arguments.out} was not made by `spikemark run`: it cannot be resumed")
    again.out, again.resume, again.time_limit = arguments.out, True, arguments.time_limit
    again.address = arguments.address
    again.argv, again.parse = stored, arguments.parse
    again.left_to_others = [] if getattr(again, "engine", None) else _leave_absent(again)
    return again


def _leave_absent(arguments: argparse.Namespace) -> list[str]:
    """Leave out devices that this machine lacks, if it has any that the run was made for; lines that say so."""
    from spikemark.suites.selection import resolve_devices

    here, left = [], []
    for device in arguments.devices:
        try:
            resolve_devices([device])
            here.append(device)
        except UsageError as error:
            left.append(f"left to others: {error}")
    if not here:
        return []
    arguments.devices = here
    return left


def options(arguments: argparse.Namespace, cases: Sequence[Any], out: Path) -> RunOptions:
    """The supervisor's options: the preset's, and what the command line says otherwise."""
    from spikemark.harness.plan import RunOptions
    from spikemark.kernels import registry
    from spikemark.suites.presets import PRESETS

    preset = PRESETS[arguments.preset]
    return RunOptions(
        out=out,
        preset=preset.name,
        passes=preset.passes,
        seed=arguments.seed,
        case_timeout_s=arguments.time_limit,
        devices=tuple(dict.fromkeys(case.device for case in cases)),
        plugins=tuple(str(Path(plugin).resolve()) for plugin in arguments.plugins),
        baselines={case.operator: registry.baseline(case.operator).name for case in cases},
        **preset.options(),
    )


def worker_command(*more: str) -> WorkerCommand:
    """The command line of a measuring process, with ``more`` options of pytest."""
    from spikemark.suites.worker import worker_command

    return lambda plan, events: [*worker_command(plan, events), *more]


def _place(group: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Operators and phases in the order in which they are listed everywhere."""
    from spikemark.kernels.catalog import OPERATORS

    row = group[0]
    operator = OPERATORS[row["operator"]]
    return list(OPERATORS).index(operator.name), row["workload"], operator.phases.index(row["phase"]), row["group"]


def _tied(names: Sequence[str]) -> str:
    """The fastest, and who cannot be told from it."""
    more = f" = {len(names) - 3} more" if len(names) > 3 else ""
    return " = ".join(names[:3]) + more


def summary(path: Path) -> str:
    """Who won each comparison, by how much over the baseline, and what failed; a few lines for a terminal."""
    from spikemark.harness import statistics
    from spikemark.harness.runfolder import RunFolder
    from spikemark.reports import words

    rows = statistics.summarise(RunFolder.load(path))
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    lines = []
    for group in sorted(groups.values(), key=_place):
        timed = sorted((r for r in group if r["status"] == OK and r["median_s"]), key=lambda r: r["median_s"])
        if not timed:
            continue
        best = timed[0]
        names = [r["implementation"] for r in timed if r["winner"]] or [best["implementation"]]
        lines.append(
            [
                best["operator"],
                best["phase"],
                best["workload"],
                f"{best['device']} b{best['batch']}",
                _tied(list(dict.fromkeys([best["implementation"], *names]))),
                words.seconds(best["median_s"], best["ci_low_s"], best["ci_high_s"]),
                words.factor(*(best[n] for n in ("speedup", "speedup_low", "speedup_high"))) if best["speedup"] else "",
            ]
        )
    header = ["Operator", "Phase", "Workload", "On", "Fastest", "Median", "Speed-up"]
    counts = statistics.status_counts(rows)
    failed = ", ".join(f"{n} {status}" for status, n in counts.items() if status != OK)
    table = terminal.table(header, lines, right=[5, 6]) if lines else ""
    return "\n".join(filter(None, [table, f"not measured: {failed} (reasons in the report)" if failed else ""]))

"""``spikemark compare``: two runs that exist, or two versions of the code measured in turns now (``--measure``).

``--history`` follows every case through a folder of runs instead (``commands.history``).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spikemark.commands import arguments as shared
from spikemark.harness.errors import NothingMeasured, UsageError
from spikemark.harness.runfolder import Run, RunFolder

if TYPE_CHECKING:
    from spikemark.harness.ab import Version
    from spikemark.reports.compare import Comparison

INTERRUPTED = 130


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; its exit code: 0, 1 for a regression, 5 under ``--strict`` for an inconclusive case."""
    if arguments.history is not None:
        from spikemark.commands import history

        return history.compare(arguments)
    from spikemark.reports import compare, compare_text

    fail_on = compare.parse_fail_on(arguments.fail_on)
    if arguments.measure:
        path, code = measure(arguments)
        if code == INTERRUPTED:
            return code
        comparison = _versions(path, fail_on)
    elif len(arguments.runs) == 1:
        comparison = _versions(Path(arguments.runs[0]), fail_on)
    elif len(arguments.runs) == 2:
        base, new = (_plain(RunFolder.load(path)) for path in arguments.runs)
        comparison = compare.compare(base, new, fail_on, across=arguments.across)
    else:
        raise UsageError(f"compare needs two run folders, BASE and NEW, got {len(arguments.runs)}")
    if arguments.json:
        print(json.dumps(compare_text.to_json(comparison, arguments.strict), indent=1))
    elif arguments.markdown:
        print(compare_text.markdown(comparison), end="")
    else:
        print(compare_text.table(comparison, None if arguments.all else compare_text.TABLE_ROWS))
    return comparison.exit_code(arguments.strict)


def _plain(run: Run) -> Run:
    if run.variants:
        raise UsageError(f"{run.path.name} is an A/B run: compare it alone, without a second run")
    return run


def _versions(path: Path, fail_on: dict[str, float]) -> Comparison:
    """The comparison of the two versions in the A/B run at ``path``."""
    from spikemark.harness import ab
    from spikemark.reports import compare

    run = RunFolder.load(path)
    if run.variants and set(run.variants) != {ab.BASE, ab.NEW}:
        raise NothingMeasured(f"nothing to compare: {path.name} has only the version {' and '.join(run.variants)}")
    if not run.variants:
        raise UsageError(f"{path} is no A/B run: name a second run folder to compare it with")
    sides = [run.only_variant(label) for label in (ab.BASE, ab.NEW)]
    return compare.compare(sides[0], sides[1], fail_on, one_run=True)


def measure(arguments: argparse.Namespace) -> tuple[Path, int]:
    """Measure both versions in turns into a run folder; its path, and the supervisor's exit code."""
    from spikemark.commands import run as run_command
    from spikemark.commands import terminal
    from spikemark.harness import ab, supervisor

    if not 1 <= len(arguments.runs) <= 2:
        raise UsageError("compare --measure needs one or two revisions, or two plug-in files")
    base, new = [*arguments.runs, None][:2]
    files = base.endswith(".py")
    with ab.versions(base, new, arguments.plugins) as both:
        if files:
            arguments.plugins = [*arguments.plugins, new]
        cases = (
            _narrowed(shared.cases(arguments)) if files and not arguments.implementations else shared.cases(arguments)
        )
        out = Path(arguments.out or f"runs/{datetime.now():%Y%m%d-%H%M%S}-compare")
        plain = run_command.options(arguments, cases, out)
        options = replace(
            plain,
            passes=arguments.passes or ab.PASSES,
            precision=ab.PRECISION,
            budget_s=max(plain.budget_s, ab.BUDGET_S),
            min_samples=ab.MIN_SAMPLES,
            max_samples=max(plain.max_samples, ab.MIN_SAMPLES),
            call_time=False,
            plugins=(),
            variants=tuple(version.variant for version in both),
        )
        result = supervisor.run(cases, options, run_command.worker_command(), arguments.argv)
    _describe(result.path, both)
    if result.exit_code == INTERRUPTED:
        text = f"interrupted: what was measured is kept, `spikemark compare {result.path}` compares it"
        print(terminal.inert(text, 1000), file=sys.stderr)
    return result.path, result.exit_code


def _narrowed(cases: list[Any]) -> list[Any]:
    """Only the implementations that came from plug-in files: the rest is the same in both versions."""
    from spikemark.kernels import registry

    own = [c for c in cases if registry.get(c.operator, c.implementation).source.startswith("plug-in ")]
    if not own:
        raise NothingMeasured("nothing to compare: the plug-in registers no implementation that the selection has")
    return own


def _describe(path: Path, both: tuple[Version, Version]) -> None:
    """Say in ``run.json`` what the two versions were."""
    folder, _ = RunFolder.reopen(path)
    folder.update(ab={version.variant.label: version.about for version in both})
    folder.close()

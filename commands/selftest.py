"""``spikemark selftest``: false alarms and the smallest slowdown that is found, here and now."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from spikemark.harness.journal import storage_error
from spikemark.harness.runfolder import RUN_JSON, RunFolder


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; ``--out`` keeps the result, in ``run.json`` if the folder is a run."""
    from spikemark.harness import ab, selftest

    delays = tuple(sorted({0.0, *arguments.delays})) if arguments.delays else selftest.DELAYS
    plan = selftest.Plan(arguments.pairs, delays, arguments.passes or ab.PASSES, arguments.seed)
    result = selftest.run(plan, lambda text: print(text, file=sys.stderr, flush=True))
    if arguments.out:
        _keep(Path(arguments.out), result)
    print(json.dumps(result, indent=1) if arguments.json else selftest.text(result))
    return 0


def _keep(path: Path, result: dict[str, object]) -> None:
    """``selftest.json`` in the folder ``path``, and the field ``selftest`` of its ``run.json`` if it has one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "selftest.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise storage_error(path, error) from None
    if (path / RUN_JSON).is_file():
        folder, _ = RunFolder.reopen(path)
        folder.update(selftest=result)
        folder.close()

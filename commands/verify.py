"""``spikemark verify``: compare with the float64 reference, time nothing.

The same measuring processes as in ``run`` do it, with pytest-benchmark disabled: a kernel that kills its process is one
row here too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from spikemark.commands import arguments as shared
from spikemark.commands import run as running
from spikemark.commands import terminal
from spikemark.harness.records import INCORRECT, OK, Record

EXIT_INCORRECT, EXIT_NOTHING, EXIT_INTERRUPTED = 3, 4, 130


def run(arguments: argparse.Namespace) -> int:
    """One row a case; exit code 3 if a result is incorrect, 4 if nothing could be compared, 130 if interrupted."""
    from spikemark.harness import supervisor
    from spikemark.harness.runfolder import RunFolder

    cases = shared.cases(arguments)
    with tempfile.TemporaryDirectory(prefix="spikemark-verify-") as folder:
        options = replace(
            running.options(arguments, cases, Path(folder) / "run"), passes=1, ledger=False, call_time=False
        )
        result = supervisor.run(cases, options, running.worker_command("--benchmark-disable"), arguments.argv)
        records = RunFolder.load(options.out).records
    order = {case.key: i for i, case in enumerate(cases)}
    records.sort(key=lambda record: order[record.case.key])
    if records:
        print("\n".join(json.dumps(_json(r)) for r in records) if arguments.json else _table(records))
    if result.exit_code == EXIT_INTERRUPTED:
        print(f"interrupted: {len(records)} of {len(cases)} cases were compared", file=sys.stderr)
        return EXIT_INTERRUPTED
    statuses = {record.status for record in records}
    return EXIT_INCORRECT if INCORRECT in statuses else 0 if OK in statuses else EXIT_NOTHING


def _json(record: Record) -> dict[str, Any]:
    case = record.case
    return {
        "key": case.key,
        "operator": case.operator,
        "phase": case.phase,
        "workload": case.workload,
        "implementation": case.implementation,
        "device": case.device,
        "dtype": case.dtype,
        "status": record.status,
        "reason": record.reason,
        **record.verification,
    }


def _table(records: list[Record]) -> str:
    """The result of each case: how far it was from the reference, or why it is not ``ok``."""
    rows = []
    for record in records:
        case, found = record.case, record.verification
        error = f"{found['max_error']:.2g}" if found else ""
        compared = f"{found['checked']} of {found['total']}" if found else ""
        where = f"{case.device} {case.dtype} b{case.problem.batch}"
        rows.append(
            [case.operator, case.phase, case.workload, where, case.implementation, record.status, error, compared,
             record.reason]
        )  # fmt: skip
    header = ["Operator", "Phase", "Workload", "On", "Implementation", "Status", "Max error", "Compared", "Reason"]
    return f"{terminal.table(header, rows, right=[6, 7])}\n{_verdict([record.status for record in records])}"


def _verdict(statuses: list[str]) -> str:
    """How many are right of those that were compared; what could not be compared is no wrong result."""
    compared = sum(status in (OK, INCORRECT) for status in statuses)
    others = Counter(status for status in statuses if status not in (OK, INCORRECT))
    missing = ", ".join(f"{count} {status}" for status, count in others.items())
    if not compared:
        return f"nothing was compared: {missing}"
    text = f"{statuses.count(OK)} of {compared} {'case is' if compared == 1 else 'cases are'} right"
    return f"{text}; not compared: {missing}" if missing else text

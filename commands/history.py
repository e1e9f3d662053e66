"""A folder of runs as a history: the table of ``spikemark compare --history``, the page of ``report --history``.

Torch-free. Which cases are shown is asked for as everywhere: ``--operator``, ``--workload`` and the like.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spikemark.harness.errors import UsageError

if TYPE_CHECKING:
    from spikemark.reports.history import History

SELECTED = {
    "operators": "operator",
    "phases": "phase",
    "implementations": "implementation",
    "workloads": "workload",
    "devices": "device",
    "dtypes": "dtype",
    "batches": "batch",
}
"""Option of the selection -> what of a case it is about."""
PATIENCE_S = 3.0


def compare(arguments: argparse.Namespace) -> int:
    """Print change points and trends; always 0: what is found here is history, ``compare BASE NEW`` decides."""
    from spikemark.reports import compare as comparing
    from spikemark.reports import history_text

    _refuse(arguments, "runs measure across strict markdown out passes rates plugins workload_files spikes time_axis")
    limits = comparing.parse_fail_on(arguments.fail_on)
    if "memory" in limits:
        raise UsageError("--history follows times: --fail-on memory is not for it")
    history = _read(arguments.history, limits["slower"], _wanted(arguments))
    if arguments.json:
        print(json.dumps(history_text.to_json(history), indent=1))
    else:
        print(history_text.table(history, None if arguments.all else history_text.TABLE_ROWS))
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Write the page (or print CSV) and print where it is."""
    from spikemark.reports import compare as comparing
    from spikemark.reports import history_page, history_text, html, saving

    _refuse(arguments, "runs figures devices")
    if arguments.format not in ("html", "csv"):
        raise UsageError(f"--history is written as html or csv, not as {arguments.format}")
    with html.keeping():
        history = _read(arguments.history, comparing.FAIL_ON["slower"], lambda case: True)
        if arguments.format == "csv":
            text = history_text.to_csv(history)
            if arguments.output is None:
                sys.stdout.write(text)
                return 0
            saving.save(Path(arguments.output), text)
            print(arguments.output)
        else:
            print(history_page.write(history, arguments.output))
    return 0


def _refuse(arguments: argparse.Namespace, names: str) -> None:
    """What is of no use beside --history is refused by name."""
    options = {"runs": "a run folder", "spikes": "--spikes", "plugins": "--plugin", "rates": "--spike-rate"}
    options |= {"workload_files": "--workload-file", "devices": "--devices"}
    for name in names.split():
        if getattr(arguments, name) not in (None, False, []):
            what = options.get(name, f"--{name.replace('_', '-')}")
            more = ": spikemark report --history DIR writes the page" if name == "out" else ""
            raise UsageError(f"--history and {what} do not go together{more}")


def _wanted(arguments: argparse.Namespace) -> Callable[[dict[str, Any]], bool]:
    """Whether a case is in the selection; names may have * and ?."""
    from spikemark.suites.selection import matches

    asked = {field: [str(v) for v in getattr(arguments, name)] for name, field in SELECTED.items()}
    asked = {field: values for field, values in asked.items() if values}
    return lambda case: all(matches(str(case[field]), values) for field, values in asked.items())


def _read(folder: str, least: float, wanted: Callable[[dict[str, Any]], bool]) -> History:
    """The history, with a line now and then while it takes long."""
    from spikemark.reports import history

    said = time.monotonic()

    def tell(done: int, of: int) -> None:
        nonlocal said
        if time.monotonic() - said > PATIENCE_S and done < of:
            said = time.monotonic()
            print(f"read {done} of {of} run folders", file=sys.stderr, flush=True)

    return history.read(folder, least, wanted, tell)

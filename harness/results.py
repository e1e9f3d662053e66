"""``results.csv``: written from the journal when a run ends, and read in its place where provably of that journal.

Torch-free. A folder of a thousand runs holds gigabytes of samples; what a trend needs of them are the medians, which
``results.csv`` has. ``run.json`` keeps, as ``derived``, digests of the journal and of the file derived from it: if both
still match, the file says what the journal says. Anything else (a run that goes on, an edited file, an older version)
and the journal is read.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from spikemark.harness.journal import dumps
from spikemark.harness.records import COLUMNS, SCHEMA_VERSION

if TYPE_CHECKING:
    from spikemark.harness.runfolder import Run

JOURNAL = "cases.jsonl"
RESULTS_CSV = "results.csv"
GAUGES = {"copy": "samples", "computation": "compute_samples"}
"""Name of a calibration -> the field of the journal's line that holds its seconds."""


def results_csv(run: Run) -> str:
    """The text of ``results.csv``: ``COLUMNS`` first and in order, then every other field of the rows.

    An A/B run has one row a case and variant, and a column ``variant``.
    """
    from spikemark.harness.statistics import summarise

    rows = summarise(run)
    if run.variants:
        rows = [row | {"variant": label} for label in run.variants for row in summarise(run.only_variant(label))]
    extras = list(dict.fromkeys(name for row in rows for name in row if name not in COLUMNS))
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*COLUMNS, *extras])
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in (*COLUMNS, *extras)])
    return out.getvalue()


def _cell(value: Any) -> Any:
    """A CSV cell: empty for None, words for a list, JSON for a dict; numbers as they are."""
    if isinstance(value, (list, tuple)):
        return " ".join(str(v) for v in value)
    if isinstance(value, dict):
        return dumps(value)
    return value


def gauges(run: Run) -> dict[str, dict[str, float]]:
    """environment -> name of a calibration -> its seconds, the median over passes of their medians."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in run.calibrations:
        for name, field in GAUGES.items():
            times = [s for s in line.get(field) or [] if isinstance(s, (int, float)) and 0 < s < math.inf]
            if times:
                found.setdefault(str(line["environment"]), {}).setdefault(name, []).append(median(times))
    return {key: {name: median(values) for name, values in of.items()} for key, of in found.items()}


def state(path: Path) -> dict[str, Any]:
    """Size and digest of the journal in ``path``; ask before it is read, so that what comes later shows."""
    journal = path / JOURNAL
    return {"journal_bytes": journal.stat().st_size, "journal_sha256": _digest(journal)}


def stamp(run: Run, before: dict[str, Any]) -> dict[str, Any]:
    """The field ``derived`` of ``run.json``, now that ``results.csv`` has been written; ``before`` is the ``state``."""
    proof = {"schema": SCHEMA_VERSION, "results_sha256": _digest(run.path / RESULTS_CSV)}
    return before | proof | {"gauges": gauges(run)}


def proven(path: Path, meta: dict[str, Any], columns: Sequence[str]) -> list[tuple[str, ...]] | None:
    """``columns`` of the rows of ``results.csv``, as text, if ``meta`` (run.json) proves that they are of the journal;
    else None."""
    told = meta.get("derived")
    if not isinstance(told, dict) or told.get("schema") != SCHEMA_VERSION:
        return None
    journal, results = path / JOURNAL, path / RESULTS_CSV
    try:
        if journal.stat().st_size != told.get("journal_bytes"):
            return None
        data = results.read_bytes()
        if hashlib.sha256(data).hexdigest() != told.get("results_sha256"):
            return None
        if _digest(journal) != told.get("journal_sha256"):
            return None
        lines = csv.reader(io.StringIO(data.decode("utf-8"), newline=""))
        header = next(lines)
        chosen = itemgetter(*(header.index(name) for name in columns))
        return [chosen(line) for line in lines]
    except (OSError, ValueError, LookupError, StopIteration, csv.Error):
        return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

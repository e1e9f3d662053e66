"""Reads run folders into rows: one dict a case and environment, with what the journal and run.json know besides.

Several runs are read as the one run that ``merge`` makes of them, so both have the same rows.

pandas is imported only for ``frame``: the page does without it and starts faster.
"""

from __future__ import annotations

import functools
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spikemark.harness.errors import UsageError
from spikemark.harness.merging import join, labels, refuse_twice
from spikemark.harness.parts import Part, origin, parts, run_id
from spikemark.harness.records import COLUMNS, OK, Case, Record
from spikemark.harness.runfolder import Run, RunFolder
from spikemark.harness.statistics import baselines, summarise
from spikemark.reports import environments

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
_NOT_IN_FRAME = ("case", "records", "parts")


@dataclass
class Report:
    """Run folders read for one report as one ``run``; ``rows`` are sorted for reading (``order``).

    ``parts`` are the runs as they were made (see ``harness.parts``), a row's ``parts`` are indices into it. ``sources``
    are the folders read, each with where its environments are in ``run``.
    """

    run: Run
    parts: list[Part]
    sources: list[tuple[Run, dict[str, str]]]
    rows: list[Row] = field(default_factory=list)

    @property
    def several(self) -> bool:
        """Whether more than one run is shown."""
        return len(self.parts) > 1

    @property
    def labels(self) -> list[str]:
        """Names of the parts, each only once."""
        return [str(part["name"]) for part in self.parts]

    @functools.cached_property
    def titles(self) -> dict[str, str]:
        """Names of the environments by their keys."""
        return environments.titles(self)

    @property
    def folder(self) -> Path:
        """The first folder given."""
        return self.sources[0][0].path

    @property
    def ok(self) -> list[Row]:
        """Rows that have a time."""
        return [row for row in self.rows if row["status"] == OK]

    def environment(self, row: Row) -> dict[str, Any]:
        """The environment a row was measured in; empty if run.json does not hold it."""
        known = self.run.meta["environments"]
        found: dict[str, Any] = known.get(row["environment"]) or known.get(row["device"]) or {}
        return found


def read(paths: list[str | Path]) -> Report:
    """Read run folders, several as one (``harness.merging``).

    Raises ``UsageError`` for none given, for one given twice, for one that is no run and for two that contradict.
    """
    if not paths:
        raise UsageError("no run folder given")
    refuse_twice(paths)
    runs = [RunFolder.load(p) for p in paths]
    names = labels(paths)
    joined = join(runs, names)
    every = [dict(part) for part in parts(joined.run, names[0])]
    for part, name in zip(every, _distinct([str(part["name"]) for part in every]), strict=True):
        part["name"] = name
    report = Report(joined.run, every, list(zip(runs, joined.places, strict=True)))
    report.rows = sorted(_rows(report), key=order)
    return report


_OPERATORS = ("srm_neuron", "conv_backward", "srm_conv2d", "srm_linear", "adjusted_avg_pool2d", "clamped_sign")
_PHASES = ("forward", "backward", "input", "weight", "step")


def order(row: Row) -> tuple[Any, ...]:
    """Sorts rows for reading: a run visits its cases in random order, a person looks for them by name.

    Known operators and phases first and in their order, numbers in names by value, the baseline before its rivals.
    """

    def known(name: str, names: tuple[str, ...]) -> tuple[int, str]:
        return (names.index(name) if name in names else len(names), name)

    sizes = (row["time_steps"], row["batch"], row["rate_asked"])
    devices = (row["environment"], row["dtype"])
    names = (row["variant"], not row["baseline"], _natural(row["implementation"]))
    return (
        *devices,
        known(row["operator"], _OPERATORS),
        known(row["phase"], _PHASES),
        _natural(row["workload"]),
        *sizes,
        *names,
    )


@functools.lru_cache(maxsize=1 << 12)
def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() and len(part) < 9 else (-1, part) for part in re.split(r"(\d+)", name)]


def _distinct(names: list[str]) -> list[str]:
    """``names``, numbered where two are the same."""
    return [f"{n} ({names[:i].count(n) + 1})" if n in names[:i] else n for i, n in enumerate(names)]


def _rows(report: Report) -> list[Row]:
    run, own = report.run, run_id(report.run)
    records: dict[tuple[str, str, str], list[Record]] = {}
    for record in run.records:
        variant = str(record.details.get("variant") or "")
        key = (record.case.key, record.environment or record.case.device, variant)
        records.setdefault(key, []).append(record)
    names = baselines(run)
    place = {str(part["id"]): index for index, part in enumerate(report.parts)}
    rows = []
    for summary in summarise(run):
        row: Row = dict(summary)
        of_case = records[row["key"], row["environment"], row["variant"]]
        case = of_case[0].case
        measured_in = sorted({place.get(origin(record, own)[0], 0) for record in of_case})
        first = report.parts[measured_in[0]]
        row |= _share_bounds(row)
        row |= {
            "run": ", ".join(report.labels[index] for index in measured_in),
            "parts": measured_in,
            "baseline": names.get(case.operator) == case.implementation,
            "rate_asked": case.problem.spike_rate,
            "neurons": _product(case.problem.out_shape),
            "command": command(case, first.get("seed", 0), first.get("arguments") or []),
            "case": case,
            "records": of_case,
        }
        rows.append(row)
    return rows


def _share_bounds(row: Row) -> dict[str, float | None]:
    """The roofline's share at the ends of the time's interval: only a time of no noise would have a sharper share."""
    share, median, low, high = (row[n] for n in ("roofline", "median_s", "ci_low_s", "ci_high_s"))
    known = None not in (share, median, low, high) and low > 0
    ends = (share * median / high, share * median / low) if known else (None, None)
    return dict(zip(("roofline_low", "roofline_high"), ends, strict=True))


def _product(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def _carried_options(case: Case, arguments: list[str]) -> list[str]:
    """Options of the run that a single case needs too: outside implementations, a person's own layers and spikes.

    The spikes go only with a case that is made of them: with any other they would be measured besides.
    """
    out: list[str] = []
    wanted = ["--plugin", "--workload-file"]
    if case.problem.recording is not None:
        wanted += ["--spikes", "--time-axis"]
    for index, word in enumerate(arguments):
        if word in wanted:
            out += [word, *arguments[index + 1 : index + 2]]
        elif word.startswith(tuple(f"{w}=" for w in wanted)):
            out.append(word)
    return out


def command(case: Case, seed: int, arguments: list[str]) -> str:
    """The command line, quoted for a POSIX shell, that measures this one case again; ``arguments`` are its run's."""
    words = ["spikemark", "run", "--operator", case.operator, "--phase", case.phase]
    words += ["--workload", case.workload, "--implementation", case.implementation]
    words += ["--device", case.local_device]
    words += ["--dtype", case.dtype]
    if case.problem.recording is None:  # a recording keeps its own batch and rate
        words += ["--batch", str(case.problem.batch), "--spike-rate", repr(case.problem.spike_rate)]
    return shlex.join([*words, "--seed", str(seed), *_carried_options(case, arguments)])


def frame(report: Report) -> pd.DataFrame:
    """All rows as a tidy DataFrame: ``COLUMNS``, ``run``, then every other field; environment fields are dotted."""
    import pandas as pd

    first = [*COLUMNS, "run"]
    rows = []
    for row in report.rows:
        flat = {k: v for k, v in row.items() if k not in _NOT_IN_FRAME}
        flat["flags"] = " ".join(row["flags"])
        described = environments.flatten(report.environment(row))
        flat |= {f"environment.{k}": _scalar(v) for k, v in described.items()}
        rows.append({_encodable(k): _encodable(v) for k, v in flat.items()})
    rest = list(dict.fromkeys(k for row in rows for k in row if k not in first))
    table = pd.DataFrame(rows, columns=[*first, *rest])
    numbers = [c for c in COLUMNS if c.endswith(("_s", "_bytes")) or c.startswith("speedup")]
    for name in [*numbers, "roofline", "spike_rate", "max_error", "ambiguous", "samples"]:
        table[name] = pd.to_numeric(table[name])
    return table


def _scalar(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else environments.value_text(value)


def _encodable(value: Any) -> Any:
    """Text without lone surrogates, which no file format can hold; anything else as it is."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value

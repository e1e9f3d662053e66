"""Reads run folders into rows: one dict a case and run, with what the journal and run.json know besides.

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
from spikemark.harness.records import COLUMNS, OK, Case, Record
from spikemark.harness.runfolder import Run, RunFolder
from spikemark.harness.statistics import baselines, summarise
from spikemark.reports import environments

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
_NOT_IN_FRAME = ("case", "records", "run_index")


@dataclass
class Report:
    """Runs read for one report, with unique ``labels``; ``rows`` are run by run, sorted for reading (``order``)."""

    runs: list[Run]
    labels: list[str]
    rows: list[Row] = field(default_factory=list)

    @property
    def several(self) -> bool:
        """Whether more than one run is shown."""
        return len(self.runs) > 1

    @property
    def ok(self) -> list[Row]:
        """Rows that have a time."""
        return [row for row in self.rows if row["status"] == OK]

    def environment(self, row: Row) -> dict[str, Any]:
        """The environment a row was measured in; empty if run.json does not hold it."""
        known = self.runs[row["run_index"]].meta["environments"]
        found: dict[str, Any] = known.get(row["environment"]) or known.get(row["device"]) or {}
        return found


def read(paths: list[str | Path]) -> Report:
    """Read run folders. Raises ``UsageError`` for none given, for one given twice and for one that is no run."""
    if not paths:
        raise UsageError("no run folder given")
    resolved = [Path(p).resolve() for p in paths]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise UsageError(f"run folder {paths[index]} is given twice")
    runs = [RunFolder.load(p) for p in paths]
    report = Report(runs, _labels([p.name for p in resolved]))
    for index, run in enumerate(runs):
        report.rows += sorted(_rows(run, index, report.labels[index]), key=order)
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


def _labels(names: list[str]) -> list[str]:
    """Folder names, numbered where two are the same."""
    out: list[str] = []
    for index, name in enumerate(names):
        same = names[:index].count(name)
        out.append(f"{name} ({same + 1})" if same else name)
    return out


def _rows(run: Run, index: int, label: str) -> list[Row]:
    records: dict[tuple[str, str], list[Record]] = {}
    for record in run.records:
        variant = str(record.details.get("variant") or "")
        records.setdefault((record.case.key, variant), []).append(record)
    names = baselines([run])
    arguments = run.meta["arguments"]
    rows = []
    for summary in summarise(run):
        row: Row = dict(summary)
        of_case = records[row["key"], row["variant"]]
        case = of_case[0].case
        row |= _share_bounds(row)
        row |= {
            "run": label,
            "run_index": index,
            "baseline": names.get(case.operator) == case.implementation,
            "environment": of_case[0].environment or case.device,
            "rate_asked": case.problem.spike_rate,
            "neurons": _product(case.problem.out_shape),
            "command": command(case, run.meta["seed"], arguments),
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
    words += ["--workload", case.workload, "--implementation", case.implementation, "--device", case.device]
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

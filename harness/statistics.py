"""What a run says: one tidy row a case, speed-ups against the baseline, winners. Torch-free; numpy only.

``summarise`` merges a case's records over passes. The figures' rules, in one place:

* ``median_s`` is the median over passes of the passes' medians of cold samples, with a 95 % interval (``intervals``).
* ``speedup`` is baseline time / this time, pass by pass. Where both took turns (``pairing``), a pass's figure is the
  median over pairs of turns, so that the machine's jumps fall on both and cancel; else the ratio of medians.
* ``roofline`` is the share of the copy bandwidth *of the same pass* that the least possible traffic would need.
  Above 1 in every pass it is flagged: ``in-cache`` where the traffic fits the last cache, which what the kernel wrote
  need not have left; else ``above-copy-bandwidth``: the cost model is wrong, or the work was not done.
* A row is ``noisy`` when its interval is wider than ``NOISY`` either way, whatever made sampling stop in a pass.
* Within a run, differences below ``RUN_MARGIN`` are no verdict. Implementations that share their inner kernel differ
  by the machine's mood only; a margin wider than that mood makes two honest runs say the same.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from spikemark.harness.intervals import (
    FASTER,
    INCONCLUSIVE,
    REFUSED,
    SAME,
    SLOWER,
    VERDICTS,
    Array,
    Interval,
    binomial_interval,
    centre_intervals,
    geometric_mean,
    median_errors,
    ratio_interval,
    unpaired,
    verdict,
)
from spikemark.harness.pairing import in_turns, pass_ratio, timed
from spikemark.harness.records import (
    COLUMNS,
    CRASHED,
    ERROR,
    INCORRECT,
    OK,
    OUT_OF_MEMORY,
    TIMED_OUT,
    UNAVAILABLE,
    UNMEASURED,
    UNSUPPORTED,
    Record,
)

if TYPE_CHECKING:
    from spikemark.harness.runfolder import Run

__all__ = [
    "FASTER",
    "INCONCLUSIVE",
    "REFUSED",
    "RUN_MARGIN",
    "SAME",
    "SLOWER",
    "VERDICTS",
    "Interval",
    "PassTable",
    "Row",
    "binomial_interval",
    "geometric_mean",
    "ratio_interval",
    "summarise",
    "verdict",
    "winners",
]

Row = dict[str, Any]

RUN_MARGIN = 0.15
"""Differences within one run below this are no verdict. Turns take the machine's jumps out of a pass, but not what
stays for all of it: a virtual machine's cores lie now near each other and now far apart, which moves the ratio of a
kernel with threads to one without by 10 to 20 %. Alternatives worth a change differ by more."""

NOISY = 0.10
"""Relative half-width of an interval from which on a row is flagged: no first digit to rely on."""

_CASE_COLUMNS = ("operator", "phase", "workload", "implementation", "device", "dtype")
_WORST_FIRST = (INCORRECT, CRASHED, TIMED_OUT, OUT_OF_MEMORY, ERROR, UNAVAILABLE, UNSUPPORTED, OK)


class PassTable:
    """Pass medians of many cases as one matrix, so that intervals are computed for all at once.

    ``logs`` and ``errors`` are [cases, passes]: log median and its standard error from the samples, NaN where the
    case was not measured in that pass.
    """

    def __init__(self, samples: Sequence[dict[Any, Sequence[float]]]) -> None:
        """``samples[i]`` maps pass identifiers to case i's samples in seconds. Values that are not positive finite are
        no times and are left out."""
        self.passes: list[Any] = sorted({p for case in samples for p in case}, key=str)
        column = {p: j for j, p in enumerate(self.passes)}
        self.logs: Array = np.full((len(samples), len(self.passes)), np.nan)
        self.errors: Array = np.full_like(self.logs, np.nan)
        by_length: dict[int, list[tuple[int, int, list[float]]]] = defaultdict(list)
        for i, case in enumerate(samples):
            for p, values in case.items():
                times = [t for t in values if 0 < t < math.inf]
                if times:
                    by_length[len(times)].append((i, column[p], times))
        for entries in by_length.values():
            stacked = np.log(np.array([e[2] for e in entries], dtype=float))
            at = ([e[0] for e in entries], [e[1] for e in entries])
            self.logs[at] = np.median(stacked, axis=1)
            self.errors[at] = median_errors(stacked)

    def intervals(self) -> Array:
        """Log median, low, high and spread of every case: [cases, 4]."""
        return centre_intervals(self.logs, self.errors)

    def ratios(
        self,
        over: Sequence[int],
        under: Sequence[int],
        in_turns: Callable[[int, int, Any], tuple[float, float] | None] = lambda over, under, pass_: None,
    ) -> list[Interval]:
        """Intervals of case ``over[i]`` / case ``under[i]``, pass by pass where both were measured.

        ``in_turns(over, under, pass)`` may give a better figure for a pass than its medians do: log ratio and error.
        Two that share no pass are compared as independent, which is wider. NaN if one has no samples.
        """
        a, b = list(over), list(under)
        if not a:
            return []
        logs = self.logs[a] - self.logs[b]
        errors = np.hypot(self.errors[a], self.errors[b])
        for row, column in zip(*np.nonzero(np.isfinite(logs)), strict=True):
            better = in_turns(a[row], b[row], self.passes[column])
            if better is not None and math.isfinite(better[0]):
                logs[row, column], errors[row, column] = better
        columns = centre_intervals(logs, errors)
        counts = np.isfinite(logs).sum(axis=1)
        alone = self.intervals() if (counts == 0).any() else None
        out = []
        for i, (centre, low, high, spread) in enumerate(columns):
            if counts[i] or alone is None:
                out.append(Interval(math.exp(centre), math.exp(low), math.exp(high), float(spread), int(counts[i])))
                continue
            sizes = (int(np.isfinite(self.logs[a[i]]).sum()), int(np.isfinite(self.logs[b[i]]).sum()))
            out.append(unpaired(alone[a[i]], alone[b[i]], sizes))
        return out


def _middle(values: Iterable[Any]) -> float | None:
    good = [v for v in values if v is not None and math.isfinite(v)]
    return float(median(good)) if good else None


def _most(values: Iterable[Any]) -> Any:
    good = [v for v in values if v is not None]
    return max(good, key=lambda v: -math.inf if math.isnan(v) else v) if good else None


def _status(records: list[Record]) -> tuple[str, str]:
    """The worst status over passes and its reason, which says in how many passes if not in all."""
    worst = min((r.status for r in records), key=_WORST_FIRST.index)
    bad = [r for r in records if r.status == worst]
    if worst == OK:
        return OK, ""
    reason = next((r.reason for r in bad if r.reason), "no reason was recorded")
    return worst, reason if len(bad) == len(records) else f"in {len(bad)} of {len(records)} passes: {reason}"


class _Merged:
    """All records of one case in one environment: pass -> record; a later line replaces."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}
        self.environment = self.device_name = self.device_id = self.variant = ""
        self.cache_bytes = 0
        self.passes = 0
        """How many it was to have, if its device was lost; else 0."""

    def samples(self, name: str = "samples") -> dict[Any, Sequence[float]]:
        if any(r.status != OK for r in self.records.values()):
            return {}
        return {p: getattr(r, name) for p, r in self.records.items()}


def _bandwidths(run: Run) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for line in run.calibrations:
        if math.isfinite(line["copy_bytes_per_s"]) and line["copy_bytes_per_s"] > 0:
            found[line["environment"], line["pass_index"]].append(line["copy_bytes_per_s"])
    return {key: float(np.median(values)) for key, values in found.items()}


def _last_cache(environment: dict[str, Any]) -> int:
    """Bytes of the device's last-level cache; 0 if unknown."""
    gpu, caches = environment.get("gpu"), (environment.get("cpu") or {}).get("caches")
    if isinstance(gpu, dict):
        caches = {"L2": gpu.get("l2_bytes")}
    sizes = caches.values() if isinstance(caches, dict) else ()
    return max((int(s) for s in sizes if isinstance(s, (int, float)) and math.isfinite(s)), default=0)


def device_id(environment: dict[str, Any]) -> str:
    """Tells two equal devices apart: a hash of the GPU's UUID, or of the node of a cluster; empty for this machine's
    processor, of which there is one."""
    for part, field in (("gpu", "uuid_hash"), ("node", "id")):
        found = environment.get(part)
        if isinstance(found, dict) and found.get(field):
            return str(found[field])
    return ""


def merge_passes(run: Run) -> dict[tuple[str, str, str], _Merged]:
    """Records of a run by (case key, environment, variant of an A/B run), in the order first seen."""
    merged: dict[tuple[str, str, str], _Merged] = defaultdict(_Merged)
    environments, lost = run.meta.get("environments", {}), run.meta.get("lost")
    replaced = run.meta.get("replaced")
    for record in run.records:
        key = record.environment or record.case.device
        if record.details.get(UNMEASURED) and isinstance(replaced, list) and key in replaced:
            continue  # another node of the cluster has measured it since
        described = environments.get(key) or environments.get(record.case.device) or {}
        variant = str(record.details.get("variant") or "")
        entry = merged[record.case.key, key, variant]
        entry.environment, entry.variant = key, variant
        entry.device_name = str(described.get("device_name") or key)
        entry.device_id = device_id(described)
        entry.passes = run.meta["passes"] if isinstance(lost, dict) and key in lost else 0
        entry.cache_bytes = max(entry.cache_bytes, _last_cache(described))
        entry.records[record.pass_index] = record
    return merged


def baselines(run: Run) -> dict[str, str]:
    """operator -> name of its baseline, from ``run.json["baselines"]`` or from records that say so."""
    out: dict[str, str] = dict(run.meta.get("baselines") or {})
    for record in run.records:
        if record.details.get("baseline") is True:
            out[record.case.operator] = record.case.implementation
    return out


def summarise(run: Run | Sequence[Run]) -> list[Row]:
    """One row a case and environment: ``COLUMNS`` and the extras below, in order of first appearance in the journal.

    Extras: ``environment`` (its key in run.json), ``device_id`` (see there), ``flags`` (list), ``passes`` (measured),
    ``noise`` (half-width of the median's interval, relative), ``spread`` (deviation between passes, relative),
    ``warm_median_s, call_median_s, workspace_bytes, moved_bytes``,
    ``verdict`` (against the baseline: faster, slower, same, inconclusive; empty for itself or without one),
    ``winner`` (``alone``, ``tied`` or empty), ``ran`` (names of the kernels that really ran, where there was a choice),
    ``variant`` (of an A/B run), ``key``, ``group``, ``pass_medians_s`` and ``pass_indices``.
    Absent figures are None. Several runs are joined first (``merging.join``).
    """
    if isinstance(run, Sequence):
        from spikemark.harness.merging import join

        run = join(run).run
    merged = list(merge_passes(run).values())
    table = PassTable([m.samples() for m in merged])
    bandwidths = _bandwidths(run)
    rows = [_plain_row(m, bandwidths) for m in merged]
    column = {p: j for j, p in enumerate(table.passes)}
    for i, (centre, low, high, spread) in enumerate(table.intervals()):
        if rows[i]["status"] != OK:
            continue
        if math.isnan(centre):
            rows[i] |= {"status": ERROR, "reason": "no sample is a positive time"}
            continue
        rows[i] |= {"median_s": math.exp(centre), "ci_low_s": math.exp(low), "ci_high_s": math.exp(high)}
        rows[i]["noise"] = (math.exp(high - centre) - math.exp(low - centre)) / 2
        rows[i]["spread"] = None if math.isnan(spread) else math.expm1(spread)
        measured = [p for p in merged[i].records if math.isfinite(table.logs[i, column[p]])]
        rows[i]["pass_medians_s"] = [math.exp(table.logs[i, column[p]]) for p in measured]
        rows[i]["pass_indices"] = measured
        rows[i]["passes"] = len(measured)
        if len(measured) == 1:
            rows[i]["flags"].append("one-pass")
        elif rows[i]["noise"] > NOISY:
            rows[i]["flags"].append("noisy")
    ratios = _Ratios(table, merged)
    _add_speedups(rows, ratios, baselines(run))
    _add_winners(rows, ratios)
    return rows


class _Ratios:
    """Time ratios between rows: turn by turn in the passes where both took turns."""

    def __init__(self, table: PassTable, merged: Sequence[_Merged]) -> None:
        self._table, self._merged = table, merged

    def __call__(self, pairs: Sequence[tuple[int, int]]) -> list[Interval]:
        return self._table.ratios([p[0] for p in pairs], [p[1] for p in pairs], self._in_turns)

    def _in_turns(self, over: int, under: int, pass_: Any) -> tuple[float, float] | None:
        a, b = (self._merged[i].records.get(pass_) for i in (over, under))
        if a is None or b is None or not in_turns(a, b):
            return None
        return pass_ratio(timed(b), timed(a))


def _plain_row(merged: _Merged, bandwidths: dict[tuple[str, int], float]) -> Row:
    """Everything of a row that needs no interval."""
    records = list(merged.records.values())
    case, problem = records[0].case, records[0].case.problem
    status, reason = _status(records)
    row: Row = dict.fromkeys(COLUMNS)
    row |= {
        name: getattr(case, name) for name in ("operator", "phase", "workload", "implementation", "device", "dtype")
    }
    row |= {"device_name": merged.device_name, "device_id": merged.device_id}
    row |= {"batch": problem.batch, "time_steps": problem.time_steps}
    row |= {"status": status, "reason": reason, "samples": 0, "passes": 0}
    row["spike_rate"] = _middle(r.spike_rate for r in records)
    for name in ("peak_bytes", "saved_bytes", "workspace_bytes"):
        row[name] = _most(r.memory.get(name) for r in records)
    row["ideal_bytes"] = _most(r.cost.get("bytes") for r in records)
    row["moved_bytes"] = _most(r.cost.get("moved_bytes") for r in records)
    row["max_error"] = _most(r.verification.get("max_error") for r in records)
    row["ambiguous"] = _most(r.verification.get("ambiguous") for r in records)
    row["flags"] = list(dict.fromkeys(flag for r in records for flag in r.flags if flag != "noisy"))
    row |= {"noise": None, "spread": None, "verdict": "", "winner": "", "key": case.key, "group": case.group}
    row |= {"variant": merged.variant, "environment": merged.environment}
    row["ran"] = ", ".join(dict.fromkeys(str(r.details["ran"]) for r in records if r.details.get("ran")))
    row |= {"warm_median_s": None, "call_median_s": None, "pass_medians_s": [], "pass_indices": []}
    if status != OK:
        return row
    row["flags"] += ["incomplete"] if len(records) < merged.passes else []
    row["samples"] = sum(len(r.samples) for r in records)
    row["first_call_s"] = _middle(r.first_call_s for r in records)
    for name in ("warm", "call"):
        row[f"{name}_median_s"] = _middle(_middle(getattr(r, f"{name}_samples")) for r in records)
    shares = []
    for pass_index, record in merged.records.items():
        copy = bandwidths.get((record.environment, pass_index))
        median, ideal = _middle(record.samples), record.cost.get("bytes")
        if copy and median and ideal is not None:
            shares.append(ideal / median / copy)
    row["roofline"] = _middle(shares)
    if shares and min(shares) > 1:
        row["flags"].append("in-cache" if row["ideal_bytes"] <= merged.cache_bytes else "above-copy-bandwidth")
    return row


def _blocks(rows: list[Row]) -> dict[tuple[str, ...], list[int]]:
    """Indices of the measured rows of each comparison: same ``group``, same environment, same version of the code."""
    blocks: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row["median_s"] is not None:
            blocks[row["group"], row["environment"], row["variant"]].append(i)
    return blocks


def _add_speedups(rows: list[Row], ratios: _Ratios, names: dict[str, str]) -> None:
    pairs: list[tuple[int, int]] = []
    for members in _blocks(rows).values():
        base = next((i for i in members if rows[i]["implementation"] == names.get(rows[i]["operator"])), None)
        if base is not None:
            rows[base] |= {"speedup": 1.0, "speedup_low": 1.0, "speedup_high": 1.0}
            pairs += [(i, base) for i in members if i != base]
    for (i, _), slowdown in zip(pairs, ratios(pairs), strict=True):
        gain = slowdown.inverse()
        rows[i] |= {"speedup": gain.value, "speedup_low": gain.low, "speedup_high": gain.high}
        rows[i]["verdict"] = verdict(slowdown, RUN_MARGIN)
        if rows[i]["verdict"] == SLOWER:
            rows[i]["flags"].append("slower-than-baseline")


def _add_winners(rows: list[Row], ratios: _Ratios) -> None:
    """Mark the fastest of each block ``alone``, or it and all that are not clearly slower ``tied``.

    Clearly slower: the whole interval of the pass-by-pass ratio to the fastest lies beyond ``RUN_MARGIN``. A point
    estimate that wins by 2 % wins in one run and loses in the next; naming both is the answer that stays.
    """
    pairs: list[tuple[int, int]] = []
    for members in _blocks(rows).values():
        first = min(members, key=lambda i: (rows[i]["median_s"], rows[i]["implementation"]))
        rows[first]["winner"] = "alone" if len(members) > 1 else ""
        pairs += [(i, first) for i in members if i != first]
    for (i, first), ratio in zip(pairs, ratios(pairs), strict=True):
        if not ratio.low > 1 + RUN_MARGIN:
            rows[i]["winner"] = rows[first]["winner"] = "tied"


def winners(rows: Iterable[Row]) -> dict[str, list[str]]:
    """group -> implementations that won it (several: a tie), by name; groups with one measured case are left out."""
    out: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["winner"]:
            out[row["group"]].append(row["implementation"])
    return {group: sorted(set(names)) for group, names in out.items()}


def status_counts(rows: Iterable[Row]) -> dict[str, int]:
    """How many cases have each status, worst first; statuses with none are absent."""
    counts = Counter(row["status"] for row in rows)
    return {status: counts[status] for status in _WORST_FIRST if counts[status]}

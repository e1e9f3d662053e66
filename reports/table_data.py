"""The data behind the page's table: columns as compact JSON, and what a row opens to in compressed chunks.

At 10,000 cases with 50 samples each the details are ten times the table; they are packed by deflate, a few hundred
cases a chunk, and the browser unpacks a chunk when one of its rows is opened.
"""

from __future__ import annotations

import base64
import json
import math
import statistics
import zlib
from collections.abc import Callable
from typing import Any

from spikemark.harness.records import Record
from spikemark.reports import environments, words
from spikemark.reports.rows import Report, Row

CHUNK = 200
MOST_SAMPLES = 300_000
SAMPLES_PER_CASE = 100
"""Samples on the page: at most ``MOST_SAMPLES``, or so many a case if that is more. Above it each pass's list is
thinned evenly by rank and says so; medians and intervals always come from all samples."""


def _time(row: Row) -> tuple[str, str]:
    value, low, high = (row[n] for n in ("median_s", "ci_low_s", "ci_high_s"))
    return words.seconds(value, low, high), words.seconds_interval(value, low, high)


def _gain(row: Row) -> tuple[str, str]:
    if row["baseline"]:
        return (words.factor(1), "baseline") if row["speedup"] is not None else ("–", "")
    value, low, high = (row[n] for n in ("speedup", "speedup_low", "speedup_high"))
    return words.factor(value, low, high), words.factor_interval(value, low, high)


def share(row: Row) -> str:
    """The roofline's share, with the digits that the time's interval allows."""
    return words.percent(row["roofline"], row["roofline_low"], row["roofline_high"])


def _only(write: Callable[[Any], str], name: str) -> Callable[[Row], tuple[str, str]]:
    return lambda row: (write(row[name]), "")


# Title, and how a number is written (text, small text); None where the bare number is never shown, only copied.
NUMBERS: dict[str, tuple[str, Callable[[Row], tuple[str, str]] | None]] = {
    "median_s": ("time", _time),
    "speedup": ("speed-up", _gain),
    "peak_bytes": ("peak memory", _only(words.size, "peak_bytes")),
    "saved_bytes": ("saved for backward", _only(words.size, "saved_bytes")),
    "roofline": ("of copy bandwidth", lambda row: (share(row), "")),
    "first_call_s": ("first call", _only(words.seconds, "first_call_s")),
    "max_error": ("max error", _only(lambda v: words.plain(v) if v is None else f"{v:.2g}", "max_error")),
    "noise": ("noise", lambda row: ("–" if row["noise"] is None else f"±{words.percent(row['noise'])}", "")),
    "ci_low_s": ("low", None),
    "ci_high_s": ("high", None),
    "speedup_low": ("speed-up low", None),
    "speedup_high": ("speed-up high", None),
    "ideal_bytes": ("ideal bytes", None),
    "samples": ("samples", None),
    "ambiguous": ("ambiguous", None),
}
NAMES = {
    "run": "run",
    "operator": "operator",
    "phase": "phase",
    "workload": "workload",
    "implementation": "implementation",
    "device": "device",
    "device_name": "device name",
    "dtype": "dtype",
    "batch": "batch",
    "time_steps": "T",
    "rate_asked": "rate",
    "status": "status",
    "flags": "findings",
    "reason": "reason",
}
HIDDEN = ("device_name", "reason")
ALWAYS = ("operator", "phase", "workload", "implementation", "status")
"""Columns of names that are shown even where all rows have the same; of others the value is said once, above."""
FILTERS = "run operator phase workload implementation device dtype batch time_steps rate_asked status flags".split()
ORDER = (
    "run operator phase workload implementation device dtype batch time_steps rate_asked status median_s speedup "
    "peak_bytes saved_bytes roofline noise first_call_s max_error flags device_name reason ci_low_s ci_high_s "
    "speedup_low speedup_high ideal_bytes samples ambiguous"
).split()


def name_text(name: str, row: Row) -> str:
    """What a column of names shows for a row."""
    if name == "rate_asked":
        return words.rate(row[name])
    if name == "flags":
        return ", ".join(words.clean(f) for f in row["flags"])
    return words.clean(row[name])


def columns(report: Report) -> list[dict[str, Any]]:
    """The table's columns in order; names as codes into a list, numbers with their text and small text."""
    out: list[dict[str, Any]] = []
    for name in ORDER:
        if name == "run" and not report.several:
            continue
        column: dict[str, Any] = {"id": name}
        if name in NAMES:
            texts = [name_text(name, row) for row in report.rows]
            codes: dict[str, int] = {}
            column |= {"title": NAMES[name], "codes": [codes.setdefault(t, len(codes)) for t in texts]}
            column |= {"values": list(codes), "filter": name in FILTERS}
            column["shown"] = name not in HIDDEN and (name in ALWAYS or len(codes) > 1 or len(texts) < 2)
            if name in ("batch", "time_steps", "rate_asked"):
                numbers = {t: row[name] for t, row in zip(texts, report.rows, strict=True)}
                column["order"] = [words.number(numbers[t]) for t in codes]
        else:
            title, write = NUMBERS[name]
            column |= {"title": title, "nums": [_six(row[name]) for row in report.rows], "shown": write is not None}
            if write is not None:
                pairs = [write(row) for row in report.rows]
                column["text"] = [p[0] for p in pairs]
                if any(p[1] for p in pairs):
                    column["small"] = [p[1] for p in pairs]
        out.append(column)
    return out


def common(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(title, value) of the columns that are not shown because every row has the same."""
    return [
        (c["title"], c["values"][0])
        for c in found
        if "codes" in c and not c["shown"] and c["id"] not in HIDDEN and len(c["values"]) == 1 and c["values"][0]
    ]


def _six(value: Any) -> float | None:
    """Six significant digits are more than any interval allows."""
    known = words.number(value)
    return None if known is None else float(f"{known:.6g}")


def dumps(value: Any) -> str:
    """JSON that can stand inside a script element: no character of it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def chunks(report: Report) -> list[str]:
    """Details of the rows, ``CHUNK`` rows each: JSON, deflated (zlib), base64."""
    most = _longest_list(report)
    index = {key: i for i, key in enumerate(environments.named(report))}
    out = []
    for start in range(0, len(report.rows), CHUNK):
        rows = [_detail(row, index.get(row["environment"]), most) for row in report.rows[start : start + CHUNK]]
        packed = zlib.compress(dumps(rows).encode(), 6)
        out.append(base64.b64encode(packed).decode())
    return out


def _detail(row: Row, environment: int | None, most: int) -> dict[str, Any]:
    return {
        "command": words.clean(row["command"]),
        "reason": words.clean(row["reason"] or ""),
        "environment": environment,
        "samples": _samples(row, most),
        "facts": [[title, pairs] for title, pairs in _facts(row) if pairs],
        "traces": row.get("traces", []),
    }


_SAMPLE_KINDS = (("cold", "samples"), ("warm", "warm_samples"), ("whole call", "call_samples"))


def _longest_list(report: Report) -> int:
    """How many samples of one kind and pass may be shown so that all lists together keep within the page's limit."""
    lengths = [
        len(values)
        for row in report.rows
        for r in row["records"]
        for _, n in _SAMPLE_KINDS
        if (values := getattr(r, n))
    ]
    limit = max(MOST_SAMPLES, SAMPLES_PER_CASE * len(report.rows))
    most = max(lengths, default=0)
    while most > 10 and sum(min(n, most) for n in lengths) > limit:
        most = most * 9 // 10
    return most


def _samples(row: Row, most: int) -> dict[str, Any]:
    """Samples by kind and pass as whole numbers of ``1/per`` units: [pass, samples taken, those shown]."""
    lists = [
        (title, r.pass_index, values)
        for title, name in _SAMPLE_KINDS
        for r in row["records"]
        if (values := [v for v in getattr(r, name) if math.isfinite(v)])
    ]
    if not lists:
        return {}
    middle = statistics.median(lists[0][2])
    scale, unit = words.time_unit(middle)
    digits = 4 - math.floor(math.log10(middle * scale)) if middle > 0 else 4
    factor = scale * 10.0**digits
    kinds: dict[str, list[list[Any]]] = {}
    for title, index, values in lists:
        shown = values if len(values) <= most else _thinned(values, most)
        kinds.setdefault(title, []).append([index, len(values), [round(v * factor) for v in shown]])
    return {"unit": unit, "per": 10.0**digits, "kinds": kinds}


def _thinned(values: list[float], most: int) -> list[float]:
    """``most`` of the values, evenly by rank, least and most among them."""
    ranked, last = sorted(values), len(values) - 1
    return [ranked[round(i * last / (most - 1))] for i in range(most)]


def _facts(row: Row) -> list[tuple[str, list[list[str]]]]:
    last: Record = row["records"][-1]
    time = [["median, cold", words.seconds(row["median_s"], row["ci_low_s"], row["ci_high_s"])]]
    if row["ci_low_s"] is not None:
        time.append(["95 % interval", words.seconds_interval(row["median_s"], row["ci_low_s"], row["ci_high_s"])])
    for title, name in (
        ("median, warm", "warm_median_s"),
        ("median, whole call", "call_median_s"),
        ("first call", "first_call_s"),
    ):
        if row[name] is not None:
            time.append([title, words.seconds(row[name])])
    time.append(["passes, samples", f"{row['passes']}, {row['samples']:,}"])
    if last.stop:
        time.append(["sampling ended", "interval narrow enough" if last.stop == "narrow" else words.clean(last.stop)])
    ledger = {k: max((r.memory[k] for r in row["records"] if k in r.memory), key=_size_order) for k in last.memory}
    return [
        ("Time", time if row["median_s"] is not None else []),
        ("Memory ledger", [[_title(k), _value(k, v)] for k, v in ledger.items()]),
        ("Verification", [[_title(k), _value(k, v)] for k, v in last.verification.items()]),
        ("Cost model", [[_title(k), _value(k, v)] for k, v in last.cost.items()]),
        ("More", [["spike rate achieved", words.percent(row["spike_rate"])], ["key", words.clean(row["key"])]]
         + [[_title(k), _value(k, v)] for k, v in last.details.items() if k != "baseline"]),
    ]  # fmt: skip


def _size_order(value: Any) -> float:
    known = words.number(value)
    return -1.0 if known is None else known


def _title(name: str) -> str:
    return words.clean(name).removesuffix("_bytes").removesuffix("_s").replace("_", " ")


def _value(name: str, value: Any) -> str:
    """A detail's value with the unit that its name tells."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if name.endswith("_bytes") or name == "bytes":
            return words.size(value)
        if name.endswith("_s"):
            return words.seconds(value)
        return words.plain(value)
    if isinstance(value, (dict, list)):
        return words.clean(json.dumps(value, ensure_ascii=False, default=str))[:2000]
    return words.clean(environments.value_text(value))

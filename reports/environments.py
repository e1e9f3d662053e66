"""What differs between the environments of the runs in a report, and which may be put side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spikemark.harness.environment import MUST_MATCH, differences
from spikemark.harness.parts import base_key
from spikemark.harness.statistics import device_id
from spikemark.reports import words

if TYPE_CHECKING:
    from spikemark.reports.rows import Report

VOLATILE = ("load", "temperature", "clock", "clocks", "free_bytes", "uptime")
"""Last parts of field names that change from minute to minute and say nothing about comparability."""
_ABOUT_THE_DEVICE = ("kind", "device_name", "threads", "cpu.", "gpu.")
SOFTWARE = (*(f for f in MUST_MATCH if not f.startswith(_ABOUT_THE_DEVICE)), "project.commit", "project.dirty")
"""What must be equal before times on two devices are divided: everything but what makes them two devices."""


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested description as dotted fields: ``{"a": {"b": 4}, "c": {}}`` -> ``{"a.b": 4}``."""
    out: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict):
            out |= flatten(item, f"{name}.")
        else:
            out[name] = item
    return out


def steady(environment: dict[str, Any]) -> dict[str, Any]:
    """The flattened environment without what changes from minute to minute."""
    return {k: v for k, v in flatten(environment).items() if k.rsplit(".", 1)[-1] not in VOLATILE}


def identity(environment: dict[str, Any]) -> str:
    """Equal for two environments whose results may be drawn on one axis."""
    return repr(sorted((k, repr(v)) for k, v in steady(environment).items()))


def software_differences(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """What differs besides the device itself, as (field, here, there): a ratio of devices would mix two causes."""
    return differences(_without_threads(one), _without_threads(other), SOFTWARE)


def _without_threads(environment: dict[str, Any]) -> dict[str, Any]:
    """The environment without the variables that set a number of threads: ``cpu:1`` is made by them."""
    switches = environment.get("switches") or {}
    variables = switches.get("variables")
    if not isinstance(variables, dict):
        return environment
    kept = {k: v for k, v in variables.items() if not k.endswith("_NUM_THREADS")}
    return environment | {"switches": switches | {"variables": kept}}


def named(report: Report) -> dict[str, dict[str, Any]]:
    """Every environment of the report by its key, in order."""
    found: dict[str, dict[str, Any]] = report.run.meta["environments"]
    return found


def title(report: Report, key: str) -> str:
    """Short name of an environment: "cpu:1", with the runs' names in front when there are several runs.

    Where two would have the same name, its device's name tells them apart, or else the key that ``run.json`` has.
    """
    return report.titles.get(key, key)


def titles(report: Report) -> dict[str, str]:
    """The titles of all environments, each only once."""
    places = {key: [p["name"] for p in report.parts if key in (p.get("environments") or {})] for key in named(report)}
    short = {key: base_key(key) for key in places}
    if report.several:
        short = {key: f"{words.listed(names, 2)} · {short[key]}" if names else key for key, names in places.items()}
    telling = {key: f"{short[key]} · {env.get('device_name') or key}" for key, env in named(report).items()}
    out = {}
    for key, name in short.items():
        names = (name, telling[key])
        out[key] = next((n for n, every in zip(names, (short, telling), strict=True) if _once(n, every)), key)
    return out


def _once(name: str, among: dict[str, str]) -> bool:
    return list(among.values()).count(name) == 1


def describe(environment: dict[str, Any]) -> str:
    """One line: device name, threads, torch."""
    parts = [environment.get("device_name") or "unknown device"]
    if device_id(environment):
        parts[0] = f"{parts[0]} #{device_id(environment)[:6]}"
    if environment.get("kind") == "cpu" and environment.get("threads"):
        n = environment["threads"]
        parts.append("1 thread" if n == 1 else f"{n} threads")
    torch = (environment.get("versions") or {}).get("torch")
    if torch:
        parts.append(f"torch {torch}")
    commit = (environment.get("project") or {}).get("commit")
    if commit:
        dirty = " with local changes" if environment["project"].get("dirty") else ""
        parts.append(f"commit {str(commit)[:10]}{dirty}")
    return ", ".join(str(p) for p in parts)


def differing(report: Report) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """(environment titles, [(field, value in each environment)]) of every field that is not the same everywhere."""
    found = named(report)
    flat = [flatten(env) for env in found.values()]
    names = [title(report, key) for key in found]
    fields = list(dict.fromkeys(k for one in flat for k in one))
    rows = []
    for name in fields:
        values = [value_text(one.get(name)) for one in flat]
        if len(set(values)) > 1:
            rows.append((name, values))
    return names, rows


def value_text(value: Any) -> str:
    """A field's value as text."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(v) for v in value)
    return str(value)

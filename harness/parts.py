"""What a run folder was made of: its parts, their identifiers, the environments and passes they are told apart by.

Torch-free. A *part* is a run as it was made. A folder that was merged from several keeps what each part's ``run.json``
said in ``parts``, and every record of a part says in ``details["origin"]`` which part and which of its passes it is
from. Records without one were measured by the folder's own run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from spikemark.harness import environment as env
from spikemark.harness.journal import dumps
from spikemark.harness.records import Record
from spikemark.harness.runfolder import Run

Part = dict[str, Any]
_NOT_CARRIED = ("schema", "parts", "environments", "derived")
_OF_ONE_FOLDER = ("--out", "-o", "--device", "--time-limit")
"""Options of ``run`` in which the parts of a folder may differ and yet be continued by one command."""


def run_id(run: Run) -> str:
    """What tells this run from all others; a copy of the folder has the same.

    Runs made before there was such a field are told by what was asked for and by the first figures they measured.
    """
    if run.meta.get("id"):
        return str(run.meta["id"])
    first: Any = run.calibrations[0] if run.calibrations else run.records[0].to_json() if run.records else None
    told = [run.meta.get(name) for name in ("started", "seed", "preset", "arguments")]
    return hashlib.sha256(dumps([told, first]).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def base_key(key: str) -> str:
    """An environment's key without the number that tells it from others of the same name: ``cpu (2)`` -> ``cpu``."""
    return re.sub(r" \(\d+\)$", "", key)


def free_key(key: str, taken: Iterable[str]) -> str:
    """``key`` (or ``key (2)``, ``key (3)``, ...), whatever is not in ``taken``."""
    names, number = set(taken), 1
    while (found := base_key(key) if number == 1 else f"{base_key(key)} ({number})") in names:
        number += 1
    return found


def same_environment(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether rows of both may be passes of one case: the same device and code, as far as both tell."""
    return bool(a) == bool(b) and not env.differences(a, b, env.MUST_MATCH_IN_ONE_RUN)


def origin(record: Record, own: str) -> tuple[str, int]:
    """(identifier of the part, pass in that part) of a record in a run whose own identifier is ``own``."""
    return origin_of(record.details.get("origin"), own, record.pass_index)


def origin_of(told: Any, own: str, pass_index: int) -> tuple[str, int]:
    if isinstance(told, dict) and isinstance(told.get("run"), str) and isinstance(told.get("pass"), int):
        return told["run"], told["pass"]
    return own, pass_index


def parts(run: Run, name: str | None = None) -> list[Part]:
    """The parts of a run: what it was merged from, and itself (called ``name``) if it has measured anything itself."""
    known = [dict(part) for part in run.meta.get("parts") or []]
    if known and all("origin" in record.details for record in run.records):
        return known
    own = {key: value for key, value in run.meta.items() if key not in _NOT_CARRIED}
    used = {r.environment or r.case.device for r in run.records if "origin" not in r.details}
    environments: dict[str, Any] = run.meta.get("environments") or {}
    if known:
        environments = {key: value for key, value in environments.items() if key in used}
    own |= {"id": run_id(run), "name": name or run.path.name, "damaged": run.damaged, "environments": environments}
    return [*known, own]


def missing(run: Run) -> list[str]:
    """Keys of cases that a part was to measure and that have no record in that part's environments."""
    measured = {(r.environment or r.case.device, r.case.key) for r in run.records}
    everywhere = list(run.meta.get("environments") or {})
    out: dict[str, None] = {}
    for part in run.meta.get("parts") or []:
        places = list(part.get("environments") or {}) or everywhere
        lacking = [k for k in part.get("unmeasured") or [] if not any((place, k) in measured for place in places)]
        out |= dict.fromkeys(lacking)
    return list(out)


def device_of(key: str) -> str:
    """The device of an environment's key: without its number and the version of an A/B run."""
    return re.sub(r" \[.*\]$", "", base_key(key), flags=re.DOTALL)


def log_name(part: str, name: str) -> str:
    """What a part's log is called in a folder of several parts."""
    return f"{re.sub('[^0-9A-Za-z]', '', part)[:8]}-{name}"


def common_arguments(every: Sequence[Part], devices: Iterable[str]) -> list[str] | None:
    """The command line that continues all parts, with all their ``devices``; None if they asked for several things."""
    asked = [_plan(part) for part in every]
    words = asked[0][0]
    if words[:1] != ["run"] or any((_options(said), rest) != (_options(words), asked[0][1]) for said, rest in asked):
        return None
    if any(word.partition("=")[0] == "--engine" for word in words):  # its devices are of other machines
        return None
    return [*words, *(word for device in devices for word in ("--device", device))]


def _plan(part: Part) -> tuple[list[str], Any]:
    """A part's command line without what is of its folder only, and what must not change when it is continued."""
    words: list[str] = []
    skip = False
    for word in map(str, part.get("arguments") or []):
        option = word.partition("=")[0]
        if not skip and not (option in (*_OF_ONE_FOLDER, "--resume") or re.match(r"-o.", word)):
            words.append(word)
        skip = not skip and word in _OF_ONE_FOLDER
    return words, [part.get(name) for name in ("seed", "preset", "options")]


def _options(words: Sequence[str]) -> list[list[str]]:
    """Options with their values, in no order: selections may be given in any (seed and preset are compared apart)."""
    found: list[list[str]] = [[]]
    for word in words:
        if word.startswith("-"):
            found.append([])
        found[-1] += word.split("=", 1) if word.startswith("--") else [word]
    return sorted(found)


def times(every: Sequence[Part]) -> dict[str, float]:
    """Seconds of all parts together (see ``Supervisor.times``)."""
    names = ("wall_s", "kernel_s", "torch_import_s")
    told = [p["time"] for p in every if isinstance(p.get("time"), dict)]
    total = {name: round(sum(t[name] for t in told if isinstance(t.get(name), (int, float))), 4) for name in names}
    if total["wall_s"] > 0:
        share = 1 - (total["kernel_s"] + total["torch_import_s"]) / total["wall_s"]
        total["harness_share"] = round(share, 4)
    return total

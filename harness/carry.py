"""Logs and traces of the parts of a merged run, copied into its folder under names that tell the parts apart.

Torch-free. A file of a part is called ``<beginning of the part's identifier>-<its name>``; what was merged before has
such a name already. Summaries of traces learn to which environment they belong, since the same case of another part may
have been traced elsewhere. Links are not followed: a run folder from elsewhere must not bring in files of this machine.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spikemark.harness.journal import dumps, storage_error
from spikemark.harness.parts import log_name, run_id
from spikemark.harness.runfolder import Run
from spikemark.harness.trace.summary import SUFFIX


def carry(run: Run, places: Mapping[str, str], folder: Path) -> None:
    """Copy logs and traces of ``run`` into the run folder ``folder``; ``places`` says where its environments are now.

    Raises ``StorageError``; a file that cannot be read is a ``StorageError`` that names it.
    """
    for kind in ("logs", "traces"):
        source, target = run.path / kind, folder / kind
        try:
            files = sorted(p for p in source.iterdir() if p.is_file() and not p.is_symlink()) if source.is_dir() else []
            names = {path.name: _name(run, path.name) for path in files}
            target.mkdir(exist_ok=True)
            for path in files:
                if path.name.endswith(SUFFIX):
                    _summary(run, path, target / names[path.name], names, places)
                else:
                    _copy(path, target / names[path.name])
        except OSError as error:
            raise storage_error(Path(error.filename or source), error) from None


def _name(run: Run, name: str) -> str:
    marks = tuple(log_name(str(part["id"]), "") for part in run.meta.get("parts") or [])
    return name if marks and name.startswith(marks) else log_name(run_id(run), name)


def _copy(path: Path, target: Path) -> None:
    """Copy a file; the same file met again stays one, another of its name gets a number."""
    place, number = target, 1
    while place.exists():
        if filecmp.cmp(path, place, shallow=False):
            return
        number += 1
        place = target.with_name(f"{target.stem}-{number}{target.suffix}")
    shutil.copyfile(path, place)


def _summary(run: Run, path: Path, target: Path, names: Mapping[str, str], places: Mapping[str, str]) -> None:
    """Copy a trace's summary with its files' new names and its environment; one that cannot be read as it is."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        files = [file | {"name": names.get(Path(file["name"]).name, file["name"])} for file in data["files"]]
        told = data.get("environment") or _environment(run, str(data["key"]))
        text = dumps(data | {"files": files, "environment": places.get(told, "")}) + "\n"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        _copy(path, target)
        return
    if not target.exists() or target.read_text(encoding="utf-8", errors="replace") != text:
        place = target if not target.exists() else target.with_name(f"2-{target.name}")
        place.write_text(text, encoding="utf-8")


def _environment(run: Run, key: str) -> str:
    """The one environment that a case was measured in; empty if there are several or none."""
    found = {r.environment or r.case.device for r in run.records if r.case.key == key}
    return found.pop() if len(found) == 1 else ""

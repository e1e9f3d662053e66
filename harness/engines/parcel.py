"""What a node is sent: cases, options, and the content of plug-ins and recordings, as JSON and bytes.

Torch-free, Ray-free. Workload files need not go along: a case holds all of its layer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePath
from typing import Any

from spikemark.harness import environment as env
from spikemark.harness.errors import UsageError
from spikemark.harness.plan import RunOptions, Variant
from spikemark.harness.process import WorkerCommand
from spikemark.harness.records import Case, Record
from spikemark.harness.runfolder import JOURNAL, RunFolder, new_meta

_OWN = ("out", "plugins", "variants", "devices", "resume")
"""Options that a node has of its own."""
_PLAN, _EVENTS = "{plan}", "{events}"


@dataclass(frozen=True)
class Inputs:
    """Files that go along, each once: their last name and content. ``places`` maps paths here to their numbers."""

    names: list[str]
    contents: list[bytes]
    places: dict[str, int]


def inputs(cases: Sequence[Case], plugins: Sequence[str]) -> Inputs:
    """The files that ``cases`` and ``plugins`` need. ``UsageError`` names one that cannot be read."""
    recordings = [case.problem.recording.path for case in cases if case.problem.recording is not None]
    paths = list(dict.fromkeys([*plugins, *recordings]))
    try:
        contents = [Path(path).read_bytes() for path in paths]
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror or error}") from None
    return Inputs([PurePath(path).name for path in paths], contents, {path: i for i, path in enumerate(paths)})


def pack(
    cases: Sequence[Case],
    options: RunOptions,
    found: Inputs,
    worker_command: WorkerCommand,
    node: dict[str, str],
    known: dict[str, dict[str, Any]],
) -> str:
    """The letter to a node: JSON. ``node`` is its ``kind`` and ``id``.

    ``known`` maps devices and their short names to the ``environment`` and ``records`` that exist of them.
    """
    words = worker_command(Path(_PLAN), -1)
    words = [{sys.executable: "{python}", "-1": _EVENTS}.get(word, word) for word in words]
    told = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _OWN}
    return json.dumps(
        {
            "source": env.project()["source"],
            "cases": [_with_recording(case, {p: str(i) for p, i in found.places.items()}).to_json() for case in cases],
            "options": told,
            "plugins": [found.places[path] for path in options.plugins],
            "names": found.names,
            "worker": words,
            "node": node,
            "earlier": known,
        }
    )


def _with_recording(case: Case, places: dict[str, str]) -> Case:
    """``case`` with its recording at another place."""
    recording = case.problem.recording
    if recording is None:
        return case
    return replace(case, problem=replace(case.problem, recording=replace(recording, path=places[recording.path])))


@dataclass(frozen=True)
class Unpacked:
    """A letter as read on the node. Recordings and plug-ins lie in its folder."""

    cases: list[Case]
    options: RunOptions
    worker_command: WorkerCommand
    source: str
    node: dict[str, str]
    earlier: dict[str, dict[str, Any]]


def store(folder: Path, letter: str, contents: Sequence[bytes]) -> None:
    """Lay a letter and its files into a node's folder. ``OSError`` if the disk is full."""
    for number, (name, content) in enumerate(zip(json.loads(letter)["names"], contents, strict=True)):
        path = _place(folder, number, name)
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    (folder / "letter.json").write_text(letter, encoding="utf-8")


def _place(folder: Path, number: int, name: str) -> Path:
    """Two files may have one name."""
    return folder / "inputs" / str(number) / PurePath(name).name


def unpack(folder: Path) -> Unpacked:
    """Read the letter in ``folder``."""
    letter = json.loads((folder / "letter.json").read_text(encoding="utf-8"))
    paths = [str(_place(folder, number, name)) for number, name in enumerate(letter["names"])]
    places = {str(number): path for number, path in enumerate(paths)}
    cases = [_with_recording(Case.from_json(data), places) for data in letter["cases"]]
    options = RunOptions(
        out=folder / "run",
        plugins=tuple(paths[number] for number in letter["plugins"]),
        variants=(Variant(),),
        devices=tuple(dict.fromkeys(case.device for case in cases)),
        **letter["options"],
    )

    def command(plan: Path, events: int) -> list[str]:
        own = {"{python}": sys.executable, _PLAN: str(plan), _EVENTS: str(events)}
        return [own.get(word, word) for word in letter["worker"]]

    return Unpacked(cases, options, command, letter["source"], letter["node"], letter["earlier"])


def earlier(record: Record, device: str) -> dict[str, Any]:
    """What a node must know of a record that exists, by the device's name there: all but its times."""
    blank: dict[str, Any] = {"samples": [], "warm_samples": [], "call_samples": [], "details": {}}
    case = replace(record.case, device=device)
    return replace(record, case=case, environment=device, **blank).to_json()


def lay_out(options: RunOptions, before: dict[str, dict[str, Any]]) -> tuple[RunOptions, int]:
    """Make a node's run folder as if it had measured ``before`` itself: device -> its environment and records.

    Returns the options that continue it, and the bytes of its journal.
    """
    meta = new_meta([], seed=options.seed, preset=options.preset, passes=options.passes, planned=0)
    meta |= {"options": options.measuring(), "environments": {d: said["environment"] for d, said in before.items()}}
    folder = RunFolder.create(options.out, meta)
    for said in before.values():
        for data in said["records"]:
            folder.append(Record.from_json(data))
    folder.close()
    return replace(options, resume=True), (options.out / JOURNAL).stat().st_size

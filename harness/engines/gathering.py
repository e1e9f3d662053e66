"""What nodes tell, written into the one run folder as it comes: devices get names of their own, rows of their own.

Torch-free, Ray-free. A device of a node is called ``cuda:0@A100-3f2a9c`` in results: its name there, its kind, and a
hash of the GPU's UUID (of the node, for a processor). So every row is of one physical device: when a lost node's part
is measured again, another device's rows stay apart, and the same device goes on where it was.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from spikemark.harness.engines import parcel
from spikemark.harness.engines.kinds import Job, device_name, plain
from spikemark.harness.plan import RunOptions
from spikemark.harness.process import one_line
from spikemark.harness.progress import Progress
from spikemark.harness.records import UNAVAILABLE, UNMEASURED, Case, Record
from spikemark.harness.remaining import Remaining
from spikemark.harness.runfolder import Run, RunFolder

MUST_AGREE = ("spikemark", "source", "python", "torch")
ELSEWHERE = "; measured again elsewhere"


def _without_log(text: str) -> str:
    """A reason without the name of the log that says more: it has stayed on the node."""
    return re.sub(r" \(see logs/[^)]*\)", "", text)


class Part:
    """A job's cases, by their devices' names on the node, and what is left of them."""

    def __init__(self, job: Job, cases: list[Case], options: RunOptions) -> None:
        self.job, self.cases, self.options = job, {case.key: case for case in cases}, options
        self.names: dict[str, str] = {}
        self.remaining = Remaining(cases, options)

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"{plain(self.job.kind)}-{self.job.host.short}"

    def name(self, device: str) -> str:
        """What results call a device; before it has said who it is, any of its kind."""
        return self.names.get(device) or device_name(device, self.job.kind)


class Gathering:
    """The run folder of a run on several nodes. ``before`` is what an earlier part of the run has measured."""

    def __init__(self, folder: RunFolder, before: Run | None, progress: Progress, every: bool = False) -> None:
        """``every``: each node has a part of its own, so none is measured in place of another of its kind."""
        self.folder, self.progress, self.every = folder, progress, every
        self.parts: list[Part] = []
        self.versions: dict[str, dict[str, str]] = {}
        self._records: dict[str, list[Record]] = {}
        self._began = time.monotonic()
        self._times = dict.fromkeys(("device_s", "kernel_s", "torch_import_s"), 0.0)
        for record in before.records if before else []:
            self._remember(record)

    def _remember(self, record: Record) -> None:
        if not record.details.get(UNMEASURED):
            self._records.setdefault(record.case.device, []).append(record)

    def expect(self, job: Job, cases: Iterable[Case], options: RunOptions) -> Part:
        """A part of the run that ``job``'s node is to measure."""
        part = Part(job, list(cases), options)
        self.parts.append(part)
        kind = f"@{plain(job.kind)}"
        missing = [key for key in self.folder.meta["unmeasured"] if kind not in key]  # of its kind: planned anew
        if missing != self.folder.meta["unmeasured"]:
            self.folder.update(unmeasured=missing)
        return part

    @property
    def left(self) -> int:
        """How many measurements are left, as far as is known."""
        return sum(part.remaining.count() for part in self.parts)

    def known(self, part: Part) -> dict[str, dict[str, Any]]:
        """What devices of this kind have measured, for the node that may have one of them (see ``parcel.pack``)."""
        found: dict[str, dict[str, Any]] = {}
        for device in part.remaining.devices:
            begin = device_name(device, part.job.kind) + "-"
            for name, records in self._records.items():
                described = self.folder.meta["environments"].get(name)
                if name.startswith(begin) and described:
                    own = {key: value for key, value in described.items() if key != "node"} | {"device": device}
                    said = {"environment": own, "records": [parcel.earlier(r, device) for r in records]}
                    found.setdefault(device, {})[name.removeprefix(begin)] = said
        return found

    def hear(self, part: Part, news: dict[str, Any]) -> None:
        """Write down what ``Node.poll`` gave. ``StorageError`` for a full disk, ``ValueError`` for nonsense."""
        told = news["told"]
        if told and part.label not in self.versions:
            self.versions[part.label] = told["versions"]
            if told["names"]:
                self._adopt(part, {d: device_name(d, part.job.kind, short) for d, short in told["names"].items()})
        self._describe(part, news["environments"])
        for line in news["lines"]:
            data = json.loads(line)
            if data["kind"] == "record":
                self._take(part, Record.from_json(data))
            else:
                plain_line = {k: v for k, v in data.items() if k not in ("kind", "schema")}
                self.folder.append_calibration(plain_line | {"environment": part.name(data["environment"])})
        self._mark_lost({part.name(device): _without_log(str(why)) for device, why in news["lost"].items()})
        if news["ended"]:
            for name in self._times:
                self._times[name] += float((news["ended"].get("time") or {}).get(name, 0.0))

    def _adopt(self, part: Part, names: dict[str, str]) -> None:
        """Call its devices so; what they have measured is not left, and they are not lost."""
        part.names, part.remaining = names, Remaining(list(part.cases.values()), part.options)
        for device, name in names.items():
            for record in self._records.get(name, []):
                part.remaining.note(replace(record, case=replace(record.case, device=device)))
        lost = {name: why for name, why in (self.folder.meta.get("lost") or {}).items() if name not in names.values()}
        if lost != (self.folder.meta.get("lost") or {}):
            self.folder.update(lost=lost)

    def _describe(self, part: Part, environments: dict[str, dict[str, Any]]) -> None:
        """Store the environments of a node's devices, once each."""
        known = self.folder.meta["environments"]
        new = {}
        for device, found in environments.items():
            node = {"kind": plain(part.job.kind)} | ({} if found.get("gpu") else {"id": part.job.host.short})
            if part.name(device) not in known:
                new[part.name(device)] = found | {"device": part.name(device), "node": node}
        if new:
            self.folder.update(environments=known | new)

    def _take(self, part: Part, record: Record) -> None:
        case = part.cases.get(record.case.key)
        if case is None:
            raise ValueError(f"a row of a case that was not asked for: {record.case.key}")
        part.remaining.note(record)
        name = part.name(case.device)
        record.case, record.environment = replace(case, device=name), name
        record.details = {key: value for key, value in record.details.items() if key != "log"}
        record.reason = _without_log(record.reason)
        self.folder.append(record)
        self._remember(record)
        self.progress.case(record.case.key, f"pass {record.pass_index + 1}/{part.options.passes} {name}")
        self.progress.advance(left=self.left)

    def _mark_lost(self, found: dict[str, str]) -> None:
        known = self.folder.meta.get("lost") or {}
        if found.items() - known.items():
            self.folder.update(lost=known | found)

    def move(self, part: Part, job: Job, why: str) -> Part:
        """Another node takes over: what the first has measured stays; its lost devices are said to be so."""
        self.parts.remove(part)
        new = self.expect(job, part.cases.values(), part.options)
        self._adopt(new, dict(part.names))  # until it says otherwise
        self._mark_lost(dict.fromkeys(part.names.values(), why + ELSEWHERE))
        return new

    def end(self, part: Part, why: str) -> None:
        """Its node has come to an end. What it has left undone says ``why``.

        What it has done stands for others of its kind that were lost before: their rows without times count no more.
        """
        if part.remaining.count():
            self.give_up(part, why or "its run has ended without these rows")
            return
        if self.every:
            return
        lost, replaced = dict(self.folder.meta.get("lost") or {}), list(self.folder.meta.get("replaced") or [])
        for device, own in part.names.items():
            generic = device_name(device, part.job.kind)
            for name in [n for n in lost if n != own and (n == generic or n.startswith(f"{generic}-"))]:
                replaced.append(name)
                why = lost.pop(name).removesuffix(ELSEWHERE)
                if name in self._records:
                    lost[name] = why + ELSEWHERE
        if replaced != (self.folder.meta.get("replaced") or []):
            self.folder.update(lost=lost, replaced=list(dict.fromkeys(replaced)))

    def give_up(self, part: Part, why: str) -> None:
        """What the part has not measured gets rows with the reason; a run that continues this one measures them."""
        why = _without_log(one_line(why, 500))
        for device in part.remaining.devices:
            lacking = part.remaining.lacks(device)
            for _, case in part.remaining.give_up(device):
                name = part.name(device)
                details = {UNMEASURED: True}
                row = Record(replace(case, device=name), 0, UNAVAILABLE, why, environment=name, details=details)
                self.folder.append(row)
            if lacking:
                self._mark_lost({part.name(device): why})
        self.progress.message(f"{part.label}: {why}")

    def disagreement(self) -> str:
        """One line on what differs between nodes, or ''."""
        said = []
        for what in MUST_AGREE:
            by_value: dict[str, list[str]] = {}
            for label, found in self.versions.items():
                by_value.setdefault(str(found.get(what)), []).append(label)
            if len(by_value) > 1:
                said.append(f"{what} " + " and ".join(f"{v} ({', '.join(who)})" for v, who in by_value.items()))
        return f"the nodes differ in {'; '.join(said)}" if said else ""

    def times(self) -> dict[str, float]:
        """``run.json``'s field ``time`` (see ``Supervisor.times``), of the nodes that told theirs."""
        found = {"wall_s": time.monotonic() - self._began} | self._times
        busy = max(found["wall_s"], found["device_s"])
        found["harness_share"] = 1 - (found["kernel_s"] + found["torch_import_s"]) / busy
        return {name: round(value, 4) for name, value in found.items()}

    def planned(self) -> list[Case]:
        """All cases by the names they have in results."""
        return [replace(c, device=part.name(c.device)) for part in self.parts for c in part.cases.values()]

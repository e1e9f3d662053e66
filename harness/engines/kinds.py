"""Kinds of nodes in a cluster: which there are, and which node measures for each. Torch-free, Ray-free.

Nodes are named in results by their kind and a short hash. A kind is a type of accelerator (Ray's resource
``accelerator_type:X``), or a resource that somebody gave the nodes a name with (``--kind``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from spikemark.harness.errors import UsageError

ACCELERATOR = "accelerator_type:"
UNNAMED = "GPU"
"""The kind of GPUs whose type Ray does not know."""
_COMMON = re.compile(r"CPU|GPU|memory|object_store_memory|node:.*|accelerator_type:.*|.*_group_.*")


@dataclass(frozen=True)
class Host:
    """A node of the cluster: Ray's identifier, which never gets into results, and what it has."""

    id: str
    resources: dict[str, float]

    @property
    def short(self) -> str:
        """What results may call it."""
        return hashlib.sha256(self.id.encode()).hexdigest()[:6]

    @property
    def gpus(self) -> int:
        """How many GPUs it has."""
        return int(self.resources.get("GPU", 0))

    @property
    def accelerators(self) -> list[str]:
        """Its kinds of GPU."""
        named = [name.removeprefix(ACCELERATOR) for name in self.resources if name.startswith(ACCELERATOR)]
        return named or ([UNNAMED] if self.gpus else [])

    @property
    def others(self) -> list[str]:
        """Its resources that somebody has named."""
        return [name for name in self.resources if not _COMMON.fullmatch(name)]

    def has(self, kind: str) -> bool:
        """Whether it is of this kind."""
        return kind in self.accelerators or kind in self.others


@dataclass(frozen=True)
class Job:
    """One node to measure on, as one of its kind, and its devices by their names there."""

    kind: str
    host: Host
    devices: tuple[str, ...]


def hosts(table: Iterable[dict[str, Any]]) -> list[Host]:
    """The nodes that are alive, of ``ray.nodes()``."""
    return [Host(str(row["NodeID"]), dict(row.get("Resources") or {})) for row in table if row.get("Alive")]


def jobs(found: Sequence[Host], kinds: Sequence[str], every: bool, devices: Sequence[str]) -> list[Job]:
    """One job a kind, or with ``every`` one a node with all its GPUs. ``kinds``: none named means all kinds of GPU.

    ``UsageError`` for a kind that no node has, for a cluster without GPUs and for ``devices`` that a node lacks.
    """
    named = list(dict.fromkeys(name for host in found for name in (*host.accelerators, *host.others)))
    known = f"; there are: {', '.join(named)}" if named else ""
    for kind in kinds:
        if kind not in named:
            raise UsageError(f"no node of the cluster is of kind {kind!r}{known}")
    wanted = list(dict.fromkeys(kinds or (name for host in found if host.gpus for name in host.accelerators)))
    if not wanted:
        raise UsageError(f"the cluster has no GPU: name a resource that stands for a kind of node with --kind{known}")
    out = []
    for kind in wanted:
        own = sorted((host for host in found if host.has(kind)), key=lambda h: (-h.gpus, -h.resources.get("CPU", 0)))
        out += [Job(kind, host, local_devices(devices, host, kind, every)) for host in (own if every else own[:1])]
    return out


def another(job: Job, found: Sequence[Host], taken: Collection[str]) -> Job | None:
    """The job on a node that can take it over: another of its kind that is not ``taken``, else its own if it lives."""
    fit = [host for host in found if host.has(job.kind) and host.gpus >= job.host.gpus]
    free = [host for host in fit if host.id not in taken] or [host for host in fit if host.id == job.host.id]
    return Job(job.kind, free[0], job.devices) if free else None


def local_devices(asked: Sequence[str], host: Host, kind: str, every: bool) -> tuple[str, ...]:
    """Names of the devices to measure on a node. ``UsageError`` if it lacks one that was asked for."""
    gpus = [f"cuda:{i}" for i in range(host.gpus)]
    if not asked:
        return tuple(gpus if every else gpus[:1]) or ("cpu",)
    out: list[str] = []
    for name in asked:
        if name == "all":
            out += ["cpu", *gpus]
        elif name.startswith("cuda"):
            device = "cuda:0" if name == "cuda" else name
            if device not in gpus:
                there = f"have {gpus[0]} to {gpus[-1]}" if len(gpus) > 1 else "have cuda:0" if gpus else "have no GPU"
                raise UsageError(f"device {name!r}: nodes of kind {kind} {there}")
            out += gpus if every and name == "cuda" else [device]
        else:
            out.append(name)
    return tuple(dict.fromkeys(out))


def plain(kind: str) -> str:
    """A kind as a part of names in results: they become parts of keys and file names."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", kind)[:40] or "_"


def device_name(device: str, kind: str, short: str = "") -> str:
    """What results call a device of a node: ``cuda:0@A100-3f2a9c``; without ``short`` any of its kind."""
    return f"{device}@{plain(kind)}" + (f"-{short}" if short else "")

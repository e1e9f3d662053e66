"""``spikemark list``: operators, implementations, workloads and devices. The first and third import no torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from spikemark.commands import terminal
from spikemark.harness.errors import UsageError

IF_NAMED = "only if named"


def run(arguments: argparse.Namespace) -> int:
    """Print what there is of a kind, or the overview; ``--json`` for programs."""
    for option, given, kind in (
        ("--workload-file", arguments.workload_files, "workloads"),
        ("--plugin", arguments.plugins, "implementations"),
        ("--all", arguments.all, "implementations"),
    ):
        if given and arguments.what != kind:
            raise UsageError(f"{option} is for `spikemark list {kind}`")
    if arguments.what is None:
        if arguments.json:
            raise UsageError(f"list --json needs one of {', '.join(LISTS)}")
        for name, (text, _, _) in LISTS.items():
            print(f"spikemark list {name:16} {text}")
        return 0
    _, collect, columns = LISTS[arguments.what]
    entries = collect(arguments)
    if arguments.json:
        print(json.dumps(entries, indent=1))
        return 0
    shown = [entry for entry in entries if arguments.all or entry.get("role") != IF_NAMED]
    print(terminal.table(columns, [[_cell(entry[c.lower()]) for c in columns] for entry in shown]))
    if len(shown) < len(entries):
        print(f"and {len(entries) - len(shown)} that run only if they are named: --all shows them")
    return 0


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def operators(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Operators with their phases."""
    from spikemark.kernels.catalog import OPERATORS

    return [{"operator": op.name, "phases": list(op.phases), "computes": op.summary} for op in OPERATORS.values()]


def workloads(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Workloads with their sizes as published; those of ``--workload-file`` follow."""
    from spikemark.suites import workloads

    found, _ = workloads.catalog(arguments.workload_files)
    return [
        {
            "workload": w.name,
            "layer": w.summary,
            "steps": w.time_steps,
            "batch": w.batch,
            "rate": w.spike_rate,
            "kind": w.kind,
            "in_shape": list(w.in_shape),
            "out_shape": list(w.out_shape),
            "params": vars(w.params),
            "operators": list(w.operators),
        }
        for w in found.values()
    ]


def implementations(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Implementations of every operator; ``available`` says ``yes`` or why not."""
    from spikemark.commands.arguments import load_plugins
    from spikemark.kernels import registry
    from spikemark.kernels.catalog import OPERATORS

    load_plugins(arguments.plugins)
    return [
        {
            "operator": operator,
            "implementation": i.name,
            "device": i.device,
            "role": "baseline" if i.baseline else "" if i.default else IF_NAMED,
            "available": "yes" if i.available else f"no: {i.reason}",
            "is": i.summary(),
            "dtypes": list(i.dtypes),
            "source": i.source,
        }
        for operator in OPERATORS
        for i in registry.implementations(operator)
    ]


def devices(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Devices that can be named here."""
    from spikemark.harness import environment
    from spikemark.suites import selection

    cpu = environment.cpu()
    found = [{"device": "cpu", "name": cpu["model"], "about": f"{cpu['available']} threads; cpu:N for N of them"}]
    for device in selection.resolve_devices(["all"])[1:]:
        import torch

        properties = torch.cuda.get_device_properties(device)
        about = f"{properties.total_memory / 2**30:.0f} GiB, compute capability {properties.major}.{properties.minor}"
        found.append({"device": device, "name": properties.name, "about": about})
    return found


LISTS: dict[str, tuple[str, Callable[[argparse.Namespace], list[dict[str, Any]]], list[str]]] = {
    "operators": ("what can be measured", operators, ["Operator", "Phases", "Computes"]),
    "implementations": (
        "by what, and whether it can run here",
        implementations,
        ["Operator", "Implementation", "Device", "Role", "Is", "Available"],
    ),
    "workloads": ("on which layers", workloads, ["Workload", "Layer", "Steps", "Batch", "Rate", "Operators"]),
    "devices": ("where", devices, ["Device", "Name", "About"]),
}

"""``spikemark env``: what of this machine matters for a number, as results record it. Nothing personal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from spikemark.commands import terminal


def run(arguments: argparse.Namespace) -> int:
    """Print the environment of the devices (default: the one a run would use)."""
    from spikemark.harness import conditions, environment
    from spikemark.suites import selection

    conditions.settle()  # as a measuring process does
    found = {device: environment.collect(device) for device in selection.resolve_devices(arguments.devices)}
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    for entry in found.values():
        print(terminal.table(["Field", "Value"], list(flat(entry))))
    return 0


def flat(entry: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested fields as ``cpu.caches.L2`` and their values; what is not known is left out."""
    for name, value in entry.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", str(value)

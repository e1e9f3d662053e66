"""``spikemark inspect``: registers, spills, shared memory, occupancy and traffic of the CUDA kernels; needs no GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json

from spikemark.commands import terminal
from spikemark.harness.errors import UsageError

EXIT_INCORRECT = 3
HEADINGS = ("Kernel", "Dtype", "On", "Registers", "Spill", "Shared", "Occupancy", "Bytes/step")


def run(arguments: argparse.Namespace) -> int:
    """Compile every kernel for the asked architectures and print a row each; 3 if one spills."""
    from spikemark.kernels.cuda import resources, source
    from spikemark.kernels.registry import closest

    known = list(source.ARCHITECTURES)
    for name in arguments.architectures:
        if name not in known:
            raise UsageError(f"unknown architecture {name!r}{closest(name, known)}; known: {', '.join(known)}")
    missing = resources.missing()
    if missing:
        raise UsageError(missing)
    rows: list[resources.Resources] = []
    for architecture in arguments.architectures or known:
        rows += resources.inspect(architecture) + resources.inspect_triton(architecture)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        print(terminal.table(HEADINGS, [_cells(row) for row in rows]))
        rate = f"{resources.SPIKE_RATE:.0%}"
        print(f"bytes a neuron-step (for convolutions, an input element) at {rate} firing, by the cost model")
    spilled = [row for row in rows if row.spill_bytes]
    for row in spilled:
        print(f"spills: {row.kernel} on {row.architecture}, {row.spill_bytes} bytes")
    return EXIT_INCORRECT if spilled else 0


def _cells(row: object) -> list[str]:
    from spikemark.kernels.cuda.resources import Resources

    assert isinstance(row, Resources)
    return [
        row.kernel,
        row.dtype,
        row.architecture,
        str(row.registers),
        f"{row.spill_bytes} B",
        f"{row.shared_bytes} B",
        f"{row.occupancy:.0%}",
        f"{row.bytes_per_step:.3g}",
    ]

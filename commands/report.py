"""``spikemark report``: the page of one or several runs. Torch-free."""

from __future__ import annotations

import argparse
from pathlib import Path


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print where it is."""
    from spikemark.reports import html

    written = html.write([Path(p) for p in arguments.runs], Path(arguments.output) if arguments.output else None)
    print(written)
    return 0

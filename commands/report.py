"""``spikemark report``: the page, tables or figures of one or several runs. Torch-free."""

from __future__ import annotations

import argparse


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print where it is; text goes to standard output itself."""
    if arguments.history is not None:
        from spikemark.commands import history

        return history.report(arguments)
    if not arguments.runs:
        arguments.parser.error("the following arguments are required: RUN")
    from spikemark.reports import cli

    written = cli.report(arguments.runs, arguments.output, arguments.format, arguments.figures, arguments.devices)
    for path in written:
        print(path)
    return 0

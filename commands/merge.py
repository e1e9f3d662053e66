"""``spikemark merge``: runs made apart, on one machine or on several, as one run folder with one report. Torch-free."""

from __future__ import annotations

import argparse
from pathlib import Path

from spikemark.commands import terminal


def run(arguments: argparse.Namespace) -> int:
    """Write the joined run folder and its report; prints what was joined and, last, the path of report.html."""
    from spikemark.harness.merging import merge
    from spikemark.reports import html, saving, words
    from spikemark.reports.rows import read

    joined = merge(arguments.runs, Path(arguments.out))
    made = joined.run
    with html.keeping():
        report = read([made.path])
        page = made.path / "report.html"
        saving.save(page, html.page(report))
    several = words.count(len(report.titles), "environment")
    lines = [
        f"{words.count(len(arguments.runs), 'run folder')}, {words.count(len(report.rows), 'row')} in {several}: "
        + "; ".join(report.titles.values())
    ]
    if joined.twice:
        lines.append(f"{words.count(joined.twice, 'measurement')} that more than one folder holds counted once")
    if damaged := sum(part["damaged"] for part in made.meta["parts"]):
        lines.append(f"{words.count(damaged, 'journal line')} could not be read and left out")
    if made.meta["unmeasured"]:
        lines.append(f"{words.count(len(made.meta['unmeasured']), 'planned case')} not measured in any of them")
    print("\n".join([*(terminal.inert(line, 1000) for line in lines), str(page)]))
    return 0

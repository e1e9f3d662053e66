"""Example: how the time of each implementation grows with the batch, from the runs' own samples.

    spikemark run --operator srm_neuron --workload mnist/conv2 --batch 1 --batch 4 --batch 16 --out runs/batches
    python examples/reports_scaling.py runs/batches scaling.svg

Fits ``time = a * batch ** b``: b near 0 means that launching costs everything, b near 1 that the work does. Draws the
fits with matplotlib, each time with its 95 % interval.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from spikemark import reports
from spikemark.harness.errors import UsageError

LINE = ["run", "device", "dtype", "operator", "phase", "workload", "time_steps", "rate_asked", "implementation"]
"""Rows that agree in these differ in the batch alone."""


def exponents(table: pd.DataFrame) -> pd.DataFrame:
    """One row a line with at least two batches: ``exponent`` b and ``one_s``, the fitted seconds at batch 1."""
    rows = []
    for key, line in table[table["status"] == "ok"].groupby(LINE):
        if line["batch"].nunique() < 2:
            continue
        slope, offset = np.polyfit(np.log(line["batch"]), np.log(line["median_s"]), 1)
        rows.append(dict(zip(LINE, key, strict=True)) | {"exponent": float(slope), "one_s": math.exp(offset)})
    return pd.DataFrame(rows, columns=[*LINE, "exponent", "one_s"])


def draw(table: pd.DataFrame, operator: str, phase: str) -> Figure:
    """Times against batch with their intervals, both axes logarithmic, of one operator and phase."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    chosen = table[(table["status"] == "ok") & (table["operator"] == operator) & (table["phase"] == phase)]
    for key, line in chosen.groupby(LINE):
        line = line.sort_values("batch")
        bounds = [line["median_s"] - line["ci_low_s"], line["ci_high_s"] - line["median_s"]]
        axes.errorbar(line["batch"], line["median_s"], yerr=bounds, marker="o", capsize=3, label=key[-1])
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="median time (s)", title=f"{operator} {phase}")
    if not chosen.empty:
        axes.legend()
    return figure


def main(arguments: list[str]) -> int:
    """Print the exponents and, if a file is named last, draw the first operator and phase into it."""
    picture = arguments.pop() if arguments and Path(arguments[-1]).suffix in (".svg", ".pdf", ".png") else None
    try:
        table = reports.load(*arguments)
    except UsageError as error:
        print(f"reports_scaling: {error}", file=sys.stderr)
        return 2
    found = exponents(table)
    if found.empty:
        print("Nothing to fit: measure one workload with several --batch.")
        return 0
    columns = ["operator", "phase", "workload", "rate_asked", "implementation", "exponent", "one_s"]
    print(found[columns].to_string(index=False))
    if picture:
        first = found.iloc[0]
        draw(table, first["operator"], first["phase"]).savefig(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

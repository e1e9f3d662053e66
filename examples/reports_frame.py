"""Example: runs as a pandas DataFrame, and two questions that the report does not answer by itself.

    python examples/reports_frame.py RUN [RUN ...]

The first: which implementation is the fastest that keeps at most half of the baseline's memory for the backward pass?
The second: what would a network's layers take together, if each used its own best implementation?
"""

from __future__ import annotations

import sys

import pandas as pd
from spikemark import reports
from spikemark.harness.errors import UsageError

COMPARISON = ["run", "device", "dtype", "operator", "phase", "workload", "batch", "time_steps", "rate_asked"]
"""Rows that agree in these were measured on the same inputs and may be compared."""


def fastest_within_memory(table: pd.DataFrame, share: float = 0.5) -> pd.DataFrame:
    """The fastest row of each comparison among those that save at most ``share`` of the baseline's bytes for backward.

    A comparison whose baseline saves nothing, has no time or was not measured has no row.
    """
    timed = table[table["status"] == "ok"]
    base = timed[timed["baseline"]].set_index(COMPARISON)["saved_bytes"].rename("allowed_bytes") * share
    timed = timed.join(base[base > 0], on=COMPARISON, how="inner")
    within = timed[timed["saved_bytes"] <= timed["allowed_bytes"]]
    return within.loc[within.groupby(COMPARISON)["median_s"].idxmin()]


def network_time(table: pd.DataFrame) -> pd.DataFrame:
    """Seconds a network's layers take together, by the baselines and by the best of each layer.

    One row a network (the workload's name before the slash), operator, phase and batch. Only comparisons in which the
    baseline has a time count; a layer that was measured at several firing rates counts once, with its mean.
    """
    timed = table[table["status"] == "ok"]
    best = timed.groupby(COMPARISON)["median_s"].min().rename("best_s")
    base = timed[timed["baseline"]].set_index(COMPARISON)["median_s"].rename("baseline_s")
    both = pd.concat([base, best], axis=1, join="inner").reset_index()
    both["network"] = both["workload"].str.split("/").str[0]
    layer = ["run", "device", "dtype", "network", "operator", "phase", "batch", "workload"]
    layers = both.groupby(layer, as_index=False)[["baseline_s", "best_s"]].mean()
    sums = layers.groupby(layer[:-1], as_index=False)[["baseline_s", "best_s"]].sum()
    return sums.assign(speedup=sums["baseline_s"] / sums["best_s"])


def main(runs: list[str]) -> int:
    """Print both answers; 2 for a folder that is no run."""
    try:
        table = reports.load(*runs)
    except UsageError as error:
        print(f"reports_frame: {error}", file=sys.stderr)
        return 2
    columns = ["operator", "phase", "workload", "batch", "implementation", "median_s", "speedup", "saved_bytes"]
    print("Fastest that saves at most half of what the baseline saves:")
    print(fastest_within_memory(table)[columns].to_string(index=False), end="\n\n")
    print("All layers of a network together, in seconds:")
    print(network_time(table).to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

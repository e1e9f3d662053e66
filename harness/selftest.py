"""The self-test: how often this machine and harness cry wolf, and the smallest slowdown that they find. Torch-free.

One kernel is compared with itself, and with itself plus a busy-wait of known size, as ``compare --measure`` compares
two versions: the same turns, passes, samples and statistics. Every trial has samples of its own in every pass; what
``TOGETHER`` trials share is the processes (``ab.PASSES`` pairs, each pair one pass of them), because starting two for
each pass of each trial would take hours. Many trials are many such groups: processes have accidents of their own (where
their memory lies), and two hundred trials in the same few would be few trials.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from spikemark.harness import ab, contrast
from spikemark.harness.errors import UsageError
from spikemark.harness.intervals import FASTER, SLOWER, Interval, binomial_interval, verdict
from spikemark.harness.plan import Variant, worker_env
from spikemark.harness.process import Worker
from spikemark.harness.turns import Turnstile

DELAYS = (0.0, 0.05, 0.10, 0.20)
"""Injected slowdowns; 0 is the kernel against itself."""
THRESHOLD = 0.03
WANTED = 0.95
"""A difference counts as seen if it is found in this share of the trials."""
SILENCE_S = 120.0
TOGETHER = 20
"""Trials that share their processes."""
MOST_DELAYED = 100
"""Most trials of each delay: the share found is then known to a few percent. False alarms are rarer, and need more."""

Tell = Callable[[str], None]
Sides = dict[str, dict[str, contrast.Timed]]
"""label -> trial key -> what was measured in one pass."""


@dataclass(frozen=True)
class Plan:
    """``trials`` comparisons without a delay (at most ``MOST_DELAYED`` of each other), each of ``passes`` passes."""

    trials: int = 10
    delays: tuple[float, ...] = DELAYS
    passes: int = ab.PASSES
    seed: int = 0


def run(plan: Plan, tell: Tell = lambda text: None) -> dict[str, Any]:
    """Measure, judge and count: the dict for ``run.json["selftest"]`` (see ``judge``)."""
    started = time.monotonic()
    measured: list[Sides] = []
    kernel = ""
    with tempfile.TemporaryDirectory(prefix="spikemark-selftest-") as folder:
        groups = _groups(plan)
        for pass_index in range(plan.passes):
            measured.append({ab.BASE: {}, ab.NEW: {}})
            for number, trials in enumerate(groups):
                part = f", part {number + 1} of {len(groups)}" if len(groups) > 1 else ""
                tell(f"pass {pass_index + 1} of {plan.passes}{part}")
                sides, kernel = _one_pass(Path(folder), plan, pass_index, trials)
                for label, samples in sides.items():
                    measured[-1][label] |= samples
    found = judge(plan, measured)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return found | {"kernel": kernel, "load": load, "seconds": round(time.monotonic() - started, 1)}


def trial_key(trial: int, delay: float) -> str:
    """Name of a trial."""
    return f"{trial}/{delay:g}"


def _groups(plan: Plan) -> list[range]:
    """Trials that share processes."""
    return [range(i, min(i + TOGETHER, plan.trials)) for i in range(0, plan.trials, TOGETHER)]


def _order(plan: Plan, pass_index: int, trials: range) -> list[tuple[int, float]]:
    """Trials in the order of one pass: the delays of one trial next to each other, in random order."""
    rng = random.Random(f"selftest {plan.seed} {pass_index} {trials.start}")
    return [(t, d) for t in trials for d in rng.sample(plan.delays, len(plan.delays)) if t in _trials(plan, d)]


def _trials(plan: Plan, delay: float) -> range:
    return range(min(plan.trials, MOST_DELAYED) if delay else plan.trials)


def _one_pass(folder: Path, plan: Plan, pass_index: int, trials: range) -> tuple[Sides, str]:
    """Both processes of one pass of ``trials`` in turns, and the kernel's name."""
    order = _order(plan, pass_index, trials)
    keys = [trial_key(t, d) for t, d in order]
    sides: Sides = {ab.BASE: {}, ab.NEW: {}}
    kernel, workers = "", dict[str, Worker]()
    with Turnstile(folder, list(sides), keys, f"{plan.seed} {pass_index} {trials.start}") as turnstile:
        try:
            for label in sides:
                path = folder / f"{pass_index}-{trials.start}-{label}.json"
                delays = [d if label == ab.NEW else 0.0 for _, d in order]
                path.write_text(json.dumps({"trials": list(zip(keys, delays, strict=True))}), encoding="utf-8")
                env = worker_env("cpu", Variant()) | turnstile.environment(label)
                workers[label] = Worker(_command, path, folder / f"{pass_index}-{trials.start}-{label}.log", env)
            heard = time.monotonic()
            going = set(workers)
            while going:
                for label in sorted(going):
                    for event in workers[label].poll(0.05):
                        heard = time.monotonic()
                        if event["event"] == "record":
                            sides[label][event["key"]] = (event["samples"], event["bursts"])
                        elif event["event"] == "end":
                            kernel = str(event["kernel"])
                            going.discard(label)
                            turnstile.leave(label)
                    if label in going and (workers[label].closed or time.monotonic() - heard > SILENCE_S):
                        raise UsageError(
                            f"the self-test's process stopped: {workers[label].last_words() or 'no output'}"
                        )
        finally:
            for worker in workers.values():
                worker.close()
    return sides, kernel


def _command(plan: Path, events: int) -> list[str]:
    return [sys.executable, "-m", "spikemark.harness.selftest_worker", str(plan), str(events)]


def judge(plan: Plan, measured: Sequence[Sides]) -> dict[str, Any]:
    """Count verdicts at ``slower:3%``: the false alarms among identical pairs, and what was found of each delay.

    Intervals of the shares are 95 % (Clopper-Pearson). ``ratios`` are every trial's ratio with its interval, by delay.
    ``groups`` is how many sets of processes the trials were spread over. ``smallest_difference`` is the smallest delay
    found in at least 95 % of its trials, None if none is. ``noise`` is the deviation of one pass's ratio of identical
    pairs, None for one pass.
    """
    out: dict[str, Any] = {
        "schema": 1,
        "pairs": plan.trials,
        "passes": plan.passes,
        "groups": len(_groups(plan)),
        "threshold": THRESHOLD,
        "smallest_difference": None,
        "delays": [],
        "ratios": {},
    }
    for delay in plan.delays:
        keys = [trial_key(t, delay) for t in _trials(plan, delay)]
        sides = [[{p: m[label][key] for p, m in enumerate(measured)} for key in keys] for label in (ab.BASE, ab.NEW)]
        ratios = contrast.together(sides[0], sides[1])
        entry = _count(ratios)
        out["ratios"][f"{delay:g}"] = [[round(v, 5) for v in (r.value, r.low, r.high)] for r in ratios]
        if delay == 0:
            out["false_alarms"] = {
                k: entry[k] for k in ("trials", "slower", "faster", "share", "share_low", "share_high")
            }
            noise = float(np.median([r.spread for r in ratios]))
            out["noise"] = noise if math.isfinite(noise) else None
        else:
            out["delays"].append({"delay": delay} | entry)
            if out["smallest_difference"] is None and entry["share"] >= WANTED:
                out["smallest_difference"] = delay
    seconds = [np.median(r[0]) for m in measured for r in m[ab.BASE].values()]
    out["kernel_s"] = float(np.median(seconds))
    return out


def _count(ratios: list[Interval]) -> dict[str, Any]:
    verdicts = [verdict(r, THRESHOLD) for r in ratios]
    slower, trials = verdicts.count(SLOWER), len(verdicts)
    low, high = binomial_interval(slower, trials)
    widths = [(r.high - r.low) / 2 / r.value for r in ratios]
    return {
        "trials": trials,
        "slower": slower,
        "faster": verdicts.count(FASTER),
        "share": slower / trials,
        "share_low": low,
        "share_high": high,
        "median_ratio": float(np.median([r.value for r in ratios])),
        "half_width": float(np.median(widths)),
    }


def text(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    alarms, noise, smallest = result["false_alarms"], result["noise"], result["smallest_difference"]
    lines = [
        f"Kernel: {result['kernel']}, {result['kernel_s'] * 1e3:.3g} ms; {result['passes']} passes in turns, "
        f"{result['groups']} {'sets' if result['groups'] > 1 else 'set'} of processes.",
        f"Identical pairs called slower by more than {THRESHOLD:.0%}: {alarms['slower']} of {alarms['trials']} "
        f"(95 % interval {alarms['share_low']:.1%} to {alarms['share_high']:.1%}); called faster: {alarms['faster']}.",
    ]
    lines += [
        f"Slower by {entry['delay']:.0%}: found in {entry['slower']} of {entry['trials']} "
        f"({entry['share_low']:.0%} to {entry['share_high']:.0%}); measured {entry['median_ratio'] - 1:+.1%}, "
        f"interval ±{entry['half_width']:.1%}."
        for entry in result["delays"]
    ]
    seen = f"{smallest:.0%}" if smallest is not None else "none of those tried"
    lines.append(f"Smallest difference found in at least {WANTED:.0%} of trials: {seen}.")
    varies = "unknown (one pass)" if noise is None else f"{noise:.1%}"
    lines.append(f"Noise: deviation of the ratio between passes {varies}; load of the machine {result['load']}.")
    return "\n".join(lines)

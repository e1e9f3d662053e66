"""What a run is asked to do: options, code variants, and the plan that one measuring process gets.

Torch-free. The visit order falls out of the seed and the pass: blocks (one ``Case.group``: what is compared) in random
order, implementations in random order within a block, so that drift falls on all alike and those that are compared lie
next to each other in time. All variants of an A/B run visit a pass in the same order.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spikemark.harness.devices import PINNED, Pin
from spikemark.harness.errors import UsageError
from spikemark.harness.records import SCHEMA_VERSION, Case

STAGE_LIMITS_S = {"verify": 120.0, "first-call": 180.0}
"""Seconds for stages that may compile or autotune; every other stage has ``RunOptions.case_timeout_s``."""


@dataclass(frozen=True)
class Variant:
    """One version of the code in an A/B run. ``label`` is stored in ``record.details["variant"]``.

    ``pythonpath`` folders come first on the worker's PYTHONPATH (a worktree that holds the package ``spikemark``);
    ``plugins`` are plug-in files for this variant only. A plain run has one variant without a label.
    """

    label: str = ""
    pythonpath: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunOptions:
    """How a run measures. Times in seconds; ``budget_s`` is kernel time a case and pass may take.

    ``gate_limit`` is how many elements the gate compares (None: all). ``memory_fraction`` of the memory that was free
    when a worker started is what it may grow to. ``baselines`` maps operator to the implementation that speed-ups are
    against. ``ledger`` and ``first`` (first call apart) are measured in the first pass only: they vary less than times.
    """

    out: Path
    preset: str = "quick"
    passes: int = 3
    seed: int = 0
    precision: float = 0.01
    budget_s: float = 0.1
    min_samples: int = 10
    max_samples: int = 1000
    gate_limit: int | None = None
    ledger: bool = True
    call_time: bool = True
    first: bool = True
    case_timeout_s: float = 60.0
    start_timeout_s: float = 180.0
    stage_limits_s: dict[str, float] = field(default_factory=lambda: dict(STAGE_LIMITS_S))
    memory_fraction: float = 0.8
    resume: bool = False
    devices: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = (Variant(),)
    baselines: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive = ("passes", "min_samples", "max_samples", "precision", "budget_s", "case_timeout_s")
        for name in positive:
            if not getattr(self, name) > 0:
                raise UsageError(f"{name.removesuffix('_s')} must be greater than 0, got {getattr(self, name)}")
        if self.max_samples < self.min_samples:
            raise UsageError(f"max_samples {self.max_samples} is less than min_samples {self.min_samples}")
        labels = [v.label for v in self.variants]
        if len(set(labels)) != len(labels) or not labels:
            raise UsageError(f"variants need different labels, got {labels}")

    def measuring(self) -> dict[str, Any]:
        """What must not change between the parts of a resumed run: stored in ``run.json`` as ``options``."""
        names = ("precision", "budget_s", "min_samples", "max_samples", "gate_limit")
        return {name: getattr(self, name) for name in names} | {"variants": [v.label for v in self.variants]}

    def stage_limit_s(self, stage: str) -> float:
        """Seconds that ``stage`` of a case may take."""
        return max(self.case_timeout_s, self.stage_limits_s.get(stage, self.case_timeout_s))


@dataclass
class RunResult:
    """How a run ended: exit code, folder, how many cases have each status (worst first), one line for a person."""

    exit_code: int
    path: Path
    counts: dict[str, int] = field(default_factory=dict)
    message: str = ""


def visit_order(cases: Sequence[Case], seed: int, pass_index: int) -> list[Case]:
    """``cases`` in the order of one pass (see the module's docstring); the same for the same arguments everywhere."""
    blocks: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda c: c.key):
        blocks.setdefault(case.group, []).append(case)
    rng = random.Random(f"spikemark {seed} {pass_index}")
    order = list(blocks.values())
    rng.shuffle(order)
    for block in order:
        rng.shuffle(block)
    return [case for block in order for case in block]


def devices_of(cases: Sequence[Case], options: RunOptions) -> list[str]:
    """Devices in the order asked for, then those that only cases name."""
    present = dict.fromkeys(case.device for case in cases)
    return [d for d in dict.fromkeys((*options.devices, *present)) if d in present]


def environment_key(device: str, variant: Variant) -> str:
    """Key of an environment in ``run.json``: the device, and the variant of an A/B run."""
    return f"{device} [{variant.label}]" if variant.label else device


def write_plan(
    path: Path, cases: Sequence[Case], options: RunOptions, *, pass_index: int, variant: Variant, calibrate: bool
) -> None:
    """Write the plan of one measuring process. ``cases`` are of one device, in visit order."""
    first_pass = pass_index == 0
    plan = {
        "schema": SCHEMA_VERSION,
        "pass_index": pass_index,
        "seed": options.seed,
        "device": cases[0].device,
        "environment": environment_key(cases[0].device, variant),
        "variant": variant.label or None,
        "calibrate": calibrate,
        "plugins": [*options.plugins, *variant.plugins],
        "cases": [case.to_json() for case in cases],
        "options": {
            "precision": options.precision,
            "budget_s": options.budget_s,
            "min_samples": options.min_samples,
            "max_samples": options.max_samples,
            "gate_limit": options.gate_limit,
            "ledger": options.ledger and first_pass,
            "call_time": options.call_time,
            "first": options.first and first_pass,
        },
    }
    path.write_text(json.dumps(plan), encoding="utf-8")


def worker_env(device: str, variant: Variant, pin: Pin | None = None) -> dict[str, str]:
    """Environment variables of a measuring process: the variant's code first, threads and GPU as the device says."""
    env = {name: value for name, value in os.environ.items() if name != PINNED}
    if pin is not None:
        env |= pin.environment(device)
    if variant.pythonpath:
        env["PYTHONPATH"] = os.pathsep.join([*variant.pythonpath, *filter(None, [env.get("PYTHONPATH")])])
    kind, _, number = device.partition(":")
    if kind == "cpu" and number:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            env[name] = number
    return env

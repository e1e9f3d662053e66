"""The measuring process of the self-test: one real kernel, plain or with a known delay, sampled as in an A/B run.

Run as ``python -m spikemark.harness.selftest_worker PLAN EVENTS_FD``. The plan is JSON: ``trials``, pairs of a key and
the delay to inject (a fraction). Events: ``record`` with ``key``, ``samples`` and ``bursts`` for each; then ``end``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from spikemark.harness import ab, conditions, turns, verify
from spikemark.harness.clock import DeviceClock, now_ns
from spikemark.harness.records import Case
from spikemark.harness.sampling import Options, Sampler, no_collection
from spikemark.kernels import registry
from spikemark.kernels.types import Problem


def case() -> Case:
    """The kernel: the neuron's baseline on a small layer, about a millisecond."""
    problem = Problem("selftest", "neuron", 2, 5, (40, 8, 8), (40, 8, 8), spike_rate=0.12)
    return Case("srm_neuron", "forward", registry.baseline("srm_neuron").name, "cpu", "float32", problem)


def delayed(call: Callable[[Any], Any], delay: float) -> Callable[[Any], Any]:
    """``call`` followed by a busy-wait of ``delay`` times its own duration: code that is so much slower meets the
    machine's moods as this does. A wait of a fixed length would be a smaller slowdown whenever the machine is slow."""

    def slow(argument: Any) -> Any:
        start = now_ns()
        result = call(argument)
        done = now_ns()
        until = done + delay * (done - start)
        while now_ns() < until:
            pass
        return result

    return slow


def main(plan_path: str, events_fd: int) -> None:
    """Verify the kernel, then sample every trial of the plan in its order."""
    conditions.settle()
    plan = json.loads(Path(plan_path).read_text(encoding="utf-8"))
    turn, kernel, clock = turns.mine(), case(), DeviceClock("cpu")
    implementation = registry.get(kernel.operator, kernel.implementation)
    turn.pause("")
    block = verify.block_for(kernel, None)
    bound = verify.gate(block, implementation, clock, lambda stage: None).bound
    options = Options(ab.PRECISION, ab.BUDGET_S, ab.MIN_SAMPLES)
    for key, delay in plan["trials"]:
        turn.pause(key)
        sampler = Sampler(key, replace(bound, call=delayed(bound.call, delay)), clock, options, lambda result: None)
        with no_collection():
            sampler.warm_up()
            samples = sampler.cold()
        emit(
            events_fd, {"event": "record", "key": key, "samples": samples, "bursts": sampler.details.get("bursts", [])}
        )
    emit(events_fd, {"event": "end", "kernel": kernel.key})


def emit(descriptor: int, event: dict[str, Any]) -> None:
    """Write one event."""
    line = (json.dumps(event) + "\n").encode()
    while line:
        line = line[os.write(descriptor, line) :]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

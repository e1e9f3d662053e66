"""Does our clock agree with ``torch.utils.benchmark``? One kernel of known duration and three real ones, in turns.

``python scripts/agreement.py [ROUNDS]``. In each round our clock and torch's timer take as many back-to-back calls
of the same function on the same data, in random order, in one process; what is printed is the median over rounds of the
ratio of their times and its exact 95 % interval (order statistics). torch's timer divides the time of a whole loop, so
it counts the loop and every garbage collection; ours times each call, so it counts the clock's two readings.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch
from spikemark.harness import conditions, verify
from spikemark.harness.clock import DeviceClock
from spikemark.harness.intervals import rank_for
from spikemark.harness.sampling import no_collection
from spikemark.kernels import registry
from spikemark.kernels.catalog import OPERATORS
from spikemark.suites import selection
from torch.utils.benchmark import Timer

SPIN_S = 0.5e-3
REAL = (
    ("srm_neuron", "backward", "torch_eager", "mnist/conv1"),
    ("srm_neuron", "forward", "native", "cifar10-vgg/conv2"),
    ("conv_backward", "weight", "aten", "n-mnist/conv2"),
)
ROUND_S = 0.05


def spin() -> None:
    """A kernel of known duration."""
    until = time.perf_counter_ns() + int(SPIN_S * 1e9)
    while time.perf_counter_ns() < until:
        pass


def ours(clock: DeviceClock, call: Callable[[], Any], count: int) -> float:
    """Seconds a call by the harness's clock: the mean of the calls, as torch's timer gives the mean of its loop."""
    seconds = []
    with no_collection():
        for _ in range(count):
            clock.run(lambda prepared: call(), None)
            seconds.append(clock.last_s)
    return mean(seconds)


def compare(name: str, call: Callable[[], Any], rounds: int) -> tuple[str, float, float, float]:
    """The line of one kernel: ratio ours / torch's with its interval."""
    clock, timer = DeviceClock("cpu"), Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    count = max(5, int(ROUND_S / timer.timeit(5).median))
    ratios, own = [], []
    for _ in range(rounds):
        found: dict[str, float] = {}
        for who in random.sample(("ours", "torch's"), 2):
            found[who] = ours(clock, call, count) if who == "ours" else timer.timeit(count).median
        ratios.append(found["ours"] / found["torch's"])
        own.append(found["ours"])
    ratios.sort()
    rank = max(rank_for(len(ratios)), 1)
    return f"{name}: {median(own) * 1e6:.0f} us", median(ratios), ratios[rank - 1], ratios[-rank]


def main(rounds: int) -> None:
    """Print a line a kernel."""
    conditions.settle()
    kernels: list[tuple[str, Callable[[], Any]]] = [(f"a spin of {SPIN_S * 1e6:.0f} us", spin)]
    for operator, phase, implementation, workload in REAL:
        assert phase in OPERATORS[operator].phases
        chosen = {"operators": [operator], "phases": [phase], "implementations": [implementation]}
        (case,) = selection.build("quick", workloads=[workload], devices=["cpu"], **chosen)
        verify.forget_block()
        block = verify.block_for(case, None)
        bound = verify.gate(block, registry.get(operator, implementation), DeviceClock("cpu")).bound
        kernels.append((case.key, lambda bound=bound: bound.call(bound.prepare())))
    for name, call in kernels:
        text, ratio, low, high = compare(name, call, rounds)
        print(f"{text}: ours / torch.utils.benchmark {ratio:.3f} ({low:.3f} to {high:.3f}), {rounds} rounds")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)

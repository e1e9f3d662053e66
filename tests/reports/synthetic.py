"""Synthetic run folders for the report's tests: many cases, passes, devices, machines, every failure, hostile names.

The numbers follow simple laws (time grows with the work, each implementation has its own speed) plus seeded noise, so
a test knows which implementation must win and by about how much.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spikemark.harness.journal import dumps
from spikemark.harness.records import OK, STATUSES, Case, Record
from spikemark.harness.runfolder import RunFolder, new_meta
from spikemark.kernels.types import Problem

HOSTILE = (
    "<script>window.pwned=1</script>",
    "</style></script><img src=x onerror=window.pwned=1>",
    "\"'`${window.pwned=1}{{7*7}}",
    "\u202eעברית\u0639\u0631\u0628\u064a",
    "emoji 🧠⚡ 10^3 $\\frac{1}{0}$",
    "n" * 300,
    "control \x00\x1b[31m \ud800 end",
    "a|b, c; d\te\nf = 'g'",
)
OPERATORS = {
    "srm_neuron": (("forward", "backward"), ("torch_eager", "torch_vectorized", "torch_compile", "native")),
    "conv_backward": (("input", "weight"), ("torch_autograd", "torch_unfold", "aten")),
    "adjusted_avg_pool2d": (("forward", "backward"), ("torch", "native")),
}
BASELINES = {"srm_neuron": "torch_eager", "conv_backward": "torch_autograd", "adjusted_avg_pool2d": "torch"}
SPEED = {"torch_eager": 1.0, "torch_vectorized": 2.5, "torch_compile": 4.0, "native": 11.0}
SPEED |= {"torch_autograd": 1.0, "torch_unfold": 0.6, "aten": 2.1, "torch": 1.0}
LAYERS = {
    "mnist/conv1": ((15, 24, 24), 5),
    "mnist/conv2": ((40, 8, 8), 5),
    "n-mnist/conv1": ((12, 32, 32), 30),
    "cifar10-vgg/conv1": ((128, 32, 32), 12),
    "cifar10-vgg/conv2": ((128, 32, 32), 12),
    "cifar10-vgg/conv4": ((256, 16, 16), 12),
    "cifar10-dvs/conv1": ((128, 48, 48), 20),
    "dvs128-gesture/conv1": ((128, 48, 48), 20),
}


def environment(
    device: str = "cpu", machine: str = "Synthetic CPU 3000", threads: int = 2, **more: Any
) -> dict[str, Any]:
    """An environment of one device, with the fields of a measured one."""
    kind = "cuda" if device.startswith("cuda") else "cpu"
    return {
        "device": device,
        "device_name": machine,
        "kind": kind,
        "threads": threads,
        "cpu": {"model": machine, "cores": 4, "governor": "performance", "caches": {"L2": 1048576}, "load": 0.1},
        "gpu": {"name": machine, "driver": "570.1"} if kind == "cuda" else None,
        "versions": {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"},
        "switches": {"tf32": False, "deterministic": False, "variables": _variables(device)},
        "project": {"commit": "0123456", "dirty": False},
    } | more


def _variables(device: str) -> dict[str, str]:
    """What a run sets for ``cpu:N``, and for no other device."""
    threads = device.partition("cpu:")[2]
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} if threads else {}


def problem(workload: str, shape: tuple[int, ...], time_steps: int, batch: int, rate: float) -> Problem:
    """A convolution's problem of this output shape."""
    return Problem(workload, "conv", batch, time_steps, (3, *shape[1:]), shape, spike_rate=rate)


def cases(
    devices: Iterable[str] = ("cpu",),
    workloads: dict[str, tuple[tuple[int, ...], int]] | None = None,
    batches: Iterable[int] = (1, 8),
    rates: Iterable[float] = (0.1,),
    operators: Iterable[str] = tuple(OPERATORS),
) -> Iterator[Case]:
    """Every combination, in order."""
    for device in devices:
        for workload, (shape, steps) in (workloads or LAYERS).items():
            for batch in batches:
                for rate in rates:
                    work = problem(workload, shape, steps, batch, rate)
                    for operator in operators:
                        phases, names = OPERATORS[operator]
                        for phase in phases:
                            for name in names:
                                yield Case(operator, phase, name, device, "float32", work)


def elements(case: Case) -> int:
    """Neuron-steps of a case."""
    return case.problem.batch * case.problem.time_steps * math.prod(case.problem.out_shape)


def true_time(case: Case) -> float:
    """The median the noise is put around, in seconds."""
    one = 2.0 if case.device == "cpu:1" else 1.0
    sparse = 0.2 + 8 * case.problem.spike_rate if case.implementation == "aten" else 1.0
    return 5e-6 + one * sparse * elements(case) * 1e-9 / SPEED.get(case.implementation, 1.5)


def record(
    case: Case, pass_index: int, samples: int = 12, noise: float = 0.02, seed: int = 0, **changes: Any
) -> Record:
    """A measured case in one pass. ``changes`` replace fields."""
    rng = random.Random(ascii(f"{case.key}|{pass_index}|{seed}"))
    median = true_time(case) * (1 + noise / 4 * rng.gauss(0, 1))
    n = elements(case)
    fields: dict[str, Any] = {
        "spike_rate": case.problem.spike_rate * 1.01,
        "samples": [median * (1 + abs(rng.gauss(0, noise))) for _ in range(samples)],
        "warm_samples": [median * 0.8 * (1 + abs(rng.gauss(0, noise))) for _ in range(min(samples, 4))],
        "call_samples": [median * 1.1 * (1 + abs(rng.gauss(0, noise))) for _ in range(min(samples, 4))],
        "first_call_s": median * 3 + (0.8 if case.implementation == "torch_compile" else 0.0),
        "memory": {
            "baseline_bytes": 4 * n,
            "peak_bytes": 12 * n if case.implementation.startswith("torch") else 8 * n,
            "saved_bytes": 9 * n,
            "workspace_bytes": n,
        },
        "verification": {"max_error": 3e-7, "ambiguous": 2, "checked": n, "total": n},
        "cost": {"bytes": 13 * n, "moved_bytes": 14 * n, "operations": 20 * n},
        "stop": "narrow",
        "environment": case.device,
        "elapsed_s": 0.3,
        "details": {"baseline": BASELINES.get(case.operator) == case.implementation},
    }
    return Record(case, pass_index, OK, **(fields | changes))


REASONS = {
    "incorrect": "grad_t differs from the reference at [0, 1, 2]: 0.5 instead of 0.25",
    "unavailable": "no C++ compiler found: install g++",
    "unsupported": "float16 is not supported on this device",
    "out-of-memory": "needs 12.3 GB, 4.0 GB are free",
    "crashed": "worker ended by signal 11 (segmentation fault)",
    "timed-out": "no result after 60 s",
    "error": "RuntimeError: expected a contiguous tensor",
}


def failure(case: Case, pass_index: int, status: str, **changes: Any) -> Record:
    """A case that gave no time."""
    fields: dict[str, Any] = {"reason": REASONS[status], "environment": case.device, "details": {}}
    fields["details"] = {"baseline": BASELINES.get(case.operator) == case.implementation}
    return Record(case, pass_index, status, **(fields | changes))


def calibration(pass_index: int, device: str = "cpu", rate: float = 200e9) -> dict[str, Any]:
    """A pass's measured copy bandwidth."""
    size = 1 << 28
    samples = [size / rate * f for f in (1.0, 1.01, 1.02)]
    return {
        "pass_index": pass_index,
        "environment": device,
        "copy_bytes_per_s": rate,
        "samples": samples,
        "bytes": size,
        "clock": {},
    }


def write(
    path: Path,
    records: Iterable[Record],
    *,
    environments: dict[str, Any] | None = None,
    passes: int = 2,
    calibrations: bool = True,
    **meta: Any,
) -> Path:
    """Write a run folder the way a run does (but without waiting for the disk after every line)."""
    environments = {"cpu": environment()} if environments is None else environments
    fields = new_meta(["run", "--preset", "quick"], seed=7, preset="quick", passes=passes, planned=0)
    folder = RunFolder.create(path, fields | {"environments": environments} | meta)
    folder.close()
    lines = []
    if calibrations:
        lines += [
            {"kind": "calibration", "schema": 1} | calibration(p, device)
            for p in range(passes)
            for device in environments
        ]
    lines += [{"kind": "record"} | r.to_json() for r in records]
    text = "".join(dumps(line) + "\n" for line in lines)
    (path / "cases.jsonl").write_text(text, encoding="utf-8", errors="surrogatepass")
    folder.update(**({"ended": fields["started"]} | meta))
    return path


def everyday(path: Path, passes: int = 2, samples: int = 12, **more: Any) -> Path:
    """A run as people have it: two devices, three operators, and one failure of every status."""
    devices = {"cpu": environment(), "cpu:1": environment("cpu:1", threads=1)}
    layers = {n: LAYERS[n] for n in ("mnist/conv1", "n-mnist/conv1", "cifar10-vgg/conv2", "cifar10-dvs/conv1")}
    records = [record(c, p, samples) for p in range(passes) for c in cases(devices, layers, (1, 8))]
    odd = problem("cifar100-vgg/conv7", (512, 4, 4), 16, 8, 0.09)
    for index, status in enumerate(s for s in STATUSES if s != OK):
        name = ("cupy_raw", "cupy_compact", "triton_fused")[index % 3] + ("", "_b", "_c")[index // 3]
        records += [
            failure(Case("srm_neuron", "forward", name, "cpu", "float32", odd), p, status) for p in range(passes)
        ]
    return write(path, records, environments=devices, passes=passes, **more)


def hostile(path: Path) -> Path:
    """A run whose every name and reason tries to break out."""
    records = []
    for index, name in enumerate(HOSTILE):
        for other in (HOSTILE[(index + 1) % len(HOSTILE)], "native"):
            work = problem(name, (4, 8, 8), 5, 1, 0.1)
            case = Case(HOSTILE[index % 3], "forward", other, "cpu", "float32", work)
            records.append(record(case, 0, flags=[name], environment="cpu"))
        lost = Case(name, name, name, name, name, problem(name, (4, 8, 8), 5, 1, 0.1))
        records.append(failure(lost, 0, "error", reason=name, environment=name))
    envs = {"cpu": environment(machine=HOSTILE[0])} | {n: environment(n, machine=n) for n in HOSTILE[:3]}
    return write(path, records, environments=envs, passes=1, calibrations=False, preset=HOSTILE[1])


def big(path: Path, count: int = 10_000, samples: int = 50, passes: int = 2) -> Path:
    """``count`` cases with ``samples`` samples each over all passes."""
    layers = {f"net{i // 10}/conv{i % 10}": ((16 + i, 8, 8), 4 + i % 9) for i in range(64)}
    every = cases(("cpu", "cpu:1"), layers, (1, 4, 16), (0.02, 0.1, 0.35))
    chosen = [case for case, _ in zip(every, range(count), strict=False)]
    records = (record(c, p, samples // passes) for p in range(passes) for c in chosen)
    devices = {"cpu": environment(), "cpu:1": environment("cpu:1", threads=1)}
    return write(path, records, environments=devices, passes=passes)

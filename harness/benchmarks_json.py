"""A run in pytest-benchmark's own file format, so that its ``compare``, its histogram and others' tools read it.

Torch-free. Statistics come from pytest-benchmark's ``Stats`` class over every cold sample of every pass; nothing is
dropped. Only ``ok`` rows appear: the format has no place for a case without times. Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from spikemark.harness.records import OK, Record

if TYPE_CHECKING:
    from spikemark.harness.runfolder import Run


def benchmarks_json(run: Run) -> dict[str, Any]:
    """The file's content. One benchmark a case (and variant), its ``group`` what implementations are compared on."""
    import pytest_benchmark

    grouped: dict[str, list[Record]] = {}
    for record in run.records:
        if record.status == OK and any(map(math.isfinite, record.samples)):
            grouped.setdefault(benchmark_name(record), []).append(record)
    return {
        "machine_info": machine_info(run.meta.get("environments", {})),
        "commit_info": commit_info(run.meta.get("environments", {})),
        "benchmarks": [_benchmark(name, records) for name, records in grouped.items()],
        "datetime": run.meta.get("ended") or run.meta.get("started"),
        "version": pytest_benchmark.__version__,
    }


def benchmark_name(record: Record) -> str:
    """The case's key, and the variant of an A/B run: the same benchmark in two runs has the same name.

    An environment that is not simply the case's device (of a run of several machines) is named too.
    """
    variant = record.details.get("variant")
    name = f"{record.case.key}[{variant}]" if variant else record.case.key
    plain = ("", record.case.device, f"{record.case.device} [{variant}]")
    return name if record.environment in plain else f"{name}[{record.environment}]"


def _benchmark(name: str, records: list[Record]) -> dict[str, Any]:
    from pytest_benchmark.stats import Stats

    stats = Stats()
    for sample in _finite(s for r in records for s in r.samples):
        stats.update(sample)
    first = records[0]
    case = first.case
    params = {n: getattr(case, n) for n in ("operator", "phase", "implementation", "device", "dtype", "workload")}
    params |= {"batch": case.problem.batch, "time_steps": case.problem.time_steps}
    return {
        "group": case.group,
        "name": name,
        "fullname": f"spikemark::{name}",
        "params": params,
        "param": name,
        "extra_info": {
            "passes": sorted({r.pass_index for r in records}),
            "samples_per_pass": [len(r.samples) for r in records],
            "flags": sorted({f for r in records for f in r.flags}),
            "spike_rate": first.spike_rate,
            "memory": first.memory,
            "first_call_s": first.first_call_s,
            "variant": first.details.get("variant"),
        },
        "options": {
            "disable_gc": True,
            "timer": "spikemark.harness.clock.DeviceClock",
            "min_rounds": len(records[0].samples),
            "max_time": sum(r.elapsed_s for r in records),
            "min_time": 0.0,
            "warmup": True,
        },
        "stats": stats.as_dict() | {"data": stats.data, "iterations": 1},
    }


def _finite(samples: Iterable[float]) -> Iterable[float]:
    """Samples that are numbers: one NaN from a broken clock would make every statistic NaN."""
    return (s for s in samples if math.isfinite(s))


def machine_info(environments: dict[str, Any]) -> dict[str, Any]:
    """pytest-benchmark's machine fields from the run's environments; the host's name is never recorded."""
    first: dict[str, Any] = next(iter(environments.values()), {})
    cpu = first.get("cpu") or {}
    versions = first.get("versions") or {}
    return {
        "node": "(not recorded)",
        "processor": cpu.get("architecture", ""),
        "machine": cpu.get("architecture", ""),
        "python_compiler": versions.get("python_compiler", ""),
        "python_implementation": versions.get("python_implementation", ""),
        "python_implementation_version": versions.get("python", ""),
        "python_version": versions.get("python", ""),
        "python_build": [],
        "release": versions.get("kernel", ""),
        "system": versions.get("system", ""),
        "cpu": {"brand_raw": cpu.get("model", ""), "count": cpu.get("threads"), "arch": cpu.get("architecture", "")},
        "spikemark": environments,
    }


def commit_info(environments: dict[str, Any]) -> dict[str, Any]:
    """Commit and dirty flag of the project under test."""
    project: dict[str, Any] = next((e["project"] for e in environments.values() if e.get("project")), {})
    return {
        "id": project.get("commit") or "unversioned",
        "time": None,
        "author_time": None,
        "dirty": bool(project.get("dirty")),
        "project": "spikemark",
        "branch": "(unknown)",
    }

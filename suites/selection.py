"""From a person's selection to the list of cases: names with * and ?, unknown names answered with the nearest.

Torch-free to import; building a plan loads the operators it names, which import torch.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spikemark.harness.errors import NothingMeasured, UsageError
from spikemark.harness.records import Case
from spikemark.kernels import registry
from spikemark.kernels.catalog import OPERATORS
from spikemark.suites import workloads
from spikemark.suites.presets import PRESETS, Part, Preset
from spikemark.suites.workloads import Workload


@dataclass(frozen=True)
class Selection:
    """What was asked for. Empty means: whatever the preset has. Names may have * and ?."""

    operators: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()


def build(
    preset: str = "smoke",
    *,
    recordings: Sequence[str | tuple[str, int | None]] = (),
    workload_files: Sequence[str] = (),
    seed: int = 0,
    elsewhere: bool = False,
    **selection: Iterable[Any],
) -> list[Case]:
    """The cases of ``preset`` within ``selection`` (fields of ``Selection``), each once.

    Named workloads may be any there are, not only the preset's; without a batch they run at the preset's. Layers of
    ``recordings`` (paths, or pairs of path and time axis) run besides, at their own batch and firing rate, unless
    ``workloads`` names some of them. ``elsewhere``: the devices are another machine's, which knows whether it has
    them. ``UsageError`` for a name or value that does not exist, ``NothingMeasured`` for a good selection that leaves
    no case.
    """
    chosen = Selection(**{field: tuple(values) for field, values in selection.items()})
    plan = PRESETS[_one("preset", preset, PRESETS)]
    pairs = [(entry, None) if isinstance(entry, str) else entry for entry in recordings]
    catalog, own = workloads.catalog(workload_files, pairs)
    _check(chosen, catalog)
    devices = list(chosen.devices) if elsewhere else resolve_devices(chosen.devices)
    cases = _cases(chosen, plan, catalog, own, devices, seed)
    if not cases:
        raise NothingMeasured(_what_was_close(chosen, lambda s: _cases(s, plan, catalog, own, devices, seed)))
    return cases


def _cases(
    chosen: Selection, plan: Preset, catalog: dict[str, Workload], own: list[str], devices: list[str], seed: int
) -> list[Case]:
    cases: dict[str, Case] = {}
    for workload, part in _sized(chosen, plan, catalog, own):
        for operator in workload.operators:
            if not matches(operator, chosen.operators or part.operators or ("*",)):
                continue
            if chosen.operators and part.operators and not matches(operator, part.operators):
                continue
            for case in _variants(chosen, plan, workload, part, operator, devices, seed):
                cases.setdefault(case.key, case)
    return list(cases.values())


def _sized(
    chosen: Selection, plan: Preset, catalog: dict[str, Workload], own: list[str]
) -> Iterable[tuple[Workload, Part]]:
    """The workloads to run, each with the part of the preset that says how."""
    if not chosen.workloads:
        for part in plan.parts:
            yield from ((w, part) for w in catalog.values() if w.name not in own and matches(w.name, part.workloads))
        named = own
    else:
        named = [name for name in catalog if matches(name, chosen.workloads)]
        if not any(name in own for name in named):
            named = named + own
    for name in named:
        batch = next((p.batch for p in plan.parts if name in p.workloads and p.batch), None)
        yield catalog[name], Part((name,), batch=batch)


def _variants(
    chosen: Selection, plan: Preset, workload: Workload, part: Part, operator: str, devices: list[str], seed: int
) -> Iterable[Case]:
    cap = part.batch or (min(plan.batch, workload.batch) if plan.batch else workload.batch)
    for batch in chosen.batches or (cap,):
        for rate in chosen.rates or part.rates or (workload.spike_rate,):
            problem = workload.problem(batch, rate, seed)
            for device in devices:
                for dtype in _dtypes(chosen):
                    for phase in OPERATORS[operator].phases:
                        if matches(phase, chosen.phases or part.phases or ("*",)):
                            for name in _implementations(chosen, plan.skip, operator, device):
                                yield Case(operator, phase, name, device, dtype, problem)


def _dtypes(chosen: Selection) -> list[str]:
    return [dtype for dtype in registry.FLOATS if matches(dtype, chosen.dtypes or ("float32",))]


def _implementations(chosen: Selection, skip: Sequence[str], operator: str, device: str) -> list[str]:
    """Names of the implementations to run: those written for the device, and by default only the default ones.

    One that is unavailable here stays in: its row says why.
    """
    found = registry.implementations(operator, device)
    if chosen.implementations:
        return [i.name for i in found if matches(i.name, chosen.implementations)]
    return [i.name for i in found if i.default and not matches(i.name, skip)]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether ``name`` is one of ``patterns``, in which * stands for any characters and ? for one."""
    return any(_pattern(p).fullmatch(name) for p in patterns)


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    """As the standard library's globs, which never backtrack over a ``*``, but without ``[``."""
    return re.compile(fnmatch.translate(text.replace("[", "[[]")))


def _is_glob(text: str) -> bool:
    return "*" in text or "?" in text


def _one(what: str, name: str, known: Iterable[str]) -> str:
    """``name`` if it is known; ``UsageError`` with the nearest name otherwise."""
    names = list(known)
    if name in names:
        return name
    near = registry.closest(name, names)
    listed = ", ".join(names) if len(names) <= 16 else f"see `spikemark list {what}s`"
    raise UsageError(f"unknown {what} {name!r}{near}; known: {listed}")


def _known(what: str, patterns: Sequence[str], known: Iterable[str]) -> None:
    """Every pattern names something: ``UsageError`` for a name that does not, ``NothingMeasured`` for a * or ?."""
    names = list(dict.fromkeys(known))
    for pattern in patterns:
        if not _is_glob(pattern):
            _one(what, pattern, names)
        elif not any(matches(name, [pattern]) for name in names):
            near = registry.closest(pattern.replace("*", "").replace("?", ""), names)
            raise NothingMeasured(f"nothing to measure: no {what} matches {pattern!r}{near}")


def _check(chosen: Selection, catalog: dict[str, Workload]) -> None:
    _known("operator", chosen.operators, OPERATORS)
    _known("phase", chosen.phases, (phase for op in OPERATORS.values() for phase in op.phases))
    networks = {name.split("/")[0] for name in catalog}
    for pattern in chosen.workloads:
        network = pattern.removesuffix("/")
        if network in networks:
            raise UsageError(f"unknown workload {pattern!r} (did you mean '{network}/*'?)")
        if pattern.startswith("recording:") and not any(name.startswith("recording:") for name in catalog):
            raise UsageError(f"workload {pattern!r} needs a recording: --spikes FILE")
    _known("workload", chosen.workloads, catalog)
    _known("dtype", chosen.dtypes, registry.FLOATS)
    if chosen.implementations:
        _known(
            "implementation", chosen.implementations, (i.name for o in OPERATORS for i in registry.implementations(o))
        )
    for batch in chosen.batches:
        if batch < 1:
            raise UsageError(f"batch must be at least 1, got {batch}")
    for rate in chosen.rates:
        if not 0 <= rate <= 1:
            raise UsageError(f"spike rate must be from 0 to 1 (or 0% to 100%), got {rate:g}")


def resolve_devices(asked: Sequence[str]) -> list[str]:
    """Device names as results have them: ``cpu``, ``cpu:N`` (N threads), ``cuda:I``.

    ``cuda`` is the first GPU, ``all`` the CPU and every GPU; nothing asked is the first GPU, or the CPU where there is
    none. ``UsageError`` for anything that is not here.
    """
    found: list[str] = []
    for name in asked or (None,):
        if name is None:
            found.append("cuda:0" if _gpus() else "cpu")
        elif name == "all":
            found += ["cpu", *(f"cuda:{i}" for i in range(_gpus()))]
        else:
            found.append(_device(name))
    return list(dict.fromkeys(found))


def parse_device(name: str) -> tuple[str, int | None]:
    """``cpu`` or ``cuda``, and the number after it; ``UsageError`` for anything else, ``all`` included."""
    parts = re.fullmatch(r"(cpu|cuda)(?::([0-9]{1,4}))?", name)
    if parts is None:
        near = " (did you mean 'cuda'?)" if "gpu" in name.lower() else registry.closest(name, ["cpu", "cuda", "all"])
        raise UsageError(f"unknown device {name!r}{near}; known: cpu, cpu:N (N threads), cuda, cuda:I, all")
    return parts[1], None if parts[2] is None else int(parts[2])


def check_names(devices: Sequence[str]) -> None:
    """``UsageError`` for a name that no machine's device can have."""
    for name in devices:
        if name != "all" and parse_device(name) == ("cpu", 0):
            raise UsageError(f"device {name!r}: at least one thread is needed")


def _device(name: str) -> str:
    kind, number = parse_device(name)
    if kind == "cpu":
        cores = os.cpu_count() or 1
        if number is not None and not 1 <= number <= cores:
            raise UsageError(f"device {name!r}: threads must be from 1 to {cores}, the cores of this machine")
        return "cpu" if number is None else f"cpu:{number}"
    gpus = _gpus()
    if (number or 0) >= gpus:
        there = f"the GPUs here are cuda:0 to cuda:{gpus - 1}" if gpus else "torch finds no NVIDIA GPU here"
        raise UsageError(f"device {name!r}: {there}")
    return f"cuda:{number or 0}"


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


_OPTIONS = {
    "operators": "--operator",
    "phases": "--phase",
    "implementations": "--implementation",
    "workloads": "--workload",
}
_HINTS = 6  # names listed in one line


def without_a_case(selected: Mapping[str, Iterable[Any]], cases: Sequence[Case]) -> list[tuple[str, str]]:
    """(option, name) of everything selected that matches no case, such as an implementation of another operator."""
    present = {field: {str(getattr(case, field[:-1])) for case in cases} for field in _OPTIONS}
    return [
        (option, str(name))
        for field, option in _OPTIONS.items()
        for name in selected.get(field, ())
        if not any(matches(one, (name,)) for one in present[field])
    ]


def _what_was_close(chosen: Selection, cases: Callable[[Selection], list[Case]]) -> str:
    """One line: which single option to change, and to what, so that there is something to measure."""
    hints = []
    for field, option in _OPTIONS.items():
        if not getattr(chosen, field):
            continue
        anything: dict[str, Any] = {field: ("*",)}
        without = replace(chosen, **anything)
        names = list(dict.fromkeys(str(getattr(case, field[:-1])) for case in cases(without)))
        if names:
            more = f" or {len(names) - _HINTS} more" if len(names) > _HINTS else ""
            hints.append(f"{option} {' or '.join(names[:_HINTS])}{more}")
    asked = " ".join(f"{o} {v}" for f, o in _OPTIONS.items() for v in getattr(chosen, f))
    close = f"; with the rest of the selection there is: {'; '.join(hints)}" if hints else ""
    return f"nothing to measure: no case has {asked or 'what was asked for'} on this device{close}"

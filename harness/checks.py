"""``verify_case``: what ``spikemark verify`` checks of one implementation beyond the gate before a timing.

The case itself, then a small version of its problem with inputs that lie differently in memory, a gradient of stride
0, and the ends: silence, all firing, one time step, nothing at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from spikemark.harness import records
from spikemark.harness.clock import DeviceClock
from spikemark.harness.records import Case
from spikemark.harness.verify import Block, Refused, admit, gate
from spikemark.kernels.types import Problem
from torch import Tensor

Layout = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Check:
    """One check: its name, whether it holds, why not (one line), and the largest error that was compared."""

    name: str
    ok: bool
    reason: str = ""
    max_error: float = 0.0


def verify_case(case: Case, implementation: Any, limit: int | None = None) -> list[Check]:
    """Check ``case`` (all elements unless ``limit``) and what else must hold of its operator. Times nothing.

    Raises ``Refused`` if the implementation cannot run the case at all.
    """
    admit(case, implementation)
    clock = DeviceClock(case.device)
    return [_check("values", case, implementation, clock, limit), *further(case, implementation, clock)]


def further(case: Case, implementation: Any, clock: DeviceClock) -> list[Check]:
    """All checks but that of the case itself."""
    return [
        _check(name, dataclasses.replace(case, problem=problem), implementation, clock, None, layout)
        for name, problem, layout in variations(case)
        if implementation.unsupported(problem, case.phase, case.dtype) is None
    ]


def _check(
    name: str, case: Case, implementation: Any, clock: DeviceClock, limit: int | None, layout: Layout | None = None
) -> Check:
    try:
        found = gate(Block(case, limit, layout), implementation, clock)
    except Refused as refused:
        return Check(name, False, refused.reason)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises is its result
        first = next(iter(str(error).splitlines()), "")
        return Check(name, False, f"{type(error).__name__}: {first}")
    return Check(name, found.status == records.OK, found.reason, found.max_error)


def variations(case: Case) -> Iterator[tuple[str, Problem, Layout | None]]:
    """Name, problem and memory layout of each further check of ``case``."""
    small = reduced(case.problem)
    yield "small", small, None
    yield "strided inputs", small, strided
    yield "channels-last inputs", small, channels_last
    yield "odd storage offset", small, offset
    if case.phase not in ("forward",):
        yield "expanded gradient", small, expanded_gradient
    yield "all silent", dataclasses.replace(small, spike_rate=0.0), None
    yield "all firing", dataclasses.replace(small, spike_rate=1.0), None
    yield "one time step", dataclasses.replace(small, time_steps=1), None
    yield "no samples", dataclasses.replace(small, batch=0), None
    yield "no time steps", dataclasses.replace(small, time_steps=0), None
    if case.operator in ("srm_neuron", "clamped_sign"):
        yield "no neurons", dataclasses.replace(small, kind="neuron", in_shape=(0,), out_shape=(0,)), None


def reduced(problem: Problem) -> Problem:
    """A small problem of the same kind, geometry and constants; sizes that no tile divides. Random spikes."""
    small = dataclasses.replace(
        problem, batch=min(problem.batch, 2), time_steps=min(problem.time_steps, 7), recording=None
    )
    if problem.kind == "conv" and problem.kernel is not None:
        inside, outside = problem.in_shape[0], problem.out_shape[0]
        if problem.geometry.groups == 1:
            inside, outside = min(inside, 3), min(outside, 5)
        size = (min(problem.in_shape[1], 11), min(problem.in_shape[2], 13))
        out = problem.geometry.output_size(size, problem.kernel)
        if min(out) < 1:
            size = (problem.in_shape[1], problem.in_shape[2])
            out = (problem.out_shape[1], problem.out_shape[2])
        return dataclasses.replace(small, in_shape=(inside, *size), out_shape=(outside, *out))
    if problem.kind == "pool" and problem.kernel is not None:
        channels = min(problem.in_shape[0], 3)
        kh, kw = problem.kernel
        size = (min(problem.in_shape[1], 2 * kh + 1), min(problem.in_shape[2], 3 * kw + 1))
        return dataclasses.replace(
            small, in_shape=(channels, *size), out_shape=(channels, size[0] // kh, size[1] // kw)
        )
    return dataclasses.replace(
        small,
        in_shape=tuple(min(n, 13) for n in problem.in_shape),
        out_shape=tuple(min(n, 11) for n in problem.out_shape),
    )


def strided(name: str, tensor: Tensor) -> Tensor:
    """The same values in every other element of the last axis of a wider tensor."""
    if tensor.ndim == 0:
        return tensor
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 7, dtype=tensor.dtype, device=tensor.device)
    view = wide[..., ::2]
    view.copy_(tensor)
    return view


def channels_last(name: str, tensor: Tensor) -> Tensor:
    """The same values with the third axis from the end innermost in memory (the first, below rank 3)."""
    axis = max(0, tensor.ndim - 3)
    return tensor.movedim(axis, -1).contiguous().movedim(-1, axis) if tensor.ndim > 1 else tensor


def offset(name: str, tensor: Tensor) -> Tensor:
    """The same values, contiguous, one element after the start of their storage."""
    buffer = torch.full((tensor.numel() + 1,), 7, dtype=tensor.dtype, device=tensor.device)
    view = buffer[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def expanded_gradient(name: str, tensor: Tensor) -> Tensor:
    """For a gradient: ones of stride 0, as ``out.sum().backward()`` hands on; other tensors as they are."""
    if not name.startswith("grad"):
        return tensor
    return torch.ones((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

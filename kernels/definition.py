"""What every operator defines beside its implementations: inputs, reference, comparison, cost, calls.

The harness knows operators only through ``Definition``: one subclass an operator, in
``kernels/<operator>/definition.py``, as the module attribute ``DEFINITION``.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from spikemark.kernels.catalog import OPERATORS
from spikemark.kernels.types import Problem
from torch import Tensor

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that accumulates: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_float(name: str, tensor: Tensor) -> None:
    """Raise ``TypeError`` naming the argument unless its dtype is one of the four supported."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES.values():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a float32, float16, bfloat16 or float64 tensor, got {got}")


@dataclass
class Inputs:
    """Inputs of one call: ``tensors`` by name (all held by the caller) and what was achieved.

    ``spike_rate`` is the fraction of ones that the spike tensor really has (the input spikes of a
    convolution or pool, the computed output spikes of a neuron), 0..1.
    """

    tensors: dict[str, Tensor]
    spike_rate: float
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BoundCall:
    """One implementation bound to inputs and a phase, split into what is timed and what is not.

    ``prepare()`` makes what a single call consumes (an autograd graph, say), untimed, fresh for every call.
    ``call(prepared)`` is the timed part. ``outputs(result)`` names its result, untimed.
    ``saved(result)`` lists the tensors kept for backward after ``call`` (forward phases), untimed.
    """

    call: Callable[[Any], Any]
    outputs: Callable[[Any], dict[str, Tensor]]
    prepare: Callable[[], Any] = lambda: None
    saved: Callable[[Any], list[Tensor]] = lambda result: []


@dataclass(frozen=True)
class Comparison:
    """Verdict of the gate. ``max_error`` is the largest ``|got - want| / max(1, |want|)`` that was compared.

    ``reason`` is one line when ``ok`` is False. ``ambiguous`` counts neurons whose spikes differ from the
    reference where its potential is within rounding of the threshold. ``checked`` and ``total`` count
    elements: large cases are compared on a sample.
    """

    ok: bool
    reason: str = ""
    max_error: float = 0.0
    ambiguous: int = 0
    checked: int = 0
    total: int = 0


@dataclass(frozen=True)
class Cost:
    """Least work of a call: ``bytes`` that must cross main memory, ``operations`` (additions and multiplications)."""

    bytes: int
    operations: int


class Definition(ABC):
    """An operator as the harness sees it."""

    name: str

    @abstractmethod
    def make_inputs(self, problem: Problem, phase: str, dtype: torch.dtype, device: str, seed: int) -> Inputs:
        """Random inputs with a controlled firing rate, on ``device``. Same arguments, same inputs."""

    @abstractmethod
    def bind(self, implementation: Any, phase: str, inputs: Inputs, problem: Problem) -> BoundCall:
        """``implementation``'s call for ``phase`` on ``inputs``."""

    @abstractmethod
    def reference(self, phase: str, inputs: Inputs, problem: Problem, limit: int | None = None) -> Any:
        """The float64 result on the CPU, from the very inputs (rounded to their dtype, then widened).

        With ``limit``, at most about that many output elements are computed: a sample that always includes
        the first and the last. The result is opaque to the harness, which hands it to ``compare``.
        """

    @abstractmethod
    def compare(
        self, phase: str, outputs: dict[str, Tensor], reference: Any, inputs: Inputs, problem: Problem
    ) -> Comparison:
        """Compare one call's outputs with ``reference``'s result."""

    @abstractmethod
    def cost(self, phase: str, problem: Problem, dtype: torch.dtype, spike_rate: float) -> Cost:
        """Cost model of a call: the least any implementation must move and do."""

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases measured apart."""
        return OPERATORS[self.name].phases


@functools.cache
def definition(operator: str) -> Definition:
    """The definition of ``operator`` (a name in ``OPERATORS``)."""
    module = importlib.import_module(f"{OPERATORS[operator].package}.definition")
    found: Definition = module.DEFINITION
    return found


def check_shape(name: str, got: Any, want: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> str:
    """One line that says how ``got`` is not a tensor of ``want``'s shape, ``dtype`` and ``device``; or ''."""
    if not isinstance(got, Tensor):
        return f"{name} is a {type(got).__name__}, not a tensor"
    if got.shape != want.shape:
        return f"{name} has shape {list(got.shape)}, expected {list(want.shape)}"
    if got.dtype != dtype:
        return f"{name} has dtype {got.dtype}, expected {dtype}"
    if device is not None and got.device != device:
        return f"{name} is on {got.device}, expected {device}"
    return ""


def difference(got: Tensor, want: Tensor, atol: Tensor | float, rtol: float) -> tuple[float, int]:
    """(largest error, elements out of tolerance) of ``got`` against float64 ``want``.

    An element passes if ``|got - want| <= atol + rtol * |want|``, or if both are NaN, or both the same
    infinity after ``want`` is rounded to ``got``'s dtype. The error is ``|got - want| / max(1, |want|)``;
    it is infinite where only one of the two is finite.
    """
    if want.numel() == 0:
        return 0.0, 0
    wide = got.detach().to("cpu", torch.float64)
    rounded = want.to(got.dtype).to(torch.float64)
    same = (wide == rounded) | (wide == want) | (wide.isnan() & want.isnan())
    gap = torch.where(same, 0.0, (wide - want).abs())
    gap = torch.where(gap.isnan(), torch.inf, gap)
    bad = ~same & ~(gap <= atol + rtol * want.abs())
    error = gap / want.abs().clamp(min=1.0)
    error = torch.where(error.isnan(), torch.where(same, 0.0, torch.inf), error)
    return float(error.max()), int(bad.sum())

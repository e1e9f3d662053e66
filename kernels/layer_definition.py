"""What the two layers' definitions share: inputs whose output fires at the wanted rate, calls, comparison, cost.

A subclass says how its current is computed and transposed, on samples: ``Sample`` holds a part of the layer whose time
courses are replayed (``layer_gate``) and the part of one gradient that follows from it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from spikemark.kernels import layer_gate
from spikemark.kernels.definition import BoundCall, Comparison, Cost, Definition, Inputs, check_shape
from spikemark.kernels.spike_trains import input_spikes
from spikemark.kernels.srm_neuron import reference as neuron
from spikemark.kernels.srm_neuron.definition import CALIBRATION_STEPS, current_deviation
from spikemark.kernels.types import Problem
from torch import Tensor

Index = tuple[slice | Tensor, ...]
CALIBRATION_CHANNELS = 16
SHIFT_LIMIT = 50.0  # largest mean of a weight, in deviations, that calibration tries


@dataclass(frozen=True)
class Sample:
    """A part of a layer, in float64.

    ``out`` picks the time courses (of spikes and their gradient), whose current is ``current`` with ``error`` as the
    bound on an implementation's: [n, T, *S]. In backward, ``half`` ("t" or "w") of the neuron's gradient, pulled back
    by ``transpose(values, squared)``, is the part ``inside`` of the output ``name``: a sum of ``terms`` products.
    ``transpose`` squares its factors if ``squared``.
    """

    out: Index
    current: Tensor
    error: Tensor
    half: str = ""
    name: str = ""
    inside: Index = ()
    terms: int = 0
    transpose: Callable[[Tensor, bool], Tensor] | None = None


def take(tensor: Tensor, index: Index) -> Tensor:
    """The part of ``tensor`` that ``index`` (a slice or positions for each axis) picks, on the CPU."""
    for axis, part in enumerate(index):
        if isinstance(part, slice):
            tensor = tensor[(slice(None),) * axis + (part,)]
        else:
            tensor = tensor.index_select(axis, part.to(tensor.device))
    return tensor.detach().to("cpu")


def double(tensor: Tensor, index: Index) -> Tensor:
    """``take`` in float64."""
    return take(tensor, index).to(torch.float64)


class LayerDefinition(Definition):
    """A layer: ``input`` spikes and ``weight`` -> ``spikes``; ``grad_out`` -> ``grad_input`` and ``grad_weight``.

    ``backward`` is timed on a graph that the implementation's own forward built, ``step`` is forward and backward.
    Both also name the spikes that their gradients belong to, because the comparison needs them.
    """

    @abstractmethod
    def weight_shape(self, problem: Problem) -> tuple[int, ...]:
        """Shape of the weight, output channels first."""

    @abstractmethod
    def calibration_current(self, spikes: Tensor, weight: Tensor, problem: Problem) -> Tensor:
        """Float64 current [1, T, *S] of a small part of the layer, linear in ``weight``."""

    @abstractmethod
    def call(self, implementation: Any, input: Tensor, weight: Tensor, problem: Problem) -> Tensor:
        """The implementation's spikes, differentiable."""

    @abstractmethod
    def samples(self, phase: str, inputs: Inputs, problem: Problem, limit: int | None) -> list[Sample]:
        """The parts to compare; with ``limit``, about that many elements that include both ends."""

    @abstractmethod
    def synapses(self, problem: Problem) -> int:
        """Multiply-adds of the dense product: pairs of an input and an output that a weight joins."""

    def make_inputs(self, problem: Problem, phase: str, dtype: torch.dtype, device: str, seed: int) -> Inputs:
        """Input spikes (random or recorded), weights under which the output fires at ``problem.spike_rate`` too, and a
        normal gradient. The rate is the input's; ``extra["output_rate"]`` that of the calibrated sample."""
        spikes, rate = input_spikes(problem, dtype, device, seed)
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        weight = torch.randn(self.weight_shape(problem), generator=generator, device=device)
        weight, output_rate = self._calibrated(spikes, weight, rate, problem)
        tensors = {"input": spikes, "weight": weight.to(dtype)}
        if phase != "forward":
            shape = (problem.batch, problem.time_steps, *problem.out_shape)
            tensors["grad_out"] = torch.randn(shape, generator=generator, device=device).to(dtype)
        return Inputs(tensors, rate, {"output_rate": output_rate})

    def _calibrated(self, spikes: Tensor, normal: Tensor, rate: float, problem: Problem) -> tuple[Tensor, float]:
        """Weights of a deviation that gives the current the neuron's usual one, and a mean found by bisection.

        The current is linear in the weight, so both its parts are computed once, on a small part of the very input.
        """
        fan_in = math.prod(normal.shape[1:])
        deviation = current_deviation(problem.params) / math.sqrt(max(1.0, fan_in * rate))
        if not spikes.numel() or not rate:
            return normal * deviation, 0.0
        varied, even = (self.calibration_current(spikes, w, problem) for w in (normal, torch.ones_like(normal)))
        varied, even = (deviation * c[:, :CALIBRATION_STEPS] for c in (varied, even))
        low, high, shift, achieved = -SHIFT_LIMIT, SHIFT_LIMIT, 0.0, 0.0
        for _ in range(16):
            shift = (low + high) / 2
            achieved = float(neuron.forward(varied + shift * even, problem.params).spikes.mean())
            low, high = (shift, high) if achieved < problem.spike_rate else (low, shift)
        return (normal + shift) * deviation, achieved

    def bind(self, implementation: Any, phase: str, inputs: Inputs, problem: Problem) -> BoundCall:
        """The call of one phase.

        For ``backward`` the graph is built once, untimed, by the first ``prepare`` and kept (``retain_graph``): every
        call then does the same work on the same saved tensors, and no forward runs between samples.
        """
        tensors = inputs.tensors
        grad_out = tensors.get("grad_out")

        def forward() -> tuple[Tensor, Tensor, Tensor]:
            input, weight = (tensors[name].detach().requires_grad_() for name in ("input", "weight"))
            with torch.enable_grad():
                return input, weight, self.call(implementation, input, weight, problem)

        def backward(graph: tuple[Tensor, Tensor, Tensor], keep: bool) -> tuple[Tensor, ...]:
            input, weight, spikes = graph
            return (spikes, *torch.autograd.grad(spikes, (input, weight), grad_out, retain_graph=keep))

        def outputs(result: tuple[Tensor, ...]) -> dict[str, Tensor]:
            return dict(zip(("spikes", "grad_input", "grad_weight"), (t.detach() for t in result), strict=True))

        if phase == "forward":
            return BoundCall(
                call=lambda _: forward()[2], outputs=lambda spikes: {"spikes": spikes.detach()}, saved=saved_by
            )
        if phase == "step":
            return BoundCall(call=lambda _: backward(forward(), False), outputs=outputs)
        graphs: list[tuple[Tensor, Tensor, Tensor]] = []

        def prepare() -> tuple[Tensor, Tensor, Tensor]:
            if not graphs:
                graphs.append(forward())
            return graphs[0]

        return BoundCall(call=lambda graph: backward(graph, True), outputs=outputs, prepare=prepare)

    def reference(self, phase: str, inputs: Inputs, problem: Problem, limit: int | None = None) -> list[Sample]:
        """Float64 currents of all of the layer, or of a sample; what depends on the spikes is left to ``compare``."""
        return self.samples(phase, inputs, problem, limit)

    def compare(
        self, phase: str, outputs: dict[str, Tensor], reference: Any, inputs: Inputs, problem: Problem
    ) -> Comparison:
        """Spikes at every step of the samples, then both gradients on these spikes; see ``layer_gate``."""
        given = inputs.tensors["input"]
        shapes = {"spikes": (problem.batch, problem.time_steps, *problem.out_shape)}
        if phase != "forward":
            shapes |= {"grad_input": tuple(given.shape), "grad_weight": self.weight_shape(problem)}
        for name, shape in shapes.items():
            fault = check_shape(name, outputs.get(name), given.new_empty(()).expand(shape), given.dtype, given.device)
            if fault:
                return Comparison(False, fault)
        total = sum(math.prod(shape) for shape in shapes.values())
        parts: list[Comparison] = []
        replays: list[tuple[Sample, Tensor, layer_gate.Replay]] = []
        for sample in reference:
            spikes = double(outputs["spikes"], sample.out)
            found = layer_gate.replay(sample.current, sample.error, spikes, problem.params, given.dtype)
            parts.append(layer_gate.check_spikes(spikes, found, problem.params))
            replays.append((sample, spikes, found))
        # A wrong spike makes wrong gradients: say that first.
        if all(part.ok for part in parts) and phase != "forward":
            for sample, spikes, found in replays:
                parts.append(self._compare_gradient(sample, spikes, found, outputs, inputs, problem))
        return layer_gate.joined(parts, total)

    @staticmethod
    def _compare_gradient(
        sample: Sample,
        spikes: Tensor,
        found: layer_gate.Replay,
        outputs: dict[str, Tensor],
        inputs: Inputs,
        problem: Problem,
    ) -> Comparison:
        dtype = inputs.tensors["input"].dtype
        assert sample.transpose is not None
        grad_out = double(inputs.tensors["grad_out"], sample.out)
        values, error = layer_gate.gradient(sample.half, grad_out, spikes, found, problem.params, dtype)
        want = sample.transpose(values, False)
        squares = sample.transpose(layer_gate.term_squares(values, error, sample.terms, dtype), True)
        got = take(outputs[sample.name], sample.inside)
        return layer_gate.check_gradient(sample.name, got, want, squares, sample.terms, dtype)

    def cost(self, phase: str, problem: Problem, dtype: torch.dtype, spike_rate: float) -> Cost:
        """Least traffic and work.

        Forward: read input and weight, write spikes and both slopes where a spike is. Backward: read the gradient, one
        bit a spike, the slopes at spikes, input and weight, and write the gradients of input and weight. Work: the
        products at ``spike_rate`` of the inputs (forward, and both halves of backward) and the neuron's own. The
        output is taken to fire at the input's rate.
        """
        steps = problem.batch * problem.time_steps
        given, fired = steps * math.prod(problem.in_shape), steps * math.prod(problem.out_shape)
        weights = math.prod(self.weight_shape(problem))
        slopes = int(2 * spike_rate * fired)
        products = round(2 * self.synapses(problem) * spike_rate)
        forward = Cost((given + weights + fired + slopes) * dtype.itemsize, products + 10 * fired)
        backward = Cost(
            (fired + slopes + 2 * given + 2 * weights) * dtype.itemsize + fired // 8, 2 * products + 8 * fired
        )
        if phase == "step":
            return Cost(forward.bytes + backward.bytes, forward.operations + backward.operations)
        return forward if phase == "forward" else backward


def saved_by(spikes: Tensor) -> list[Tensor]:
    """The tensors that the layer's autograd node saved, where it has one node (its input and weight among them)."""
    return [t for t in getattr(spikes.grad_fn, "saved_tensors", ()) if t is not None]

"""``srm_linear`` as the harness sees it; ``layer_definition`` and ``layer_gate`` say how it is judged and why."""

from __future__ import annotations

import math
from typing import Any

import torch
from spikemark.kernels.conv_backward.definition import spread
from spikemark.kernels.definition import Inputs
from spikemark.kernels.layer_definition import CALIBRATION_CHANNELS, LayerDefinition, Sample, double
from spikemark.kernels.layer_gate import as_stored
from spikemark.kernels.types import Problem
from torch import Tensor

ENDS = 2  # samples, and output neurons for the weight's gradient, that a sampled layer is compared on
SAMPLE_OPERATIONS = 2_000_000_000  # multiply-adds of a sampled float64 product: about a tenth of a second


class SrmLinear(LayerDefinition):
    """Matrix product and neuron as one layer."""

    name = "srm_linear"

    def weight_shape(self, problem: Problem) -> tuple[int, ...]:
        """[N, M]."""
        return (problem.out_shape[0], problem.in_shape[0])

    def call(self, implementation: Any, input: Tensor, weight: Tensor, problem: Problem) -> Tensor:
        """Spikes by a neuron with torch's matrix product, or by a plug-in's layer of the same signature."""
        spikes: Tensor = implementation.forward(input, weight, problem.params)
        return spikes

    def synapses(self, problem: Problem) -> int:
        """Of all frames."""
        return problem.batch * problem.time_steps * math.prod(self.weight_shape(problem))

    def calibration_current(self, spikes: Tensor, weight: Tensor, problem: Problem) -> Tensor:
        """Of the first neurons for the first sample; more of them than of a convolution's channels, having no map."""
        w = weight[: 16 * CALIBRATION_CHANNELS].to("cpu", torch.float64)
        return double(spikes, (slice(0, 1),)) @ w.T

    def samples(self, phase: str, inputs: Inputs, problem: Problem, limit: int | None) -> list[Sample]:
        """Forward: some neurons in all or the first and last samples. Backward: all neurons of the first and last
        samples, for the gradient of some inputs, and some neurons in all samples, for the gradient of their weights."""
        x, weight = inputs.tensors["input"], inputs.tensors["weight"]
        outputs, width = self.weight_shape(problem)
        if not x.numel() or not outputs:
            return []
        everything = limit is None or max(x.numel(), x.numel() // width * outputs) <= limit
        samples = torch.arange(problem.batch) if everything else spread(problem.batch, ENDS)
        courses = len(samples) * problem.time_steps
        if phase == "forward":
            rows = torch.arange(outputs) if everything or limit is None else spread(outputs, limit // courses)
            return [self._sample(samples, rows, x, weight)]
        columns = torch.arange(width) if everything or limit is None else spread(width, limit // courses)
        if not everything and courses * width * outputs > SAMPLE_OPERATIONS:
            samples = samples[-1:]  # every neuron must be replayed from its first step for one input's gradient
        found = [self._back_to_input(samples, columns, x, weight, problem)]
        rows = torch.arange(outputs) if everything else spread(outputs, ENDS)
        return [*found, self._back_to_weight(rows, columns, x, weight, problem)]

    @staticmethod
    def _sample(samples: Tensor, rows: Tensor, x: Tensor, weight: Tensor) -> Sample:
        wide = double(weight, (rows,))
        part = double(x, (samples,))
        squares = part.square() @ wide.square().T
        current, error = as_stored(part @ wide.T, squares, wide.shape[1], x.dtype)
        return Sample((samples, slice(None), rows), current, error)

    def _back_to_input(self, samples: Tensor, columns: Tensor, x: Tensor, weight: Tensor, problem: Problem) -> Sample:
        whole = self._sample(samples, torch.arange(weight.shape[0]), x, weight)
        inside = (samples, slice(None), columns)
        factors = double(weight, (slice(None), columns)), double(x, inside)

        def transpose(values: Tensor, squared: bool) -> Tensor:
            w, masked, scale = *factors, problem.params.grad_scale
            if squared:
                w, masked, scale = w.square(), masked.square(), scale**2
            return (values @ w) * masked * scale

        return Sample(whole.out, whole.current, whole.error, "t", "grad_input", inside, weight.shape[0], transpose)

    def _back_to_weight(self, rows: Tensor, columns: Tensor, x: Tensor, weight: Tensor, problem: Problem) -> Sample:
        batch = torch.arange(problem.batch)
        whole = self._sample(batch, rows, x, weight)
        factor = double(x, (slice(None), slice(None), columns)).flatten(0, 1)

        def transpose(values: Tensor, squared: bool) -> Tensor:
            return values.flatten(0, 1).T @ (factor.square() if squared else factor)

        terms = problem.batch * problem.time_steps
        return Sample(whole.out, whole.current, whole.error, "w", "grad_weight", (rows, columns), terms, transpose)


DEFINITION = SrmLinear()

"""Small problems and bound calls for the GPU tests, for every implementation that runs on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from spikemark.kernels import registry
from spikemark.kernels.definition import definition
from spikemark.kernels.types import ConvGeometry, Problem, SrmParams
from torch import Tensor

PARAMS = SrmParams(tau_m=7.0, tau_s=4.0, tau_g=3.5, grad_scale=0.7)
PHASES = {"srm_neuron": ("forward", "backward"), "conv_backward": ("input", "weight")}
# torch_compile is verified by `spikemark verify`; here it would compile for minutes.
ALL = [
    (operator, i.name, phase)
    for operator, phases in PHASES.items()
    for i in registry.implementations(operator)
    if i.runs_on("cuda") and i.name != "torch_compile"
    for phase in phases
]
CAPTURED = [(o, n, p) for o, n, p in ALL if registry.get(o, n).graph_capture]


def problem(operator: str, neurons: int = 1040, batch: int = 3, steps: int = 5) -> Problem:
    """Sizes off every tile. 1040 neurons take 16-byte accesses in every dtype, 1031 in none."""
    if operator == "srm_neuron":
        return Problem("gpu", "neuron", batch, steps, (neurons,), (neurons,), PARAMS, spike_rate=0.15)
    geometry = ConvGeometry(stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2)
    size = geometry.output_size((19, 17), (3, 3))
    return Problem("gpu", "conv", batch, steps, (6, 19, 17), (70, *size), PARAMS, geometry, (3, 3), spike_rate=0.15)


class Bound:
    """One phase of an implementation bound to inputs on ``device``: ``call()`` gives its outputs by name."""

    def __init__(self, implementation: Any, operator: str, phase: str, device: str, dtype: torch.dtype) -> None:
        self.implementation, self.phase, self.problem = implementation, phase, problem(operator)
        self.definition = definition(operator)
        self.inputs = self.definition.make_inputs(self.problem, phase, dtype, device, seed=0)
        self.bound = self.definition.bind(implementation, phase, self.inputs, self.problem)

    @property
    def varied(self) -> Tensor:
        """The input whose values a test may change between calls."""
        names = ("current", "grad_out", "grad_t", "grad_w")
        return next(self.inputs.tensors[name] for name in names if name in self.inputs.tensors)

    def call(self) -> dict[str, Tensor]:
        return self.bound.outputs(self.bound.call(self.bound.prepare()))

    def check(self, outputs: dict[str, Tensor]) -> None:
        """Compare with the float64 reference of the inputs as they are now."""
        want = self.definition.reference(self.phase, self.inputs, self.problem)
        verdict = self.definition.compare(self.phase, outputs, want, self.inputs, self.problem)
        assert verdict.ok, f"{self.implementation.name} ({self.implementation.ran}): {verdict.reason}"

"""The operators that exist: names, phases, one line each. Imports no torch, so listing is instant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operator:
    """One operator: its name in results, the phases that are measured apart, and what it computes.

    ``kinds`` are the kinds of workload (``Problem.kind``) that it can be run on.
    """

    name: str
    phases: tuple[str, ...]
    kinds: tuple[str, ...]
    summary: str

    @property
    def package(self) -> str:
        """Import name of the folder that holds its reference, definition and implementations."""
        return f"spikemark.kernels.{self.name}"


OPERATORS: dict[str, Operator] = {
    op.name: op
    for op in (
        Operator(
            "srm_neuron",
            ("forward", "backward"),
            ("conv", "linear", "neuron"),
            "spike response model neuron: two exponentials, reset by clearing, gradients of spike times",
        ),
        Operator(
            "conv_backward",
            ("input", "weight"),
            ("conv",),
            "the two halves of a spiking convolution's backward, called apart with different gradients",
        ),
        Operator(
            "srm_conv2d",
            ("forward", "backward", "step"),
            ("conv",),
            "convolution and neuron as one layer, by any pair of implementations",
        ),
        Operator(
            "srm_linear",
            ("forward", "backward", "step"),
            ("linear",),
            "matrix product and neuron as one layer",
        ),
        Operator(
            "adjusted_avg_pool2d",
            ("forward", "backward"),
            ("pool",),
            "average pooling whose gradient is shared by the spikes in the window",
        ),
        Operator(
            "clamped_sign",
            ("forward", "backward"),
            ("conv", "linear", "neuron"),
            "sign with a clamped straight-through gradient",
        ),
    )
}

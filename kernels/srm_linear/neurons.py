"""``srm_linear``'s implementations: every neuron with torch's matrix products, under the neuron's name."""

from __future__ import annotations

from spikemark.kernels import _parts, registry
from spikemark.kernels.layers import linear_spikes
from spikemark.kernels.types import SrmParams
from torch import Tensor


class WithNeuron(_parts.Layer):
    """Torch's matrix products with one neuron; a subclass for each neuron is registered."""

    def forward(self, input: Tensor, weight: Tensor, params: SrmParams) -> Tensor:
        """Spikes [B, T, N], differentiable in ``input`` [B, T, M] and ``weight`` [N, M]."""
        return linear_spikes(input, weight, params, self.parts[0])


def register_neurons() -> None:
    """Register a layer for every neuron that has none yet; the neuron's baseline is the layer's."""
    for neuron in registry.implementations("srm_neuron"):
        _parts.register("srm_linear", WithNeuron, (neuron,), baseline=neuron.baseline, default=neuron.default)


registry.derive("srm_linear", register_neurons)

"""``srm_conv2d``'s implementations: every neuron with every convolution backward, named ``neuron+conv_backward``."""

from __future__ import annotations

from spikemark.kernels import _parts, registry
from spikemark.kernels.layers import conv2d_spikes
from spikemark.kernels.types import ConvGeometry, SrmParams
from torch import Tensor

BASELINE = ("torch_eager", "torch_autograd")
USUAL = "aten"  # the convolution backward that every neuron is paired with in a run that names no implementation
BEST = {("native_compact", "native_event"), ("native_compact", "native_auto"), ("cupy_compact", "cupy_event")}


class Pair(_parts.Layer):
    """One neuron and one convolution backward; a subclass for each pair is registered."""

    def forward(self, input: Tensor, weight: Tensor, params: SrmParams, geometry: ConvGeometry) -> Tensor:
        """Spikes [B, T, Cout, H', W'], differentiable in ``input`` and ``weight`` with the parts' backward."""
        neuron, conv = self.parts
        return conv2d_spikes(input, weight, params, geometry, neuron, conv)


def register_pairs() -> None:
    """Register the pairs that are not registered yet. By default run: the baseline, every neuron that is itself run by
    default with ``aten``, and the best pairs."""
    for neuron in registry.implementations("srm_neuron"):
        for conv in registry.implementations("conv_backward"):
            pair = (neuron.name, conv.name)
            default = pair == BASELINE or pair in BEST or (conv.name == USUAL and neuron.default)
            _parts.register("srm_conv2d", Pair, (neuron, conv), baseline=pair == BASELINE, default=default)


registry.derive("srm_conv2d", register_pairs)

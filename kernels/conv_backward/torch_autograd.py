"""The baseline: autograd's own backward of ``conv2d``, one half at a time."""

from __future__ import annotations

import torch
from spikemark.kernels.conv_backward._folded import FoldedConvBackward, widened
from spikemark.kernels.registry import implementation
from spikemark.kernels.types import ConvGeometry
from torch import Tensor
from torch.nn.functional import conv2d


def _forward(input: Tensor, weight: Tensor, geometry: ConvGeometry) -> Tensor:
    return conv2d(input, weight, None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)


@implementation("conv_backward", baseline=True)
class TorchAutograd(FoldedConvBackward):
    """Plain torch: conv2d's graph is built and differentiated, so each half also pays a forward convolution."""

    def fold_input(
        self, grad: Tensor, weight: Tensor, input: Tensor, geometry: ConvGeometry, grad_scale: float
    ) -> Tensor:
        """Differentiate by the input, then multiply by the input and the scale."""
        with torch.enable_grad():
            x = widened(input.detach()).requires_grad_()
            (out,) = torch.autograd.grad(_forward(x, widened(weight.detach()), geometry), x, widened(grad))
        return (out * x.detach() * grad_scale).to(input.dtype).contiguous()

    def fold_weight(self, grad: Tensor, input: Tensor, weight_shape: torch.Size, geometry: ConvGeometry) -> Tensor:
        """Differentiate by a weight whose values do not matter: the convolution is linear in it."""
        with torch.enable_grad():
            x = widened(input.detach())
            weight = torch.zeros(weight_shape, dtype=x.dtype, device=x.device, requires_grad=True)
            (out,) = torch.autograd.grad(_forward(x, weight, geometry), weight, widened(grad))
        return out.to(input.dtype).contiguous()

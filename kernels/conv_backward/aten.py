"""One half of ``aten::convolution_backward``: oneDNN on a CPU, cuDNN on a GPU, and no forward convolution."""

from __future__ import annotations

import torch
from spikemark.kernels.conv_backward._folded import FoldedConvBackward, widened
from spikemark.kernels.registry import implementation
from spikemark.kernels.types import ConvGeometry
from torch import Tensor


def _backward(
    grad: Tensor, input: Tensor, weight: Tensor, geometry: ConvGeometry, mask: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        grad,
        input,
        weight,
        None,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        False,
        (0, 0),
        geometry.groups,
        mask,
    )
    return out


@implementation("conv_backward")
class Aten(FoldedConvBackward):
    """``torch.ops.aten.convolution_backward`` with one half of its mask: oneDNN on a CPU, cuDNN on a GPU."""

    def fold_input(
        self, grad: Tensor, weight: Tensor, input: Tensor, geometry: ConvGeometry, grad_scale: float
    ) -> Tensor:
        """The input's half of the mask, times the input and the scale."""
        x, w = widened(input), widened(weight)
        if x.dtype in (torch.float32, torch.float64):
            # Scaling the small tensor saves a pass over the large one; a narrow weight would lose precision by it.
            out = _backward(widened(grad), x, w * grad_scale, geometry, (True, False, False))[0].mul_(x)
        else:
            out = _backward(grad, x, w, geometry, (True, False, False))[0].mul_(x).mul_(grad_scale)
        return out.to(input.dtype).contiguous()

    def fold_weight(self, grad: Tensor, input: Tensor, weight_shape: torch.Size, geometry: ConvGeometry) -> Tensor:
        """The weight's half of the mask; of the weight only the shape is read."""
        x = widened(input)
        weight = torch.empty(weight_shape, dtype=x.dtype, device=x.device)
        out = _backward(widened(grad), x, weight, geometry, (False, True, False))[1]
        return out.to(input.dtype).contiguous()

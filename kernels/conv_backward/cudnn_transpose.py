"""The published halves by the cuDNN calls that torch still has: a transposed and an exchanged forward convolution.

``aten::cudnn_convolution_backward_input/_weight``, which the original extension binds, are gone since torch 1.11.
"""

from __future__ import annotations

import torch
from spikemark.kernels.conv_backward._folded import FoldedConvBackward
from spikemark.kernels.conv_backward._transpose import exchanged, output_padding, weight_from
from spikemark.kernels.conv_backward.cudnn_aten import cudnn_missing
from spikemark.kernels.cuda import launch
from spikemark.kernels.registry import implementation
from spikemark.kernels.types import ConvGeometry
from torch import Tensor


def transposed_convolution(
    grad: Tensor, weight: Tensor, extra: list[int], g: ConvGeometry, flags: tuple[bool, bool, bool]
) -> Tensor:
    """``aten::cudnn_convolution_transpose``; ``flags`` are benchmark, deterministic and TF32."""
    out: Tensor = torch.ops.aten.cudnn_convolution_transpose(
        grad, weight, g.padding, extra, g.stride, g.dilation, g.groups, *flags
    )
    return out


def exchanged_convolution(image: Tensor, kernel: Tensor, g: ConvGeometry, flags: tuple[bool, bool, bool]) -> Tensor:
    """``aten::cudnn_convolution`` with stride and dilation exchanged."""
    out: Tensor = torch.ops.aten.cudnn_convolution(image, kernel, g.padding, g.dilation, g.stride, g.groups, *flags)
    return out


@implementation("conv_backward", device="cuda")
class CudnnTranspose(FoldedConvBackward):
    """cuDNN by two forward convolutions: transposed for the input half, batch and channels exchanged for the weight."""

    graph_capture = True
    flags = (False, True, False)  # benchmark, deterministic, TF32
    # Where the two library calls are looked up: the tests put torch's CPU convolutions here.
    transposed = staticmethod(transposed_convolution)
    exchanged = staticmethod(exchanged_convolution)

    def unavailable(self) -> str | None:
        """Whether torch has cuDNN."""
        return cudnn_missing()

    def fold_input(
        self, grad: Tensor, weight: Tensor, input: Tensor, geometry: ConvGeometry, grad_scale: float
    ) -> Tensor:
        """A transposed convolution of the gradient, times the input and the scale."""
        launch.check_device(self.name, grad_t=grad, weight=weight, input=input)
        self.ran = "aten.cudnn_convolution_transpose benchmark={} deterministic={} tf32={}".format(*self.flags)
        extra = output_padding(input.shape[2:], grad.shape[2:], weight.shape[2:], geometry)
        out = self.transposed(grad.contiguous(), weight.contiguous(), extra, geometry, self.flags)
        return out.mul_(input).mul_(grad_scale).contiguous()

    def fold_weight(self, grad: Tensor, input: Tensor, weight_shape: torch.Size, geometry: ConvGeometry) -> Tensor:
        """A convolution of the input with the gradient as its kernel."""
        launch.check_device(self.name, grad_w=grad, input=input)
        self.ran = "aten.cudnn_convolution benchmark={} deterministic={} tf32={}".format(*self.flags)
        image, kernel = exchanged(input, grad, geometry.groups)
        out = self.exchanged(image.contiguous(), kernel.contiguous(), geometry, self.flags)
        return weight_from(out, weight_shape).contiguous()

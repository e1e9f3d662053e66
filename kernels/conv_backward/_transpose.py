"""The two halves of a convolution's backward as two forward convolutions: the algebra, free of any library.

Input half: a transposed convolution of the gradient. Weight half: a convolution of the input with the gradient as
its kernel, batch and channels exchanged, where the layer's dilation becomes the stride and its stride the dilation.
"""

from __future__ import annotations

from collections.abc import Sequence

from spikemark.kernels.types import ConvGeometry
from torch import Tensor


def output_padding(
    input_size: Sequence[int], grad_size: Sequence[int], kernel: Sequence[int], g: ConvGeometry
) -> list[int]:
    """Rows and columns at the far edge that the forward's stride skipped, which the transposed one must add back."""
    return [
        input_size[i] - ((grad_size[i] - 1) * g.stride[i] - 2 * g.padding[i] + g.dilation[i] * (kernel[i] - 1) + 1)
        for i in (0, 1)
    ]


def exchanged(input: Tensor, grad: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """``input`` [N, C, H, W] and ``grad`` [N, O, Ho, Wo] as image [C / groups, groups * N, H, W] and kernel
    [O, N, Ho, Wo] of a convolution with the same ``groups``; its output is [C / groups, O, kh', kw']."""
    count, channels, height, width = input.shape
    image = input.reshape(count, groups, channels // groups, height, width).permute(2, 1, 0, 3, 4)
    return image.reshape(channels // groups, groups * count, height, width), grad.transpose(0, 1)


def weight_from(output: Tensor, weight_shape: Sequence[int]) -> Tensor:
    """[C / groups, O, kh', kw'] -> [O, C / groups, kh, kw]: rows and columns that the stride skipped are extra."""
    return output[:, :, : weight_shape[2], : weight_shape[3]].transpose(0, 1)

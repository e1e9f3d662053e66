"""``conv_backward`` in float64: section 2 of operators.md in code, one kernel tap after the other.

conv2d is ``out[n, o, y, x] = sum over c, ky, kx of weight[o, c, ky, kx] * padded[n, c, y*sy + ky*dy, x*sx + kx*dx]``.
Each tap (ky, kx) therefore links the output grid with one strided window of the padded input, and both transposes are
sums over taps on those windows. No backward of torch's is used here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from spikemark.kernels.types import ConvGeometry
from torch import Tensor
from torch.nn.functional import pad


def window(tap: tuple[int, int], out: tuple[int, int], geometry: ConvGeometry) -> tuple[slice, slice]:
    """Rows and columns of the padded input that the output grid of size ``out`` reads through ``tap``."""
    slices = []
    for axis in (0, 1):
        start = tap[axis] * geometry.dilation[axis]
        stop = start + geometry.stride[axis] * (out[axis] - 1) + 1
        slices.append(slice(start, stop, geometry.stride[axis]))
    return slices[0], slices[1]


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """[N, C, H, W] -> float64 [N, groups, C / groups, H, W] on the CPU."""
    return tensor.detach().to("cpu", torch.float64).unflatten(1, (groups, tensor.shape[1] // groups))


def transposed(grad: Tensor, weight: Tensor, size: Sequence[int], geometry: ConvGeometry) -> Tensor:
    """``(d conv2d / d input)^T grad`` for an input of height and width ``size``: [N, Cin, *size], float64."""
    g = _grouped(grad, geometry.groups)
    w = weight.detach().to("cpu", torch.float64).unflatten(0, (geometry.groups, -1))
    pad_y, pad_x = geometry.padding
    out = torch.zeros(*g.shape[:2], w.shape[2], size[0] + 2 * pad_y, size[1] + 2 * pad_x, dtype=torch.float64)
    for ky in range(w.shape[3]):
        for kx in range(w.shape[4]):
            rows, columns = window((ky, kx), (g.shape[3], g.shape[4]), geometry)
            out[..., rows, columns] += torch.einsum("ngoyx,goc->ngcyx", g, w[..., ky, kx])
    return out[..., pad_y : pad_y + size[0], pad_x : pad_x + size[1]].flatten(1, 2)


def input_half(
    grad_t: Tensor, weight: Tensor, input: Tensor, geometry: ConvGeometry, grad_scale: float = 0.85
) -> Tensor:
    """``conv_backward_input`` for folded [N, C, H, W] tensors, in float64."""
    x = input.detach().to("cpu", torch.float64)
    return transposed(grad_t, weight, x.shape[2:], geometry) * x * grad_scale


def weight_half(grad_w: Tensor, input: Tensor, weight_shape: Sequence[int], geometry: ConvGeometry) -> Tensor:
    """``conv_backward_weight`` for folded [N, C, H, W] tensors, in float64."""
    pad_y, pad_x = geometry.padding
    g = _grouped(grad_w, geometry.groups)
    x = pad(_grouped(input, geometry.groups), (pad_x, pad_x, pad_y, pad_y))
    kernel = tuple(weight_shape[2:])
    out = torch.empty(geometry.groups, g.shape[2], x.shape[2], *kernel, dtype=torch.float64)
    for ky in range(kernel[0]):
        for kx in range(kernel[1]):
            rows, columns = window((ky, kx), (g.shape[3], g.shape[4]), geometry)
            out[..., ky, kx] = torch.einsum("ngoyx,ngcyx->goc", g, x[..., rows, columns])
    return out.flatten(0, 1)

"""im2col and matrix products: every window is copied out, which shows what that memory costs."""

from __future__ import annotations

from typing import Any

import torch
from spikemark.kernels.conv_backward._folded import FoldedConvBackward
from spikemark.kernels.definition import state_dtype
from spikemark.kernels.registry import implementation
from spikemark.kernels.types import ConvGeometry
from torch import Tensor
from torch.nn.functional import fold, unfold


def _window(kernel: tuple[int, int], geometry: ConvGeometry) -> dict[str, Any]:
    return {
        "kernel_size": kernel,
        "dilation": geometry.dilation,
        "padding": geometry.padding,
        "stride": geometry.stride,
    }


@implementation("conv_backward")
class TorchUnfold(FoldedConvBackward):
    """im2col and matrix products; narrow dtypes are widened to float32, which folding would sum in their own."""

    def fold_input(
        self, grad: Tensor, weight: Tensor, input: Tensor, geometry: ConvGeometry, grad_scale: float
    ) -> Tensor:
        """``weight^T @ grad`` gives every window's gradient; ``fold`` sums the windows that overlap."""
        wide, groups = state_dtype(input.dtype), geometry.groups
        kernel = (weight.shape[2], weight.shape[3])
        w = weight.to(wide).reshape(groups, weight.shape[0] // groups, -1)
        g = grad.to(wide).reshape(grad.shape[0], groups, weight.shape[0] // groups, -1)
        windows = torch.matmul(w.transpose(1, 2), g).flatten(1, 2)
        out = fold(windows, (input.shape[2], input.shape[3]), **_window(kernel, geometry))
        return out.mul_(input).mul_(grad_scale).to(input.dtype).contiguous()

    def fold_weight(self, grad: Tensor, input: Tensor, weight_shape: torch.Size, geometry: ConvGeometry) -> Tensor:
        """``grad @ windows^T`` with frames and positions as one axis, so that there is one sum, not one a frame."""
        wide, groups = state_dtype(input.dtype), geometry.groups
        windows = unfold(input.to(wide), **_window((weight_shape[2], weight_shape[3]), geometry))
        # [N, C*kh*kw, L] -> [groups, N*L, Cin/groups*kh*kw] and [groups, Cout/groups, N*L].
        columns = windows.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        rows = grad.to(wide).flatten(2).unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(2)
        return torch.bmm(rows, columns).reshape(weight_shape).to(input.dtype)

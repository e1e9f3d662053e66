"""The pool in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from spikemark.kernels.adjusted_avg_pool2d._checks import check_backward, pair, pooled_shape
from spikemark.kernels.definition import check_float, state_dtype
from spikemark.kernels.registry import implementation
from torch import Tensor


@implementation("adjusted_avg_pool2d", name="torch", baseline=True)
class TorchPool:
    """Plain torch: ``avg_pool2d``, and a broadcast copy of the scaled gradient into the windows."""

    def forward(self, x: Tensor, kernel: int | Sequence[int]) -> Tensor:
        """Means [..., H // kh, W // kw] of the windows of ``x`` [..., H, W], contiguous, in x's dtype."""
        check_float("x", x)
        sides = pair(kernel)
        shape = pooled_shape(x.shape, sides)
        x = x.detach()
        if 0 in shape:
            return x.new_empty(shape)
        # One channel a plane, so that no memory format can leak into the result.
        return F.avg_pool2d(x.reshape(-1, 1, *x.shape[-2:]), sides).contiguous().view(shape)

    def backward(self, grad: Tensor, y: Tensor, x_shape: Sequence[int], kernel: int | Sequence[int]) -> Tensor:
        """Gradient of x, [..., H, W], for ``grad`` of the pooled ``y``; windows end where the kernel stops fitting."""
        kh, kw = sides = pair(kernel)
        check_backward(grad, y, x_shape, sides)
        wide = state_dtype(grad.dtype)
        scale = 1.0 / y.detach().to(wide)
        scale = scale.masked_fill_(scale > kh * kw + 1, 0).div_(kh * kw)
        shared = scale.mul_(grad.detach())
        h, w = grad.shape[-2:]
        covered = h * kh == x_shape[-2] and w * kw == x_shape[-1]
        make = torch.empty if covered else torch.zeros
        out = make(tuple(x_shape), dtype=grad.dtype, device=grad.device)
        if out.numel() and h and w:
            windows = out[..., : h * kh, : w * kw].unflatten(-1, (w, kw)).unflatten(-3, (h, kh))
            windows.copy_(shared[..., :, None, :, None].expand(windows.shape))
        return out

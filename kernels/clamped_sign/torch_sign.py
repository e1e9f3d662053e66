"""The sign in plain torch."""

from __future__ import annotations

import torch
from spikemark.kernels.definition import check_float
from spikemark.kernels.registry import implementation
from torch import Tensor


@implementation("clamped_sign", name="torch", baseline=True)
class TorchSign:
    """Plain torch: sign, then NaN put back; clamp."""

    def forward(self, x: Tensor) -> Tensor:
        """``sign(x)``, any shape, new and contiguous."""
        check_float("x", x)
        x = x.detach()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.sign(x, out=out)
        # torch.sign(NaN) is 0.
        return out.masked_fill_(x.isnan(), torch.nan)

    def backward(self, grad: Tensor) -> Tensor:
        """``clamp(grad, -1, 1)``, new and contiguous."""
        check_float("grad", grad)
        out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        return torch.clamp(grad.detach(), -1, 1, out=out)

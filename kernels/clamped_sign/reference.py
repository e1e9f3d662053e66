"""The sign and its clamped straight-through gradient in float64, as the specification writes them."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor) -> Tensor:
    """``sign(x)`` in float64 on the CPU: sign(0) = 0, sign(NaN) = NaN."""
    wide = x.detach().to("cpu", torch.float64)
    sign = (wide > 0).to(torch.float64) - (wide < 0).to(torch.float64)
    return torch.where(wide.isnan(), torch.nan, sign)


def backward(grad: Tensor) -> Tensor:
    """``clamp(grad, -1, 1)`` in float64 on the CPU, a new tensor; NaN stays NaN."""
    return grad.detach().to("cpu", torch.float64).clamp(-1.0, 1.0)

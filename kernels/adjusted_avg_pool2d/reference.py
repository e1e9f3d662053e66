"""The pool and its adjusted gradient in float64, as the specification writes them."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Mean of each window of ``x`` [..., H, W], in float64 on the CPU: [..., H // kh, W // kw]."""
    kh, kw = kernel
    h, w = x.shape[-2] // kh, x.shape[-1] // kw
    wide = x.detach().to("cpu", torch.float64)[..., : h * kh, : w * kw]
    out = torch.zeros((*x.shape[:-2], h, w), dtype=torch.float64)
    for i in range(kh):
        for j in range(kw):
            out += wide[..., i::kh, j::kw]
    return out / (kh * kw)


def scale(out: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Factor of the gradient for each window, from the pooled ``out``: ``(1/out, or 0 above K + 1) / K``."""
    k = kernel[0] * kernel[1]
    raw = 1.0 / out.detach().to("cpu", torch.float64)
    return torch.where(raw > k + 1, 0.0, raw) / k


def backward(grad: Tensor, out: Tensor, x_shape: tuple[int, ...], kernel: tuple[int, int]) -> Tensor:
    """Gradient [..., H, W] of the pool's input: each position of a window gets the window's ``grad * scale``."""
    kh, kw = kernel
    shared = grad.detach().to("cpu", torch.float64) * scale(out, kernel)
    h, w = shared.shape[-2:]
    result = torch.zeros(tuple(x_shape), dtype=torch.float64)
    for i in range(kh):
        for j in range(kw):
            result[..., i : h * kh : kh, j : w * kw : kw] = shared
    return result

"""The neuron in float64, as the specification writes it: the one every implementation is compared with.

Source: Zhu et al., NeurIPS 2022 "Training spiking neural networks with event-driven backpropagation".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from spikemark.kernels.types import SrmParams
from torch import Tensor

CLAMP_W = -4.0
CLAMP_T = -123456789.0


@dataclass(frozen=True)
class ReferenceForward:
    """Float64 forward, [B, T, *S]: outputs, the potential ``u``, and ``peak``, the running maximum of
    ``|c| * (|m| + |s|)`` whose rounding bounds the error of ``u``; ``peak_g`` likewise for ``delta_ut``.

    A maximum runs from the neuron's last spike: the reset leaves exact zeros, so no rounding from before it remains.
    """

    spikes: Tensor
    delta_u: Tensor
    delta_ut: Tensor
    u: Tensor
    peak: Tensor
    peak_g: Tensor


def forward(current: Tensor, params: SrmParams) -> ReferenceForward:
    """Forward of the neuron over ``current`` [B, T, *S], in float64."""
    x = current.detach().to("cpu", torch.float64)
    spikes, delta_u, delta_ut, us, peaks, peaks_g = (torch.zeros_like(x) for _ in range(6))
    m = s = g = u_last = peak = peak_g = torch.zeros_like(x[:, 0]) if x.shape[1] else torch.zeros(0)
    for t in range(x.shape[1]):
        m = (m + x[:, t]) * params.e_m
        s = (s + x[:, t]) * params.e_s
        g = (g + x[:, t]) * params.e_g
        u = params.gain * (m - s)
        fired = u > params.v_th
        peak = torch.maximum(peak, abs(params.gain) * (m.abs() + s.abs()))
        peak_g = torch.maximum(peak_g, g.abs())
        delta_u[:, t] = u - u_last
        delta_ut[:, t] = g
        spikes[:, t] = fired.to(torch.float64)
        us[:, t], peaks[:, t], peaks_g[:, t] = u, peak, peak_g
        zero = torch.zeros_like(u)
        m, s, g, u_last, peak, peak_g = (torch.where(fired, zero, v) for v in (m, s, g, u, peak, peak_g))
    return ReferenceForward(spikes, delta_u, delta_ut, us, peaks, peaks_g)


def backward(
    grad_out: Tensor, spikes: Tensor, delta_u: Tensor, delta_ut: Tensor, params: SrmParams
) -> tuple[Tensor, Tensor]:
    """``(grad_w, grad_t)`` in float64 for saved ``spikes`` and slopes, all [B, T, *S]."""
    grad, fired, du, dut = (v.detach().to("cpu", torch.float64) for v in (grad_out, spikes, delta_u, delta_ut))
    grad_w, grad_t = torch.zeros_like(grad), torch.zeros_like(grad)
    weight_scale = (-1.0 / du).clamp(CLAMP_W, 0.0) * grad
    time_scale = (-1.0 / dut).clamp(CLAMP_T, 0.0) * grad
    # Walk back in time carrying, for every neuron, the scales of its next spike and the steps to it.
    if grad.shape[1] == 0:
        return grad_w, grad_t
    k = torch.zeros_like(grad[:, 0])
    seen = torch.zeros_like(grad[:, 0], dtype=torch.bool)
    scale_w, scale_t = torch.zeros_like(grad[:, 0]), torch.zeros_like(grad[:, 0])
    for t in reversed(range(grad.shape[1])):
        now = fired[:, t] == 1
        k = torch.where(now, 0.0, k + 1)
        scale_w = torch.where(now, weight_scale[:, t], scale_w)
        scale_t = torch.where(now, time_scale[:, t], scale_t)
        seen = seen | now
        eps_w = params.gain * (params.e_m ** (k + 1) - params.e_s ** (k + 1))
        eps_t = -(params.e_g ** (k + 1))
        grad_w[:, t] = torch.where(seen, scale_w * eps_w, 0.0)
        grad_t[:, t] = torch.where(seen, scale_t * eps_t, 0.0)
    return grad_w, grad_t

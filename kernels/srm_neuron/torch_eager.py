"""The baseline: plain torch, a loop over time in both directions, as the published Python back end writes it."""

from __future__ import annotations

import torch
from spikemark.kernels.definition import check_float, state_dtype
from spikemark.kernels.registry import implementation
from spikemark.kernels.srm_neuron.reference import CLAMP_T, CLAMP_W
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import SrmParams
from torch import Tensor


@implementation("srm_neuron", baseline=True)
class TorchEager:
    """Plain torch, a loop over time steps; runs on any device torch has."""

    def forward(self, current: Tensor, params: SrmParams) -> SrmState:
        """Spikes and slopes of ``current`` [B, T, *S]; state in float32, or float64 for float64."""
        check_float("current", current)
        x = current.detach()
        wide = state_dtype(x.dtype)
        spikes, delta_u, delta_ut = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(3))
        m = s = g = u_last = torch.zeros((x.shape[0], *x.shape[2:]), dtype=wide, device=x.device)
        for t in range(x.shape[1]):
            m = (m + x[:, t]) * params.e_m
            s = (s + x[:, t]) * params.e_s
            g = (g + x[:, t]) * params.e_g
            u = params.gain * (m - s)
            delta_u[:, t] = u - u_last
            delta_ut[:, t] = g
            fired = u > params.v_th
            spikes[:, t] = fired
            m, s, g, u_last = (v.masked_fill(fired, 0) for v in (m, s, g, u))
        return SrmState(spikes, delta_u, delta_ut)

    def backward(self, grad_out: Tensor, state: SrmState, params: SrmParams) -> tuple[Tensor, Tensor]:
        """``(grad_w, grad_t)`` [B, T, *S] for the gradient of the spikes."""
        check_float("grad_out", grad_out)
        assert state.delta_u is not None and state.delta_ut is not None
        wide = state_dtype(grad_out.dtype)
        grad_w, grad_t = (torch.empty(grad_out.shape, dtype=grad_out.dtype, device=grad_out.device) for _ in range(2))
        # Scale of the next spike and its response, which decays by one step as we walk back from it.
        zero = torch.zeros((grad_out.shape[0], *grad_out.shape[2:]), dtype=wide, device=grad_out.device)
        scale_w = scale_t = response_m = response_s = response_g = zero
        for t in reversed(range(grad_out.shape[1])):
            fired = state.spikes[:, t] != 0
            grad = grad_out[:, t].to(wide)
            scale_w = torch.where(fired, (-1.0 / state.delta_u[:, t].to(wide)).clamp(CLAMP_W, 0) * grad, scale_w)
            scale_t = torch.where(fired, (-1.0 / state.delta_ut[:, t].to(wide)).clamp(CLAMP_T, 0) * grad, scale_t)
            response_m = torch.where(fired, params.e_m, response_m * params.e_m)
            response_s = torch.where(fired, params.e_s, response_s * params.e_s)
            response_g = torch.where(fired, params.e_g, response_g * params.e_g)
            grad_w[:, t] = scale_w * (params.gain * (response_m - response_s))
            grad_t[:, t] = scale_t * -response_g
        return grad_w, grad_t

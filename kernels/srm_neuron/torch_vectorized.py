"""Plain torch with a backward that has no loop over time: the next spike by a reversed running minimum."""

from __future__ import annotations

import torch
from spikemark.kernels.definition import state_dtype
from spikemark.kernels.registry import implementation
from spikemark.kernels.srm_neuron._arguments import check_current, dense_state, new_like
from spikemark.kernels.srm_neuron.reference import CLAMP_T, CLAMP_W
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import SrmParams
from torch import Tensor


@implementation("srm_neuron")
class TorchVectorized:
    """Plain torch, backward in a few operations over all steps at once; runs on any device torch has."""

    def forward(self, current: Tensor, params: SrmParams) -> SrmState:
        """Spikes and slopes of ``current`` [B, T, *S]; state in float32, or float64 for float64.

        The reset makes each step depend on the one before, so the loop over steps stays. It runs on few
        tensors: the three traces side by side in one, updated in place.
        """
        check_current(current)
        x = current.detach()
        spikes, delta_u, delta_ut = new_like(x, 3)
        wide = state_dtype(x.dtype)
        batch, steps, *features = x.shape
        traces = torch.zeros((3, batch, *features), dtype=wide, device=x.device)
        decays = torch.tensor([params.e_m, params.e_s, params.e_g], dtype=torch.float64).to(x.device, wide)
        decays = decays.reshape(3, *[1] * (traces.ndim - 1))
        u_last = torch.zeros_like(traces[0])
        for t in range(steps):
            traces.add_(x[:, t]).mul_(decays)
            u = torch.sub(traces[0], traces[1]).mul_(params.gain)
            torch.sub(u, u_last, out=u_last)
            delta_u[:, t] = u_last
            delta_ut[:, t] = traces[2]
            fired = u > params.v_th
            spikes[:, t] = fired
            traces.masked_fill_(fired, 0)
            u_last = u.masked_fill_(fired, 0)
        return SrmState(spikes, delta_u, delta_ut)

    def backward(self, grad_out: Tensor, state: SrmState, params: SrmParams) -> tuple[Tensor, Tensor]:
        """``(grad_w, grad_t)`` [B, T, *S] for the gradient of the spikes."""
        spikes, delta_u, delta_ut = dense_state(grad_out, state)
        grad = grad_out.detach()
        steps, wide = grad.shape[1], state_dtype(grad.dtype)
        if not grad.numel():
            return torch.empty_like(grad, memory_format=torch.contiguous_format), torch.empty_like(
                grad, memory_format=torch.contiguous_format
            )
        along_time = [1, steps, *[1] * (grad.ndim - 2)]
        step = torch.arange(steps, device=grad.device, dtype=torch.int32).reshape(along_time)  # cummin: 2.4x of int64
        # The first spike at or after each step; `steps` where there is none.
        following = torch.where(spikes != 0, step, steps).flip(1).cummin(1).values.flip(1).long()
        silent = following == steps
        at = following.clamp_(max=steps - 1)
        lag = at - step  # of silent ones too it is a valid index, and never negative
        lag.masked_fill_(silent, 0)
        k = torch.arange(1, steps + 1, device=grad.device, dtype=torch.float64)
        eps_w = (params.gain * (params.e_m**k - params.e_s**k)).to(wide)
        eps_t = (-(params.e_g**k)).to(wide)
        grad = grad.to(wide)
        results = []
        for slope, bound, eps in ((delta_u, CLAMP_W, eps_w), (delta_ut, CLAMP_T, eps_t)):
            scale = (-1.0 / slope.to(wide)).clamp_(bound, 0).mul_(grad)
            result = scale.gather(1, at).mul_(eps[lag]).masked_fill_(silent, 0)
            results.append(result.to(grad_out.dtype).contiguous())
        return results[0], results[1]

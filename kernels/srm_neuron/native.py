"""The neuron in C++: one pass over memory each way, tiled, vectorised, on all threads (``srm.cpp``)."""

from __future__ import annotations

import numpy as np
import torch
from spikemark.kernels._strided import check_cpu
from spikemark.kernels.definition import DTYPES, check_float
from spikemark.kernels.registry import implementation
from spikemark.kernels.srm_neuron import _native
from spikemark.kernels.srm_neuron._arguments import check_current, check_like, dense_state, new_like
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import Problem, SrmParams
from torch import Tensor


@implementation("srm_neuron", device="cpu")
class Native:
    """C++ on the CPU: tiled, vectorised, all threads, one pass over memory.

    ``saved``: ``bits`` uint8 [B, T, ceil(D/8)], the spikes at one bit each, and the dense ``delta_u`` and ``delta_ut``
    themselves. Backward reads bits instead of spikes: five tensors through memory instead of six.
    """

    def unavailable(self) -> str | None:
        """Why the C++ source cannot be built here, or None (builds it on the first call)."""
        return _native.LIBRARIES["srm"].unavailable()

    def moved_bytes(self, problem: Problem, phase: str, dtype: str, spike_rate: float) -> int:
        """Forward: current in; spikes, slopes and bits out. Backward: gradient, slopes and bits in; two out."""
        dense = _native.dense_bytes(problem, dtype)
        return dense * (4 if phase == "forward" else 5) + dense // DTYPES[dtype].itemsize // 8

    def forward(self, current: Tensor, params: SrmParams) -> SrmState:
        """Spikes and slopes of ``current`` [B, T, *S]; state in float32, or float64 for float64."""
        check_current(current)
        check_cpu("current", current)
        spikes, delta_u, delta_ut = new_like(current, 3)
        bits = torch.empty(_native.bits_shape(current), dtype=torch.uint8)
        if current.numel():
            _native.call("srm_forward", _native.readable(current), params, spikes, delta_u, delta_ut, bits)
        return _with_bits(spikes, delta_u, delta_ut, bits)

    def pack(self, state: SrmState) -> SrmState:
        """A dense state with the bits of its spikes."""
        spikes, delta_u, delta_ut = dense_state(state.spikes, state)
        check_cpu("spikes", spikes)
        fired = (spikes != 0).reshape(*spikes.shape[:2], spikes.shape[2:].numel())
        bits = torch.from_numpy(np.packbits(fired.contiguous().numpy(), axis=2, bitorder="little"))
        return _with_bits(state.spikes, delta_u.contiguous(), delta_ut.contiguous(), bits)

    def backward(self, grad_out: Tensor, state: SrmState, params: SrmParams) -> tuple[Tensor, Tensor]:
        """``(grad_w, grad_t)`` [B, T, *S] for the gradient of the spikes.

        ``state`` is ``forward``'s or ``pack``'s, or any dense one, which is packed first. Raises ``ValueError`` for a
        compact state of another implementation, or one that was made for another shape.
        """
        check_float("grad_out", grad_out)
        check_cpu("grad_out", grad_out)
        if "bits" not in state.saved or "delta_u" not in state.saved:
            state = self.pack(SrmState(*dense_state(grad_out, state)))
        bits, slopes = _native.readable_bits(state.saved["bits"], grad_out), []
        for name in ("delta_u", "delta_ut"):
            check_like(grad_out, name, state.saved[name])
            slopes.append(state.saved[name].detach().to(grad_out.dtype).contiguous())
        grad_w, grad_t = new_like(grad_out, 2)
        if grad_out.numel():
            _native.call("srm_backward", _native.readable(grad_out), params, bits, *slopes, grad_w, grad_t)
        return grad_w, grad_t


def _with_bits(spikes: Tensor, delta_u: Tensor, delta_ut: Tensor, bits: Tensor) -> SrmState:
    return SrmState(spikes, delta_u, delta_ut, {"bits": bits, "delta_u": delta_u, "delta_ut": delta_ut})

"""The neuron in C++: one pass over memory each way, tiled, vectorised, on all threads (``srm.cpp``)."""

from __future__ import annotations

from spikemark.kernels._strided import check_cpu
from spikemark.kernels.registry import implementation
from spikemark.kernels.srm_neuron import _native
from spikemark.kernels.srm_neuron._arguments import check_current, dense_state, new_like
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import Problem, SrmParams
from torch import Tensor


@implementation("srm_neuron", device="cpu")
class Native:
    """C++ on the CPU: tiled, vectorised, all threads, one pass over memory."""

    def unavailable(self) -> str | None:
        """Why the C++ source cannot be built here, or None (builds it on the first call)."""
        return _native.LIBRARIES["srm"].unavailable()

    def moved_bytes(self, problem: Problem, phase: str, dtype: str, spike_rate: float) -> int:
        """Forward reads the current and writes three tensors; backward reads four and writes two."""
        return _native.dense_bytes(problem, dtype) * (4 if phase == "forward" else 6)

    def forward(self, current: Tensor, params: SrmParams) -> SrmState:
        """Spikes and slopes of ``current`` [B, T, *S]; state in float32, or float64 for float64."""
        check_current(current)
        check_cpu("current", current)
        spikes, delta_u, delta_ut = new_like(current, 3)
        if current.numel():
            _native.call("srm_forward", _native.readable(current), params, spikes, delta_u, delta_ut)
        return SrmState(spikes, delta_u, delta_ut)

    def backward(self, grad_out: Tensor, state: SrmState, params: SrmParams) -> tuple[Tensor, Tensor]:
        """``(grad_w, grad_t)`` [B, T, *S] for the gradient of the spikes."""
        saved = [tensor.contiguous() for tensor in dense_state(grad_out, state)]
        check_cpu("grad_out", grad_out)
        grad_w, grad_t = new_like(grad_out, 2)
        if grad_out.numel():
            _native.call("srm_backward", _native.readable(grad_out), params, *saved, grad_w, grad_t)
        return grad_w, grad_t

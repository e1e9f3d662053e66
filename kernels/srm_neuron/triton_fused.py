"""The neuron in Triton: one fused kernel a direction, the same for every number of time steps and neurons."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from typing import Any

import torch
from spikemark.kernels.cuda import launch
from spikemark.kernels.definition import check_float, state_dtype
from spikemark.kernels.registry import implementation
from spikemark.kernels.srm_neuron._arguments import check_current, dense_state
from spikemark.kernels.srm_neuron.cupy_raw import dense_bytes
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import Problem, SrmParams
from torch import Tensor

BLOCK = 512


def interpreted() -> bool:
    """Whether Triton runs in its interpreter on the CPU (``TRITON_INTERPRET=1``), as the tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@implementation("srm_neuron", device="cuda", requires="triton")
class TritonFused:
    """Triton kernels with dense slopes, compiled once a dtype and set of constants, not for every T or D."""

    graph_capture = True
    ran: str = ""

    def unavailable(self) -> str | None:
        """Whether Triton imports, finds the C compiler that it builds its launcher with, and knows the GPU."""
        try:
            importlib.import_module("triton")
        except Exception as error:  # noqa: BLE001 - it loads drivers and compilers: whatever that raises is the reason
            return f"Triton cannot be imported ({launch.last_line(error)}): pip install triton"
        if not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
            return "Triton finds no C compiler, which it needs for every launch: install gcc or clang, or set CC"
        return launch.too_old()

    def forward(self, current: Tensor, params: SrmParams) -> SrmState:
        """Spikes and slopes of ``current`` [B, T, *S]; new contiguous tensors of its dtype."""
        check_current(current)
        self._check(current=current)
        x = current.detach().contiguous()
        spikes, delta_u, delta_ut = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(3))
        if x.numel():
            constants = {"E_M": params.e_m, "E_S": params.e_s, "E_G": params.e_g, "GAIN": params.gain}
            self._launch("forward", [x, spikes, delta_u, delta_ut], constants | {"V_TH": float(params.v_th)})
        return SrmState(spikes, delta_u, delta_ut)

    def backward(self, grad_out: Tensor, state: SrmState, params: SrmParams) -> tuple[Tensor, Tensor]:
        """``(grad_w, grad_t)`` for the gradient of the spikes; reads any layout, writes to neither argument."""
        check_float("grad_out", grad_out)
        self._check(grad_out=grad_out)
        inputs = [t.contiguous() for t in (grad_out.detach(), *dense_state(grad_out, state))]
        grad_w, grad_t = (torch.empty(grad_out.shape, dtype=grad_out.dtype, device=grad_out.device) for _ in range(2))
        if grad_out.numel():
            constants = {"E_M": params.e_m, "E_S": params.e_s, "E_G": params.e_g, "GAIN": params.gain}
            self._launch("backward", [*inputs, grad_w, grad_t], constants)
        return grad_w, grad_t

    def _check(self, **tensors: Tensor) -> None:
        if not interpreted():
            launch.check_device(self.name, **tensors)  # type: ignore[attr-defined]

    def _launch(self, direction: str, tensors: list[Tensor], constants: dict[str, float]) -> None:
        import triton.language as tl
        from spikemark.kernels.srm_neuron import _triton_kernels as kernels

        first = tensors[0]
        neurons = int(first.shape[0] * first.shape[2:].numel())
        kernel: Any = getattr(kernels, direction)
        self.ran = f"triton {direction} {str(first.dtype).removeprefix('torch.')}"
        wide = tl.float64 if state_dtype(first.dtype) == torch.float64 else tl.float32
        sizes = (neurons, first.shape[1], neurons // first.shape[0])
        # Roundings like the other kernels': multiply-adds are not fused (Triton's own default differs by version).
        options = {} if interpreted() else {"enable_fp_fusion": False}
        guard = contextlib.nullcontext() if interpreted() else torch.cuda.device(first.device)
        with guard:
            grid = (launch.blocks_for(neurons, BLOCK),)
            kernel[grid](*tensors, *sizes, **constants, STATE=wide, BLOCK=BLOCK, **options)

    def moved_bytes(self, problem: Problem, phase: str, dtype: str, spike_rate: float) -> int:
        """As ``cupy_raw``: the same tensors, each once."""
        return dense_bytes(problem, phase, dtype)

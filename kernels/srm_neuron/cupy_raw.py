"""The published CUDA design without its faults: one thread a neuron, a loop over time, three dense outputs."""

from __future__ import annotations

import torch
from spikemark.kernels.registry import implementation
from spikemark.kernels.srm_neuron._cupy import DenseCupy, dtype_name
from spikemark.kernels.types import Problem
from torch import Tensor


@implementation("srm_neuron", device="cuda", requires="cupy")
class CupyRaw(DenseCupy):
    """Raw CUDA kernels, one thread a neuron, dense slopes: what the published kernels do, without their faults."""

    def width(self, *tensors: Tensor) -> int:
        """One neuron a thread."""
        return 1

    def kernel(self, width: int, dtype: torch.dtype) -> str:
        """``srm_raw_<dtype>``."""
        return f"srm_raw_{dtype_name(dtype)}"

    def moved_bytes(self, problem: Problem, phase: str, dtype: str, spike_rate: float) -> int:
        """Forward: current in, spikes and two slopes out. Backward: four tensors in, two gradients out."""
        return dense_bytes(problem, phase, dtype)


def dense_bytes(problem: Problem, phase: str, dtype: str) -> int:
    """Bytes a dense forward (4 tensors) or backward (6 tensors) moves."""
    steps = problem.batch * problem.time_steps
    for n in problem.out_shape:
        steps *= n
    return (4 if phase == "forward" else 6) * steps * getattr(torch, dtype).itemsize

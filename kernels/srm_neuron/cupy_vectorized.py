"""Dense CUDA kernels at the memory roofline: 16 bytes of neighbouring neurons a thread, next steps in flight."""

from __future__ import annotations

import torch
from spikemark.kernels.registry import implementation
from spikemark.kernels.srm_neuron._cupy import DenseCupy, dtype_name, vector_width
from spikemark.kernels.srm_neuron.cupy_raw import dense_bytes
from spikemark.kernels.types import Problem
from torch import Tensor


@implementation("srm_neuron", device="cuda", requires="cupy")
class CupyVectorized(DenseCupy):
    """Raw CUDA kernels, 16-byte streaming accesses, loads ahead of use; one neuron a thread on unaligned rows."""

    def width(self, *tensors: Tensor) -> int:
        """Neurons that fill 16 bytes, or 1 where the rows are not aligned."""
        return vector_width(*tensors)

    def kernel(self, width: int, dtype: torch.dtype) -> str:
        """``srm_vector_<dtype>``, or ``srm_scalar_<dtype>`` for one neuron a thread."""
        return f"srm_{'vector' if width > 1 else 'scalar'}_{dtype_name(dtype)}"

    def moved_bytes(self, problem: Problem, phase: str, dtype: str, spike_rate: float) -> int:
        """As ``cupy_raw``: the same tensors, each once."""
        return dense_bytes(problem, phase, dtype)

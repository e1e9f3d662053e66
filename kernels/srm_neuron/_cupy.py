"""What the CuPy implementations of the neuron share: arguments, choice of the kernel, the dense pair of calls."""

from __future__ import annotations

import functools

import numpy as np
import torch
from spikemark.kernels.cuda import launch
from spikemark.kernels.definition import check_float, state_dtype
from spikemark.kernels.srm_neuron._arguments import check_current, dense_state
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import SrmParams
from torch import Tensor

SOURCE = "srm"


def neurons_per_sample(tensor: Tensor) -> int:
    """``D`` of a [B, T, *S] tensor."""
    return int(tensor.shape[2:].numel())


@functools.lru_cache(maxsize=256)  # made anew they would be a quarter of a launch's cost
def constants(dtype: torch.dtype, params: SrmParams) -> tuple[np.generic, ...]:
    """The neuron's constants as scalars of the state's type, in the order the kernels take them."""
    real = np.float64 if state_dtype(dtype) == torch.float64 else np.float32
    return tuple(real(v) for v in (params.e_m, params.e_s, params.e_g, params.gain, params.v_th))


def sizes(packs: int, tensor: Tensor) -> tuple[int, int, int]:
    """``packs, T, D``: Python integers, which are passed as 64 bits."""
    return packs, tensor.shape[1], neurons_per_sample(tensor)


def vector_width(*tensors: Tensor) -> int:
    """Neurons a thread for 16-byte accesses; 1 where rows or a tensor do not start on a multiple of 16 bytes."""
    width = 16 // tensors[0].element_size()
    aligned = neurons_per_sample(tensors[0]) % width == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)
    return width if aligned else 1


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``float32``, as kernel names end."""
    return str(dtype).removeprefix("torch.")


class DenseCupy:
    """Forward and backward by a pair of kernels with dense slopes; subclasses choose the kernel."""

    name: str
    graph_capture = True
    ran: str = ""

    def width(self, *tensors: Tensor) -> int:
        """Neurons a thread."""
        raise NotImplementedError

    def kernel(self, width: int, dtype: torch.dtype) -> str:
        """Name of the kernel pair, without ``_forward`` or ``_backward``."""
        raise NotImplementedError

    def unavailable(self) -> str | None:
        """Whether CuPy matches torch's CUDA."""
        return launch.unavailable()

    def forward(self, current: Tensor, params: SrmParams) -> SrmState:
        """Spikes and slopes of ``current`` [B, T, *S] on a CUDA device; new contiguous tensors of its dtype."""
        check_current(current)
        device = launch.check_device(self.name, current=current)
        x = current.detach().contiguous()
        spikes, delta_u, delta_ut = (torch.empty(x.shape, dtype=x.dtype, device=device) for _ in range(3))
        if x.numel():
            self._run("forward", params, [x, spikes, delta_u, delta_ut])
        return SrmState(spikes, delta_u, delta_ut)

    def backward(self, grad_out: Tensor, state: SrmState, params: SrmParams) -> tuple[Tensor, Tensor]:
        """``(grad_w, grad_t)`` for the gradient of the spikes; reads any layout, writes to neither argument."""
        check_float("grad_out", grad_out)
        device = launch.check_device(self.name, grad_out=grad_out)
        inputs = [t.contiguous() for t in (grad_out.detach(), *dense_state(grad_out, state))]
        grad_w, grad_t = (torch.empty(grad_out.shape, dtype=grad_out.dtype, device=device) for _ in range(2))
        if grad_out.numel():
            self._run("backward", params, [*inputs, grad_w, grad_t])
        return grad_w, grad_t

    def _run(self, direction: str, params: SrmParams, tensors: list[Tensor]) -> None:
        first = tensors[0]
        width = self.width(*tensors)
        packs = first.shape[0] * neurons_per_sample(first) // width
        self.ran = f"{self.kernel(width, first.dtype)}_{direction}"
        arguments: list[launch.Argument] = [*tensors, *sizes(packs, first), *constants(first.dtype, params)]
        launch.launch(SOURCE, self.ran, launch.blocks_for(packs), arguments, first.device)

"""What every implementation of the neuron asks of its arguments."""

from __future__ import annotations

import torch
from spikemark.kernels.definition import check_float
from spikemark.kernels.state import SrmState
from torch import Tensor


def check_current(current: Tensor) -> None:
    """``TypeError`` for a wrong dtype, ``ValueError`` for less than the axes [B, T]; both name ``current``."""
    check_float("current", current)
    if current.ndim < 2:
        raise ValueError(f"current must be [B, T, *S], got shape {list(current.shape)}")


def dense_state(grad_out: Tensor, state: SrmState) -> tuple[Tensor, Tensor, Tensor]:
    """``spikes, delta_u, delta_ut`` of a dense state, in ``grad_out``'s dtype, any layout.

    Raises ``TypeError`` for ``grad_out``'s dtype, ``ValueError`` for a compact state, a shape that is not
    ``grad_out``'s or another device.
    """
    check_float("grad_out", grad_out)
    found = []
    for name in ("spikes", "delta_u", "delta_ut"):
        tensor = getattr(state, name)
        if tensor is None:
            raise ValueError(f"state has no {name}: a compact state goes to the implementation that made it")
        check_like(grad_out, name, tensor)
        found.append(tensor.detach().to(grad_out.dtype))
    return found[0], found[1], found[2]


def check_like(grad_out: Tensor, name: str, tensor: Tensor) -> None:
    """``ValueError`` unless ``tensor`` has ``grad_out``'s shape and device: kernels would read beyond its end."""
    if tensor.shape != grad_out.shape or tensor.device != grad_out.device:
        raise ValueError(
            f"{name} must be like grad_out {list(grad_out.shape)} on {grad_out.device}, "
            f"got {list(tensor.shape)} on {tensor.device}"
        )


def check_state_dtype(grad_out: Tensor, slopes: Tensor) -> None:
    """``TypeError`` unless a compact state's slopes have ``grad_out``'s dtype, on which their order depends."""
    if slopes.dtype != grad_out.dtype:
        raise TypeError(f"state was made for {slopes.dtype}, grad_out is {grad_out.dtype}")


def new_like(tensor: Tensor, count: int) -> list[Tensor]:
    """``count`` new contiguous tensors of ``tensor``'s shape, dtype and device, whatever is in their memory."""
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for _ in range(count)]

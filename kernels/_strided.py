"""What native code is told of a tensor: its pointer, its dtype's number, sizes and strides as five axes."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
AXES = 5
ELEMENTS_A_THREAD = 65536  # some ten microseconds of copying
Axes = ctypes.c_int64 * AXES


def five_axes(tensor: Tensor) -> Tensor:
    """``tensor`` as exactly five axes, the last ones kept: a view where one exists (always up to five axes)."""
    if tensor.ndim > AXES:
        folded = math.prod(tensor.shape[: tensor.ndim - AXES + 1])
        return tensor.reshape(folded, *tensor.shape[tensor.ndim - AXES + 1 :])
    return tensor[(None,) * (AXES - tensor.ndim)]


def described(tensor: Tensor) -> tuple[ctypes.c_void_p, ctypes.Array[ctypes.c_int64], ctypes.Array[ctypes.c_int64]]:
    """Pointer, sizes and strides (in elements) of a tensor of five axes; it must be kept alive during the call."""
    return ctypes.c_void_p(tensor.data_ptr()), Axes(*tensor.shape), Axes(*tensor.stride())


def check_cpu(name: str, tensor: Tensor) -> None:
    """``ValueError`` naming the argument unless it lies in the CPU's memory, which is all a native kernel can read."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}, but native implementations run on the CPU only")


def threads_for(elements: int) -> int:
    """Threads for one pass over ``elements``: at most torch's, and none that would get less than it costs to wake."""
    return min(torch.get_num_threads(), 1 + elements // ELEMENTS_A_THREAD)

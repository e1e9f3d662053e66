"""Which implementations a kernel test runs here: those of the CPU, and the CUDA ones through what stands in for a GPU.

Raw kernels run their own source, compiled for the CPU (``emulator``); ``cudnn_transpose`` runs its algebra on torch's
CPU convolutions, ``cudnn_frontend`` on a recorded ``cudnn`` module; Triton's kernels run in Triton's interpreter, in a
process of their own (``test_triton.py`` sets ``TRITON_INTERPRET`` before anything imports triton). So every test of
every fault covers them too.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import fake_cudnn
import torch
from emulator import Emulator
from spikemark import kernels
from spikemark.kernels.cuda import launch
from torch import Tensor

REAL_CHECK_DEVICE = launch.check_device
REAL_LAUNCH = launch.launch


@functools.cache
def emulator() -> Emulator:
    """The one emulator of this process, put in the place of the launch on a GPU."""
    made = Emulator()
    launch.launch = made.launch
    launch.check_device = _any_device
    return made


def _any_device(implementation: str, **tensors: Tensor) -> torch.device:
    devices = {t.device for t in tensors.values()}
    assert len(devices) == 1, devices
    return devices.pop()


def callable_here(operator: str) -> list[Any]:
    """Implementations of ``operator`` that can be called with CPU tensors in this process."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return [i for i in kernels.implementations(operator) if i.requires == ("triton",)]
    found = [i for i in kernels.implementations(operator, device="cpu") if i.available]
    for one in kernels.implementations(operator):
        if one.requires == ("cupy",):
            emulator()
            found.append(one)
        elif one.name == "cudnn_transpose":
            one.transposed, one.exchanged = _conv_transpose2d, _conv2d
            found.append(one)
        elif one.name == "cudnn_frontend":
            fake_cudnn.install(one)
            found.append(one)
    return found


def _conv_transpose2d(grad: Tensor, weight: Tensor, extra: list[int], g: Any, flags: Any) -> Tensor:
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    args = (None, g.stride, g.padding, extra, g.groups, g.dilation)
    return torch.nn.functional.conv_transpose2d(grad.to(wide), weight.to(wide), *args).to(grad.dtype)


def _conv2d(image: Tensor, kernel: Tensor, g: Any, flags: Any) -> Tensor:
    wide = torch.float64 if image.dtype == torch.float64 else torch.float32
    args = (None, g.dilation, g.padding, g.stride, g.groups)
    return torch.nn.functional.conv2d(image.to(wide), kernel.to(wide), *args).to(image.dtype)

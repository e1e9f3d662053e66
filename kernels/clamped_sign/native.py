"""The sign in C++: one pass over memory, any layout read in place."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from spikemark.kernels._build import NativeLibrary
from spikemark.kernels._strided import DTYPE_CODES, Axes, check_cpu, described, five_axes, threads_for
from spikemark.kernels.definition import check_float
from spikemark.kernels.registry import implementation
from torch import Tensor

LIBRARY = NativeLibrary(Path(__file__).parent, ("sign.cpp",), headers=("../_strided.h",))


@functools.cache
def _function(name: str) -> Callable[..., int]:
    """The library's function; found once, because finding it takes longer than a small tensor."""
    found = getattr(LIBRARY.load(), name)
    found.argtypes = (ctypes.c_int, ctypes.c_void_p, Axes, Axes, ctypes.c_void_p, ctypes.c_int)
    return found


@implementation("clamped_sign", device="cpu")
class Native:
    """C++ on the bits of the numbers: one pass over memory, parallel, any layout."""

    def unavailable(self) -> str | None:
        """Why it cannot be built here, or None."""
        return LIBRARY.unavailable()

    def forward(self, x: Tensor) -> Tensor:
        """``sign(x)``, any shape, new and contiguous."""
        return self._run("spikemark_sign", "x", x)

    def backward(self, grad: Tensor) -> Tensor:
        """``clamp(grad, -1, 1)``, new and contiguous."""
        return self._run("spikemark_clamp", "grad", grad)

    @staticmethod
    def _run(function: str, name: str, tensor: Tensor) -> Tensor:
        check_float(name, tensor)
        check_cpu(name, tensor)
        tensor = tensor.detach()
        out = torch.empty(tensor.shape, dtype=tensor.dtype)
        # What lies densely is one long row; anything else is read row by row where it lies.
        view = five_axes(tensor.view(-1) if tensor.is_contiguous() else tensor)
        call = _function(function)
        code = DTYPE_CODES[tensor.dtype]
        call(code, *described(view), ctypes.c_void_p(out.data_ptr()), threads_for(out.numel()))
        return out

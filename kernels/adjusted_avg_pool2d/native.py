"""The pool in C++: one pass over memory each way, any layout read in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from spikemark.kernels._build import NativeLibrary
from spikemark.kernels._strided import DTYPE_CODES, Axes, check_cpu, described, five_axes, threads_for
from spikemark.kernels.adjusted_avg_pool2d._checks import check_backward, pair, pooled_shape
from spikemark.kernels.definition import check_float
from spikemark.kernels.registry import implementation
from torch import Tensor

LIBRARY = NativeLibrary(Path(__file__).parent, ("pool.cpp",), headers=("../_strided.h",))
INT, LONG, POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p


@implementation("adjusted_avg_pool2d", device="cpu")
class Native:
    """C++: one pass over memory each way, parallel over planes, any layout."""

    def unavailable(self) -> str | None:
        """Why it cannot be built here, or None."""
        return LIBRARY.unavailable()

    def forward(self, x: Tensor, kernel: int | Sequence[int]) -> Tensor:
        """Means [..., H // kh, W // kw] of the windows of ``x`` [..., H, W], contiguous, in x's dtype."""
        check_float("x", x)
        check_cpu("x", x)
        sides = pair(kernel)
        y = torch.empty(pooled_shape(x.shape, sides), dtype=x.dtype)
        view = five_axes(x.detach())
        call = LIBRARY.load().spikemark_pool
        call.argtypes = (INT, POINTER, Axes, Axes, LONG, LONG, POINTER, INT)
        call(DTYPE_CODES[x.dtype], *described(view), *sides, POINTER(y.data_ptr()), threads_for(x.numel()))
        return y

    def backward(self, grad: Tensor, y: Tensor, x_shape: Sequence[int], kernel: int | Sequence[int]) -> Tensor:
        """Gradient of x, [..., H, W], for ``grad`` of the pooled ``y``."""
        sides = pair(kernel)
        check_backward(grad, y, x_shape, sides)
        check_cpu("grad", grad)
        check_cpu("y", y)
        out = torch.empty(tuple(x_shape), dtype=grad.dtype)
        grads, means = five_axes(grad.detach()), five_axes(y.detach())
        call = LIBRARY.load().spikemark_pool_backward
        call.argtypes = (INT, POINTER, Axes, Axes, POINTER, Axes, Axes, LONG, LONG, LONG, LONG, POINTER, INT)
        call(
            DTYPE_CODES[grad.dtype],
            *described(grads),
            *described(means),
            *x_shape[-2:],
            *sides,
            POINTER(out.data_ptr()),
            threads_for(out.numel()),
        )
        return out

"""The pool in C++: one pass over memory each way, any layout read in place."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
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


ARGUMENTS = {
    "spikemark_pool": (INT, POINTER, Axes, Axes, LONG, LONG, POINTER, INT),
    "spikemark_pool_backward": (
        *(INT, POINTER, Axes, Axes, POINTER, Axes, Axes),
        *(LONG, LONG, LONG, LONG, POINTER, INT),
    ),
}


@functools.cache
def _function(name: str) -> Callable[..., int]:
    """The library's function; found once, because finding it takes longer than a small tensor."""
    found = getattr(LIBRARY.load(), name)
    found.argtypes = ARGUMENTS[name]
    return found


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
        _function("spikemark_pool")(
            DTYPE_CODES[x.dtype], *described(view), *sides, POINTER(y.data_ptr()), threads_for(x.numel())
        )
        return y

    def backward(self, grad: Tensor, y: Tensor, x_shape: Sequence[int], kernel: int | Sequence[int]) -> Tensor:
        """Gradient of x, [..., H, W], for ``grad`` of the pooled ``y``."""
        sides = pair(kernel)
        check_backward(grad, y, x_shape, sides)
        check_cpu("grad", grad)
        check_cpu("y", y)
        out = torch.empty(tuple(x_shape), dtype=grad.dtype)
        grads, means = five_axes(grad.detach()), five_axes(y.detach())
        _function("spikemark_pool_backward")(
            DTYPE_CODES[grad.dtype],
            *described(grads),
            *described(means),
            *x_shape[-2:],
            *sides,
            POINTER(out.data_ptr()),
            threads_for(out.numel()),
        )
        return out

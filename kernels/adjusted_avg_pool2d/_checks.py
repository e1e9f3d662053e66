"""Argument checks shared by the pool's implementations; errors name the argument."""

from __future__ import annotations

from collections.abc import Sequence

from spikemark.kernels.definition import check_float
from spikemark.kernels.types import _pair
from torch import Tensor


def pair(kernel: int | Sequence[int]) -> tuple[int, int]:
    """``kernel`` as ``(kh, kw)``; ``ValueError`` unless an int or a pair of ints >= 1."""
    return _pair("adjusted_avg_pool2d", "kernel", kernel, 1)


def pooled_shape(shape: Sequence[int], kernel: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the pooled tensor for an input [..., H, W]: floor mode; a side smaller than the kernel gives 0."""
    if len(shape) < 2:
        raise ValueError(f"x must be [..., H, W], got shape {list(shape)}")
    return (*shape[:-2], shape[-2] // kernel[0], shape[-1] // kernel[1])


def check_backward(grad: Tensor, y: Tensor, x_shape: Sequence[int], kernel: tuple[int, int]) -> None:
    """``TypeError`` for a dtype, ``ValueError`` for shapes that do not belong together."""
    check_float("grad", grad)
    check_float("y", y)
    if grad.dtype != y.dtype:
        raise TypeError(f"grad must have y's dtype {y.dtype}, got {grad.dtype}")
    want = pooled_shape(x_shape, kernel)
    for name, tensor in (("grad", grad), ("y", y)):
        if tuple(tensor.shape) != want:
            raise ValueError(
                f"{name} must have shape {list(want)} for x_shape {list(x_shape)}, got {list(tensor.shape)}"
            )

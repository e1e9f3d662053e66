"""What every implementation of ``conv_backward`` shares: argument checks, folding of batch and time, empty tensors.

An implementation subclasses ``FoldedConvBackward`` and writes ``fold_input`` and ``fold_weight`` for checked,
non-empty [N, C, H, W] tensors (any strides); callers use the public ``input`` and ``weight``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from spikemark.kernels.definition import check_float, state_dtype
from spikemark.kernels.registry import Implementation
from spikemark.kernels.types import ConvGeometry
from torch import Tensor


def fold(name: str, tensor: Tensor) -> Tensor:
    """[B, T, C, H, W] or [N, C, H, W] -> [N, C, H, W], a view where the strides allow one; ``ValueError`` otherwise."""
    if tensor.dim() == 5:
        return tensor.flatten(0, 1)
    if tensor.dim() == 4:
        return tensor
    raise ValueError(f"{name} must be [B, T, C, H, W] or [N, C, H, W], got shape {list(tensor.shape)}")


def expect_shape(name: str, got: Sequence[int], want: Sequence[int], why: str) -> None:
    """Raise ``ValueError`` naming the argument, both shapes and what asks for the wanted one."""
    if list(got) != list(want):
        raise ValueError(f"{name} has shape {list(got)}, expected {list(want)} for {why}")


def check_arguments(
    name: str, grad: Tensor, input: Tensor, weight_shape: Sequence[int], geometry: ConvGeometry
) -> tuple[Tensor, Tensor]:
    """Folded ``(grad, input)`` after every check that the two halves share.

    ``name`` is the gradient's. ``TypeError`` for a dtype that is no supported float or differs between arguments,
    ``ValueError`` for shapes that do not fit together; both name the argument.
    """
    check_float("input", input)
    if grad.dtype != input.dtype:
        raise TypeError(f"{name} is {grad.dtype} but input is {input.dtype}: they must have one dtype")
    if grad.device != input.device:
        raise ValueError(f"{name} is on {grad.device} but input is on {input.device}")
    shape = tuple(int(n) for n in weight_shape)
    if len(shape) != 4 or min(shape[2:]) < 1:
        raise ValueError(f"weight must be [Cout, Cin / groups, kh, kw] with a kernel of 1 or more, got {list(shape)}")
    if shape[0] % geometry.groups:
        raise ValueError(f"weight has {shape[0]} output channels, not divisible by groups={geometry.groups}")
    folded_grad, folded_input = fold(name, grad), fold("input", input)
    count, channels, *size = folded_input.shape
    if channels != shape[1] * geometry.groups:
        raise ValueError(
            f"input has {channels} channels, but weight {list(shape)} with groups={geometry.groups} "
            f"takes {shape[1] * geometry.groups}"
        )
    out = geometry.output_size((size[0], size[1]), (shape[2], shape[3]))
    want = [count, shape[0], max(0, out[0]), max(0, out[1])]
    expect_shape(name, folded_grad.shape, want, f"input {list(folded_input.shape)}, weight {list(shape)}, {geometry}")
    return folded_grad, folded_input


def widened(tensor: Tensor) -> Tensor:
    """``tensor``, in float32 if it is a float16 or bfloat16 one on a CPU.

    torch's CPU convolutions sum the windows and frames of a narrow dtype in that dtype (its own im2col path) or in
    float32 (oneDNN, where the processor has the instructions): only the latter is the operator, so it is asked for.
    """
    return tensor.to(state_dtype(tensor.dtype)) if tensor.device.type == "cpu" else tensor


class FoldedConvBackward(Implementation, ABC):
    """The public calls: check, fold, answer empty problems, hand the rest to ``fold_input`` or ``fold_weight``."""

    def input(
        self, grad_t: Tensor, weight: Tensor, input: Tensor, geometry: ConvGeometry, grad_scale: float = 0.85
    ) -> Tensor:
        """Gradient of the input: ``(d conv2d / d input)^T grad_t * input * grad_scale`` (operators.md, section 2).

        ``grad_t`` [B, T, Cout, Ho, Wo], ``weight`` [Cout, Cin / groups, kh, kw], ``input`` [B, T, Cin, H, W]; B and T
        may be folded into one axis. One dtype, any strides; nothing given is written to. Returns a new contiguous
        tensor of the input's shape, exactly 0 where the input is 0. Raises ``TypeError`` or ``ValueError`` naming the
        argument.
        """
        self._check_dtype("grad_t", grad_t)
        check_float("input", input)
        check_float("weight", weight)
        if weight.dtype != input.dtype:
            raise TypeError(f"weight is {weight.dtype} but input is {input.dtype}: they must have one dtype")
        if weight.device != input.device:
            raise ValueError(f"weight is on {weight.device} but input is on {input.device}")
        grad, folded = check_arguments("grad_t", grad_t, input, weight.shape, geometry)
        if folded.numel() == 0 or grad.numel() == 0:
            return torch.zeros(input.shape, dtype=input.dtype, device=input.device)
        with torch.no_grad():
            return self.fold_input(grad, weight, folded, geometry, float(grad_scale)).view(input.shape)

    def weight(self, grad_w: Tensor, input: Tensor, weight_shape: Sequence[int], geometry: ConvGeometry) -> Tensor:
        """Gradient of the weight: ``(d conv2d / d weight)^T grad_w`` (operators.md, section 2).

        ``grad_w`` [B, T, Cout, Ho, Wo], ``input`` [B, T, Cin, H, W]; B and T may be folded into one axis. One dtype,
        any strides; nothing given is written to. Returns a new contiguous tensor of ``weight_shape``. Raises
        ``TypeError`` or ``ValueError`` naming the argument.
        """
        self._check_dtype("grad_w", grad_w)
        shape = torch.Size(int(n) for n in weight_shape)
        grad, folded = check_arguments("grad_w", grad_w, input, shape, geometry)
        if folded.numel() == 0 or grad.numel() == 0:
            return torch.zeros(shape, dtype=input.dtype, device=input.device)
        with torch.no_grad():
            return self.fold_weight(grad, folded, shape, geometry)

    def _check_dtype(self, name: str, grad: Tensor) -> None:
        check_float(name, grad)
        if str(grad.dtype).removeprefix("torch.") not in self.dtypes:
            raise TypeError(f"{name} is {grad.dtype}, but {self.name} takes {' and '.join(self.dtypes)}")

    @abstractmethod
    def fold_input(
        self, grad: Tensor, weight: Tensor, input: Tensor, geometry: ConvGeometry, grad_scale: float
    ) -> Tensor:
        """``input`` for checked, non-empty, folded tensors; contiguous [N, Cin, H, W]."""

    @abstractmethod
    def fold_weight(self, grad: Tensor, input: Tensor, weight_shape: torch.Size, geometry: ConvGeometry) -> Tensor:
        """``weight`` for checked, non-empty, folded tensors; contiguous ``weight_shape``."""

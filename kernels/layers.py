"""The spiking layers as ordinary ``nn.Module``s; ``neuron`` and ``conv_backward`` choose implementations by name.

Inputs and outputs are [B, T, *S] (operators.md, section 3). What makes these layers differ from a convolution followed
by a neuron is their backward: the weight's gradient comes from ``grad_w``, the input's from ``grad_t``, two different
tensors, so each layer is one autograd node. It saves its input, its weight (only where the input's gradient is wanted)
and the neuron's state, each once; the current between convolution and neuron is not kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from spikemark.kernels.definition import check_float
from spikemark.kernels.functional import (
    adjusted_avg_pool2d,
    full_precision,
    returnable,
    saved_state,
    state_to_save,
    usable,
)
from spikemark.kernels.spans import span
from spikemark.kernels.types import ConvGeometry, SrmParams
from spikemark.kernels.types import _pair as pair
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

ASSUMED_RATE = 0.1  # firing rate of the input for which the initial weights are meant


class _Layer(torch.autograd.Function):
    """What both layers share: the neuron's half of forward and backward."""

    @staticmethod
    def fire(
        ctx: Any, current: Tensor, input: Tensor, weight: Tensor, params: SrmParams, neuron: Any, masked: bool = True
    ) -> Tensor:
        """Spikes of ``current``; saves for backward what the wanted gradients need, and nothing if there is none."""
        with span("neuron forward"):
            state = returnable(neuron.forward(current, params))
        ctx.params, ctx.neuron, ctx.weight_shape = params, neuron, tuple(weight.shape)
        for_input, for_weight = ctx.needs_input_grad[:2]
        if for_input or for_weight:
            ctx.names, tensors = state_to_save(state)
            ctx.compact = bool(state.saved)
            for_product = for_weight or masked
            ctx.save_for_backward(input if for_product else None, weight if for_input else None, *tensors)
        return state.spikes

    @staticmethod
    def gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """``(input, weight, grad_w, grad_t)``."""
        input, weight, *tensors = ctx.saved_tensors
        state = saved_state(ctx.names, tensors, grad_out, ctx.compact)
        with span("neuron backward"):
            grad_w, grad_t = ctx.neuron.backward(grad_out, state, ctx.params)
        return input, weight, grad_w, grad_t


class _SrmConv2d(_Layer):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, params: SrmParams, geometry: ConvGeometry, neuron: Any, conv: Any
    ) -> Tensor:
        ctx.geometry, ctx.conv = geometry, conv
        with full_precision(input), span("srm_conv2d forward"):
            with span("current"):
                current = _convolved(input, weight, geometry)
            return _Layer.fire(ctx, current, input, weight, params, neuron)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        for_input, for_weight = ctx.needs_input_grad[:2]
        if not (for_input or for_weight):
            return (None,) * 6
        with full_precision(grad_out), span("srm_conv2d backward"):
            input, weight, grad_w, grad_t = _Layer.gradients(ctx, grad_out)
            with span("weight gradient"):
                grad_weight = ctx.conv.weight(grad_w, input, ctx.weight_shape, ctx.geometry) if for_weight else None
            del grad_w  # before the other half needs room
            scale = ctx.params.grad_scale
            with span("input gradient"):
                grad_input = ctx.conv.input(grad_t, weight, input, ctx.geometry, scale) if for_input else None
        return grad_input, grad_weight, None, None, None, None


def conv2d_spikes(
    input: Tensor, weight: Tensor, params: SrmParams, geometry: ConvGeometry, neuron: Any, conv: Any
) -> Tensor:
    """Spikes [B, T, Cout, H', W'] of ``input`` [B, T, Cin, H, W], differentiable; ``neuron`` and ``conv`` are
    implementations of ``srm_neuron`` and ``conv_backward``. What ``SrmConv2d`` calls."""
    spikes: Tensor = _SrmConv2d.apply(input, weight, params, geometry, neuron, conv)
    return spikes


def _convolved(input: Tensor, weight: Tensor, geometry: ConvGeometry) -> Tensor:
    """``conv2d`` over batch and time folded into one axis; an empty batch or no time steps give an empty current."""
    batch, steps, _, *size = input.shape
    kernel = (weight.shape[2], weight.shape[3])
    height, width = geometry.output_size((size[0], size[1]), kernel)
    if height < 1 or width < 1:
        raise ValueError(f"a kernel of {list(kernel)} with {geometry} does not fit an input of {size}")
    if batch * steps == 0:
        return input.new_empty((batch, steps, weight.shape[0], height, width))
    folded = input.detach().flatten(0, 1)
    g = geometry
    # On a CPU torch may sum the products of a narrow dtype in that dtype; the operator sums in float32.
    narrow = input.device.type == "cpu" and input.dtype in (torch.float16, torch.bfloat16)
    wide = torch.float32 if narrow else input.dtype
    out = F.conv2d(folded.to(wide), weight.detach().to(wide), None, g.stride, g.padding, g.dilation, g.groups)
    return out.to(input.dtype).unflatten(0, (batch, steps))


class _SrmLinear(_Layer):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, params: SrmParams, neuron: Any, mask_input: bool) -> Tensor:
        ctx.mask_input = mask_input
        with full_precision(input), span("srm_linear forward"):
            with span("current"):
                current = F.linear(input.detach(), weight.detach())
            return _Layer.fire(ctx, current, input, weight, params, neuron, mask_input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        for_input, for_weight = ctx.needs_input_grad[:2]
        if not (for_input or for_weight):
            return (None,) * 5
        with full_precision(grad_out), span("srm_linear backward"):
            input, weight, grad_w, grad_t = _Layer.gradients(ctx, grad_out)
            grad_input = grad_weight = None
            if for_weight:
                with span("weight gradient"):
                    grad_weight = grad_w.flatten(0, -2).T @ input.flatten(0, -2)
            del grad_w
            if for_input:
                assert weight is not None
                with span("input gradient"):
                    grad_input = (grad_t @ weight).mul_(ctx.params.grad_scale)
                    if ctx.mask_input:
                        grad_input.mul_(input)
        return grad_input, grad_weight, None, None, None


def linear_spikes(input: Tensor, weight: Tensor, params: SrmParams, neuron: Any, mask_input: bool = True) -> Tensor:
    """Spikes [B, T, *, N] of ``input`` [B, T, *, M], differentiable. What ``SrmLinear`` calls."""
    spikes: Tensor = _SrmLinear.apply(input, weight, params, neuron, mask_input)
    return spikes


def _cast(input: Tensor, weight: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    """Input and weight in one dtype: autocast's where it is on (the casts are differentiable), else an error."""
    check_float("input", input)
    kind = input.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return input.to(dtype), weight.to(dtype)
    if input.dtype != weight.dtype:
        raise TypeError(
            f"{layer}: input is {input.dtype} but weight is {weight.dtype}: convert one of them by .to(dtype)"
        )
    return input, weight


class _SrmModule(nn.Module):
    """A weight without a bias, the neuron's parameters and the name of its implementation."""

    weight: nn.Parameter

    def __init__(self, weight: Tensor, params: SrmParams, neuron: str) -> None:
        super().__init__()
        if not isinstance(params, SrmParams):
            raise TypeError(f"params must be SrmParams, got {type(params).__name__}")
        usable("srm_neuron", neuron)
        self.params, self.neuron = params, neuron
        self.weight = nn.Parameter(weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights that make about a tenth of the neurons' steps fire if a tenth of the input's do.

        The deviation is ``v_th * tau_s / sqrt(0.1 * fan in)``: that of the current is then ``v_th * tau_s``, which is
        what makes a resting neuron fire in one step.
        """
        fan_in = math.prod(self.weight.shape[1:])
        deviation = self.params.v_th * self.params.tau_s / math.sqrt(max(1.0, ASSUMED_RATE * fan_in))
        with torch.no_grad():
            self.weight.normal_(0.0, deviation)

    def _params_repr(self) -> str:
        p = self.params
        return f"tau_m={p.tau_m:g}, tau_s={p.tau_s:g}, tau_g={p.tau_g:g}, v_th={p.v_th:g}, neuron={self.neuron!r}"


def _positive(**sizes: Any) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an int >= 1, got {value!r}")


class SrmConv2d(_SrmModule):
    """Spiking convolution: [B, T, in_channels, H, W] -> spikes [B, T, out_channels, H', W'] of 0 and 1.

    Geometry as in ``torch.nn.Conv2d``, without bias. ``neuron`` and ``conv_backward`` name implementations
    (``kernels.implementations("srm_neuron")``, ``("conv_backward")``): ``KeyError`` for an unknown name,
    ``RuntimeError`` with the reason for one that cannot run here. The gradient of the input is multiplied by the
    input's values and ``params.grad_scale`` (operators.md, section 3).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        params: SrmParams = SrmParams(),  # noqa: B008 (frozen)
        neuron: str = "torch_eager",
        conv_backward: str = "torch_autograd",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _positive(in_channels=in_channels, out_channels=out_channels)
        geometry = ConvGeometry(stride, padding, dilation, groups)
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if channels % groups:
                raise ValueError(f"{name}={channels} is not divisible by groups={groups}")
        kernel = pair("SrmConv2d", "kernel_size", kernel_size, 1)
        usable("conv_backward", conv_backward)
        shape = (out_channels, in_channels // groups, *kernel)
        super().__init__(torch.empty(shape, device=device, dtype=dtype), params, neuron)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel
        self.geometry, self.conv_backward = geometry, conv_backward

    def forward(self, input: Tensor) -> Tensor:
        """Spikes of one batch. ``TypeError`` for a dtype, ``ValueError`` for a shape that does not fit."""
        x, weight = _cast(input, self.weight, "SrmConv2d")
        if x.ndim != 5 or x.shape[2] != self.in_channels:
            raise ValueError(f"SrmConv2d: input must be [B, T, {self.in_channels}, H, W], got {list(x.shape)}")
        neuron = usable("srm_neuron", self.neuron, x)
        conv = usable("conv_backward", self.conv_backward, x)
        return conv2d_spikes(x, weight, self.params, self.geometry, neuron, conv)

    def extra_repr(self) -> str:
        """Channels, geometry, neuron parameters, implementations."""
        g = self.geometry
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={g.stride}, "
            f"padding={g.padding}, dilation={g.dilation}, groups={g.groups}, {self._params_repr()}, "
            f"conv_backward={self.conv_backward!r}"
        )


class SrmLinear(_SrmModule):
    """Spiking linear layer: [B, T, *, in_features] -> spikes [B, T, *, out_features] of 0 and 1, without bias.

    ``mask_input=False`` leaves out the product of the input's gradient with the input, as the original linear layer
    does (operators.md, section 3). Errors as ``SrmConv2d``'s.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        params: SrmParams = SrmParams(),  # noqa: B008 (frozen)
        neuron: str = "torch_eager",
        mask_input: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _positive(in_features=in_features, out_features=out_features)
        super().__init__(torch.empty((out_features, in_features), device=device, dtype=dtype), params, neuron)
        self.in_features, self.out_features, self.mask_input = in_features, out_features, bool(mask_input)

    def forward(self, input: Tensor) -> Tensor:
        """Spikes of one batch. ``TypeError`` for a dtype, ``ValueError`` for a shape that does not fit."""
        x, weight = _cast(input, self.weight, "SrmLinear")
        if x.ndim < 3 or x.shape[-1] != self.in_features:
            raise ValueError(f"SrmLinear: input must be [B, T, *, {self.in_features}], got {list(x.shape)}")
        neuron = usable("srm_neuron", self.neuron, x)
        return linear_spikes(x, weight, self.params, neuron, self.mask_input)

    def extra_repr(self) -> str:
        """Features, neuron parameters, implementation."""
        masked = "" if self.mask_input else ", mask_input=False"
        return f"{self.in_features}, {self.out_features}, {self._params_repr()}{masked}"


class AdjustedAvgPool2d(nn.Module):
    """Average pool of [B, T, C, H, W] with stride ``kernel``, whose gradient is shared by the spikes of a window."""

    def __init__(self, kernel: int | tuple[int, int], implementation: str = "torch") -> None:
        super().__init__()
        self.kernel = pair("AdjustedAvgPool2d", "kernel", kernel, 1)
        usable("adjusted_avg_pool2d", implementation)
        self.implementation = implementation

    def forward(self, x: Tensor) -> Tensor:
        """Means [..., H // kh, W // kw] of the windows."""
        return adjusted_avg_pool2d(x, self.kernel, self.implementation)

    def extra_repr(self) -> str:
        """Kernel and implementation."""
        return f"{self.kernel}, implementation={self.implementation!r}"

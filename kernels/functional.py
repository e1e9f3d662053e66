"""The operators as differentiable functions, with the implementation chosen by name; usable in training.

Each saves for backward exactly what its backward reads, through autograd's own ``save_for_backward``: an in-place
change of a saved tensor is then an error in backward instead of a wrong gradient, and memory accounting sees it all.
Second derivatives are not defined (``once_differentiable``).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from spikemark.kernels import registry
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import SrmParams
from torch import Tensor
from torch.autograd.function import once_differentiable


def usable(operator: str, name: str, tensor: Tensor | None = None) -> Any:
    """The implementation ``name`` of ``operator``, ready to be called with ``tensor``.

    Raises ``KeyError`` naming the known ones for an unknown name, ``RuntimeError`` with the reason for one that
    cannot run on this machine, ``ValueError`` for one that does not run on the tensor's kind of device and
    ``TypeError`` for one that does not take its dtype.
    """
    found = registry.get(operator, name)
    if not found.available:
        raise RuntimeError(f"{operator} implementation {name!r} is not available: {found.reason}")
    if tensor is not None:
        if not found.runs_on(tensor.device.type):
            raise ValueError(f"{operator} implementation {name!r} runs on {found.device}, not on {tensor.device}")
        if str(tensor.dtype).removeprefix("torch.") not in found.dtypes:
            raise TypeError(f"{operator} implementation {name!r} takes {', '.join(found.dtypes)}, got {tensor.dtype}")
    return found


def full_precision(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast: inside an operator, dtypes are those of its tensors and of nothing else."""
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def unviewed(tensor: Tensor) -> Tensor:
    """``tensor`` as no view of anything: autograd forbids in-place changes of a view that a function returns."""
    return tensor.data if tensor._is_view() else tensor


def returnable(state: SrmState) -> SrmState:
    """``state`` with spikes that a function may return; where they are saved too, it is the returned tensor that is."""
    spikes = unviewed(state.spikes)
    saved = {name: spikes if tensor is state.spikes else tensor for name, tensor in state.saved.items()}
    return dataclasses.replace(state, spikes=spikes, saved=saved)


def state_to_save(state: SrmState) -> tuple[tuple[str, ...], list[Tensor]]:
    """Names and tensors of ``state.for_backward()``, the same tensors, to save and to give to ``saved_state``."""
    tensors = state.for_backward()
    names = tuple(state.saved) or tuple(n for n in ("spikes", "delta_u", "delta_ut") if getattr(state, n) is not None)
    if len(names) != len(tensors):
        raise RuntimeError(f"SrmState.for_backward() gave {len(tensors)} tensors for {names}")
    return names, tensors


def saved_state(names: Sequence[str], tensors: Sequence[Tensor], grad_out: Tensor, compact: bool) -> SrmState:
    """The state that ``state_to_save`` took apart.

    A compact state need not hold the spikes: then they are a tensor of the right shape and dtype without data
    (device ``meta``), so that reading them is an error and keeping them is free.
    """
    held = dict(zip(names, tensors, strict=True))
    if not compact:
        return SrmState(held["spikes"], held.get("delta_u"), held.get("delta_ut"))
    spikes = held.get("spikes")
    if spikes is None:
        spikes = torch.empty(grad_out.shape, dtype=grad_out.dtype, device="meta")
    return SrmState(spikes, saved=held)


class _SrmNeuron(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, current: Tensor, params: SrmParams, implementation: Any) -> Tensor:
        state = returnable(implementation.forward(current, params))
        ctx.params, ctx.implementation = params, implementation
        if ctx.needs_input_grad[0]:
            ctx.names, tensors = state_to_save(state)
            ctx.compact = bool(state.saved)
            ctx.save_for_backward(*tensors)
        return state.spikes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        state = saved_state(ctx.names, ctx.saved_tensors, grad_out, ctx.compact)
        grad_w, _ = ctx.implementation.backward(grad_out, state, ctx.params)
        return grad_w, None, None


def srm_neuron(current: Tensor, params: SrmParams | None = None, implementation: str = "torch_eager") -> Tensor:
    """Spikes [B, T, *S] (0 or 1, in the current's dtype) of ``current`` [B, T, *S]; differentiable.

    The gradient of the current is ``grad_w`` (operators.md, section 1). ``params`` are the defaults if None.
    Errors as ``usable``'s.
    """
    chosen = usable("srm_neuron", implementation, current)
    with full_precision(current):
        return _SrmNeuron.apply(current, SrmParams() if params is None else params, chosen)


class _AdjustedAvgPool2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: tuple[int, int], implementation: Any) -> Tensor:
        y = unviewed(implementation.forward(x, kernel))
        # The size as Python ints: a tensor would have to be read back from the device in every backward.
        ctx.x_shape, ctx.kernel, ctx.implementation = tuple(x.shape), kernel, implementation
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        (y,) = ctx.saved_tensors
        return ctx.implementation.backward(grad, y, ctx.x_shape, ctx.kernel), None, None


def adjusted_avg_pool2d(x: Tensor, kernel: int | Sequence[int], implementation: str = "torch") -> Tensor:
    """Average pool of ``x`` [..., H, W] with stride ``kernel``; a window's gradient is shared by its spikes.

    See operators.md, section 4. ``kernel`` is an int or ``(kh, kw)``. Errors as ``usable``'s.
    """
    from spikemark.kernels.adjusted_avg_pool2d._checks import pair

    return _AdjustedAvgPool2d.apply(x, pair(kernel), usable("adjusted_avg_pool2d", implementation, x))


class _ClampedSign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, implementation: Any) -> Tensor:
        ctx.implementation = implementation
        return unviewed(implementation.forward(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (ctx.implementation.backward(grad) if ctx.needs_input_grad[0] else None), None


def clamped_sign(x: Tensor, implementation: str = "torch") -> Tensor:
    """Sign of ``x`` (any shape), with its gradient clamped to -1..1 (operators.md, section 5); saves nothing."""
    return _ClampedSign.apply(x, usable("clamped_sign", implementation, x))


def spike_count(spikes: Tensor) -> Tensor:
    """Spikes of each output [B, *S] over the time axis of ``spikes`` [B, T, *S], for a loss to be minimised.

    The gradients of these layers are those of spike *times*: a positive one means that later is worse. More spikes is
    the same as earlier ones, so the count hands on its gradient with the sign turned (as the count loss of the NeurIPS
    2022 paper does). With a plain ``sum(1)`` training would climb the loss.
    """
    count = spikes.sum(1)
    return 2 * count.detach() - count

"""Layout and input faults for every operator's tests: the same values in other memory, and what must not be written.

Imported as ``layouts`` (``pythonpath`` in pyproject.toml).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


def same_values(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """``(label, view)``: views equal to ``tensor`` (rank >= 3, any size) that lie differently in memory."""
    rank = tensor.ndim
    yield "contiguous", tensor.contiguous()
    yield "every other element of the last axis", _with_gaps(tensor, rank - 1)
    yield "every other step of time", _with_gaps(tensor, 1)
    yield "every other sample", _with_gaps(tensor, 0)
    yield "all axes reversed in memory", _in_order(tensor, list(reversed(range(rank))))
    yield "time first in memory", _in_order(tensor, [1, 0, *range(2, rank)])
    yield "features first, time last in memory", _in_order(tensor, [0, *range(2, rank), 1])
    if rank >= 4:
        yield "channels last", _in_order(tensor, [*range(rank - 3), rank - 2, rank - 1, rank - 3])
    buffer = torch.full((tensor.numel() + 3,), 7, dtype=tensor.dtype, device=tensor.device)
    odd = buffer[1 : 1 + tensor.numel()].view(tensor.shape)
    odd.copy_(tensor)
    yield "odd storage offset", odd


def expanded(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """``(label, view)``: views of ``tensor``'s shape with stride 0, their values taken from it (no axis may be 0)."""
    for axis in range(tensor.ndim):
        yield f"expanded along axis {axis}", tensor.narrow(axis, 0, 1).clone().expand(tensor.shape)
    yield "expanded along all axes", tensor.flatten()[:1].clone().reshape([1] * tensor.ndim).expand(tensor.shape)


def sum_gradient(tensor: Tensor) -> Tensor:
    """What ``out.sum().backward()`` hands to the backward of ``out``: ones of stride 0."""
    return torch.ones((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


@contextlib.contextmanager
def unchanged(*tensors: Tensor) -> Iterator[None]:
    """Fail if the block writes to any of ``tensors``, even with the value that was there."""
    before = [(t._version, t.detach().clone()) for t in tensors]
    yield
    for tensor, (version, values) in zip(tensors, before, strict=True):
        assert tensor._version == version, "an input was written in place"
        assert same_bits(tensor, values), "an input was changed"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits (NaN equals the same NaN, 0 is not -0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.numel() else True


def is_new_contiguous(out: Tensor, *inputs: Tensor) -> bool:
    """Whether ``out`` is contiguous and shares no memory with any of ``inputs``."""
    owners = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
    return out.is_contiguous() and (out.numel() == 0 or out.untyped_storage().data_ptr() not in owners)


def _with_gaps(tensor: Tensor, axis: int) -> Tensor:
    shape = list(tensor.shape)
    shape[axis] = 2 * shape[axis] + 1
    wide = torch.full(shape, 7, dtype=tensor.dtype, device=tensor.device)
    view = wide.narrow(axis, 1, shape[axis] - 1)[(slice(None),) * axis + (slice(None, None, 2),)]
    view.copy_(tensor)
    return view


def _in_order(tensor: Tensor, order: list[int]) -> Tensor:
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)

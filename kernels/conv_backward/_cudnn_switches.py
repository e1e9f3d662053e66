"""cuDNN's switches for the length of a call, and which library torch chooses for a convolution."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from spikemark.kernels.types import ConvGeometry
from torch import Tensor


@contextlib.contextmanager
def switched(benchmark: bool, deterministic: bool, allow_tf32: bool) -> Iterator[None]:
    """cuDNN on, with these switches; afterwards everything is as it was, also after an error.

    ``torch.backends.cudnn.flags`` does not do: where a session has set ``cudnn.conv.fp32_precision`` (torch >= 2.9) it
    refuses to read the old switch, or puts back another value than it found.
    """
    cudnn = torch.backends.cudnn
    precision = getattr(cudnn, "conv", None)  # torch >= 2.9: a precision an operator
    wanted = {"enabled": True, "benchmark": benchmark, "deterministic": deterministic}
    if precision is None:
        wanted["allow_tf32"] = allow_tf32
    before = {name: getattr(cudnn, name) for name in wanted}
    held = None if precision is None else precision.fp32_precision
    try:
        for name, value in wanted.items():
            setattr(cudnn, name, value)
        if precision is not None:
            precision.fp32_precision = "tf32" if allow_tf32 else "ieee"
        yield
    finally:
        for name, value in before.items():
            setattr(cudnn, name, value)
        if precision is not None:
            precision.fp32_precision = held


_chosen: dict[tuple[object, ...], str] = {}


def chosen_library(input: Tensor, weight_shape: torch.Size, geometry: ConvGeometry) -> str:
    """What torch will call under the present switches: ``Cudnn``, or one of its own kernels (``CudaDepthwise2d``).

    Asked once a problem and layout: it takes as long as a launch, and the calls are timed.
    """
    key = (input.shape, input.stride(), input.dtype, input.device, weight_shape, geometry)
    if key not in _chosen:
        if len(_chosen) >= 512:
            _chosen.clear()
        _chosen[key] = _ask(input, weight_shape, geometry)
    return _chosen[key]


def _ask(input: Tensor, weight_shape: torch.Size, g: ConvGeometry) -> str:
    select = getattr(torch._C, "_select_conv_backend", None)
    if select is None:
        return "unknown"
    weight = torch.empty(weight_shape, dtype=input.dtype, device=input.device)
    kind = select(input, weight, None, g.stride, g.padding, g.dilation, False, (0, 0), g.groups, None)
    return str(kind).rpartition(".")[2]

"""What the two native neurons share: the library, and how tensors are handed to it."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from spikemark.kernels._build import NativeLibrary
from spikemark.kernels._strided import DTYPE_CODES
from spikemark.kernels.definition import DTYPES
from spikemark.kernels.types import Problem, SrmParams
from torch import Tensor

_FOLDER = Path(__file__).resolve().parent
LIBRARIES = {
    "srm": NativeLibrary(_FOLDER, ("srm.cpp",), ("srm.h",)),
    "srm_compact": NativeLibrary(_FOLDER, ("srm_compact.cpp",), ("srm.h",)),
}
MOST_AXES = 16

_Params = ctypes.c_double * 5
_Layout = ctypes.c_int64 * (3 + 2 * MOST_AXES)
_INT, _LONG, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_SIZES = (_LONG, _LONG, _LONG, _INT)
_READS = (_INT, _POINTER, _POINTER, _POINTER, *_SIZES)
# name -> (result, arguments), as in the sources
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "srm_forward": (_INT, (*_READS, *[_POINTER] * 4)),
    "srm_backward": (_INT, (*_READS, *[_POINTER] * 5)),
    "srm_offset": (_LONG, (_POINTER, _LONG, _LONG, _LONG)),
    "srm_compact_scratch": (_LONG, (_INT, _LONG, _INT)),
    "srm_compact_lanes": (_INT, (_INT,)),
    "srm_compact_tiles": (_LONG, (_LONG, _LONG)),
    "srm_compact_count": (_INT, (*_READS, _LONG, _LONG, _POINTER)),
    "srm_compact_forward": (_INT, (*_READS, *[_POINTER] * 4, _LONG, _POINTER, _POINTER, _INT)),
    "srm_compact_pack": (_INT, (_INT, *_SIZES, *[_POINTER] * 6, _LONG, _POINTER)),
    "srm_compact_backward": (_INT, (*_READS, *[_POINTER] * 3, _LONG, *[_POINTER] * 3)),
}


@functools.cache
def function(name: str) -> Any:
    """A function of the libraries, its arguments declared. Raises ``BuildError``."""
    library = LIBRARIES["srm_compact" if name.startswith("srm_compact") else "srm"]
    found = getattr(library.load(), name)
    found.restype, found.argtypes = _SIGNATURES[name]
    return found


def layout(tensor: Tensor) -> ctypes.Array[ctypes.c_int64]:
    """``srm::View``'s layout of a [B, T, *S] tensor: strides of B and T, and the merged axes of *S."""
    sizes, strides = merged_axes(tensor)
    return _Layout(tensor.stride(0), tensor.stride(1), len(sizes), *sizes, *strides)


def merged_axes(tensor: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of the feature axes, each run of axes that one stride covers merged into one."""
    if tensor.is_contiguous():
        return [tensor.shape[2:].numel()], [1]
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(tensor.shape[2:], tensor.stride()[2:], strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    return sizes, strides


def readable(tensor: Tensor) -> Tensor:
    """``tensor`` [B, T, *S] itself where the kernels read it in place well, else a contiguous copy.

    In place: any strides of batch and time, and features whose innermost axis is dense, expanded (stride 0) or skips
    every other element. Elsewhere, channels-last for one, each element of a row would cost a cache line of its own; a
    copy, which torch makes in blocks, is cheaper.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor
    sizes, strides = merged_axes(tensor)
    near = not sizes or (strides[-1] in (0, 1, 2) and sizes[-1] >= 16)
    return tensor if near and len(sizes) <= MOST_AXES else tensor.contiguous()


def sizes(tensor: Tensor) -> tuple[int, int, int, int]:
    """B, T, D and the threads to use, as the kernels take them."""
    shape = tensor.shape
    return shape[0], shape[1], shape[2:].numel(), torch.get_num_threads()


def bits_shape(tensor: Tensor) -> tuple[int, int, int]:
    """Shape of the spikes of ``tensor`` [B, T, *S] as bits: [B, T, ceil(D/8)] bytes."""
    return tensor.shape[0], tensor.shape[1], (tensor.shape[2:].numel() + 7) // 8


def readable_bits(bits: Tensor, grad_out: Tensor) -> Tensor:
    """A state's spikes as bits, contiguous. ``ValueError`` unless they are bytes and for ``grad_out``'s shape (as far
    as bits can tell: of the last byte's neurons none is counted)."""
    if grad_out.ndim < 2 or tuple(bits.shape) != bits_shape(grad_out) or bits.dtype != torch.uint8:
        have = f"{list(bits.shape)}" + ("" if bits.dtype == torch.uint8 else f" and {bits.dtype}")
        raise ValueError(f"state is for bits of shape {have}, grad_out is {list(grad_out.shape)}")
    if bits.device.type != "cpu":
        raise ValueError(f"state is on {bits.device}, not on the CPU")
    return bits.detach().contiguous()


def call(name: str, tensor: Tensor, params: SrmParams, *rest: Any) -> None:
    """Call a kernel that reads ``tensor`` (from ``readable``) in any layout; ``rest`` are its other arguments."""
    p = _Params(params.e_m, params.e_s, params.e_g, params.gain, params.v_th)
    check(name, DTYPE_CODES[tensor.dtype], p, tensor.data_ptr(), layout(tensor), *sizes(tensor), *rest)


def check(name: str, *arguments: Any) -> None:
    """Call a kernel; tensors stand for their data. Raises ``RuntimeError`` if it reports a failure."""
    failed = function(name)(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))
    if failed:
        raise RuntimeError(f"native srm_neuron: {name} returned {failed}")


def dense_bytes(problem: Problem, dtype: str) -> int:
    """Bytes of one [B, T, *S] tensor of ``problem``."""
    steps = problem.batch * problem.time_steps
    for size in problem.out_shape:
        steps *= size
    return steps * DTYPES[dtype].itemsize

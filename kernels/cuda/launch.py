"""Launching raw CUDA kernels through CuPy: the only lines of these kernels that need a GPU.

Pointers and typed scalars are passed as they are: no array is converted, nothing is allocated, nothing waits.
A launch goes to torch's current stream of the tensors' device and leaves the current device as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from spikemark.kernels.cuda import source
from torch import Tensor

THREADS = 128
MAX_BLOCKS = 2**31 - 1


def unavailable() -> str | None:
    """Why CuPy cannot launch here, in one line that names the package to install; None if it can."""
    wanted = (torch.version.cuda or "").split(".")[0]
    package = f"cupy-cuda{wanted}x" if wanted else "the CuPy package of your driver's CUDA version"
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): pip install {package}"
    built_for = str(cupy.cuda.runtime.runtimeGetVersion() // 1000)
    if wanted and built_for != wanted:
        return f"CuPy is built for CUDA {built_for} but torch for CUDA {wanted}: pip install {package}"
    major, minor = torch.cuda.get_device_capability()
    lowest = int(source.ARCHITECTURES[0].removeprefix("sm_"))
    if major * 10 + minor < lowest:
        oldest = source.ARCHITECTURES[0]
        return f"GPU architecture sm_{major}{minor} is older than {oldest}, the oldest these kernels support"
    return None


def check_device(implementation: str, **tensors: Tensor) -> torch.device:
    """The one CUDA device of all ``tensors``; ``ValueError`` names the argument that is elsewhere."""
    device = None
    for name, tensor in tensors.items():
        if tensor.device.type != "cuda":
            raise ValueError(f"{implementation}: {name} is on {tensor.device}; this implementation needs CUDA tensors")
        if device is not None and tensor.device != device:
            raise ValueError(f"{implementation}: {name} is on {tensor.device} but the other arguments on {device}")
        device = tensor.device
    assert device is not None
    return device


def blocks_for(threads: int, per_block: int = THREADS) -> int:
    """Blocks that cover ``threads``, in integers (floating point loses the last block from 2**24 on)."""
    return (threads + per_block - 1) // per_block


def launch(
    name: str, kernel: str, blocks: int, arguments: Sequence[Tensor | np.generic | None], device: torch.device
) -> None:
    """Launch ``kernel`` of the source ``name`` with ``blocks`` blocks of ``THREADS``; no block, no launch.

    ``arguments`` are tensors (passed as pointers), None (a null pointer) and numpy scalars (passed by value,
    in their own type). Raises ``RuntimeError`` that names the kernel and its arguments if CUDA refuses.
    """
    if blocks == 0:
        return
    if blocks > MAX_BLOCKS:
        raise ValueError(f"{kernel}: {blocks} blocks are more than a grid can have ({MAX_BLOCKS})")
    import cupy

    values = tuple(_value(a) for a in arguments)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        try:
            function = _function(name, kernel, torch.cuda.current_device())
            with cupy.cuda.ExternalStream(stream):
                function((blocks,), (THREADS,), values)
        except Exception as error:
            shown = ", ".join(describe(a) for a in arguments)
            raise RuntimeError(f"{kernel}<<<{blocks}, {THREADS}>>>({shown}) failed: {error}") from error


def _value(argument: Tensor | np.generic | None) -> Any:
    if argument is None:
        return np.uint64(0)
    return np.uint64(argument.data_ptr()) if isinstance(argument, Tensor) else argument


def describe(argument: Tensor | np.generic | None) -> str:
    """An argument in an error message: dtype and shape of a tensor, the value of a scalar."""
    if isinstance(argument, Tensor):
        return f"{str(argument.dtype).removeprefix('torch.')}{list(argument.shape)}"
    return "null" if argument is None else f"{argument!r}"


@functools.cache
def _function(name: str, kernel: str, device_index: int) -> Any:
    use_torch_allocator()
    return _module(name).get_function(kernel)


@functools.cache
def _module(name: str) -> Any:
    import cupy

    return cupy.RawModule(code=source.text(name), options=source.OPTIONS, backend="nvrtc")


@functools.cache
def use_torch_allocator() -> None:
    """Make CuPy allocate through torch's caching allocator, so that one ledger sees all memory."""
    import cupy

    def allocate(size: int, device_index: int) -> int:
        stream = torch.cuda.current_stream(device_index)
        return int(torch.cuda.caching_allocator_alloc(size, device_index, stream))

    def free(pointer: int, device_index: int) -> None:
        torch.cuda.caching_allocator_delete(pointer)

    cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(allocate, free).malloc)

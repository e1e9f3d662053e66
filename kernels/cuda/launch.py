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
from spikemark.kernels.cuda import binary, source
from torch import Tensor

THREADS = 128
MAX_BLOCKS = 2**31 - 1

Argument = Tensor | np.generic | int | None


def unavailable() -> str | None:
    """Why CuPy cannot launch on the current device, in one line that says what to install; None if it can."""
    cuda = torch.version.cuda or ""
    wanted = cuda.split(".")[0]
    package = f"cupy-cuda{wanted}x" if wanted else "the CuPy package of your driver's CUDA version"
    try:
        import cupy
    except (ImportError, OSError) as error:
        return f"CuPy cannot be imported ({last_line(error)}): pip install {package}"
    try:
        built_for = str(cupy.cuda.runtime.runtimeGetVersion() // 1000)
    except AttributeError:  # the folder that an uninstalled CuPy left behind imports too
        broken = "the package cupy has no cuda.runtime, it is broken or not CuPy"
        return f"{broken}: pip install --force-reinstall {package}"
    except RuntimeError as error:
        return f"CuPy cannot use CUDA ({last_line(error)}): pip install {package}"
    if wanted and built_for != wanted:
        return f"CuPy is built for CUDA {built_for} but torch for CUDA {cuda}: pip install {package}"
    old = too_old()
    if old:
        return old
    major, minor = torch.cuda.get_device_capability()
    try:
        known = cupy.cuda.nvrtc.getSupportedArchs()
    except RuntimeError as error:
        nvrtc = "nvidia-cuda-nvrtc" + ("-cu12" if built_for == "12" else "")
        return f"CuPy finds no NVRTC ({last_line(error)}): pip install {nvrtc}"
    if major * 10 + minor not in known:
        return f"NVRTC {_nvrtc_version(cupy)} does not know sm_{major}{minor}: install a newer nvidia-cuda-nvrtc"
    return None


def too_old() -> str | None:
    """Why the current device is none that these kernels are compiled and tested for, or None."""
    major, minor = torch.cuda.get_device_capability()
    lowest = int(source.ARCHITECTURES[0].removeprefix("sm_"))
    if major * 10 + minor >= lowest:
        return None
    return f"GPU architecture sm_{major}{minor} is older than sm_{lowest}, the oldest these kernels support"


def last_line(error: BaseException) -> str:
    """The line of a message that says most: CuPy frames its own in banners and puts the cause last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" =\t")]
    return lines[-1] if lines else type(error).__name__


def _nvrtc_version(cupy: Any) -> str:
    return ".".join(str(part) for part in cupy.cuda.nvrtc.getVersion())


def check_device(implementation: str, **tensors: Tensor) -> torch.device:
    """The one CUDA device of all ``tensors``; ``ValueError`` names the argument that is elsewhere."""
    device: torch.device | None = None
    for name, tensor in tensors.items():
        if not tensor.is_cuda:
            raise ValueError(f"{implementation}: {name} is on {tensor.device}; this implementation needs CUDA tensors")
        if device is not None and tensor.device != device:
            raise ValueError(f"{implementation}: {name} is on {tensor.device} but the other arguments on {device}")
        device = tensor.device
    assert device is not None
    return device


def blocks_for(threads: int, per_block: int = THREADS) -> int:
    """Blocks that cover ``threads``, in integers (floating point loses the last block from 2**24 on)."""
    return (threads + per_block - 1) // per_block


def check_grid(kernel: str, blocks: int) -> None:
    """``ValueError`` naming the kernel if a grid cannot have that many blocks."""
    if blocks > MAX_BLOCKS:
        raise ValueError(f"{kernel}: {blocks} blocks are more than a grid can have ({MAX_BLOCKS})")


def launch(name: str, kernel: str, blocks: int, arguments: Sequence[Argument], device: torch.device) -> None:
    """Launch ``kernel`` of the source ``name`` with ``blocks`` blocks of ``THREADS``; no block, no launch.

    ``arguments`` are tensors (passed as pointers), None (a null pointer), Python integers (passed as 64 bits) and
    numpy scalars (passed by value, in their own type). Raises ``RuntimeError`` that names the kernel and its arguments
    if CUDA refuses.
    """
    if blocks == 0:
        return
    check_grid(kernel, blocks)
    # To CuPy a Python integer is 64 bits, as a pointer is. None would be no argument at all to older versions of it.
    values = [a.data_ptr() if isinstance(a, Tensor) else 0 if a is None else a for a in arguments]
    try:
        if torch.cuda.current_device() == device.index:
            _launch_here(name, kernel, blocks, values, device)
        else:
            with torch.cuda.device(device):
                _launch_here(name, kernel, blocks, values, device)
    except Exception as error:
        shown = ", ".join(describe(a) for a in arguments)
        raise RuntimeError(f"{kernel}<<<{blocks}, {THREADS}>>>({shown}) failed: {error}") from error


class _Stream:
    """What CuPy's launch reads of a stream. (Its own ``ExternalStream`` is deprecated, and costs a context.)"""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def _launch_here(name: str, kernel: str, blocks: int, values: list[Any], device: torch.device) -> None:
    function = _function(name, kernel, device.index)
    stream = _Stream(torch.cuda.current_stream(device).cuda_stream)
    function((blocks,), (THREADS,), values, stream=stream)


def describe(argument: Argument) -> str:
    """An argument in an error message: dtype and shape of a tensor, the value of a scalar."""
    if isinstance(argument, Tensor):
        return f"{str(argument.dtype).removeprefix('torch.')}{list(argument.shape)}"
    return "null" if argument is None else f"{argument}"


@functools.cache
def _function(name: str, kernel: str, device_index: int) -> Any:
    return _module(name, device_index).get_function(kernel)


@functools.cache
def _module(name: str, device_index: int) -> Any:
    """The source's machine code loaded on the device, which is the current one."""
    import cupy

    use_torch_allocator()
    major, minor = torch.cuda.get_device_capability(device_index)
    module = cupy.cuda.function.Module()
    module.load(binary.compiled(name, f"sm_{major}{minor}", cupy.cuda.nvrtc))
    return module


@functools.cache
def use_torch_allocator() -> None:
    """Make CuPy allocate through torch's caching allocator, so that one ledger sees all memory."""
    import cupy

    def allocate(size: int, device_index: int) -> int:
        # For CuPy's current stream: it is the one on which CuPy will use the memory.
        stream = cupy.cuda.get_current_stream().ptr
        return int(torch.cuda.caching_allocator_alloc(size, device_index, stream))

    def free(pointer: int, device_index: int) -> None:
        torch.cuda.caching_allocator_delete(pointer)

    cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(allocate, free).malloc)

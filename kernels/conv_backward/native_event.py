"""Event-driven convolution backward in C++: work only where the input is not 0 (event.cpp), on a CPU.

Both halves need the gradient only around input spikes: the input half because its result is multiplied by the input,
the weight half because a product with 0 adds nothing. ``native_event`` always works so; ``native_auto`` counts the
spikes first and leaves inputs above the break-even density to ``aten``.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from spikemark.kernels._build import NativeLibrary
from spikemark.kernels.conv_backward._folded import FoldedConvBackward
from spikemark.kernels.conv_backward.aten import Aten
from spikemark.kernels.conv_backward.definition import weight_shape
from spikemark.kernels.registry import implementation
from spikemark.kernels.types import ConvGeometry, Problem
from torch import Tensor

LIBRARY = NativeLibrary(
    Path(__file__).parent,
    ("event.cpp",),
    ("event_plan.h", "event_kernels.h"),
    # Sums are in a fixed order whatever the compiler fuses, and every sum runs through one and the same loop.
    ("-ffp-contract=fast",),
)
ELEMENTS_PER_THREAD = 1 << 15  # below some tens of microseconds of work, waking a thread costs more than it brings
POINTER = ctypes.c_void_p
SUFFIXES = {torch.float32: "f32", torch.float64: "f64"}


def break_even(phase: str, in_group: int) -> float:
    """Density of the input from which ``aten`` (oneDNN) is the faster, measured on an AVX2 machine.

    On the convolutions of cifar10-vgg from 64 channels on the times meet at 0.5 (input half) and between 0.6 and 0.7
    (weight half); with 15 or fewer input channels a group the weight half already meets it at 0.35.
    """
    if phase == "input":
        return 0.48
    return 0.62 if in_group >= 64 else 0.35


@functools.cache
def _function(name: str, pointers: str) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    """An exported function; one letter an argument: p pointer, l int64, d double, i int."""
    kinds: dict[str, Any] = {"p": POINTER, "l": ctypes.c_int64, "d": ctypes.c_double, "i": ctypes.c_int}
    function = LIBRARY.load()[f"spikemark_event_{name}"]
    function.argtypes = [kinds[letter] for letter in pointers]
    function.restype = ctypes.c_int64 if name in ("workspace", "offset") else None
    return function


def _longs(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _threads(grad: Tensor, input: Tensor) -> int:
    """Threads that are worth waking for a problem of this size; results do not depend on their number."""
    return max(1, min(torch.get_num_threads(), (grad.numel() + input.numel()) // ELEMENTS_PER_THREAD))


@dataclass(frozen=True)
class Spikes:
    """The input's spikes: one bit an element, a count a plane, whether a plane holds only 0 and 1."""

    problem: ctypes.Array[ctypes.c_int64]
    threads: int
    bits: Tensor
    counts: Tensor
    binary: Tensor

    @property
    def pointers(self) -> tuple[int, int, int]:
        """Addresses in the order in which the library takes them."""
        return (self.bits.data_ptr(), self.counts.data_ptr(), self.binary.data_ptr())


def scan(grad: Tensor, input: Tensor, kernel_shape: torch.Size, geometry: ConvGeometry) -> Spikes:
    """Read ``input`` [N, C, H, W] once and mark where it is not 0."""
    n, c, h, w = input.shape
    shape = (n, c, h, w, *grad.shape[1:], *kernel_shape[2:])
    fields = (*shape, *geometry.stride, *geometry.padding, *geometry.dilation, geometry.groups)
    bits = torch.empty(n * c * ((h * w + 63) // 64), dtype=torch.int64)
    counts, binary = torch.empty(n * c, dtype=torch.int32), torch.empty(n * c, dtype=torch.uint8)
    spikes = Spikes(_longs(fields), _threads(grad, input), bits, counts, binary)
    strides = _longs(input.stride())
    call = _function(f"scan_{SUFFIXES[input.dtype]}", "ppppppi")
    call(spikes.problem, input.data_ptr(), strides, *spikes.pointers, spikes.threads)
    return spikes


def _workspace(spikes: Spikes, dtype: torch.dtype, half: str) -> Tensor:
    """Memory from torch's allocator, so that the ledger sees it."""
    needed = _function("workspace", "ppiii")(
        spikes.problem, spikes.counts.data_ptr(), dtype.itemsize, half == "input", spikes.threads
    )
    if needed < 0:
        raise ValueError("a single frame has more than 2**31 positions")
    return torch.empty(needed, dtype=torch.uint8)


def input_half(spikes: Spikes, grad: Tensor, weight: Tensor, input: Tensor, grad_scale: float) -> Tensor:
    """Gradient of the input from its scanned spikes; see ``FoldedConvBackward.input``."""
    out = torch.empty(input.shape, dtype=input.dtype)
    w, memory = weight.contiguous(), _workspace(spikes, input.dtype, "input")
    tensors = (grad.data_ptr(), _longs(grad.stride()), input.data_ptr(), _longs(input.stride()), *spikes.pointers)
    call = _function(f"input_{SUFFIXES[input.dtype]}", "pppppppp" + "pdppi")
    call(spikes.problem, *tensors, w.data_ptr(), grad_scale, out.data_ptr(), memory.data_ptr(), spikes.threads)
    return out


def weight_half(spikes: Spikes, grad: Tensor, input: Tensor, kernel_shape: torch.Size) -> Tensor:
    """Gradient of the weight from the scanned spikes; see ``FoldedConvBackward.weight``."""
    out = torch.empty(kernel_shape, dtype=input.dtype)
    memory = _workspace(spikes, input.dtype, "weight")
    tensors = (grad.data_ptr(), _longs(grad.stride()), input.data_ptr(), _longs(input.stride()), *spikes.pointers)
    call = _function(f"weight_{SUFFIXES[input.dtype]}", "pppppppp" + "ppi")
    call(spikes.problem, *tensors, out.data_ptr(), memory.data_ptr(), spikes.threads)
    return out


def event_bytes(problem: Problem, phase: str, dtype: str) -> int:
    """Bytes the event-driven design moves through main memory.

    Gradient and input are read once, the result is written once, one bit an element is written and read back. The laid
    out stage of gradients and the lists are reused while they are in the cache. The packed weight goes through memory
    twice more, as it may exceed the cache.
    """
    size = 8 if dtype == "float64" else 4
    frames = problem.batch * problem.time_steps
    inputs, outputs = frames * math.prod(problem.in_shape), frames * math.prod(problem.out_shape)
    results = inputs if phase == "input" else 0
    return (inputs + results + outputs + 3 * math.prod(weight_shape(problem))) * size + 2 * (inputs // 8)


@implementation("conv_backward", device="cpu", dtypes=("float32", "float64"))
class NativeEvent(FoldedConvBackward):
    """Event-driven C++: dot products and sums only where the input is not 0, blocked over output channels.

    Results are the same bit for bit on any number of threads. Values must be finite: an infinite weight or input
    next to the border meets the margin's zeros and gives NaN.
    """

    def unavailable(self) -> str | None:
        """Why the library cannot be built here."""
        return LIBRARY.unavailable()

    def fold_input(
        self, grad: Tensor, weight: Tensor, input: Tensor, geometry: ConvGeometry, grad_scale: float
    ) -> Tensor:
        """Dot products of weights and gradients at every spike."""
        return input_half(scan(grad, input, weight.shape, geometry), grad, weight, input, grad_scale)

    def fold_weight(self, grad: Tensor, input: Tensor, weight_shape: torch.Size, geometry: ConvGeometry) -> Tensor:
        """Sums of gradients around every spike."""
        return weight_half(scan(grad, input, weight_shape, geometry), grad, input, weight_shape)

    def moved_bytes(self, problem: Problem, phase: str, dtype: str, spike_rate: float) -> int | None:
        """Least traffic, one bit an element and the packed weight; see ``event_bytes``."""
        return event_bytes(problem, phase, dtype)


@implementation("conv_backward", device="cpu", dtypes=("float32", "float64"))
class NativeAuto(FoldedConvBackward):
    """``native_event`` below the break-even density of the input, ``aten`` above; ``last_path`` says which ran."""

    last_path: str = ""
    """``native_event`` or ``aten``: what the latest call ran."""
    density: float = 0.0
    """Fraction of the latest input that was not 0."""

    def unavailable(self) -> str | None:
        """Why the library cannot be built here."""
        return LIBRARY.unavailable()

    def _scan(
        self, phase: str, grad: Tensor, input: Tensor, shape: torch.Size, geometry: ConvGeometry
    ) -> Spikes | None:
        spikes = scan(grad, input, shape, geometry)
        self.density = int(spikes.counts.sum()) / input.numel()
        self.last_path = "native_event" if self.density < break_even(phase, shape[1]) else "aten"
        return spikes if self.last_path == "native_event" else None

    def fold_input(
        self, grad: Tensor, weight: Tensor, input: Tensor, geometry: ConvGeometry, grad_scale: float
    ) -> Tensor:
        """Whichever path is the faster at this density."""
        spikes = self._scan("input", grad, input, weight.shape, geometry)
        if spikes is not None:
            return input_half(spikes, grad, weight, input, grad_scale)
        return Aten().fold_input(grad, weight, input, geometry, grad_scale)

    def fold_weight(self, grad: Tensor, input: Tensor, weight_shape: torch.Size, geometry: ConvGeometry) -> Tensor:
        """Whichever path is the faster at this density."""
        spikes = self._scan("weight", grad, input, weight_shape, geometry)
        if spikes is not None:
            return weight_half(spikes, grad, input, weight_shape)
        return Aten().fold_weight(grad, input, weight_shape, geometry)

    def moved_bytes(self, problem: Problem, phase: str, dtype: str, spike_rate: float) -> int | None:
        """The event-driven path's below the break-even density; the dense path's is not modelled."""
        if spike_rate < break_even(phase, weight_shape(problem)[1]):
            return event_bytes(problem, phase, dtype)
        return None

"""Builds CUDA kernel source for the CPU (g++ and ``emulation.h``) and launches it: the tests' stand-in for CuPy.

``Emulator.launch`` has the signature of ``spikemark.kernels.cuda.launch.launch``, so whole implementations run
through it on CPU tensors, strides, empty tensors and all.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from spikemark.kernels.cuda import launch, source
from torch import Tensor

HEADER = Path(__file__).with_name("emulation.h")
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-w"]
# A misaligned 16-byte access, an overflowing index or a bad shift is a fault on a GPU: here it traps.
CHECKS = ["-fsanitize=alignment,signed-integer-overflow,shift,bounds", "-fsanitize-undefined-trap-on-error"]

Argument = Tensor | np.generic | None


def kernel_names(name: str) -> list[str]:
    """The ``extern "C"`` kernels of the source ``name``, after macro expansion."""
    code = f'#include "{HEADER}"\n{source.text(name)}'
    out = subprocess.run(
        ["g++", *FLAGS[:1], "-E", "-P", "-x", "c++", "-"], input=code, capture_output=True, text=True, check=True
    )
    return re.findall(r'extern "C"\s+void\s+(\w+)\s*\(', out.stdout)


class Emulator:
    """CUDA kernels on the CPU. ``order`` is the order in which a block's threads run (0, 1, 2)."""

    def __init__(self) -> None:
        self.order = 0
        self.launched: list[str] = []
        self._libraries: dict[str, ctypes.CDLL] = {}

    def library(self, name: str) -> ctypes.CDLL:
        """The source ``name`` compiled for the CPU, once a content."""
        if name not in self._libraries:
            wrappers = "".join(
                f'extern "C" void emulate_{k}(void** a, const int64_t* sizes, int64_t count, '
                f"int64_t from, int64_t blocks, unsigned threads, int order) "
                f"{{ emulation::check_arguments({k}, sizes, count); "
                f"emulation::run({k}, a, from, blocks, threads, order); }}\n"
                for k in kernel_names(name)
            )
            code = f'#include "{HEADER}"\n{source.text(name)}\n{wrappers}'
            content = hashlib.sha256((code + HEADER.read_text() + " ".join(FLAGS + CHECKS)).encode()).hexdigest()[:20]
            built = Path(tempfile.gettempdir()) / f"spikemark-emulation-{content}.so"
            if not built.exists():
                with tempfile.TemporaryDirectory() as folder:
                    made = Path(folder) / "kernel.so"
                    command = ["g++", *FLAGS, *CHECKS, "-x", "c++", "-", "-o", str(made)]
                    subprocess.run(command, input=code, text=True, check=True, capture_output=True)
                    built.with_suffix(f".{hash(folder)}").write_bytes(made.read_bytes())
                    built.with_suffix(f".{hash(folder)}").rename(built)
            self._libraries[name] = ctypes.CDLL(str(built))
        return self._libraries[name]

    def launch(
        self, name: str, kernel: str, blocks: int, arguments: Sequence[Argument], device: torch.device, first: int = 0
    ) -> None:
        """Run ``kernel`` on the CPU; ``first`` starts the grid at that block (for tests of large offsets)."""
        if blocks == 0:
            return
        self.launched.append(kernel)
        slots = [np.array([_pointer(a)] if a is None or isinstance(a, (Tensor, int)) else [a]) for a in arguments]
        pointers = (ctypes.c_void_p * len(slots))(*(s.ctypes.data for s in slots))
        sizes = (ctypes.c_int64 * len(slots))(*(s.itemsize for s in slots))
        function = getattr(self.library(name), f"emulate_{kernel}")
        wide = ctypes.c_int64
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, wide, wide, wide, ctypes.c_uint, ctypes.c_int]
        function.restype = None
        function(pointers, sizes, len(slots), first, blocks, launch.THREADS, self.order)


def _pointer(argument: Tensor | int | None) -> np.uint64:
    if isinstance(argument, Tensor):
        return np.uint64(argument.data_ptr())
    return np.uint64(argument or 0)

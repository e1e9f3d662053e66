"""CUDA sources as text, with their includes put in place, and how they are compiled.

Used by the launch, by ``spikemark inspect`` and by the tests, so all three compile the very same text. Torch-free.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).resolve().parent.parent
SOURCES = {
    "srm": KERNELS / "srm_neuron" / "srm.cu",
    "event": KERNELS / "conv_backward" / "event.cu",
}
INCLUDE_FOLDERS = (KERNELS / "cuda",)

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

# No contraction into fused multiply-adds: two kernels that share a formula must round alike (compact against
# dense gradients, bit for bit), and none of these kernels is bound by arithmetic.
OPTIONS = ("--std=c++17", "--fmad=false")


@functools.cache
def text(name: str) -> str:
    """The source ``name`` (a key of ``SOURCES``) with every ``#include "..."`` replaced by that file, once."""
    return _expand(SOURCES[name], set())


def _expand(path: Path, seen: set[Path]) -> str:
    lines = []
    for line in path.read_text().splitlines():
        match = re.fullmatch(r'\s*#include "([^"]+)"\s*', line)
        if match is None:
            lines.append("" if line.strip() == "#pragma once" else line)
            continue
        found = next((f / match[1] for f in (path.parent, *INCLUDE_FOLDERS) if (f / match[1]).is_file()), None)
        if found is None:
            raise FileNotFoundError(f"{path.name} includes {match[1]}, which is not among the kernel sources")
        if found not in seen:
            seen.add(found)
            lines.append(_expand(found, seen))
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Compiled:
    """Result of ``compile_ptx``: PTX text and the compiler's log (empty if it had nothing to say)."""

    ptx: str
    log: str


def compile_ptx(name: str, architecture: str, warnings_as_errors: bool = True) -> Compiled:
    """Compile the source ``name`` to PTX for ``architecture`` (``sm_90``) by NVRTC; needs no GPU and no driver.

    Needs the packages ``cuda-bindings`` and ``nvidia-cuda-nvrtc``. Raises ``RuntimeError`` with the compiler's
    log if it fails.
    """
    from cuda.bindings import nvrtc

    options = [f"--gpu-architecture={architecture.replace('sm_', 'compute_')}", *OPTIONS]
    error, program = nvrtc.nvrtcCreateProgram(text(name).encode(), f"{name}.cu".encode(), 0, [], [])
    _check(nvrtc, error, "nvrtcCreateProgram")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = _read(nvrtc, program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        # NVRTC has no option that makes every warning an error; its log is empty exactly when it found none.
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS or (warnings_as_errors and log.strip()):
            raise RuntimeError(f"NVRTC could not compile {name}.cu for {architecture}:\n{log}")
        return Compiled(_read(nvrtc, program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _check(nvrtc: object, error: object, call: str) -> None:
    if int(error) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"{call} failed: {error}")


def _read(nvrtc: object, program: object, size_of: object, get: object) -> str:
    error, size = size_of(program)  # type: ignore[operator]
    _check(nvrtc, error, "NVRTC size query")
    buffer = b" " * size
    (error,) = get(program, buffer)  # type: ignore[operator]
    _check(nvrtc, error, "NVRTC read")
    return buffer.rstrip(b"\x00 ").decode(errors="replace")

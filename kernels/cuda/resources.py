"""What each CUDA kernel needs on each architecture: registers, spills, shared memory, occupancy, bytes moved.

Compiles by NVRTC (Triton's kernels by Triton) and asks ptxas; needs no GPU and no driver, only the packages
``cuda-bindings``, ``nvidia-cuda-nvrtc`` and ``nvidia-cuda-nvcc`` (which holds ptxas). Torch-free.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from spikemark.kernels.cuda import source

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
THREADS = 128
SPIKE_RATE = 0.10  # of the bytes shown for kernels whose traffic depends on it


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""

    warps: int
    blocks: int
    shared_bytes: int
    registers: int = 65536


MULTIPROCESSORS = {
    "sm_75": Multiprocessor(32, 16, 65536),
    "sm_80": Multiprocessor(64, 32, 167936),
    "sm_86": Multiprocessor(48, 16, 102400),
    "sm_89": Multiprocessor(48, 24, 102400),
    "sm_90": Multiprocessor(64, 32, 233472),
    "sm_100": Multiprocessor(64, 32, 233472),
    "sm_120": Multiprocessor(48, 24, 102400),
}


@dataclass(frozen=True)
class Resources:
    """One kernel on one architecture. ``spill_bytes`` adds spill stores and loads; ``occupancy`` is 0..1;
    ``bytes_per_step`` is the modelled traffic a neuron-step (an input element, for convolutions), at 10 % firing."""

    kernel: str
    dtype: str
    architecture: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    occupancy: float
    bytes_per_step: float


def missing() -> str | None:
    """Which package is not installed, in one line that says what to do; None if everything is there."""
    needed = {"cuda.bindings": "cuda-bindings", "nvidia": "nvidia-cuda-nvrtc nvidia-cuda-nvcc"}
    for module, package in needed.items():
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            return f"inspect needs NVIDIA's compilers, no GPU: pip install {package}"
    if find_ptxas() is None:
        return "ptxas was not found: pip install nvidia-cuda-nvcc"
    return None


def find_ptxas() -> str | None:
    """Path of ptxas: NVIDIA's PyPI package, a CUDA toolkit, or PATH."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return shutil.which("ptxas")
    return find_nvidia_binary_utility("ptxas") or shutil.which("ptxas")


def occupancy(registers: int, shared_bytes: int, architecture: str, threads: int = THREADS) -> float:
    """Resident warps over the most a multiprocessor can hold, as the registers, shared memory and limits allow.

    Registers are given out to warps in units of 256, four schedulers each having a quarter of the file.
    """
    limit = MULTIPROCESSORS[architecture]
    warps_per_block = (threads + 31) // 32
    per_warp = (registers * 32 + 255) // 256 * 256
    by_registers = limit.blocks
    if per_warp:
        by_registers = limit.registers // 4 // per_warp * 4 // warps_per_block
    by_shared = limit.shared_bytes // (shared_bytes + 1024) if shared_bytes else limit.blocks
    blocks = min(limit.blocks, limit.warps // warps_per_block, by_registers, by_shared)
    return blocks * warps_per_block / limit.warps


def bytes_per_step(kernel: str, dtype: str, rate: float = SPIKE_RATE) -> float:
    """Modelled traffic in bytes a neuron-step; for convolution kernels a frame's input element, counting the
    channels-last gradient once (as many output as input channels, stride 1)."""
    size = SIZES[dtype]
    pairs = 2 * rate * size
    if kernel.startswith("event_"):
        return (3 if "input" in kernel else 2) * size
    if kernel.startswith("srm_gather"):
        return 2 * pairs
    if kernel.startswith("srm_compact"):
        by_kind = {"forward": 2 * size + 1 / 8 + pairs, "pack": 3 * size + 1 / 8 + pairs}
        return by_kind.get(kernel.rpartition("_")[2], 3 * size + 1 / 8 + pairs)
    return (6 if kernel.endswith("backward") else 4) * size


_USAGE = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def parse_ptxas(log: str) -> dict[str, dict[str, int]]:
    """``ptxas --verbose``'s output as numbers a kernel: registers, stack, spill (stores and loads), shared."""
    found = {}
    for match in _USAGE.finditer(log):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        found[match["kernel"]] = {
            "registers": int(match["registers"]),
            "stack": int(match["stack"]),
            "spill": int(match["stores"]) + int(match["loads"]),
            "shared": int(shared[1]) if shared else 0,
        }
    return found


def assemble(ptx: str, architecture: str) -> dict[str, dict[str, int]]:
    """Assemble PTX by ptxas and read what it says; ``RuntimeError`` with ptxas's words if it fails."""
    ptxas = find_ptxas()
    if ptxas is None:
        raise RuntimeError("ptxas was not found: pip install nvidia-cuda-nvcc")
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "kernel.ptx"
        code.write_text(ptx)
        command = [ptxas, "--verbose", f"--gpu-name={architecture}", "--warning-as-error", str(code)]
        done = subprocess.run(
            [*command, "-o", str(code.with_suffix(".cubin"))], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"ptxas failed for {architecture}: {done.stderr.strip()}")
    return parse_ptxas(done.stderr)


def inspect(architecture: str) -> list[Resources]:
    """Every raw kernel and dtype on ``architecture``; ``RuntimeError`` if one does not compile without a warning."""
    rows = []
    for name in source.SOURCES:
        for kernel, used in assemble(source.compile_ptx(name, architecture).ptx, architecture).items():
            rows.append(_row(kernel, _dtype_of(kernel), architecture, used, THREADS))
    return sorted(rows, key=lambda r: (r.kernel, r.dtype))


def _row(kernel: str, dtype: str, architecture: str, used: dict[str, int], threads: int) -> Resources:
    resident = occupancy(used["registers"], used["shared"], architecture, threads)
    return Resources(
        kernel,
        dtype,
        architecture,
        used["registers"],
        used["spill"],
        used["stack"],
        used["shared"],
        resident,
        bytes_per_step(kernel, dtype),
    )


def _dtype_of(kernel: str) -> str:
    return next(dtype for dtype in ("bfloat16", "float16", "float32", "float64") if f"_{dtype}" in kernel)


def inspect_triton(architecture: str) -> list[Resources]:
    """Triton's kernels on ``architecture``, float32; an empty list where triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return []
    import triton
    from spikemark.kernels.srm_neuron import _triton_kernels as kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"E_M": 0.8, "E_S": 0.7, "E_G": 0.6, "GAIN": 2.5, "V_TH": 1.0, "BLOCK": 512}
    rows = []
    for kernel in ("forward", "backward"):
        function = getattr(kernels, kernel)
        values = {
            n: constants.get(n, triton.language.float32) for n in function.arg_names if n.isupper() and len(n) > 1
        }
        signature = {
            n: "constexpr" if n in values else ("i64" if n in ("total", "T", "D") else "*fp32")
            for n in function.arg_names
        }
        made = triton.compile(
            ASTSource(fn=function, signature=signature, constexprs=values),
            target=GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32),
            options={"enable_fp_fusion": False},
        )
        target = re.search(r"\.target (\w+)", made.asm["ptx"])  # Triton compiles for sm_90a, not sm_90
        assert target is not None
        used = next(iter(assemble(made.asm["ptx"], target[1]).values()))
        rows.append(_row(f"triton_{kernel}", "float32", architecture, used, 32 * made.metadata.num_warps))
    return rows

"""What matters for a number and nothing personal: the environment of a device, and how two of them differ.

Torch-free at import; ``collect`` runs in the measuring process and asks torch. No host name, user name or path is ever
recorded. ``differences`` names the fields that must match before two results may be compared.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from spikemark.harness import allocator
from spikemark.harness.devices import cuda_index
from spikemark.harness.gpu import Gpu

PACKAGE = Path(__file__).resolve().parent.parent
MUST_MATCH = (
    "kind device_name threads cpu.model cpu.architecture cpu.cores cpu.available cpu.capability cpu.governor cpu.boost "
    "gpu.name gpu.driver gpu.power_limit_w gpu.application_sm_clock_mhz gpu.ecc versions.python_minor versions.torch "
    "versions.cuda versions.cudnn versions.cupy versions.triton versions.cudnn_frontend versions.compiler "
    "versions.compiler_flags versions.system switches.tf32 switches.matmul_precision switches.deterministic "
    "switches.cudnn_benchmark switches.malloc switches.variables"
).split()
"""Fields that must be equal for two results to be compared. Load, temperature, commit and the like may differ."""
MUST_MATCH_IN_ONE_RUN = (
    *MUST_MATCH,
    "gpu.uuid_hash",
    "node.id",
    "cpu.caches",
    "versions.spikemark",
    "versions.numpy",
    "project.commit",
    "project.source",
    "project.plugins",
)
"""What must be equal as well before rows are added to a run that exists: the same device and the same code."""
_DISTRIBUTIONS = {
    "numpy": ("numpy",),
    "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy"),
    "triton": ("triton",),
    "cudnn_frontend": ("nvidia-cudnn-frontend",),
    "pytest_benchmark": ("pytest-benchmark",),
}
_VARIABLES = (
    "OMP_NUM_THREADS MKL_NUM_THREADS OMP_PROC_BIND OMP_WAIT_POLICY OMP_SCHEDULE KMP_AFFINITY KMP_BLOCKTIME "
    "GOMP_SPINCOUNT MKL_ENABLE_INSTRUCTIONS ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA MALLOC_ARENA_MAX "
    "MALLOC_TRIM_THRESHOLD_ MALLOC_MMAP_MAX_ MALLOC_MMAP_THRESHOLD_ MALLOC_TOP_PAD_ "
    "CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS CUDA_MODULE_LOADING CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE "
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE PYTORCH_CUDA_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING TORCHINDUCTOR_MAX_AUTOTUNE"
).split()


def collect(device: str) -> dict[str, Any]:
    """The environment of ``device`` (``cpu``, ``cpu:N``, ``cuda:I``) as this process has it; imports torch.

    Call it after the number of threads and torch's switches are set. Fields: see ``MUST_MATCH`` and the design.
    """
    kind = "cuda" if device.startswith("cuda") else "cpu"
    machine, gpu = cpu(), None
    import torch

    machine["capability"] = torch.backends.cpu.get_cpu_capability()
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(cuda_index(device))
        gpu = Gpu(str(properties.uuid)).describe()
        gpu |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
        }
    return {
        "device": device,
        "device_name": gpu["name"] if gpu else machine["model"],
        "kind": kind,
        "threads": torch.get_num_threads(),
        "cpu": machine,
        "gpu": gpu,
        "versions": versions() | torch_versions(),
        "switches": switches(),
        "project": project(),
    }


def cpu() -> dict[str, Any]:
    """The processor, torch-free: model, cores, CPUs this process may use, caches (bytes), governor, memory, load."""
    return {
        "model": _cpu_model(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(logical=True),
        "available": available_cpus(),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "boost": _read("/sys/devices/system/cpu/cpufreq/boost"),
        "caches": _caches(),
        "memory_bytes": psutil.virtual_memory().total,
        "load": round(os.getloadavg()[0], 2),
    }


def available_cpus() -> int:
    """CPUs this process may be scheduled on (affinity), which a container or a batch system may have narrowed."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


@functools.cache
def _cpu_model() -> str:
    """The processor's marketing name; on ARM, which has none in /proc/cpuinfo, implementer and part number."""
    text = _read("/proc/cpuinfo") or ""
    found = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    if found:
        return found.group(1).strip()
    arm = [re.search(rf"^CPU {part}\s*:\s*(\S+)", text, re.MULTILINE) for part in ("implementer", "part")]
    if all(arm):
        return "ARM implementer {} part {}".format(*(m.group(1) for m in arm if m))
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return platform.processor() or "unknown"


def _caches() -> dict[str, int]:
    """Data and unified caches of one core, ``{"L1d": bytes, ...}``; empty where the system does not tell."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    out: dict[str, int] = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(str(folder / name)) for name in ("level", "type", "size"))
        found = re.fullmatch(r"(\d+)([KMG]?)", size or "")
        if found and kind in ("Data", "Unified"):
            name = f"L{level}" + ("d" if kind == "Data" else "")
            out[name] = int(found.group(1)) * units.get(found.group(2), 1)
    return out


def versions() -> dict[str, Any]:
    """Versions that are known without importing anything heavy."""
    from spikemark import __version__

    out: dict[str, Any] = {
        "spikemark": __version__,
        "python": platform.python_version(),
        "python_minor": ".".join(platform.python_version_tuple()[:2]),
        "python_implementation": platform.python_implementation(),
        "python_compiler": platform.python_compiler(),
        "system": platform.system(),
        "kernel": platform.release(),
        "torch": _version("torch"),
    }
    for name, distributions in _DISTRIBUTIONS.items():
        out[name] = next((v for v in map(_version, distributions) if v), None)
    return out | _compiler()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compiler() -> dict[str, Any]:
    """The compiler of native kernels and its flags; both None where there is none."""
    from spikemark.kernels import _build

    try:
        version = _build.compiler().version
    except _build.BuildError:
        return {"compiler": None, "compiler_flags": None}
    return {"compiler": version, "compiler_flags": " ".join((*_build.BASE_FLAGS, *_build.TUNING_FLAGS))}


def torch_versions() -> dict[str, Any]:
    """What torch was built with and loads: torch, CUDA, cuDNN, and the libraries behind CPU products."""
    import torch

    return {
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "blas": "mkl" if torch.backends.mkl.is_available() else "other",
        "onednn": torch.backends.mkldnn.is_available(),
    }


def switches() -> dict[str, Any]:
    """Global switches that change times or results: TF32, determinism, cuDNN's search, malloc, variables."""
    import torch

    return {
        "tf32": {"matmul": _tf32(torch.backends.cuda.matmul), "cudnn": _tf32(torch.backends.cudnn)},
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "malloc": allocator.state(),
        "variables": variables(),
    }


def _tf32(backend: Any) -> Any:
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:  # torch >= 2.9 refuses the old switch once the new one was used
        return str(backend.fp32_precision)


def variables() -> dict[str, str]:
    """Environment variables that change times and are set; of preloaded libraries the names, not the folders."""
    out = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    preload = re.split(r"[:\s]+", os.environ.get("LD_PRELOAD", "").strip())
    names = [Path(p).name for p in preload if p]
    return out | ({"LD_PRELOAD": " ".join(names)} if names else {})


def project(root: Path = PACKAGE, plugins: Sequence[str | Path] = ()) -> dict[str, Any]:
    """The code under test: git commit and dirty flag of the repository that holds ``root``, and hashes of its sources.

    ``source`` covers the kernels and the harness, so that an edit without a commit is seen; ``plugins`` maps the name
    of each plug-in file to its hash. ``commit`` and ``dirty`` are None outside a repository.
    """
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "commit": commit,
        "dirty": None if status is None else bool(status),
        "source": _source_hash(root),
        "plugins": {Path(p).name: file_hash(Path(p)) for p in plugins},
    }


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command on the repository that holds ``root``; None without git or a repository."""
    command = ["git", "-C", str(root), "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _source_hash(root: Path) -> str:
    digest = hashlib.sha256()
    for folder in ("kernels", "harness"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h", ".cu", ".cuh"):
                digest.update(f"{file.relative_to(root).as_posix()}\0{file_hash(file)}\n".encode())
    return digest.hexdigest()[:16]


def file_hash(path: Path) -> str:
    """The first 16 hex digits of the SHA-256 of a file's content; ``missing`` if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return "missing"


def _field(environment: dict[str, Any], name: str) -> Any:
    value: Any = environment
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def differences(a: dict[str, Any], b: dict[str, Any], fields: Sequence[str] = MUST_MATCH) -> list[tuple[str, Any, Any]]:
    """Fields that must match and do not: ``(name, value in a, value in b)``, in the order of ``fields``.

    A field that either side did not record cannot be said to differ and is passed over: one machine tells its governor,
    another does not, and a package that only one side has can only have made rows that the other lacks.
    """
    pairs = ((name, _field(a, name), _field(b, name)) for name in fields)
    return [(n, left, right) for n, left, right in pairs if left != right and left is not None and right is not None]


def describe_differences(found: Sequence[tuple[str, Any, Any]]) -> str:
    """One line for people: ``versions.torch (2.6.0 and 2.7.1), threads (2 and 1)``."""
    return ", ".join(f"{name} ({left} and {right})" for name, left, right in found)

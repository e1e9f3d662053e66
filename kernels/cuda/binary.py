"""Machine code of the CUDA sources for one architecture: compiled by the NVRTC that CuPy loads, cached on disk.

CuPy's own ``RawModule`` appends ``-ftz=true`` to any options: it would flush denormals to zero, so its kernels would
differ from those that the tests compile and run. So only CuPy's NVRTC binding is used, with exactly
``source.OPTIONS``. The cache lies beside the native libraries (``_build.cache_folder``). Torch-free.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from spikemark.kernels._build import cache_folder
from spikemark.kernels.cuda import source


def compiled(name: str, architecture: str, nvrtc: Any) -> bytes:
    """The source ``name`` as a cubin for ``architecture`` (``sm_90``), from the cache if it was made before.

    ``nvrtc`` is ``cupy.cuda.nvrtc``. Raises ``RuntimeError`` with NVRTC's words if it cannot compile it.
    """
    version = ".".join(str(part) for part in nvrtc.getVersion())
    key = "\0".join((source.text(name), *source.OPTIONS, architecture, version))
    path = cache_folder() / f"{name}-{architecture}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    if path.is_file():
        return path.read_bytes()
    code = _compile(name, architecture, version, nvrtc)
    _store(path, code)
    return code


def _compile(name: str, architecture: str, version: str, nvrtc: Any) -> bytes:
    program = nvrtc.createProgram(source.text(name), f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={architecture}", *source.OPTIONS))
        code: bytes = nvrtc.getCUBIN(program)
        return code
    except nvrtc.NVRTCError as error:
        said = nvrtc.getProgramLog(program).strip().replace("\n", "; ")
        raise RuntimeError(f"NVRTC {version} cannot compile {name}.cu for {architecture}: {error}: {said}") from error
    finally:
        nvrtc.destroyProgram(program)


def _store(path: Path, code: bytes) -> None:
    """Appears whole or not at all: processes that compile at the same time do not disturb each other."""
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix="building-", suffix=".cubin")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        Path(unfinished).replace(path)
    finally:
        Path(unfinished).unlink(missing_ok=True)

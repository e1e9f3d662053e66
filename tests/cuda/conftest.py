"""Every CUDA kernel compiled once a session for every architecture, and two recorded devices to launch on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_gpu import Gpu
from spikemark.kernels.cuda import launch, resources, source


@pytest.fixture(scope="session")
def inspected() -> dict[str, list[resources.Resources]]:
    """Rows of ``inspect`` for every architecture, raw kernels and Triton's. Raises if one compiles with a warning."""
    missing = resources.missing()
    if missing:
        pytest.skip(missing)

    def rows(architecture: str) -> list[resources.Resources]:
        return resources.inspect(architecture)

    # NVRTC and ptxas run outside Python's lock. Triton's compiler does not like threads.
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(source.ARCHITECTURES, pool.map(rows, source.ARCHITECTURES), strict=True))
    return {name: raw + resources.inspect_triton(name) for name, raw in found.items()}


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Recorded devices; what the launch remembers of others is forgotten, before and after."""
    caches = (launch._function, launch._module, launch.use_torch_allocator)
    for cache in caches:
        cache.cache_clear()
    yield Gpu(monkeypatch, tmp_path)
    for cache in caches:
        cache.cache_clear()

"""Every CUDA kernel compiled once a session for every architecture; the tests of this folder look at the result."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from spikemark.kernels.cuda import resources, source


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

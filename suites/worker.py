"""The measuring process: an ordinary pytest session over ``suites/`` with a plan file and an event channel.

Torch-free to import: the supervisor only asks for the command.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SUITES = Path(__file__).resolve().parent


def worker_command(plan_path: str | os.PathLike[str], events_fd: int) -> list[str]:
    """Command list of a worker that measures the plan's cases and writes events to the inherited descriptor."""
    return [sys.executable, "-m", "spikemark.suites.worker", os.fspath(plan_path), str(events_fd)]


def pytest_arguments(plan_path: str, events_fd: str, *more: str) -> list[str]:
    """Arguments of the session. Nothing of the project under test may interfere: no cache, no other ini file.

    ``-s``: pytest's capture would lose what a dying kernel printed; the supervisor keeps all output in its log.
    """
    return [
        str(SUITES),
        f"--rootdir={SUITES}",
        f"--config-file={os.devnull}",
        "--import-mode=importlib",
        *("-o", "python_files=bench_*.py"),
        *("-p", "no:cacheprovider"),
        *("-p", "pytest_benchmark.plugin"),
        *("-q", "-s", "--tb=no", "--no-header", "--benchmark-quiet"),
        f"--benchmark-storage=file://{Path(plan_path).resolve().parent / 'benchmarks'}",  # not in the person's folder
        f"--spikemark-plan={plan_path}",
        f"--spikemark-events={events_fd}",
        *more,
    ]


def main(arguments: list[str]) -> int:
    """Run the session; its exit code says little (a refused case fails its test), the events say all."""
    # Only what is named is loaded: other plug-ins of the person's environment cost time and may reorder items.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ.pop("PYTEST_PLUGINS", None)
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    import pytest

    return int(pytest.main(pytest_arguments(*arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Makes the folder a pytest-benchmark suite; everything is in ``spikemark.suites.plugin``."""

from spikemark.suites.plugin import *  # noqa: F403 - pytest finds hooks and fixtures by name

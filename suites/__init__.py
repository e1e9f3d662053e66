"""Which cases are run: the workloads of published networks, selections and presets, pytest-benchmark files."""

"""The layers: forward, backward and a whole step."""

from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from spikemark.harness.records import Case, Record


@pytest.mark.operators("srm_conv2d", "srm_linear")
def test_layers(case: Case, benchmark: BenchmarkFixture, measure: Callable[[Case, BenchmarkFixture], Record]) -> None:
    """Verify and time one case."""
    measure(case, benchmark)

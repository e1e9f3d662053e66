"""The layers: forward, backward and a whole step."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from spikemark.harness.records import Case
from spikemark.suites.plugin import Measure


@pytest.mark.operators("srm_conv2d", "srm_linear")
def test_layers(case: Case, benchmark: BenchmarkFixture, measure: Measure) -> None:
    """Verify and time one case."""
    measure(case, benchmark)

"""The two halves of the convolution's backward."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from spikemark.harness.records import Case
from spikemark.suites.plugin import Measure


@pytest.mark.operators("conv_backward")
def test_conv_backward(case: Case, benchmark: BenchmarkFixture, measure: Measure) -> None:
    """Verify and time one case."""
    measure(case, benchmark)

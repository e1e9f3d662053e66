"""The two halves of the convolution's backward."""

from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from spikemark.harness.records import Case, Record


@pytest.mark.operators("conv_backward")
def test_conv_backward(
    case: Case, benchmark: BenchmarkFixture, measure: Callable[[Case, BenchmarkFixture], Record]
) -> None:
    """Verify and time one case."""
    measure(case, benchmark)

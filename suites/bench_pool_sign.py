"""Pooling and sign, forward and backward."""

from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from spikemark.harness.records import Case, Record


@pytest.mark.operators("adjusted_avg_pool2d", "clamped_sign")
def test_pool_sign(
    case: Case, benchmark: BenchmarkFixture, measure: Callable[[Case, BenchmarkFixture], Record]
) -> None:
    """Verify and time one case."""
    measure(case, benchmark)

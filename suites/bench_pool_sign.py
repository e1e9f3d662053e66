"""Pooling and sign, forward and backward."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from spikemark.harness.records import Case
from spikemark.suites.plugin import Measure


@pytest.mark.operators("adjusted_avg_pool2d", "clamped_sign")
def test_pool_sign(case: Case, benchmark: BenchmarkFixture, measure: Measure) -> None:
    """Verify and time one case."""
    measure(case, benchmark)

"""The SRM neuron, forward and backward."""

from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from spikemark.harness.records import Case, Record


@pytest.mark.operators("srm_neuron")
def test_srm_neuron(
    case: Case, benchmark: BenchmarkFixture, measure: Callable[[Case, BenchmarkFixture], Record]
) -> None:
    """Verify and time one case."""
    measure(case, benchmark)

"""The SRM neuron, forward and backward."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from spikemark.harness.records import Case
from spikemark.suites.plugin import Measure


@pytest.mark.operators("srm_neuron")
def test_srm_neuron(case: Case, benchmark: BenchmarkFixture, measure: Measure) -> None:
    """Verify and time one case."""
    measure(case, benchmark)

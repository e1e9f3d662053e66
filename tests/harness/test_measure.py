"""One case becomes one record: what is in it, when sampling stops, and that it says so truthfully."""

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from spikemark.harness import clock as clock_module
from spikemark.harness import sampling, verify
from spikemark.harness.calibration import _COPYING, calibrate, streaming_copy
from spikemark.harness.clock import DeviceClock, cache_bytes
from spikemark.harness.measure import describe, measure_case, one_line
from spikemark.harness.records import Case, Record
from spikemark.harness.sampling import Options, Sampler, half_width
from spikemark.kernels import Problem, SrmParams
from spikemark.kernels._build import BuildError, NativeLibrary
from spikemark.kernels.definition import BoundCall

PROBLEM = Problem("tiny", "neuron", 2, 5, (60,), (60,), params=SrmParams(7, 4, 3.5), spike_rate=0.15)
CASE = Case("srm_neuron", "forward", "torch_eager", "cpu", "float32", PROBLEM)
BUILDS = _COPYING.unavailable()
QUICK = Options(budget_s=0.004, min_samples=8, max_samples=8)


def test_a_record_has_everything_and_survives_json() -> None:
    stages: list[str] = []
    record = measure_case(CASE, QUICK, pass_index=3, environment="cpu [new]", emit=stages.append)
    assert (record.status, record.reason, record.pass_index, record.environment) == ("ok", "", 3, "cpu [new]")
    assert stages == ["inputs", "first-call", "verify", "warm-up", "measure", "recheck", "ledger"]
    assert len(record.samples) == 8
    assert all(0 < s < 10 for s in [*record.samples, *record.warm_samples, record.first_call_s or -1])
    assert record.call_samples == [], "on a CPU call time is device time"
    assert record.spike_rate is not None and 0.05 < record.spike_rate < 0.3
    assert record.memory["output_bytes"] == record.memory["saved_bytes"] == 3 * 2 * 5 * 60 * 4
    assert record.cost.keys() >= {"bytes", "operations"}
    assert record.verification["checked"] == record.verification["total"] == 600
    assert record.details["baseline"] is True
    assert 0 <= record.details["harness_s"] < record.elapsed_s
    assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_ledger_and_first_call_can_be_left_to_another_pass() -> None:
    record = measure_case(CASE, dataclasses.replace(QUICK, ledger=False, first=False))
    assert (record.status, record.memory, record.first_call_s) == ("ok", {}, None)
    assert record.verification["second_input"] is False
    assert measure_case(CASE, QUICK).verification["second_input"] is True


def test_options_come_from_a_plan_that_may_know_more() -> None:
    options = Options.from_json({"precision": 0.5, "gate_limit": None, "something": "new"})
    assert (options.precision, options.gate_limit, options.min_samples) == (0.5, None, 10)


def test_threads_of_the_device_hold_for_the_case_only() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    case = dataclasses.replace(CASE, device="cpu:1")
    assert measure_case(case, QUICK, emit=lambda stage: seen.append(torch.get_num_threads())).status == "ok"
    assert set(seen) == {1}
    assert torch.get_num_threads() == before


def test_interruption_is_not_a_result_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "admit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_case(CASE, QUICK)


def test_reasons_are_one_printable_line() -> None:
    assert describe(ValueError("\n first\nsecond")) == "ValueError: first"
    assert describe(KeyError()) == "KeyError"
    assert one_line("a\x1b[31m\tb\u202e") == "a [31m b "
    assert len(one_line("x" * 1000)) == 400


# -- when sampling stops -------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Sampler]]:
    """``kernel(times, **options)``: a sampler of a call whose times (s) are given, in a world without other costs."""
    now = [0]
    for module in (clock_module, sampling):
        monkeypatch.setattr(module, "now_ns", lambda: now[0])
    monkeypatch.setattr(DeviceClock, "flush", lambda self: None)

    def make(times: Iterator[float], beside_s: float = 0.0, **options: Any) -> Sampler:
        def call(_: Any) -> None:
            now[0] += round(next(times) * 1e9)

        def prepare() -> None:
            now[0] += round(beside_s * 1e9)

        bound = BoundCall(call=call, outputs=lambda result: {}, prepare=prepare)
        return Sampler("key", bound, DeviceClock("cpu"), Options(**options), lambda result: None)

    yield make


def endless(*times: float) -> Iterator[float]:
    while True:
        yield from times


def test_equal_samples_stop_at_the_least_number(kernel: Callable[..., Sampler]) -> None:
    sampler = kernel(endless(0.001), min_samples=12)
    assert sampler.cold() == pytest.approx([0.001] * 12)
    assert (sampler.stop, sampler.flags, sampler.details["half_width"]) == ("narrow", [], pytest.approx(0, abs=1e-6))


def test_noise_takes_samples_until_the_interval_is_narrow(kernel: Callable[..., Sampler]) -> None:
    sampler = kernel(endless(0.00098, 0.00102, 0.00101, 0.00099, 0.001), precision=0.005, budget_s=10)
    samples = sampler.cold()
    assert 10 < len(samples) < 200
    assert sampler.stop == "narrow"
    assert half_width(samples) == sampler.details["half_width"] <= 0.005


@pytest.mark.parametrize(
    ("options", "beside_s", "limit", "count"),
    [
        ({"budget_s": 0.02}, 0.0, "kernel time", 20),
        ({"budget_s": 10.0, "max_samples": 15}, 0.0, "samples", 15),
        ({"budget_s": 10.0}, 0.005, "time beside the kernel", round(sampling.BESIDE_S / 0.005)),
        ({"budget_s": 0.001}, 0.0, "kernel time", 10),  # never fewer than the least number
    ],
)
def test_a_budget_ends_sampling_and_the_record_says_so(
    kernel: Callable[..., Sampler], options: dict[str, Any], beside_s: float, limit: str, count: int
) -> None:
    sampler = kernel(endless(0.0005, 0.0015), beside_s, precision=0.001, **options)
    samples = sampler.cold()
    assert (len(samples), sampler.stop, sampler.flags, sampler.details["limit"]) == (count, "budget", ["noisy"], limit)
    assert set(map(round, (s * 1e4 for s in samples))) == {5, 15}, "slow samples are kept"


def test_warm_samples_take_a_quarter_of_the_budget_and_none_if_one_is_too_long(kernel: Callable[..., Sampler]) -> None:
    sampler = kernel(endless(0.001), budget_s=0.02)
    sampler.samples = [0.001] * 50
    assert len(sampler.warm()) == 5
    sampler = kernel(endless(0.01), budget_s=0.02)
    sampler.samples = [0.01] * 50
    assert sampler.warm() == []
    assert "not taken" in sampler.details["warm"]


def test_warm_up_ends_when_two_calls_agree(kernel: Callable[..., Sampler]) -> None:
    times = iter([0.009, 0.002, 0.001, 0.00099, 0.5])
    sampler = kernel(times, budget_s=10)
    sampler.warm_up()
    assert list(times) == [0.5]


@pytest.mark.parametrize(
    ("mine", "others", "leaks"),
    [(4 << 20, -(4 << 20), False), (0, 4 << 20, False), (4 << 20, 0, True)],
    ids=["given back in others' turns", "others leak", "a leak"],
)
def test_growth_is_a_leak_if_it_stays_and_is_its_own(
    kernel: Callable[..., Sampler], monkeypatch: pytest.MonkeyPatch, mine: int, others: int, leaks: bool
) -> None:
    size, calls = [0], [0]
    monkeypatch.setattr(sampling, "resident", lambda: size[0])
    monkeypatch.setattr(sampling.allocator, "trim", lambda: None)

    def times() -> Iterator[float]:
        while True:
            calls[0] += 1
            size[0] += mine
            yield 0.006

    sampler = kernel(times(), min_samples=20, max_samples=20, budget_s=10, precision=1e-9)
    while not sampler.content:
        sampler.turn()
        size[0] += others
    assert bool(sampler.leak(0)) is leaks
    assert calls[0] == 20 + (6 if leaks else 0), "a suspect is watched for as many calls as it takes"


def test_half_width_is_that_of_the_median() -> None:
    assert half_width([1.0]) == float("inf")
    assert half_width([1.0] * 20) == pytest.approx(0, abs=1e-9)
    generator = torch.Generator().manual_seed(1)
    noise = (torch.randn(400, generator=generator) * 0.02).exp().tolist()
    assert half_width(noise) == pytest.approx(
        1.96 * 1.2533 * 0.02 / 20, rel=0.35
    )  # sd of a median: 1.25 sigma / sqrt(n)


# -- calibration ---------------------------------------------------------------------------------------------------


def test_calibration_counts_bytes_read_and_written() -> None:
    found = calibrate("cpu")
    assert found["bytes"] >= 2 * cache_bytes(torch.device("cpu"))
    copies = [found["samples"], found.get("streaming_samples", found["samples"])]
    assert all(len(samples) >= 10 for samples in (*copies, found["compute_samples"]))
    fastest = min(statistics.median(samples) for samples in copies)
    assert found["copy_bytes_per_s"] == pytest.approx(found["bytes"] / fastest), "the faster copy bounds a kernel"
    json.dumps(found)


def test_without_a_compiler_the_copy_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise BuildError("no C++ compiler was found")

    monkeypatch.setattr(NativeLibrary, "load", fails)
    found = calibrate("cpu")
    assert found["streaming_unavailable"] == "no C++ compiler was found" and "streaming_samples" not in found
    assert found["copy_bytes_per_s"] == pytest.approx(found["bytes"] / statistics.median(found["samples"]))


@pytest.mark.skipif(bool(BUILDS), reason=BUILDS or "")
@pytest.mark.parametrize("elements", [16, 16 * 1001, (1 << 18) + 16, 5 << 18])
def test_the_streaming_copy_copies_everything_and_nothing_else(elements: int) -> None:
    source = torch.arange(elements, dtype=torch.float32)
    around = torch.full((elements + 32,), -1.0)
    start = (-around.data_ptr() // 4) % 16 or 16
    target = around[start : start + elements]
    streaming_copy(target, source)(None)
    assert torch.equal(target, source)
    assert (around[:start] == -1).all() and (around[start + elements :] == -1).all()


@pytest.mark.skipif(bool(BUILDS), reason=BUILDS or "")
@pytest.mark.parametrize("make", [lambda: torch.ones(17), lambda: torch.ones(33)[1:]], ids=["size", "place"])
def test_a_streaming_copy_of_unaligned_memory_is_refused(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="aligned"):
        streaming_copy(make(), make())

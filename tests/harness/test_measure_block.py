"""Implementations of one comparison take turns: who samples when, what a failure costs, and what the records say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import hostile_plugin
import pytest
import torch
from spikemark.harness import measure, turns, verify
from spikemark.harness.measure import measure_block
from spikemark.harness.pairing import in_turns
from spikemark.harness.records import Case, Record
from spikemark.harness.sampling import Options
from spikemark.kernels import Problem, SrmParams, registry
from spikemark.kernels.srm_neuron.torch_eager import TorchEager

PROBLEM = Problem("tiny", "neuron", 2, 5, (60,), (60,), params=SrmParams(7, 4, 3.5), spike_rate=0.15)
SIX = Options(precision=1e-9, budget_s=5.0, min_samples=6, max_samples=6, ledger=False)
"""Six samples each, whatever they are."""


def case(name: str) -> Case:
    return Case("srm_neuron", "forward", name, "cpu", "float32", PROBLEM)


@pytest.fixture(autouse=True, scope="module")
def _plugin() -> Iterator[None]:
    with hostile_plugin.registered():
        yield


@pytest.fixture(autouse=True)
def _one_sample_a_turn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However fast this machine is just now."""
    monkeypatch.setattr(turns, "BURST_NS", 0)
    verify.forget_block()
    yield
    verify.forget_block()


def measured(*names: str, options: Options = SIX, **more: Any) -> tuple[dict[str, Record], list[tuple[str, str]]]:
    """Records by implementation, and (event, implementation) in order."""
    events: list[tuple[str, str]] = []

    def tell(event: str, case: Case, **data: Any) -> None:
        events.append((event, case.implementation))

    found = measure_block([case(n) for n in names], options, tell=tell, **more)
    return {r.case.implementation: r for r in found}, events


def order_of_turns(events: list[tuple[str, str]]) -> list[str]:
    """Who samples when: the turns between the last start and the first record."""
    first = max(i for i, e in enumerate(events) if e[0] == "start")
    last = min(i for i, e in enumerate(events) if e[0] == "record")
    return [name for event, name in events[first + 1 : last] if event == "turn"]


def test_all_take_turns_in_an_order_drawn_from_the_seed() -> None:
    names = ("torch_eager", "torch_vectorized", "hostile_binary")
    found, events = measured(*names, seed=1)
    assert [r.status for r in found.values()] == ["ok"] * 3
    for record in found.values():
        assert len(record.samples) == 6
        assert record.details["bursts"] == list(range(6))
        assert record.details["block"] == found["torch_eager"].details["block"]
    assert in_turns(found["torch_eager"], found["torch_vectorized"])
    assert order_of_turns(events) == order_of_turns(measured(*names, seed=1)[1])
    assert any(order_of_turns(measured(*names, seed=s)[1]) != order_of_turns(events) for s in (2, 3, 4))
    again = measured("torch_eager", "torch_vectorized")[0]
    assert not in_turns(found["torch_eager"], again["torch_vectorized"]), "other turns, other moments"


def test_one_that_is_content_goes_on_for_the_others_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its median is narrow from the start; the other's never is, and ends by its budget."""
    looks: list[int] = []

    def half_width(samples: list[float]) -> float:
        looks.append(id(samples))
        return 0.0 if id(samples) == looks[0] else 1.0

    monkeypatch.setattr("spikemark.harness.sampling.half_width", half_width)
    monkeypatch.setattr("spikemark.harness.sampling.BESIDE_S", 99.0)
    options = dataclasses.replace(SIX, precision=0.5, min_samples=3, max_samples=9)
    found, _ = measured("torch_eager", "torch_vectorized", options=options)
    assert max(len(r.samples) for r in found.values()) == 9
    bursts = [len(r.details["bursts"]) for r in found.values()]
    assert abs(bursts[0] - bursts[1]) <= 1, "a partner for every burst"
    assert sorted((r.stop, r.details["half_width"]) for r in found.values()) == [("budget", 1.0), ("narrow", 0.0)]


def test_one_alone_is_in_no_turns() -> None:
    found, events = measured("torch_eager")
    assert "block" not in found["torch_eager"].details
    assert "turn" not in [e for e, _ in events]
    assert not in_turns(found["torch_eager"], found["torch_eager"])


def test_cases_of_two_comparisons_cannot_take_turns() -> None:
    other = dataclasses.replace(case("torch_eager"), phase="backward")
    with pytest.raises(ValueError, match="of one comparison"):
        measure_block([case("torch_eager"), other], SIX)


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("hostile_raises", "error", "no such kernel"),
        ("hostile_wrong_later", "incorrect", "right when verified, wrong in"),
        ("hostile_writes_input", "incorrect", "writes to its input current"),
        ("hostile_threads", "error", "thread count"),
        ("no_such", "unavailable", "no_such"),
        ("hostile_corrupts_later", "incorrect", ""),  # noticed by what it writes, or by what it then computes
    ],
)
def test_a_failure_costs_its_own_row_only(name: str, status: str, reason: str) -> None:
    hostile = registry.get("srm_neuron", name) if name != "no_such" else None
    if hostile is not None:
        hostile.calls = 0  # instances live as long as the process
    for seed in (0, 1):
        found, events = measured("torch_eager", name, "torch_vectorized", seed=seed)
        assert (found[name].status, found["torch_eager"].status, found["torch_vectorized"].status) == (
            status, "ok", "ok"
        )  # fmt: skip
        assert reason in found[name].reason
        assert found[name].samples == []
        assert all(len(found[n].samples) == 6 for n in ("torch_eager", "torch_vectorized"))
        assert sorted(n for e, n in events if e == "record") == sorted(found), "each row is told once"
        if hostile is not None:
            hostile.calls = 0


def test_a_spoilt_process_is_left_with_what_was_complete() -> None:
    stop = registry.get("srm_neuron", "hostile_starts_threads").stop
    stop.clear()
    names = ("hostile_raises", "torch_eager", "hostile_starts_threads", "torch_vectorized")
    found, events = measured(*names, leave_when_spoilt=True)
    assert list(found) == ["hostile_raises", "hostile_starts_threads"]
    assert found["hostile_starts_threads"].details["spoilt"]
    assert ("start", "torch_vectorized") not in events
    stays, _ = measured(*names)
    assert [r.status for r in stays.values()] == ["error", "ok", "error", "ok"], "without another process all is done"
    stop.set()  # who waits for it ends now
    stop.clear()


def test_a_leak_is_found_among_turns() -> None:
    leaky = registry.get("srm_neuron", "hostile_leaks")
    try:
        found, _ = measured("torch_eager", "hostile_leaks")
    finally:
        leaky.kept.clear()
    assert found["hostile_leaks"].reason.startswith("leaks memory")
    assert (found["torch_eager"].status, found["torch_eager"].reason) == ("ok", "")


def test_times_are_accounted_to_whom_they_belong() -> None:
    found, _ = measured("torch_eager", "torch_vectorized", options=dataclasses.replace(SIX, ledger=True))
    for record in found.values():
        own = record.elapsed_s - record.details["block_s"]
        assert 0 < record.details["flush_s"] + record.details["gate_s"] < own
        assert 0 < record.details["harness_s"] < own
        assert sum(record.samples) + sum(record.warm_samples) < own


def test_only_verified_without_times() -> None:
    found, _ = measured("torch_eager", "hostile_nan", options=dataclasses.replace(SIX, timed=False))
    assert (found["torch_eager"].status, found["torch_eager"].samples) == ("ok", [])
    assert found["torch_eager"].verification["checks"]
    assert found["hostile_nan"].status == "incorrect"


def test_the_kernel_that_ran_is_in_the_record() -> None:
    chooses = registry.get("srm_neuron", "torch_eager")
    try:
        chooses.ran = "a_kernel_variant"
        found, _ = measured("torch_eager", "torch_vectorized")
    finally:
        del chooses.ran
    assert found["torch_eager"].details["ran"] == "a_kernel_variant"
    assert "ran" not in found["torch_vectorized"].details


def test_the_harness_computes_on_one_thread_and_kernels_on_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[int]] = {"compare": set(), "kernel": set()}

    def watched(name: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            seen[name].add(torch.get_num_threads())
            return function(*arguments, **named)

        return call

    operator = type(verify.block_for(case("torch_eager"), None).definition)
    monkeypatch.setattr(operator, "compare", watched("compare", operator.compare))
    monkeypatch.setattr(TorchEager, "forward", watched("kernel", TorchEager.forward))
    two = dataclasses.replace(case("hostile_binary"), device="cpu:2")
    (record,) = measure_block([two], SIX)
    assert (record.status, seen) == ("ok", {"compare": {1}, "kernel": {2}})


def test_inputs_are_put_right_in_place() -> None:
    block = verify.block_for(case("torch_eager"), None)
    address = block.inputs.tensors["current"].data_ptr()
    block.inputs.tensors["current"].zero_()
    assert "writes to its input current" in block.changed_inputs()
    block.restore()
    assert block.changed_inputs() == ""
    assert block.inputs.tensors["current"].data_ptr() == address
    block.inputs.tensors["current"].resize_(1)
    with pytest.raises(RuntimeError):
        block.restore()
    assert measure.describe(torch.OutOfMemoryError("x")) == "OutOfMemoryError: x"

"""The gate: what it refuses and why, and that it does not refuse what is right."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import hostile_plugin
import pytest
import torch
from spikemark import kernels
from spikemark.harness import records, verify
from spikemark.harness.checks import further, reduced, variations, verify_case
from spikemark.harness.clock import DeviceClock
from spikemark.harness.measure import measure_case
from spikemark.harness.records import Case
from spikemark.harness.sampling import Options
from spikemark.harness.verify import Block, Refused, block_for, checksum, gate, poisoned_memory, same_bits
from spikemark.kernels import ConvGeometry, Implementation, Problem, SrmParams
from spikemark.kernels.srm_neuron.torch_eager import TorchEager
from spikemark.kernels.state import SrmState
from torch import Tensor

PROBLEM = Problem("tiny", "neuron", 2, 5, (60,), (60,), params=SrmParams(7, 4, 3.5), spike_rate=0.15)
QUICK = Options(budget_s=0.004, min_samples=8, max_samples=8)
CLOCK = DeviceClock("cpu")


def case(implementation: str = "torch_eager", phase: str = "forward", **more: Any) -> Case:
    fields = {"device": "cpu", "dtype": "float32", "problem": PROBLEM} | more
    return Case("srm_neuron", phase, implementation, **fields)


PLUGIN = hostile_plugin.module()


@pytest.fixture(autouse=True, scope="module")
def _hostile() -> Iterator[None]:
    with hostile_plugin.registered():
        yield


@pytest.mark.parametrize("name", PLUGIN.EXPECTED)
def test_a_hostile_kernel_gets_its_row_and_the_next_is_measured_as_if_it_had_not_been_there(name: str) -> None:
    status, words = PLUGIN.EXPECTED[name]
    phase = "backward" if name == "hostile_writes_gradient" else "forward"
    record = measure_case(case(name, phase), QUICK)
    assert (record.status, record.samples, record.first_call_s) == (status, [], None), record.reason
    assert words in record.reason
    assert record.reason.isprintable()
    after = measure_case(case("torch_eager", phase), dataclasses.replace(QUICK, ledger=False))
    assert (after.status, len(after.samples)) == ("ok", 8), after.reason


@pytest.mark.parametrize("name", PLUGIN.HARMLESS)
def test_odd_but_right_kernels_are_measured(name: str) -> None:
    record = measure_case(case(name), QUICK)
    assert record.status == "ok", record.reason
    assert record.first_call_s is not None
    if name == "hostile_slow_first":
        assert record.first_call_s >= PLUGIN.FIRST_CALL_S
        assert max(record.samples) < PLUGIN.FIRST_CALL_S


def test_growing_processes_and_threads_spoil_the_worker() -> None:
    for name in ("hostile_leaks", "hostile_starts_threads"):
        assert measure_case(case(name), QUICK).details["spoilt"]
    PLUGIN.HostileStartsThreads.stop.set()
    assert "spoilt" not in measure_case(case("hostile_seed"), QUICK).details


def test_a_right_kernel_passes_on_two_inputs() -> None:
    for phase in ("forward", "backward"):
        found = gate(Block(case(phase=phase), None), kernels.get("srm_neuron", "torch_eager"), CLOCK)
        assert (found.status, found.checked, found.total, found.second_input) == ("ok", 600, 600, True)
        assert 0 < found.max_error < 1e-5
        assert found.first_call_s is not None and found.first_call_s > 0


@pytest.mark.parametrize(
    ("made", "status", "words"),
    [
        ({"dtype": "int8"}, "unsupported", "does not support int8"),
        ({"device": "cuda:0"}, "unavailable", "no CUDA device"),
    ],
)
def test_what_cannot_run_is_not_tried(made: dict[str, Any], status: str, words: str) -> None:
    if made.get("device") and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    record = measure_case(case(**made), QUICK)
    assert (record.status, words in record.reason) == (status, True), record.reason


def test_availability_device_and_problem_are_asked_in_this_order() -> None:
    class Picky(TorchEager, Implementation):
        device = "cuda"

        def unsupported(self, problem: Problem, phase: str, dtype: str) -> str | None:
            return "only odd sizes"

    picky: Any = Picky()
    picky.__dict__["reason"] = "install more"
    for wanted, change in (
        ((records.UNAVAILABLE, "install more"), lambda: picky.__dict__.update(reason="")),
        ((records.UNSUPPORTED, "written for cuda, not for cpu"), lambda: setattr(Picky, "device", "any")),
        ((records.UNSUPPORTED, "only odd sizes"), lambda: None),
    ):
        with pytest.raises(Refused) as refused:
            verify.admit(case(), picky)
        assert (refused.value.status, refused.value.reason) == wanted
        change()


def test_an_unknown_implementation_is_a_row_that_names_the_known() -> None:
    record = measure_case(case("torch_eger"), QUICK)
    assert record.status == "unavailable"
    assert "did you mean 'torch_eager'?" in record.reason


def test_blocks_are_shared_by_a_comparison_and_by_nothing_else() -> None:
    first = block_for(case("torch_eager"), None)
    assert block_for(case("native"), None) is first
    assert block_for(case("native"), 100) is not first
    other = dataclasses.replace(PROBLEM, seed=1)
    assert block_for(case(problem=other), None) is not block_for(case(), None)


def test_the_second_input_is_another_and_is_taken_back() -> None:
    for phase in ("forward", "backward"):
        block = Block(case(phase=phase), None)
        before = {n: t.clone() for n, t in block.inputs.tensors.items()}
        addresses = {n: t.data_ptr() for n, t in block.inputs.tensors.items()}
        with block.second() as reference:
            changed = [n for n, t in block.inputs.tensors.items() if not torch.equal(t, before[n])]
            assert changed == [block.varied]
            values = "spikes" if phase == "forward" else "grad_w"
            assert not torch.equal(reference.values[values], block.reference.values[values])
        for name, tensor in block.inputs.tensors.items():
            assert torch.equal(tensor, before[name])
            assert tensor.data_ptr() == addresses[name]
        assert block.changed_inputs() == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", [1, 7, 2048, 5003])
def test_a_checksum_sees_one_bit_and_a_swap(dtype: torch.dtype, size: int) -> None:
    tensor = (torch.arange(size) % 97).to(dtype)
    before = checksum(tensor)
    assert same_bits(before, checksum(tensor.clone()))
    for at in {0, size // 2, size - 1}:
        changed = tensor.clone()
        changed.view(torch.uint8)[at * dtype.itemsize] ^= 1
        assert not same_bits(before, checksum(changed))
    if size > 1:
        swapped = tensor.clone()
        swapped[[0, size - 1]] = tensor[[size - 1, 0]]
        assert torch.equal(swapped, tensor) or not same_bits(before, checksum(swapped))


def test_checksums_of_nan_and_of_nothing() -> None:
    assert same_bits(checksum(torch.full((9,), float("nan"))), checksum(torch.full((9,), float("nan"))))
    assert same_bits(checksum(torch.empty(0, 3)), checksum(torch.empty(0, 3)))
    assert same_bits(checksum(torch.arange(12.0).view(3, 4).t()), checksum(torch.arange(12.0).view(3, 4).t()))


def test_fresh_memory_is_nan_while_poisoned_and_only_then() -> None:
    with poisoned_memory(torch.device("cpu"), ()) as poisoned:
        if not poisoned:
            pytest.skip("this system's malloc cannot fill new blocks")
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            for size in (500, 3_000_000):
                assert torch.empty(size, dtype=dtype).isnan().all()
    assert not torch.empty(3_000_000).isnan().all()


def test_elements_that_are_never_written_are_found_though_fresh_pages_are_zero() -> None:
    """Large results come from fresh, zeroed pages, where a kernel that skips silent places looks right."""

    class SkipsSilence(TorchEager, Implementation):
        def forward(self, current: Tensor, params: SrmParams) -> SrmState:
            state = super().forward(current, params)
            fresh = torch.empty_like(state.spikes)
            fresh[state.spikes != 0] = 1
            return SrmState(fresh, state.delta_u, state.delta_ut)

    with poisoned_memory(torch.device("cpu"), ()) as poisoned:
        if not poisoned:
            pytest.skip("this system's malloc cannot fill new blocks")
    block, zeroed = Block(case(), None), torch.zeros_like
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Refused, match="second, in memory filled with NaN"):
        real, calls = torch.empty_like, iter((zeroed,))
        patch.setattr(torch, "empty_like", lambda t: next(calls, real)(t))  # the first call gets zeroed pages
        gate(block, SkipsSilence(), CLOCK)


def test_recheck_says_which_call_was_wrong() -> None:
    block = Block(case(), None)
    bound = block.definition.bind(kernels.get("srm_neuron", "torch_eager"), "forward", block.inputs, PROBLEM)
    state = bound.call(None)
    verify.recheck(block, bound, state, "a call")
    state.spikes.zero_()
    with pytest.raises(Refused, match="right when verified, wrong in its last call: spikes differ"):
        verify.recheck(block, bound, state, "its last call")


# -- verify_case ---------------------------------------------------------------------------------------------------


def test_verify_case_checks_layouts_and_ends() -> None:
    found = verify_case(case(phase="backward"), kernels.get("srm_neuron", "torch_eager"))
    assert [c.name for c in found if not c.ok] == []
    assert {"values", "strided inputs", "expanded gradient", "all silent", "all firing", "one time step",
            "no samples", "no time steps", "no neurons"} <= {c.name for c in found}  # fmt: skip


def test_verify_case_names_the_check_that_fails() -> None:
    class ReadsMemoryInOrder(TorchEager, Implementation):
        def backward(self, grad_out: Tensor, state: SrmState, params: SrmParams) -> tuple[Tensor, Tensor]:
            flat = grad_out.as_strided((grad_out.numel(),), (1,)) if min(grad_out.stride()) else grad_out.flatten()
            return super().backward(flat.view(grad_out.shape), state, params)

    found = verify_case(case(phase="backward"), ReadsMemoryInOrder())
    assert [c.name for c in found if not c.ok] == ["strided inputs", "channels-last inputs"]
    assert all(c.reason for c in found if not c.ok)


def test_verify_case_turns_exceptions_into_reasons() -> None:
    class NoEmpty(TorchEager, Implementation):
        def forward(self, current: Tensor, params: SrmParams) -> SrmState:
            if not current.numel():
                raise RuntimeError("empty grid\nmore")
            return super().forward(current, params)

    found = further(case(), NoEmpty(), CLOCK)
    assert {c.name: c.reason for c in found if not c.ok} == dict.fromkeys(
        ("no samples", "no time steps", "no neurons"), "RuntimeError: empty grid"
    )


@pytest.mark.parametrize(
    "problem",
    [
        Problem("c", "conv", 50, 12, (128, 32, 32), (256, 16, 16), kernel=(3, 3), geometry=ConvGeometry(2, 1)),
        Problem("g", "conv", 1, 4, (8, 40, 40), (16, 38, 38), kernel=(3, 3), geometry=ConvGeometry(groups=8)),
        Problem("d", "conv", 1, 4, (2, 20, 20), (2, 2, 2), kernel=(19, 19)),
        Problem("p", "pool", 50, 12, (128, 32, 33), (128, 8, 8), kernel=(4, 4)),
        Problem("l", "linear", 50, 12, (8192,), (10,)),
    ],
    ids=lambda p: p.workload,
)
def test_reduced_problems_are_small_and_consistent(problem: Problem) -> None:
    small = reduced(problem)
    assert small.batch * small.time_steps * torch.Size(small.in_shape).numel() < 7000
    if problem.kind == "conv":
        assert small.kernel is not None
        assert small.out_shape[1:] == small.geometry.output_size((small.in_shape[1], small.in_shape[2]), small.kernel)
        assert small.in_shape[0] % small.geometry.groups == 0
    if problem.kind == "pool":
        assert small.out_shape[1:] == (small.in_shape[1] // 4, small.in_shape[2] // 4)
    names = [name for name, _, _ in variations(Case("x", "forward", "y", "cpu", "float32", problem))]
    assert len(set(names)) == len(names)


def test_a_kernel_that_replaces_torch_equal_makes_no_results_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda a, b: True)
    assert not verify.same_bits(torch.zeros(3), torch.ones(3))

"""``srm_neuron``: every implementation against the specification's page and its faults.

Implementations registered later are tested too, and those for a GPU through what ``stand_ins`` puts in its place. All
tau differ in every test, so that nothing that confuses them or the two gradients can pass.
"""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from layouts import expanded, is_new_contiguous, same_bits, same_values, sum_gradient, unchanged
from spikemark import kernels
from spikemark.kernels import functional
from spikemark.kernels.definition import definition
from spikemark.kernels.srm_neuron import reference
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import Problem, SrmParams
from stand_ins import callable_here

OPERATOR = "srm_neuron"
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PARAMS = SrmParams(tau_m=7.0, tau_s=4.0, tau_g=3.5)
NAMES = [i.name for i in callable_here(OPERATOR)]
DEFINITION = definition(OPERATOR)
STEPS = 4  # nearly everywhere: torch_compile compiles anew, for seconds, for every number of steps
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=NAMES)
def neuron(request: pytest.FixtureRequest):
    return kernels.get(OPERATOR, request.param)


def problem(shape, params=PARAMS, rate=0.2) -> Problem:
    batch, steps, *features = shape
    return Problem("test", "neuron", batch, steps, tuple(features), tuple(features), params, spike_rate=rate)


def random(shape, dtype=torch.float32, seed=0, scale=5.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def dense_state(current, params=PARAMS):
    return kernels.get(OPERATOR, "torch_eager").forward(current, params)


def held(neuron, state: SrmState) -> SrmState:
    """``state`` as ``neuron`` keeps it."""
    return neuron.pack(state) if hasattr(neuron, "pack") else state


def backward(neuron, grad, state, params=PARAMS):
    return neuron.backward(grad, held(neuron, state), params)


def outputs(state: SrmState):
    return [t for t in (state.spikes, state.delta_u, state.delta_ut) if t is not None]


def assert_right(neuron, shape, params=PARAMS, dtype=torch.float32, rate=0.2, seed=0):
    """Both phases through the gate, on every element; returns the achieved firing rate."""
    case = problem(shape, params, rate)
    for phase in ("forward", "backward"):
        inputs = DEFINITION.make_inputs(case, phase, dtype, "cpu", seed)
        bound = DEFINITION.bind(neuron, phase, inputs, case)
        result = bound.outputs(bound.call(bound.prepare()))
        verdict = DEFINITION.compare(phase, result, DEFINITION.reference(phase, inputs, case), inputs, case)
        assert verdict.ok, f"{phase}: {verdict.reason}"
        assert verdict.checked == math.prod(shape)
    return inputs.spike_rate


def test_the_expected_ones_are_there():
    assert {"torch_eager", "torch_vectorized", "torch_compile", "native", "native_compact"} <= set(NAMES)
    assert kernels.baseline(OPERATOR).name == "torch_eager"


@pytest.mark.parametrize("dtype", FLOATS)
def test_right_in_every_dtype(neuron, dtype):
    rate = assert_right(neuron, (3, STEPS, 5, 7, 3), dtype=dtype)
    assert 0.05 < rate < 0.5


@pytest.mark.parametrize("features", [2, 7, 8, 9, 63, 65, 1023, 1025, 2049, 4095, 4096, 4097, 2 * 4096 + 13])
def test_sizes_around_tiles(neuron, features):
    assert_right(neuron, (2, STEPS, features), seed=features)


def test_one_step(neuron):
    assert_right(neuron, (3, 1, 5, 7))


def test_one_sample_one_neuron(neuron):
    assert_right(neuron, (1, STEPS, 1))


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_all_silent_and_all_firing(neuron, rate):
    assert assert_right(neuron, (2, STEPS, 37), rate=rate) == rate


def test_gain_of_either_sign_and_no_memory(neuron):
    assert_right(neuron, (2, STEPS, 129), SrmParams(tau_m=3.0, tau_s=6.0, tau_g=2.5))
    assert_right(neuron, (2, STEPS, 129), SrmParams(tau_m=1.0, tau_s=6.0, tau_g=2.5))
    assert_right(neuron, (2, STEPS, 129), SrmParams(tau_m=6.0, tau_s=3.0, tau_g=1.0))


def test_spikes_and_slopes_by_hand(neuron):
    # One neuron, current 4 at each step, decays 1/2, 3/4 and 2/3: everything is exact or nearly so.
    params = SrmParams(tau_m=4.0, tau_s=2.0, tau_g=3.0)
    state = neuron.forward(torch.full((2, STEPS, 2), 1.0), params)
    u = [2 * (0.75 - 0.5), 2 * ((1.75 * 0.75) - (1.5 * 0.5))]  # 0.5, then 1.125: a spike, and all begins anew
    assert state.spikes[0, :, 0].tolist() == [0, 1, 0, 1]
    if state.delta_u is not None:
        assert state.delta_u[1, :, 1].tolist() == [u[0], u[1] - u[0]] * 2
        torch.testing.assert_close(state.delta_ut[1, :, 1], torch.tensor([2 / 3, 10 / 9] * 2))


def test_the_threshold_is_strict(neuron):
    params = SrmParams(tau_m=4.0, tau_s=2.0, tau_g=3.0)  # u of the first step is current / 2 exactly
    above = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0)).item()
    below = torch.nextafter(torch.tensor(2.0), torch.tensor(1.0)).item()
    current = torch.zeros(2, STEPS, 3)
    current[:, 0] = torch.tensor([below, 2.0, above])
    assert neuron.forward(current, params).spikes[:, 0].tolist() == [[0, 0, 1]] * 2


def test_nan_and_infinite_currents(neuron):
    current = random((2, STEPS, 2, 3))
    current[0, 1, 0, 0], current[0, 2, 0, 1], current[1, 0, 1, 2] = NAN, INF, -INF
    case = problem(current.shape)
    inputs = type(DEFINITION.make_inputs(case, "forward", torch.float32, "cpu", 0))({"current": current}, 0.0)
    state = neuron.forward(current, PARAMS)
    got = {n: t for n in ("spikes", "delta_u", "delta_ut") if (t := getattr(state, n)) is not None}
    verdict = DEFINITION.compare("forward", got, DEFINITION.reference("forward", inputs, case), inputs, case)
    assert verdict.ok, verdict.reason
    assert state.spikes[0, 1:, 0, 0].tolist() == [0] * (STEPS - 1), "a NaN potential never fires"
    if state.delta_u is not None:
        assert state.delta_u[0, 1:, 0, 0].isnan().all()
    assert torch.equal(state.spikes, dense_state(current).spikes)


def test_backward_by_hand_with_zero_and_negative_slopes(neuron):
    # Neurons: slope 0 (-1/0 clamps to the lower bound), negative, tiny, ordinary; a spike at step 2 of 4.
    spikes, delta_u, delta_ut = (torch.zeros(2, STEPS, 4) for _ in range(3))
    spikes[:, 2] = 1
    delta_u[:, 2] = torch.tensor([0.0, -0.5, 0.01, 0.5])
    delta_ut[:, 2] = torch.tensor([0.0, -0.5, 1e-20, 0.25])
    delta_u[:, 3], delta_ut[:, 1] = NAN, NAN  # never read: no spike there
    grad = torch.full((2, STEPS, 4), 3.0)
    grad[:, 2] = torch.tensor([1.0, 1.0, 2.0, -1.5])
    grad_w, grad_t = backward(neuron, grad, SrmState(spikes, delta_u, delta_ut))
    p = PARAMS
    scale_w, scale_t = [-4.0, 0.0, -8.0, 3.0], [-123456789.0, 0.0, -2 * 123456789.0, 6.0]
    for t in range(STEPS):
        k = 2 - t + 1
        eps_w, eps_t = (p.gain * (p.e_m**k - p.e_s**k), -(p.e_g**k)) if k > 0 else (0.0, 0.0)
        for got, scale, eps in ((grad_w, scale_w, eps_w), (grad_t, scale_t, eps_t)):
            torch.testing.assert_close(got[1, t], torch.tensor([s * eps for s in scale]), rtol=1e-6, atol=0)
    assert grad_w[:, 3].eq(0).all() and grad_t[:, 3].eq(0).all(), "after the last spike there is no gradient"


def test_gradients_that_are_not_finite(neuron):
    state = dense_state(random((2, STEPS, 3, 5)))
    grad = random(state.spikes.shape, seed=1)
    grad[:, :, 0], grad[:, :, 1], grad[:, :, 2, 0] = INF, -INF, NAN
    got = backward(neuron, grad, state)
    want = reference.backward(grad, state.spikes, state.delta_u, state.delta_ut, PARAMS)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w.float(), equal_nan=True, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [(37,), (3, 4, 20)])
def test_any_layout_gives_the_contiguous_result(neuron, dtype, features):
    shape = (3, STEPS, *features)
    current, grad = random(shape, dtype), random(shape, dtype, 1)
    want = outputs(neuron.forward(current, PARAMS))
    saved = dense_state(current)
    want_back = backward(neuron, grad, saved)
    for label, view in same_values(current):
        with unchanged(view):
            state = neuron.forward(view, PARAMS)
        for got, w in zip(outputs(state), want, strict=True):
            assert same_bits(got, w), label
            assert is_new_contiguous(got, view), label
    for label, view in same_values(grad):
        with unchanged(view, *saved.for_backward()):
            got_back = backward(neuron, view, saved)
        for got, w in zip(got_back, want_back, strict=True):
            assert same_bits(got, w), label
            assert is_new_contiguous(got, view), label
    for label, view in expanded(current):
        with unchanged(view):
            got_all = outputs(neuron.forward(view, PARAMS))
        for got, w in zip(got_all, outputs(neuron.forward(view.contiguous(), PARAMS)), strict=True):
            assert same_bits(got, w), label
    for label, view in [*expanded(grad), ("sum().backward()", sum_gradient(grad))]:
        with unchanged(view):
            got_back = backward(neuron, view, saved)
        for got, w in zip(got_back, backward(neuron, view.contiguous(), saved), strict=True):
            assert same_bits(got, w), label


def test_saved_state_of_any_layout(neuron):
    state = dense_state(random((2, STEPS, 3, 20)))
    grad = random((2, STEPS, 3, 20), seed=1)
    want = backward(neuron, grad, state)
    views = [dict(same_values(t)) for t in state.for_backward()]
    for label in ("all axes reversed in memory", "every other element of the last axis"):
        got = backward(neuron, grad, SrmState(*(v[label] for v in views)))
        assert all(same_bits(g, w) for g, w in zip(got, want, strict=True)), label


def test_sum_backward_through_autograd(neuron, monkeypatch):
    monkeypatch.setattr(functional, "usable", lambda *asked: neuron)  # a stand-in for a GPU is not "available"
    current = random((2, STEPS, 3, 5)).requires_grad_()
    spikes = kernels.srm_neuron(current, PARAMS, implementation=neuron.name)
    spikes.sum().backward()
    state = dense_state(current.detach())
    ones = torch.ones_like(current)
    want, _ = reference.backward(ones, state.spikes, state.delta_u, state.delta_ut, PARAMS)
    torch.testing.assert_close(current.grad, want.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, STEPS, 3), (2, 0, 3), (2, STEPS, 0), (2, STEPS, 3, 0, 2), (0, 0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_tensors_give_empty_results(neuron, shape, dtype):
    state = neuron.forward(torch.empty(shape, dtype=dtype), PARAMS)
    empty = torch.empty(shape, dtype=dtype)
    results = [*outputs(state), *neuron.backward(empty, state, PARAMS)]
    results += backward(neuron, empty, SrmState(empty, empty, empty))
    assert all(t.shape == shape and t.dtype == dtype and t.is_contiguous() for t in results)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.uint8, torch.complex64])
def test_other_dtypes_are_a_clear_error(neuron, dtype):
    current = torch.ones(2, STEPS, 3).to(dtype)
    with pytest.raises(TypeError, match="current must be a float32"):
        neuron.forward(current, PARAMS)
    state = held(neuron, dense_state(random((2, STEPS, 3))))
    with pytest.raises(TypeError, match="grad_out must be a float32"):
        neuron.backward(current, state, PARAMS)


def test_outputs_do_not_share_memory_and_do_not_change_later(neuron):
    current = random((2, STEPS, 40))
    first = outputs(neuron.forward(current, PARAMS))
    copies = [t.clone() for t in first]
    assert len({t.untyped_storage().data_ptr() for t in first}) == len(first)
    neuron.forward(-current, PARAMS)
    assert all(same_bits(a, b) for a, b in zip(first, copies, strict=True))


def test_offsets_beyond_32_bits_in_a_view_that_fits(neuron):
    # 4 GiB of address space of which only the touched pages become memory.
    far = 2**31 + 64
    buffer = torch.empty(far + 1024, dtype=torch.bfloat16)
    values = random((2, STEPS, 2, 20), torch.bfloat16)
    for strides in ((far, 64, 20, 1), (256, 40, far, 1), (64, far // (STEPS - 1) // 64 * 64, 20, 1)):
        view = buffer.as_strided(values.shape, strides)
        view.copy_(values)
        for got, want in zip(
            outputs(neuron.forward(view, PARAMS)), outputs(neuron.forward(values, PARAMS)), strict=True
        ):
            assert same_bits(got, want), strides
        state = dense_state(values)
        for got, want in zip(backward(neuron, view, state), backward(neuron, values, state), strict=True):
            assert same_bits(got, want), strides


def test_moved_bytes_are_at_least_the_least(neuron):
    case = problem((2, STEPS, 1024), rate=0.1)
    for phase in ("forward", "backward"):
        moved = neuron.moved_bytes(case, phase, "float32", 0.1)
        assert moved is None or moved >= DEFINITION.cost(phase, case, torch.float32, 0.1).bytes


taus = st.floats(1.0, 20.0, allow_nan=False).map(lambda v: round(v, 2))


@st.composite
def cases(draw):
    tau_m, tau_s, tau_g = draw(st.tuples(taus, taus, taus).filter(lambda t: len(set(t)) == 3))
    params = SrmParams(tau_m, tau_s, tau_g, v_th=draw(st.sampled_from([0.1, 0.7, 1.0, 3.3])))
    features = draw(st.lists(st.integers(2, 9), min_size=1, max_size=3))
    steps = draw(st.sampled_from([1, STEPS]))
    return (draw(st.integers(2, 4)), steps, *features), params, draw(st.floats(0, 1)), draw(st.integers(0, 2**30))


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases(), wide=st.booleans())
def test_any_shape_taus_threshold_and_rate(neuron, case, wide):
    shape, params, rate, seed = case
    assert_right(neuron, shape, params, torch.float64 if wide else torch.float32, rate, seed)

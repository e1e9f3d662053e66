"""The neuron's gate: its reference against the specification step by step, and what it must and must not let pass."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from spikemark import kernels
from spikemark.kernels.definition import definition
from spikemark.kernels.srm_neuron import definition as module
from spikemark.kernels.srm_neuron import reference
from spikemark.kernels.types import Problem, SrmParams

DEFINITION = definition("srm_neuron")
PARAMS = SrmParams(tau_m=7.0, tau_s=4.0, tau_g=3.5)


def problem(batch=3, steps=6, features=(40,), params=PARAMS, rate=0.2) -> Problem:
    return Problem("test", "neuron", batch, steps, features, features, params, spike_rate=rate)


def gate(phase, change, dtype=torch.float32, case=None):
    """The verdict on the baseline's outputs after ``change`` has altered them."""
    case = case or problem()
    inputs = DEFINITION.make_inputs(case, phase, dtype, "cpu", 0)
    bound = DEFINITION.bind(kernels.get("srm_neuron", "torch_eager"), phase, inputs, case)
    outputs = bound.outputs(bound.call(bound.prepare()))
    changed = change(dict(outputs))
    return DEFINITION.compare(phase, changed, DEFINITION.reference(phase, inputs, case), inputs, case)


def by_the_page(x: list[float], p: SrmParams):
    """operators.md, section 1, for one neuron, in Python's floats."""
    m = s = g = u_last = 0.0
    spikes, delta_u, delta_ut = [], [], []
    for current in x:
        m, s, g = (m + current) * p.e_m, (s + current) * p.e_s, (g + current) * p.e_g
        u = p.gain * (m - s)
        delta_u.append(u - u_last)
        delta_ut.append(g)
        spikes.append(1.0 if u > p.v_th else 0.0)
        if spikes[-1]:
            m = s = g = u_last = 0.0
        else:
            u_last = u
    return spikes, delta_u, delta_ut


def by_the_page_back(grad, spikes, delta_u, delta_ut, p: SrmParams):
    steps = len(grad)
    grad_w, grad_t = [0.0] * steps, [0.0] * steps
    for t in range(steps):
        later = [f for f in range(t, steps) if spikes[f] == 1]
        if later:
            f, k = later[0], later[0] - t
            scale_w = -4.0 if delta_u[f] == 0 else min(0.0, max(-4.0, -1 / delta_u[f]))
            scale_t = -123456789.0 if delta_ut[f] == 0 else min(0.0, max(-123456789.0, -1 / delta_ut[f]))
            grad_w[t] = scale_w * grad[f] * p.gain * (p.e_m ** (k + 1) - p.e_s ** (k + 1))
            grad_t[t] = scale_t * grad[f] * -(p.e_g ** (k + 1))
    return grad_w, grad_t


@pytest.mark.parametrize("params", [PARAMS, SrmParams(2.5, 5.0, 1.0, v_th=0.4)])
def test_the_reference_is_the_page(params):
    x = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 4
    grad = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    got = reference.forward(x, params)
    back = reference.backward(grad, got.spikes, got.delta_u, got.delta_ut, params)
    assert 0.05 < got.spikes.mean() < 0.8
    for b in range(2):
        for n in range(5):
            want = by_the_page(x[b, :, n].tolist(), params)
            for tensor, values in zip((got.spikes, got.delta_u, got.delta_ut), want, strict=True):
                torch.testing.assert_close(tensor[b, :, n].tolist(), values, rtol=1e-12, atol=1e-12)
            want_back = by_the_page_back(grad[b, :, n].tolist(), *want, params)
            for tensor, values in zip(back, want_back, strict=True):
                torch.testing.assert_close(tensor[b, :, n].tolist(), values, rtol=1e-10, atol=1e-12)


def test_what_is_right_passes():
    for phase in ("forward", "backward"):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            verdict = gate(phase, lambda o: o, dtype)
            assert verdict.ok, verdict.reason
            assert verdict.checked == verdict.total == 3 * 6 * 40


def swap(o):
    return {"grad_w": o["grad_t"], "grad_t": o["grad_w"]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_swapped_gradients_are_caught(dtype):
    assert not gate("backward", swap, dtype).ok


@pytest.mark.parametrize("name", ["grad_w", "grad_t"])
@pytest.mark.parametrize("factor", [0.999, -1.0, 0.0])
def test_one_wrong_gradient_is_caught(name, factor):
    verdict = gate("backward", lambda o: o | {name: o[name] * factor})
    assert not verdict.ok
    assert verdict.reason.startswith(name)


def test_one_wrong_element_is_caught_beside_a_huge_scale():
    # A slope of 0 makes the last spike's scale 1.2e8: it must not widen the tolerance of what comes before.
    case = problem(1, 6, (1,))
    spikes, delta_u = torch.tensor([0.0, 1, 0, 0, 1, 0]).reshape(1, 6, 1), torch.full((1, 6, 1), 0.5)
    delta_ut = torch.tensor([0.3, 0.5, 0.3, 0.3, 0.0, 0.3]).reshape(1, 6, 1)
    tensors = {"grad_out": torch.ones(1, 6, 1), "spikes": spikes, "delta_u": delta_u, "delta_ut": delta_ut}
    inputs = dataclasses.replace(DEFINITION.make_inputs(case, "backward", torch.float32, "cpu", 0), tensors=tensors)
    bound = DEFINITION.bind(kernels.get("srm_neuron", "torch_eager"), "backward", inputs, case)
    outputs = bound.outputs(bound.call(bound.prepare()))
    want = DEFINITION.reference("backward", inputs, case)
    assert DEFINITION.compare("backward", outputs, want, inputs, case).ok
    for t in range(6):
        wrong = {n: v.clone() for n, v in outputs.items()}
        wrong["grad_t"][0, t] += 1e-3 if t < 2 or t == 5 else 1e3
        assert not DEFINITION.compare("backward", wrong, want, inputs, case).ok, t


@pytest.mark.parametrize("name", ["spikes", "delta_u", "delta_ut"])
@pytest.mark.parametrize("value", [0.5, 1e-3, math.nan, math.inf])
def test_one_wrong_element_of_the_forward_is_caught(name, value):
    def change(o):
        o[name] = o[name].clone()
        o[name][2, 3, 17] += value
        return o

    assert not gate("forward", change).ok


def test_a_gradient_that_should_be_nan_or_zero_is_caught():
    def fill(value):
        def change(o):
            o["grad_w"] = torch.where(o["grad_w"] == 0, value, o["grad_w"])
            return o

        return change

    assert gate("backward", fill(0.0)).ok
    assert not gate("backward", fill(math.nan)).ok, "0 * garbage after the last spike (fault 1)"


def test_a_missing_output_a_wrong_shape_and_a_wrong_dtype_are_named():
    assert "grad_t" in gate("backward", lambda o: {"grad_w": o["grad_w"]}).reason
    assert "shape" in gate("backward", lambda o: o | {"grad_w": o["grad_w"][:1]}).reason
    assert "dtype" in gate("forward", lambda o: o | {"spikes": o["spikes"].double()}).reason


def near_threshold(distance: float, neurons: int, ambiguous: int):
    """Inputs whose first ``ambiguous`` neurons reach ``v_th * (1 + distance)`` at step 0, and outputs that put them
    on the other side there, with all that follows. The margin there is 32 * eps * 5 = 1.9e-5."""
    params = SrmParams(tau_m=4.0, tau_s=2.0, tau_g=3.0)  # u of the first step is current / 2
    current = torch.full((1, 4, neurons), 0.3)
    current[:, 1:] = 0.4
    on_threshold = torch.zeros(1, 4, neurons, dtype=torch.float64)
    on_threshold[:, 0] = 2.0 * (1 + distance)
    on_threshold[:, 1:] = 0.7
    current[..., :ambiguous] = on_threshold[..., :ambiguous].float()
    case = problem(1, 4, (neurons,), params)
    inputs = dataclasses.replace(
        DEFINITION.make_inputs(case, "forward", torch.float32, "cpu", 0), tensors={"current": current}
    )
    flipped = dataclasses.replace(params, v_th=1.0 - 1e-4 if distance <= 0 else 1.0 + 1e-4)
    state = kernels.get("srm_neuron", "torch_eager").forward(current, flipped)
    outputs = {"spikes": state.spikes, "delta_u": state.delta_u, "delta_ut": state.delta_ut}
    return DEFINITION.compare("forward", outputs, DEFINITION.reference("forward", inputs, case), inputs, case)


@pytest.mark.parametrize("distance", [0.0, 1e-6, -1e-6])
def test_a_neuron_within_rounding_of_the_threshold_is_ambiguous(distance):
    verdict = near_threshold(distance, 2000, 2)
    assert verdict.ok, verdict.reason
    assert verdict.ambiguous == 2


def test_more_than_one_in_a_thousand_ambiguous_neurons_fail():
    verdict = near_threshold(0.0, 2000, 3)
    assert not verdict.ok
    assert verdict.ambiguous == 3 and "ambiguous" in verdict.reason


@pytest.mark.parametrize("distance", [4e-5, -4e-5])
def test_a_neuron_beyond_the_margin_is_wrong(distance):
    verdict = near_threshold(distance, 2000, 1)
    assert not verdict.ok
    assert "spikes differ" in verdict.reason and "step 0" in verdict.reason


def test_a_large_current_before_a_reset_does_not_widen_the_margin_after_it():
    case = problem(1, 6, (1000,))
    current = torch.full((1, 6, 1000), 0.2)
    current[:, 0] = 1e6  # fires, and the reset leaves nothing of it
    inputs = dataclasses.replace(
        DEFINITION.make_inputs(case, "forward", torch.float32, "cpu", 0), tensors={"current": current}
    )
    state = kernels.get("srm_neuron", "torch_eager").forward(current, PARAMS)
    spikes = state.spikes.clone()
    spikes[0, 4, 7] = 1 - spikes[0, 4, 7]
    outputs = {"spikes": spikes, "delta_u": state.delta_u, "delta_ut": state.delta_ut}
    verdict = DEFINITION.compare("forward", outputs, DEFINITION.reference("forward", inputs, case), inputs, case)
    assert not verdict.ok


def test_a_sample_holds_both_ends_and_catches_a_wrong_last_neuron():
    case = problem(4, 6, (5000,))
    inputs = DEFINITION.make_inputs(case, "forward", torch.float32, "cpu", 0)
    sample = DEFINITION.reference("forward", inputs, case, limit=6000)
    assert sample.where[0] == 0 and sample.where[-1] == 4 * 5000 - 1
    assert 500 <= len(sample.where) <= 1000
    bound = DEFINITION.bind(kernels.get("srm_neuron", "torch_eager"), "forward", inputs, case)
    outputs = bound.outputs(bound.call(None))
    assert DEFINITION.compare("forward", outputs, sample, inputs, case).ok
    outputs["delta_u"][-1, -1, -1] += 1
    assert not DEFINITION.compare("forward", outputs, sample, inputs, case).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.0, 0.005, 0.02, 0.05, 0.1, 0.12, 0.2, 0.35, 1.0])
def test_inputs_fire_at_about_the_rate_that_was_asked_for(rate, dtype):
    case = problem(4, 12, (3000,), rate=rate)
    inputs = DEFINITION.make_inputs(case, "forward", dtype, "cpu", 1)
    state = kernels.get("srm_neuron", "torch_eager").forward(inputs.tensors["current"], PARAMS)
    achieved = float(state.spikes.double().mean())
    assert inputs.spike_rate == pytest.approx(achieved, abs=1e-12), "the recorded rate is that of the spikes"
    assert achieved == pytest.approx(rate, rel=0.15)


def test_the_same_arguments_give_the_same_inputs():
    for phase in ("forward", "backward"):
        a, b = (DEFINITION.make_inputs(problem(), phase, torch.float32, "cpu", 5) for _ in range(2))
        c = DEFINITION.make_inputs(problem(), phase, torch.float32, "cpu", 6)
        assert all(torch.equal(a.tensors[n], b.tensors[n]) for n in a.tensors)
        assert not any(torch.equal(a.tensors[n], c.tensors[n]) for n in a.tensors if n not in ("spikes",))


def test_inputs_do_not_depend_on_native_being_there(monkeypatch):
    with_native = DEFINITION.make_inputs(problem(), "backward", torch.float32, "cpu", 5)
    native = type(module.registry.get("srm_neuron", "native"))
    monkeypatch.setattr(native, "available", property(lambda self: False))
    without = DEFINITION.make_inputs(problem(), "backward", torch.float32, "cpu", 5)
    for name, tensor in without.tensors.items():
        torch.testing.assert_close(with_native.tensors[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("params", [PARAMS, SrmParams(tau_m=4.0, tau_s=2.0, tau_g=3.0)])
def test_no_generated_neuron_is_near_the_threshold(params, dtype):
    case = problem(2, 40, (1500,), params, rate=0.35)
    inputs = DEFINITION.make_inputs(case, "forward", dtype, "cpu", 2)
    want = DEFINITION.reference("forward", inputs, case).values
    margin = 32 * torch.finfo(torch.float32).eps * torch.maximum(want["u"].abs(), want["peak"]).clamp(min=1.0)
    assert ((want["u"] - params.v_th).abs() > margin).all()
    assert want["spikes"].mean() == pytest.approx(0.35, rel=0.1)


@pytest.mark.parametrize("sizes", [(0, 4, (3,)), (2, 0, (3,)), (2, 4, (0, 2))])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_empty_problems_go_through_the_gate(sizes, phase):
    verdict = gate(phase, lambda o: o, case=problem(*sizes))
    assert verdict.ok and verdict.checked == 0

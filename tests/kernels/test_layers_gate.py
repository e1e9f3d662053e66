"""The layers' gate: right layers pass for every dtype, size and rate; each way of being wrong fails."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spikemark import kernels
from spikemark.kernels import registry
from spikemark.kernels.definition import Comparison, definition
from spikemark.kernels.layers import conv2d_spikes, linear_spikes
from spikemark.kernels.srm_conv2d.definition import convolved, read, readers
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import ConvGeometry, Problem, SrmParams

PARAMS = SrmParams(7, 4, 3.5)
CONV = Problem(
    "t/conv", "conv", 2, 6, (4, 7, 6), (6, 4, 8), PARAMS, ConvGeometry((2, 1), (1, 2), (1, 1), 2), (3, 3), 0.15
)
LINEAR = Problem("t/linear", "linear", 4, 10, (40,), (60,), PARAMS, spike_rate=0.15)
PROBLEMS = {"srm_conv2d": CONV, "srm_linear": LINEAR}
BASELINE = {"srm_conv2d": "torch_eager+torch_autograd", "srm_linear": "torch_eager"}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
EAGER, AUTOGRAD = kernels.get("srm_neuron", "torch_eager"), kernels.get("conv_backward", "torch_autograd")


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors here are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def judged(
    operator: str,
    implementation: Any,
    phase: str,
    problem: Problem,
    dtype=torch.float32,
    limit=None,
    seed=0,
    change=None,
) -> Comparison:
    found = definition(operator)
    inputs = found.make_inputs(problem, phase, dtype, "cpu", seed)
    call = found.bind(implementation, phase, inputs, problem)
    outputs = call.outputs(call.call(call.prepare()))
    if change is not None:
        change(outputs, inputs)
    return found.compare(phase, outputs, found.reference(phase, inputs, problem, limit), inputs, problem)


def layer_of(operator: str, neuron: Any = EAGER, conv: Any = AUTOGRAD) -> Any:
    """A layer made of any objects with the methods of a neuron and a convolution backward."""
    if operator == "srm_linear":
        return SimpleNamespace(forward=lambda x, w, p: linear_spikes(x, w, p, neuron))
    return SimpleNamespace(forward=lambda x, w, p, g: conv2d_spikes(x, w, p, g, neuron, conv))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
@pytest.mark.parametrize("operator", PROBLEMS)
def test_every_default_implementation_passes(operator, phase, dtype):
    found, problem = definition(operator), PROBLEMS[operator]
    inputs = found.make_inputs(problem, phase, dtype, "cpu", 0)
    wanted = {limit: found.reference(phase, inputs, problem, limit) for limit in (None, 400)}
    ran = 0
    for one in kernels.implementations(operator, device="cpu"):
        slow = "torch_compile" in one.name
        if not (one.default and one.available) or slow or str(dtype)[6:] not in one.dtypes:
            continue
        call = found.bind(one, phase, inputs, problem)
        outputs = call.outputs(call.call(call.prepare()))
        for limit, reference in wanted.items():
            verdict = found.compare(phase, outputs, reference, inputs, problem)
            assert verdict.ok, f"{one.name} {limit}: {verdict.reason}"
            assert 0 < verdict.checked <= verdict.total and (limit is None) == (verdict.checked == verdict.total)
        ran += 1
    assert ran >= 2


@pytest.mark.parametrize("operator", PROBLEMS)
def test_inputs_and_output_fire_at_the_rate(operator):
    problem = dataclasses.replace(PROBLEMS[operator], batch=8, time_steps=20)
    for rate in (0.0, 0.05, 0.2, 1.0):
        asked = dataclasses.replace(problem, spike_rate=rate)
        inputs = definition(operator).make_inputs(asked, "step", torch.float32, "cpu", 0)
        assert abs(inputs.spike_rate - rate) < 0.02
        call = definition(operator).bind(kernels.get(operator, BASELINE[operator]), "forward", inputs, asked)
        achieved = float(call.outputs(call.call(None))["spikes"].mean())
        assert abs(achieved - rate) < 0.05 + 0.3 * rate * (rate < 1), (rate, achieved)
        assert set(inputs.tensors) == {"input", "weight", "grad_out"}


def flip(outputs: dict, at: int) -> None:
    spikes = outputs["spikes"].clone()
    spikes.view(-1)[at] = 1 - spikes.view(-1)[at]
    outputs["spikes"] = spikes


def off_by(name: str, factor: float, at: int) -> Any:
    """Change the element at ``at`` by a share of the typical size."""

    def change(outputs: dict, _: Any) -> None:
        wrong = outputs[name].clone()
        wrong.view(-1)[at] += factor * wrong.std()
        outputs[name] = wrong

    return change


@pytest.mark.parametrize("limit", [None, 400])
@pytest.mark.parametrize("operator", PROBLEMS)
def test_one_wrong_spike_or_gradient_fails(operator, limit):
    baseline, problem = kernels.get(operator, BASELINE[operator]), PROBLEMS[operator]
    for phase in ("forward", "backward", "step"):
        for at in (0, -1):
            verdict = judged(operator, baseline, phase, problem, limit=limit, change=lambda o, _, at=at: flip(o, at))
            assert not verdict.ok and "spikes" in verdict.reason
    for name in ("grad_input", "grad_weight"):
        for at in (0, -1):  # both ends are in every sample
            verdict = judged(operator, baseline, "step", problem, limit=limit, change=off_by(name, 0.01, at))
            assert not verdict.ok and name in verdict.reason, (name, at)


@pytest.mark.parametrize("limit", [None, 400])
@pytest.mark.parametrize("operator", PROBLEMS)
@pytest.mark.parametrize("phase", ["backward", "step"])
def test_a_thousandth_too_much_fails(operator, phase, limit):
    baseline, problem = kernels.get(operator, BASELINE[operator]), PROBLEMS[operator]
    for name in ("grad_input", "grad_weight"):
        verdict = judged(
            operator, baseline, phase, problem, limit=limit, change=lambda o, _, n=name: o.update({n: o[n] * 1.001})
        )
        assert not verdict.ok and name in verdict.reason


@pytest.mark.parametrize("operator", PROBLEMS)
@pytest.mark.parametrize("phase", ["backward", "step"])
def test_faults_of_the_backward_fail(operator, phase):
    def judge(**parts: Any) -> Comparison:
        return judged(operator, layer_of(operator, **parts), phase, PROBLEMS[operator])

    def with_backward(backward: Any) -> Any:
        return SimpleNamespace(forward=EAGER.forward, backward=backward)

    def altered(**changes: Any) -> Any:
        return with_backward(lambda g, s, p: EAGER.backward(g, s, dataclasses.replace(p, **changes)))

    assert judge(neuron=with_backward(EAGER.backward)).ok
    assert not judge(neuron=with_backward(lambda g, s, p: EAGER.backward(g, s, p)[::-1])).ok  # swapped halves
    assert not judge(neuron=with_backward(lambda g, s, p: (EAGER.backward(g, s, p)[0],) * 2)).ok  # one for both
    assert not judge(neuron=altered(tau_g=3.6)).ok
    assert not judge(neuron=altered(tau_s=4.1)).ok
    assert not judge(neuron=altered(tau_m=7.1)).ok
    if operator == "srm_conv2d":

        def input_half(mask: bool, scale: float) -> Any:
            def call(grad_t, weight, x, geometry, grad_scale):
                masked = x if mask else torch.ones_like(x)
                return AUTOGRAD.input(grad_t, weight, masked, geometry, grad_scale * scale)

            return SimpleNamespace(input=call, weight=AUTOGRAD.weight)

        assert judge(conv=input_half(True, 1.0)).ok
        assert not judge(conv=input_half(False, 1.0)).ok
        assert not judge(conv=input_half(True, 1.01)).ok


@pytest.mark.parametrize("operator", PROBLEMS)
def test_faults_of_the_forward_fail(operator):
    def altered(**changes: Any) -> Any:
        return layer_of(
            operator,
            SimpleNamespace(
                forward=lambda x, p: EAGER.forward(x, dataclasses.replace(p, **changes)), backward=EAGER.backward
            ),
        )

    def without_reset(x: torch.Tensor, p: SrmParams) -> SrmState:
        state = EAGER.forward(x, p)
        return SrmState(state.spikes.cummax(1).values, state.delta_u, state.delta_ut)

    problem = PROBLEMS[operator]
    for changes in ({"v_th": 1.01}, {"tau_m": 7.1}, {"tau_s": 3.9}):
        assert not judged(operator, altered(**changes), "forward", problem).ok, changes
    wrong = layer_of(operator, SimpleNamespace(forward=without_reset, backward=EAGER.backward))
    assert not judged(operator, wrong, "forward", problem).ok
    # tau_g is no part of the spikes: its fault shows in the step's gradients only.
    assert judged(operator, altered(tau_g=3.6), "forward", problem).ok
    assert not judged(operator, altered(tau_g=3.6), "step", problem).ok


@pytest.mark.parametrize("operator", PROBLEMS)
def test_wrong_shapes_dtypes_and_values_are_said(operator):
    baseline, problem = kernels.get(operator, BASELINE[operator]), PROBLEMS[operator]

    def reason(name: str, change: Any) -> str:
        verdict = judged(operator, baseline, "step", problem, change=lambda o, _: o.update({name: change(o[name])}))
        assert not verdict.ok
        return verdict.reason

    assert "grad_weight has shape" in reason("grad_weight", lambda t: t[:1])
    assert "grad_input has dtype torch.float64" in reason("grad_input", torch.Tensor.double)
    assert "grad_input is a NoneType" in reason("grad_input", lambda t: None)
    assert "values other than 0 and 1" in reason("spikes", lambda t: t * 0.5)
    assert "out of tolerance" in reason("grad_weight", lambda t: torch.full_like(t, torch.nan))
    assert "out of tolerance" in reason("grad_input", lambda t: torch.full_like(t, torch.nan))
    assert "spikes" in reason("spikes", lambda t: torch.full_like(t, torch.nan))


def test_spikes_within_rounding_are_ambiguous_and_too_many_of_them_fail():
    # A threshold 1e-6 lower: a change of less than the current's rounding error in few neurons, and none is wrong.
    problem = dataclasses.replace(LINEAR, batch=20, out_shape=(400,))
    shifted = SimpleNamespace(
        forward=lambda x, p: EAGER.forward(x, dataclasses.replace(p, v_th=p.v_th - 1e-6)), backward=EAGER.backward
    )
    verdict = judged("srm_linear", layer_of("srm_linear", shifted), "step", problem)
    assert verdict.ok, verdict.reason
    # bfloat16: rounding the current differently moves many neurons; a neuron of wrong threshold moves too many.
    shifted = SimpleNamespace(
        forward=lambda x, p: EAGER.forward(x, dataclasses.replace(p, v_th=p.v_th - 5e-3)), backward=EAGER.backward
    )
    verdict = judged("srm_linear", layer_of("srm_linear", shifted), "forward", problem, torch.bfloat16)
    assert not verdict.ok


@st.composite
def conv_problems(draw) -> Problem:
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    geometry = ConvGeometry(
        draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
        draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        draw(st.sampled_from([1, 2])),
    )
    size = draw(st.tuples(st.integers(5, 9), st.integers(5, 9)))
    params = draw(st.sampled_from([PARAMS, SrmParams(), SrmParams(2, 6, 1.5, 0.7, 1.0), SrmParams(1, 3, 1)]))
    rate = draw(st.sampled_from([0.0, 0.02, 0.2, 0.5, 1.0]))
    return Problem(
        "t/conv",
        "conv",
        draw(st.integers(0, 3)),
        draw(st.integers(0, 9)),
        (4, *size),
        (6, *geometry.output_size(size, kernel)),
        params,
        geometry,
        kernel,
        rate,
    )


@settings(max_examples=12, deadline=None)
@given(
    problem=conv_problems(),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(FLOATS),
    limit=st.sampled_from([None, 1, 300]),
)
def test_right_layers_never_fail(problem, seed, dtype, limit):
    for name in ("torch_eager+torch_autograd", "native_compact+aten"):
        found = kernels.get("srm_conv2d", name)
        if found.available:
            verdict = judged("srm_conv2d", found, "step", problem, dtype, limit, seed)
            assert verdict.ok, f"{name}: {verdict.reason}"


@settings(max_examples=40, deadline=None)
@given(problem=conv_problems(), data=st.data())
def test_spans_of_what_reads_what(problem, data):
    axis = data.draw(st.sampled_from([0, 1]))
    size, outputs = problem.in_shape[1 + axis], problem.out_shape[1 + axis]
    start = data.draw(st.integers(0, size - 1))
    span = (start, data.draw(st.integers(start + 1, size)))
    g, k = problem.geometry, problem.kernel[axis]

    def taps(out: int) -> set[int]:
        return {out * g.stride[axis] - g.padding[axis] + g.dilation[axis] * i for i in range(k)}

    want = [o for o in range(outputs) if taps(o) & set(range(*span))]
    first, last = readers(span, axis, problem)
    assert set(want) <= set(range(first, last)), "every output that reads the span is among its readers"
    if first < last:
        reached = set().union(*(taps(o) for o in range(first, last)))
        low, high = read((first, last), axis, problem)
        assert (min(reached) + g.padding[axis], max(reached) + g.padding[axis] + 1) == (low, high)


def test_the_pairs_follow_from_their_parts(monkeypatch):
    by_name = {i.name: i for i in kernels.implementations("srm_conv2d")}
    neurons, convs = (kernels.implementations(o) for o in ("srm_neuron", "conv_backward"))
    assert set(by_name) >= {f"{n.name}+{c.name}" for n in neurons for c in convs}
    assert {i.name for i in kernels.implementations("srm_linear")} >= {n.name for n in neurons}
    assert kernels.baseline("srm_conv2d").name == BASELINE["srm_conv2d"]
    assert kernels.baseline("srm_linear").name == BASELINE["srm_linear"]
    assert by_name["torch_eager+aten"].default and not by_name["torch_eager+torch_unfold"].default
    assert by_name["native_compact+native_event"].default and by_name["native+aten"].device == "cpu"
    monkeypatch.setattr(kernels.get("conv_backward", "aten"), "reason", "not today: come tomorrow", raising=False)
    fresh = type(by_name["torch_eager+aten"])()
    assert not fresh.available and fresh.reason == "conv_backward aten: not today: come tomorrow"
    mixed = by_name["native+cupy_event"]
    assert not mixed.default and not mixed.available


def test_a_plugins_neuron_becomes_layers_by_itself(tmp_path, monkeypatch):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from spikemark.kernels import implementation\n"
        "from spikemark.kernels.srm_neuron.torch_eager import TorchEager\n"
        "@implementation('srm_neuron', device='cpu', dtypes=('float32',))\n"
        "class MyNeuron:\n"
        "    '''Mine.'''\n"
        "    forward = TorchEager.forward\n"
        "    backward = TorchEager.backward\n"
        "    def unsupported(self, problem, phase, dtype):\n"
        "        return 'no backward here' if phase == 'backward' else None\n"
    )
    for operator in registry.OPERATORS:  # else modules imported meanwhile would be lost with the copies
        registry.implementations(operator)
    for name in ("_classes", "_instances"):
        held = getattr(registry, name)
        copy = {k: dict(v) if isinstance(v, dict) else v for k, v in held.items()}
        monkeypatch.setattr(registry, name, copy)
    kernels.load_plugin(plugin)
    layer = kernels.get("srm_conv2d", "my_neuron+aten")
    assert (layer.device, layer.dtypes, layer.default, layer.source) == ("cpu", ("float32",), True, "plug-in mine.py")
    assert kernels.get("srm_linear", "my_neuron").available
    assert judged("srm_conv2d", layer, "step", CONV).ok
    assert layer.unsupported(CONV, "forward", "float32") is None
    assert layer.unsupported(CONV, "step", "float32") == "srm_neuron my_neuron: no backward here"


def test_saved_tensors_are_named():
    found = definition("srm_conv2d")
    inputs = found.make_inputs(CONV, "forward", torch.float32, "cpu", 0)
    call = found.bind(kernels.get("srm_conv2d", BASELINE["srm_conv2d"]), "forward", inputs, CONV)
    spikes = call.call(call.prepare())
    saved = {t.untyped_storage().data_ptr() for t in call.saved(spikes)}
    known = [*inputs.tensors.values(), spikes]
    assert {t.untyped_storage().data_ptr() for t in known} < saved and len(saved) == len(known) + 2


def test_cost_is_counted_by_hand():
    problem = Problem("t", "conv", 2, 3, (4, 5, 5), (6, 3, 3), PARAMS, ConvGeometry(), (3, 3), 0.1)
    given_, fired, weights = 2 * 3 * 100, 2 * 3 * 54, 6 * 4 * 9
    slopes = int(2 * 0.1 * fired)
    forward = definition("srm_conv2d").cost("forward", problem, torch.float32, 0.1)
    assert forward.bytes == 4 * (given_ + weights + fired + slopes)
    assert forward.operations == round(2 * 0.1 * 6 * 9 * 6 * 4 * 9) + 10 * fired
    backward = definition("srm_conv2d").cost("backward", problem, torch.float32, 0.1)
    assert backward.bytes == 4 * (fired + slopes + 2 * given_ + 2 * weights) + fired // 8
    step = definition("srm_conv2d").cost("step", problem, torch.float32, 0.1)
    assert (step.bytes, step.operations) == (
        forward.bytes + backward.bytes,
        forward.operations + backward.operations,
    )


def test_the_tap_sum_is_the_convolution():
    found = definition("srm_conv2d")
    x, w = torch.randn(3, 4, 7, 6, dtype=torch.float64), torch.randn(2, 4, 3, 3, dtype=torch.float64)
    problem = dataclasses.replace(CONV, geometry=ConvGeometry((2, 1), (1, 2), (1, 1), 1))
    padded = torch.nn.functional.pad(x, (2, 2, 1, 1))[None]
    torch.testing.assert_close(found._tap_current(x, w, problem), convolved(padded, w, problem.geometry)[0])

"""``clamped_sign``: every available implementation against the specification and its faults; its gate."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from layouts import expanded, is_new_contiguous, same_bits, same_values, sum_gradient, unchanged
from spikemark import kernels
from spikemark.kernels.definition import definition
from spikemark.kernels.types import Problem

OPERATOR = "clamped_sign"
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NAMES = [i.name for i in kernels.implementations(OPERATOR, device="cpu")]
DEFINITION = definition(OPERATOR)
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=NAMES)
def sign(request: pytest.FixtureRequest):
    found = kernels.get(OPERATOR, request.param)
    if not found.available:
        pytest.skip(found.reason)
    return found


def test_both_kinds_are_there():
    assert {"torch", "native"} <= set(NAMES)
    assert kernels.baseline(OPERATOR).name == "torch"


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_by_hand(sign, dtype):
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([-INF, -2.0, -1.0, -tiny, -0.0, 0.0, NAN, tiny, 0.5, 1.0, 3.0, INF], dtype=torch.float64).to(dtype)
    with unchanged(x):
        got = sign.forward(x)
    want = torch.tensor([-1.0, -1, -1, -1, 0, 0, NAN, 1, 1, 1, 1, 1]).to(dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    near = 1 + torch.finfo(dtype).eps
    grad = torch.tensor([-INF, -near, -1.0, -0.75, -0.0, 0.0, NAN, 0.25, 1.0, near, 9.0, INF], dtype=torch.float64)
    grad = grad.to(dtype)
    with unchanged(grad):
        got = sign.backward(grad)
    want = torch.tensor([-1.0, -1, -1, -0.75, 0, 0, NAN, 0.25, 1, 1, 1, 1]).to(dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert is_new_contiguous(got, grad)


def test_the_smallest_numbers_have_a_sign(sign):
    x = torch.tensor([5e-324, -5e-324], dtype=torch.float64)
    assert sign.forward(x).tolist() == [1.0, -1.0]
    bits = torch.tensor([1, -32767], dtype=torch.int16)  # the smallest subnormal numbers of both signs
    for dtype in (torch.float16, torch.bfloat16):
        assert sign.forward(bits.view(dtype)).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rank", [3, 4, 5, 6])
def test_any_layout_gives_the_contiguous_result(sign, dtype, rank):
    x = torch.randn((3, 2, 5, 2, 3, 2)[:rank]).mul_(2).to(dtype)
    for call in (sign.forward, sign.backward):
        want = call(x)
        for label, view in same_values(x):
            with unchanged(view):
                got = call(view)
            assert same_bits(got, want), label
            assert is_new_contiguous(got, view), label
        for label, view in [*expanded(x), ("sum().backward()", sum_gradient(x))]:
            with unchanged(view):
                assert same_bits(call(view), call(view.contiguous())), label


@pytest.mark.parametrize("elements", [1, 2, 15, 17, 16383, 16384, 16385, 40000])
@pytest.mark.parametrize("shape", [(-1,), (1, 1, -1), (-1, 1, 1)])
def test_sizes_around_a_piece_of_work(sign, elements, shape):
    x = torch.randn(elements, generator=torch.Generator().manual_seed(elements)) * 2
    for view in (x.reshape(shape), torch.stack([x, x], -1)[..., 0].reshape(shape)):
        assert torch.equal(sign.forward(view).flatten(), (x > 0).float() - (x < 0).float())
        assert torch.equal(sign.backward(view).flatten(), x.clamp(-1, 1))


@pytest.mark.parametrize("shape", [(0,), (0, 3, 2), (2, 0, 2), (2, 3, 0), (2, 3, 0, 4, 4)])
def test_empty(sign, shape):
    assert sign.forward(torch.ones(shape)).shape == shape
    assert sign.backward(torch.ones(shape)).shape == shape


def test_no_axes(sign):
    assert sign.forward(torch.tensor(-3.0)).item() == -1
    assert sign.backward(torch.tensor(-3.0)).item() == -1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64])
def test_other_dtypes_are_a_type_error_that_names_the_argument(sign, dtype):
    with pytest.raises(TypeError, match=r"^x must be"):
        sign.forward(torch.ones(2, dtype=dtype))
    with pytest.raises(TypeError, match=r"^grad must be"):
        sign.backward(torch.ones(2, dtype=dtype))


PROBLEM = Problem("t/linear", "linear", 3, 7, (11,), (50,), spike_rate=0.2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("limit", [None, 100, 1])
def test_the_gate_passes_right_results_and_only_those(sign, dtype, phase, limit):
    inputs = DEFINITION.make_inputs(PROBLEM, phase, dtype, "cpu", 3)
    assert abs(inputs.spike_rate - 0.2) < 0.05
    call = DEFINITION.bind(sign, phase, inputs, PROBLEM)
    outputs = call.outputs(call.call(call.prepare()))
    want = DEFINITION.reference(phase, inputs, PROBLEM, limit)
    found = DEFINITION.compare(phase, outputs, want, inputs, PROBLEM)
    assert found.ok and found.max_error == 0, found
    (name, good), *_ = outputs.items()
    for at in (0, -1):
        bad = good.clone()
        bad.view(-1)[at] += 0.01
        assert not DEFINITION.compare(phase, {name: bad}, want, inputs, PROBLEM).ok
    assert not DEFINITION.compare(phase, {name: good.flatten()}, want, inputs, PROBLEM).ok


@pytest.mark.parametrize("rate", [0.0, 0.005, 0.35, 1.0])
def test_the_share_above_zero_is_what_was_asked_for(rate):
    problem = dataclasses.replace(PROBLEM, spike_rate=rate, out_shape=(5000,))
    inputs = DEFINITION.make_inputs(problem, "forward", torch.float32, "cpu", 0)
    x = inputs.tensors["x"]
    assert inputs.spike_rate == float((x > 0).double().mean())
    assert abs(inputs.spike_rate - rate) <= 0.004
    assert bool((x == 0).any()) == (0 < rate < 1)
    again = DEFINITION.make_inputs(problem, "forward", torch.float32, "cpu", 0)
    assert torch.equal(x, again.tensors["x"])
    assert not torch.equal(x, DEFINITION.make_inputs(problem, "forward", torch.float32, "cpu", 1).tensors["x"])


def test_cost_is_counted_by_hand():
    assert DEFINITION.cost("forward", PROBLEM, torch.float32, 0.2).bytes == 3 * 7 * 50 * 8
    assert DEFINITION.cost("backward", PROBLEM, torch.float16, 0.2).bytes == 3 * 7 * 50 * 4

"""``adjusted_avg_pool2d``: every available implementation against the specification and its thirteen faults."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import expanded, is_new_contiguous, same_bits, same_values, sum_gradient, unchanged
from spikemark import kernels
from spikemark.kernels.adjusted_avg_pool2d import reference
from spikemark.kernels.definition import definition
from spikemark.kernels.types import Problem

OPERATOR = "adjusted_avg_pool2d"
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NAMES = [i.name for i in kernels.implementations(OPERATOR, device="cpu")]
DEFINITION = definition(OPERATOR)


@pytest.fixture(params=NAMES)
def pool(request: pytest.FixtureRequest):
    found = kernels.get(OPERATOR, request.param)
    if not found.available:
        pytest.skip(found.reason)
    return found


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=2 * torch.finfo(got.dtype).eps, atol=1e-30)


def test_both_kinds_are_there():
    assert {"torch", "native"} <= set(NAMES)
    assert kernels.baseline(OPERATOR).name == "torch"


def test_hand_computed(pool):
    x = torch.tensor([[1.0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 1]])[None, None, None]
    y = pool.forward(x, (2, 2))
    assert y.tolist() == [[[[[0.5, 0.0], [1.0, 0.25]]]]]
    grad = torch.tensor([[[[[3.0, 5.0], [7.0, 11.0]]]]])
    got = pool.backward(grad, y, x.shape, (2, 2))
    # grad / n for n spikes in the window; a silent window gives 0.
    want = [[1.5, 1.5, 0, 0], [1.5, 1.5, 0, 0], [1.75, 1.75, 11, 11], [1.75, 1.75, 11, 11]]
    assert got[0, 0, 0].tolist() == want


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_limit_of_k_plus_1(pool, dtype):
    # K = 4: 1/out > 5 is dropped. 0.1875 and 0.21875 are exact in every dtype; 1/0.1875 = 5.33, 1/0.21875 = 4.57.
    y = torch.tensor([0.1875, 0.21875, 0.0, -0.0, -0.5, 2.0, float("inf"), float("nan"), 1e-4]).to(dtype)
    y = y.reshape(1, 1, 1, 1, -1)
    grad = torch.full_like(y, 2.0)
    got = pool.backward(grad, y, (1, 1, 1, 2, 18), (2, 2))[0, 0, 0]
    # -1/0 is -inf, which is not above the limit: the specification keeps it.
    want = torch.tensor(
        [0.0, 2 / 0.21875 / 4, 0.0, -torch.inf, -1.0, 0.25, 0.0, torch.nan, 0.0], dtype=torch.float64
    ).to(dtype)
    for row in got:
        torch.testing.assert_close(
            row, want.repeat_interleave(2), equal_nan=True, rtol=2 * torch.finfo(dtype).eps, atol=0.0
        )
    torch.testing.assert_close(
        reference.backward(grad, y, (1, 1, 1, 2, 18), (2, 2))[0, 0, 0, 0].to(dtype), got[0], equal_nan=True
    )


def test_fractions_and_negative_values_as_inputs(pool):
    x = torch.tensor([[0.25, 0.5, -1.0, 0.0], [0.25, 0.5, 0.0, -1.0]])[None, None, None]
    y = pool.forward(x, 2)
    assert y.flatten().tolist() == [0.375, -0.5]
    got = pool.backward(torch.full_like(y, 3.0), y, x.shape, 2)
    assert got[0, 0, 0, 0].tolist() == [2.0, 2.0, -1.5, -1.5]
    nan = torch.tensor([[float("nan"), 0.0], [0.0, 0.0]])[None, None, None]
    assert pool.forward(nan, 2).isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [(7, 9), (2, 2), (3, 5), (1, 4), (31, 33)])
def test_every_size_and_dtype(pool, dtype, size):
    x = (torch.rand((2, 3, 5, *size), generator=torch.Generator().manual_seed(1)) < 0.3).to(dtype)
    for kernel in ((2, 2), (3, 2), (2, 3), (4, 4), (1, 5), (1, 1)):
        y = pool.forward(x, kernel)
        assert y.dtype == dtype and y.shape == (2, 3, 5, size[0] // kernel[0], size[1] // kernel[1])
        close(y, reference.forward(x, kernel))
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        got = pool.backward(grad, y, x.shape, kernel)
        assert got.dtype == dtype and got.shape == x.shape
        close(got, reference.backward(grad, y, x.shape, kernel))
        # A remainder row or column lies outside every window.
        assert not got[..., y.shape[-2] * kernel[0] :, :].any() and not got[..., y.shape[-1] * kernel[1] :].any()


@pytest.mark.parametrize("shape", [(6, 6), (3, 6, 6), (2, 3, 6, 6), (2, 2, 2, 3, 6, 6)])
def test_any_leading_axes(pool, shape):
    x = torch.rand(shape)
    y = pool.forward(x, 3)
    close(y, reference.forward(x, (3, 3)))
    close(pool.backward(x[..., :2, :2], y, shape, 3), reference.backward(x[..., :2, :2], y, shape, (3, 3)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_any_layout_gives_the_contiguous_result(pool, dtype):
    x = (torch.rand(3, 4, 5, 6, 7) * 3).round().div(3).to(dtype)
    want = pool.forward(x, (2, 3))
    grad = torch.randn(want.shape).to(dtype)
    want_grad = pool.backward(grad, want, x.shape, (2, 3))
    for label, view in same_values(x):
        with unchanged(view):
            got = pool.forward(view, (2, 3))
        assert same_bits(got, want), label
        assert is_new_contiguous(got, view), label
    for (label, one), (_, other) in zip(same_values(grad), same_values(want), strict=True):
        for g, y in ((one, want), (grad, other), (one, other)):
            with unchanged(g, y):
                got = pool.backward(g, y, x.shape, (2, 3))
            assert same_bits(got, want_grad), label
            assert is_new_contiguous(got, g, y), label


def test_a_tensor_of_one_element_is_not_returned_itself(pool):
    x = torch.ones(1, 1, 1, 1, 1)
    y = pool.forward(x, 1)
    assert is_new_contiguous(y, x) and is_new_contiguous(pool.backward(x, y, x.shape, 1), x, y)


def test_expanded_inputs_and_gradients(pool):
    x = (torch.rand(2, 3, 4, 5, 6) < 0.4).float()
    for label, view in expanded(x):
        with unchanged(view):
            assert same_bits(pool.forward(view, 2), pool.forward(view.contiguous(), 2)), label
    y = pool.forward(x, 2)
    for label, view in [*expanded(torch.randn(y.shape)), ("sum().backward()", sum_gradient(y))]:
        with unchanged(view):
            got = pool.backward(view, y, x.shape, 2)
        assert same_bits(got, pool.backward(view.contiguous(), y, x.shape, 2)), label


@pytest.mark.parametrize("shape", [(0, 3, 2, 4, 4), (2, 0, 2, 4, 4), (2, 3, 0, 4, 4), (2, 3, 2, 0, 4), (2, 3, 2, 4, 0)])
def test_empty(pool, shape):
    x = torch.ones(shape)
    y = pool.forward(x, 2)
    assert y.shape == (*shape[:3], shape[3] // 2, shape[4] // 2)
    assert pool.backward(torch.ones(y.shape), y, shape, 2).shape == shape


def test_smaller_than_the_kernel(pool):
    y = pool.forward(torch.ones(1, 1, 1, 3, 1), 2)
    assert y.shape == (1, 1, 1, 1, 0)
    assert pool.backward(y, y, (1, 1, 1, 3, 1), 2).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64])
def test_other_dtypes_are_a_type_error_that_names_the_argument(pool, dtype):
    bad, good = torch.ones(1, 1, 1, 2, 2, dtype=dtype), torch.ones(1, 1, 1, 2, 2)
    with pytest.raises(TypeError, match=r"^x must be"):
        pool.forward(bad, 2)
    with pytest.raises(TypeError, match=r"^grad must be"):
        pool.backward(bad, good, (1, 1, 1, 4, 4), 2)
    with pytest.raises(TypeError, match=r"^y must be"):
        pool.backward(good, bad, (1, 1, 1, 4, 4), 2)
    with pytest.raises(TypeError, match=r"^grad must have y's dtype"):
        pool.backward(good.double(), good, (1, 1, 1, 4, 4), 2)


@pytest.mark.parametrize("kernel", [0, -1, (2, 0), (2,), (2, 2, 2), (2.0, 2), True])
def test_bad_kernels(pool, kernel):
    with pytest.raises(ValueError, match="kernel must be"):
        pool.forward(torch.ones(1, 1, 1, 4, 4), kernel)


def test_shapes_that_do_not_belong_together(pool):
    y = torch.ones(1, 1, 1, 2, 2)
    with pytest.raises(ValueError, match=r"grad must have shape \[1, 1, 1, 2, 2\]"):
        pool.backward(torch.ones(1, 1, 1, 2, 3), y, (1, 1, 1, 4, 4), 2)
    with pytest.raises(ValueError, match="y must have shape"):
        pool.backward(torch.ones(1, 1, 1, 2, 3), y, (1, 1, 1, 4, 6), 2)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(*[st.integers(0, 4)] * 3, *[st.integers(0, 12)] * 2),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    rate=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_against_the_reference(shape, kernel, rate, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand(shape, generator=generator) < rate).float()
    for found in kernels.implementations(OPERATOR, device="cpu"):
        if found.available:
            y = found.forward(x, kernel)
            close(y, reference.forward(x, kernel))
            grad = torch.randn(y.shape, generator=generator)
            close(found.backward(grad, y, shape, kernel), reference.backward(grad, y, shape, kernel))


PROBLEM = Problem("t/pool", "pool", 3, 4, (5, 9, 7), (5, 4, 3), kernel=(2, 2), spike_rate=0.2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("limit", [None, 300, 1])
def test_the_gate_passes_right_results_and_only_those(pool, dtype, phase, limit):
    inputs = DEFINITION.make_inputs(PROBLEM, phase, dtype, "cpu", 3)
    assert abs(inputs.spike_rate - 0.2) < 0.05
    call = DEFINITION.bind(pool, phase, inputs, PROBLEM)
    outputs = call.outputs(call.call(call.prepare()))
    want = DEFINITION.reference(phase, inputs, PROBLEM, limit)
    found = DEFINITION.compare(phase, outputs, want, inputs, PROBLEM)
    assert found.ok and found.checked and (limit is None) == (found.checked == found.total), found
    (name, good), *_ = outputs.items()
    for at in (0, -1):  # the ends are always in the sample (the last position of backward lies in a remainder)
        bad = good.clone()
        bad.view(-1)[at] += 0.25
        assert not DEFINITION.compare(phase, {name: bad}, want, inputs, PROBLEM).ok
    assert not DEFINITION.compare(phase, {name: good[:-1]}, want, inputs, PROBLEM).ok
    assert not DEFINITION.compare(phase, {}, want, inputs, PROBLEM).ok
    assert not DEFINITION.compare(phase, {name: good.to(torch.complex64)}, want, inputs, PROBLEM).ok
    assert not DEFINITION.compare(phase, {name: torch.full_like(good, torch.nan)}, want, inputs, PROBLEM).ok


@pytest.mark.parametrize("rate", [0.0, 1.0])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_gate_at_both_ends(pool, phase, rate):
    problem = dataclasses.replace(PROBLEM, spike_rate=rate)
    inputs = DEFINITION.make_inputs(problem, phase, torch.float32, "cpu", 0)
    assert inputs.spike_rate == rate
    call = DEFINITION.bind(pool, phase, inputs, problem)
    found = DEFINITION.compare(
        phase, call.outputs(call.call(None)), DEFINITION.reference(phase, inputs, problem), inputs, problem
    )
    assert found.ok, found.reason


def test_a_mean_on_the_limit_may_fall_on_either_side_but_nowhere_else():
    problem = dataclasses.replace(PROBLEM, batch=1, time_steps=1, in_shape=(1, 2, 2), out_shape=(1, 1, 1))
    inputs = DEFINITION.make_inputs(problem, "backward", torch.float32, "cpu", 0)
    inputs.tensors["y"].fill_(0.2)  # 1/out = K + 1 within rounding
    want = DEFINITION.reference("backward", inputs, problem)
    grad = inputs.tensors["grad"]
    for factor, ok in ((0.0, True), (1.25, True), (1.2, False), (0.6, False)):
        got = {"grad_x": (grad * factor).expand(1, 1, 1, 2, 2).clone()}
        assert DEFINITION.compare("backward", got, want, inputs, problem).ok == ok, factor


def test_cost_is_counted_by_hand():
    # 3*4*5 planes of 9x7 = 63 positions, of which 8x6 = 48 lie in 12 windows.
    assert DEFINITION.cost("forward", PROBLEM, torch.float32, 0.2).bytes == 60 * (48 + 12) * 4
    assert DEFINITION.cost("backward", PROBLEM, torch.float16, 0.2).bytes == 60 * (12 + 12 + 63) * 2

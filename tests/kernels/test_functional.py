"""The differentiable functions: right gradients through autograd, what is saved, in-place safety, clear errors."""

from __future__ import annotations

import pytest
import torch
from layouts import sum_gradient, unchanged
from spikemark import kernels
from spikemark.kernels.functional import usable
from spikemark.kernels.srm_neuron import reference

PARAMS = kernels.SrmParams(tau_m=7, tau_s=4, tau_g=3.5)
# torch_compile compiles for a minute in these many shapes and dtypes: it trains in test_layers_training.py.
NEURONS = [i.name for i in kernels.implementations("srm_neuron", device="cpu") if i.name != "torch_compile"]
SIMPLE = [
    (name, i.name)
    for name in ("adjusted_avg_pool2d", "clamped_sign")
    for i in kernels.implementations(name, device="cpu")
]


def available(operator: str, name: str) -> str:
    found = kernels.get(operator, name)
    if not found.available:
        pytest.skip(found.reason)
    return name


def make_current(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 4 + 1).to(dtype)


@pytest.mark.parametrize("name", NEURONS)
def test_the_neurons_gradient_is_grad_w(name):
    available("srm_neuron", name)
    current = make_current(2, 9, 5).requires_grad_()
    spikes = kernels.srm_neuron(current, PARAMS, implementation=name)
    want = reference.forward(current, PARAMS)
    assert torch.equal(spikes, want.spikes) and 0 < spikes.mean() < 1
    grad = torch.randn(spikes.shape, dtype=spikes.dtype)
    with unchanged(grad, current):
        spikes.backward(grad)
    grad_w, grad_t = reference.backward(grad, want.spikes, want.delta_u, want.delta_ut, PARAMS)
    torch.testing.assert_close(current.grad, grad_w, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(grad_w, grad_t)


@pytest.mark.parametrize("name", NEURONS)
def test_sum_backward_and_default_parameters(name):
    available("srm_neuron", name)
    current = make_current(2, 9, 5).requires_grad_()
    spikes = kernels.srm_neuron(current, implementation=name)
    spikes.sum().backward()
    want = reference.forward(current, kernels.SrmParams())
    grad_w, _ = reference.backward(sum_gradient(spikes), want.spikes, want.delta_u, want.delta_ut, kernels.SrmParams())
    torch.testing.assert_close(current.grad, grad_w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NEURONS)
def test_what_is_saved_is_the_state_and_nothing_twice(name):
    implementation = kernels.get("srm_neuron", available("srm_neuron", name))
    current = make_current(2, 9, 5).requires_grad_()
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        spikes = kernels.srm_neuron(current, PARAMS, implementation=name)
    want = implementation.forward(current.detach(), PARAMS).for_backward()
    assert [(t.shape, t.dtype) for t in packed] == [(t.shape, t.dtype) for t in want]
    owners = [t.untyped_storage().data_ptr() for t in packed]
    assert len(set(owners)) == len(owners)
    assert current.untyped_storage().data_ptr() not in owners
    dense = [t for t in packed if t.shape == spikes.shape and torch.equal(t, spikes)]
    assert all(t.untyped_storage().data_ptr() == spikes.untyped_storage().data_ptr() for t in dense)


@pytest.mark.parametrize("name", NEURONS)
def test_nothing_is_saved_without_a_gradient(name):
    available("srm_neuron", name)
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        assert kernels.srm_neuron(make_current(2, 3, 4), PARAMS, name).grad_fn is None
        with torch.no_grad():
            assert kernels.srm_neuron(make_current(2, 3, 4).requires_grad_(), PARAMS, name).grad_fn is None
    assert not packed


def test_changing_what_was_saved_is_an_error_not_a_wrong_gradient():
    current = make_current(2, 9, 5).requires_grad_()
    spikes = kernels.srm_neuron(current, PARAMS)
    total = (spikes * 2).sum()
    spikes.detach().mul_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    x = torch.rand(1, 1, 1, 4, 4, requires_grad=True)
    y = kernels.adjusted_avg_pool2d(x, 2)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", NEURONS)
def test_changing_the_current_afterwards_changes_nothing(name):
    available("srm_neuron", name)
    current = make_current(2, 9, 5)
    gradients = []
    for spoil in (False, True):
        leaf = current.clone().requires_grad_()
        spikes = kernels.srm_neuron(leaf, PARAMS, name)
        if spoil:
            leaf.detach().fill_(float("nan"))
        spikes.sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_second_derivatives_are_an_error():
    x = torch.rand(1, 2, 3, requires_grad=True)
    for y in (
        kernels.srm_neuron(x * 9, PARAMS),
        kernels.clamped_sign(x * 2),
        kernels.adjusted_avg_pool2d(x * 2, (1, 3)),
    ):
        (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


@pytest.mark.parametrize("name", [n for o, n in SIMPLE if o == "adjusted_avg_pool2d"])
def test_pool_through_autograd(name):
    available("adjusted_avg_pool2d", name)
    x = torch.tensor([[1.0, 0, 0], [1, 0, 1], [1, 1, 1]])[None, None, None].requires_grad_()
    y = kernels.adjusted_avg_pool2d(x, 2, implementation=name)
    saved = [t.untyped_storage().data_ptr() for t in y.grad_fn.saved_tensors]
    (y * 3).sum().backward()
    assert y.item() == 0.5
    assert x.grad[0, 0, 0].tolist() == [[1.5, 1.5, 0], [1.5, 1.5, 0], [0, 0, 0]]
    assert saved == [y.untyped_storage().data_ptr()]


@pytest.mark.parametrize("name", [n for o, n in SIMPLE if o == "clamped_sign"])
def test_sign_through_autograd(name):
    available("clamped_sign", name)
    x = torch.tensor([-2.0, 0.0, 0.5], requires_grad=True)
    y = kernels.clamped_sign(x, implementation=name)
    assert not y.grad_fn.saved_tensors
    (y * torch.tensor([3.0, -3.0, 0.25])).sum().backward()
    assert y.tolist() == [-1, 0, 1] and x.grad.tolist() == [1, -1, 0.25]


def test_errors_name_what_is_wrong(monkeypatch):
    x = torch.rand(1, 2, 3)
    with pytest.raises(KeyError, match=r"unknown implementation 'nativ'.*did you mean 'native'.*torch_eager"):
        kernels.srm_neuron(x, PARAMS, implementation="nativ")
    with pytest.raises(TypeError, match=r"torch_eager.*float32.*got torch\.int64"):
        kernels.srm_neuron(x.long(), PARAMS)
    with pytest.raises(TypeError, match=r"got torch\.bool"):
        kernels.clamped_sign(x.bool())
    found = kernels.get("srm_neuron", "torch_eager")
    monkeypatch.setattr(found, "reason", "no such thing here: install it", raising=False)
    with pytest.raises(RuntimeError, match="'torch_eager' is not available: no such thing here: install it"):
        kernels.srm_neuron(x, PARAMS)
    cpu_only = kernels.get("clamped_sign", "native")
    monkeypatch.setattr(cpu_only, "reason", "", raising=False)
    with pytest.raises(ValueError, match="'native' runs on cpu, not on meta"):
        usable("clamped_sign", "native", torch.empty(2, device="meta"))


def test_autocast_changes_nothing_inside_the_neuron():
    current = make_current(2, 9, 5, dtype=torch.float32).requires_grad_()
    plain = kernels.srm_neuron(current, PARAMS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = kernels.srm_neuron(current, PARAMS)
    assert cast.dtype == torch.float32 and torch.equal(plain, cast)

"""``srm_neuron``: what does not fit is refused in one line; a kernel would read memory that is not its own.

Every implementation but the baseline, those for a GPU through what ``stand_ins`` puts in its place.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from spikemark import kernels
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import SrmParams
from stand_ins import callable_here

PARAMS = SrmParams(tau_m=7.0, tau_s=4.0, tau_g=3.5)
NAMES = [i.name for i in callable_here("srm_neuron") if not i.baseline]
SHAPE = (2, 4, 3, 8)


@pytest.fixture(params=NAMES)
def neuron(request: pytest.FixtureRequest):
    return kernels.get("srm_neuron", request.param)


def made(neuron, shape=SHAPE, dtype=torch.float32) -> SrmState:
    """A state of ``neuron``'s own, with some spikes."""
    return neuron.forward(torch.full(shape, 3.0, dtype=dtype), PARAMS)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_current_without_batch_and_time(neuron, shape):
    with pytest.raises(ValueError, match=r"current must be \[B, T, \*S\], got shape \["):
        neuron.forward(torch.zeros(shape), PARAMS)


@pytest.mark.parametrize(
    "shape", [(3, 4, 3, 8), (2, 12, 3, 8), (2, 4, 3, 80), (1, 4, 3, 8), (2, 4, 3, 5)], ids=str
)  # more samples, steps and neurons than the state has, and fewer
def test_a_gradient_of_another_shape_than_the_state(neuron, shape):
    state = made(neuron)
    with pytest.raises(ValueError, match=r"must be like grad_out|state (is|was made) for"):
        neuron.backward(torch.ones(shape), state, PARAMS)


def test_a_state_of_the_other_kind(neuron):
    compact = made(neuron).delta_u is None
    other = made(kernels.get("srm_neuron", "torch_eager")) if compact else SrmState(torch.ones(SHAPE))
    said = "pack a dense one first" if compact else "a compact state goes to the implementation that made it"
    with pytest.raises(ValueError, match=said):
        neuron.backward(torch.ones(SHAPE), other, PARAMS)


def test_a_state_elsewhere(neuron):
    state = made(neuron)
    if state.saved:
        moved = dataclasses.replace(state, saved={n: t.to("meta") for n, t in state.saved.items()})
    else:
        moved = SrmState(state.spikes, state.delta_u.to("meta"), state.delta_ut)
    if neuron.name == "native_compact":
        pytest.skip("its state is made on the only device it runs on")
    with pytest.raises((ValueError, AssertionError), match="meta"):  # the stand-in for check_device asserts
        neuron.backward(torch.ones(SHAPE), moved, PARAMS)


@pytest.mark.parametrize("held", [torch.float16, torch.float64], ids=str)
def test_a_state_of_another_dtype_gives_the_same_gradients_or_is_refused(neuron, held):
    """The order of compact slopes depends on the dtype: read by another, they are other neurons'."""
    current = torch.randn((2, 9, 40), generator=torch.Generator().manual_seed(0)).mul_(4).to(held)
    grad = torch.ones((2, 9, 40))
    if made(neuron).delta_u is None:
        with pytest.raises(TypeError, match=rf"state was made for {held}, grad_out is torch\.float32"):
            neuron.backward(grad, neuron.forward(current, PARAMS), PARAMS)
        return
    baseline = kernels.get("srm_neuron", "torch_eager")
    state = baseline.forward(current, PARAMS)
    assert 0.05 < state.spikes.mean() < 0.6
    wide = SrmState(*(t.float() for t in state.for_backward()))
    for got, want in zip(neuron.backward(grad, state, PARAMS), baseline.backward(grad, wide, PARAMS), strict=True):
        assert got.dtype == grad.dtype
        torch.testing.assert_close(got, want)

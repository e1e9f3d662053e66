"""Two-layer networks overfit 32 digit images with every neuron and every convolution backward."""

from __future__ import annotations

import itertools

import pytest
import torch
from spikemark import kernels

PARAMS = kernels.SrmParams(tau_m=7, tau_s=4, tau_g=3.5)
STEPS = 5
NEURONS = [i.name for i in kernels.implementations("srm_neuron", device="cpu")]
CONVS = [i.name for i in kernels.implementations("conv_backward", device="cpu")]


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """32 images of 10 classes as spike trains [32, STEPS, 1, 8, 8]: a pixel fires with its brightness' rate."""
    data = pytest.importorskip(
        "sklearn.datasets", reason="scikit-learn is not installed: pip install spikemark[digits]"
    )
    found = data.load_digits()
    images = torch.tensor(found.images[:32], dtype=torch.float32)[:, None, None] / 16
    noise = torch.rand((32, STEPS, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    return (noise < 0.8 * images).float(), torch.tensor(found.target[:32])


def available(operator: str, name: str) -> str:
    found = kernels.get(operator, name)
    if not found.available:
        pytest.skip(found.reason)
    return name


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors here are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def raised(layer: torch.nn.Module, by: float = 0.5) -> torch.nn.Module:
    """``layer`` with weights moved up by some of their deviation.

    An output neuron that never fires has no spike whose time could be learnt.
    """
    with torch.no_grad():
        layer.weight += by * layer.weight.std()
    return layer


def overfit(network: torch.nn.Module, x: torch.Tensor, labels: torch.Tensor, most: int = 200) -> int:
    """Train until every image's own class fires most, and say after how many steps."""
    optimiser = torch.optim.Adam(network.parameters(), lr=0.03)
    for step in range(most):
        counts = kernels.spike_count(network(x))
        if bool((counts.argmax(1) == labels).all()):
            return step
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(counts, labels).backward()
        optimiser.step()
    right = int((counts.argmax(1) == labels).sum())
    raise AssertionError(f"after {most} steps {right} of {len(labels)} images are classified")


@pytest.mark.parametrize("name", NEURONS)
def test_linear_layers_overfit_with_every_neuron(name, digits):
    x, labels = digits
    available("srm_neuron", name)
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Flatten(2),
        raised(kernels.SrmLinear(64, 128, params=PARAMS, neuron=name), 0.25),
        raised(kernels.SrmLinear(128, 10, params=PARAMS, neuron=name)),
    )
    assert overfit(network, x, labels) > 0


@pytest.mark.parametrize("neuron, conv", [("torch_eager", c) for c in CONVS] + [("native_compact", c) for c in CONVS])
def test_convolution_and_pool_overfit_with_every_convolution_backward(neuron, conv, digits):
    x, labels = digits
    available("srm_neuron", neuron), available("conv_backward", conv)
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        kernels.SrmConv2d(1, 8, 3, padding=1, params=PARAMS, neuron=neuron, conv_backward=conv),
        kernels.AdjustedAvgPool2d(2),
        torch.nn.Flatten(2),
        raised(kernels.SrmLinear(128, 10, params=PARAMS, neuron=neuron)),
    )
    assert overfit(network, x, labels) > 0


def test_two_convolutions_overfit_through_the_input_gradient(digits):
    x, labels = digits
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        kernels.SrmConv2d(1, 8, 3, stride=2, padding=1, params=PARAMS, conv_backward="aten"),
        raised(kernels.SrmConv2d(8, 10, 4, params=PARAMS, conv_backward="aten")),
        torch.nn.Flatten(2),
    )
    before = [p.detach().clone() for p in network.parameters()]
    assert overfit(network, x, labels) > 0
    assert all(not torch.equal(a, b) for a, b in itertools.zip_longest(before, network.parameters()))


def test_without_the_turned_sign_the_loss_is_climbed(digits):
    x, labels = digits
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(2), raised(kernels.SrmLinear(64, 10, params=PARAMS)))
    losses = []
    for turned in (True, False):
        spikes = network(x)
        counts = kernels.spike_count(spikes) if turned else spikes.sum(1)
        before = torch.nn.functional.cross_entropy(counts, labels)
        (grad,) = torch.autograd.grad(before, network[1].weight)
        with torch.no_grad():
            held = network[1].weight.clone()
            network[1].weight -= 0.05 * grad / grad.abs().max()
            after = torch.nn.functional.cross_entropy(network(x).sum(1), labels)
            network[1].weight.copy_(held)
        losses.append(float(after - before))
    assert losses[0] < 0 < losses[1]

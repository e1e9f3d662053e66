"""The layers on emulated CUDA implementations: every pair trains as the baseline does, and backward never waits."""

from __future__ import annotations

import itertools

import pytest
import torch
from spikemark import kernels
from spikemark.kernels import functional, layers
from stand_ins import callable_here

PARAMS = kernels.SrmParams(tau_m=7, tau_s=4, tau_g=3.5, grad_scale=0.7)
BASELINE = ("torch_eager", "torch_autograd")
CONVS = ("aten", "cudnn_aten", "cudnn_transpose", "cudnn_frontend", "cupy_event")
NEURONS = ("torch_eager", "cupy_raw", "cupy_vectorized", "cupy_compact")


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """Implementations are used by name although no GPU makes them available."""
    for operator in ("srm_neuron", "conv_backward"):
        callable_here(operator)

    def usable(operator, name, tensor=None):
        return kernels.get(operator, name)

    monkeypatch.setattr(layers, "usable", usable)
    monkeypatch.setattr(functional, "usable", usable)


def spikes(dtype=torch.float32) -> torch.Tensor:
    x = torch.rand((2, 6, 3, 8, 7), generator=torch.Generator().manual_seed(5))
    return (x < 0.4).to(dtype)


def layer(neuron: str, conv: str, dtype=torch.float32) -> kernels.SrmConv2d:
    torch.manual_seed(1)
    return kernels.SrmConv2d(
        3, 8, 3, stride=(2, 1), padding=1, params=PARAMS, neuron=neuron, conv_backward=conv, dtype=dtype
    )


def step(names: tuple[str, str], x: torch.Tensor, dtype=torch.float32):
    """Spikes, gradient of the input and the weight after one step of descent."""
    made, x = layer(*names, dtype), x.clone().requires_grad_()
    optimiser = torch.optim.SGD(made.parameters(), lr=0.1)
    out = made(x)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    out.backward(grad)
    optimiser.step()
    return out.detach(), x.grad, made.weight.detach()


def cudnn_aten_on_cpu(monkeypatch):
    """Its flags have no meaning without cuDNN; what they wrap runs on a CPU too."""
    conv = kernels.get("conv_backward", "cudnn_aten")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    return conv


@pytest.mark.parametrize("names", list(itertools.product(NEURONS, CONVS)), ids="+".join)
def test_any_neuron_with_any_convolution_trains_as_the_baseline(names, monkeypatch):
    cudnn_aten_on_cpu(monkeypatch)
    wanted, got = step(BASELINE, spikes()), step(names, spikes())
    assert torch.equal(got[0], wanted[0]) and 0.02 < wanted[0].mean() < 0.6
    assert not torch.equal(wanted[2], layer(*BASELINE).weight.detach())
    for a, b in zip(got[1:], wanted[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    ran = [kernels.get(o, n).ran for o, n in zip(("srm_neuron", "conv_backward"), names, strict=True)]
    assert all(r for r, n in zip(ran, names, strict=True) if n.startswith(("cupy", "cudnn")))


def forbidden(*arguments, **options):
    raise AssertionError("backward must not read a tensor back from the device")


@pytest.mark.parametrize("names", list(itertools.product(NEURONS[1:], CONVS[2:])), ids="+".join)
def test_backward_reads_nothing_back(names, monkeypatch):
    made, x = layer(*names), spikes().requires_grad_()
    last = kernels.SrmLinear(8, 4, params=PARAMS, neuron=names[0])
    hidden = made(x)
    out = last(kernels.adjusted_avg_pool2d(hidden, 2).mean((3, 4)))
    loss = out.sum()
    for name in ("item", "cpu", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    loss.backward()
    monkeypatch.undo()
    assert made.weight.grad.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("name", NEURONS[1:])
def test_what_a_layer_saves(name):
    """The input, the weight and the neuron's state, each once; compact saves no dense tensor beside the input."""
    made, x = layer(name, "cupy_event"), spikes().requires_grad_()
    out = made(x)
    saved = [t for t in out.grad_fn.saved_tensors if t is not None]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert len(held) == len(saved)
    beside = sum(held.values()) - x.nbytes - made.weight.nbytes
    if name == "cupy_compact":
        rate = out.detach().mean().item()
        assert beside / out.numel() <= 1 / 6 + 8 * rate + 0.1  # a byte for 6 steps, two slopes a spike, offsets
    else:
        assert beside == 3 * out.nbytes


@pytest.mark.parametrize("names", [("cupy_vectorized", "cupy_event"), ("cupy_compact", "cudnn_frontend")], ids="+".join)
def test_autocast_runs_the_kernels_in_its_dtype(names):
    made, x = layer(*names), spikes().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = made(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert kernels.get("srm_neuron", names[0]).ran.endswith("bfloat16_backward")
    assert made.weight.grad.dtype == x.grad.dtype == torch.float32
    _, grad, _ = step(names, spikes(torch.bfloat16), torch.bfloat16)
    assert grad.dtype == torch.bfloat16

"""Layers on a GPU: any pair trains as the baseline, autocast and its gradient scaler, no waiting in backward."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_cases import PARAMS
from spikemark import kernels
from spikemark.kernels import registry

pytestmark = pytest.mark.gpu
NEURONS = [i.name for i in registry.implementations("srm_neuron") if i.runs_on("cuda") and i.name != "torch_compile"]
CONVS = [i.name for i in registry.implementations("conv_backward") if i.runs_on("cuda")]
PAIRS = list(itertools.product(NEURONS, CONVS))


def spikes() -> torch.Tensor:
    x = torch.rand((4, 6, 3, 12, 11), generator=torch.Generator().manual_seed(5))
    return (x < 0.3).float().cuda()


def layer(neuron: str, conv: str) -> kernels.SrmConv2d:
    torch.manual_seed(1)
    made = kernels.SrmConv2d(3, 32, 3, stride=(2, 1), padding=1, params=PARAMS, neuron=neuron, conv_backward=conv)
    return made.cuda()


@pytest.fixture(autouse=True)
def exact():
    """Both layers of a comparison convolve forward by the same algorithm, without TF32."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_any_pair_trains_one_step_as_the_baseline(get, names):
    get("srm_neuron", names[0])
    get("conv_backward", names[1])
    results = []
    for pair in (("torch_eager", "torch_autograd"), names):
        made, x = layer(*pair), spikes().requires_grad_()
        optimiser = torch.optim.SGD(made.parameters(), lr=0.1)
        out = made(x)
        generator = torch.Generator("cuda").manual_seed(2)
        out.backward(torch.randn(out.shape, generator=generator, device="cuda"))
        optimiser.step()
        results.append((out.detach(), x.grad, made.weight.detach()))
    (wanted, grad, weight), (got, got_grad, got_weight) = results
    assert 0.02 < wanted.mean() < 0.6
    # One flipped spike (a potential within rounding of the threshold) changes a few gradients; more is a fault.
    if torch.equal(wanted, got):
        torch.testing.assert_close(got_grad, grad, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(got_weight, weight, rtol=1e-3, atol=1e-4)
    else:
        assert (wanted != got).float().mean() < 1e-3


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_backward_does_not_wait_for_the_device(get, names):
    get("srm_neuron", names[0])
    get("conv_backward", names[1])
    if names[0] in ("torch_eager", "torch_vectorized") or names[1] in ("torch_unfold", "torch_autograd"):
        pytest.skip("pure torch: what torch itself does is not held here")
    made, x = layer(*names), spikes().requires_grad_()
    made(x).sum().backward()
    out = made(x).sum()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_autocast_with_a_gradient_scaler(get, names, dtype):
    get("srm_neuron", names[0])
    get("conv_backward", names[1])
    made, x = layer(*names), spikes().requires_grad_()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**4)
    optimiser = torch.optim.SGD(made.parameters(), lr=0.01)
    before = made.weight.detach().clone()
    with torch.autocast("cuda", dtype=dtype):
        out = made(x)
        assert out.dtype == dtype
        loss = out.float().mean()
    scaler.scale(loss).backward()
    assert made.weight.grad.dtype == x.grad.dtype == torch.float32 and made.weight.grad.isfinite().all()
    scaler.step(optimiser)
    scaler.update()
    assert not torch.equal(made.weight.detach(), before)

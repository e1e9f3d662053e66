"""The layers as modules: exactly section 3 of the specification, with every pair, and good torch citizens."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from layouts import same_values, unchanged
from spikemark import kernels
from spikemark.kernels.conv_backward import reference as conv
from spikemark.kernels.srm_neuron import reference as neuron

PARAMS = kernels.SrmParams(tau_m=7, tau_s=4, tau_g=3.5, grad_scale=0.7)
# torch_compile compiles for a minute in these many shapes and dtypes: it trains in test_layers_training.py.
NEURONS = [
    i.name for i in kernels.implementations("srm_neuron", device="cpu") if i.available and i.name != "torch_compile"
]
CONVS = [i.name for i in kernels.implementations("conv_backward", device="cpu") if i.available]


def fractions(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What a pool of spikes gives: mostly 0, some fractions of different sizes."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return torch.where(x < 0.3, (x * 10).ceil() / 4, 0.0).to(dtype)


def conv_layer(neuron_name: str = "torch_eager", conv_name: str = "torch_autograd", **other) -> kernels.SrmConv2d:
    torch.manual_seed(1)
    options = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": 2, "dtype": torch.float64} | other
    return kernels.SrmConv2d(4, 6, (3, 2), params=PARAMS, neuron=neuron_name, conv_backward=conv_name, **options)


def check_conv(layer: kernels.SrmConv2d, x: torch.Tensor) -> None:
    """Forward and both gradients, each from its own half of the neuron's backward."""
    x = x.clone().requires_grad_()
    spikes = layer(x)
    g, weight = layer.geometry, layer.weight.detach()
    current = F.conv2d(x.detach().flatten(0, 1), weight, None, g.stride, g.padding, g.dilation, g.groups)
    want = neuron.forward(current.unflatten(0, x.shape[:2]), layer.params)
    assert torch.equal(spikes, want.spikes) and 0.02 < spikes.mean() < 0.9
    grad = torch.randn(spikes.shape, dtype=spikes.dtype, generator=torch.Generator().manual_seed(2))
    with unchanged(grad, x, layer.weight):
        spikes.backward(grad)
    grad_w, grad_t = neuron.backward(grad, want.spikes, want.delta_u, want.delta_ut, layer.params)
    folded = x.detach().flatten(0, 1)
    wanted = conv.input_half(grad_t.flatten(0, 1), weight, folded, g, layer.params.grad_scale)
    torch.testing.assert_close(x.grad, wanted.view(x.shape), rtol=1e-9, atol=1e-10)
    wanted = conv.weight_half(grad_w.flatten(0, 1), folded, weight.shape, g)
    torch.testing.assert_close(layer.weight.grad, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("names", list(itertools.product(NEURONS, CONVS)), ids="+".join)
def test_conv2d_is_the_specification_for_every_pair(names):
    dtypes = kernels.get("srm_conv2d", "+".join(names)).dtypes
    assert "float64" in dtypes
    check_conv(conv_layer(*names), fractions(2, 6, 4, 7, 6))


@pytest.mark.parametrize("name", NEURONS)
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("between", [(), (3,)])
def test_linear_is_the_specification(name, mask, between):
    torch.manual_seed(1)
    layer = kernels.SrmLinear(11, 7, params=PARAMS, neuron=name, mask_input=mask, dtype=torch.float64)
    x = fractions(2, 6, *between, 11).requires_grad_()
    spikes = layer(x)
    weight = layer.weight.detach()
    want = neuron.forward(x.detach() @ weight.T, PARAMS)
    assert torch.equal(spikes, want.spikes) and 0.02 < spikes.mean() < 0.9
    grad = torch.randn(spikes.shape, dtype=spikes.dtype, generator=torch.Generator().manual_seed(2))
    with unchanged(grad, x, layer.weight):
        spikes.backward(grad)
    grad_w, grad_t = neuron.backward(grad, want.spikes, want.delta_u, want.delta_ut, PARAMS)
    wanted = (grad_t @ weight) * (x.detach() if mask else 1) * PARAMS.grad_scale
    torch.testing.assert_close(x.grad, wanted, rtol=1e-9, atol=1e-12)
    wanted = torch.einsum("bt...o,bt...i->oi", grad_w, x.detach())
    torch.testing.assert_close(layer.weight.grad, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NEURONS)
def test_any_layout_of_input_and_weight(name):
    x = fractions(2, 5, 4, 6, 6)
    layer = conv_layer(name, padding=1, dilation=1, stride=1)
    want = layer(x)
    for label, view in same_values(x):
        assert torch.equal(layer(view), want), label
    layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    check_conv(layer, x.transpose(3, 4).contiguous().transpose(3, 4))


@pytest.mark.parametrize("name", NEURONS)
def test_empty(name):
    layer = conv_layer(name)
    for shape in ((0, 5, 4, 6, 6), (2, 0, 4, 6, 6)):
        x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad.shape == shape and not layer.weight.grad.any()
    linear = kernels.SrmLinear(4, 3, neuron=name)
    for shape in ((0, 5, 4), (2, 0, 4)):
        x = torch.ones(shape, requires_grad=True)
        linear(x).sum().backward()
        assert x.grad.shape == shape and not linear.weight.grad.any()


def test_pool_module():
    x = fractions(1, 2, 3, 5, 4).float()
    pool = kernels.AdjustedAvgPool2d((2, 3))
    assert torch.equal(pool(x), kernels.adjusted_avg_pool2d(x, (2, 3)))
    assert "(2, 3)" in repr(pool) and not list(pool.parameters())


class Counting:
    """An implementation that counts the calls of the one it wraps."""

    def __init__(self, wrapped):
        self.wrapped, self.calls = wrapped, []

    def __getattr__(self, name):
        found = getattr(self.wrapped, name)
        if name in ("input", "weight", "backward", "forward"):
            self.calls.append(name)
        return found


@pytest.mark.parametrize("frozen", ["weight", "input", "both"])
def test_the_half_that_is_not_needed_is_skipped_and_not_saved_for(frozen, monkeypatch):
    layer, x = conv_layer(), fractions(2, 5, 4, 7, 6)
    counting = Counting(kernels.get("conv_backward", "torch_autograd"))
    monkeypatch.setitem(kernels.registry._instances, ("conv_backward", "torch_autograd"), counting)
    layer.weight.requires_grad_(frozen == "input")
    x.requires_grad_(frozen == "weight")
    spikes = layer(x)
    if frozen == "both":
        assert spikes.grad_fn is None
        return
    saved = {t.untyped_storage().data_ptr() for t in spikes.grad_fn.saved_tensors if t is not None}
    assert x.untyped_storage().data_ptr() in saved
    assert (layer.weight.untyped_storage().data_ptr() in saved) == (frozen == "weight")
    counting.calls.clear()
    spikes.sum().backward()
    assert counting.calls == (["input"] if frozen == "weight" else ["weight"])
    assert (layer.weight.grad is None) == (frozen == "weight") and (x.grad is None) == (frozen == "input")


def test_a_linear_layer_saves_only_what_it_reads():
    x = fractions(2, 5, 11, dtype=torch.float32).requires_grad_()
    layer = kernels.SrmLinear(11, 7, params=PARAMS, mask_input=False)
    layer.weight.requires_grad_(False)
    saved = {t.untyped_storage().data_ptr() for t in layer(x).grad_fn.saved_tensors if t is not None}
    assert x.untyped_storage().data_ptr() not in saved  # no product with the input, no gradient of the weight


@pytest.mark.parametrize("name", NEURONS)
def test_nothing_is_saved_twice_in_a_network(name):
    network = torch.nn.Sequential(
        kernels.SrmConv2d(2, 4, 3, padding=1, params=PARAMS, neuron=name),
        kernels.SrmConv2d(4, 4, 3, padding=1, params=PARAMS, neuron=name),
    )
    x = fractions(2, 5, 2, 6, 6, dtype=torch.float32)
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        middle = network[0](x)
        out = network[1](middle)
    # The first layer's spikes are its own state and the second layer's input: one storage, whoever saves it.
    shared = [t for t in packed if t.shape == middle.shape and torch.equal(t, middle)]
    assert shared and {t.untyped_storage().data_ptr() for t in shared} == {middle.untyped_storage().data_ptr()}
    owners: dict[int, set] = {}
    for t in packed:
        owners.setdefault(t.untyped_storage().data_ptr(), set()).add((t.shape, t.dtype))
    assert all(len(views) == 1 for views in owners.values())
    # Beside input, weights and spikes nothing as large as the current is kept unless the neuron's state is dense.
    state = kernels.get("srm_neuron", name).forward(torch.randn(out.shape), PARAMS)
    known = {t.untyped_storage().data_ptr() for t in (x, middle, out, *network.parameters())}
    others = [t for t in packed if t.untyped_storage().data_ptr() not in known and t.shape == out.shape]
    assert len(others) == 2 * sum(t is not state.spikes and t.shape == out.shape for t in state.for_backward())


def test_in_place_change_of_the_output_or_input_is_an_error():
    layer, x = conv_layer(), fractions(2, 5, 4, 7, 6)
    for change in ("output", "input"):
        leaf = x.clone()
        spikes = layer(leaf)
        (spikes if change == "output" else leaf).mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            spikes.sum().backward()


def test_no_synchronisation(monkeypatch):
    def forbidden(self, *_, **__):
        raise AssertionError("a tensor's value was read back from its device")

    # What is written for the CPU alone may look at its own memory; the rest, and the layers, also run on a GPU.
    pairs = [
        (n, c)
        for n, c in itertools.product(NEURONS, CONVS)
        if kernels.get("srm_neuron", n).device == kernels.get("conv_backward", c).device == "any"
    ]
    assert len(pairs) >= 3
    layers = [
        (conv_layer(n, c), kernels.SrmLinear(6, 5, params=PARAMS, neuron=n, dtype=torch.float64)) for n, c in pairs
    ]
    x = fractions(2, 5, 4, 7, 6).requires_grad_()
    for name in ("item", "cpu", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    for layer, last in layers:
        last(kernels.adjusted_avg_pool2d(layer(x), 2).mean((3, 4))).sum().backward()
    monkeypatch.undo()
    assert all(layer.weight.grad.isfinite().all() for layer, _ in layers)


def test_module_state_copies_and_moves():
    layer = conv_layer("torch_eager", "aten")
    assert list(layer.state_dict()) == ["weight"]
    other = conv_layer("torch_eager", "aten")
    torch.nn.init.zeros_(other.weight)
    other.load_state_dict(layer.state_dict())
    x = fractions(2, 5, 4, 7, 6)
    assert torch.equal(other(x), layer(x))
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x)) and twin.weight.data_ptr() != layer.weight.data_ptr()
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), layer(x))
    assert layer.to(torch.float32)(x.float()).dtype == torch.float32
    assert layer.to("meta").weight.is_meta
    text = repr(conv_layer())
    for part in ("4, 6", "kernel_size=(3, 2)", "groups=2", "tau_m=7", "'torch_eager'", "'torch_autograd'"):
        assert part in text
    assert "11, 7" in repr(kernels.SrmLinear(11, 7, mask_input=False)) and "mask_input=False" in repr(
        kernels.SrmLinear(11, 7, mask_input=False)
    )


@pytest.mark.parametrize("fan_in", [9, 100, 1152])
def test_initial_weights_make_the_layer_fire(fan_in):
    torch.manual_seed(0)
    layer = kernels.SrmLinear(fan_in, 200, params=kernels.SrmParams(7, 4, 3.5))
    rate = float(layer((torch.rand(4, 12, fan_in) < 0.1).float()).detach().mean())
    assert 0.04 < rate < 0.2


def test_autocast_trains_in_the_narrow_dtype_with_wide_weights():
    layer = kernels.SrmConv2d(2, 4, 3, padding=1, params=PARAMS)
    linear = kernels.SrmLinear(4, 3, params=PARAMS)
    x = fractions(2, 5, 2, 6, 6, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = layer(x)
        out = linear(hidden.mean((3, 4)))
    assert hidden.dtype == out.dtype == torch.bfloat16
    out.sum().backward()
    assert layer.weight.grad.dtype == x.grad.dtype == linear.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("names", [(NEURONS[0], "torch_autograd"), (NEURONS[-1], "aten")])
def test_narrow_dtypes_run(dtype, names):
    layer = conv_layer(*names, dtype=dtype)
    x = fractions(2, 5, 4, 7, 6, dtype=dtype).requires_grad_()
    spikes = layer(x)
    spikes.sum().backward()
    assert spikes.dtype == x.grad.dtype == layer.weight.grad.dtype == dtype


def test_errors_name_what_is_wrong(monkeypatch):
    with pytest.raises(KeyError, match=r"unknown implementation 'torch_eagre'.*did you mean 'torch_eager'"):
        kernels.SrmConv2d(1, 1, 3, neuron="torch_eagre")
    with pytest.raises(KeyError, match=r"unknown implementation 'atn'.*known: .*torch_autograd"):
        kernels.SrmConv2d(1, 1, 3, conv_backward="atn")
    with pytest.raises(KeyError, match="unknown implementation 'x'"):
        kernels.SrmLinear(1, 1, neuron="x")
    with pytest.raises(KeyError, match="unknown implementation 'x'"):
        kernels.AdjustedAvgPool2d(2, implementation="x")
    monkeypatch.setattr(
        kernels.get("srm_neuron", "native"), "reason", "no C++ compiler found: install g++", raising=False
    )
    with pytest.raises(RuntimeError, match=r"'native' is not available: no C\+\+ compiler found: install g\+\+"):
        kernels.SrmLinear(1, 1, neuron="native")
    for arguments in ((0, 1, 3), (1, 0, 3), (1, 1, 0), (1, 1, (3,)), (True, 1, 3), (1.0, 1, 3)):
        with pytest.raises(ValueError, match="must be an int"):
            kernels.SrmConv2d(*arguments)
    with pytest.raises(ValueError, match="in_channels=3 is not divisible by groups=2"):
        kernels.SrmConv2d(3, 4, 3, groups=2)
    with pytest.raises(TypeError, match="params must be SrmParams, got dict"):
        kernels.SrmLinear(1, 1, params={"tau_m": 5})
    layer = kernels.SrmConv2d(2, 3, 3)
    with pytest.raises(ValueError, match=r"input must be \[B, T, 2, H, W\], got \[2, 5, 3, 6, 6\]"):
        layer(torch.ones(2, 5, 3, 6, 6))
    with pytest.raises(ValueError, match="does not fit an input of"):
        layer(torch.ones(2, 5, 2, 2, 6))
    with pytest.raises(TypeError, match=r"input is torch\.float64 but weight is torch\.float32"):
        layer(torch.ones(2, 5, 2, 6, 6, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"input must be .* got torch\.int64"):
        layer(torch.ones(2, 5, 2, 6, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"input must be \[B, T, \*, 4\], got \[5, 4\]"):
        kernels.SrmLinear(4, 2)(torch.ones(5, 4))

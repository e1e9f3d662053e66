"""Every implementation of the convolution's backward that runs here, against the float64 reference, fault by fault."""

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import expanded, is_new_contiguous, same_bits, same_values, sum_gradient, unchanged
from spikemark import kernels
from spikemark.kernels.conv_backward import reference
from spikemark.kernels.conv_backward.definition import ROUNDINGS, tolerance
from spikemark.kernels.definition import DTYPES, difference
from spikemark.kernels.types import ConvGeometry
from stand_ins import callable_here

IMPLEMENTATIONS = callable_here("conv_backward")
SCALE = 0.7
every = pytest.mark.parametrize("conv", IMPLEMENTATIONS, ids=lambda i: i.name)


def make(
    batch=2, steps=3, c=4, size=(7, 6), out=6, kernel=(3, 3), geometry=None, rate=0.3, dtype=torch.float32, seed=0
):
    """(grad, weight, x, geometry) with 0/1 spikes; gradients and weights are normal."""
    geometry = geometry or ConvGeometry(padding=1)
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand((batch, steps, c, *size), generator=generator) < rate).to(dtype)
    weight = torch.randn((out, c // geometry.groups, *kernel), generator=generator).to(dtype)
    grad = torch.randn((batch, steps, out, *geometry.output_size(size, kernel)), generator=generator).to(dtype)
    return grad, weight, x, geometry


def flat(tensor):
    return tensor.flatten(0, 1) if tensor.dim() == 5 else tensor


def agrees(name, got, like_shape, want, squares, terms, dtype):
    assert list(got.shape) == list(like_shape), name
    assert got.dtype == dtype and got.is_contiguous(), name
    allowed = tolerance(want, squares, terms, dtype)
    error, bad = difference(
        flat(got) if name == "grad_input" else got, want, allowed, ROUNDINGS * torch.finfo(dtype).eps
    )
    assert not bad, f"{name}: {bad} of {want.numel()} wrong, worst {error:.3g}"


class Same:
    """A tensor that equals and hashes by its values, so that a reference serves all layouts and implementations."""

    def __init__(self, tensor):
        self.tensor = flat(tensor).detach().contiguous()
        self.key = (self.tensor.dtype, tuple(self.tensor.shape), self.tensor.view(torch.uint8).numpy().tobytes())

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return self.key == other.key


@functools.lru_cache(maxsize=512)
def wanted(grad, weight, x, geometry, scale):
    """For each half: the float64 result, the sums of the squared terms, the number of terms."""
    g, w, y = grad.tensor.double(), weight.tensor.double(), x.tensor.double()
    terms = w.shape[0] // geometry.groups * w.shape[2] * w.shape[3]
    return (
        (
            reference.input_half(g, w, y, geometry, scale),
            reference.input_half(g**2, w**2, y**2, geometry, scale**2),
            terms,
        ),
        (
            reference.weight_half(g, y, w.shape, geometry),
            reference.weight_half(g**2, y**2, w.shape, geometry),
            g[:, 0].numel(),
        ),
    )


def check(conv, grad, weight, x, geometry, scale=SCALE):
    """Run both halves, compare them with the reference, and return them."""
    with unchanged(grad, weight, x):
        grad_input = conv.input(grad, weight, x, geometry, grad_scale=scale)
        grad_weight = conv.weight(grad, x, weight.shape, geometry)
    assert is_new_contiguous(grad_input, grad, weight, x) and is_new_contiguous(grad_weight, grad, weight, x)
    (want, squares, terms), (want_w, squares_w, terms_w) = wanted(*map(Same, (grad, weight, x)), geometry, scale)
    agrees("grad_input", grad_input, x.shape, want, squares, terms, x.dtype)
    assert not (grad_input.ne(0) & x.eq(0)).any(), "not exactly 0 at a silent position"
    agrees("grad_weight", grad_weight, weight.shape, want_w, squares_w, terms_w, x.dtype)
    return grad_input, grad_weight


def test_the_required_implementations_are_here():
    names = [i.name for i in kernels.implementations("conv_backward", device="cpu")]
    assert names[0] == "torch_autograd" == kernels.registry.baseline("conv_backward").name
    assert {"torch_autograd", "torch_unfold", "aten", "native_event", "native_auto"} <= set(names)
    for i in kernels.implementations("conv_backward"):
        assert i.available or i.reason, i.name


@every
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_dtypes(conv, dtype):
    if str(dtype).removeprefix("torch.") not in conv.dtypes:
        with pytest.raises(TypeError, match=r"grad_t.*float16"):
            conv.input(*make(dtype=dtype))
        return
    check(conv, *make(batch=2, steps=5, c=5, size=(9, 10), out=7, dtype=dtype))


@every
def test_integers_are_a_type_error_that_names_the_argument(conv):
    grad, weight, x, geometry = make()
    for name, arguments in {
        "grad_t": (grad.int(), weight, x),
        "weight": (grad, weight.int(), x),
        "input": (grad, weight, x.int()),
        "weight is torch.float64 but input": (grad, weight.double(), x),
        "grad_t is torch.float64": (grad.double(), weight, x),
    }.items():
        with pytest.raises(TypeError, match=name):
            conv.input(*arguments, geometry)
    for name, pair in {"grad_w": (grad.long(), x), "input": (grad, x.bool())}.items():
        with pytest.raises(TypeError, match=name):
            conv.weight(*pair, weight.shape, geometry)


@every
def test_shapes_that_do_not_fit_are_named(conv):
    grad, weight, x, geometry = make()
    with pytest.raises(ValueError, match=r"grad_t has shape \[6, 6, 6, 6\], expected \[6, 6, 7, 6\]"):
        conv.input(grad[..., 1:, :], weight, x, geometry)
    with pytest.raises(ValueError, match="input has 3 channels"):
        conv.weight(grad, x[:, :, 1:], weight.shape, geometry)
    with pytest.raises(ValueError, match="not divisible by groups=4"):
        conv.input(grad, weight[:, :1], x, ConvGeometry(padding=1, groups=4))
    with pytest.raises(ValueError, match=r"input must be \[B, T, C, H, W\] or \[N, C, H, W\]"):
        conv.weight(grad, x[0, 0], weight.shape, geometry)
    with pytest.raises(ValueError, match=r"weight must be"):
        conv.weight(grad, x, weight.shape[:3], geometry)


@every
def test_folded_tensors_give_the_same_bits(conv):
    grad, weight, x, geometry = make()
    grad_input, grad_weight = check(conv, grad, weight, x, geometry)
    assert same_bits(conv.input(flat(grad), weight, flat(x), geometry, grad_scale=SCALE), flat(grad_input))
    assert same_bits(conv.weight(flat(grad), flat(x), weight.shape, geometry), grad_weight)


@every
@pytest.mark.parametrize("which", ["grad", "weight", "x"])
def test_any_layout_gives_the_contiguous_result(conv, which):
    named = dict(zip(("grad", "weight", "x", "geometry"), make(out=9), strict=True))
    for label, view in [*same_values(named[which]), *expanded(named[which])]:
        try:
            check(conv, *{**named, which: view}.values())
        except AssertionError as error:
            raise AssertionError(f"{which}: {label}") from error


@every
def test_gradient_of_a_sum_has_stride_zero(conv):
    grad, weight, x, geometry = make()
    ones = sum_gradient(grad)
    got = check(conv, ones, weight, x, geometry)
    dense = check(conv, torch.ones_like(grad), weight, x, geometry)
    for a, b in zip(got, dense, strict=True):
        torch.testing.assert_close(a, b)


@every
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_all_silent_and_all_firing(conv, rate):
    grad_input, grad_weight = check(conv, *make(rate=rate))
    assert bool(grad_input.any()) == bool(grad_weight.any()) == bool(rate)


@every
def test_fractions_are_multiplied_in(conv):
    grad, weight, x, geometry = make()
    x *= torch.randint(1, 5, x.shape, generator=torch.Generator().manual_seed(1)) / 4
    x[0, 0, 0, 0, 0] = -2.5
    check(conv, grad, weight, x, geometry)
    check(conv, grad, weight, x, geometry, scale=1.0)
    assert not conv.input(grad, weight, x, geometry, grad_scale=0.0).any()


@every
def test_one_step(conv):
    check(conv, *make(batch=1, steps=1))


@every
@pytest.mark.parametrize("half", ["batch", "steps", "c", "height", "out"])
def test_empty_tensors_give_empty_or_zero_results(conv, half):
    sizes = {"batch": 2, "steps": 3, "c": 4, "out": 6} | ({half: 0} if half != "height" else {})
    grad, weight, x, geometry = make(**sizes, size=(0 if half == "height" else 5, 5))
    grad_input = conv.input(grad, weight, x, geometry)
    assert grad_input.shape == x.shape and not grad_input.any() and grad_input.dtype == x.dtype
    grad_weight = conv.weight(grad, x, weight.shape, geometry)
    assert grad_weight.shape == weight.shape and not grad_weight.any()


@every
def test_kernel_larger_than_the_input_gives_zeros(conv):
    grad, weight, x = torch.zeros(1, 2, 4, 0, 1), torch.randn(4, 3, 5, 3), torch.ones(1, 2, 3, 4, 3)
    assert not conv.input(grad, weight, x, ConvGeometry()).any()
    assert not conv.weight(grad, x, weight.shape, ConvGeometry()).any()


GEOMETRIES = [
    ((3, 3), ConvGeometry()),
    ((1, 1), ConvGeometry(stride=2)),
    ((3, 3), ConvGeometry(stride=2, padding=1)),
    ((5, 5), ConvGeometry(padding=2)),
    ((3, 2), ConvGeometry(stride=(1, 3), padding=(2, 0), dilation=(2, 1))),
    ((2, 3), ConvGeometry(stride=(3, 2), padding=(0, 4), dilation=(1, 3), groups=2)),
    ((3, 3), ConvGeometry(padding=1, groups=4)),
    ((4, 1), ConvGeometry(padding=(7, 5))),
    ((2, 2), ConvGeometry(stride=4)),
]


@every
@pytest.mark.parametrize(("kernel", "geometry"), GEOMETRIES, ids=str)
def test_geometries(conv, kernel, geometry):
    check(conv, *make(size=(11, 10), out=8, kernel=kernel, geometry=geometry))


@every
@pytest.mark.parametrize("channels", [(1, 1), (3, 15), (2, 33), (17, 40), (5, 100)])
def test_channels_off_every_tile(conv, channels):
    check(conv, *make(batch=1, steps=2, c=channels[0], out=channels[1], size=(5, 13)))


@every
def test_depthwise_and_its_multiplier(conv):
    for out in (6, 12):
        check(conv, *make(c=6, out=out, geometry=ConvGeometry(padding=1, groups=6)))


@every
def test_the_halves_are_different_functions_of_their_gradient(conv):
    """Fault 13: whoever swaps ``grad_w`` and ``grad_t`` must get a different result."""
    grad_w, weight, x, geometry = make()
    grad_t = make(seed=1)[0]
    right = conv.input(grad_t, weight, x, geometry), conv.weight(grad_w, x, weight.shape, geometry)
    swapped = conv.input(grad_w, weight, x, geometry), conv.weight(grad_t, x, weight.shape, geometry)
    for a, b in zip(right, swapped, strict=True):
        assert (a - b).abs().max() > 0.5


@every
def test_called_inside_autograd_and_under_no_grad(conv):
    """A backward calls it with tensors that may require a gradient; nothing of it may enter a graph."""
    grad, weight, x, geometry = make()
    weight.requires_grad_()
    out = conv.input(grad, weight, x, geometry)
    with torch.no_grad():
        assert same_bits(conv.input(grad, weight, x, geometry), out)
        same = conv.weight(grad, x, weight.shape, geometry)
    assert not out.requires_grad and same_bits(conv.weight(grad, x, weight.shape, geometry), same)


pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@every
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_geometry(conv, data):
    groups = data.draw(st.integers(1, 3), label="groups")
    kernel, stride, dilation = (data.draw(pairs, label=label) for label in ("kernel", "stride", "dilation"))
    padding = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 4)), label="padding")
    geometry = ConvGeometry(stride, padding, dilation, groups)
    smallest = [max(1, dilation[i] * (kernel[i] - 1) + 1 - 2 * padding[i]) for i in (0, 1)]
    size = tuple(data.draw(st.integers(n, n + 6)) for n in smallest)
    c, out = (groups * data.draw(st.integers(1, 9), label=label) for label in ("Cin / groups", "Cout / groups"))
    rate = data.draw(st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]), label="rate")
    dtypes = [d for d in (torch.float32, torch.float64) if str(d).removeprefix("torch.") in conv.dtypes]
    dtype = data.draw(st.sampled_from(dtypes), label="dtype")
    check(conv, *make(1, data.draw(st.integers(1, 4)), c, size, out, kernel, geometry, rate, dtype))

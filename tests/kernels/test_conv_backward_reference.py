"""The convolution backward's float64 reference against its definition, and whether the gate tells right from wrong."""

import itertools

import numpy as np
import pytest
import torch
from spikemark import kernels
from spikemark.kernels.conv_backward import reference
from spikemark.kernels.conv_backward.definition import DEFINITION, dense_operations, event_operations, tap_links
from spikemark.kernels.types import ConvGeometry, Problem, Recording

GEOMETRIES = [
    ConvGeometry(),
    ConvGeometry(stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    ConvGeometry(stride=3, padding=(0, 3), groups=2),
    ConvGeometry(padding=(5, 4), groups=4),
]


def small(geometry, kernel=(3, 2), batch=1, time_steps=2, in_shape=(4, 6, 5), out_channels=8, rate=0.4, **more):
    out = geometry.output_size(in_shape[1:], kernel)
    return Problem(
        "test", "conv", batch, time_steps, in_shape, (out_channels, *out), geometry=geometry, kernel=kernel,
        spike_rate=rate, **more,
    )  # fmt: skip


def by_definition(grad, weight, x, geometry):
    """Both halves, one product at a time, from the sentence that defines conv2d; arrays of numpy."""
    grad_in, grad_weight = np.zeros(x.shape), np.zeros(weight.shape)
    outs, per_group = weight.shape[0] // geometry.groups, weight.shape[1]
    for n, o, y, px in itertools.product(*map(range, grad.shape)):
        for c, ky, kx in itertools.product(*map(range, weight.shape[1:])):
            row = y * geometry.stride[0] + ky * geometry.dilation[0] - geometry.padding[0]
            column = px * geometry.stride[1] + kx * geometry.dilation[1] - geometry.padding[1]
            channel = o // outs * per_group + c
            if 0 <= row < x.shape[2] and 0 <= column < x.shape[3]:
                grad_in[n, channel, row, column] += weight[o, c, ky, kx] * grad[n, o, y, px]
                grad_weight[o, c, ky, kx] += x[n, channel, row, column] * grad[n, o, y, px]
    return grad_in, grad_weight


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_reference_is_the_definition(geometry):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand((1, 4, 4, 4), generator=generator, dtype=torch.float64).mul(3).floor() / 2
    weight = torch.randn((4, 4 // geometry.groups, 2, 2), generator=generator, dtype=torch.float64)
    grad = torch.randn((1, 4, *geometry.output_size((4, 4), (2, 2))), generator=generator, dtype=torch.float64)
    grad_in, grad_weight = by_definition(grad.numpy(), weight.numpy(), x.numpy(), geometry)
    got = reference.input_half(grad, weight, x, geometry, 0.7)
    torch.testing.assert_close(got, torch.from_numpy(grad_in) * x * 0.7, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        reference.weight_half(grad, x, weight.shape, geometry), torch.from_numpy(grad_weight), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_reference_is_the_derivative_of_conv2d(geometry):
    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            g = geometry
            return torch.nn.functional.conv2d(x, weight, None, g.stride, g.padding, g.dilation, g.groups)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            grad_weight = reference.weight_half(grad, x, weight.shape, geometry)
            return reference.transposed(grad, weight, x.shape[2:], geometry), grad_weight

    generator = torch.Generator().manual_seed(2)
    x = torch.randn((1, 4, 5, 4), generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn((4, 4 // geometry.groups, 3, 2), generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Layer.apply, (x, weight), fast_mode=True)


@pytest.mark.parametrize("phase", ["input", "weight"])
@pytest.mark.parametrize("groups", [1, 4])
def test_sampled_reference_is_a_part_of_the_whole(phase, groups):
    problem = small(ConvGeometry(padding=1, groups=groups), (3, 3), 3, 4, (8, 6, 6), 8)
    inputs = DEFINITION.make_inputs(problem, phase, torch.float32, "cpu", 0)
    whole = DEFINITION.reference(phase, inputs, problem)
    part = DEFINITION.reference(phase, inputs, problem, limit=100)
    assert 0 < part.values.numel() < whole.values.numel()
    if phase == "input":
        assert {0, 11} <= set(part.frames.tolist()), "the first and the last frame"
        expected = whole.values[part.frames]
    else:
        assert [(int(p[0]), int(p[-1])) for p in part.pairs] == [(0, n - 1) for n in (groups, 8 // groups, 8 // groups)]
        per_group = whole.values.unflatten(0, (groups, -1))
        expected = per_group[part.pairs[0]][:, part.pairs[1]][:, :, part.pairs[2]].flatten(0, 1)
    torch.testing.assert_close(part.values, expected, rtol=1e-12, atol=1e-12)
    assert (part.squares >= 0).all()


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_inputs_have_the_rate_asked_for_and_repeat(rate):
    problem = small(ConvGeometry(padding=1), (3, 3), 2, 5, (8, 9, 9), rate=rate)
    inputs = DEFINITION.make_inputs(problem, "input", torch.float16, "cpu", 3)
    again = DEFINITION.make_inputs(problem, "input", torch.float16, "cpu", 3)
    spikes = inputs.tensors["input"]
    assert inputs.spike_rate == float(spikes.double().mean())
    assert abs(inputs.spike_rate - rate) < (0.03 if 0 < rate < 1 else 1e-12)
    assert ((spikes == 0) | (spikes == 1)).all()
    assert all(torch.equal(inputs.tensors[name], again.tensors[name]) for name in inputs.tensors)
    weight_phase = DEFINITION.make_inputs(problem, "weight", torch.float16, "cpu", 3)
    assert torch.equal(weight_phase.tensors["input"], spikes)
    assert not torch.equal(weight_phase.tensors["grad_w"], inputs.tensors["grad_t"]), "each half has its own gradient"


def test_recording_is_cut_and_repeated_to_the_problem(tmp_path):
    spikes = np.random.default_rng(0).random((2, 3, 4, 6, 5)) < 0.5
    np.savez(tmp_path / "mine.npz", spikes=spikes)
    recording = Recording(str(tmp_path / "mine.npz"), 1)
    problem = small(ConvGeometry(), batch=3, time_steps=2, recording=recording)
    inputs = DEFINITION.make_inputs(problem, "weight", torch.float32, "cpu", 0)
    expected = torch.from_numpy(spikes)[[0, 1, 0], :2].float()
    assert torch.equal(inputs.tensors["input"], expected)
    assert inputs.spike_rate == float(expected.double().mean())
    other = small(ConvGeometry(), in_shape=(4, 5, 5), recording=recording)
    with pytest.raises(ValueError, match=r"mine\.npz has features \[4, 6, 5\], but test takes \[4, 5, 5\]"):
        DEFINITION.make_inputs(other, "weight", torch.float32, "cpu", 0)


def checked(problem, phase, dtype=torch.float32, change=lambda out, inputs: out, limit=None):
    inputs = DEFINITION.make_inputs(problem, phase, dtype, "cpu", 5)
    bound = DEFINITION.bind(kernels.get("conv_backward", "torch_unfold"), phase, inputs, problem)
    out = bound.outputs(bound.call(bound.prepare()))
    out = {name: change(value.clone(), inputs) for name, value in out.items()}
    return DEFINITION.compare(phase, out, DEFINITION.reference(phase, inputs, problem, limit), inputs, problem)


MIDDLE = small(ConvGeometry(padding=1), (3, 3), 4, 6, (4, 16, 16), 6, rate=0.1)


@pytest.mark.parametrize("phase", ["input", "weight"])
def test_gate_passes_what_is_right(phase):
    result = checked(MIDDLE, phase)
    assert result.ok, result.reason
    assert 0 <= result.max_error < 1e-5
    assert result.checked == result.total > 0


def one_event_lost(out, inputs):
    """The weight gradient without one input spike."""
    x = inputs.tensors["input"].clone()
    x.view(-1)[int(x.view(-1).nonzero()[7])] = 0
    return kernels.get("conv_backward", "torch_unfold").weight(inputs.tensors["grad_w"], x, out.shape, MIDDLE.geometry)


def first_silent_is_written(out, inputs):
    out.view(-1)[int((inputs.tensors["input"].view(-1) == 0).nonzero()[-1])] = 1e-30
    return out


def scale_left_out(out, inputs):
    return out / 0.85


def one_is_nan(out, inputs):
    out.view(-1)[int(out.view(-1).nonzero()[0])] = float("nan")
    return out


def last_element_is_wrong(out, inputs):
    out.view(-1)[int(out.view(-1).nonzero()[-1])] += 0.01
    return out


@pytest.mark.parametrize(
    ("phase", "change"),
    [
        ("weight", one_event_lost),
        ("weight", one_is_nan),
        ("weight", last_element_is_wrong),
        ("weight", lambda out, inputs: out.flip(2)),
        ("weight", lambda out, inputs: out.transpose(2, 3)),
        ("weight", lambda out, inputs: out.to(torch.float64)),
        ("weight", lambda out, inputs: out[:-1]),
        ("input", first_silent_is_written),
        ("input", scale_left_out),
        ("input", one_is_nan),
        ("input", last_element_is_wrong),
        ("input", lambda out, inputs: torch.zeros_like(out)),
        ("input", lambda out, inputs: out.half()),
        ("input", lambda out, inputs: None),
    ],
)  # fmt: skip
def test_gate_finds_what_is_wrong(phase, change):
    def changed(out, inputs):
        return change(out, inputs)

    result = checked(MIDDLE, phase, change=changed)
    assert not result.ok
    assert result.reason and "\n" not in result.reason


def test_gate_finds_swapped_halves():
    """A layer that hands ``grad_w`` to the input half: fault 13 of the originals."""
    inputs = {phase: DEFINITION.make_inputs(MIDDLE, phase, torch.float32, "cpu", 5) for phase in DEFINITION.phases}
    conv = kernels.get("conv_backward", "aten")
    t = inputs["input"].tensors
    grad_w = inputs["weight"].tensors["grad_w"]
    swapped = conv.input(grad_w, t["weight"], t["input"], MIDDLE.geometry, 0.85)
    want = DEFINITION.reference("input", inputs["input"], MIDDLE)
    assert not DEFINITION.compare("input", {"grad_input": swapped}, want, inputs["input"], MIDDLE).ok
    swapped = conv.weight(t["grad_t"], t["input"], (6, 4, 3, 3), MIDDLE.geometry)
    want = DEFINITION.reference("weight", inputs["weight"], MIDDLE)
    assert not DEFINITION.compare("weight", {"grad_weight": swapped}, want, inputs["weight"], MIDDLE).ok


def test_cost_counts_every_needed_product_once():
    problem = small(ConvGeometry(stride=(2, 1), padding=(1, 2)), (3, 2), 2, 3)
    out_y, out_x = problem.out_shape[1:]
    ones = torch.ones(1, 1, 6, 5, dtype=torch.float64)
    links = reference.weight_half(torch.ones(1, 1, out_y, out_x), ones, (1, 1, 3, 2), problem.geometry).sum()
    assert tap_links(problem) == links
    dense = 2 * 6 * 8 * 4 * int(links)
    assert dense_operations(problem) == dense
    assert event_operations(problem, 0.25) == dense // 4
    grad, x, weight = 6 * 8 * out_y * out_x, 6 * 4 * 6 * 5, 8 * 4 * 3 * 2
    assert DEFINITION.cost("weight", problem, torch.float32, 0.25).bytes == 4 * (grad + x + weight)
    assert DEFINITION.cost("input", problem, torch.float64, 0.25).bytes == 8 * (grad + 2 * x + weight)
    assert DEFINITION.cost("weight", problem, torch.float32, 0.0).operations == 0
    assert DEFINITION.cost("input", problem, torch.float32, 0.5).operations == dense // 2 + x

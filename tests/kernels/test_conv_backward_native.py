"""The event-driven convolution backward: threads, stages, indices, memory, the choice of ``native_auto``."""

import pytest
import torch
from layouts import same_bits
from spikemark import kernels
from spikemark.kernels.conv_backward import native_event
from spikemark.kernels.conv_backward.definition import DEFINITION
from spikemark.kernels.types import ConvGeometry, Problem

EVENT = kernels.get("conv_backward", "native_event")
AUTO = kernels.get("conv_backward", "native_auto")
ATEN = kernels.get("conv_backward", "aten")
pytestmark = pytest.mark.skipif(not EVENT.available, reason=EVENT.reason)


def make(n, c, out, size, geometry, rate, dtype=torch.float32, kernel=(3, 3)):
    generator = torch.Generator().manual_seed(3)
    x = (torch.rand((n, c, *size), generator=generator) < rate).to(dtype)
    weight = torch.randn((out, c // geometry.groups, *kernel), generator=generator).to(dtype)
    grad = torch.randn((n, out, *geometry.output_size(size, kernel)), generator=generator).to(dtype)
    return grad, weight, x, geometry


def both(conv, grad, weight, x, geometry):
    return conv.input(grad, weight, x, geometry), conv.weight(grad, x, weight.shape, geometry)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "case",
    [
        (8, 20, 72, (16, 16), ConvGeometry(padding=1), 0.1),
        (30, 1, 15, (28, 28), ConvGeometry(), 0.2),
        (16, 16, 16, (17, 18), ConvGeometry(stride=2, padding=1, groups=4), 0.5),
        (6, 24, 40, (15, 14), ConvGeometry(padding=2, dilation=2), 0.3, torch.float64),
    ],
    ids=str,
)
def test_same_bits_on_any_number_of_threads_and_every_time(threads, case):
    arguments = make(*case)
    results = []
    for count in (1, 2, 3, 5, 2):
        threads(count)
        assert native_event._threads(arguments[0], arguments[2]) > 1 or count == 1, "too small to use threads"
        results.append(both(EVENT, *arguments))
    for other in results[1:]:
        assert same_bits(other[0], results[0][0]) and same_bits(other[1], results[0][1])


def test_more_frames_than_one_stage_and_slice():
    """The gradient is laid out in stages of 8 MB and slices of 256 KB: cross both."""
    arguments = make(40, 3, 64, (32, 32), ConvGeometry(padding=1), 0.02)
    assert arguments[0].nbytes > 8 << 20
    for got, want in zip(both(EVENT, *arguments), both(ATEN, *arguments), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_frame_larger_than_a_slice():
    arguments = make(2, 2, 32, (60, 61), ConvGeometry(padding=1), 0.05)
    for got, want in zip(both(EVENT, *arguments), both(ATEN, *arguments), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_unevenly_spread_spikes():
    """Memory for lists is sized by the fullest piece: one full plane among silent ones."""
    grad, weight, x, geometry = make(6, 70, 8, (20, 20), ConvGeometry(padding=1), 0.0)
    x[4, 69] = 1
    x[0, 0, 0, 0] = 1
    for got, want in zip(both(EVENT, grad, weight, x, geometry), both(ATEN, grad, weight, x, geometry), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_offsets_do_not_overflow_32_bits():
    offset = native_event._function("offset", "pllll")
    strides = (3 * 2**31, 2**32 + 1, 2**20, 5)
    got = offset(native_event._longs(strides), 7, 11, 13 * 100 + 17, 100)
    assert got == 7 * strides[0] + 11 * strides[1] + 13 * strides[2] + 17 * strides[3]
    assert got > 2**32


def test_workspace_of_a_huge_problem_is_counted_in_64_bits():
    """cifar10-vgg's first layer from B = 1366 on: B * T * D is beyond 2^31. Only the sizes are computed."""
    n = 1366 * 12
    fields = native_event._longs((n, 3, 32, 32, 128, 32, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1))
    counts = torch.full((n * 3,), 100, dtype=torch.int32)
    needed = native_event._function("workspace", "ppiii")
    assert n * 128 * 32 * 32 > 2**31
    for half in (0, 1):
        size = needed(fields, counts.data_ptr(), 4, half, 2)
        assert 2**20 < size < 2**25, "a stage of gradients and the lists of a stage, whatever the batch"
    # One frame beyond what a list's 32-bit cell can name is refused, not cut short.
    fields = native_event._longs((1, 1, 2**16, 2**16, 1, 2**16, 2**16, 1, 1, 1, 1, 0, 0, 1, 1, 1))
    assert needed(fields, counts.data_ptr(), 4, 1, 1) == -1


def test_strided_view_beyond_2_to_the_31_elements():
    """Two frames that lie 2^31 elements apart: most of the memory between them is never touched."""
    apart = 2**31 + 3
    try:
        memory = torch.empty(apart + 5000, dtype=torch.float32)
    except RuntimeError as error:
        pytest.skip(f"no address space for it: {error}")
    far = torch.as_strided(memory, (2, 2, 6, 7), (apart, 42, 7, 1))
    grad, weight, x, geometry = make(2, 2, 2, (6, 7), ConvGeometry(padding=1), 0.4)
    want = both(EVENT, grad, weight, x, geometry)
    far.copy_(x)
    assert all(same_bits(a, b) for a, b in zip(both(EVENT, grad, weight, far, geometry), want, strict=True))
    far.copy_(grad)
    assert all(same_bits(a, b) for a, b in zip(both(EVENT, far, weight, x, geometry), want, strict=True))


def test_nan_spreads_only_where_it_belongs():
    grad, weight, x, geometry = make(1, 2, 4, (6, 6), ConvGeometry(padding=1), 0.5)
    x[0, 1, 2, 3] = float("nan")
    grad_input, grad_weight = both(EVENT, grad, weight, x, geometry)
    assert grad_input.isnan().nonzero().tolist() == [[0, 1, 2, 3]]
    assert grad_weight[:, 1].isnan().all() and not grad_weight[:, 0].isnan().any()


def test_minus_zero_is_silent():
    grad, weight, x, geometry = make(1, 2, 4, (6, 6), ConvGeometry(padding=1), 0.5)
    changed = torch.where(x == 0, -0.0, x)
    for a, b in zip(both(EVENT, grad, weight, changed, geometry), both(EVENT, grad, weight, x, geometry), strict=True):
        assert same_bits(a, b)


def test_auto_takes_the_event_path_when_sparse_and_aten_when_dense():
    for rate, path in ((0.0, "native_event"), (0.05, "native_event"), (0.9, "aten"), (1.0, "aten")):
        arguments = make(2, 4, 6, (9, 9), ConvGeometry(padding=1), rate)
        expected = both({"native_event": EVENT, "aten": ATEN}[path], *arguments)
        assert same_bits(AUTO.input(*arguments), expected[0]) and AUTO.last_path == path
        grad, weight, x, geometry = arguments
        assert same_bits(AUTO.weight(grad, x, weight.shape, geometry), expected[1]) and AUTO.last_path == path
        assert AUTO.density == float(x.double().mean())


@pytest.mark.parametrize("phase", ["input", "weight"])
def test_moved_bytes_are_at_least_the_least(phase):
    problem = Problem("test", "conv", 2, 3, (8, 10, 10), (16, 10, 10), kernel=(3, 3), geometry=ConvGeometry(padding=1))
    for dtype in ("float32", "float64"):
        cost = DEFINITION.cost(phase, problem, getattr(torch, dtype), 0.1).bytes
        for conv in kernels.implementations("conv_backward", device="cpu"):
            moved = conv.moved_bytes(problem, phase, dtype, 0.1)
            assert moved is None or moved >= cost, conv.name
        assert EVENT.moved_bytes(problem, phase, dtype, 0.1) < 1.5 * cost

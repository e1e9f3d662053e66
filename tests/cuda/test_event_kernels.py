"""The event-driven convolution kernels, emulated: any order of threads, slices of frames, offsets past 2^31."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from layouts import same_bits
from spikemark import kernels
from spikemark.kernels.conv_backward import cupy_event
from spikemark.kernels.conv_backward.cupy_event import geometry_scalars
from spikemark.kernels.types import ConvGeometry
from stand_ins import emulator

GEOMETRY = ConvGeometry(padding=1, groups=2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def emulated():
    """The emulator; its order of threads is put back."""
    made = emulator()
    yield made
    made.order = 0


def make(frames, dtype=torch.float32, c=4, out=6, size=(8, 8)):
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand((frames, c, *size), generator=generator) < 0.3).to(dtype)
    weight = torch.randn((out, c // 2, 3, 3), generator=generator).to(dtype)
    return x, weight, torch.randn((frames, out, *size), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_order_of_threads_does_not_matter_and_results_repeat(emulated, dtype):
    x, weight, grad = make(7, dtype, c=10, out=150)
    conv = kernels.get("conv_backward", "cupy_event")
    results = []
    for order in (0, 1, 2, 0):
        emulated.order = order
        results.append((conv.input(grad, weight, x, GEOMETRY), conv.weight(grad, x, weight.shape, GEOMETRY)))
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))
    assert conv.ran == f"event_weight_{str(dtype).removeprefix('torch.')}"


def test_slices_of_frames_add_up(monkeypatch):
    x, weight, grad = make(11, torch.float64)
    conv = kernels.get("conv_backward", "cupy_event")
    wanted = kernels.get("conv_backward", "aten").weight(grad, x, weight.shape, GEOMETRY)
    for blocks in (4, 4 * 3, 4 * 11, 4096):  # 4 blocks a slice: 1, 3, 11 slices
        monkeypatch.setattr(cupy_event, "BLOCKS_WANTED", blocks)
        torch.testing.assert_close(conv.weight(grad, x, weight.shape, GEOMETRY), wanted)
    monkeypatch.setattr(cupy_event, "PARTIAL_LIMIT", 1)  # not even one copy: one slice all the same
    torch.testing.assert_close(conv.weight(grad, x, weight.shape, GEOMETRY), wanted)


def moved(tensor: torch.Tensor, elements: int) -> int:
    return (tensor.data_ptr() - elements * tensor.element_size()) % 2**64


FRAMES = 2**31 // 256 + 3  # of 4 * 8 * 8 inputs; outputs are 6 * 8 * 8


def test_input_half_past_two_to_the_31(emulated):
    x, weight, grad = make(1)
    conv = kernels.get("conv_backward", "cupy_event")
    wanted = conv.input(grad, weight, x, GEOMETRY, grad_scale=0.5)
    rows = grad.permute(0, 2, 3, 1).contiguous()
    back = (FRAMES - 1) * x.numel()
    assert back > 2**31 and back % 128 == 0
    out = torch.empty_like(x)
    at = [moved(x, back), conv._by_input_channel(weight, 2), moved(rows, (FRAMES - 1) * rows.numel()), moved(out, back)]
    scalars = [np.int64(FRAMES * x.numel()), *geometry_scalars(x, grad, (3, 3), GEOMETRY), np.float32(0.5)]
    emulated.launch("event", "event_input_float32", x.numel() // 128, [*at, *scalars], CPU, first=back // 128)
    assert same_bits(out, wanted)


def test_weight_half_past_two_to_the_31(emulated):
    x, weight, grad = make(1)
    conv = kernels.get("conv_backward", "cupy_event")
    wanted = conv.weight(grad, x, weight.shape, GEOMETRY)
    rows = grad.permute(0, 2, 3, 1).contiguous()
    before = FRAMES - 1  # one slice a frame: the last slice is the last frame
    partial = torch.empty((1, 4, 9, 3))
    at = [moved(x, before * x.numel()), moved(rows, before * rows.numel()), moved(partial, before * partial.numel())]
    scalars = [np.int64(FRAMES), np.int64(FRAMES), *geometry_scalars(x, grad, (3, 3), GEOMETRY)]
    emulated.launch("event", "event_weight_float32", 4, [*at, *scalars], CPU, first=4 * before)
    got = partial[0].view(2, 2, 9, 3).permute(0, 3, 1, 2).reshape(weight.shape)
    assert same_bits(got.contiguous(), wanted)

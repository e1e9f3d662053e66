"""Event-driven CUDA kernels for both halves: they do work only where the input spikes."""

from __future__ import annotations

import numpy as np
import torch
from spikemark.kernels.conv_backward._folded import FoldedConvBackward
from spikemark.kernels.cuda import launch
from spikemark.kernels.definition import state_dtype
from spikemark.kernels.registry import implementation
from spikemark.kernels.types import ConvGeometry
from torch import Tensor

SOURCE = "event"
TAPS_PER_BLOCK = 9  # as in event.cu
BLOCKS_WANTED = 4096  # enough to fill the largest GPU several times; more slices only add partial sums
PARTIAL_LIMIT = 256 << 20  # bytes of partial sums at most


def geometry_scalars(input: Tensor, grad: Tensor, kernel: tuple[int, int], g: ConvGeometry) -> list[np.generic]:
    """The convolution's sizes in the order the kernels take them, as 32-bit scalars."""
    values = (*input.shape[1:], *grad.shape[1:], *kernel, *g.stride, *g.padding, *g.dilation, g.groups)
    return [np.int32(v) for v in values]


@implementation("conv_backward", device="cuda", requires="cupy")
class CupyEvent(FoldedConvBackward):
    """Raw CUDA kernels that skip every input that did not spike; sums in a fixed order."""

    graph_capture = True

    def unavailable(self) -> str | None:
        """Whether CuPy matches torch's CUDA."""
        return launch.unavailable()

    def fold_input(
        self, grad: Tensor, weight: Tensor, input: Tensor, geometry: ConvGeometry, grad_scale: float
    ) -> Tensor:
        """One warp for 32 neighbouring inputs; its lanes share the dot product of each that spiked."""
        device = launch.check_device(self.name, grad_t=grad, weight=weight, input=input)
        x = input.contiguous()
        rows = grad.permute(0, 2, 3, 1).contiguous()
        by_channel = self._by_input_channel(weight, geometry.groups)
        out = torch.empty(x.shape, dtype=x.dtype, device=device)
        real = np.float64 if state_dtype(x.dtype) == torch.float64 else np.float32
        sizes = geometry_scalars(x, grad, (weight.shape[2], weight.shape[3]), geometry)
        self.ran = f"event_input_{str(x.dtype).removeprefix('torch.')}"
        arguments: list[launch.Argument] = [x, by_channel, rows, out, np.int64(x.numel()), *sizes, real(grad_scale)]
        launch.launch(SOURCE, self.ran, launch.blocks_for(x.numel()), arguments, device)
        return out

    def fold_weight(self, grad: Tensor, input: Tensor, weight_shape: torch.Size, geometry: ConvGeometry) -> Tensor:
        """One block for one input channel, 128 output channels, nine taps and a slice of the frames."""
        device = launch.check_device(self.name, grad_w=grad, input=input)
        x = input.contiguous()
        rows = grad.permute(0, 2, 3, 1).contiguous()
        frames, channels = x.shape[:2]
        taps, per_group = weight_shape[2] * weight_shape[3], grad.shape[1] // geometry.groups
        blocks = channels * launch.blocks_for(per_group) * launch.blocks_for(taps, TAPS_PER_BLOCK)
        wide = state_dtype(x.dtype)
        copy = channels * taps * per_group * wide.itemsize
        slices = max(1, min(frames, BLOCKS_WANTED // blocks, PARTIAL_LIMIT // copy))
        partial = torch.empty((slices, channels, taps, per_group), dtype=wide, device=device)
        sizes = geometry_scalars(x, grad, (weight_shape[2], weight_shape[3]), geometry)
        self.ran = f"event_weight_{str(x.dtype).removeprefix('torch.')}"
        arguments: list[launch.Argument] = [x, rows, partial, np.int64(frames), np.int64(slices), *sizes]
        launch.launch(SOURCE, self.ran, blocks * slices, arguments, device)
        # [C, taps, O / groups] of one group after the other -> [O, C / groups, kh, kw].
        total = partial.sum(0).view(geometry.groups, channels // geometry.groups, taps, per_group)
        return total.permute(0, 3, 1, 2).reshape(weight_shape).to(x.dtype).contiguous()

    @staticmethod
    def _by_input_channel(weight: Tensor, groups: int) -> Tensor:
        """[O, C / groups, kh, kw] -> [C, kh * kw, O / groups]."""
        outputs, per_group, kh, kw = weight.shape
        grouped = weight.reshape(groups, outputs // groups, per_group, kh * kw)
        return grouped.permute(0, 2, 3, 1).reshape(groups * per_group, kh * kw, outputs // groups).contiguous()

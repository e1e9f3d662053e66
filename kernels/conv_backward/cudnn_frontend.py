"""NVIDIA's Python package over cuDNN's graph interface: dgrad and wgrad, channels-last, plans cached by geometry."""

from __future__ import annotations

import math
import threading

import torch
from spikemark.kernels.conv_backward import _cudnn_graphs as graphs
from spikemark.kernels.conv_backward._folded import FoldedConvBackward
from spikemark.kernels.cuda import launch
from spikemark.kernels.registry import implementation
from spikemark.kernels.types import ConvGeometry, Problem
from torch import Tensor


def channels_last(tensor: Tensor) -> Tensor:
    """[N, C, H, W] -> the same values dense in memory as [N, H, W, C]."""
    return tensor.permute(0, 2, 3, 1).contiguous()


@implementation("conv_backward", device="cuda", dtypes=("float32", "float16", "bfloat16"), requires="cudnn")
class CudnnFrontend(FoldedConvBackward):
    """cuDNN's graph interface (dgrad, wgrad), channels-last: deterministic plans, no TF32, workspace from torch."""

    graph_capture = True
    # What needs a device: the tests put their own here.
    handle = staticmethod(graphs.handle_on)
    on = staticmethod(torch.cuda.device)

    def unavailable(self) -> str | None:
        """Whether the package imports and finds cuDNN."""
        return graphs.missing()

    def unsupported(self, problem: Problem, phase: str, dtype: str) -> str | None:
        """Whether cuDNN has a plan for the problem (it is built here, and kept for the call)."""
        if problem.kernel is None:
            return None
        channels = (problem.out_shape[0], problem.in_shape[0] // problem.geometry.groups)
        frames = problem.batch * problem.time_steps
        shapes = (frames, *problem.in_shape), (*channels, *problem.kernel), (frames, *problem.out_shape)
        if any(math.prod(shape) == 0 for shape in shapes):
            return None  # answered without cuDNN
        half = "dgrad" if phase == "input" else "wgrad"
        convolution = graphs.Convolution(half, *shapes, problem.geometry, getattr(torch, dtype))
        try:
            self._plan(convolution, torch.device("cuda", torch.cuda.current_device()))
        except graphs.NoPlan as error:
            return str(error)
        return None

    def fold_input(
        self, grad: Tensor, weight: Tensor, input: Tensor, geometry: ConvGeometry, grad_scale: float
    ) -> Tensor:
        """dgrad, times the input and the scale."""
        device = launch.check_device(self.name, grad_t=grad, weight=weight, input=input)
        out = self._run("dgrad", grad, weight, tuple(input.shape), tuple(weight.shape), geometry, device)
        result = torch.empty(input.shape, dtype=input.dtype, device=device)
        torch.mul(out.permute(0, 3, 1, 2), input, out=result)
        return result.mul_(grad_scale)

    def fold_weight(self, grad: Tensor, input: Tensor, weight_shape: torch.Size, geometry: ConvGeometry) -> Tensor:
        """wgrad."""
        device = launch.check_device(self.name, grad_w=grad, input=input)
        out = self._run("wgrad", input, grad, tuple(input.shape), tuple(weight_shape), geometry, device)
        return out.permute(0, 3, 1, 2).contiguous()

    def _plan(self, convolution: graphs.Convolution, device: torch.device) -> tuple[graphs.Plan, object]:
        with self.on(device):
            handle = self.handle(device)
            return graphs.plan_for(convolution, device.index, threading.get_ident(), handle), handle

    def _run(
        self,
        half: str,
        first: Tensor,
        second: Tensor,
        input_shape: tuple[int, ...],
        weight_shape: tuple[int, ...],
        geometry: ConvGeometry,
        device: torch.device,
    ) -> Tensor:
        """Execute one half; its result dense as [N, H, W, C] or [O, kh, kw, C]."""
        grad = first if half == "dgrad" else second
        convolution = graphs.Convolution(half, input_shape, weight_shape, tuple(grad.shape), geometry, first.dtype)
        plan, handle = self._plan(convolution, device)
        shape = input_shape if half == "dgrad" else weight_shape
        out = torch.empty((shape[0], *shape[2:], shape[1]), dtype=first.dtype, device=device)
        self.ran = f"cudnn {half} {plan.name} workspace={plan.workspace_bytes}"
        with self.on(device):
            plan.execute(handle, channels_last(first), channels_last(second), out)
        return out

"""``adjusted_avg_pool2d`` as the harness sees it: spikes at a wanted rate, comparison, tolerances, cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from spikemark.kernels.adjusted_avg_pool2d import reference
from spikemark.kernels.adjusted_avg_pool2d.torch_pool import TorchPool
from spikemark.kernels.definition import (
    BoundCall,
    Comparison,
    Cost,
    Definition,
    Inputs,
    check_shape,
    difference,
    state_dtype,
)
from spikemark.kernels.spike_trains import input_spikes
from spikemark.kernels.types import Problem
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """Float64 ``values`` of the planes in ``where`` (indices into the flattened [B * T * C]) and their tolerance.

    ``other`` holds what is as right as ``values``: the two differ in windows whose ``1/out`` is within rounding of
    the limit ``K + 1``, where one is 0 and the other is not.
    """

    where: Tensor
    values: Tensor
    tolerance: Tensor
    other: Tensor


def pick_planes(planes: int, elements: int, limit: int | None) -> Tensor:
    """Indices of the planes (of ``elements`` values each) to compare: all, or a sample with both ends."""
    if limit is None or planes * elements <= limit:
        return torch.arange(planes)
    wanted = max(2, limit // max(1, elements))
    ends = max(1, wanted // 4)
    middle = torch.randint(0, planes, (max(0, wanted - 2 * ends),), generator=torch.Generator().manual_seed(planes))
    return torch.cat([torch.arange(ends), middle, torch.arange(planes - ends, planes)]).unique()


def gather_planes(tensor: Tensor, where: Tensor) -> Tensor:
    """[..., H, W] -> [len(where), H, W] on the CPU."""
    flat = tensor.detach().reshape(math.prod(tensor.shape[:-2]), *tensor.shape[-2:])
    return flat.to("cpu") if where.numel() == flat.shape[0] else flat[where.to(flat.device)].to("cpu")


class AdjustedAvgPool2d(Definition):
    """Forward: spikes -> means. Backward: gradient and saved means -> gradient shared by the spikes of the window."""

    name = "adjusted_avg_pool2d"

    def make_inputs(self, problem: Problem, phase: str, dtype: torch.dtype, device: str, seed: int) -> Inputs:
        """Spikes ``x`` [B, T, C, H, W]; for backward their means ``y`` (of ``torch``) and a normal ``grad``."""
        x, rate = input_spikes(problem, dtype, device, seed)
        if phase == "forward":
            return Inputs({"x": x}, rate)
        y = TorchPool().forward(x, self._kernel(problem))
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        grad = torch.randn(y.shape, generator=generator, device=device).to(dtype)
        return Inputs({"grad": grad, "y": y}, rate)

    @staticmethod
    def _kernel(problem: Problem) -> tuple[int, int]:
        if problem.kernel is None:
            raise ValueError(f"workload {problem.workload} has no pooling kernel")
        return problem.kernel

    def bind(self, implementation: Any, phase: str, inputs: Inputs, problem: Problem) -> BoundCall:
        """The call of one phase; what a layer saves for backward is the pooled output."""
        kernel, tensors = self._kernel(problem), inputs.tensors
        if phase == "forward":
            x = tensors["x"]
            return BoundCall(
                call=lambda _: implementation.forward(x, kernel), outputs=lambda y: {"y": y}, saved=lambda y: [y]
            )
        grad, y = tensors["grad"], tensors["y"]
        shape = (problem.batch, problem.time_steps, *problem.in_shape)
        return BoundCall(
            call=lambda _: implementation.backward(grad, y, shape, kernel), outputs=lambda g: {"grad_x": g}
        )

    def reference(self, phase: str, inputs: Inputs, problem: Problem, limit: int | None = None) -> Reference:
        """Float64 planes: all, or a sample of about ``limit`` input elements."""
        kernel, tensors = self._kernel(problem), inputs.tensors
        leading = problem.batch * problem.time_steps * problem.in_shape[0]
        where = pick_planes(leading, math.prod(problem.in_shape[-2:]), limit)
        picked = {name: gather_planes(tensor, where) for name, tensor in tensors.items()}
        dtype = next(iter(tensors.values())).dtype
        eps, k = torch.finfo(state_dtype(dtype)).eps, kernel[0] * kernel[1]
        if phase == "forward":
            # A sum of K terms in any order errs by less than K roundings of the sum of their sizes.
            want = reference.forward(picked["x"], kernel)
            return Reference(where, want, k * eps * reference.forward(picked["x"].abs(), kernel), want)
        shape = (len(where), *problem.in_shape[-2:])
        want = reference.backward(picked["grad"], picked["y"], shape, kernel)
        near = ((1.0 / picked["y"].double()) - (k + 1)).abs() <= 4 * eps * (k + 1)
        other = want
        if near.any():
            # In these windows, move the mean across the limit, by more than any rounding and less than any tolerance.
            y = picked["y"].double()
            side = torch.where(1.0 / y > k + 1, 1 + 8 * eps, 1 - 8 * eps)
            moved = reference.backward(picked["grad"], y * side, shape, kernel)
            spread = torch.zeros(shape, dtype=torch.bool)
            h, w = near.shape[-2] * kernel[0], near.shape[-1] * kernel[1]
            spread[:, :h, :w] = near.repeat_interleave(kernel[0], 1).repeat_interleave(kernel[1], 2)
            other = torch.where(spread, moved, want)
        # A reciprocal, a division and a product: one rounding each. (16: beside a limit the mean was moved by 8.)
        size = torch.maximum(want.abs(), other.abs())
        return Reference(where, want, 16 * eps * torch.nan_to_num(size, nan=0.0, posinf=0.0), other)

    def compare(
        self, phase: str, outputs: dict[str, Tensor], reference: Any, inputs: Inputs, problem: Problem
    ) -> Comparison:
        """Every sampled element within its tolerance plus one rounding to the dtype."""
        given = next(iter(inputs.tensors.values()))
        name = "y" if phase == "forward" else "grad_x"
        shape = problem.out_shape if phase == "forward" else problem.in_shape
        like = torch.empty((problem.batch, problem.time_steps, *shape), device="meta")
        wrong = check_shape(name, outputs.get(name), like, given.dtype, given.device)
        if wrong:
            return Comparison(False, wrong)
        got = gather_planes(outputs[name], reference.where)
        want, other = reference.values, reference.other
        want = torch.where((got.double() - other).abs() < (got.double() - want).abs(), other, want)
        error, bad = difference(got, want, reference.tolerance, torch.finfo(given.dtype).eps)
        text = f"{name}: {bad} of {want.numel()} elements out of tolerance, worst {error:.3g}" if bad else ""
        return Comparison(not bad, text, error, 0, want.numel(), like.numel())

    def cost(self, phase: str, problem: Problem, dtype: torch.dtype, spike_rate: float) -> Cost:
        """Forward: read the windows, write the means. Backward: read means and gradient, write every position."""
        kh, kw = self._kernel(problem)
        steps, planes = problem.batch * problem.time_steps, problem.in_shape[0]
        whole = steps * math.prod(problem.in_shape)
        windows = steps * planes * (problem.in_shape[1] // kh) * (problem.in_shape[2] // kw)
        if phase == "forward":
            return Cost((windows * kh * kw + windows) * dtype.itemsize, windows * kh * kw)
        return Cost((2 * windows + whole) * dtype.itemsize, 3 * windows)


DEFINITION = AdjustedAvgPool2d()

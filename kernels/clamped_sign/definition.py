"""``clamped_sign`` as the harness sees it: inputs with a wanted share of +1, exact comparison, cost."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import torch
from spikemark.kernels.clamped_sign import reference
from spikemark.kernels.definition import BoundCall, Comparison, Cost, Definition, Inputs, check_shape, difference
from spikemark.kernels.types import Problem
from torch import Tensor

ZERO_EVERY = 97  # one element in so many is exactly 0 (unless the rate is at an end), where the sign has its own value


class ClampedSign(Definition):
    """Forward: x -> sign(x). Backward: gradient -> clamped gradient. ``spike_rate`` is the share of x above 0."""

    name = "clamped_sign"

    def make_inputs(self, problem: Problem, phase: str, dtype: torch.dtype, device: str, seed: int) -> Inputs:
        """Normal ``x`` [B, T, *out_shape] shifted so that ``spike_rate`` of it is positive; a normal ``grad``."""
        shape = (problem.batch, problem.time_steps, *problem.out_shape)
        generator = torch.Generator(device=device).manual_seed(seed)
        x = torch.randn(shape, generator=generator, device=device)
        rate = problem.spike_rate
        if phase == "backward":
            # Nothing of x is saved: the gradient is all there is, a third of it beyond the clamp.
            return Inputs({"grad": x.to(dtype)}, rate)
        if rate <= 0 or rate >= 1:
            x = x.abs().add_(0.01) * (1 if rate >= 1 else -1)
        else:
            kept = min(1.0 - 1e-9, rate / (1 - 1 / ZERO_EVERY))
            x.add_(NormalDist().inv_cdf(kept)).view(-1)[::ZERO_EVERY] = 0.0
        x = x.to(dtype)
        achieved = int((x > 0).sum()) / x.numel() if x.numel() else 0.0
        return Inputs({"x": x}, achieved)

    def bind(self, implementation: Any, phase: str, inputs: Inputs, problem: Problem) -> BoundCall:
        """The call of one phase."""
        if phase == "forward":
            x = inputs.tensors["x"]
            return BoundCall(call=lambda _: implementation.forward(x), outputs=lambda y: {"y": y})
        grad = inputs.tensors["grad"]
        return BoundCall(call=lambda _: implementation.backward(grad), outputs=lambda g: {"grad_x": g})

    def reference(self, phase: str, inputs: Inputs, problem: Problem, limit: int | None = None) -> Any:
        """``(flat positions or None for all, float64 values there)``."""
        given = next(iter(inputs.tensors.values()))
        where = None
        if limit is not None and given.numel() > limit:
            ends = max(1, limit // 4)
            middle = torch.randint(
                0, given.numel(), (max(0, limit - 2 * ends),), generator=torch.Generator().manual_seed(given.numel())
            )
            where = torch.cat([torch.arange(ends), middle, torch.arange(given.numel() - ends, given.numel())])
            given = given.reshape(-1)[where.to(given.device)]
        return where, reference.forward(given) if phase == "forward" else reference.backward(given)

    def compare(
        self, phase: str, outputs: dict[str, Tensor], reference: Any, inputs: Inputs, problem: Problem
    ) -> Comparison:
        """Equal: neither the sign nor a clamp rounds, so there is no tolerance."""
        given = next(iter(inputs.tensors.values()))
        name = "y" if phase == "forward" else "grad_x"
        wrong = check_shape(name, outputs.get(name), given, given.dtype, given.device)
        if wrong:
            return Comparison(False, wrong)
        where, want = reference
        got = outputs[name]
        if where is not None:
            got = got.reshape(-1)[where.to(got.device)]
        error, bad = difference(got, want, 0.0, 0.0)
        text = f"{name}: {bad} of {want.numel()} elements differ, worst by {error:.3g}" if bad else ""
        return Comparison(not bad, text, error, 0, want.numel(), given.numel())

    def cost(self, phase: str, problem: Problem, dtype: torch.dtype, spike_rate: float) -> Cost:
        """Read one tensor, write one; one operation an element."""
        elements = problem.batch * problem.time_steps
        for n in problem.out_shape:
            elements *= n
        return Cost(2 * elements * dtype.itemsize, elements)


DEFINITION = ClampedSign()

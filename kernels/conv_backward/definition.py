"""``conv_backward`` as the harness sees it: spikes at a wanted rate, comparison, tolerance with its reason, cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from spikemark.kernels.conv_backward import reference
from spikemark.kernels.conv_backward._folded import fold
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
from spikemark.kernels.spike_trains import random_spikes
from spikemark.kernels.types import Problem, Recording
from torch import Tensor

GRADIENTS = {"input": "grad_t", "weight": "grad_w"}
ROUNDINGS = 4  # to the stored dtype: the sum, the product with the input, the product with the scale, and one spare
DEVIATIONS = 8.0  # see ``tolerance``
SAMPLE_OPERATIONS = 150_000_000  # multiply-adds of a sampled float64 reference: about a tenth of a second
CHECK_ELEMENTS = 1 << 22  # elements that the check for exact zeros looks at in one go


@dataclass(frozen=True)
class Reference:
    """Float64 ``values`` at the output elements that ``frames`` (input) or ``pairs`` (weight) pick, and how far off
    a float result may be there.

    ``squares`` is the sum of the squared terms of each element. ``frames`` indexes the folded [B*T] axis. ``pairs``
    are indices of groups, output channels and input channels within a group.
    """

    values: Tensor
    squares: Tensor
    frames: Tensor | None = None
    pairs: tuple[Tensor, Tensor, Tensor] | None = None


def weight_shape(problem: Problem) -> tuple[int, int, int, int]:
    """[Cout, Cin / groups, kh, kw] of a convolution."""
    assert problem.kernel is not None
    return (problem.out_shape[0], problem.in_shape[0] // problem.geometry.groups, *problem.kernel)


def recorded_spikes(recording: Recording, problem: Problem, dtype: torch.dtype, device: str) -> Tensor:
    """A recording as [B, T, C, H, W]: its first samples and steps, repeated from the start where it is shorter.

    Raises ``ValueError`` naming the file if its feature shape is not the problem's.
    """
    from spikemark.kernels.recording import load

    spikes = load(recording.path, recording.time_axis)
    if tuple(spikes.shape[2:]) != tuple(problem.in_shape):
        raise ValueError(
            f"spike file {recording.path} has features {list(spikes.shape[2:])}, "
            f"but {problem.workload} takes {list(problem.in_shape)}"
        )
    for axis, wanted in ((0, problem.batch), (1, problem.time_steps)):
        if spikes.shape[axis] != wanted:
            spikes = spikes.index_select(axis, torch.arange(wanted) % spikes.shape[axis])
    return spikes.to(device=device, dtype=dtype)


def spread(size: int, count: int) -> Tensor:
    """At most ``count`` indices into ``range(size)``, evenly spread, the first and the last among them."""
    count = max(1 if size == 1 else 2, min(size, count))
    return torch.linspace(0, size - 1, count, dtype=torch.float64).round().long().unique() if size else torch.arange(0)


def tap_links(problem: Problem) -> int:
    """How many (output position, kernel tap) pairs read inside the input rather than its padding."""
    assert problem.kernel is not None
    links = 1
    for axis in (0, 1):
        g, size, out = problem.geometry, problem.in_shape[1 + axis], problem.out_shape[1 + axis]
        links *= sum(
            0 <= y * g.stride[axis] + k * g.dilation[axis] - g.padding[axis] < size
            for k in range(problem.kernel[axis])
            for y in range(out)
        )
    return links


def dense_operations(problem: Problem) -> int:
    """Additions and multiplications of either half computed for every input position, without the padding's."""
    out_channels, in_channels, _, _ = weight_shape(problem)
    return 2 * problem.batch * problem.time_steps * out_channels * in_channels * tap_links(problem)


def event_operations(problem: Problem, spike_rate: float) -> int:
    """The same where only the ``spike_rate`` of positions that are not 0 is worked on."""
    return round(dense_operations(problem) * spike_rate)


def tolerance(want: Tensor, squares: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """How far a correct result of ``dtype`` may be from ``want``: a sum of ``terms`` products, in any order.

    Each of n additions rounds its partial sum by at most u (half an eps of the dtype that sums). The partial sums of
    products with a zero-mean gradient are a random walk: about sqrt(k * q), q the mean squared product, beside a
    drift of at most the result. Independent roundings then add up to a deviation of u * sqrt(n) * (sqrt(Q) + |want|)
    / sqrt(6), Q the sum of the squared products; 8 * sqrt(6), some 20, deviations are allowed. Unlike the worst case
    n * u * sum |a b|, which at n = 100 000 would hide hundreds of lost spikes, this finds a single one.
    A short sum gets its worst case, n roundings. The dtype's smallest step is for results that underflow.
    """
    u = torch.finfo(state_dtype(dtype)).eps / 2
    walk = min(float(max(terms, 1)), DEVIATIONS * math.sqrt(max(terms, 1)))
    info = torch.finfo(dtype)
    return u * walk * (squares.sqrt() + want.abs()) + ROUNDINGS * info.tiny * info.eps


class ConvBackward(Definition):
    """Input half: gradient at the spikes. Weight half: gradient of the weight. Each has its own incoming gradient."""

    name = "conv_backward"

    def make_inputs(self, problem: Problem, phase: str, dtype: torch.dtype, device: str, seed: int) -> Inputs:
        """Spikes (random or recorded), a normal gradient, and normal weights of deviation 1 / sqrt(fan in).

        The two phases get different gradients (``grad_t``, ``grad_w``), as a layer's backward hands them.
        """
        if problem.recording is None:
            shape = (problem.batch, problem.time_steps, *problem.in_shape)
            spikes = random_spikes(shape, problem.spike_rate, device, seed).to(dtype)
        else:
            spikes = recorded_spikes(problem.recording, problem, dtype, device)
        rate = float(torch.count_nonzero(spikes)) / spikes.numel() if spikes.numel() else 0.0
        shape = (problem.batch, problem.time_steps, *problem.out_shape)
        generator = torch.Generator(device=device).manual_seed(seed + (1 if phase == "input" else 2))
        grad = torch.randn(shape, generator=generator, device=device).to(dtype)
        tensors = {GRADIENTS[phase]: grad, "input": spikes}
        if phase == "input":
            w = torch.randn(weight_shape(problem), generator=generator, device=device)
            tensors["weight"] = (w / math.sqrt(max(1, math.prod(w.shape[1:])))).to(dtype)
        return Inputs(tensors, rate)

    def bind(self, implementation: Any, phase: str, inputs: Inputs, problem: Problem) -> BoundCall:
        """One half of the backward on the given tensors; nothing is prepared or saved."""
        t, geometry, scale = inputs.tensors, problem.geometry, problem.params.grad_scale
        if phase == "input":
            return BoundCall(
                call=lambda _: implementation.input(t["grad_t"], t["weight"], t["input"], geometry, scale),
                outputs=lambda result: {"grad_input": result},
            )
        shape = torch.Size(weight_shape(problem))
        return BoundCall(
            call=lambda _: implementation.weight(t["grad_w"], t["input"], shape, geometry),
            outputs=lambda result: {"grad_weight": result},
        )

    def reference(self, phase: str, inputs: Inputs, problem: Problem, limit: int | None = None) -> Reference:
        """All elements in float64, or with ``limit`` whole frames (input) or whole pairs of channels (weight).

        A sample also keeps the work within ``SAMPLE_OPERATIONS`` as far as two frames, or the pairs of the first
        and last channels, allow.
        """
        grad, x = fold("gradient", inputs.tensors[GRADIENTS[phase]]), fold("input", inputs.tensors["input"])
        if phase == "input":
            return self._input_reference(grad, inputs.tensors["weight"], x, problem, limit)
        return self._weight_reference(grad, x, problem, limit)

    @staticmethod
    def _input_reference(grad: Tensor, weight: Tensor, x: Tensor, problem: Problem, limit: int | None) -> Reference:
        frames = torch.arange(x.shape[0])
        if limit is not None and x.numel():
            work = dense_operations(problem) // x.shape[0]  # multiply-adds of values and squares
            frames = spread(x.shape[0], min(limit // x[0].numel(), SAMPLE_OPERATIONS // max(1, work)))
        at = frames.to(x.device)
        part = [t.index_select(0, at).to("cpu", torch.float64) for t in (grad, x)]
        scale = problem.params.grad_scale
        values = reference.input_half(part[0], weight, part[1], problem.geometry, scale)
        squares = reference.input_half(
            part[0].square(), weight.to("cpu", torch.float64).square(), part[1].square(), problem.geometry, scale**2
        )
        return Reference(values, squares, frames=frames)

    @staticmethod
    def _weight_reference(grad: Tensor, x: Tensor, problem: Problem, limit: int | None) -> Reference:
        out_channels, in_channels, kh, kw = weight_shape(problem)
        groups = problem.geometry.groups
        sizes = [groups, out_channels // groups, in_channels]
        picked = [torch.arange(n) for n in sizes]
        total = math.prod(sizes)
        if limit is not None and total:
            work = max(1, dense_operations(problem) // total)  # multiply-adds of values and squares
            pairs = max(1, min(limit // (kh * kw), SAMPLE_OPERATIONS // work))
            if pairs < total:
                side = max(2, math.isqrt(pairs))
                picked[0] = spread(groups, max(2, pairs // (min(side, sizes[1]) * min(side, sizes[2]))))
                picked[1], picked[2] = spread(sizes[1], side), spread(sizes[2], side)
        part = []
        for tensor, channels in ((grad, picked[1]), (x, picked[2])):
            per_group = tensor.unflatten(1, (groups, tensor.shape[1] // groups))
            chosen = per_group.index_select(1, picked[0].to(x.device)).index_select(2, channels.to(x.device))
            part.append(chosen.flatten(1, 2).to("cpu", torch.float64))
        geometry = type(problem.geometry)(**(vars(problem.geometry) | {"groups": len(picked[0])}))
        shape = (len(picked[0]) * len(picked[1]), len(picked[2]), kh, kw)
        values = reference.weight_half(part[0], part[1], shape, geometry)
        squares = reference.weight_half(part[0].square_(), part[1].square_(), shape, geometry)
        return Reference(values, squares, pairs=(picked[0], picked[1], picked[2]))

    def compare(
        self, phase: str, outputs: dict[str, Tensor], reference: Any, inputs: Inputs, problem: Problem
    ) -> Comparison:
        """Within ``tolerance`` where the reference was computed; the input half exactly 0 at every silent position."""
        name, x = f"grad_{phase}", inputs.tensors["input"]
        got = outputs.get(name)
        # A 0-element stand-in gives the wanted shape without memory.
        like = x if phase == "input" else torch.empty((), dtype=x.dtype).expand(weight_shape(problem))
        fault = check_shape(name, got, like, x.dtype, x.device)
        if fault:
            return Comparison(False, fault)
        assert isinstance(got, Tensor)
        want = reference.values
        checked, total = want.numel(), got.numel()
        if phase == "input":
            wrong = nonzero_where_silent(got, x)
            if wrong:
                text = f"{name}: {wrong} of {total} elements are not 0 although the input is 0 there"
                return Comparison(False, text, math.inf, 0, checked, total)
            sample = fold(name, got).index_select(0, reference.frames.to(got.device))
            out_channels, _, kh, kw = weight_shape(problem)
            terms = out_channels // problem.geometry.groups * kh * kw
        else:
            groups, rows, columns = (index.to(got.device) for index in reference.pairs)
            per_group = got.unflatten(0, (problem.geometry.groups, got.shape[0] // problem.geometry.groups))
            sample = per_group.index_select(0, groups).index_select(1, rows).index_select(2, columns).flatten(0, 1)
            terms = problem.batch * problem.time_steps * math.prod(problem.out_shape[1:])
        sample = sample.cpu()
        error, bad = difference(
            sample, want, tolerance(want, reference.squares, terms, x.dtype), ROUNDINGS * torch.finfo(x.dtype).eps
        )
        if bad:
            text = f"{name}: {bad} of {checked} elements out of tolerance, worst {error:.3g}"
            return Comparison(False, text, error, 0, checked, total)
        return Comparison(True, "", error, 0, checked, total)

    def cost(self, phase: str, problem: Problem, dtype: torch.dtype, spike_rate: float) -> Cost:
        """Least traffic: gradient, input and weight once each, whichever are read and written. Least work: the
        event-driven operations at ``spike_rate``, with two multiplications more for each result of the input half."""
        frames = problem.batch * problem.time_steps
        read = frames * (math.prod(problem.in_shape) + math.prod(problem.out_shape))
        spikes = frames * math.prod(problem.in_shape)
        moved = read + math.prod(weight_shape(problem))
        operations = event_operations(problem, spike_rate)
        if phase == "input":
            return Cost((moved + spikes) * dtype.itemsize, operations + round(2 * spikes * spike_rate))
        return Cost(moved * dtype.itemsize, operations)


def nonzero_where_silent(got: Tensor, x: Tensor) -> int:
    """How many elements of ``got`` are not exactly 0 (NaN included) where ``x`` is 0; in blocks, so it stays small."""
    count = 0
    flat_got, flat_x = fold("grad_input", got), fold("input", x)
    step = max(1, CHECK_ELEMENTS // max(1, math.prod(flat_x.shape[1:])))
    for start in range(0, flat_x.shape[0], step):
        a, b = flat_got[start : start + step], flat_x[start : start + step]
        count += int(torch.count_nonzero(a.ne(0) & b.eq(0)))
    return count


DEFINITION = ConvBackward()

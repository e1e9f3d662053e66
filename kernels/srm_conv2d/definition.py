"""``srm_conv2d`` as the harness sees it; ``layer_definition`` and ``layer_gate`` say how it is judged and why."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from spikemark.kernels.conv_backward import reference as conv
from spikemark.kernels.conv_backward.definition import spread, tap_links
from spikemark.kernels.definition import Inputs
from spikemark.kernels.layer_definition import CALIBRATION_CHANNELS, Index, LayerDefinition, Sample, double
from spikemark.kernels.layer_gate import as_stored
from spikemark.kernels.types import ConvGeometry, Problem
from torch import Tensor

BOXES = 3
SAMPLE_OPERATIONS = 150_000_000  # multiply-adds of one float64 pass over a sampled layer: about a tenth of a second
CALIBRATION_SIDE = 8
INPUT_CHANNELS = 4
OUTPUT_CHANNELS = 2  # whose weight gradient is compared in a sampled layer: the first and the last
FRAMES = 32

Span = tuple[int, int]


def readers(span: Span, axis: int, problem: Problem) -> Span:
    """First and last (exclusive) output row (axis 0) or column (1) that reads the input's ``span``."""
    assert problem.kernel is not None
    g = problem.geometry
    reach = g.dilation[axis] * (problem.kernel[axis] - 1)
    first = -((reach - span[0] - g.padding[axis]) // g.stride[axis])
    last = (span[1] - 1 + g.padding[axis]) // g.stride[axis] + 1
    return max(0, first), min(problem.out_shape[1 + axis], last)


def read(span: Span, axis: int, problem: Problem) -> Span:
    """First and last (exclusive) padded input row or column that the output's non-empty ``span`` reads."""
    assert problem.kernel is not None
    g = problem.geometry
    last = (span[1] - 1) * g.stride[axis] + g.dilation[axis] * (problem.kernel[axis] - 1) + 1
    return span[0] * g.stride[axis], last


def unpadded(geometry: ConvGeometry, groups: int | None = None) -> ConvGeometry:
    """``geometry`` without padding, for inputs that carry their padding with them."""
    return ConvGeometry(geometry.stride, 0, geometry.dilation, geometry.groups if groups is None else groups)


def convolved(x: Tensor, weight: Tensor, geometry: ConvGeometry) -> Tensor:
    """Float64 ``conv2d`` of padded ``x`` [n, T, C, h, w]."""
    g = unpadded(geometry)
    out = F.conv2d(x.flatten(0, 1), weight, None, g.stride, g.padding, g.dilation, g.groups)
    return out.unflatten(0, x.shape[:2])


class SrmConv2d(LayerDefinition):
    """Convolution and neuron as one layer."""

    name = "srm_conv2d"

    def weight_shape(self, problem: Problem) -> tuple[int, ...]:
        """[Cout, Cin / groups, kh, kw]."""
        if problem.kernel is None:
            raise ValueError(f"workload {problem.workload} has no convolution kernel")
        return (problem.out_shape[0], problem.in_shape[0] // problem.geometry.groups, *problem.kernel)

    def call(self, implementation: Any, input: Tensor, weight: Tensor, problem: Problem) -> Tensor:
        """Spikes by a pair, or by a plug-in's layer of the same signature."""
        spikes: Tensor = implementation.forward(input, weight, problem.params, problem.geometry)
        return spikes

    def synapses(self, problem: Problem) -> int:
        """Of all frames, without those whose input lies in the padding."""
        channels = math.prod(self.weight_shape(problem)[:2])
        return problem.batch * problem.time_steps * channels * tap_links(problem)

    def calibration_current(self, spikes: Tensor, weight: Tensor, problem: Problem) -> Tensor:
        """Of the first group's first channels in a square in the middle of the first sample."""
        spans = []
        for axis in (0, 1):
            size = problem.out_shape[1 + axis]
            start = max(0, (size - CALIBRATION_SIDE) // 2)
            spans.append((start, min(size, start + CALIBRATION_SIDE)))
        groups = problem.geometry.groups
        count = min(CALIBRATION_CHANNELS, weight.shape[0] // groups)
        part = self._patch(spikes, (0, 1), (spans[0], spans[1]), problem)[:, :, : weight.shape[1]]
        w = weight[:count].to("cpu", torch.float64)
        return convolved(part, w, unpadded(problem.geometry, 1))

    @staticmethod
    def _patch(x: Tensor, samples: Span, out: tuple[Span, Span], problem: Problem) -> Tensor:
        """The padded input, float64, that the outputs ``out`` of some samples read."""
        index: list[slice | Tensor] = [slice(*samples), slice(None), slice(None)]
        padding: list[int] = []
        for axis in (0, 1):
            p, size = problem.geometry.padding[axis], problem.in_shape[1 + axis]
            first, last = (edge - p for edge in read(out[axis], axis, problem))
            index.append(slice(max(0, first), max(0, min(size, last))))
            before = max(0, -first)
            inner = max(0, min(size, last) - max(0, first))
            padding = [before, last - first - before - inner, *padding]
        return F.pad(double(x, tuple(index)), padding)

    def samples(self, phase: str, inputs: Inputs, problem: Problem, limit: int | None) -> list[Sample]:
        """Boxes: whole time courses of all channels at some places. In backward also some output channels at all
        places, because each weight's gradient is a sum over all of them."""
        x, weight = inputs.tensors["input"], inputs.tensors["weight"]
        boxes = self._boxes(phase, problem, limit)
        found = [self._box(phase, x, weight, samples, spans, problem) for samples, spans in boxes]
        if phase != "forward":
            channels = problem.out_shape[0]
            chosen = torch.arange(channels) if limit is None else spread(channels, OUTPUT_CHANNELS)
            width = weight.shape[1]
            columns = torch.arange(width) if limit is None else spread(width, INPUT_CHANNELS)
            group_of = chosen // (channels // problem.geometry.groups)
            for group in group_of.unique():
                found.append(self._channels(chosen[group_of == group], int(group), columns, x, weight, problem))
        return [sample for sample in found if sample is not None]

    def _boxes(self, phase: str, problem: Problem, limit: int | None) -> list[tuple[Span, tuple[Span, Span]]]:
        """Samples and spans of rows and columns: of outputs in forward, of inputs whose gradient is compared else."""
        shape = problem.out_shape if phase == "forward" else problem.in_shape
        height, width = shape[1:]
        if not problem.batch * problem.time_steps * math.prod(shape):
            return []
        site = problem.time_steps * shape[0]
        if limit is None or problem.batch * site * height * width <= limit:
            return [((b, b + 1), ((0, height), (0, width))) for b in range(problem.batch)]
        side = max(1, math.isqrt(max(1, limit // (BOXES * site))))
        while side > 1 and BOXES * self._box_work(phase, side, problem) > SAMPLE_OPERATIONS:
            side -= 1
        rows, columns = min(side, height), min(side, width)
        count = max(BOXES, min(problem.batch, limit // (site * rows * columns)))
        if count * self._box_work(phase, side, problem) > SAMPLE_OPERATIONS:
            count = BOXES
        generator = torch.Generator().manual_seed(problem.batch * height * width)

        def place(size: int, span: int) -> Span:
            start = int(torch.randint(0, size - span + 1, (1,), generator=generator))
            return start, start + span

        ends = [
            ((0, 1), ((0, rows), (0, columns))),
            ((problem.batch - 1, problem.batch), ((height - rows, height), (width - columns, width))),
        ]
        middle = [(place(problem.batch, 1), (place(height, rows), place(width, columns))) for _ in range(count - 2)]
        return ends + middle

    def _box_work(self, phase: str, side: int, problem: Problem) -> int:
        """Multiply-adds of the current of a box in the middle of the layer."""
        outputs = 1
        for axis in (0, 1):
            size = problem.in_shape[1 + axis]
            start = max(0, (size - side) // 2)
            span = readers((start, min(size, start + side)), axis, problem)
            outputs *= side if phase == "forward" else max(1, span[1] - span[0])
        return outputs * problem.time_steps * math.prod(self.weight_shape(problem))

    def _box(
        self, phase: str, x: Tensor, weight: Tensor, samples: Span, spans: tuple[Span, Span], problem: Problem
    ) -> Sample | None:
        out = spans
        if phase != "forward":
            out = (readers(spans[0], 0, problem), readers(spans[1], 1, problem))
            if any(first >= last for first, last in out):
                return None  # no output reads these inputs
        patch = self._patch(x, samples, out, problem)
        wide = weight.detach().to("cpu", torch.float64)
        terms = math.prod(weight.shape[1:])
        # The squared products of a 0/1 input are at most the squared weights; a bound saves a second convolution.
        squares = wide.square().sum((1, 2, 3))[:, None, None] * patch.square().max()
        current, error = as_stored(convolved(patch, wide, problem.geometry), squares, terms, x.dtype)
        where: Index = (slice(*samples), slice(None), slice(None), slice(*out[0]), slice(*out[1]))
        if phase == "forward":
            return Sample(where, current, error)
        inside: Index = (slice(*samples), slice(None), slice(None), slice(*spans[0]), slice(*spans[1]))
        # Where the box's own inputs lie in the padded patch.
        own = [read(out[axis], axis, problem)[0] - problem.geometry.padding[axis] for axis in (0, 1)]
        rows, columns = (slice(spans[a][0] - own[a], spans[a][1] - own[a]) for a in (0, 1))

        def transpose(values: Tensor, squared: bool) -> Tensor:
            factors = [wide, patch[..., _clipped(rows, patch, -2), _clipped(columns, patch, -1)]]
            scale = problem.params.grad_scale
            if squared:
                factors, scale = [f.square() for f in factors], scale**2
            size = patch.shape[-2:]
            back = conv.transposed(values.flatten(0, 1), factors[0], size, unpadded(problem.geometry))
            back = back.unflatten(0, values.shape[:2])[..., _clipped(rows, patch, -2), _clipped(columns, patch, -1)]
            return _filled(back * factors[1] * scale, rows, columns, patch)

        terms = weight.shape[0] // problem.geometry.groups * math.prod(weight.shape[2:])
        return Sample(where, current, error, "t", "grad_input", inside, terms, transpose)

    def _channels(
        self, rows: Tensor, group: int, columns: Tensor, x: Tensor, weight: Tensor, problem: Problem
    ) -> Sample | None:
        """Output channels of one group at all places, for the gradient of their weights from some input channels."""
        if not x.numel() or not math.prod(problem.out_shape):
            return None
        first = group * weight.shape[1]
        wide = double(weight, (rows,))
        own = x[:, :, first : first + weight.shape[1]].flatten(0, 1)
        current = torch.cat([self._tap_current(part, wide, problem) for part in own.split(FRAMES)])
        terms = math.prod(weight.shape[1:])
        largest = float(torch.stack(own.aminmax()).abs().max())
        squares = wide.square().sum((1, 2, 3))[:, None, None] * largest**2
        current, error = as_stored(current.unflatten(0, x.shape[:2]), squares, terms, x.dtype)
        chosen = double(x, (slice(None), slice(None), columns + first)).flatten(0, 1)
        g = problem.geometry
        one_group = ConvGeometry(g.stride, g.padding, g.dilation, 1)

        def transpose(values: Tensor, squared: bool) -> Tensor:
            factor = chosen.square() if squared else chosen
            shape = (len(rows), len(columns), *weight.shape[2:])
            return conv.weight_half(values.flatten(0, 1), factor, shape, one_group)

        where: Index = (slice(None), slice(None), rows)
        terms = problem.batch * problem.time_steps * math.prod(problem.out_shape[1:])
        return Sample(where, current, error, "w", "grad_weight", (rows, columns), terms, transpose)

    @staticmethod
    def _tap_current(frames: Tensor, weight: Tensor, problem: Problem) -> Tensor:
        """Current [N, R, H', W'] of a few output channels with ``weight`` [R, C, kh, kw]: one matrix product for all
        taps, then a sum of shifted maps (a plain convolution would unfold the whole input for so few channels)."""
        pad_y, pad_x = problem.geometry.padding
        x = frames.detach().to("cpu", torch.float64)
        count, channels, kh, kw = weight.shape
        taps = weight.permute(0, 2, 3, 1).reshape(-1, channels) @ x.flatten(2)
        taps = F.pad(taps.view(len(x), count, kh, kw, *x.shape[2:]), (pad_x, pad_x, pad_y, pad_y))
        size = (problem.out_shape[1], problem.out_shape[2])
        links = [
            taps[:, :, ky, kx][(..., *conv.window((ky, kx), size, problem.geometry))]
            for ky in range(kh)
            for kx in range(kw)
        ]
        return functools.reduce(torch.add, links)


def _clipped(span: slice, patch: Tensor, axis: int) -> slice:
    """The part of ``span`` that lies in the patch: with strides, the last inputs may be read by no output."""
    return slice(max(0, span.start), min(span.stop, patch.shape[axis]))


def _filled(part: Tensor, rows: slice, columns: slice, patch: Tensor) -> Tensor:
    """``part`` with zeros where its spans leave the patch: inputs that no output reads."""
    edges = []
    for span, axis in ((columns, -1), (rows, -2)):
        edges += [max(0, -span.start), max(0, span.stop - patch.shape[axis])]
    return F.pad(part, edges)


DEFINITION = SrmConv2d()

"""``srm_neuron`` as the harness sees it: inputs at a wanted firing rate, comparison, tolerances, cost."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from spikemark.kernels import registry
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
from spikemark.kernels.srm_neuron import reference
from spikemark.kernels.srm_neuron.torch_eager import TorchEager
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import Problem, SrmParams
from torch import Tensor

AMBIGUOUS_LIMIT = 0.001  # more ambiguous neurons than this fail a case (specification, "Comparing spikes")
CLEAR_BLOCK = 16384
CALIBRATION_STEPS = 64
CALIBRATION_NEURONS = 1024
CALIBRATION_MEANS = 16  # tried at once; each round narrows the interval by this factor


@functools.lru_cache(maxsize=256)
def current_mean(params: SrmParams, time_steps: int, rate: float) -> float:
    """Mean of a normal current, in units of its deviation, that makes the neuron fire at ``rate``.

    Found by search on a small fixed sample: each round tries evenly spaced means at once and keeps the interval in
    which the rate passes the wanted one.
    """
    steps = min(time_steps, CALIBRATION_STEPS)
    noise = torch.randn((steps, 1, CALIBRATION_NEURONS), generator=torch.Generator().manual_seed(7))
    deviation = current_deviation(params)
    low, width = -12.0, 24.0
    for _ in range(3):
        means = low + width / CALIBRATION_MEANS * torch.arange(CALIBRATION_MEANS)
        m = s = torch.zeros(CALIBRATION_MEANS, CALIBRATION_NEURONS)
        fired = torch.zeros(CALIBRATION_MEANS)
        for x in (noise + means[:, None]) * deviation:
            m, s = (m + x) * params.e_m, (s + x) * params.e_s
            spikes = params.gain * (m - s) > params.v_th
            m, s = m.masked_fill(spikes, 0), s.masked_fill(spikes, 0)
            fired += spikes.float().mean(1)
        below = int((fired / steps < rate).sum())
        low = low + width / CALIBRATION_MEANS * max(0, below - 1)
        width /= CALIBRATION_MEANS
    return low + width / 2


def current_deviation(params: SrmParams) -> float:
    """Deviation of the random current: half of what makes a resting neuron fire in one step (``v_th * tau_s``)."""
    return 0.5 * params.v_th * params.tau_s


def random_current(
    shape: tuple[int, ...], params: SrmParams, rate: float, dtype: torch.dtype, device: str, seed: int
) -> Tensor:
    """Normal current [B, T, *S] whose mean makes the neuron fire at about ``rate``; 0 is silent, 1 always fires."""
    generator = torch.Generator(device=device).manual_seed(seed)
    current = torch.randn(shape, generator=generator, device=device)
    deviation = current_deviation(params)
    if rate <= 0:
        current.abs_().mul_(-deviation)
    elif rate >= 1:
        current.abs_().mul_(0.1).add_(1.0).mul_(8 * deviation)
    elif current.numel():
        current.add_(current_mean(params, shape[1], rate)).mul_(deviation)
    current = current.to(dtype)
    return keep_clear(current, params) if 0 < rate < 1 else current


def keep_clear(current: Tensor, params: SrmParams) -> Tensor:
    """``current``, changed in place where a potential would be within twice the comparison's margin of ``v_th``.

    There the reference itself is a coin toss. It is rare for real numbers, but a narrow dtype holds few values and
    the constants are ratios of small numbers, so that in long runs potentials *equal* to the threshold are common.
    Those currents are moved up by a few roundings: no generated neuron is ambiguous.
    """
    if not current.numel():
        return current
    folded = current.view(*current.shape[:2], -1)
    # On a CPU in blocks that stay in a core's cache, each too small to be worth torch's threads.
    block = CLEAR_BLOCK if current.device.type == "cpu" else folded.numel()
    samples = max(1, block // max(1, folded.shape[2]))
    for some in folded.split(samples):
        for part in some.split(block, dim=2):
            _keep_block_clear(part, params)
    return current


def _keep_block_clear(current: Tensor, params: SrmParams) -> None:
    """``keep_clear`` for [B, T, D]."""
    wide = state_dtype(current.dtype)
    roundings = 64 * torch.finfo(wide).eps
    gain = abs(params.gain) * roundings
    m = s = torch.zeros_like(current[:, 0], dtype=wide)
    for t in range(current.shape[1]):
        x = current[:, t]
        while True:
            m_next, s_next = (m + x).mul_(params.e_m), (s + x).mul_(params.e_s)
            u = (m_next - s_next).mul_(params.gain)
            zone = m_next.abs().add_(s_next.abs()).mul_(gain).clamp_(min=roundings)
            near = (u - params.v_th).abs_() <= zone
            if not near.any():
                break
            # A current's own share of the potential is current / tau_s.
            step = 2.5 * params.tau_s * zone[near] + 2 * torch.finfo(x.dtype).eps * x[near].abs()
            x[near] = (x[near] + step).to(x.dtype)
        fired = u > params.v_th
        m, s = m_next.masked_fill_(fired, 0), s_next.masked_fill_(fired, 0)


def dense_state(current: Tensor, params: SrmParams) -> SrmState:
    """Spikes and slopes of ``current``: by ``native`` where it can run, for speed, else by the baseline.

    Which one changes no result of a comparison: a forward is compared with the reference, and a backward is
    compared on the same state for all implementations.
    """
    native = registry.get("srm_neuron", "native")
    if native.runs_on(current.device.type) and native.available:
        return native.forward(current, params)
    return TorchEager().forward(current, params)


@dataclass(frozen=True)
class Reference:
    """Float64 results at the neurons in ``where`` (flat indices into [B, prod(S)]), each [len(where), T]."""

    where: Tensor
    values: dict[str, Tensor]


def pick_neurons(batch: int, neurons: int, time_steps: int, limit: int | None) -> Tensor:
    """Flat indices into [B * D] of the neurons to compare: all, or blocks that include both ends."""
    total = batch * neurons
    if limit is None or total * time_steps <= limit:
        return torch.arange(total)
    wanted = max(2, limit // max(1, time_steps))
    ends = min(wanted // 4, 4096)
    middle = torch.randint(0, total, (wanted - 2 * ends,), generator=torch.Generator().manual_seed(total))
    return torch.cat([torch.arange(ends), middle, torch.arange(total - ends, total)]).unique()


def gather(tensor: Tensor, where: Tensor) -> Tensor:
    """[B, T, *S] -> [len(where), T] on the CPU: the time courses of the neurons in ``where``."""
    batch, steps = tensor.shape[:2]
    flat = tensor.detach().flatten(2)
    if where.numel() == batch * flat.shape[2]:
        return flat.to("cpu").transpose(1, 2).reshape(where.numel(), steps)
    at = where.to(flat.device)
    return flat[at // flat.shape[2], :, at % flat.shape[2]].to("cpu")


class SrmNeuron(Definition):
    """Forward: current -> spikes and slopes. Backward: gradient of the spikes -> ``grad_w``, ``grad_t``."""

    name = "srm_neuron"

    def make_inputs(self, problem: Problem, phase: str, dtype: torch.dtype, device: str, seed: int) -> Inputs:
        """A random current; for backward the dense state that follows from it, and a normal gradient."""
        shape = (problem.batch, problem.time_steps, *problem.out_shape)
        current = random_current(shape, problem.params, problem.spike_rate, dtype, device, seed)
        state = dense_state(current, problem.params)
        rate = int(torch.count_nonzero(state.spikes)) / max(1, state.spikes.numel())
        if phase == "forward":
            return Inputs({"current": current}, rate)
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        grad_out = torch.randn(shape, generator=generator, device=device).to(dtype)
        assert state.delta_u is not None and state.delta_ut is not None
        tensors = {"grad_out": grad_out, "spikes": state.spikes}
        return Inputs(tensors | {"delta_u": state.delta_u, "delta_ut": state.delta_ut}, rate)

    def bind(self, implementation: Any, phase: str, inputs: Inputs, problem: Problem) -> BoundCall:
        """Forward on the current, or backward on the saved state (packed first, untimed, if it is compact)."""
        tensors = inputs.tensors
        if phase == "forward":
            return BoundCall(
                call=lambda _: implementation.forward(tensors["current"], problem.params),
                outputs=self._forward_outputs,
                saved=lambda state: state.for_backward(),
            )
        state = SrmState(tensors["spikes"], tensors["delta_u"], tensors["delta_ut"])
        if hasattr(implementation, "pack"):
            state = implementation.pack(state)
        return BoundCall(
            call=lambda _: implementation.backward(tensors["grad_out"], state, problem.params),
            outputs=lambda result: {"grad_w": result[0], "grad_t": result[1]},
        )

    @staticmethod
    def _forward_outputs(state: SrmState) -> dict[str, Tensor]:
        named = {"spikes": state.spikes, "delta_u": state.delta_u, "delta_ut": state.delta_ut}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def reference(self, phase: str, inputs: Inputs, problem: Problem, limit: int | None = None) -> Reference:
        """Float64 results for all neurons, or for a sample of about ``limit`` neuron-steps."""
        shape = next(iter(inputs.tensors.values())).shape
        where = pick_neurons(shape[0], shape[2:].numel(), shape[1], limit)
        picked = {name: gather(tensor, where) for name, tensor in inputs.tensors.items()}
        if phase == "forward":
            ref = reference.forward(picked["current"], problem.params)
            return Reference(where, dict(vars(ref)))
        grad_w, grad_t = reference.backward(
            picked["grad_out"], picked["spikes"], picked["delta_u"], picked["delta_ut"], problem.params
        )
        return Reference(where, {"grad_w": grad_w, "grad_t": grad_t} | picked)

    def compare(
        self, phase: str, outputs: dict[str, Tensor], reference: Any, inputs: Inputs, problem: Problem
    ) -> Comparison:
        """Spikes neuron by neuron as the specification says; slopes and gradients within rounding."""
        given = next(iter(inputs.tensors.values()))
        wanted = ("spikes",) if phase == "forward" else ("grad_w", "grad_t")
        for name in wanted + tuple(n for n in outputs if n not in wanted):
            problem_with = check_shape(name, outputs.get(name), given, given.dtype, given.device)
            if problem_with:
                return Comparison(False, problem_with)
        got = {name: gather(tensor, reference.where) for name, tensor in outputs.items()}
        total = given.numel()
        if phase == "forward":
            return compare_forward(got, reference.values, given.dtype, problem.params, total)
        return compare_backward(got, reference.values, given.dtype, problem.params, total)

    def cost(self, phase: str, problem: Problem, dtype: torch.dtype, spike_rate: float) -> Cost:
        """Least traffic. Forward: read the current, write spikes, and both slopes where a spike is.
        Backward: read the gradient, one bit a spike and the slopes at spikes, write two gradients."""
        size = dtype.itemsize
        steps = problem.batch * problem.time_steps
        for n in problem.out_shape:
            steps *= n
        slopes = int(2 * spike_rate * steps * size)
        if phase == "forward":
            return Cost(2 * steps * size + slopes, 10 * steps)
        return Cost(3 * steps * size + steps // 8 + slopes, 8 * steps)


def compare_forward(
    got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype, params: SrmParams, total: int
) -> Comparison:
    """Compare time courses [neurons, T]. Margin: 32 roundings of the largest potential (specification).

    A neuron whose spikes differ is ambiguous if its float64 potential was within the margin of the threshold
    at or before the first difference; otherwise it is wrong. Slopes must agree within the same margin (plus
    one rounding to the stored dtype) up to the first ambiguous step of a neuron that differs, and everywhere
    in the others.
    """
    neurons, steps = want["spikes"].shape
    if neurons == 0 or steps == 0:
        return Comparison(True)
    spikes = got["spikes"].to(torch.float64)
    if not ((spikes == 0) | (spikes == 1)).all():
        return Comparison(False, "spikes has values other than 0 and 1", checked=spikes.numel(), total=total)
    eps = torch.finfo(state_dtype(dtype)).eps
    scale = torch.maximum(want["u"].abs(), want["peak"]).clamp(min=1.0)
    margin = 32 * eps * torch.where(scale.isnan(), torch.inf, scale)
    near = (want["u"] - params.v_th).abs() <= margin
    order = torch.arange(steps).expand(neurons, steps)
    first_difference = torch.where(spikes != want["spikes"], order, steps).amin(1)
    first_near = torch.where(near, order, steps).amin(1)
    differs = first_difference < steps
    wrong = differs & (first_near > first_difference)
    checked = neurons * steps
    if wrong.any():
        where = int(wrong.nonzero()[0])
        at = int(first_difference[where])
        text = (
            f"spikes differ from the reference in {int(wrong.sum())} of {neurons} neurons, first at step {at} "
            f"where u = {float(want['u'][where, at]):.9g} and v_th = {params.v_th:g}"
        )
        return Comparison(False, text, 1.0, int((differs & ~wrong).sum()), checked, total)
    ambiguous = int(differs.sum())
    comparable = order <= torch.where(differs, first_near, steps)[:, None]
    rounding = torch.finfo(dtype).eps
    worst = 0.0
    for name, peak in (("delta_u", scale), ("delta_ut", want["peak_g"].clamp(min=1.0))):
        if name not in got:
            continue
        kept = torch.where(comparable, want[name], 0.0)
        shown = torch.where(comparable, got[name].to(torch.float64), 0.0).to(got[name].dtype)
        error, bad = difference(shown, kept, 32 * eps * peak, rounding)
        worst = max(worst, error)
        if bad:
            text = f"{name}: {bad} of {checked} elements out of tolerance, worst {error:.3g}"
            return Comparison(False, text, error, ambiguous, checked, total)
    if ambiguous > AMBIGUOUS_LIMIT * neurons:
        text = f"{ambiguous} of {neurons} neurons are ambiguous, more than {AMBIGUOUS_LIMIT:.1%}"
        return Comparison(False, text, worst, ambiguous, checked, total)
    return Comparison(True, "", worst, ambiguous, checked, total)


def compare_backward(
    got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype, params: SrmParams, total: int
) -> Comparison:
    """Compare both gradients [neurons, T].

    Tolerance: an exponential ``e**k`` may be a table entry or a running product of k factors, and ``eps_w`` is a
    difference of two, so the error is bounded by ``k + 8`` roundings of ``|scale| * |c| * (e_m**k + e_s**k)``, the
    parts before they cancel, where ``scale`` is that of the very spike that applies. Beside it one rounding of the
    result to its dtype, and what is lost below the smallest normal number.
    """
    neurons, steps = want["grad_w"].shape
    if neurons == 0 or steps == 0:
        return Comparison(True)
    state, stored = torch.finfo(state_dtype(dtype)), torch.finfo(dtype)
    fired = want["spikes"].to(torch.float64) == 1
    order = torch.arange(steps).expand(neurons, steps)
    following = torch.where(fired, order, steps).flip(1).cummin(1).values.flip(1)
    at = following.clamp(max=steps - 1)
    k = (following - order + 1).to(torch.float64)
    grad = want["grad_out"].to(torch.float64).abs()
    worst = 0.0
    for name, slope, bound, parts in (
        ("grad_w", "delta_u", reference.CLAMP_W, abs(params.gain) * (params.e_m**k + params.e_s**k)),
        ("grad_t", "delta_ut", reference.CLAMP_T, params.e_g**k),
    ):
        scale = (-1.0 / want[slope].to(torch.float64)).clamp(bound, 0.0).abs() * grad
        scale = torch.where(following < steps, scale.gather(1, at), 0.0)
        scale = torch.nan_to_num(scale, nan=0.0, posinf=0.0)
        below_normal = state.smallest_normal * state.eps
        atol = scale * (state.eps * (k + 8) * parts + below_normal) + stored.smallest_normal * stored.eps
        error, bad = difference(got[name], want[name], atol, stored.eps)
        worst = max(worst, error)
        if bad:
            text = f"{name}: {bad} of {neurons * steps} elements out of tolerance, worst {error:.3g}"
            return Comparison(False, text, error, 0, neurons * steps, total)
    return Comparison(True, "", worst, 0, neurons * steps, total)


DEFINITION = SrmNeuron()

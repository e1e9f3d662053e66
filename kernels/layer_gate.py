"""How a layer's spikes and gradients are judged against float64 when every implementation has spikes of its own.

A layer's current is a long sum, so its float32 rounding differs between implementations, and a neuron whose potential
comes near the threshold may fire in one and not in another; everything after that differs, rightly. Comparing with one
fixed reference would then need tolerances that hide faults. Instead the reference *replays* the neuron in float64 on
the float64 current, clearing the state where the implementation's own spikes say so. Then

- each single spike is checked at every step, also after an ambiguous one: it must lie on the side of the threshold
  where the replayed potential lies, unless that is within its error bound of the threshold. Steps on the other side
  but within the bound make a neuron ambiguous; more than 0.1 % ambiguous neurons fail (operators.md);
- the two slopes are smooth functions of the current once the spikes are given, so gradients get a reference on the
  very spikes that the implementation's backward used: nothing there is ambiguous, and no state has to be read out.

Error bounds are propagated, not guessed: of the current through the neuron to the slopes, of a slope s through
clamp(-1/s) by evaluating both ends of its interval (at s = 0 that function jumps between its bounds, and a spike whose
slope lies there is allowed either), and from there through the sums of the backward as independent errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from spikemark.kernels.conv_backward.definition import DEVIATIONS, ROUNDINGS
from spikemark.kernels.definition import Comparison, difference, state_dtype
from spikemark.kernels.srm_neuron import reference
from spikemark.kernels.srm_neuron.definition import AMBIGUOUS_LIMIT
from spikemark.kernels.types import SrmParams
from torch import Tensor

STATE_ROUNDINGS = 32  # of the neuron's own arithmetic, as in the specification's margin
TIE_ROUNDINGS = 16  # of float64: a potential this near the threshold is on it, and the reference itself a coin toss


@dataclass(frozen=True)
class Replay:
    """The neuron in float64 under given spikes, [n, T, *S]: potential, slopes, and a bound on the error of each."""

    u: Tensor
    delta_u: Tensor
    delta_ut: Tensor
    u_error: Tensor
    delta_u_error: Tensor
    delta_ut_error: Tensor


def summing_walk(terms: int, dtype: torch.dtype) -> float:
    """Bound on the rounding of a sum of ``terms`` products relative to sqrt(sum of squares) + |sum|.

    The same model as ``conv_backward.definition.tolerance``, which explains it.
    """
    count = float(max(terms, 1))
    return torch.finfo(state_dtype(dtype)).eps / 2 * min(count, DEVIATIONS * math.sqrt(count))


def as_stored(current: Tensor, squares: Tensor, terms: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A float64 current as a layer stores it in ``dtype``, and a bound on how far an implementation's may be off.

    ``squares`` bounds the sum of the squared products of each element. A narrow current is rounded in the reference
    too, so that an implementation differs only where its sum falls on the other side of a rounding (by one step).
    """
    error = summing_walk(terms, dtype) * (squares.sqrt() + current.abs())
    if dtype != state_dtype(dtype):
        info = torch.finfo(dtype)
        error = error + info.eps * current.abs() + info.tiny * info.eps
    return current.to(dtype).to(torch.float64), error


def replay(current: Tensor, error: Tensor, spikes: Tensor, params: SrmParams, dtype: torch.dtype) -> Replay:
    """Run the neuron over ``current`` [n, T, *S], clearing its state where ``spikes`` says; ``error`` bounds the
    current's error. The rounding of the neuron's own arithmetic is the specification's margin."""
    fired = spikes != 0
    rounding = STATE_ROUNDINGS * torch.finfo(state_dtype(dtype)).eps
    stored = torch.finfo(dtype) if dtype != state_dtype(dtype) else None
    names = ("u", "delta_u", "delta_ut", "u_error", "delta_u_error", "delta_ut_error")
    out = {name: torch.empty_like(current) for name in names}
    zero = torch.zeros_like(current[:, 0]) if current.shape[1] else torch.zeros(0)
    m = s = g = u_last = error_m = error_s = error_g = error_last = peak = peak_g = zero
    for t in range(current.shape[1]):
        x, dx = current[:, t], error[:, t]
        m, s, g = (m + x) * params.e_m, (s + x) * params.e_s, (g + x) * params.e_g
        error_m, error_s, error_g = (
            (error_m + dx) * params.e_m,
            (error_s + dx) * params.e_s,
            (error_g + dx) * params.e_g,
        )
        u = params.gain * (m - s)
        peak = torch.maximum(peak, abs(params.gain) * (m.abs() + s.abs()))
        peak_g = torch.maximum(peak_g, g.abs())
        # gain * (e_m^k - e_s^k) is never negative, so the largest error is that of an error of one sign throughout.
        error_u = params.gain * (error_m - error_s) + rounding * torch.maximum(u.abs(), peak).clamp(min=1.0)
        out["u"][:, t], out["u_error"][:, t] = u, error_u
        out["delta_u"][:, t], out["delta_u_error"][:, t] = u - u_last, error_u + error_last
        out["delta_ut"][:, t], out["delta_ut_error"][:, t] = g, error_g + rounding * peak_g.clamp(min=1.0)
        clear = fired[:, t]
        m, s, g, u_last, error_m, error_s, error_g, error_last = (
            v.masked_fill(clear, 0.0) for v in (m, s, g, u, error_m, error_s, error_g, error_u)
        )
    if stored is not None:
        for name in ("delta_u", "delta_ut"):
            out[f"{name}_error"] += stored.eps * out[name].abs() + stored.tiny * stored.eps
    return Replay(**out)


def check_spikes(spikes: Tensor, found: Replay, params: SrmParams) -> Comparison:
    """Every spike on its side of the threshold, or within the error bound of it. ``max_error`` is 0 or 1."""
    if spikes.numel() == 0:
        return Comparison(True)
    checked = spikes.numel()
    fired = spikes != 0
    if not (fired == (spikes == 1)).all():
        return Comparison(False, "spikes has values other than 0 and 1", math.inf, 0, checked, checked)
    distance = found.u - params.v_th
    crossed = fired != (distance > 0)  # a NaN potential must not fire
    # An infinite or NaN bound would allow anything; it comes only from a current that is not finite.
    wrong = crossed & ~(distance.abs() <= torch.nan_to_num(found.u_error, nan=0.0, posinf=0.0))
    if wrong.any():
        at = tuple(int(i) for i in wrong.nonzero()[0])
        text = (
            f"spikes: {int(wrong.sum())} of {checked} differ from the reference, first at step {at[1]} where "
            f"u = {float(found.u[at]):.9g} +- {float(found.u_error[at]):.2g} and v_th = {params.v_th:g}"
        )
        return Comparison(False, text, 1.0, 0, checked, checked)
    scale = torch.maximum(found.u.abs(), torch.ones(())) * TIE_ROUNDINGS * torch.finfo(torch.float64).eps
    neurons = checked // spikes.shape[1]
    ambiguous = int(crossed.any(1).sum())
    undecided = int((crossed & (distance.abs() > scale)).any(1).sum())
    if undecided > max(1, AMBIGUOUS_LIMIT * neurons):
        text = f"spikes: {undecided} of {neurons} neurons are ambiguous, more than {AMBIGUOUS_LIMIT:.1%}"
        return Comparison(False, text, 1.0, ambiguous, checked, checked)
    return Comparison(True, "", 0.0, ambiguous, checked, checked)


def gradient(
    half: str, grad_out: Tensor, spikes: Tensor, found: Replay, params: SrmParams, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``(values, error bound)`` of one of the neuron's gradients, ``half`` "w" or "t", all [n, T, *S] in float64."""
    both = reference.backward(grad_out, spikes, found.delta_u, found.delta_ut, params)
    steps = spikes.shape[1]
    fired = spikes != 0
    order = torch.arange(steps).view(-1, *[1] * (spikes.ndim - 2)).expand(spikes.shape)
    # The next spike at or after each step: a running minimum from the end; `steps` where there is none.
    upcoming = torch.where(fired, order, steps).flip(1).cummin(1).values.flip(1) if spikes.numel() else order
    k = (upcoming - order + 1).clamp(min=0)
    if half == "w":
        values, slope, error, bound = both[0], found.delta_u, found.delta_u_error, reference.CLAMP_W
        # What is subtracted rounds before the difference does, so the error is that of the sum of both.
        response = params.gain * (params.e_m**k - params.e_s**k)
        spread = abs(params.gain) * (params.e_m**k + params.e_s**k)
    else:
        values, slope, error, bound = both[1], found.delta_ut, found.delta_ut_error, reference.CLAMP_T
        response = spread = params.e_g**k
    low, middle, high = (_factor(slope + shift, bound) for shift in (-error, torch.zeros(()), error))
    # Across 0 the factor runs to its lower bound on one side and is 0 on the other.
    across = (slope - error <= 0) & (slope + error >= 0)
    off = torch.maximum((low - middle).abs(), (high - middle).abs())
    off = torch.where(across, torch.maximum(middle.abs(), (bound - middle).abs()), off)
    last = upcoming.clamp(max=max(steps - 1, 0))
    at_spike = [torch.gather(v, 1, last) if v.numel() else v for v in (off, middle.abs(), grad_out.abs())]
    rounding = torch.finfo(state_dtype(dtype)).eps * (steps + 8)  # a running product of up to T factors
    bound_ = at_spike[2] * (at_spike[0] * response.abs() + at_spike[1] * spread * rounding)
    info = torch.finfo(dtype)
    bound_ = torch.where(upcoming < steps, bound_, 0.0) + info.eps * values.abs() + info.tiny * info.eps
    # What the dtype cannot hold is infinite in one implementation and merely large in another.
    return values, torch.where(values.abs() + bound_ > info.max, torch.inf, bound_)


def _factor(slope: Tensor, bound: float) -> Tensor:
    return (-1.0 / slope).clamp(bound, 0.0)


def term_squares(values: Tensor, error: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """What each incoming gradient adds, per squared factor, to the squared error of a sum over it: its own error, up
    to ``DEVIATIONS`` deviations, and its share of the rounding of a sum of ``terms``."""
    return (DEVIATIONS * error).square() + (summing_walk(terms, dtype) * values).square()


def check_gradient(name: str, got: Tensor, want: Tensor, squares: Tensor, terms: int, dtype: torch.dtype) -> Comparison:
    """``got`` within sqrt(``squares``), the sum's own rounding and a few of the dtype's of ``want``."""
    info = torch.finfo(dtype)
    tolerance = squares.sqrt() + summing_walk(terms, dtype) * want.abs() + ROUNDINGS * info.tiny * info.eps
    # Where the dtype overflowed anything may stand; it is no error to report either.
    got = torch.where(tolerance.isfinite(), got, want.to(got.dtype))
    error, bad = difference(got, want, tolerance, ROUNDINGS * info.eps)
    text = f"{name}: {bad} of {want.numel()} elements out of tolerance, worst {error:.3g}" if bad else ""
    return Comparison(not bad, text, error, 0, want.numel(), want.numel())


def joined(parts: list[Comparison], total: int) -> Comparison:
    """One verdict: the first failure, else the worst error and the sums of what was checked, of ``total`` elements."""
    failed = [part for part in parts if not part.ok]
    checked = min(sum(part.checked for part in parts), total)
    if failed:
        return Comparison(False, failed[0].reason, failed[0].max_error, failed[0].ambiguous, checked, total)
    error = max((part.max_error for part in parts), default=0.0)
    return Comparison(True, "", error, sum(part.ambiguous for part in parts), checked, total)

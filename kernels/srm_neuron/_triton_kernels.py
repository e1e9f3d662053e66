"""The neuron's Triton kernels. Importing this needs triton; ``triton_fused`` imports it on first use.

``T`` and ``D`` are run-time values that are not specialised on, so no shape compiles anew; the neuron's constants
are compile-time values (a network has one set), which also keeps them in double precision for float64.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["total", "T", "D"])
def forward(
    x, spikes, delta_u, delta_ut, total, T, D,
    E_M: tl.constexpr, E_S: tl.constexpr, E_G: tl.constexpr, GAIN: tl.constexpr, V_TH: tl.constexpr,
    STATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK`` neurons through all time steps; tensors [B, T, D], contiguous; offsets in 64 bits."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = n < total
    at = n + (n // D) * D * (T - 1)
    m = tl.zeros((BLOCK,), dtype=STATE)
    s = tl.zeros((BLOCK,), dtype=STATE)
    g = tl.zeros((BLOCK,), dtype=STATE)
    u_last = tl.zeros((BLOCK,), dtype=STATE)
    for _ in range(T):
        now = tl.load(x + at, mask=mask, other=0.0).to(STATE)
        m = (m + now) * E_M
        s = (s + now) * E_S
        g = (g + now) * E_G
        u = (m - s) * GAIN
        fired = u > V_TH
        tl.store(spikes + at, fired.to(STATE).to(spikes.dtype.element_ty), mask=mask)
        tl.store(delta_u + at, (u - u_last).to(delta_u.dtype.element_ty), mask=mask)
        tl.store(delta_ut + at, g.to(delta_ut.dtype.element_ty), mask=mask)
        m = tl.where(fired, 0.0, m)
        s = tl.where(fired, 0.0, s)
        g = tl.where(fired, 0.0, g)
        u_last = tl.where(fired, 0.0, u)
        at += D


@triton.jit(do_not_specialize=["total", "T", "D"])
def backward(
    grad_out, spikes, delta_u, delta_ut, grad_w, grad_t, total, T, D,
    E_M: tl.constexpr, E_S: tl.constexpr, E_G: tl.constexpr, GAIN: tl.constexpr,
    STATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Walks back in time carrying the next spike's scales and its decaying responses, as running products."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = n < total
    at = n + (n // D + 1) * D * (T - 1)  # begins with n: D * (T - 1) alone would be a product in 32 bits
    scale_w = tl.zeros((BLOCK,), dtype=STATE)
    scale_t = tl.zeros((BLOCK,), dtype=STATE)
    r_m = tl.zeros((BLOCK,), dtype=STATE)
    r_s = tl.zeros((BLOCK,), dtype=STATE)
    r_g = tl.zeros((BLOCK,), dtype=STATE)
    for _ in range(T):
        fired = tl.load(spikes + at, mask=mask, other=0.0).to(STATE) != 0
        grad = tl.load(grad_out + at, mask=mask, other=0.0).to(STATE)
        inverse_u = -1.0 / tl.load(delta_u + at, mask=mask, other=1.0).to(STATE)
        inverse_ut = -1.0 / tl.load(delta_ut + at, mask=mask, other=1.0).to(STATE)
        # Comparisons, not minimum and maximum: a NaN slope must stay NaN.
        inverse_u = tl.where(inverse_u < -4.0, -4.0, tl.where(inverse_u > 0.0, 0.0, inverse_u))
        inverse_ut = tl.where(inverse_ut < -123456789.0, -123456789.0, tl.where(inverse_ut > 0.0, 0.0, inverse_ut))
        scale_w = tl.where(fired, inverse_u * grad, scale_w)
        scale_t = tl.where(fired, inverse_ut * grad, scale_t)
        r_m = tl.where(fired, 1.0, r_m) * E_M
        r_s = tl.where(fired, 1.0, r_s) * E_S
        r_g = tl.where(fired, 1.0, r_g) * E_G
        tl.store(grad_w + at, (scale_w * ((r_m - r_s) * GAIN)).to(grad_w.dtype.element_ty), mask=mask)
        tl.store(grad_t + at, (scale_t * -r_g).to(grad_t.dtype.element_ty), mask=mask)
        at -= D

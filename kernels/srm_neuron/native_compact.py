"""The neuron in C++ with compact state: spikes as bits, slopes only where a spike is (``srm_compact.cpp``)."""

from __future__ import annotations

import ctypes

import torch
from spikemark.kernels._strided import DTYPE_CODES, check_cpu
from spikemark.kernels.definition import DTYPES, check_float
from spikemark.kernels.registry import implementation
from spikemark.kernels.srm_neuron import _native
from spikemark.kernels.srm_neuron._arguments import check_current, check_state_dtype, dense_state, new_like
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import Problem, SrmParams
from torch import Tensor

SMALL_SLOPES = 1 << 20  # bytes of slopes at 100 % firing up to which they are written for the worst case and cut
SAMPLED = 64  # one neuron in so many is computed beforehand, to see how many spikes there will be
FEWEST_SAMPLED = 32  # pieces of neurons that are sampled at least
SLACK = 1.08  # room asked for, over what the sample says


@implementation("srm_neuron", device="cpu")
class NativeCompact:
    """C++ on the CPU with compact state: one bit a neuron-step and two slopes a spike, gradients as native's.

    ``saved``: ``bits`` uint8 [B, T, ceil(D/8)], ``tiles`` int64 [tiles, 2] (first pair and pairs of each tile) and
    ``slopes`` [2, at least the spikes] in the current's dtype. How many spikes there will be is estimated from a
    sample of the neurons; tiles that find no room are done again with exact room, so an estimate costs time at most.
    """

    def unavailable(self) -> str | None:
        """Why the C++ source cannot be built here, or None (builds it on the first call)."""
        return _native.LIBRARIES["srm_compact"].unavailable()

    def moved_bytes(self, problem: Problem, phase: str, dtype: str, spike_rate: float) -> int:
        """Forward: current in (a sample of it twice), spikes, bits and pairs out. Backward: the gradient, bits and
        pairs in, two gradients out."""
        dense = _native.dense_bytes(problem, dtype)
        compact = dense // DTYPES[dtype].itemsize // 8 + int(2 * spike_rate * dense)
        return compact + (2 * dense + dense // SAMPLED if phase == "forward" else 3 * dense)

    def forward(self, current: Tensor, params: SrmParams) -> SrmState:
        """Spikes of ``current`` [B, T, *S] and, in ``saved``, their bits and slopes."""
        check_current(current)
        check_cpu("current", current)
        (spikes,) = new_like(current, 1)
        if not current.numel():
            return SrmState(spikes, saved=_empty(current))
        x = _native.readable(current)
        bits, tiles, scratch = _buffers(x)
        used = (ctypes.c_int64 * 2)(0, 0)
        small = 2 * x.numel() * x.element_size() <= SMALL_SLOPES
        slopes = x.new_empty((2, x.numel() if small else _estimate(x, params)))
        rest = (spikes, bits, tiles)
        _native.call("srm_compact_forward", x, params, *rest, slopes, slopes.shape[1], scratch, used, 0)
        placed, missing = used[0], used[1]
        if missing:
            grown = x.new_empty((2, placed + missing))
            grown[:, :placed] = slopes[:, :placed]
            slopes = grown
            _native.call("srm_compact_forward", x, params, *rest, slopes, slopes.shape[1], scratch, used, 1)
            if used[1]:
                raise RuntimeError("native_compact: the current changed while forward was reading it")
        elif small:
            slopes = slopes[:, :placed].clone(memory_format=torch.contiguous_format)
        return SrmState(spikes, saved={"bits": bits, "tiles": tiles, "slopes": slopes})

    def pack(self, state: SrmState) -> SrmState:
        """The compact form of a dense state."""
        dense = [t.contiguous() for t in dense_state(state.spikes, state)]
        check_cpu("spikes", state.spikes)
        first = dense[0]
        if not first.numel():
            return SrmState(state.spikes, saved=_empty(first))
        bits, tiles, scratch = _buffers(first)
        slopes = first.new_empty((2, int(torch.count_nonzero(first))))
        sizes = (DTYPE_CODES[first.dtype], *_native.sizes(first))
        _native.check("srm_compact_pack", *sizes, *dense, bits, tiles, slopes, slopes.shape[1], scratch)
        return SrmState(state.spikes, saved={"bits": bits, "tiles": tiles, "slopes": slopes})

    def backward(self, grad_out: Tensor, state: SrmState, params: SrmParams) -> tuple[Tensor, Tensor]:
        """``(grad_w, grad_t)`` [B, T, *S] from the compact state of ``forward`` or ``pack``.

        Raises ``ValueError`` for a dense state, or one that was made for another number of samples, steps or tiles of
        neurons (bits are counted by eights: a few neurons more or less cannot be told), ``TypeError`` for another
        dtype: it decides the tiles, and with them the order of the slopes.
        """
        check_float("grad_out", grad_out)
        check_cpu("grad_out", grad_out)
        if set(state.saved) != {"bits", "tiles", "slopes"}:
            raise ValueError("state is not native_compact's: pack a dense one first")
        slopes = state.saved["slopes"].contiguous()
        check_state_dtype(grad_out, slopes)
        bits = _native.readable_bits(state.saved["bits"], grad_out)
        tiles = _checked_tiles(state.saved["tiles"], slopes, grad_out)
        grad_w, grad_t = new_like(grad_out, 2)
        if grad_out.numel():
            scratch = _scratch(grad_out, torch.get_num_threads())
            rest = (bits, tiles, slopes, slopes.shape[1], scratch, grad_w, grad_t)
            _native.call("srm_compact_backward", _native.readable(grad_out), params, *rest)
        return grad_w, grad_t


def _checked_tiles(tiles: Tensor, slopes: Tensor, grad_out: Tensor) -> Tensor:
    """``tiles``, contiguous. ``ValueError`` if they are not for ``grad_out``'s shape, or lie outside ``slopes``."""
    batch, _, neurons, _ = _native.sizes(grad_out)
    count = _native.function("srm_compact_tiles")(batch, neurons) if grad_out.numel() else 0
    if tuple(tiles.shape) != (count, 2) or tiles.dtype != torch.int64 or tuple(slopes.shape[:-1]) != (2,):
        raise ValueError(f"state has tiles {list(tiles.shape)} of {tiles.dtype}: not made for {list(grad_out.shape)}")
    if count and (int(tiles.min()) < 0 or int(tiles.sum(1).max()) > slopes.shape[1]):
        raise ValueError(f"state has {slopes.shape[1]} slopes, fewer than its tiles refer to")
    return tiles.contiguous()


def _estimate(x: Tensor, params: SrmParams) -> int:
    """How many spikes ``x`` will probably have, from a sample spread over it."""
    seen = (ctypes.c_int64 * 2)()
    _native.call("srm_compact_count", x, params, SAMPLED, FEWEST_SAMPLED, seen)
    return min(x.numel(), int(seen[0] / seen[1] * x.numel() * SLACK) + 1024)


def _buffers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """New ``bits``, ``tiles`` and scratch for ``x``."""
    batch, _, neurons, threads = _native.sizes(x)
    bits = torch.empty(_native.bits_shape(x), dtype=torch.uint8)
    tiles = torch.empty((_native.function("srm_compact_tiles")(batch, neurons), 2), dtype=torch.int64)
    return bits, tiles, _scratch(x, threads)


def _scratch(x: Tensor, threads: int) -> Tensor:
    """Scratch of all threads: torch's memory, so that the ledger sees it."""
    size = _native.function("srm_compact_scratch")(DTYPE_CODES[x.dtype], x.shape[1], threads)
    return torch.empty(size, dtype=torch.uint8)


def _empty(x: Tensor) -> dict[str, Tensor]:
    """The compact state of a tensor without elements."""
    bits = torch.empty(_native.bits_shape(x), dtype=torch.uint8)
    return {"bits": bits, "tiles": torch.empty((0, 2), dtype=torch.int64), "slopes": x.new_empty((2, 0))}

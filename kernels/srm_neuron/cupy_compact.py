"""CUDA kernels that keep only what backward needs: spikes as bits, and both slopes only where a spike is."""

from __future__ import annotations

import numpy as np
import torch
from spikemark.kernels.cuda import launch
from spikemark.kernels.definition import check_float
from spikemark.kernels.registry import implementation
from spikemark.kernels.srm_neuron._arguments import check_current, check_state_dtype, dense_state
from spikemark.kernels.srm_neuron._cupy import SOURCE, constants, dtype_name, neurons_per_sample, sizes
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import Problem, SrmParams
from torch import Tensor


def row_width(tensor: Tensor) -> int:
    """Neurons a thread: those of 16 bytes if they divide a row, else 1.

    It decides which neurons share a warp and so the order of the slopes: forward and backward must agree, so it
    depends on nothing but the shape and dtype, and a tensor that starts elsewhere is copied (``aligned``).
    """
    wide = 16 // tensor.element_size()
    return wide if neurons_per_sample(tensor) % wide == 0 else 1


def aligned(tensor: Tensor) -> Tensor:
    """``tensor`` contiguous and starting on a multiple of 16 bytes; itself if it already is."""
    dense = tensor.detach().contiguous()
    return dense.clone() if dense.data_ptr() % 16 else dense


@implementation("srm_neuron", device="cuda", requires="cupy")
class CupyCompact:
    """Raw CUDA kernels with compact state: one bit a neuron-step and two slopes a spike, same gradients bit for bit.

    ``saved``: ``bits`` uint8 [B, ceil(T/8), D], bit ``t % 8`` of byte ``t // 8`` is the spike of step ``t``;
    ``slopes`` [spikes, 2] in the current's dtype; ``offsets`` int64 [warps + 1], the first pair of each warp.
    Forward waits for one 8-byte count to size ``slopes``: this is its only synchronisation (so it cannot be
    captured in a CUDA graph), and its workspace is two dense tensors that are freed before it returns.
    """

    ran: str = ""

    def unavailable(self) -> str | None:
        """Whether CuPy matches torch's CUDA."""
        return launch.unavailable()

    def forward(self, current: Tensor, params: SrmParams) -> SrmState:
        """Spikes of ``current`` [B, T, *S] on a CUDA device, and the compact state in ``saved``."""
        check_current(current)
        launch.check_device(self.name, current=current)  # type: ignore[attr-defined]
        x = aligned(current)
        spikes = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return SrmState(spikes, saved=self._compact("forward", [x, spikes], params))

    def pack(self, state: SrmState) -> SrmState:
        """The compact form of a dense state."""
        dense = [aligned(t) for t in dense_state(state.spikes, state)]
        return SrmState(state.spikes, saved=self._compact("pack", dense, SrmParams()))

    def _compact(self, kind: str, tensors: list[Tensor], params: SrmParams) -> dict[str, Tensor]:
        first = tensors[0]
        batch, steps, neurons = first.shape[0], first.shape[1], neurons_per_sample(first)
        device = first.device
        bits = torch.empty((batch, (steps + 7) // 8, neurons), dtype=torch.uint8, device=device)
        if not first.numel():
            empty = torch.empty((0, 2), dtype=first.dtype, device=device)
            return {"bits": bits, "slopes": empty, "offsets": torch.zeros(1, dtype=torch.int64, device=device)}
        width = row_width(first)
        packs = batch * neurons // width
        warps = launch.blocks_for(packs, 32)
        capacity = 32 * width * steps
        workspace = torch.empty((warps * capacity, 2), dtype=first.dtype, device=device)
        offsets = torch.zeros(warps + 1, dtype=torch.int64, device=device)
        counts = offsets[1:]
        self.ran = self._kernel(width, first.dtype, kind)
        arguments: list[launch.Argument] = [
            *tensors,
            bits,
            workspace,
            counts,
            *sizes(packs, first),
            *constants(first.dtype, params),
        ]
        launch.launch(SOURCE, self.ran, launch.blocks_for(packs), arguments, device)
        torch.cumsum(counts, 0, out=counts)
        slopes = torch.empty((int(counts[-1]), 2), dtype=first.dtype, device=device)
        gather: list[launch.Argument] = [workspace, offsets, slopes, np.int64(warps), np.int64(capacity)]
        threads = 32 * warps
        launch.launch(SOURCE, f"srm_gather_{dtype_name(first.dtype)}", launch.blocks_for(threads), gather, device)
        return {"bits": bits, "slopes": slopes, "offsets": offsets}

    def backward(self, grad_out: Tensor, state: SrmState, params: SrmParams) -> tuple[Tensor, Tensor]:
        """``(grad_w, grad_t)`` from the compact state of ``forward`` or ``pack``.

        Raises ``ValueError`` for a dense state, or one that was made for another shape, ``TypeError`` for another
        dtype: the order of the slopes depends on both.
        """
        check_float("grad_out", grad_out)
        launch.check_device(self.name, grad_out=grad_out)  # type: ignore[attr-defined]
        bits, slopes, offsets = self._saved(grad_out, state)
        grad = aligned(grad_out)
        grad_w, grad_t = (torch.empty(grad.shape, dtype=grad.dtype, device=grad.device) for _ in range(2))
        if not grad.numel():
            return grad_w, grad_t
        width = row_width(grad)
        packs = grad.shape[0] * neurons_per_sample(grad) // width
        self.ran = self._kernel(width, grad.dtype, "backward")
        arguments: list[launch.Argument] = [grad, bits, slopes, offsets, grad_w, grad_t]
        arguments += [*sizes(packs, grad), *constants(grad.dtype, params)]
        launch.launch(SOURCE, self.ran, launch.blocks_for(packs), arguments, grad.device)
        return grad_w, grad_t

    def _saved(self, grad_out: Tensor, state: SrmState) -> list[Tensor]:
        """``bits, slopes, offsets`` of a state that fits ``grad_out``: the kernel would read beyond any other's end."""
        if set(state.saved) != {"bits", "slopes", "offsets"}:
            raise ValueError("state is not cupy_compact's: pack a dense one first")
        found = {name: state.saved[name].detach() for name in ("bits", "slopes", "offsets")}
        launch.check_device(self.name, grad_out=grad_out, **found)  # type: ignore[attr-defined]
        check_state_dtype(grad_out, found["slopes"])
        batch, steps = grad_out.shape[:2]
        neurons = neurons_per_sample(grad_out)
        warps = launch.blocks_for(batch * neurons // row_width(grad_out), 32) if grad_out.numel() else 0
        wanted = {"bits": (batch, (steps + 7) // 8, neurons), "offsets": (warps + 1,)}
        for name, shape in wanted.items():
            if tuple(found[name].shape) != shape:
                raise ValueError(
                    f"state was made for {name} of shape {list(found[name].shape)}, "
                    f"grad_out {list(grad_out.shape)} needs {list(shape)}"
                )
        return [tensor.contiguous() for tensor in found.values()]

    @staticmethod
    def _kernel(width: int, dtype: torch.dtype, kind: str) -> str:
        return f"srm_compact_{'vector' if width > 1 else 'scalar'}_{dtype_name(dtype)}_{kind}"

    def moved_bytes(self, problem: Problem, phase: str, dtype: str, spike_rate: float) -> int:
        """Forward: current in, spikes and bits out, pairs written, gathered (read and written again).
        Backward: bits and pairs in, the gradient where a pack has a spike (all of it, at worst), two gradients out."""
        steps = problem.batch * problem.time_steps
        for n in problem.out_shape:
            steps *= n
        size = getattr(torch, dtype).itemsize
        pairs = int(2 * spike_rate * steps * size)
        if phase == "forward":
            return 2 * steps * size + steps // 8 + 3 * pairs
        return 3 * steps * size + steps // 8 + pairs

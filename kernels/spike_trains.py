"""Input spike trains of a convolution, pool or linear layer: random at a wanted rate, or a person's recording."""

from __future__ import annotations

import torch
from spikemark.kernels.types import Problem
from torch import Tensor


def random_spikes(shape: tuple[int, ...], rate: float, device: str, seed: int) -> Tensor:
    """Independent spikes (bool) of ``shape``, each true with probability ``rate`` (0..1; the two ends are exact)."""
    if not 0 <= rate <= 1:
        raise ValueError(f"spike_rate must lie in 0..1, got {rate!r}")
    generator = torch.Generator(device=device).manual_seed(seed)
    # rand is in [0, 1): `< rate` never fires at 0 and always at 1.
    return torch.rand(shape, generator=generator, device=device) < rate


def input_spikes(problem: Problem, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, float]:
    """``(spikes, achieved rate)``: the layer's input [B, T, *in_shape], contiguous, of 0 and 1.

    ``problem.recording``'s spikes where there is one (``ValueError`` if their shape is not the problem's), else
    random ones at ``problem.spike_rate``. The achieved rate is the fraction of ones, 0 for an empty tensor.
    """
    shape = (problem.batch, problem.time_steps, *problem.in_shape)
    if problem.recording is None:
        spikes = random_spikes(shape, problem.spike_rate, device, seed)
    else:
        from spikemark.kernels import recording

        loaded = recording.load(problem.recording.path, problem.recording.time_axis)
        if tuple(loaded.shape) != shape:
            path, got = problem.recording.path, list(loaded.shape)
            raise ValueError(f"spike file {path} has shape {got}, but the problem asks for {list(shape)}")
        spikes = loaded.to(device)
    ones = int(torch.count_nonzero(spikes))
    return spikes.to(dtype), ones / spikes.numel() if spikes.numel() else 0.0

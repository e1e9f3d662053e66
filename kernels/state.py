"""What a neuron's forward returns and keeps for its backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class SrmState:
    """Result of ``srm_neuron`` forward.

    ``spikes`` is dense, [B, T, *S], in the dtype of the current, contiguous. Dense implementations also fill
    ``delta_u`` and ``delta_ut`` (same shape and dtype). Where backward reads anything else (a compact
    encoding, spikes as bits), ``saved`` holds all that it reads.
    """

    spikes: Tensor
    delta_u: Tensor | None = None
    delta_ut: Tensor | None = None
    saved: Mapping[str, Tensor] = field(default_factory=dict)

    def for_backward(self) -> list[Tensor]:
        """The tensors that backward needs beside ``grad_out``: what a layer must save."""
        if self.saved:
            return list(self.saved.values())
        return [t for t in (self.spikes, self.delta_u, self.delta_ut) if t is not None]

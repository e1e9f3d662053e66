"""Implementations of the layers, made of implementations of their parts: what can run, and why not.

A layer's implementation is a name for the parts it is made of. It runs where all of them run, and what keeps one of
them from running keeps it. Parts that a plug-in registers later become layers by themselves (``registry.derive``).
"""

from __future__ import annotations

from typing import Any

from spikemark.kernels import registry
from spikemark.kernels.types import Problem

PHASES = {
    # A layer's phase needs these phases of its parts.
    "srm_neuron": {"forward": ("forward",), "backward": ("backward",), "step": ("forward", "backward")},
    "conv_backward": {"forward": (), "backward": ("input", "weight"), "step": ("input", "weight")},
}


class Layer:
    """A layer's implementation; ``parts`` are its parts' implementations, the neuron first."""

    parts: tuple[Any, ...] = ()

    def unavailable(self) -> str | None:
        """The first part's reason, with its name; or that the parts run on no common device."""
        for part in self.parts:
            if not part.available:
                return f"{part.operator} {part.name}: {part.reason}"
        kinds = {part.device for part in self.parts} - {"any"}
        if len(kinds) > 1:
            where = " but ".join(f"{part.name} runs on {part.device}" for part in self.parts)
            return f"its parts share no device: {where}; name two of one device"
        return None

    def unsupported(self, problem: Problem, phase: str, dtype: str) -> str | None:
        """The first reason that a part gives for a phase of its own that this phase needs."""
        for part in self.parts:
            for own in PHASES[part.operator][phase]:
                reason = part.unsupported(problem, own, dtype)
                if reason:
                    return f"{part.operator} {part.name}: {reason}"
        return None


def register(operator: str, base: type[Layer], parts: tuple[Any, ...], *, baseline: bool, default: bool) -> None:
    """Register ``base`` with these ``parts`` under their joined names, once."""
    name = "+".join(part.name for part in parts)
    if name in registry._classes[operator]:
        return
    kinds = [part.device for part in parts if part.device != "any"]
    dtypes = tuple(d for d in parts[0].dtypes if all(d in part.dtypes for part in parts))
    foreign = [part.source for part in parts if part.source != "spikemark"]
    made = type(base.__name__, (base,), {"parts": parts, "__doc__": summary(parts), "__module__": base.__module__})
    decorate = registry.implementation(
        operator,
        name=name,
        device=kinds[0] if kinds else "any",
        dtypes=dtypes,
        baseline=baseline,
        default=default and len(set(kinds)) < 2,
    )
    registry._with_source(foreign[0] if foreign else "spikemark", lambda: decorate(made))


def summary(parts: tuple[Any, ...]) -> str:
    """One line that names the parts."""
    return ", ".join(f"{part.name} for {part.operator}" for part in parts) + "."

"""Presets: which cases a run measures when it is told no more, and how much time it gives each. Torch-free data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COMPILES = ("torch_compile*",)
"""Compiles for seconds, in every pass anew: where it is named, or in ``full``."""
FEW_PAIRS = ("native_auto", "*+native_auto", "torch_*+aten", "native_compact+aten")
"""Of a layer's pairs three are kept: baseline, dense and event-driven convolution, one of which ``native_auto`` is."""


@dataclass(frozen=True)
class Part:
    """Workloads of a preset and what is measured on them. Names may have * and ?.

    ``operators`` empty: all that fit; ``phases`` empty: all of theirs. ``batch`` None: the preset's. ``rates`` empty:
    the workload's own firing rate.
    """

    workloads: tuple[str, ...]
    operators: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    batch: int | None = None
    rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class Preset:
    """What to measure and how long.

    ``batch`` caps the published batch size (None: as published), for a workload that no part gives another.
    ``skip``: implementations that run only if they are named (what to leave out, so that a plug-in's are in). Sampling
    of a case in a pass ends when the interval of the median is within ``precision`` (a fraction), or after ``budget_s``
    seconds of kernel time or ``max_samples`` samples, but not before ``min_samples``. ``gate_limit`` is about how many
    elements are compared with the reference (None: all).
    """

    name: str
    summary: str
    passes: int
    parts: tuple[Part, ...]
    batch: int | None = None
    skip: tuple[str, ...] = ()
    precision: float = 0.01
    budget_s: float = 0.5
    min_samples: int = 10
    max_samples: int = 1000
    gate_limit: int | None = None

    def options(self) -> dict[str, Any]:
        """How cases are sampled, as the supervisor's ``RunOptions`` name it."""
        return {
            "precision": self.precision,
            "budget_s": self.budget_s,
            "min_samples": self.min_samples,
            "max_samples": self.max_samples,
            "gate_limit": self.gate_limit,
        }


SMOKE = Preset(
    name="smoke",
    summary="a check that everything works: every operator on a tiny layer, one pass, no number to rely on",
    passes=1,
    batch=2,
    skip=(*COMPILES, *FEW_PAIRS, "*+aten"),
    precision=0.1,
    budget_s=0.02,
    max_samples=30,
    gate_limit=2**18,
    parts=(
        Part(("mnist/conv2",)),
        Part(("mnist/linear2",), operators=("srm_linear",)),
        Part(("mnist/pool1",)),
    ),
)

QUICK = Preset(
    name="quick",
    summary="a first honest answer in a minute and a half: layers of several networks, small batches, five passes",
    passes=5,  # processes differ by more than the samples of one: five short passes tell more than three long ones
    batch=4,
    skip=(*COMPILES, *FEW_PAIRS),
    precision=0.02,
    budget_s=0.04,
    max_samples=200,
    gate_limit=2**18,
    parts=(
        # Small cases are bound by launches, large ones by memory or arithmetic: both kinds of each operator.
        Part(("cifar10-vgg/conv2",), operators=("srm_neuron",), batch=3),
        Part(("mnist/conv1",), operators=("srm_neuron",), batch=1),
        Part(("cifar10-resnet/stage2-block1-conv1",), operators=("conv_backward",), batch=1),
        Part(("n-mnist/conv2",), operators=("conv_backward",), batch=2),
        # Of a layer forward and backward; ``step`` is both, one after the other.
        Part(("mnist/conv2",), operators=("srm_conv2d",), phases=("forward", "backward"), batch=4),
        Part(("mnist/linear1",), operators=("srm_linear",), phases=("forward", "backward"), batch=10),
        Part(("cifar10-vgg/pool1", "n-mnist/pool1"), batch=4),
        Part(("cifar10-dvs/conv4",), operators=("clamped_sign",), batch=4),
    ),
)

FULL = Preset(
    name="full",
    summary="every layer of every network at its published batch size, and firing rates from silent to always",
    passes=3,
    precision=0.01,
    budget_s=1.0,
    gate_limit=2**20,
    parts=(
        Part(("*",)),
        Part(
            ("cifar10-vgg/conv2", "cifar10-vgg/conv5"),
            operators=("srm_neuron", "conv_backward", "srm_conv2d"),
            rates=(0.0, 0.005, 0.02, 0.05, 0.10, 0.12, 0.20, 0.35, 1.0),
        ),
    ),
)

PRESETS = {preset.name: preset for preset in (SMOKE, QUICK, FULL)}
DEFAULT = "quick"

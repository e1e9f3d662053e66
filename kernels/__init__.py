"""What is measured: operators and several implementations of each.

The names below are imported on first use, so ``import spikemark.kernels`` costs no torch import.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "SrmParams": "types",
    "ConvGeometry": "types",
    "Problem": "types",
    "Recording": "types",
    "OPERATORS": "catalog",
    "Operator": "catalog",
    "Implementation": "registry",
    "implementation": "registry",
    "implementations": "registry",
    "get": "registry",
    "baseline": "registry",
    "load_plugin": "registry",
    "SrmState": "state",
    "spike_count": "functional",
    "SrmConv2d": "layers",
    "SrmLinear": "layers",
    "AdjustedAvgPool2d": "layers",
}

_CALLABLE_FOLDERS = ("srm_neuron", "adjusted_avg_pool2d", "clamped_sign")

__all__ = [*_WHERE, *_CALLABLE_FOLDERS]


def __getattr__(name: str) -> Any:
    if name in _CALLABLE_FOLDERS:
        return importlib.import_module(f"spikemark.kernels.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'spikemark.kernels' has no attribute {name!r}")
    return getattr(importlib.import_module(f"spikemark.kernels.{_WHERE[name]}"), name)

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
    "definition": "definition",
    "srm_neuron": "functional",
    "adjusted_avg_pool2d": "functional",
    "clamped_sign": "functional",
    "SrmConv2d": "layers",
    "SrmLinear": "layers",
    "AdjustedAvgPool2d": "layers",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'spikemark.kernels' has no attribute {name!r}")
    return getattr(importlib.import_module(f"spikemark.kernels.{_WHERE[name]}"), name)

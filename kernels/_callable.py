"""Lets ``kernels.srm_neuron`` be both the operator's folder and its differentiable function.

The design names both alike, and Python puts a folder's module on its parent once anything in it is imported. So
the module itself can be called, and passes the call on to the function of the same name in ``functional``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A module that, called, calls the function of its name in ``spikemark.kernels.functional``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        functional = importlib.import_module("spikemark.kernels.functional")
        return getattr(functional, self.__name__.rpartition(".")[2])(*args, **kwargs)


def make_callable(module_name: str) -> None:
    """Make the module ``module_name``, which is being imported, callable."""
    sys.modules[module_name].__class__ = CallableModule

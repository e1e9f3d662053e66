"""``tests/hostile.py`` registered for the length of a block, and gone after it.

Its kernels crash, hang and change the process: no other test that walks over all implementations may meet them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spikemark.kernels import registry

FILE = Path(__file__).parents[1] / "hostile.py"


@functools.cache
def _hostile() -> tuple[Any, dict[str, dict[str, Any]]]:
    """The plug-in's module, and what it registers, taken out of the registry again."""
    for operator in registry.OPERATORS:
        registry.implementations(operator)  # so that all that is not hostile is there before
    before = {operator: set(found) for operator, found in registry._classes.items()}
    registry.load_plugin(FILE)
    module = sys.modules[registry.get("srm_neuron", "hostile_nan").__class__.__module__]
    for operator in registry.OPERATORS:
        registry.implementations(operator)  # layers of the new parts
    added = {o: {n: c for n, c in found.items() if n not in before[o]} for o, found in registry._classes.items()}
    _remove(added)
    return module, added


def _remove(added: dict[str, dict[str, Any]]) -> None:
    for operator, found in added.items():
        for name in found:
            registry._classes[operator].pop(name, None)
            registry._instances.pop((operator, name), None)


def module() -> Any:
    """The plug-in's module (``EXPECTED`` and the like); nothing stays registered."""
    return _hostile()[0]


@contextlib.contextmanager
def registered() -> Iterator[Any]:
    """The hostile implementations are registered inside the block."""
    found, added = _hostile()
    for operator, classes in added.items():
        registry._classes[operator].update(classes)
    try:
        yield found
    finally:
        _remove(added)

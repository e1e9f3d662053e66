"""Named spans inside the layers (their current, neuron and gradients) for a tool that listens; free without one.

This room knows no tool: the harness makes NVTX ranges of them (``harness.annotate``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Listener = Callable[[str], AbstractContextManager[Any]]

_NOTHING = contextlib.nullcontext()
_listener: Listener | None = None


def listen(listener: Listener | None) -> Listener | None:
    """From now on each span enters ``listener(name)``; None for nobody. Returns the listener before."""
    global _listener
    before, _listener = _listener, listener
    return before


def span(name: str) -> AbstractContextManager[Any]:
    """A span round a block, on whatever thread it runs: autograd's backward has its own."""
    return _NOTHING if _listener is None else _listener(name)

"""NVTX ranges in the domain ``spikemark``: the same in timing and in tracing runs.

Start/end ranges (process-wide), not push/pop (thread-local): autograd's backward runs on another thread and a push/pop
range would miss its kernels. A case's range is named by ``Case.key``, a phase's by ``<stage> <Case.key>``, with the
stage as category; a sample's carries its number as payload. Inside a call the layers' own spans nest (category layer).
Without a tool attached, or without the package, a range costs a method call: about 0.2 µs to start and end it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spikemark.kernels import spans

DOMAIN = "spikemark"
CATEGORIES = ("verify", "warm-up", "flush", "measure", "case", "profile", "layer")

_domain: Any = None


def domain() -> Any:
    """The NVTX domain, or None when the package ``nvtx`` is not installed."""
    global _domain
    if _domain is None:
        if importlib.util.find_spec("nvtx") is None:
            return None
        import nvtx

        _domain = nvtx.get_domain(DOMAIN)
    return _domain


class Annotation:
    """Reusable attributes of ranges with one name and category; ``start``/``end`` bracket one range."""

    def __init__(self, name: str, category: str) -> None:
        self._domain = domain()
        self._name, self._category = name, category
        self._attributes = self._domain and self._domain.get_event_attributes(message=name, category=category)

    def start(self, payload: int | None = None) -> Any:
        """Begin a range; the value returned goes to ``end``."""
        if self._domain is None:
            return None
        if payload is None:
            return self._domain.start_range(self._attributes)
        return self._domain.start_range(self._attributes, payload=payload)

    def end(self, token: Any) -> None:
        """End the range that ``start`` began."""
        if self._domain is not None:
            self._domain.end_range(token)


@contextmanager
def annotated(name: str, category: str) -> Iterator[None]:
    """One range around a block."""
    annotation = Annotation(name, category)
    token = annotation.start()
    try:
        yield
    finally:
        annotation.end(token)


class _Span:
    """A layer's span as a range; as many at once as threads and nesting need."""

    def __init__(self, annotation: Annotation) -> None:
        self._annotation = annotation
        self._token: Any = None

    def __enter__(self) -> None:
        self._token = self._annotation.start()

    def __exit__(self, *error: object) -> None:
        self._annotation.end(self._token)


@functools.cache
def _layer(name: str) -> Annotation:
    return Annotation(name, "layer")


def layer_range(name: str) -> _Span:
    """The NVTX range of a layer's span."""
    return _Span(_layer(name))


spans.listen(layer_range)

"""Ctrl-C and SIGTERM while something runs: counted, so that what runs ends where it is fit to. Torch-free."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TOLD = "finishing the present comparison, then stopping; Ctrl-C again stops now"


class Interrupts:
    """``count`` 1: finish what has begun and stop (Ctrl-C once). 2 or more: stop now (twice, or SIGTERM)."""

    def __init__(self) -> None:
        self.count = 0

    def hear(self, number: int, frame: object = None) -> None:
        """A signal has come."""
        self.count += 2 if number == signal.SIGTERM else 1

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, signals are counted here; afterwards they do what they did before. Only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {n: signal.signal(n, self.hear) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

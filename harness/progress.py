"""What a person sees while measuring: a bar on a terminal, a line now and then elsewhere. Torch-free.

Names come from plug-ins and workload files. They are shown inert: no control characters, escape sequences or markup.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

PLAIN_INTERVAL_S = 10.0


def inert(name: str, limit: int = 70) -> str:
    """``name`` as plain text of one line: what is not printable becomes ``?``, a long one loses its middle."""
    text = "".join(c if c.isprintable() else "?" for c in name)
    if len(text) > limit:
        text = text[: limit // 3] + "…" + text[-(limit - limit // 3 - 1) :]
    return text


def duration(seconds: float) -> str:
    """``1 h 05 min``, ``3 min 20 s`` or ``12 s``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


class Progress:
    """Counts measurements (a case in a pass) and tells a person. This base class tells nobody."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.total = 0
        self.done = 0
        self.what = ""
        self.stage_name = ""
        self._started = time.monotonic()
        self._at_start = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def begin(self, total: int, done: int = 0) -> None:
        """Expect ``total`` measurements, ``done`` of which an earlier, resumed run has made."""
        self.total, self.done, self._at_start = total, done, done
        self._started = time.monotonic()
        self.show()

    def case(self, key: str, where: str) -> None:
        """A case begins; ``where`` says pass, device and variant."""
        self.what, self.stage_name = f"{inert(where)}  {inert(key)}", ""
        self.show()

    def stage(self, name: str) -> None:
        """The present case has reached a stage."""
        self.stage_name = inert(name, 20)
        self.show()

    def advance(self, left: int | None = None) -> None:
        """A measurement is done, whatever came of it; ``left`` more are to come (fewer if one failed for good)."""
        self.done += 1
        if left is not None:
            self.total = self.done + left
        self.show()

    def remaining_s(self) -> float | None:
        """Estimated seconds left, from the pace so far; None before the first measurement."""
        made = self.done - self._at_start
        if made <= 0:
            return None
        return (time.monotonic() - self._started) / made * max(0, self.total - self.done)

    def message(self, text: str) -> None:
        """One line that stays on the screen."""
        self.stream.write(inert(text, 500) + "\n")
        self.stream.flush()

    def show(self) -> None:
        """Bring the display up to date."""

    def stop(self) -> None:
        """End the display; more than once is once."""


class Quiet(Progress):
    """Tells nobody, not even messages."""

    def message(self, text: str) -> None:
        """Nothing."""


class Plain(Progress):
    """Lines for logs and pipes: one at most every ``PLAIN_INTERVAL_S`` seconds, and the last."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._last = time.monotonic()
        self._finished = False

    def show(self) -> None:
        """Write a line if the last one is old enough or everything is done."""
        finished = self.total > 0 and self.done == self.total
        if not self._finished and (finished or time.monotonic() - self._last >= PLAIN_INTERVAL_S):
            self._last, self._finished = time.monotonic(), finished
            left = self.remaining_s()
            eta = "" if left is None or finished else f", about {duration(left)} left"
            self.message(f"measured {self.done} of {self.total}{eta}" + ("" if finished else f": {self.what}"))


class Bar(Progress):
    """A bar with rich: what is being measured, its stage, how many are left, how long that will take."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._console = Console(file=self.stream, highlight=False, emoji=False, markup=False)
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}", markup=False),
            TextColumn("{task.description}", markup=False),
        )
        # Few refreshes: drawing takes processor time from what is being measured.
        self._rich = RichProgress(*columns, console=self._console, refresh_per_second=4, transient=True)
        self._task: Any = None

    def begin(self, total: int, done: int = 0) -> None:
        """See ``Progress.begin``; the bar appears."""
        self._task = self._rich.add_task("starting", total=total, completed=done, eta="")
        self._rich.start()
        super().begin(total, done)

    def show(self) -> None:
        """Hand the present state to rich, which draws it with its next refresh."""
        if self._task is None:
            return
        left = self.remaining_s()
        self._rich.update(
            self._task,
            total=self.total,
            completed=self.done,
            description=f"{self.what}  {self.stage_name}".strip() or "starting",
            eta="" if left is None else f"{duration(left)} left",
        )

    def message(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(inert(text, 500), markup=False, emoji=False, soft_wrap=True)

    def stop(self) -> None:
        """Take the bar away."""
        if self._task is not None:
            self._rich.stop()
            self._task = None


def make_progress(stream: TextIO | None = None) -> Progress:
    """A bar if ``stream`` (default stderr) is a terminal, else plain lines."""
    stream = stream if stream is not None else sys.stderr
    return Bar(stream) if stream.isatty() else Plain(stream)

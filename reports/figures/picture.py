"""What a picture is before it is drawn: its words, the table behind it and how to draw it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spikemark.reports.figures.canvas import Canvas


@dataclass
class Picture:
    """``name`` is a file name's stem; ``alt`` says in words what the picture shows; ``table`` holds its numbers.

    ``draw`` is called only for pictures that are shown, so a big run pays for no more. ``left_out`` says what of the
    run the picture does not show. ``section`` is the heading that it stands under.
    """

    kind: str
    name: str
    section: str
    title: str
    alt: str
    header: list[str]
    table: list[list[str]]
    draw: Callable[[], Canvas]
    note: str = ""
    left_out: str = ""
    numeric: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Columns whose every cell begins with a digit are numbers."""
        if not self.numeric:
            columns = list(zip(*self.table, strict=True)) if self.table else [()] * len(self.header)
            self.numeric = [all(cell[:1].isdigit() or cell == "–" for cell in column) for column in columns]

"""Plain text for the terminal: aligned tables of names that may come from anywhere, shown inert. Torch-free."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from spikemark.harness.progress import inert

__all__ = ["CELL_LIMIT", "inert", "table", "width"]

CELL_LIMIT = 200  # columns; a reason is a sentence, and the report has it in full


def width(text: str) -> int:
    """Columns that ``text`` takes in a terminal: wide East Asian characters and emoji two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def table(header: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> str:
    """An aligned table; columns in ``right`` are numbers, aligned to the right. Cells are made inert."""
    cells = [[inert(str(cell), CELL_LIMIT) for cell in row] for row in rows]
    widths = [max(map(width, column)) for column in zip(header, *cells, strict=True)]
    lines = []
    for row in [list(header), *cells]:
        padded = [
            " " * (widths[i] - width(cell)) + cell if i in right else cell + " " * (widths[i] - width(cell))
            for i, cell in enumerate(row)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)

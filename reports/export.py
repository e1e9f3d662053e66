"""A report in other forms: CSV, Parquet, and every picture as a file of its own."""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path

from spikemark.harness.errors import UsageError
from spikemark.harness.runfolder import StorageError
from spikemark.reports import answers, saving
from spikemark.reports.rows import Report, frame


def csv(report: Report) -> str:
    """All rows as CSV: the columns of ``load``'s DataFrame; lists are written as words."""
    table = frame(report)
    for name in table.columns:
        if table[name].map(lambda v: isinstance(v, list)).any():
            table[name] = table[name].map(lambda v: " ".join(map(str, v)) if isinstance(v, list) else v)
    text: str = table.to_csv(index=False, lineterminator="\n")
    return text


def parquet(report: Report, path: Path) -> None:
    """All rows as a Parquet file. Raises ``UsageError`` without pyarrow, ``StorageError`` if it cannot be written."""
    table = frame(report)
    content = io.BytesIO()  # not the path itself: pyarrow leaves half a file behind, and cannot write to a pipe
    try:
        table.to_parquet(content, engine="pyarrow", index=False)
    except ImportError:
        raise UsageError("--format parquet needs pyarrow: install spikemark[parquet]") from None
    saving.save(path, content.getvalue())


def figures(report: Report, folder: Path, devices: tuple[str, str] | None = None) -> list[Path]:
    """Write every picture as SVG and PDF into ``folder`` (made if absent); returns the files."""
    from spikemark.reports import figures as drawing
    from spikemark.reports.figures import fonts

    out: list[Path] = []
    taken: set[str] = set()
    pictures = drawing.pictures(report, answers.answers(report), devices)
    canvases = {file_stem(f"{p.section}-{p.name}", taken): p.draw() for p in pictures}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as place:
            font = fonts.subset_font(set().union(*(c.characters() for c in canvases.values())), Path(place))
            for stem, canvas in canvases.items():
                canvas.save(folder / f"{stem}.svg")
                canvas.save(folder / f"{stem}.pdf", font)
                out += [folder / f"{stem}.svg", folder / f"{stem}.pdf"]
    except OSError as error:
        raise StorageError(f"cannot write figures to {folder}: {error.strerror or error}") from None
    return out


def file_stem(name: str, taken: set[str]) -> str:
    """A name for a file from any text: letters, digits, dots and dashes only, not in ``taken``, which it joins."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "picture"
    unique, n = stem, 1
    while unique.lower() in taken:
        n += 1
        unique = f"{stem}-{n}"
    taken.add(unique.lower())
    return unique

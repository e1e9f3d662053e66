"""What ``spikemark report`` does, behind the parsing of its arguments. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from spikemark.harness.errors import UsageError
from spikemark.reports import export, html, saving, tables
from spikemark.reports.rows import Report, read

FORMATS = ("html", "markdown", "csv", "parquet", "latex")


def report(
    runs: Sequence[str | Path],
    output: str | Path | None = None,
    form: str = "html",
    figures: str | Path | None = None,
    devices: Sequence[str] | None = None,
    stream: TextIO | None = None,
) -> list[Path]:
    """Write the report of ``runs`` as ``form`` (one of ``FORMATS``), and pictures into the folder ``figures``.

    Without ``output``, html goes to ``report.html`` and parquet to ``results.parquet`` in the first run folder; the
    other forms are text and go to ``stream`` (stdout). ``devices`` names the two devices whose times are divided.
    Returns the files written. Raises ``UsageError`` with one line for bad input and for a place that cannot be written.
    """
    if form not in FORMATS:
        raise UsageError(f"unknown format {form!r}: choose one of {', '.join(FORMATS)}")
    with html.keeping():
        return _write(read(list(runs)), output, form, figures, devices, stream or sys.stdout)


def _write(
    loaded: Report,
    output: str | Path | None,
    form: str,
    figures: str | Path | None,
    devices: Sequence[str] | None,
    stream: TextIO,
) -> list[Path]:
    pair = _pair(loaded, devices)
    written: list[Path] = []
    first = loaded.folder
    if form == "html":
        path = Path(output or first / "report.html")
        saving.save(path, html.page(loaded, pair, path.parent))
        written.append(path)
    elif form == "parquet":
        path = Path(output or first / "results.parquet")
        export.parquet(loaded, path)
        written.append(path)
    else:
        text = {"markdown": tables.markdown, "latex": tables.latex, "csv": export.csv}[form](loaded)
        if output is None:
            stream.write(text)
        else:
            saving.save(Path(output), text)
            written.append(Path(output))
    if figures is not None:
        written += export.figures(loaded, Path(figures), pair)
    return written


def _pair(loaded: Report, devices: Sequence[str] | None) -> tuple[str, str] | None:
    if devices is None:
        return None
    known = list(dict.fromkeys(row["environment"] for row in loaded.rows))
    if len(devices) != 2 or devices[0] == devices[1]:
        raise UsageError(f"two different devices are needed for a ratio, got {', '.join(devices) or 'none'}")
    keys = {title: key for key, title in loaded.titles.items()}
    devices = [device if device in known else keys.get(device, device) for device in devices]
    for device in devices:
        if device not in known:
            raise UsageError(f"no case was measured on device {device!r}; measured: {', '.join(known) or 'none'}")
    from spikemark.reports.figures import heat

    if reason := heat.why_not(loaded, (devices[0], devices[1])):
        raise UsageError(f"no ratio of two devices: {reason}")
    return devices[0], devices[1]

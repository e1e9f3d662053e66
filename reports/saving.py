"""How a file that a person asked for is written: whole or not at all, and only over what is a file."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from spikemark.harness.runfolder import StorageError


def save(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all. Raises ``StorageError``."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    into(path, lambda place: _put(place, data))


def into(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` write a file beside ``path`` and put it in its place. Raises ``StorageError``.

    A link stays one: what it points at is replaced. A device or a pipe (``/dev/stdout``, ``>(less)``) is written to as
    it is: a file renamed over it would take it from everybody on the machine.
    """
    temporary: Path | None = None
    try:
        if _is_special(path):
            write(path)
            return
        place = Path(os.path.realpath(path)) if path.is_symlink() else path
        temporary = place.with_name(place.name + ".part")
        write(temporary)
        temporary.replace(place)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):  # on a read-only file system that fails too
                temporary.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from None


def _put(place: Path, data: bytes) -> None:
    with place.open("wb") as file:
        file.write(data)


def _is_special(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))

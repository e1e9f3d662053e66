"""Who else measures on this device now: two runs at once spoil each other's numbers, and both must say so.

Torch-free. Each run holds a lock on a small file of its own in a folder that all users share; the lock goes with the
process, so a killed run leaves no false alarm. Nothing is refused: the rows get a flag.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import tempfile
from pathlib import Path

import psutil

_numbers = itertools.count()

SHARED_DEVICE = "shared-device"
"""Flag of rows that were measured while another run measured on the same device."""


class DeviceLock:
    """This process's mark on ``device`` until ``release``. All of ``cpu``, ``cpu:1``, ... are one device."""

    def __init__(self, device: str, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.gettempdir()) / "spikemark-locks"
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", "cpu" if device.startswith("cpu") else device)
        self._fd = -1
        self.path = self.folder / f"{self.name}.{os.getpid()}.{next(_numbers)}"
        try:
            self.folder.mkdir(exist_ok=True)
            if self.folder.stat().st_uid == os.getuid():
                self.folder.chmod(0o1777)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX)  # nobody else holds it longer than a look takes
        except OSError:
            # Not being seen by others is no reason not to measure; others may still be seen.
            self.release()

    def others(self) -> list[int]:
        """Process ids of other runs on this device; what a killed one left behind is removed."""
        found = []
        for path in self.folder.glob(f"{self.name}.*"):
            pid = path.name.split(".")[1]
            if path == self.path or not pid.isdigit():
                continue
            if _is_locked(path):
                found.append(int(pid))
            elif not psutil.pid_exists(int(pid)):
                with contextlib.suppress(OSError):  # another user's: theirs to remove
                    path.unlink()
        return found

    def release(self) -> None:
        """Take the mark away; more than once is once."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False

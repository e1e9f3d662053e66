"""How a measuring process's ``malloc`` treats freed memory: it keeps it, and what was asked for is recorded.

By default glibc hands large blocks back to the system on ``free`` and takes fresh ones on ``malloc``, depending on what
was allocated before. A kernel that returns 12 MB then pays for 3,000 page faults in one process and for none in the
next: half its time, by accident of the order of the cases. A training loop on a GPU has torch's caching allocator; here
freed memory is kept too, for every implementation alike. Torch-free.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's ``mallopt``, as its ``malloc.h`` numbers them."""
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""glibc's own variables for these parameters: who sets one has chosen, and is left alone."""
KEEPS, DEFAULT = "keeps freed memory", "system default"

_state = DEFAULT


def keep_freed_memory() -> str:
    """From now on this process's ``malloc`` keeps what is freed (glibc); returns ``state``."""
    global _state
    mallopt = _glibc("mallopt")
    if mallopt is None or any(os.environ.get(name) for name in VARIABLES):
        return _state
    if mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1):
        _state = KEEPS
    return _state


def state() -> str:
    """What the environment records: ``KEEPS``, or ``DEFAULT`` (also for another ``malloc`` or the user's choice)."""
    return _state


def trim() -> None:
    """Give memory that ``malloc`` holds free back to the system (glibc), so that resident memory is what is used."""
    release = _glibc("malloc_trim")
    if release is not None:
        release(0)


def _glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc's, or None: musl, macOS and Windows have none of these."""
    return getattr(ctypes.CDLL(None), name, None)

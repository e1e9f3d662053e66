"""The harness's own arithmetic on one thread; kernels keep theirs.

References, comparisons and checksums are many small operations. With several threads each ends at a barrier, and on a
shared machine a barrier waits until the system lets the other thread run: up to its whole time slice, ten milliseconds.
Measured on two busy cores: comparing all results of the preset ``quick`` took 55 s with two threads, 7 s with one, and
an eighth of the processor time (threads at a barrier spin). One thread also makes inputs and references the same bits
whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread inside; after it the count that was there before, be it a kernel's doing. Also a decorator."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Sign with a clamped straight-through gradient: reference, definition and implementations, one a file."""

from spikemark.kernels._callable import make_callable

make_callable(__name__)

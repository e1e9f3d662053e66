"""What every process that measures or traces sets first, so that all of them work under the same conditions.

Torch-free to import. The environment records both (``switches.malloc``, ``switches.tf32``).
"""

from __future__ import annotations

from spikemark.harness import allocator, precision


def settle() -> None:
    """From now on freed memory is kept (``allocator``) and float32 is float32 (``precision``). Imports torch."""
    allocator.keep_freed_memory()
    precision.full_float32()

"""float32 in a measuring process is float32: torch's own default lets cuDNN round convolutions' operands to TF32.

The reference knows the operands as they are, so with that default every plain-torch convolution on a GPU since Ampere,
the baseline among them, would be incorrect by a factor of a thousand; and a speed-up over a kernel that reads 10 bits
of mantissa would say nothing. The environment records the switches (``switches.tf32``). An implementation that means
TF32 sets it itself, round its own calls, and the gate judges it.
"""

from __future__ import annotations


def full_float32() -> None:
    """From now on this process's float32 convolutions and matrix products are float32's, on every device."""
    import torch

    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")

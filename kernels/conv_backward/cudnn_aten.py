"""``aten::convolution_backward`` under cuDNN flags that are set and recorded, not inherited from the session."""

from __future__ import annotations

import contextlib

import torch
from spikemark.kernels.conv_backward._cudnn_switches import chosen_library, switched
from spikemark.kernels.conv_backward.aten import Aten
from spikemark.kernels.cuda import launch
from spikemark.kernels.registry import implementation
from spikemark.kernels.types import ConvGeometry
from torch import Tensor


def cudnn_missing() -> str | None:
    """Why torch has no cuDNN to call, or None."""
    if torch.backends.cudnn.is_available():
        return None
    return "this torch has no cuDNN: install a CUDA build of torch"


@implementation("conv_backward", device="cuda", dtypes=("float32", "float16", "bfloat16", "float64"))
class CudnnAten(Aten):
    """cuDNN through ``aten::convolution_backward``: deterministic, no autotuning, no TF32, and it says so."""

    graph_capture = True
    benchmark = False
    deterministic = True
    allow_tf32 = False

    def unavailable(self) -> str | None:
        """Whether torch has cuDNN."""
        return cudnn_missing()

    def _switched(self) -> contextlib.AbstractContextManager[None]:
        return switched(self.benchmark, self.deterministic, self.allow_tf32)

    def _name(self, input: Tensor, weight_shape: torch.Size, geometry: ConvGeometry) -> None:
        """Torch has kernels of its own for some convolutions (depthwise ones in float32): the row must say so."""
        library = chosen_library(input, weight_shape, geometry)
        own = f"torch's {library}, not cudnn"
        self.ran = (
            f"{f'cudnn {torch.backends.cudnn.version()}' if library == 'Cudnn' else own} benchmark={self.benchmark} "
            f"deterministic={self.deterministic} tf32={self.allow_tf32}"
        )

    def fold_input(
        self, grad: Tensor, weight: Tensor, input: Tensor, geometry: ConvGeometry, grad_scale: float
    ) -> Tensor:
        """As ``aten``, under this class's flags."""
        launch.check_device(self.name, grad_t=grad, weight=weight, input=input)
        with self._switched():
            self._name(input, weight.shape, geometry)
            return super().fold_input(grad, weight, input, geometry, grad_scale)

    def fold_weight(self, grad: Tensor, input: Tensor, weight_shape: torch.Size, geometry: ConvGeometry) -> Tensor:
        """As ``aten``, under this class's flags."""
        launch.check_device(self.name, grad_w=grad, input=input)
        with self._switched():
            self._name(input, weight_shape, geometry)
            return super().fold_weight(grad, input, weight_shape, geometry)

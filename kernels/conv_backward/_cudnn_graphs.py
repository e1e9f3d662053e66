"""cuDNN graphs of the two halves, built through NVIDIA's ``cudnn`` package: handles, plans, their cache.

Everything is channels-last. A graph is one operation (``conv_dgrad`` or ``conv_wgrad``); of the plans that cuDNN
proposes, the first is taken that is deterministic, accumulates in float32 and, for float32, reads it as float32 (no
TF32). It is built and executed by its index, so its name is known and no other plan can take its place.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from spikemark.kernels.types import ConvGeometry
from torch import Tensor

API = (
    "pygraph",
    "create_handle",
    "set_stream",
    "backend_version",
    "data_type",
    "heur_mode",
    "numerical_note",
    "cudnnGraphNotSupportedError",
)
DATA_TYPES = {torch.float32: "FLOAT", torch.float16: "HALF", torch.bfloat16: "BFLOAT16"}
BARRED = ("NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION")
BARRED_FLOAT32 = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")  # TF32


class NoPlan(RuntimeError):
    """cuDNN has no plan for a convolution under these rules. The message is one line."""


def missing() -> str | None:
    """Why the package cannot be used, in one line that says what to install; None if it can."""
    install = "pip install 'nvidia-cudnn-frontend>=1.9'"
    library = "install nvidia-cudnn-cu12 or nvidia-cudnn-cu13"
    try:
        import cudnn
    except (ImportError, OSError) as error:
        if "libcudnn" in str(error):  # the package is there, the library it loads is not
            return f"nvidia-cudnn-frontend finds no cuDNN ({error}): {library}"
        return f"nvidia-cudnn-frontend cannot be imported ({error}): {install}"
    lacks = [name for name in API if not hasattr(cudnn, name)]
    if lacks:
        return f"the package cudnn has no {', '.join(lacks)}: it is not NVIDIA's, or too old: {install}"
    try:
        cudnn.backend_version()
    except RuntimeError as error:
        return f"nvidia-cudnn-frontend finds no cuDNN ({error}): {library}"
    return None


@dataclass(frozen=True)
class Convolution:
    """One half of one convolution, hashable: ``half`` is ``dgrad`` or ``wgrad``; shapes are NCHW, OCkk for weights."""

    half: str
    input: tuple[int, ...]
    weight: tuple[int, ...]
    grad: tuple[int, ...]
    geometry: ConvGeometry
    dtype: torch.dtype

    def operands(self) -> tuple[str, str, str]:
        """Names of the two inputs and the output."""
        return ("grad", "weight", "input") if self.half == "dgrad" else ("input", "grad", "weight")


@dataclass(frozen=True)
class Plan:
    """A built plan: its graph, its place in the graph's list, its name, its operands' nodes, its workspace in bytes."""

    graph: Any
    index: int
    name: str
    nodes: tuple[Any, Any, Any]
    workspace_bytes: int

    def execute(self, handle: Any, first: Tensor, second: Tensor, out: Tensor) -> None:
        """Run on the handle's stream. Tensors are dense in memory as [N, H, W, C] (weights as [O, kh, kw, C])."""
        workspace = torch.empty(max(1, self.workspace_bytes), dtype=torch.uint8, device=out.device)
        pointers = {node: tensor.data_ptr() for node, tensor in zip(self.nodes, (first, second, out), strict=True)}
        self.graph.execute_plan_at_index(pointers, workspace, self.index, handle=handle)


def channels_last_strides(shape: Sequence[int]) -> list[int]:
    """Strides of an NCHW shape whose memory is [N, H, W, C]."""
    _, c, h, w = shape
    return [h * w * c, 1, w * c, c]


def handle_on(device: torch.device) -> Any:
    """This thread's cuDNN handle for ``device``, set to torch's current stream. ``device`` must be current."""
    import cudnn

    handle = _handle(device.index, threading.get_ident())  # cuDNN forbids two threads on one handle
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    return handle


@functools.cache
def _handle(device_index: int, thread: int) -> Any:
    import cudnn

    return cudnn.create_handle()


@functools.lru_cache(maxsize=512)
def plan_for(convolution: Convolution, device_index: int, thread: int, handle: Any) -> Plan:
    """The plan of ``convolution``, built once a device and thread. Raises ``NoPlan`` with cuDNN's last word."""
    import cudnn

    kind = getattr(cudnn.data_type, DATA_TYPES[convolution.dtype])
    graph = cudnn.pygraph(
        io_data_type=kind,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    nodes = _operation(graph, convolution, kind)
    not_supported = (cudnn.cudnnGraphNotSupportedError, RuntimeError)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except not_supported as error:
        raise NoPlan(f"cuDNN does not take this convolution: {_one_line(error)}") from error
    barred = BARRED + (BARRED_FLOAT32 if convolution.dtype == torch.float32 else ())
    # After the plans are listed: earlier, a filter would mark nothing.
    graph.deselect_numeric_notes([getattr(cudnn.numerical_note, note) for note in barred])
    refusals = []
    for index in range(graph.get_execution_plan_count()):
        try:
            graph.build_plan_at_index(index)
        except (*not_supported, ValueError) as error:  # barred, or not possible here: the next one
            refusals.append(_one_line(error))
            continue
        name = graph.get_plan_name_at_index(index)
        return Plan(graph, index, name, nodes, int(graph.get_workspace_size_plan_at_index(index)))
    last = f"; the last: {refusals[-1]}" if refusals else ""
    allowed = "deterministic, float32 sums" + (", no TF32" if convolution.dtype == torch.float32 else "")
    raise NoPlan(f"none of cuDNN's {len(refusals)} plans is allowed ({allowed}) and works{last}")


def _operation(graph: Any, convolution: Convolution, kind: Any) -> tuple[Any, Any, Any]:
    """Add the operation; nodes of its two inputs and its output."""
    g = convolution.geometry
    names = convolution.operands()
    shapes = [getattr(convolution, name) for name in names]
    first, second = (
        graph.tensor(dim=list(shape), stride=channels_last_strides(shape), data_type=kind, name=name)
        for name, shape in zip(names[:2], shapes[:2], strict=True)
    )
    options = {"padding": list(g.padding), "stride": list(g.stride), "dilation": list(g.dilation)}
    if convolution.half == "dgrad":
        out = graph.conv_dgrad(loss=first, filter=second, **options)
    else:
        out = graph.conv_wgrad(image=first, loss=second, **options)
    out.set_output(True).set_dim(list(shapes[2])).set_stride(channels_last_strides(shapes[2])).set_data_type(kind)
    return first, second, out


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]

"""Stands in for NVIDIA's Python package ``cudnn`` on a machine without a GPU: records what is asked, computes by torch.

It is strict where the real package is: calls in their order, plans that a filter barred are refused, tensors are read
and written through the declared shape and strides at the pointers that are handed over. ``test_cudnn_frontend.py``
builds the same graphs with the real package where that is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from types import SimpleNamespace
from typing import Any

import torch

DTYPES = {"FLOAT": torch.float32, "HALF": torch.float16, "BFLOAT16": torch.bfloat16}
WORKSPACE = 4096
PLANS = (
    ("eng_tf32", {"TENSOR_CORE", "DOWN_CONVERT_INPUTS"}),
    ("eng_atomics", {"NONDETERMINISTIC"}),
    ("eng_half_sums", {"REDUCED_PRECISION_REDUCTION"}),
    ("eng_unsupported", set()),
    ("eng_good", set()),
)


class NotSupportedError(Exception):
    """As the real one: no RuntimeError."""


class Node:
    """A tensor of a graph."""

    def __init__(self, dim: list[int], stride: list[int], data_type: str) -> None:
        self.dim, self.stride, self.data_type, self.output = dim, stride, data_type, False

    def set_output(self, output: bool) -> Node:
        self.output = output
        return self

    def set_dim(self, dim: list[int]) -> Node:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Node:
        self.stride = stride
        return self

    def set_data_type(self, data_type: str) -> Node:
        self.data_type = data_type
        return self

    def at(self, pointer: int) -> torch.Tensor:
        """The memory at ``pointer``, read as this tensor is declared."""
        dtype = DTYPES[self.data_type]
        count = 1 + sum((n - 1) * s for n, s in zip(self.dim, self.stride, strict=True))
        assert count == math.prod(self.dim), "declared strides leave gaps or overlap"
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
        return torch.frombuffer(memory, dtype=dtype).as_strided(self.dim, self.stride)


class Graph:
    """``cudnn.pygraph``."""

    plans = PLANS
    built: list[str] = []  # noqa: RUF012 (names of all plans built, in order)

    def __init__(self, io_data_type: str, intermediate_data_type: str, compute_data_type: str, handle: Any) -> None:
        assert (intermediate_data_type, compute_data_type) == ("FLOAT", "FLOAT")
        self.handle, self.state, self.barred, self.ready = handle, "new", set(), set()

    def _after(self, before: str, now: str) -> None:
        assert self.state == before, f"{now} after {self.state}"
        self.state = now

    def tensor(self, dim: list[int], stride: list[int], data_type: str, name: str) -> Node:
        return Node(dim, stride, data_type)

    def conv_dgrad(self, loss: Node, filter: Node, padding: list, stride: list, dilation: list) -> Node:
        return self._operation("dgrad", loss, filter, padding, stride, dilation)

    def conv_wgrad(self, image: Node, loss: Node, padding: list, stride: list, dilation: list) -> Node:
        return self._operation("wgrad", image, loss, padding, stride, dilation)

    def _operation(self, half: str, first: Node, second: Node, padding: list, stride: list, dilation: list) -> Node:
        self._after("new", "operation")
        self.half, self.nodes, self.geometry = half, (first, second, Node([], [], "")), (stride, padding, dilation)
        return self.nodes[2]

    def validate(self) -> None:
        self._after("operation", "valid")
        assert self.nodes[2].output and all(node.dim and node.stride for node in self.nodes)

    def build_operation_graph(self) -> None:
        self._after("valid", "lowered")

    def create_execution_plans(self, heuristics: list[str]) -> None:
        self._after("lowered", "planned")
        assert heuristics == ["A", "FALLBACK"]

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        assert self.state == "planned", "a filter set earlier marks nothing"
        self.barred |= {i for i, (_, has) in enumerate(self.plans) if has & set(notes)}

    def get_execution_plan_count(self) -> int:
        return len(self.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        return self.plans[index][0]

    def build_plan_at_index(self, index: int) -> None:
        if index in self.barred:
            raise RuntimeError("Deselecting execution plan")
        if "unsupported" in self.plans[index][0]:
            raise NotSupportedError("engine does not\nsupport this")
        self.ready.add(index)
        Graph.built.append(self.plans[index][0])

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        assert index in self.ready
        return WORKSPACE

    def execute_plan_at_index(
        self, pointers: dict[Node, int], workspace: torch.Tensor, index: int, handle: Any
    ) -> None:
        assert index in self.ready and handle is self.handle
        assert workspace.dtype == torch.uint8 and workspace.numel() >= WORKSPACE
        workspace.fill_(0xA5)
        first, second, out = (node.at(pointers[node]) for node in self.nodes)
        out.copy_(self._compute(first.float(), second.float()))

    def _compute(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        stride, padding, dilation = self.geometry
        shape = self.nodes[2].dim
        if self.half == "dgrad":  # cuDNN takes the number of groups from the channels
            grad, weight, input = first, second, torch.empty(shape)
        else:
            input, grad, weight = first, second, torch.empty(shape)
        groups = input.shape[1] // weight.shape[1]
        mask = (self.half == "dgrad", self.half == "wgrad", False)
        args = (grad, input, weight, None, stride, padding, dilation, False, (0, 0), groups, mask)
        return torch.ops.aten.convolution_backward(*args)[0 if self.half == "dgrad" else 1]


def names(*of: str) -> SimpleNamespace:
    """An enumeration whose members are their names."""
    return SimpleNamespace(**{name: name for name in of})


HANDLE = object()
MODULE = SimpleNamespace(
    pygraph=Graph,
    create_handle=lambda: HANDLE,
    set_stream=lambda handle, stream: None,
    backend_version=lambda: 90500,
    data_type=names("FLOAT", "HALF", "BFLOAT16"),
    heur_mode=names("A", "FALLBACK"),
    numerical_note=names(
        "TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "NONDETERMINISTIC", "WINOGRAD"
    ),
    cudnnGraphNotSupportedError=NotSupportedError,
)


def install(implementation: Any) -> None:
    """Have ``cudnn_frontend`` use this module, on CPU tensors."""
    sys.modules["cudnn"] = MODULE  # type: ignore[assignment]
    implementation.handle = lambda device: HANDLE
    implementation.on = lambda device: contextlib.nullcontext()

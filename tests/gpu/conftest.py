"""Tests that need a GPU (``make gpu``): skipped, with the reason, where there is none; nothing is emulated here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import gpu_cases
import pytest
import stand_ins
import torch
from spikemark.harness import precision
from spikemark.kernels import registry
from spikemark.kernels.cuda import launch


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Skip without a GPU. Other tests of this process may have put stand-ins for one in place: take them out."""
    missing = registry.gpu_missing()
    if missing:
        pytest.skip(missing)
    monkeypatch.setattr(launch, "launch", stand_ins.REAL_LAUNCH)
    monkeypatch.setattr(launch, "check_device", stand_ins.REAL_CHECK_DEVICE)
    if not isinstance(sys.modules.get("cudnn"), ModuleType | None):
        monkeypatch.delitem(sys.modules, "cudnn")
    torch.cuda.synchronize()
    # As a measuring process does; what the session had is put back.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
    before = torch.get_float32_matmul_precision()
    precision.full_float32()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def get(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """``get(operator, name)``: a fresh instance, in the registry's place; skips if it cannot run here."""

    def fresh(operator: str, name: str) -> Any:
        found = type(registry.get(operator, name))()
        if not found.available:
            pytest.skip(found.reason)
        monkeypatch.setitem(registry._instances, (operator, name), found)
        return found

    return fresh


@pytest.fixture
def bind(get: Callable[[str, str], Any]) -> Callable[..., gpu_cases.Bound]:
    """``bind(operator, name, phase, device, dtype)``: that call on a small problem, its inputs, its implementation."""

    def make(operator: str, name: str, phase: str, device: str = "cuda:0", dtype: Any = torch.float32) -> Any:
        return gpu_cases.Bound(get(operator, name), operator, phase, device, dtype)

    return make

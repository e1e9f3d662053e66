"""``cudnn_aten`` and ``cudnn_transpose``: their switches, what they say ran, and tensors that are not on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from spikemark import kernels
from spikemark.kernels.conv_backward import _cudnn_switches as switches
from spikemark.kernels.conv_backward import cudnn_aten
from spikemark.kernels.cuda import launch
from spikemark.kernels.types import ConvGeometry
from stand_ins import REAL_CHECK_DEVICE

GEOMETRY = ConvGeometry(groups=2)


def make() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(1, 2, 4, 4), torch.ones(2, 1, 3, 3), torch.ones(1, 2, 2, 2)


@pytest.mark.parametrize("name", ["cudnn_aten", "cudnn_transpose", "cudnn_frontend", "cupy_event"])
def test_cpu_tensors_are_one_clear_line_and_nothing_is_computed(name, monkeypatch):
    """``cudnn_aten`` once answered with oneDNN's result and called it cuDNN's."""
    monkeypatch.setattr(launch, "check_device", REAL_CHECK_DEVICE)
    x, weight, grad = make()
    conv = kernels.get("conv_backward", name)
    with pytest.raises(ValueError, match=rf"^{name}: grad_t is on cpu; this implementation needs CUDA tensors$"):
        conv.input(grad, weight, x, GEOMETRY)
    with pytest.raises(ValueError, match=rf"^{name}: grad_w is on cpu; this implementation needs CUDA tensors$"):
        conv.weight(grad, x, weight.shape, GEOMETRY)


@pytest.mark.parametrize(
    ("library", "said"),
    [("Cudnn", "cudnn 91000 benchmark"), ("CudaDepthwise2d", "torch's CudaDepthwise2d, not cudnn benchmark")],
)
def test_what_ran_is_what_torch_chose(library, said, monkeypatch):
    """In float32 torch takes depthwise convolutions away from cuDNN."""
    x, weight, grad = make()
    asked = []

    def chosen(*arguments):
        asked.append((arguments, torch.backends.cudnn.deterministic))
        return library

    monkeypatch.setattr(launch, "check_device", lambda name, **tensors: torch.device("cpu"))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    monkeypatch.setattr(cudnn_aten, "chosen_library", chosen)
    conv = kernels.get("conv_backward", "cudnn_aten")
    for call in (lambda: conv.input(grad, weight, x, GEOMETRY), lambda: conv.weight(grad, x, weight.shape, GEOMETRY)):
        conv.ran = ""
        call()
        assert conv.ran == f"{said}=False deterministic=True tf32=False"
    assert asked == [((x, weight.shape, GEOMETRY), True)] * 2 and not torch.backends.cudnn.deterministic


def test_torch_is_asked_once_a_problem_and_layout(monkeypatch):
    monkeypatch.setattr(switches, "_chosen", {})
    x, weight, _ = make()
    names = {switches.chosen_library(x, weight.shape, GEOMETRY) for _ in range(3)}
    assert len(names) == len(switches._chosen) == 1 and not names & {"Cudnn", ""}  # on a CPU it is not cuDNN
    switches.chosen_library(x.to(memory_format=torch.channels_last), weight.shape, GEOMETRY)
    switches.chosen_library(x.double(), weight.shape, GEOMETRY)
    switches.chosen_library(x, weight.shape, ConvGeometry(padding=1, groups=2))
    assert len(switches._chosen) == 4


# Switches of a session: torch's own, old and new names, and a mixture that torch itself refuses to read.
SESSION = """
import itertools, torch
from spikemark.kernels.conv_backward._cudnn_switches import switched
cudnn = torch.backends.cudnn
def state():
    new = hasattr(cudnn, "conv")
    precision = [cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision] if new else [cudnn.allow_tf32]
    return [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, *precision]
for precision, old, on in itertools.product((None, "ieee", "tf32"), (True, False), (True, False)):
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = on, on, not on, old
    if precision and hasattr(cudnn, "conv"):
        cudnn.conv.fp32_precision = precision
    before = state()
    for wanted in (True, False):
        try:
            with switched(benchmark=wanted, deterministic=not wanted, allow_tf32=wanted):
                now = state()
                assert now[:3] == [True, wanted, not wanted], now
                assert (now[3] in ("tf32", True)) == wanted, now
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        assert state() == before, (state(), before)
"""


def test_a_sessions_switches_are_what_they_were():
    done = subprocess.run([sys.executable, "-c", SESSION], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

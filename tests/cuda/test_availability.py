"""What keeps the CUDA implementations from running, or a call from being taken: one line, with what to install."""

from __future__ import annotations

import json
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from spikemark import kernels, runner
from spikemark.kernels import registry
from spikemark.kernels.cuda import launch
from stand_ins import REAL_CHECK_DEVICE


def test_tensors_elsewhere_are_named():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="cupy_raw: current is on cpu; this implementation needs CUDA tensors"):
        REAL_CHECK_DEVICE("cupy_raw", current=x)
    here, there, cpu = (
        SimpleNamespace(device=torch.device(d), is_cuda=d != "cpu") for d in ("cuda:0", "cuda:1", "cpu")
    )
    with pytest.raises(ValueError, match="grad_t is on cuda:1 but the other arguments on cuda:0"):
        REAL_CHECK_DEVICE("cupy_event", input=here, grad_t=there)
    with pytest.raises(ValueError, match="cupy_event: weight is on cpu; this"):
        REAL_CHECK_DEVICE("cupy_event", input=here, weight=cpu)
    assert REAL_CHECK_DEVICE("x", a=there, b=there) == torch.device("cuda", 1)


@pytest.mark.parametrize("name", ["cupy_raw", "cupy_vectorized", "cupy_compact", "triton_fused"])
def test_cpu_tensors_are_one_clear_line(name, monkeypatch):
    monkeypatch.setattr(launch, "check_device", REAL_CHECK_DEVICE)
    with pytest.raises(ValueError, match=f"{name}: current is on cpu; this implementation needs CUDA tensors"):
        kernels.get("srm_neuron", name).forward(torch.zeros(1, 2, 3), kernels.SrmParams())


def missing_cupy(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    return "CuPy cannot be imported (import of cupy halted; None in sys.modules): pip install cupy-cuda12x"


def leftover_cupy(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    return "the package cupy has no cuda.runtime, it is broken or not CuPy: pip install --force-reinstall cupy-cuda12x"


def cupy_without_runtime(gpu, monkeypatch):
    def fails():
        raise RuntimeError("CuPy failed to load libcudart.so.12: OSError: no such file")

    gpu.cupy.cuda.runtime.runtimeGetVersion = fails
    return "CuPy cannot use CUDA (CuPy failed to load libcudart.so.12: OSError: no such file): pip install cupy-cuda12x"


def cupy_of_another_cuda(gpu, monkeypatch):
    gpu.cupy.cuda.runtime.runtimeGetVersion = lambda: 13000
    return "CuPy is built for CUDA 13 but torch for CUDA 12.8: pip install cupy-cuda12x"


def old_gpu(gpu, monkeypatch):
    gpu.capability[0] = (6, 1)
    return "GPU architecture sm_61 is older than sm_75, the oldest these kernels support"


def gpu_newer_than_nvrtc(gpu, monkeypatch):
    gpu.capability[0] = (12, 0)
    return "NVRTC 12.8 does not know sm_120: install a newer nvidia-cuda-nvrtc"


def no_nvrtc(gpu, monkeypatch):
    def fails():
        raise RuntimeError("CuPy failed to load libnvrtc.so.12: OSError: no such file")

    gpu.nvrtc.getSupportedArchs = fails
    return (
        "CuPy finds no NVRTC (CuPy failed to load libnvrtc.so.12: OSError: no such file): "
        "pip install nvidia-cuda-nvrtc-cu12"
    )


def all_well(gpu, monkeypatch):
    return None


@pytest.mark.parametrize(
    "broken",
    [
        missing_cupy,
        leftover_cupy,
        cupy_without_runtime,
        cupy_of_another_cuda,
        old_gpu,
        gpu_newer_than_nvrtc,
        no_nvrtc,
        all_well,
    ],
)
def test_what_keeps_cupy_from_launching_is_one_line_that_says_what_to_install(gpu, monkeypatch, broken):
    said = broken(gpu, monkeypatch)
    assert launch.unavailable() == said


def test_what_keeps_triton_from_launching_is_one_line(gpu, monkeypatch, tmp_path):
    triton = kernels.get("srm_neuron", "triton_fused")
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert triton.unavailable() is None or not shutil.which("gcc")
    (tmp_path / "mycc").write_text("")
    (tmp_path / "mycc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert triton.unavailable().startswith("Triton finds no C compiler, which it needs for every launch: install gcc")
    monkeypatch.setenv("CC", "mycc")
    assert triton.unavailable() is None
    gpu.capability[0] = (7, 0)
    assert triton.unavailable() == "GPU architecture sm_70 is older than sm_75, the oldest these kernels support"
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "triton.py").write_text('raise RuntimeError("first\\nlibcuda.so.1: not found")')
    assert triton.unavailable() == "Triton cannot be imported (libcuda.so.1: not found): pip install triton"


def fresh(operator, name):
    """A new instance: a reason is found out once."""
    return type(kernels.get(operator, name))()


def test_reasons_begin_with_the_gpu_and_name_the_package_of_torchs_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "this torch is a build without CUDA" in fresh("srm_neuron", "cupy_raw").reason
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "torch is built for CUDA 13.0, but finds no NVIDIA GPU with a" in fresh("srm_neuron", "triton_fused").reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    for operator, name, said in (
        ("srm_neuron", "cupy_raw", "'cupy' is not installed: pip install 'spikemark[cuda13]' or cupy-cuda13x"),
        ("conv_backward", "cudnn_frontend", "pip install 'spikemark[cuda13]' or nvidia-cudnn-frontend"),
        ("srm_neuron", "triton_fused", "pip install triton"),
    ):
        reason = fresh(operator, name).reason
        assert said in reason and "\n" not in reason


def test_list_shows_the_reason(capsys):
    assert runner.main(["list", "implementations", "--json"]) == 0
    rows = {(r["operator"], r["implementation"]): r for r in json.loads(capsys.readouterr().out)}
    for key in (
        ("srm_neuron", "cupy_compact"),
        ("conv_backward", "cudnn_frontend"),
        ("srm_conv2d", "torch_eager+aten"),
    ):
        available = rows[key]["available"]
        assert available == "yes" if rows[key]["device"] == "any" else available.startswith("no: ")
    if not torch.cuda.is_available():
        assert "no: no CUDA device: " in rows["srm_neuron", "cupy_compact"]["available"]

"""The launch on recorded stand-ins for CuPy and torch.cuda: what is passed, what is refused, and in which words."""

from __future__ import annotations

import contextlib
import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from spikemark import kernels, runner
from spikemark.kernels import registry
from spikemark.kernels.cuda import binary, launch, source
from stand_ins import REAL_CHECK_DEVICE, REAL_LAUNCH
from torch.utils._python_dispatch import TorchDispatchMode


class Nvrtc:
    """``cupy.cuda.nvrtc``: compiles anything but what contains ``#error``."""

    class NVRTCError(RuntimeError):
        pass

    def __init__(self, version=(12, 8), archs=(75, 80, 90)):
        self.version, self.archs, self.compiled, self.open = version, archs, [], 0

    def getVersion(self):
        return self.version

    def getSupportedArchs(self):
        return self.archs

    def createProgram(self, text, name, headers, include_names):
        assert (headers, include_names) == ((), ())
        self.open += 1
        self.text, self.name = text, name
        return 7

    def compileProgram(self, program, options):
        if "#error" in self.text:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION (6)")
        self.compiled.append((self.name, tuple(options)))

    def getProgramLog(self, program):
        return "kernel.cu(1): error: no\n1 error detected\n"

    def getCUBIN(self, program):
        return f"cubin of {self.name} for {self.compiled[-1][1][0]}".encode()

    def destroyProgram(self, program):
        self.open -= 1


class Gpu:
    """Two devices; ``calls`` are the launches: (kernel, current device, grid, block, values, stream)."""

    def __init__(self, monkeypatch, tmp_path):
        self.calls, self.modules, self.current, self.error, self.allocated = [], [], 0, None, []
        self.capability = {0: (9, 0), 1: (8, 0)}
        self.nvrtc = Nvrtc()
        gpu = self

        class Module:
            def load(self, code):
                gpu.modules.append((gpu.current, code))

            def get_function(self, name):
                def call(grid, block, args, shared_mem=0, stream=None, enable_cooperative_groups=False):
                    assert isinstance(grid, tuple) and isinstance(block, tuple)
                    if gpu.error:
                        raise gpu.error
                    gpu.calls.append((name, gpu.current, grid, block, args, stream.ptr))

                return call

        class PythonFunctionAllocator:
            def __init__(self, malloc_func, free_func):
                self.malloc, self.free = malloc_func, free_func

        self.cupy = ModuleType("cupy")
        self.cupy.cuda = SimpleNamespace(
            function=SimpleNamespace(Module=Module),
            nvrtc=self.nvrtc,
            runtime=SimpleNamespace(runtimeGetVersion=lambda: 12090),
            get_current_stream=lambda: SimpleNamespace(ptr=99),
            set_allocator=lambda malloc: setattr(gpu, "malloc", malloc),
            PythonFunctionAllocator=PythonFunctionAllocator,
        )
        monkeypatch.setitem(sys.modules, "cupy", self.cupy)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(torch.version, "cuda", "12.8")

        @contextlib.contextmanager
        def device(wanted):
            before, self.current = self.current, wanted.index
            yield
            self.current = before

        for name, value in {
            "is_available": lambda: True,
            "current_device": lambda: self.current,
            "device": device,
            "current_stream": lambda d: SimpleNamespace(cuda_stream=1000 + d.index),
            "get_device_capability": lambda index=None: self.capability[self.current if index is None else index],
            "caching_allocator_alloc": lambda size, device, stream: self.allocated.append((size, device, stream)) or 64,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    caches = (launch._function, launch._module, launch.use_torch_allocator)
    for cache in caches:
        cache.cache_clear()
    yield Gpu(monkeypatch, tmp_path)
    for cache in caches:
        cache.cache_clear()


def cuda(index):
    return torch.device("cuda", index)


def test_pointers_and_typed_scalars_are_passed_as_they_are(gpu):
    x = torch.zeros(2, 3)
    scalars = [np.int64(2**40), np.int32(-1), np.float32(0.1), np.float64(0.1)]
    REAL_LAUNCH("event", "event_input_float32", 5, [x, None, *scalars], cuda(0))
    ((kernel, device, grid, block, values, stream),) = gpu.calls
    assert (kernel, device, grid, block, stream) == ("event_input_float32", 0, (5,), (128,), 1000)
    assert values == [x.data_ptr(), 0, *scalars]
    assert [type(v) for v in values] == [int, int, np.int64, np.int32, np.float32, np.float64]


def test_the_tensors_device_and_its_stream_and_back(gpu):
    REAL_LAUNCH("event", "event_input_float32", 1, [], cuda(1))
    assert gpu.calls[0][1] == 1 and gpu.calls[0][5] == 1001
    assert gpu.current == 0


def test_compiled_once_a_device_with_exactly_the_tested_options(gpu):
    for index in (0, 1, 0, 1):
        for kernel in ("srm_raw_float32_forward", "srm_raw_float32_backward"):
            REAL_LAUNCH("srm", kernel, 1, [], cuda(index))
    assert gpu.nvrtc.compiled == [("srm.cu", (f"-arch=sm_{a}", *source.OPTIONS)) for a in (90, 80)]
    assert not any("ftz" in option or "fast" in option for option in source.OPTIONS)
    assert gpu.modules == [(0, b"cubin of srm.cu for -arch=sm_90"), (1, b"cubin of srm.cu for -arch=sm_80")]
    assert gpu.nvrtc.open == 0


def test_machine_code_is_kept_on_disk_and_made_anew_when_anything_changes(gpu, monkeypatch):
    made = [binary.compiled("srm", "sm_90", gpu.nvrtc)]
    other = Nvrtc()
    made.append(binary.compiled("srm", "sm_90", other))
    assert made[0] == made[1] and not other.compiled
    binary.compiled("srm", "sm_80", other)
    binary.compiled("event", "sm_80", other)
    assert len(other.compiled) == 2
    newer = Nvrtc(version=(13, 0))
    binary.compiled("srm", "sm_90", newer)
    assert len(newer.compiled) == 1
    monkeypatch.setattr(source, "text", lambda name: "// changed")
    binary.compiled("srm", "sm_90", newer)
    monkeypatch.setattr(source, "OPTIONS", ("--std=c++17",))
    binary.compiled("srm", "sm_90", newer)
    assert len(newer.compiled) == 3
    assert not list(binary.cache_folder().glob("building-*"))


def test_a_source_that_does_not_compile_is_named(gpu, monkeypatch):
    monkeypatch.setattr(source, "text", lambda name: "#error")
    with pytest.raises(RuntimeError) as raised:
        REAL_LAUNCH("srm", "srm_raw_float32_forward", 2, [torch.zeros(4)], cuda(0))
    (line,) = str(raised.value).splitlines()
    assert line.startswith("srm_raw_float32_forward<<<2, 128>>>(float32[4]) failed: NVRTC 12.8 cannot compile srm.cu")
    assert "for sm_90: NVRTC_ERROR_COMPILATION (6): kernel.cu(1): error: no; 1 error detected" in line
    assert gpu.nvrtc.open == 0 and not list(binary.cache_folder().glob("*.cubin"))


def test_an_error_names_kernel_and_arguments(gpu):
    gpu.error = RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
    arguments = [torch.zeros(2, 3, dtype=torch.bfloat16), None, np.int64(5), np.float32(0.5)]
    said = r"event_weight_bfloat16<<<7, 128>>>\(bfloat16\[2, 3\], null, 5, 0.5\) failed: CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(RuntimeError, match=said):
        REAL_LAUNCH("event", "event_weight_bfloat16", 7, arguments, cuda(0))


def test_no_block_no_launch_and_no_more_than_a_grid_holds(gpu):
    REAL_LAUNCH("srm", "k", 0, [torch.empty(0)], cuda(0))
    assert not gpu.calls and not gpu.modules
    with pytest.raises(ValueError, match=r"srm_raw_float32_forward: 2147483648 blocks are more than a grid can have"):
        REAL_LAUNCH("srm", "srm_raw_float32_forward", 2**31, [], cuda(0))
    REAL_LAUNCH("srm", "srm_raw_float32_forward", 2**31 - 1, [], cuda(0))
    assert gpu.calls[0][2] == (2**31 - 1,)


@pytest.mark.parametrize("threads", [1, 127, 128, 129, 2**24, 2**24 + 1, 2**31 + 1, 2**53 + 1, 3 * 2**60 + 5])
def test_block_counts_are_integers(threads):
    blocks = launch.blocks_for(threads)
    assert isinstance(blocks, int) and (blocks - 1) * 128 < threads <= blocks * 128


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_launch_makes_no_tensor_and_waits_for_nothing(gpu, monkeypatch):
    def forbidden(*arguments, **options):
        raise AssertionError("a launch must not synchronise")

    for name in ("synchronize", "Event"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    x = torch.zeros(4)
    with Operations() as operations:
        REAL_LAUNCH("srm", "srm_raw_float32_forward", 1, [x, np.int64(4)], cuda(0))
    assert not operations.seen and not gpu.allocated


def test_cupy_allocates_from_torch_on_cupys_stream(gpu):
    launch.use_torch_allocator()
    assert gpu.malloc(4096, 1) == 64
    assert gpu.allocated == [(4096, 1, 99)]


# ------------------------------------------------------------------------------------------------ what is refused


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
    assert REAL_CHECK_DEVICE("x", a=there, b=there) == cuda(1)


@pytest.mark.parametrize("name", ["cupy_raw", "cupy_vectorized", "cupy_compact", "triton_fused"])
def test_cpu_tensors_are_one_clear_line(name, monkeypatch):
    monkeypatch.setattr(launch, "check_device", REAL_CHECK_DEVICE)
    with pytest.raises(ValueError, match=f"{name}: current is on cpu; this implementation needs CUDA tensors"):
        kernels.get("srm_neuron", name).forward(torch.zeros(1, 2, 3), kernels.SrmParams())


def missing_cupy(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    return "CuPy cannot be imported (import of cupy halted; None in sys.modules): pip install cupy-cuda12x"


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
    "broken", [missing_cupy, cupy_of_another_cuda, old_gpu, gpu_newer_than_nvrtc, no_nvrtc, all_well]
)
def test_what_keeps_cupy_from_launching_is_one_line_that_says_what_to_install(gpu, monkeypatch, broken):
    said = broken(gpu, monkeypatch)
    assert launch.unavailable() == said


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

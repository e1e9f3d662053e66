"""The launch on recorded stand-ins for CuPy and torch.cuda: what is passed, and what is said where it fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_gpu import Nvrtc
from spikemark.kernels.cuda import binary, launch, source
from stand_ins import REAL_LAUNCH
from torch.utils._python_dispatch import TorchDispatchMode


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

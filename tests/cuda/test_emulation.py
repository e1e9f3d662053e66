"""The emulator itself: it does on a CPU what CUDA does, and ends a kernel that a GPU would hang on."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os

import numpy as np
import pytest
import torch
from emulator import Emulator, kernel_names
from spikemark.kernels.cuda import source

CPU = torch.device("cpu")
KERNELS = """
#include "storage.cuh"
#define KERNEL extern "C" __global__ void __launch_bounds__(128)
KERNEL reversed(const float* x, float* y) {  // through shared memory
    __shared__ float tile[128];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x] = x[i];
    __syncthreads();
    y[i] = tile[blockDim.x - 1 - threadIdx.x];
}
KERNEL racing(const float* x, float* y) {  // the same without its barrier
    __shared__ float tile[128];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x] = x[i];
    y[i] = tile[blockDim.x - 1 - threadIdx.x];
}
KERNEL doubled(float* x) {  // several barriers, with threads that leave early
    __shared__ float tile[128];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x >= 64) return;
    tile[threadIdx.x] += tile[threadIdx.x + 64];
    __syncthreads();
    if (threadIdx.x == 0) { float sum = 0; for (int i = 0; i < 64; ++i) sum += tile[i]; x[0] = sum; }
}
KERNEL warps(const int* x, u32* ballots, int* sums, int* next, int* previous, int* third) {
    const int i = threadIdx.x;
    ballots[i] = __ballot_sync(0xffffffffu, x[i] & 1);
    int sum = x[i];
    for (int flip = 16; flip; flip >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, flip);
    sums[i] = sum;
    next[i] = __shfl_down_sync(0xffffffffu, x[i], 1);
    previous[i] = __shfl_up_sync(0xffffffffu, x[i], 1);
    third[i] = __shfl_sync(0xffffffffu, x[i], 3, 8);
}
KERNEL counted(int* at, double* total, i64 n) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { atomicAdd(at, 1); atomicAdd(total, 0.5); }
}
KERNEL scalars(double* out, i64 a, int b, float c, double d, const float* none) {
    if (threadIdx.x == 0 && blockIdx.x == 0)
        { out[0] = (double)a; out[1] = b; out[2] = c; out[3] = d; out[4] = none == nullptr; }
}
KERNEL where_am_i(i64* last) { if (threadIdx.x == 127) last[0] = (i64)blockIdx.x * 1000 + blockDim.x; }
KERNEL hangs(int* x) {  // a lane waits for a lane that has left
    if (threadIdx.x == 5) return;
    x[0] = (int)__ballot_sync(0xffffffffu, 1);
}
KERNEL splits(int* x) {  // two halves of a warp wait for each other under different masks
    if (threadIdx.x < 16) x[0] = (int)__ballot_sync(0xffffffffu, 1);
    else { __syncthreads(); }
    if (threadIdx.x < 16) __syncthreads();
}
KERNEL misaligned(const float* x, float* y) {
    store_streaming<float, 4>(y, load_streaming<float, 4>(x + 1));
}
KERNEL beyond(float* x, int n) { float small[4]; for (int i = 0; i < n; ++i) small[i] = x[i]; x[0] = small[n - 1]; }
KERNEL overflows(int* x) { x[0] = x[1] * x[2]; }
KERNEL halves(const float* x, f16* a, bf16* b, float* c, float* d) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a[i] = Narrow<f16>::of(x[i]);
    b[i] = Narrow<bf16>::of(x[i]);
    c[i] = widen(a[i]);
    d[i] = widen(b[i]);
}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("emulated") / "probe.cu"
    path.write_text(KERNELS)
    return path


@pytest.fixture
def emulator(file, monkeypatch):
    monkeypatch.setitem(source.SOURCES, "probe", file)
    yield Emulator()
    source.text.cache_clear()


def test_kernels_are_found_and_recorded(emulator):
    assert kernel_names("probe")[:3] == ["reversed", "racing", "doubled"]
    emulator.launch("probe", "where_am_i", 1, [torch.zeros(1, dtype=torch.int64)], CPU)
    emulator.launch("probe", "where_am_i", 0, [torch.zeros(1, dtype=torch.int64)], CPU)
    assert emulator.launched == ["where_am_i"]


@pytest.mark.parametrize("order", [0, 1, 2])
def test_shared_memory_and_barriers_in_any_order(emulator, order):
    emulator.order = order
    x, y = torch.randn(384), torch.empty(384)
    emulator.launch("probe", "reversed", 3, [x, y], CPU)
    assert torch.equal(y, x.view(3, 128).flip(1).flatten())
    x = torch.arange(128.0)
    emulator.launch("probe", "doubled", 1, [x], CPU)
    assert x[0] == 127 * 64


def test_a_missing_barrier_shows_in_another_order(emulator):
    x = torch.randn(128)
    results = []
    for order in (0, 1, 2):
        emulator.order = order
        results.append(torch.empty(128))
        emulator.launch("probe", "racing", 1, [x, results[-1]], CPU)
    assert not all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("order", [0, 1, 2])
def test_ballots_and_shuffles(emulator, order):
    emulator.order = order
    x = torch.randint(-1000, 1000, (128,), dtype=torch.int32)
    ballots = torch.empty(128, dtype=torch.uint32)
    sums, after, before, third = (torch.empty(128, dtype=torch.int32) for _ in range(4))
    emulator.launch("probe", "warps", 1, [x, ballots, sums, after, before, third], CPU)
    for warp, values in enumerate(x.view(4, 32).tolist()):
        lanes = slice(32 * warp, 32 * warp + 32)
        assert set(ballots[lanes].tolist()) == {sum((v & 1) << i for i, v in enumerate(values))}
        assert set(sums[lanes].tolist()) == {sum(values)}
        assert after[lanes].tolist() == [*values[1:], values[31]]
        assert before[lanes].tolist() == [values[0], *values[:31]]
        assert third[lanes].tolist() == [values[i // 8 * 8 + 3] for i in range(32)]


def test_atomics(emulator):
    at, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.float64)
    emulator.launch("probe", "counted", 9, [at, total, np.int64(1100)], CPU)
    assert at.item() == 1100 and total.item() == 550


def test_scalars_keep_their_types_and_null_is_null(emulator):
    out = torch.empty(5, dtype=torch.float64)
    scalars = [np.int64(2**40 + 1), np.int32(-7), np.float32(0.1), np.float64(0.1)]
    emulator.launch("probe", "scalars", 1, [out, *scalars, None], CPU)
    assert out.tolist() == [2**40 + 1, -7, float(np.float32(0.1)), 0.1, 1]


def test_a_grid_may_start_late(emulator):
    last = torch.zeros(1, dtype=torch.int64)
    emulator.launch("probe", "where_am_i", 1, [last], CPU, first=2**30)
    assert last.item() == 2**30 * 1000 + 128


def test_half_precision_rounds_as_torch_does(emulator):
    bits = torch.randint(-(2**31), 2**31, (2**16,), dtype=torch.int64).to(torch.int32)
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 65504.0, 65520.0, 6e-8, 2.9e-8, 1e-40, 1 + 2**-8]
    x = torch.cat([bits.view(torch.float32), torch.tensor(special), torch.zeros(128 - len(special))])
    a, b = torch.empty(x.numel(), dtype=torch.float16), torch.empty(x.numel(), dtype=torch.bfloat16)
    c, d = torch.empty_like(x), torch.empty_like(x)
    emulator.launch("probe", "halves", x.numel() // 128, [x, a, b, c, d], CPU)
    for got, wide in ((a, c), (b, d)):
        want = x.to(got.dtype)
        assert torch.equal(got.isnan(), want.isnan())
        same = ~want.isnan()
        assert torch.equal(got.view(torch.int16)[same], want.view(torch.int16)[same])
        assert torch.equal(wide.view(torch.int32)[same], want.float().view(torch.int32)[same])


def launch_into(path, emulator, kernel, arguments):
    """What a child does: its complaint goes to ``path``."""
    faulthandler.disable()
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
    emulator.launch("probe", kernel, 1, arguments, CPU)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("hangs", "emulation: a warp operation waits for a lane that has left (block 0, thread "),
        ("splits", "emulation: deadlock: threads wait for each other"),
        ("misaligned", ""),
        ("beyond", ""),
        ("overflows", ""),
        ("scalars", "emulation: the kernel takes another number of arguments"),
        ("counted", "argument 2 has 4 bytes, not 8\nemulation: an argument has another size than the kernel's"),
        ("where_am_i", None),
    ],
)
def test_what_a_gpu_would_not_survive_ends_the_process(emulator, tmp_path, kernel, said):
    x, f = torch.full((512,), 2**20, dtype=torch.int32), torch.zeros(512)
    arguments = {"misaligned": [f, f[4:]], "beyond": [f, np.int32(5)], "where_am_i": [f]}
    arguments["counted"] = [x, f, np.int32(5)]  # it takes an i64: a GPU would read four bytes of something else
    emulator.library("probe")
    child = multiprocessing.get_context("fork").Process(
        target=launch_into, args=(tmp_path / "said", emulator, kernel, arguments.get(kernel, [x]))
    )
    child.start()
    child.join(60)
    if said is None:
        assert child.exitcode == 0
        return
    assert child.exitcode < 0  # abort, or the trap of a sanitizer
    assert (tmp_path / "said").read_text().startswith(said)

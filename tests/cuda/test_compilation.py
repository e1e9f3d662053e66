"""Every kernel, dtype and architecture compiles without a word and without a spill; what ``inspect`` says of them."""

from __future__ import annotations

import json

import pytest
from spikemark import runner
from spikemark.kernels.cuda import resources, source
from spikemark.kernels.cuda.resources import Resources, bytes_per_step, occupancy, parse_ptxas
from spikemark.kernels.definition import DTYPES

ARCHITECTURES = {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"}
EXPECTED = (
    {f"srm_{kind}_{d}_{way}" for kind in ("raw", "scalar", "vector") for d in DTYPES for way in ("forward", "backward")}
    | {
        f"srm_compact_{kind}_{d}_{way}"
        for kind in ("scalar", "vector")
        for d in DTYPES
        for way in ("forward", "pack", "backward")
    }
    | {f"srm_gather_{d}" for d in DTYPES}
    | {f"event_{half}_{d}" for half in ("input", "weight") for d in DTYPES}
    | {"triton_forward", "triton_backward"}
)


def test_every_kernel_and_dtype_on_every_architecture(inspected):
    assert set(inspected) == ARCHITECTURES == set(source.ARCHITECTURES)
    for architecture, rows in inspected.items():
        assert {row.kernel for row in rows} == EXPECTED, architecture
        assert all(row.architecture == architecture for row in rows)
        assert all(row.dtype in row.kernel or row.kernel.startswith("triton") for row in rows)


def test_no_spill_and_no_stack(inspected):
    bad = [row for rows in inspected.values() for row in rows if row.spill_bytes or row.stack_bytes]
    assert not bad


def test_enough_warps_to_hide_memory(inspected):
    """``__launch_bounds__(128, 4)``: sixteen warps of every kernel fit a multiprocessor, whatever its size."""
    for architecture, rows in inspected.items():
        least = 16 / resources.MULTIPROCESSORS[architecture].warps
        assert all(row.occupancy >= least for row in rows), architecture


def test_a_warning_is_an_error_and_shows_the_log(tmp_path, monkeypatch):
    file = tmp_path / "warned.cu"
    file.write_text('extern "C" __global__ void k_float32(float* x) { int unused; x[0] = 1; }')
    monkeypatch.setitem(source.SOURCES, "warned", file)
    with pytest.raises(RuntimeError, match=r"NVRTC could not compile warned.cu for sm_90:\n.*unused"):
        source.compile_ptx("warned", "sm_90")
    assert "unused" in source.compile_ptx("warned", "sm_90", warnings_as_errors=False).log


def test_a_source_that_does_not_compile_shows_its_line(tmp_path, monkeypatch):
    file = tmp_path / "wrong.cu"
    file.write_text('extern "C" __global__ void k(float* x) {\n    x[0] = nothing;\n}')
    monkeypatch.setitem(source.SOURCES, "wrong", file)
    with pytest.raises(RuntimeError, match=r'wrong.cu\(2\): error: identifier "nothing" is undefined'):
        source.compile_ptx("wrong", "sm_75")


def test_includes_are_put_in_place_once_and_missing_ones_named(tmp_path, monkeypatch):
    (tmp_path / "inner.h").write_text("#pragma once\nint inner;\n")
    (tmp_path / "outer.h").write_text('#include "inner.h"\nint outer;\n')
    main = tmp_path / "main.cu"
    main.write_text('#include "outer.h"\n#include "inner.h"\n  #include "storage.cuh"\nint last;\n')
    monkeypatch.setitem(source.SOURCES, "main", main)
    text = source.text("main")
    assert text.count("int inner;") == 1 and text.index("int inner;") < text.index("int outer;") < text.index("last")
    assert "struct bf16" in text and "#include" not in text and "#pragma once" not in text
    main.write_text('#include "nowhere.h"\n')
    source.text.cache_clear()
    with pytest.raises(FileNotFoundError, match=r"main\.cu includes nowhere\.h"):
        source.text("main")


LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first_float32' for 'sm_90'
ptxas info    : Function properties for first_float32
    8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 1.000 ms
ptxas info    : Compiling entry function 'second_float64' for 'sm_90'
ptxas info    : Function properties for second_float64
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers, 400 bytes cmem[0]
"""


def test_what_ptxas_says_is_read():
    assert parse_ptxas(LOG) == {
        "first_float32": {"registers": 40, "stack": 8, "spill": 32, "shared": 512},
        "second_float64": {"registers": 16, "stack": 0, "spill": 0, "shared": 0},
    }


@pytest.mark.parametrize(
    ("registers", "shared", "architecture", "threads", "resident"),
    [
        # 65536 registers: a quarter is 16384. 32 registers: 1024 a warp, 16 a quarter, 64 in all: 16 blocks of 4.
        (32, 0, "sm_90", 128, 64 / 64),
        (32, 0, "sm_75", 128, 32 / 32),  # only 32 fit
        # 40 registers: 1280 a warp, 12 a quarter, 48 warps.
        (40, 0, "sm_90", 128, 48 / 64),
        (40, 0, "sm_86", 128, 48 / 48),
        # 41 registers: 1312, rounded up to 1536 a warp, 10 a quarter, 40 warps.
        (41, 0, "sm_80", 128, 40 / 64),
        # 128 registers: 4096 a warp, 4 a quarter, 16 warps.
        (128, 0, "sm_120", 128, 16 / 48),
        # 100 KiB of shared memory, 24 KiB and 1 KiB of the system's a block: 4 blocks of 4 warps.
        (16, 24576, "sm_89", 128, 16 / 48),
        # One warp a block: 32 blocks is the limit.
        (16, 0, "sm_100", 32, 32 / 64),
        (255, 0, "sm_90", 1024, 0.0),  # 1024 threads of 255 registers do not fit at all
    ],
)
def test_occupancy_by_hand(registers, shared, architecture, threads, resident):
    assert occupancy(registers, shared, architecture, threads) == pytest.approx(resident)


def test_bytes_of_a_step_by_hand():
    assert bytes_per_step("srm_raw_float32_forward", "float32") == 16  # current in; spikes and two slopes out
    assert bytes_per_step("srm_vector_float16_backward", "float16") == 12  # four tensors in, two gradients out
    # Current in, spikes and a bit out, two slopes at one step in ten.
    assert bytes_per_step("srm_compact_vector_float32_forward", "float32") == pytest.approx(4 + 4 + 0.125 + 0.8)
    assert bytes_per_step("srm_compact_vector_float32_backward", "float32") == pytest.approx(12 + 0.125 + 0.8)
    assert bytes_per_step("srm_gather_float32", "float32") == pytest.approx(1.6)


def test_the_compact_step_is_as_light_as_the_issue_asks(inspected):
    """A training step (forward, gather, backward) moves 1.6 times fewer bytes than the raw one... on paper."""
    step = {r.kernel: r.bytes_per_step for r in inspected["sm_90"] if r.dtype == "float32"}
    raw = step["srm_raw_float32_forward"] + step["srm_raw_float32_backward"]
    compact = sum(step[f"srm_{name}"] for name in ("compact_vector_float32_forward", "gather_float32"))
    assert raw / (compact + step["srm_compact_vector_float32_backward"]) >= 1.6


def inspect(capsys, *words: str) -> tuple[int, str, str]:
    code = runner.main(["inspect", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_inspect_prints_every_row(inspected, monkeypatch, capsys):
    monkeypatch.setattr(resources, "inspect", lambda name: [r for r in inspected[name] if "triton" not in r.kernel])
    monkeypatch.setattr(resources, "inspect_triton", lambda name: [r for r in inspected[name] if "triton" in r.kernel])
    code, out, err = inspect(capsys)
    assert (code, err) == (0, "")
    for architecture, rows in inspected.items():
        lines = [line.split() for line in out.splitlines() if f" {architecture} " in line]
        assert [line[0] for line in lines] == [row.kernel for row in rows]
        assert [int(line[3]) for line in lines] == [row.registers for row in rows]
    code, out, err = inspect(capsys, "--arch", "sm_90", "--json")
    assert (code, err) == (0, "") and [Resources(**row) for row in json.loads(out)] == inspected["sm_90"]


def test_inspect_fails_on_a_spill(tmp_path, monkeypatch, capsys):
    file = tmp_path / "greedy.cu"
    # 200 values live at once in at most 32 registers.
    file.write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 2) greedy_float32(float* x) {\n'
        "    float v[200];\n#pragma unroll\n    for (int i = 0; i < 200; ++i) v[i] = x[i * 7];\n"
        "    __syncthreads();\n#pragma unroll\n    for (int i = 0; i < 200; ++i) x[i] = v[199 - i];\n}\n"
    )
    monkeypatch.setattr(source, "SOURCES", {"greedy": file})
    monkeypatch.setattr(resources, "inspect_triton", lambda name: [])
    code, out, _ = inspect(capsys, "--arch", "sm_80")
    assert code == 3
    assert "spills: greedy_float32 on sm_80, " in out


def test_inspect_names_what_is_wrong(monkeypatch, capsys):
    code, out, err = inspect(capsys, "--arch", "sm_91")
    assert (code, out) == (2, "") and "unknown architecture 'sm_91' (did you mean 'sm_90'?)" in err
    monkeypatch.setattr(resources, "find_ptxas", lambda: None)
    code, out, err = inspect(capsys)
    assert (code, out) == (2, "") and "ptxas was not found: pip install nvidia-cuda-nvcc" in err
    monkeypatch.setattr(resources.importlib.util, "find_spec", lambda name: None)
    code, out, err = inspect(capsys)
    assert (code, out) == (2, "") and "pip install cuda-bindings" in err

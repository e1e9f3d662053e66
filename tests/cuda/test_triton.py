"""Triton's kernels: through the neuron's fault tests in Triton's interpreter; one compilation for all sizes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from spikemark import kernels
from spikemark.kernels.cuda import launch

TESTS = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (it is for Linux): pip install triton"
)
SIZES = ("total", "T", "D")
CONSTANTS = {"E_M": 0.8, "E_S": 0.7, "E_G": 0.6, "GAIN": 2.5, "V_TH": 1.0, "BLOCK": 512}


def test_the_neurons_fault_tests_pass_in_the_interpreter():
    """In a process of its own: triton reads ``TRITON_INTERPRET`` when a kernel is defined."""
    file = TESTS / "kernels" / "test_srm_neuron.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), "-k", "triton_fused"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=TESTS.parent,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed >= 40 and "skipped" not in done.stdout and "failed" not in done.stdout


def compiled(direction: str, dtype: str, sizes: str, state: str = "fp32"):
    import triton
    from spikemark.kernels.srm_neuron import _triton_kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(_triton_kernels, direction)
    wide = {"fp32": triton.language.float32, "fp64": triton.language.float64}[state]
    values = {n: CONSTANTS.get(n, wide) for n in function.arg_names if n in CONSTANTS or n == "STATE"}
    signature = {n: "constexpr" if n in values else (sizes if n in SIZES else f"*{dtype}") for n in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=values)
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": False})


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_product_of_sizes_is_in_32_bits(direction):
    """Triton passes a small integer as 32 bits; T * D may pass 2^31 all the same."""
    ir = compiled(direction, "fp32", "i32").asm["ttir"]
    products = re.findall(r"arith\.muli .* : (\S+)", ir)
    assert products and not [kind for kind in products if "i64" not in kind]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("dtype", "state"), [("fp16", "fp32"), ("bf16", "fp32"), ("fp64", "fp64")])
def test_every_dtype_compiles_with_its_state(direction, dtype, state):
    ptx = compiled(direction, dtype, "i64", state).asm["ptx"]
    multiply = {"fp32": "mul.f32", "fp64": "mul.f64"}[state]
    assert multiply in ptx.replace(".rn", "") and "fma" not in ptx
    assert ("f64" in ptx) == (state == "fp64")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sizes_are_no_part_of_the_compilation(direction):
    """The key under which Triton keeps a compilation is the same for all sizes that fit 32 bits, 1 and 16 included."""
    from spikemark.kernels.srm_neuron import _triton_kernels
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import jit

    if not hasattr(jit, "compute_cache_key"):
        pytest.skip("this triton keeps its compilations under another key")
    function = getattr(_triton_kernels, direction)
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    binder = jit.create_function_from_signature(function.signature, function.params, backend)
    constants = {n: CONSTANTS.get(n, "fp32") for n in function.arg_names if n in CONSTANTS or n == "STATE"}
    tensors = [torch.zeros(16)] * (len(function.arg_names) - len(constants) - len(SIZES))
    keys = set()
    for total, steps, features in ((1, 1, 1), (64, 16, 32), (65, 7, 13), (2**30, 2**10, 2**20)):
        _, specialization, options = binder(*tensors, total, steps, features, **constants)
        keys.add(jit.compute_cache_key({}, specialization, options))
    assert len(keys) == 1
    _, specialization, options = binder(*tensors, 64, 16, 32, **constants | {"E_M": 0.9})
    assert jit.compute_cache_key({}, specialization, options) not in keys  # the key does see what is compiled in


def test_the_launch_is_asked_for_with_the_right_sizes(monkeypatch):
    """A recorded kernel in place of Triton's: grid, sizes, constants, no fused multiply-add."""
    from spikemark.kernels.srm_neuron import _triton_kernels

    asked = []

    class Recorded:
        def __getitem__(self, grid):
            return lambda *arguments, **options: asked.append((grid, arguments, options))

    monkeypatch.setattr(_triton_kernels, "forward", Recorded())
    monkeypatch.setattr(launch, "check_device", lambda name, **tensors: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    neuron = kernels.get("srm_neuron", "triton_fused")
    params = kernels.SrmParams(tau_m=7, tau_s=4, tau_g=3.5)
    neuron.forward(torch.zeros(3, 5, 7, 50), params)
    ((grid, arguments, options),) = asked
    assert grid == (3,) and arguments[4:] == (3 * 7 * 50, 5, 7 * 50)
    assert options["enable_fp_fusion"] is False and options["E_M"] == params.e_m and options["V_TH"] == 1.0
    assert neuron.ran == "triton forward float32"
    neuron.forward(torch.zeros(3, 0, 7), params)
    assert len(asked) == 1

"""Every implementation through the gate on the GPU: values, layouts, ends, dtypes; and past 2^31 elements."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import ALL, PARAMS, problem
from layouts import same_bits
from spikemark.harness.checks import verify_case
from spikemark.harness.records import Case
from spikemark.harness.verify import Refused
from spikemark.kernels.definition import DTYPES
from spikemark.kernels.state import SrmState

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("operator", "name", "phase"), ALL, ids="-".join)
def test_values_layouts_and_ends(get, operator, name, phase, dtype):
    implementation = get(operator, name)
    checks = []
    for neurons in (1040, 1031) if operator == "srm_neuron" else (0,):
        case = Case(operator, phase, name, "cuda:0", dtype, problem(operator, neurons))
        try:
            checks += verify_case(case, implementation)
        except Refused as refused:
            assert refused.status == "unsupported" and refused.reason
            pytest.skip(refused.reason)
    wrong = [f"{check.name}: {check.reason}" for check in checks if not check.ok]
    assert len(checks) > 5 and not wrong
    assert implementation.ran or implementation.device == "any"


@pytest.mark.parametrize("name", ["torch_vectorized", "cupy_raw", "cupy_vectorized", "cupy_compact", "triton_fused"])
def test_more_than_two_to_the_31_elements(get, name):
    """One sample of 2^31 + 2^24 neuron-steps; its last neurons against the same neurons alone, bit for bit."""
    neuron, steps = get("srm_neuron", name), 16
    neurons = 2**31 // steps + 2**20
    need = 8 * 2 * steps * neurons
    if torch.cuda.mem_get_info()[0] < need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of free GPU memory")
    current = torch.empty((1, steps, neurons), dtype=torch.float16, device="cuda")
    current.normal_(0.0, 4.0, generator=torch.Generator("cuda").manual_seed(0))
    state = neuron.forward(current, PARAMS)
    small = neuron.forward(current[..., -4096:].contiguous(), PARAMS)
    assert same_bits(state.spikes[..., -4096:].contiguous(), small.spikes) and small.spikes.any()
    grads = neuron.backward(current, state, PARAMS)
    wanted = neuron.backward(current[..., -4096:].contiguous(), small, PARAMS)
    assert all(same_bits(g[..., -4096:].contiguous(), w) for g, w in zip(grads, wanted, strict=True))
    del state, grads
    torch.cuda.empty_cache()


def test_compact_is_vectorized_bit_for_bit(get):
    dense, compact = get("srm_neuron", "cupy_vectorized"), get("srm_neuron", "cupy_compact")
    for dtype in DTYPES.values():
        for shape in ((3, 17, 4096), (2, 9, 1031)):
            current = (torch.randn(shape, device="cuda") * 4).to(dtype)
            grad = torch.randn(shape, device="cuda").to(dtype)
            state = dense.forward(current, PARAMS)
            assert isinstance(state, SrmState) and 0.02 < state.spikes.float().mean() < 0.6
            want = dense.backward(grad, state, PARAMS)
            got = compact.backward(grad, compact.forward(current, PARAMS), PARAMS)
            assert all(same_bits(a, b) for a, b in zip(got, want, strict=True)), (dtype, shape)

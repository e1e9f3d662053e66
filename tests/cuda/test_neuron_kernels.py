"""The neuron's CUDA kernels, emulated: compact against dense bit for bit, any order of threads, offsets past 2^31."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from layouts import same_bits
from spikemark import kernels
from spikemark.kernels.definition import DTYPES, definition
from spikemark.kernels.srm_neuron import _cupy
from spikemark.kernels.types import Problem
from stand_ins import emulator

PARAMS = kernels.SrmParams(tau_m=7.0, tau_s=4.0, tau_g=3.5)
SHAPES = [(2, 9, 40), (3, 17, 7), (1, 8, 4096 + 24), (5, 1, 3), (2, 33, 2, 3, 4)]
NAMES = ("cupy_raw", "cupy_vectorized", "cupy_compact")


@pytest.fixture(autouse=True)
def emulated():
    """The emulator; its order of threads is put back."""
    made = emulator()
    yield made
    made.order = 0


def random(shape, dtype, seed=0, scale=4.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_compact_is_vectorized_bit_for_bit(emulated, dtype, order):
    emulated.order = order
    raw, dense, compact = (kernels.get("srm_neuron", name) for name in NAMES)
    for shape in SHAPES:
        current, grad = random(shape, dtype), random(shape, dtype, seed=1)
        state, small = dense.forward(current, PARAMS), compact.forward(current, PARAMS)
        assert 0.02 < state.spikes.float().mean() < 0.6
        assert same_bits(state.spikes, small.spikes)
        want = dense.backward(grad, state, PARAMS)
        for name, got in (
            ("compact", compact.backward(grad, small, PARAMS)),
            ("packed", compact.backward(grad, compact.pack(state), PARAMS)),
            ("raw", raw.backward(grad, raw.forward(current, PARAMS), PARAMS)),
        ):
            assert all(same_bits(a, b) for a, b in zip(got, want, strict=True)), (name, shape)


def test_packing_is_what_forward_saves():
    dense, compact = kernels.get("srm_neuron", "cupy_vectorized"), kernels.get("srm_neuron", "cupy_compact")
    current = random((2, 11, 260), torch.float32)
    saved = compact.forward(current, PARAMS).saved
    packed = compact.pack(dense.forward(current, PARAMS)).saved
    assert all(same_bits(saved[name], packed[name]) for name in ("bits", "slopes", "offsets"))
    spikes = dense.forward(current, PARAMS).spikes
    assert saved["slopes"].shape == (int(spikes.sum()), 2) and saved["offsets"][-1] == spikes.sum()
    for t in range(11):
        assert torch.equal(saved["bits"][:, t // 8] >> (t % 8) & 1, spikes[:, t].to(torch.uint8))


def test_compact_keeps_at_most_a_byte_and_a_half_a_step_at_ten_per_cent():
    problem = Problem("test", "neuron", 8, 16, (1024,), (1024,), PARAMS, spike_rate=0.1)
    inputs = definition("srm_neuron").make_inputs(problem, "forward", torch.float32, "cpu", 0)
    current = inputs.tensors["current"]
    state = kernels.get("srm_neuron", "cupy_compact").forward(current, PARAMS)
    rate = state.spikes.mean().item()
    assert 0.09 < rate < 0.11
    held = sum(t.untyped_storage().nbytes() for t in state.saved.values()) / current.numel()
    assert held <= 1.5
    assert held == pytest.approx(1 / 8 + 8 * rate + 8 / (32 * 4 * 16), rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_that_ran_is_named(emulated, name):
    neuron = kernels.get("srm_neuron", name)
    wide = {"cupy_raw": "raw", "cupy_vectorized": "vector", "cupy_compact": "compact_vector"}[name]
    narrow = {"cupy_raw": "raw", "cupy_vectorized": "scalar", "cupy_compact": "compact_scalar"}[name]
    for shape, kind in (((2, 3, 8), wide), ((2, 3, 7), narrow)):
        emulated.launched.clear()
        state = neuron.forward(random(shape, torch.float32), PARAMS)
        assert neuron.ran == f"srm_{kind}_float32_forward" and emulated.launched[0] == neuron.ran
        neuron.backward(random(shape, torch.float32), state, PARAMS)
        assert neuron.ran == f"srm_{kind}_float32_backward" == emulated.launched[-1]
    emulated.launched.clear()
    neuron.forward(torch.empty(0, 3, 8), PARAMS)
    assert not emulated.launched


def test_tensors_that_start_off_sixteen_bytes_take_narrow_accesses():
    buffer = random((2 * 5 * 8 + 1,), torch.float32)
    shifted = buffer[1:].view(2, 5, 8)
    assert shifted.data_ptr() % 16
    vectorized = kernels.get("srm_neuron", "cupy_vectorized")
    got = vectorized.forward(shifted, PARAMS)
    assert vectorized.ran == "srm_scalar_float32_forward"
    want = vectorized.forward(shifted.clone(), PARAMS)
    assert vectorized.ran == "srm_vector_float32_forward" and same_bits(got.spikes, want.spikes)
    compact = kernels.get("srm_neuron", "cupy_compact")
    assert same_bits(
        compact.forward(shifted, PARAMS).saved["slopes"], compact.forward(shifted.clone(), PARAMS).saved["slopes"]
    )


# Far more neurons than memory holds: the grid starts at its last blocks, and every pointer is moved back by what the
# blocks before would have covered. An offset in 32 bits then lands somewhere else, and the process dies.
FAR_BATCH, STEPS, NEURONS = 2**31 // (3 * 128) + 5, 3, 128


def moved(tensor: torch.Tensor, elements: int) -> int:
    return (tensor.data_ptr() - elements * tensor.element_size()) % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["raw", "scalar", "vector"])
def test_dense_kernels_at_offsets_past_two_to_the_31(emulated, dtype, kind):
    current, grad = random((1, STEPS, NEURONS), dtype), random((1, STEPS, NEURONS), dtype, seed=1)
    neuron = kernels.get("srm_neuron", "cupy_raw")
    state = neuron.forward(current, PARAMS)
    wanted = [state.spikes, state.delta_u, state.delta_ut, *neuron.backward(grad, state, PARAMS)]
    width = 16 // dtype.itemsize if kind == "vector" else 1
    per_block = 128 * width
    batch = FAR_BATCH // width * width + 1  # the last sample begins a block
    packs = batch * NEURONS // width
    block = (batch - 1) * NEURONS // per_block
    assert (batch - 1) * NEURONS % per_block == 0
    back = (batch - 1) * STEPS * NEURONS
    assert back > 2**31
    scalars = [packs, STEPS, NEURONS, *_cupy.constants(dtype, PARAMS)]
    name = f"srm_{kind}_{_cupy.dtype_name(dtype)}"
    outs = [torch.empty_like(current) for _ in range(5)]
    at = [moved(t, back) for t in (current, *outs[:3])]
    emulated.launch("srm", f"{name}_forward", 1, [*at, *scalars], torch.device("cpu"), first=block)
    at = [moved(t, back) for t in (grad, *outs)]
    emulated.launch("srm", f"{name}_backward", 1, [*at, *scalars], torch.device("cpu"), first=block)
    assert all(same_bits(a, b) for a, b in zip(outs, wanted, strict=True))


@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_compact_kernels_at_offsets_past_two_to_the_31(emulated, kind):
    dtype, cpu = torch.float32, torch.device("cpu")
    current, grad = random((1, STEPS, NEURONS), dtype), random((1, STEPS, NEURONS), dtype, seed=1)
    neuron = kernels.get("srm_neuron", "cupy_raw")
    state = neuron.forward(current, PARAMS)
    wanted = neuron.backward(grad, state, PARAMS)
    width = 4 if kind == "vector" else 1
    batch = FAR_BATCH // width * width + 1
    packs, block = batch * NEURONS // width, (batch - 1) * NEURONS // (128 * width)
    back = (batch - 1) * STEPS * NEURONS
    first_warp, warps, capacity = (batch - 1) * NEURONS // width // 32, NEURONS // width // 32, 32 * width * STEPS
    scalars = [packs, STEPS, NEURONS, *_cupy.constants(dtype, PARAMS)]
    spikes, bits = torch.empty_like(current), torch.zeros((1, 1, NEURONS), dtype=torch.uint8)
    workspace, counts = torch.empty((warps * capacity, 2)), torch.zeros(warps, dtype=torch.int64)
    at = [moved(current, back), moved(spikes, back), moved(bits, (batch - 1) * NEURONS)]
    at += [moved(workspace, 2 * first_warp * capacity), moved(counts, first_warp)]
    name = f"srm_compact_{kind}_float32"
    emulated.launch("srm", f"{name}_forward", 1, [*at, *scalars], cpu, first=block)
    assert same_bits(spikes, state.spikes)
    # Pairs that lie past 2^31 themselves: the first warp's start there.
    start = 2**31 + 6
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]) + start
    slopes = torch.empty((int(counts.sum()), 2))
    gather = [moved(workspace, 2 * first_warp * capacity), moved(offsets, first_warp), moved(slopes, 2 * start)]
    blocks = first_warp * 32 // 128
    gather += [np.int64(first_warp + warps), np.int64(capacity)]
    emulated.launch("srm", "srm_gather_float32", 1, gather, cpu, first=blocks)
    grads = [torch.empty_like(grad) for _ in range(2)]
    at = [moved(grad, back), moved(bits, (batch - 1) * NEURONS), moved(slopes, 2 * start), moved(offsets, first_warp)]
    emulated.launch("srm", f"{name}_backward", 1, [*at, *(moved(g, back) for g in grads), *scalars], cpu, first=block)
    assert all(same_bits(a, b) for a, b in zip(grads, wanted, strict=True))

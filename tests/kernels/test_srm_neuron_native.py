"""What is particular to the native neurons: threads, layouts read in place, indices, builds, compact state."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import same_bits, same_values
from spikemark import kernels
from spikemark.harness import clock
from spikemark.kernels.definition import definition
from spikemark.kernels.srm_neuron import _native, native_compact
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import Problem, SrmParams

PARAMS = SrmParams(tau_m=7.0, tau_s=4.0, tau_g=3.5)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TILE = 4096
NATIVE, COMPACT = (kernels.get("srm_neuron", name) for name in ("native", "native_compact"))

REASON = NATIVE.reason or COMPACT.reason
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


def random(shape, dtype=torch.float32, seed=0, scale=5.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def everything(current, grad):
    """All outputs of both implementations."""
    state, compact = NATIVE.forward(current, PARAMS), COMPACT.forward(current, PARAMS)
    both = [*NATIVE.backward(grad, state, PARAMS), *COMPACT.backward(grad, compact, PARAMS)]
    return [state.spikes, state.delta_u, state.delta_ut, compact.spikes, *both]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 8, 9001), (5, 6, 3001)])
def test_results_do_not_depend_on_the_number_of_threads(threads, dtype, shape):
    current, grad = random(shape, dtype), random(shape, dtype, 1)
    threads(1)
    want = everything(current, grad)
    for count in (2, 3, 7):
        threads(count)
        assert all(same_bits(a, b) for a, b in zip(everything(current, grad), want, strict=True)), count


@pytest.fixture
def caches():
    """Pretends that the last caches hold so many bytes, in both libraries."""
    libraries = [library.load().spikemark_cache_bytes for library in _native.LIBRARIES.values()]
    for function in libraries:
        function.restype, function.argtypes = ctypes.c_int64, (ctypes.c_int64, ctypes.c_int)
    yield lambda size, threads=1: [function(size, threads) for function in libraries]
    for function in libraries:
        function(0, 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2, 7, 4096 + 64), (1, 4, 9001), (3, 5, 2, 3, 32), (1, 5, 64)])
def test_stores_past_the_caches_change_no_bit(caches, dtype, shape):
    current, grad = random(shape, dtype), random(shape, dtype, 1)
    assert caches(1 << 40) == [1 << 40] * 2
    want = everything(current, grad)
    assert caches(1) == [1, 1]
    assert all(same_bits(a, b) for a, b in zip(everything(current, grad), want, strict=True))


def test_the_caches_are_those_that_the_harness_flushes(caches):
    """glibc's sysconf says 320 MiB where there are 32: then nothing was stored past the caches, whatever its size."""
    known = clock.cache_bytes(torch.device("cpu"))
    if not known:
        pytest.skip("this machine does not say how large its caches are")
    assert caches(0, 1 << 20) == [known, known], "all of them together"
    assert 0 < caches(0, 1)[0] <= known, "one thread's are the largest one"


def test_the_dense_state_is_the_baselines_bit_for_bit():
    current = random((2, 6, 3000))
    state, want = NATIVE.forward(current, PARAMS), kernels.get("srm_neuron", "torch_eager").forward(current, PARAMS)
    for name in ("spikes", "delta_u", "delta_ut"):
        assert torch.equal(getattr(state, name), getattr(want, name)), name


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("features", [1, 7, 8, 17, TILE + 13])
def test_the_dense_neuron_keeps_its_spikes_as_bits(dtype, features):
    current, grad = random((3, 5, features), dtype), random((3, 5, features), dtype, 1)
    state = NATIVE.forward(current, PARAMS)
    bits = np.unpackbits(state.saved["bits"].numpy(), axis=2, count=features, bitorder="little")
    assert torch.equal(torch.from_numpy(bits), state.spikes.to(torch.uint8))
    kept = state.for_backward()
    assert [t.data_ptr() for t in kept[1:]] == [state.delta_u.data_ptr(), state.delta_ut.data_ptr()]
    assert kept[0].numel() == 15 * -(-features // 8), "one bit a neuron-step, and not the spikes besides"
    # A dense state of another implementation has no bits: it is packed, and gives the same.
    dense = SrmState(state.spikes, state.delta_u, state.delta_ut)
    assert torch.equal(NATIVE.pack(dense).saved["bits"], state.saved["bits"])
    pairs = zip(NATIVE.backward(grad, state, PARAMS), NATIVE.backward(grad, dense, PARAMS), strict=True)
    assert all(same_bits(a, b) for a, b in pairs)


def features_outermost(tensor):
    """The same values with the last axis outermost in memory."""
    return tensor.transpose(0, 2).contiguous().transpose(0, 2)


def test_a_state_in_another_layout_gives_the_same_gradients():
    current, grad = random((2, 12, 5000)), random((2, 12, 5000), seed=1)
    state, compact = NATIVE.forward(current, PARAMS), COMPACT.forward(current, PARAMS)
    want = NATIVE.backward(grad, state, PARAMS)
    dense = SrmState(*(features_outermost(t) for t in (state.spikes, state.delta_u, state.delta_ut)))
    own = dataclasses.replace(state, saved={n: features_outermost(t) for n, t in state.saved.items()})
    turned = {
        "bits": features_outermost(compact.saved["bits"]),
        "tiles": compact.saved["tiles"].t().contiguous().t(),
        "slopes": compact.saved["slopes"].t().contiguous().t(),
    }
    got = [NATIVE.backward(grad, dense, PARAMS), NATIVE.backward(grad, own, PARAMS)]
    got += [COMPACT.backward(grad, COMPACT.pack(dense), PARAMS)]
    got += [COMPACT.backward(grad, dataclasses.replace(compact, saved=turned), PARAMS)]
    for gradients in got:
        assert all(same_bits(a, b) for a, b in zip(gradients, want, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: {"tiles": saved["tiles"][:0]},
        lambda saved: {"tiles": saved["tiles"].int()},
        lambda saved: {"tiles": saved["tiles"] + 10**9},
        lambda saved: {"tiles": saved["tiles"] - 1},
        lambda saved: {"slopes": saved["slopes"][:, :10]},
        lambda saved: {"bits": saved["bits"].long()},
        lambda saved: {"bits": saved["bits"].bool()},
        lambda saved: {"bits": saved["bits"][:, :, :-1]},
    ],
)
def test_a_compact_state_that_cannot_be_is_refused(change):
    current = random((2, 12, 5000))
    compact = COMPACT.forward(current, PARAMS)
    altered = dataclasses.replace(compact, saved=dict(compact.saved) | change(compact.saved))
    with pytest.raises(ValueError, match=r"state (is for|has) "):
        COMPACT.backward(torch.ones_like(current), altered, PARAMS)


def test_streamed_outputs_are_those_of_cached_ones():
    # More output than any last cache holds here would be slow: the same neurons, once in a case past the limit of
    # 32 MiB that most machines have, once alone. Rows of 2**15 are whole vectors, so stores may stream.
    current, grad = random((44, 4, 2**15)), random((44, 4, 2**15), seed=1)
    big = everything(current, grad)
    for sample in (0, 43):
        small = everything(current[sample : sample + 1], grad[sample : sample + 1])
        assert all(same_bits(a[sample : sample + 1], b) for a, b in zip(big, small, strict=True))


def test_which_layouts_are_read_in_place():
    tensor = random((3, 4, 4, 5, 20))
    views = dict(same_values(tensor))
    in_place = {label for label, view in views.items() if _native.readable(view).data_ptr() == view.data_ptr()}
    assert in_place == set(views) - {
        "all axes reversed in memory",
        "features first, time last in memory",
        "channels last",
    }
    expanded = tensor[:, :, :, :1, :1].expand_as(tensor)
    assert _native.readable(expanded).data_ptr() == expanded.data_ptr()


def test_merged_axes():
    tensor = torch.empty(2, 3, 4, 5, 6)
    assert _native.merged_axes(tensor) == ([120], [1])
    assert _native.merged_axes(tensor[..., ::2]) == ([60], [2])
    assert _native.merged_axes(tensor[:, :, :, :4]) == ([4, 24], [30, 1])
    assert _native.merged_axes(tensor.expand(2, 3, 4, 5, 6)[:, :, :1]) == ([30], [1])
    assert _native.merged_axes(torch.empty(1, 1, 1, 1, 1).expand(2, 3, 4, 5, 6)) == ([120], [0])
    assert _native.merged_axes(torch.empty(5, 6)[::2, ::2]) == ([], [])


def test_index_arithmetic_beyond_32_bits():
    offset = _native.function("srm_offset")
    sizes, strides = (3, 50_000, 70_001), (2**40 + 1, 90_000, 1)
    layout = _native._Layout(2**45 + 3, 2**33 + 7, 3, *sizes, *strides)
    for sample, t, at in ((0, 0, (0, 0, 0)), (5, 1365, (2, 49_999, 70_000)), (70_000, 3, (1, 2, 3))):
        index = (at[0] * sizes[1] + at[1]) * sizes[2] + at[2]
        want = sample * (2**45 + 3) + t * (2**33 + 7) + sum(i * s for i, s in zip(at, strides, strict=True))
        assert offset(layout, sample, t, index) == want
    # CIFAR-10's first layer at T = 12 from batch 1366 on (fault 2), as one dense axis.
    dense = _native._Layout(12 * 131072, 131072, 1, 131072, 1)
    assert offset(dense, 1365, 11, 131071) == 1366 * 12 * 131072 - 1 > 2**31


@pytest.mark.parametrize("machine", ["x86-64", "skylake-avx512"])
def test_plain_and_avx512_builds_give_the_same_bits(monkeypatch, machine):
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "sse2" not in cpuinfo:
        pytest.skip("needs an x86-64 processor and Linux")
    flags = (f"-march={machine}", "-O1")  # after -march=native, so instead of it
    others = {name: dataclasses.replace(library, flags=flags) for name, library in _native.LIBRARIES.items()}
    if {"x86-64": "sse2", "skylake-avx512": "avx512dq"}[machine] not in cpuinfo:
        for library in others.values():
            assert library.unavailable() is None, "it must build, though this processor cannot run it"
        return
    shape = (2, 5, TILE + 13)
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).reshape(1, 2, 32768)
    cases = [(random(shape, d), random(shape, d, 1)) for d in FLOATS] + [(halves, halves.flip(2))]
    want = [everything(*case) for case in cases]
    monkeypatch.setattr(_native, "LIBRARIES", others)
    _native.function.cache_clear()
    try:
        got = [everything(*case) for case in cases]
    finally:
        monkeypatch.undo()
        _native.function.cache_clear()
    for result, expected in zip(got, want, strict=True):
        for a, b in zip(result, expected, strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            assert same_bits(a.nan_to_num(0.0), b.nan_to_num(0.0))


# Compact state


def unpacked(state: SrmState, like):
    """The dense slopes that a compact state stands for, 0 where no spike is, read as its format is documented."""
    batch, steps, neurons = like.shape
    bits = state.saved["bits"][..., None].bitwise_right_shift(torch.arange(8)).bitwise_and(1)
    spikes = bits.reshape(batch, steps, -1)[..., :neurons]
    slopes = torch.zeros(2, batch, steps, neurons, dtype=like.dtype)
    tiles = -(-neurons // TILE)
    lanes = _native.function("srm_compact_lanes")(_native.DTYPE_CODES[like.dtype])
    for piece, (start, count) in enumerate(state.saved["tiles"].tolist()):
        sample, first = piece // tiles, piece % tiles * TILE
        where = spikes[sample, :, first : first + TILE].nonzero()
        assert len(where) == count
        # Two steps at once, vector by vector: as the walk meets them. nonzero() goes by step, then by neuron.
        where = where[((where[:, 0] // 2 * TILE + where[:, 1] // lanes) * 2 + where[:, 0] % 2).argsort(stable=True)]
        slopes[:, sample, where[:, 0], first + where[:, 1]] = state.saved["slopes"][:, start : start + count]
    return spikes, slopes


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2, 5, 3), (3, 4, TILE), (2, 6, TILE * 2 + 77)])
def test_compact_state_holds_what_the_dense_one_has_at_spikes(dtype, shape):
    current = random(shape, dtype)
    dense = NATIVE.forward(current, PARAMS)
    assert 0 < dense.spikes.float().mean() < 0.6
    for state in (COMPACT.forward(current, PARAMS), COMPACT.pack(dense)):
        spikes, slopes = unpacked(state, current)
        assert torch.equal(state.spikes, dense.spikes)
        assert torch.equal(spikes, dense.spikes.to(spikes.dtype))
        assert torch.equal(slopes[0], dense.delta_u * dense.spikes)
        assert torch.equal(slopes[1], dense.delta_ut * dense.spikes)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [0.0, 2.0, 5.0, 1e4])
def test_compact_gradients_are_natives_bit_for_bit(dtype, scale):
    shape = (3, 5, 2 * TILE + 13)
    current, grad = random(shape, dtype, scale=scale), random(shape, dtype, 1)
    current = current.abs() if scale == 1e4 else current
    dense = NATIVE.forward(current, PARAMS)
    want = NATIVE.backward(grad, dense, PARAMS)
    for state in (COMPACT.forward(current, PARAMS), COMPACT.pack(dense)):
        got = COMPACT.backward(grad, state, PARAMS)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("where", "forwards"), [("unseen tiles", 2), ("a seen tile", 1), ("seen tiles", 1), ("one sample", 2)]
)
def test_a_sample_that_misleads_costs_time_but_no_spike(monkeypatch, where, forwards):
    """Of 1024 pieces of 512 neurons every 31st is looked at: too few spikes are expected, or too many."""
    shape = (8, 4, 64 * 1024)
    monkeypatch.setattr(native_compact, "SLACK", 1.0)
    called, call = [], _native.call
    monkeypatch.setattr(_native, "call", lambda name, *rest: (called.append(name), call(name, *rest)))
    current, hot = torch.zeros(shape), random(shape, scale=20.0)
    if where == "one sample":
        current[3] = hot[3]
    else:
        pieces = {"unseen tiles": range(1015, 1023), "a seen tile": [1023], "seen tiles": range(0, 1024, 31)}
        for piece in pieces[where]:
            part = slice(piece % 128 * 512, piece % 128 * 512 + 512)
            current[piece // 128, :, part] = hot[piece // 128, :, part]
    state = COMPACT.forward(current, PARAMS)
    assert called == ["srm_compact_count"] + ["srm_compact_forward"] * forwards
    dense = NATIVE.forward(current, PARAMS)
    spikes = int(dense.spikes.count_nonzero())
    assert spikes > 500
    assert state.saved["tiles"][:, 1].sum() == spikes
    assert state.saved["tiles"].min() >= 0
    grad = random(shape, seed=1)
    got, want = COMPACT.backward(grad, state, PARAMS), NATIVE.backward(grad, dense, PARAMS)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("shape", [(2, 12, 300), (4, 12, 128 * 1024)])
def test_saved_bytes_at_ten_percent_firing(shape):
    problem = Problem("test", "neuron", shape[0], shape[1], shape[2:], shape[2:], PARAMS, spike_rate=0.1)
    inputs = definition("srm_neuron").make_inputs(problem, "forward", torch.float32, "cpu", 0)
    assert inputs.spike_rate == pytest.approx(0.1, rel=0.15)
    state = COMPACT.forward(inputs.tensors["current"], PARAMS)
    saved = state.for_backward()
    assert not any(t is state.spikes for t in saved)
    held = sum(t.untyped_storage().nbytes() for t in saved)
    assert held <= 1.5 * state.spikes.numel()


def test_a_state_of_another_kind_or_shape_is_an_error():
    current = random((2, 5, 40))
    grad = random((2, 5, 40), seed=1)
    with pytest.raises(ValueError, match="native_compact"):
        COMPACT.backward(grad, NATIVE.forward(current, PARAMS), PARAMS)
    with pytest.raises(ValueError, match="no delta_u"):
        NATIVE.backward(grad, COMPACT.forward(current, PARAMS), PARAMS)
    with pytest.raises(ValueError, match="shape"):
        COMPACT.backward(grad[:, :, :30], COMPACT.forward(current, PARAMS), PARAMS)
    with pytest.raises(ValueError, match="grad_out"):
        NATIVE.backward(grad[:1], NATIVE.forward(current, PARAMS), PARAMS)
    with pytest.raises(ValueError, match="current"):
        NATIVE.forward(torch.zeros(3), PARAMS)


def test_a_failing_kernel_is_an_error():
    with pytest.raises(RuntimeError, match="srm_compact_scratch"):
        _native.check("srm_compact_scratch", 0, 1, 1)  # returns a size, which `check` must take for a failure
    layout = (ctypes.c_int64 * 5)(0, 0, 1, 1, 1)
    assert _native.function("srm_forward")(9, _native._Params(), None, layout, 1, 1, 1, 1, *[None] * 4) == 1

"""``torch_compile``: one graph for all sizes, chunks of long runs, and no silent run of the Python code.

Only how graphs are asked for is looked at here, with a back end that runs them as they are: it compiles in no time.
What inductor makes of them is tested with every other implementation.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch._dynamo
from spikemark import kernels
from spikemark.kernels.srm_neuron import torch_compile
from spikemark.kernels.types import SrmParams

COMPILED, EAGER = (kernels.get("srm_neuron", name) for name in ("torch_compile", "torch_eager"))
PARAMS = SrmParams(tau_m=7.0, tau_s=4.0, tau_g=3.5)


def random(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 5


@pytest.fixture(autouse=True)
def fresh_graphs():
    """Graphs of these tests only; those of others are put back."""
    torch_compile.compiled.cache_clear()
    yield
    torch_compile.compiled.cache_clear()


@pytest.fixture
def no_inductor(monkeypatch):
    found = torch._dynamo.lookup_backend("eager")
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: found)


def assert_as_eager(shape, params=PARAMS):
    current, grad = random(shape), random(shape, 1)
    want = EAGER.forward(current, params)
    got = COMPILED.forward(current, params)
    for name in ("spikes", "delta_u", "delta_ut"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name))
    for a, b in zip(COMPILED.backward(grad, want, params), EAGER.backward(grad, want, params), strict=True):
        torch.testing.assert_close(a, b)


def graphs(steps, chunked=False):
    """The forward's and the backward's graph."""
    threads = torch.get_num_threads()
    return [torch_compile.compiled(p, steps, chunked, torch.float32, "cpu", threads) for p in ("forward", "backward")]


def test_the_recursion_limit_stays_what_it_was(monkeypatch):
    eager, limit = torch._dynamo.lookup_backend("eager"), sys.getrecursionlimit()

    def inductor(graph, inputs):
        sys.setrecursionlimit(limit + 1000)  # as torch's does
        return eager(graph, inputs)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: inductor)
    assert_as_eager((2, 3, 7))
    assert sys.getrecursionlimit() == limit


def test_no_process_and_no_thread_of_the_compiler_stays_beside_what_is_measured():
    code = (
        "import psutil, threading, torch; from spikemark import kernels\n"
        "compiled, params = kernels.get('srm_neuron', 'torch_compile'), kernels.SrmParams()\n"
        "state = compiled.forward(torch.rand(2, 4, 8), params); compiled.backward(torch.rand(2, 4, 8), state, params)\n"
        "print([p.cmdline() for p in psutil.Process().children(recursive=True)], len(threading.enumerate()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout.strip() == "[] 1", done.stdout + done.stderr


def test_sizes_and_constants_compile_nothing_new(no_inductor):
    for shape in ((2, 4, 3, 8), (5, 4, 33), (3, 4, 16, 4), (7, 4, 2)):
        assert_as_eager(shape)
    assert_as_eager((2, 4, 5), SrmParams(tau_m=3.0, tau_s=6.0, tau_g=2.0, v_th=0.5))
    assert [g.compilations for g in graphs(4)] == [1, 1]


def test_size_one_compiles_once_more(no_inductor):
    for shape in ((3, 4, 8), (1, 4, 8), (1, 4, 40), (2, 4, 8)):
        assert_as_eager(shape)
    assert all(g.compilations <= 2 for g in graphs(4))


def test_long_runs_go_in_chunks_that_hand_their_state_on(no_inductor, monkeypatch):
    monkeypatch.setattr(torch_compile, "MOST_STEPS", 3)
    assert torch_compile.chunks(7) == [(0, 3), (3, 3), (6, 1)]
    assert torch_compile.chunks(8) == [(0, 3), (3, 3), (6, 2)]
    assert torch_compile.chunks(4) == [(0, 2), (2, 2)]
    assert_as_eager((2, 7, 30))
    assert_as_eager((3, 4, 30))
    # The chunk at the very beginning of memory counts as a size of its own.
    assert all(g.compilations <= 2 for g in graphs(2, True))


def test_every_length_has_its_own_graphs_beyond_the_recompile_limit(no_inductor):
    for steps in range(1, torch._dynamo.config.recompile_limit + 3):
        assert_as_eager((2, steps, 5))


def test_a_failing_compiler_is_an_error_even_where_torch_is_told_to_hide_it(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("the compiler broke")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: broken)
    with torch._dynamo.config.patch(suppress_errors=True):
        with pytest.raises(Exception, match="the compiler broke"):
            COMPILED.forward(random((2, 4, 8)), PARAMS)
        assert torch._dynamo.config.suppress_errors, "the setting of others is as it was"


def test_a_switched_off_compiler_is_an_error(monkeypatch):
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(RuntimeError, match=r"switched off|no compiled frames"),
    ):
        COMPILED.forward(random((2, 4, 8)), PARAMS)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert "TORCH_COMPILE_DISABLE" in COMPILED.unavailable()


def test_a_missing_compiler_is_a_reason(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in COMPILED.unavailable()


def test_it_leaves_gradient_mode_and_other_functions_alone(no_inductor):
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    other = torch.compile(lambda x: x.sin() + 1, backend=backend)
    x = torch.ones(3, requires_grad=True)
    other(x).sum().backward()
    assert_as_eager((2, 4, 8))
    other(x)
    assert len(calls) == 1, "compiled functions of others are still there"
    assert torch.is_grad_enabled()
    assert not COMPILED.forward(random((2, 4, 8)).requires_grad_(), PARAMS).spikes.requires_grad

"""``cudnn_frontend``: which plan is taken and why, what is cached, and its graphs built by NVIDIA's own package.

That the numbers are right, whatever the geometry and layout, is in ``test_conv_backward.py``, on the same stand-in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from importlib.machinery import PathFinder
from types import SimpleNamespace

import fake_cudnn
import pytest
import torch
from spikemark import kernels
from spikemark.kernels.conv_backward import _cudnn_graphs as graphs
from spikemark.kernels.types import ConvGeometry, Problem
from stand_ins import callable_here

GEOMETRY = ConvGeometry(stride=2, padding=1, groups=2)


@pytest.fixture
def conv(monkeypatch):
    (found,) = [i for i in callable_here("conv_backward") if i.name == "cudnn_frontend"]
    graphs.plan_for.cache_clear()
    monkeypatch.setattr(fake_cudnn.Graph, "built", [])
    yield found
    graphs.plan_for.cache_clear()


def make(dtype=torch.float32, frames=2):
    x = (torch.rand((frames, 4, 9, 8)) < 0.3).to(dtype)
    return torch.randn((frames, 6, 5, 4)).to(dtype), torch.randn((6, 2, 3, 3)).to(dtype), x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_first_plan_that_keeps_the_rules_is_taken_and_named(conv, dtype):
    grad, weight, x = make(dtype)
    conv.input(grad, weight, x, GEOMETRY)
    # Tensor cores are TF32 for float32 only; for the narrow dtypes they multiply exactly and sum in float32.
    name = "eng_good" if dtype == torch.float32 else "eng_tf32"
    assert conv.ran == f"cudnn dgrad {name} workspace=4096" and fake_cudnn.Graph.built == [name]
    conv.weight(grad, x, weight.shape, GEOMETRY)
    assert conv.ran == f"cudnn wgrad {name} workspace=4096" and fake_cudnn.Graph.built == [name, name]


def test_plans_are_built_once_a_geometry_dtype_and_half(conv):
    grad, weight, x = make()
    for _ in range(3):
        conv.input(grad, weight, x, GEOMETRY, grad_scale=0.3)
        conv.weight(grad, x, weight.shape, GEOMETRY)
    assert len(fake_cudnn.Graph.built) == 2
    conv.input(*make(frames=3), GEOMETRY)
    conv.input(*make(torch.float16), GEOMETRY)
    assert len(fake_cudnn.Graph.built) == 4


def problem(**changes) -> Problem:
    return Problem("test", "conv", 2, 3, (4, 9, 8), (6, 5, 4), geometry=GEOMETRY, kernel=(3, 3), **changes)


def test_no_allowed_plan_is_a_reason_before_anything_is_measured(conv, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert conv.unsupported(problem(), "input", "float32") is None
    assert fake_cudnn.Graph.built == ["eng_good"]
    graphs.plan_for.cache_clear()
    monkeypatch.setattr(fake_cudnn.Graph, "plans", fake_cudnn.PLANS[:4])
    reason = conv.unsupported(problem(), "weight", "float32")
    assert reason == (
        "none of cuDNN's 4 plans is allowed (deterministic, float32 sums, no TF32) and works; "
        "the last: engine does not support this"
    )
    assert conv.unsupported(problem(), "weight", "bfloat16") is None

    def refuse(graph):
        raise fake_cudnn.NotSupportedError("no\nsuch graph")

    monkeypatch.setattr(fake_cudnn.Graph, "build_operation_graph", refuse)
    graphs.plan_for.cache_clear()
    said = "cuDNN does not take this convolution: no such graph"
    assert conv.unsupported(problem(), "input", "float16") == said
    with pytest.raises(graphs.NoPlan, match=said):
        conv.input(*make(torch.float16), GEOMETRY)


def test_empty_problems_need_no_plan(conv):
    empty = Problem("test", "conv", 0, 3, (4, 9, 8), (6, 5, 4), geometry=GEOMETRY, kernel=(3, 3))
    assert conv.unsupported(empty, "input", "float32") is None and not fake_cudnn.Graph.built


def test_float64_is_refused_by_name():
    grad, weight, x = make(torch.float64)
    conv = kernels.get("conv_backward", "cudnn_frontend")
    with pytest.raises(
        TypeError, match=r"grad_t is torch\.float64, but cudnn_frontend takes float32 and float16 and bfloat16"
    ):
        conv.input(grad, weight, x, GEOMETRY)


def test_what_keeps_the_package_from_working_is_one_line(monkeypatch, tmp_path):
    def no_cudnn():
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    assert graphs.missing() is None or not isinstance(sys.modules.get("cudnn"), SimpleNamespace)
    everything = vars(fake_cudnn.MODULE)
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(**everything | {"backend_version": no_cudnn}))
    assert graphs.missing() == (
        "nvidia-cudnn-frontend finds no cuDNN (Unable to find symbol cudnnGetVersion): "
        "install nvidia-cudnn-cu12 or nvidia-cudnn-cu13"
    )
    without = {name: value for name, value in everything.items() if name != "pygraph"}
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(**without))
    assert "the package cudnn has no pygraph" in graphs.missing()
    monkeypatch.delitem(sys.modules, "cudnn")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cudnn.py").write_text('raise OSError("libcudnn.so: cannot open shared object file")')
    assert graphs.missing() == (
        "nvidia-cudnn-frontend finds no cuDNN (libcudnn.so: cannot open shared object file): "
        "install nvidia-cudnn-cu12 or nvidia-cudnn-cu13"
    )
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert graphs.missing().endswith("pip install 'nvidia-cudnn-frontend>=1.9'")


def test_one_handle_a_thread_and_device_on_torchs_stream(monkeypatch):
    made, streams = [], []
    monkeypatch.setitem(
        sys.modules,
        "cudnn",
        SimpleNamespace(
            create_handle=lambda: made.append(object()) or made[-1],
            set_stream=lambda handle, stream: streams.append((handle, stream)),
        ),
    )
    current = SimpleNamespace(cuda_stream=5)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    graphs._handle.cache_clear()
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    handles = [graphs.handle_on(first), graphs.handle_on(second)]
    current.cuda_stream = 6
    handles.append(graphs.handle_on(first))
    assert handles == [made[0], made[1], made[0]] and len(made) == 2
    assert streams == [(made[0], 5), (made[1], 5), (made[0], 6)]
    monkeypatch.setattr(graphs.threading, "get_ident", lambda: -1)
    assert graphs.handle_on(first) is made[2]
    graphs._handle.cache_clear()


# Enough of libcudnn for the package to load and to check a graph; no GPU is asked for anything.
LIBRARY = """
unsigned long cudnnGetVersion(void) { return 90500; }
unsigned long cudnnGetCudartVersion(void) { return 12060; }
const char* cudnnGetErrorString(int s) { return "stub"; }
void cudnnGetLastErrorString(char* m, unsigned long n) { if (n) m[0] = 0; }
int cudnnCreate(void** h) { *h = (void*)8; return 0; }
int cudnnDestroy(void* h) { return 0; }
int cudnnGetStream(void* h, void** s) { *s = 0; return 0; }
int cudnnSetStream(void* h, void* s) { return 0; }
"""
REAL = """
import cudnn, json, torch
from spikemark.kernels.conv_backward import _cudnn_graphs as graphs
from spikemark.kernels.types import ConvGeometry
assert graphs.missing() is None, graphs.missing()
handle = cudnn.create_handle()
cudnn.set_stream(handle=handle, stream=0)
assert all(hasattr(cudnn.numerical_note, name) for name in graphs.BARRED + graphs.BARRED_FLOAT32)
assert hasattr(cudnn.heur_mode, "A") and hasattr(cudnn.heur_mode, "FALLBACK")
for name in ("build_operation_graph", "create_execution_plans", "deselect_numeric_notes", "get_execution_plan_count",
             "build_plan_at_index", "get_plan_name_at_index", "get_workspace_size_plan_at_index",
             "execute_plan_at_index"):
    assert callable(getattr(cudnn.pygraph, name)), name
assert issubclass(cudnn.cudnnGraphNotSupportedError, Exception)
shapes = []
for half in ("dgrad", "wgrad"):
    for dtype, kind in graphs.DATA_TYPES.items():
        c = graphs.Convolution(half, (4, 6, 9, 8), (8, 3, 3, 3), (4, 8, 5, 4), ConvGeometry(2, 1, 1, 2), dtype)
        kind = getattr(cudnn.data_type, kind)
        graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=cudnn.data_type.FLOAT,
                              compute_data_type=cudnn.data_type.FLOAT, handle=handle)
        nodes = graphs._operation(graph, c, kind)
        graph.validate()
        shapes.append([list(nodes[2].get_dim()), list(nodes[2].get_stride())])
try:
    graphs.plan_for(c, 0, 0, handle)
    said = "built"
except graphs.NoPlan as error:
    said = str(error)
print(json.dumps([shapes, said]))
"""


def test_nvidias_package_takes_the_graphs(tmp_path):
    if PathFinder.find_spec("cudnn") is None:  # not in sys.modules, where the stand-in may be
        pytest.skip("nvidia-cudnn-frontend is not installed")
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    for name in ("libcudnn.so", "libcudnn.so.9"):
        command = ["gcc", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / name)]
        subprocess.run(command, input=LIBRARY, text=True, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REAL)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    shapes, said = json.loads(done.stdout.splitlines()[-1])
    assert shapes == [[[4, 6, 9, 8], [432, 1, 48, 6]]] * 3 + [[[8, 3, 3, 3], [27, 1, 9, 3]]] * 3
    # The stub has no descriptors: the graph was valid, and what comes after it is refused in one line.
    assert said.startswith("cuDNN does not take this convolution: ") and "cudnnBackendCreateDescriptor" in said

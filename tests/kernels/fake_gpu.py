"""Two recorded devices in the place of CuPy and torch.cuda, for the tests of the launch and of its messages."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import torch


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

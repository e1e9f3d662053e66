"""The loop over time handed to ``torch.compile``: one fused kernel where the compiler manages it.

Graphs unroll the loop, so there is one for each number of steps (up to ``MOST_STEPS``; longer runs go in chunks that
hand their state on), dtype, device and thread count. Batch, neurons and the neuron's constants are inputs: other
sizes and other taus compile nothing (a batch of 1 does: torch always specialises on size 1). Each graph is compiled
from a function of its own, so that torch's recompile limit, which counts per function, is never met.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from spikemark.kernels.definition import state_dtype
from spikemark.kernels.registry import implementation
from spikemark.kernels.srm_neuron._arguments import check_current, dense_state, new_like
from spikemark.kernels.srm_neuron.reference import CLAMP_T, CLAMP_W
from spikemark.kernels.state import SrmState
from spikemark.kernels.types import SrmParams
from torch import Tensor

MOST_STEPS = 20  # of one graph: unrolled loops grow the time to compile


def forward_steps(steps: int, x: Tensor, constants: Tensor, carry: Tensor | None) -> tuple[Tensor, ...]:
    """Spikes and slopes [B, steps, D] of ``x`` and, if ``carry`` is not None, the state after it.

    ``carry`` is ``m, s, g, u_last`` [4, B, D].
    """
    e_m, e_s, e_g, gain, v_th = constants.unbind()
    zero = torch.zeros_like(x[:, 0], dtype=constants.dtype)
    m, s, g, u_last = (zero,) * 4 if carry is None else carry.unbind()
    spikes, delta_u, delta_ut = [], [], []
    for t in range(steps):
        current = x[:, t].to(m.dtype)
        m, s, g = (m + current) * e_m, (s + current) * e_s, (g + current) * e_g
        u = gain * (m - s)
        fired = u > v_th
        spikes.append(fired.to(x.dtype))
        delta_u.append((u - u_last).to(x.dtype))
        delta_ut.append(g.to(x.dtype))
        m, s, g, u_last = (torch.where(fired, 0.0, v) for v in (m, s, g, u))
    outputs = tuple(torch.stack(rows, 1) for rows in (spikes, delta_u, delta_ut))
    return outputs if carry is None else (*outputs, torch.stack([m, s, g, u_last]))


def backward_steps(
    steps: int,
    grad: Tensor,
    spikes: Tensor,
    delta_u: Tensor,
    delta_ut: Tensor,
    constants: Tensor,
    carry: Tensor | None,
) -> tuple[Tensor, ...]:
    """Both gradients [B, steps, D] and, if ``carry`` is not None, what earlier steps need.

    ``carry`` is the two scales of the next spike and the three exponentials [5, B, D].
    """
    e_m, e_s, e_g, gain, _ = constants.unbind()
    zero = torch.zeros_like(grad[:, 0], dtype=constants.dtype)
    scale_w, scale_t, m, s, g = (zero,) * 5 if carry is None else carry.unbind()
    grad_w, grad_t = [], []
    for t in reversed(range(steps)):
        fired = spikes[:, t] != 0
        now = grad[:, t].to(m.dtype)
        scale_w = torch.where(fired, (-1.0 / delta_u[:, t].to(m.dtype)).clamp(CLAMP_W, 0) * now, scale_w)
        scale_t = torch.where(fired, (-1.0 / delta_ut[:, t].to(m.dtype)).clamp(CLAMP_T, 0) * now, scale_t)
        m, s, g = (torch.where(fired, e, v * e) for v, e in ((m, e_m), (s, e_s), (g, e_g)))
        grad_w.append((scale_w * (gain * (m - s))).to(grad.dtype))
        grad_t.append((scale_t * -g).to(grad.dtype))
    outputs = tuple(torch.stack(rows[::-1], 1) for rows in (grad_w, grad_t))
    return outputs if carry is None else (*outputs, torch.stack([scale_w, scale_t, m, s, g]))


def own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A copy of ``function`` with a code object of its own, which is what torch counts recompilations by."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


class Graph:
    """One phase and number of steps as a compiled function; compiles when first called.

    A graph break, a failing compiler or a switched-off compiler is an error, never a silent run of the Python code.
    ``compilations`` counts what inductor was given.
    """

    def __init__(self, phase: str, steps: int, chunked: bool) -> None:
        function: Callable[..., Any] = forward_steps if phase == "forward" else backward_steps
        body = own_code(function, f"srm_{phase}_{steps}{'_chunk' * chunked}")
        self.steps = steps
        self.compilations = 0
        self._compiled = torch.compile(body, fullgraph=True, dynamic=True, backend=self._backend)

    def _backend(self, graph: Any, inputs: Any) -> Any:
        import torch._inductor.config
        from torch._dynamo import lookup_backend

        self.compilations += 1
        limit = sys.getrecursionlimit()
        try:
            # A graph is one kernel, so there is nothing to compile beside it; inductor's pool of processes and threads
            # would stay beside what is measured, and can wait for itself.
            with torch._inductor.config.patch(compile_threads=1):
                return lookup_backend("inductor")(graph, inputs)
        finally:
            sys.setrecursionlimit(limit)  # inductor raises it for the whole process, and leaves it so

    def __call__(self, *arguments: Tensor | None) -> tuple[Tensor, ...]:
        """The function's result for ``arguments``, its tensors of any size; see ``forward_steps``."""
        import torch._dynamo

        with torch.no_grad(), torch._dynamo.config.patch(suppress_errors=False):
            result: tuple[Tensor, ...] = self._compiled(
                self.steps, *(a if a is None else unrelated(a) for a in arguments)
            )
        if not self.compilations:
            raise RuntimeError("torch.compile ran the Python code instead of compiling it: is it switched off?")
        return result


@functools.cache
def compiled(phase: str, steps: int, chunked: bool, dtype: torch.dtype, device: str, threads: int) -> Graph:
    """The one graph of a phase and number of steps for a dtype, kind of device and number of threads."""
    return Graph(phase, steps, chunked)


def unrelated(tensor: Tensor) -> Tensor:
    """``tensor``'s memory as a tensor that is no view: torch compiles anew for every kind of base of a view."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


@functools.lru_cache(maxsize=64)
def constants_of(params: SrmParams, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``e_m, e_s, e_g, gain, v_th`` on ``device``, so that another neuron's constants compile nothing new."""
    values = [params.e_m, params.e_s, params.e_g, params.gain, params.v_th]
    return torch.tensor(values, dtype=torch.float64).to(device, dtype)


def chunks(steps: int) -> list[tuple[int, int]]:
    """``(first, steps)`` of chunks of at most ``MOST_STEPS``, as equal as they can be."""
    count = -(-steps // MOST_STEPS)
    each = -(-steps // count)
    return [(first, min(each, steps - first)) for first in range(0, steps, each)]


@implementation("srm_neuron")
class TorchCompile:
    """The loop over time through torch.compile (inductor): fused C++ on a CPU, Triton on a GPU."""

    def unavailable(self) -> str | None:
        """What inductor needs and this machine lacks: a C++ compiler, Python's headers, or being switched on."""
        if os.environ.get("TORCH_COMPILE_DISABLE") == "1" or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            return "torch.compile is switched off: unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE"
        compiler = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]
        if shutil.which(compiler) is None:
            return f"torch.compile needs a C++ compiler and found no {compiler!r}: install g++ or set CXX"
        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
            return "torch.compile needs Python's headers: install python3-dev"
        return None

    def forward(self, current: Tensor, params: SrmParams) -> SrmState:
        """Spikes and slopes of ``current`` [B, T, *S]; state in float32, or float64 for float64."""
        check_current(current)
        if not current.numel():
            spikes, delta_u, delta_ut = new_like(current, 3)
            return SrmState(spikes, delta_u, delta_ut)
        outputs = self._run("forward", [current.detach()], params, 4)
        spikes, delta_u, delta_ut = (tensor.reshape(current.shape) for tensor in outputs)
        return SrmState(spikes, delta_u, delta_ut)

    def backward(self, grad_out: Tensor, state: SrmState, params: SrmParams) -> tuple[Tensor, Tensor]:
        """``(grad_w, grad_t)`` [B, T, *S] for the gradient of the spikes."""
        given = [grad_out.detach(), *dense_state(grad_out, state)]
        outputs = self._run("backward", given, params, 5) if grad_out.numel() else new_like(grad_out, 2)
        grad_w, grad_t = (tensor.reshape(grad_out.shape) for tensor in outputs)
        return grad_w, grad_t

    @staticmethod
    def _run(phase: str, tensors: list[Tensor], params: SrmParams, carried: int) -> list[Tensor]:
        """The outputs [B, T, D] for ``tensors`` [B, T, *S]: in one graph, or chunk by chunk in the phase's order."""
        batch, steps = tensors[0].shape[:2]
        folded = [t.contiguous().reshape(batch, steps, -1) for t in tensors]
        first = folded[0]
        constants = constants_of(params, state_dtype(first.dtype), first.device)
        key = (first.dtype, first.device.type, torch.get_num_threads())
        if steps <= MOST_STEPS:
            return list(compiled(phase, steps, False, *key)(*folded, constants, None))
        carry = torch.zeros((carried, batch, first.shape[2]), dtype=constants.dtype, device=first.device)
        whole = new_like(first, 3 if phase == "forward" else 2)
        order = chunks(steps) if phase == "forward" else reversed(chunks(steps))
        for start, some in order:
            call = compiled(phase, some, True, *key)
            *parts, carry = call(*(t[:, start : start + some] for t in folded), constants, carry)
            for tensor, part in zip(whole, parts, strict=True):
                tensor[:, start : start + some] = part
        return whole

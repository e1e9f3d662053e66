"""The ledger, bit by bit, on calls whose bytes are known by hand. A float32 takes 4 bytes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from spikemark import kernels
from spikemark.harness.memory import MemoryLedger, context_tensors, replay
from spikemark.kernels import SrmParams
from spikemark.kernels.definition import BoundCall
from torch import Tensor

CPU = torch.device("cpu")


def weigh(call: Callable[[Any], Any], held: tuple[Tensor, ...] = (), **parts: Any) -> dict[str, int]:
    bound = BoundCall(call=call, outputs=parts.pop("outputs", lambda result: {"y": result}), **parts)
    return MemoryLedger(CPU).weigh(bound, held)


def some(ledger: dict[str, int], *names: str) -> list[int]:
    return [ledger[f"{name}_bytes"] for name in names]


def test_a_result_alone() -> None:
    held = torch.ones(100)
    ledger = weigh(lambda _: torch.empty(1000), (held, held[:50]))
    assert some(ledger, "baseline", "peak", "output", "workspace", "saved", "kept", "unrecorded") == [
        400, 4000, 4000, 0, 0, 0, 0
    ]  # fmt: skip


def test_workspace_beside_the_result() -> None:
    def call(_: Any) -> Tensor:
        first = torch.empty(2000)
        result = torch.empty(1000)
        del first
        torch.empty(500)
        return result

    assert some(weigh(call), "peak", "output", "workspace") == [12000, 4000, 8000]


def test_workspace_freed_before_the_result_overlaps_with_it() -> None:
    def call(_: Any) -> Tensor:
        torch.empty(2000)
        return torch.empty(1000)

    assert some(weigh(call), "peak", "output", "workspace") == [8000, 4000, 4000]


def test_storages_are_counted_once_and_the_callers_listed_apart() -> None:
    held = torch.ones(100)

    def call(_: Any) -> tuple[Tensor, Tensor]:
        return torch.empty(1000), torch.empty(300)

    ledger = weigh(
        call,
        (held,),
        outputs=lambda result: {"y": result[0]},
        saved=lambda result: [result[0], result[0][10:], result[1], result[1].view(3, 100), held, held[5:]],
    )
    assert some(ledger, "peak", "saved", "saved_held", "saved_result") == [5200, 5200, 400, 5200]


def test_what_autograd_saves() -> None:
    x = torch.ones(100, requires_grad=True)
    own = weigh(lambda _: x.exp(), (x,))
    assert some(own, "output", "saved", "saved_held", "saved_result") == [400, 400, 0, 400]
    held = weigh(lambda _: x * x, (x,))
    assert some(held, "output", "saved", "saved_held", "saved_result") == [400, 0, 400, 0]


class KeepsOnContext(torch.autograd.Function):
    """Keeps tensors as attributes of its context, past ``save_for_backward``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.state = {"bits": torch.empty(70, dtype=torch.uint8), "pair": (torch.empty(10), 3)}
        return torch.empty(100)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def test_tensors_on_contexts_are_saved_too() -> None:
    x = torch.ones(100, requires_grad=True)
    ledger = weigh(lambda _: KeepsOnContext.apply(x).neg(), (x,))
    assert some(ledger, "output", "saved", "kept") == [400, 110, 0]
    assert sorted(t.numel() for t in context_tensors(KeepsOnContext.apply(x))) == [10, 70]


def test_preparing_is_not_part_of_the_call() -> None:
    ledger = weigh(lambda prepared: prepared.neg(), prepare=lambda: torch.ones(1000))
    assert some(ledger, "baseline", "peak", "output") == [4000, 4000, 4000]


def test_memory_that_was_there_before_is_not_counted_when_it_is_freed() -> None:
    box = [torch.ones(5000)]

    def call(_: Any) -> Tensor:
        box.clear()
        return torch.empty(1000)

    assert some(weigh(call), "peak", "workspace", "kept") == [4000, 0, 0]


def test_what_a_call_keeps_to_itself_shows() -> None:
    kept: list[Tensor] = []

    def call(_: Any) -> Tensor:
        kept.append(torch.empty(250))
        return torch.empty(1000)

    assert some(weigh(call), "peak", "kept", "workspace") == [5000, 1000, 1000]


def test_a_result_made_outside_torch_is_added_and_said() -> None:
    ledger = weigh(lambda _: torch.from_numpy(np.ones(1000, dtype=np.float32)))
    assert some(ledger, "peak", "output", "unrecorded", "workspace") == [4000, 4000, 4000, 0]


def test_the_process_figure_sees_what_the_allocator_misses() -> None:
    def call(_: Any) -> Tensor:
        np.ones(16 << 20, dtype=np.float32)  # 64 MiB: above malloc's largest threshold, so fresh pages
        return torch.empty(10)

    ledger = weigh(call)
    assert ledger["peak_bytes"] == 40
    assert 60 << 20 <= ledger["process_peak_bytes"] < 200 << 20


@pytest.mark.parametrize(("batch", "steps", "width"), [(2, 5, 64), (1, 1, 3)])
def test_the_dense_neuron(batch: int, steps: int, width: int) -> None:
    """Spikes and two slopes, each B*T*D floats, are results and saved for backward."""
    current = torch.randn(batch, steps, width)
    params, neuron = SrmParams(), kernels.get("srm_neuron", "torch_eager")
    bytes_each = 4 * batch * steps * width
    ledger = MemoryLedger(CPU).weigh(
        BoundCall(
            call=lambda _: neuron.forward(current, params),
            outputs=lambda s: {"spikes": s.spikes, "delta_u": s.delta_u, "delta_ut": s.delta_ut},
            saved=lambda s: s.for_backward(),
        ),
        [current],
    )
    assert some(ledger, "baseline", "output", "saved", "kept") == [bytes_each, 3 * bytes_each, 3 * bytes_each, 0]
    assert ledger["peak_bytes"] == 3 * bytes_each + ledger["workspace_bytes"]


def test_an_address_used_twice() -> None:
    peak = replay([(1, 100), (2, 50), (1, -100), (1, 30), (2, -50), (9, -7)])
    assert (peak.peak, peak.live) == (150, {1: 30})

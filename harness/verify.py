"""The gate: nothing is timed that has not just been compared with the float64 reference.

Every case is called twice, on two different inputs of the same shape and at the same addresses (the second made by
rolling one tensor in place), so that a result kept from an earlier call is wrong. Around each call the gate checks that
results are plain, contiguous, new tensors, that inputs keep their bits, and that a result does not change after it was
returned (computed lazily, or a buffer used again). During the second call fresh memory is filled with NaN where the
system's allocator can do that, so that elements which are never written are seen.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from spikemark.harness import allocator, records
from spikemark.harness.clock import DeviceClock, torch_device
from spikemark.harness.records import Case
from spikemark.harness.threads import one_thread
from spikemark.kernels.definition import DTYPES, BoundCall, Comparison, Definition, Inputs, definition
from spikemark.kernels.state import SrmState
from torch import Tensor

# Bound before any kernel runs: one that replaces torch.equal cannot make all results equal.
_equal = torch.equal
FINGERPRINT = 4096
M_PERTURB = -6
PERTURB_NAN = 0x100
"""glibc fills new blocks with the low byte of ``value ^ 0xff``: 0xff, which is NaN in every float dtype."""


@dataclass
class Verification:
    """What the gate found. ``status`` is one of ``records.STATUSES``; ``reason`` is one line unless it is ``ok``.

    ``first_call_s`` is the device time of the very first call of this case in this process; ``result`` that
    call's output tensors by name, ``fingerprint`` a sample of their bits and ``checksums`` one of all of them.
    ``bound`` is the call to time.
    """

    status: str
    reason: str = ""
    max_error: float = 0.0
    ambiguous: int = 0
    checked: int = 0
    total: int = 0
    first_call_s: float | None = None
    poisoned: bool = False
    second_input: bool = False
    fingerprint: list[Tensor] = field(default_factory=list)
    checksums: list[Tensor] = field(default_factory=list)
    bound: BoundCall = field(kw_only=True)

    def figures(self) -> dict[str, Any]:
        """The part that a record keeps."""
        names = ("max_error", "ambiguous", "checked", "total", "second_input", "poisoned")
        return {name: getattr(self, name) for name in names}


class Refused(Exception):
    """A case that ends here: ``status`` and a one-line ``reason``."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def incorrect(reason: str) -> Refused:
    """The refusal for a wrong result."""
    return Refused(records.INCORRECT, reason)


class Block:
    """Inputs and references of one ``Case.group``, shared by all implementations that are compared on it."""

    @one_thread()
    def __init__(self, case: Case, limit: int | None, layout: Callable[[str, Tensor], Tensor] | None = None) -> None:
        """``layout`` may replace each named input tensor by one that lies differently in memory."""
        self.case, self.limit = case, limit
        self.definition: Definition = definition(case.operator)
        self.device = torch_device(case.device)
        self.dtype = DTYPES[case.dtype]
        problem = case.problem
        self.inputs: Inputs = self.definition.make_inputs(
            problem, case.phase, self.dtype, str(self.device), problem.seed
        )
        if layout is not None:
            self.inputs.tensors.update({n: layout(n, t) for n, t in self.inputs.tensors.items()})
        self.reference = self._reference()
        names = list(self.inputs.tensors)
        self.varied = next((n for n in names if n.startswith("grad")), names[0])
        self._rolled_reference: Any = None
        self.checksums = {n: checksum(t) for n, t in self.inputs.tensors.items()}
        self._rolled_checksum: Tensor | None = None
        with self._rolled():
            self.has_second = not same_bits(checksum(self._tensor), self.checksums[self.varied])

    @property
    def _tensor(self) -> Tensor:
        return self.inputs.tensors[self.varied]

    @one_thread()
    def _reference(self) -> Any:
        return self.definition.reference(self.case.phase, self.inputs, self.case.problem, self.limit)

    @contextlib.contextmanager
    def _rolled(self) -> Iterator[None]:
        self._roll(1)
        try:
            yield
        finally:
            self._roll(-1)

    @one_thread()
    def _roll(self, places: int) -> None:
        tensor = self._tensor
        if tensor.numel() > 1 and 0 not in tensor.stride():
            tensor.copy_(tensor.flatten().roll(places).view(tensor.shape))

    @contextlib.contextmanager
    def second(self) -> Iterator[Any]:
        """Inputs rolled in place inside the block; yields their reference."""
        with self._rolled():
            if self._rolled_reference is None:
                self._rolled_reference = self._reference()
                self._rolled_checksum = checksum(self._tensor)
            yield self._rolled_reference

    @one_thread()
    def changed_inputs(self, rolled: bool = False) -> str:
        """One line naming the inputs whose bits differ from what they were; they are not repaired. Or ''."""
        changed = []
        for name, tensor in self.inputs.tensors.items():
            want = self._rolled_checksum if rolled and name == self.varied else self.checksums[name]
            if not same_bits(checksum(tensor), want):
                changed.append(name)
        return f"writes to its input{'s' if len(changed) > 1 else ''} {', '.join(changed)}" if changed else ""

    @one_thread()
    def restore(self) -> None:
        """Make the inputs anew, in place: what was bound to them stays valid. ``RuntimeError`` if that cannot be."""
        fresh = self.definition.make_inputs(
            self.case.problem, self.case.phase, self.dtype, str(self.device), self.case.problem.seed
        )
        with torch.no_grad():
            for name, tensor in self.inputs.tensors.items():
                tensor.copy_(fresh.tensors[name])
        if reason := self.changed_inputs():
            forget_block()
            raise RuntimeError(f"{reason} for good")

    @one_thread()
    def compare(self, outputs: dict[str, Tensor], reference: Any) -> Comparison:
        """The operator's comparison."""
        return self.definition.compare(self.case.phase, outputs, reference, self.inputs, self.case.problem)


_last: Block | None = None


def block_for(case: Case, limit: int | None) -> Block:
    """The block of ``case``; the last one is kept, since implementations of one comparison follow each other."""
    global _last
    if _last is None or _last.case.problem != case.problem or _last.case.group != case.group or _last.limit != limit:
        _last = None  # freed before the next is made: two blocks would not fit where one does
        allocator.trim()
        _last = Block(case, limit)
    return _last


def forget_block() -> None:
    """Drop the cached block (its inputs were written to, or memory is wanted)."""
    global _last
    _last = None


def admit(case: Case, implementation: Any) -> None:
    """Raise ``Refused`` unless ``implementation`` can run ``case`` at all."""
    device = torch_device(case.device)
    if implementation.reason:
        raise Refused(records.UNAVAILABLE, implementation.reason)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Refused(records.UNAVAILABLE, "no CUDA device: needs an NVIDIA GPU, its driver and a CUDA build of torch")
    if not implementation.runs_on(device.type):
        raise Refused(records.UNSUPPORTED, f"written for {implementation.device}, not for {device.type}")
    if case.dtype not in implementation.dtypes:
        known = ", ".join(implementation.dtypes)
        raise Refused(records.UNSUPPORTED, f"does not support {case.dtype}; supports {known}")
    reason = implementation.unsupported(case.problem, case.phase, case.dtype)
    if reason:
        raise Refused(records.UNSUPPORTED, reason)


def gate(
    block: Block,
    implementation: Any,
    clock: DeviceClock,
    stage: Callable[[str], None] = lambda name: None,
    second: bool = True,
) -> Verification:
    """Two verified calls of ``implementation`` on ``block``'s inputs. Raises ``Refused`` if anything is wrong.

    ``stage`` is told ``verify`` when the first call is over. Without ``second`` there is one call, on one input.

    Exceptions of the implementation pass through. Costs two calls, two comparisons and a few passes over the inputs.
    """
    case = block.case
    bound = block.definition.bind(implementation, case.phase, block.inputs, case.problem)
    result = clock.run(bound.call, bound.prepare())
    first_call_s = clock.last_s
    stage("verify")
    outputs = read_outputs(bound, result)
    early = [checksum(t) for t in outputs.values()]
    check_structure(outputs, result, block.inputs.tensors.values())
    clock.synchronize()
    if reason := block.changed_inputs():
        raise incorrect(reason)
    comparison = block.compare(outputs, block.reference)
    if not comparison.ok:
        raise incorrect(comparison.reason)
    marks = fingerprint(outputs)
    second = second and block.has_second
    poisoned = second_call(block, implementation, clock, outputs) if second else False
    if not same_bits(early, [checksum(t) for t in outputs.values()]):
        raise incorrect("its first result changed after it was returned: computed lazily, or its memory used again")
    return Verification(
        records.OK,
        max_error=comparison.max_error,
        ambiguous=comparison.ambiguous,
        checked=comparison.checked,
        total=comparison.total,
        first_call_s=first_call_s,
        poisoned=poisoned,
        second_input=second,
        fingerprint=marks,
        checksums=early,
        bound=bound,
    )


def second_call(
    block: Block, implementation: Any, clock: DeviceClock, earlier: dict[str, Tensor], when: str = ""
) -> bool:
    """The call on the other input, in poisoned memory. Raises ``Refused``, whose reason tells ``when`` it was made;
    whether memory was poisoned."""
    case = block.case
    with block.second() as reference:
        bound = block.definition.bind(implementation, case.phase, block.inputs, case.problem)
        prepared = bound.prepare()
        with poisoned_memory(clock.device, earlier.values()) as poisoned:
            result = clock.run(bound.call, prepared)
        outputs = read_outputs(bound, result)
        check_structure(outputs, result, block.inputs.tensors.values(), earlier.values())
        clock.synchronize()
        if reason := block.changed_inputs(rolled=True):
            raise incorrect(reason)
        comparison = block.compare(outputs, reference)
        if not comparison.ok:
            note = when + (", in memory filled with NaN" if poisoned else "")
            raise incorrect(f"right on a first input, wrong on a second{note}: {comparison.reason}")
    return poisoned


def recheck(block: Block, bound: BoundCall, result: Any, which: str, verified: Sequence[Tensor] = ()) -> None:
    """Compare a timed result in full: its bits with the ``verified`` result's checksums, and if they differ, or there
    are none, its values with the reference. Raises ``Refused``.
    """
    outputs = read_outputs(bound, result)
    check_structure(outputs, result, block.inputs.tensors.values())
    if verified and same_bits(list(verified), [checksum(t) for t in outputs.values()]):
        return
    comparison = block.compare(outputs, block.reference)
    if not comparison.ok:
        raise incorrect(f"right when verified, wrong in {which}: {comparison.reason}")


def read_outputs(bound: BoundCall, result: Any) -> dict[str, Tensor]:
    """``bound.outputs(result)``, with a result that cannot be read, or is no plain container, refused."""
    plain = isinstance(result, Tensor) or type(result) in (tuple, list, dict, SrmState)
    if not plain:
        raise incorrect(f"returned a {type(result).__name__}, not tensors")
    try:
        outputs = bound.outputs(result)
    except (TypeError, AttributeError, IndexError, KeyError, ValueError) as error:
        raise incorrect(f"returned a result that cannot be read: {type(error).__name__}: {error}") from error
    for name, tensor in outputs.items():
        if not isinstance(tensor, Tensor):
            raise incorrect(f"{name} is a {type(tensor).__name__}, not a tensor")
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise incorrect(f"{name} is a {type(tensor).__name__}, a tensor subclass that may compute lazily")
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise incorrect(f"{name} is not a plain strided tensor")
        if tensor.is_meta:
            raise incorrect(f"{name} is on the meta device: it has no values")
    return outputs


def check_structure(
    outputs: dict[str, Tensor], result: Any, inputs: Iterable[Tensor], earlier: Iterable[Tensor] = ()
) -> None:
    """Refuse results that are not contiguous or that share memory with inputs, each other or earlier results."""
    owned = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
    before = {t.untyped_storage().data_ptr() for t in earlier if t.numel()}
    for name, tensor in outputs.items():
        if not tensor.is_contiguous():
            raise incorrect(f"{name} is not contiguous: shape {list(tensor.shape)}, strides {list(tensor.stride())}")
        if not tensor.numel():
            continue
        address = tensor.untyped_storage().data_ptr()
        if address in owned:
            raise incorrect(f"{name} is a view of an input, not a new tensor")
        if address in before:
            raise incorrect(f"{name} shares memory with the result of an earlier call")
        before.add(address)


@one_thread()
def checksum(tensor: Tensor) -> Tensor:
    """Row and column sums of the tensor's bits: any single change, and any reordering but contrived ones, shows."""
    flat = tensor.detach().contiguous().view(-1)
    raw = flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)
    words, width = raw.numel() // 8, 1024
    whole = (
        raw[: words * 8].view(torch.int64) if raw.data_ptr() % 8 == 0 else raw[: words * 8].clone().view(torch.int64)
    )
    rows = words // width
    square = whole[: rows * width].view(rows, width)
    rest = raw[rows * width * 8 :].to(torch.int64)
    return torch.cat([square.sum(0), square.sum(1), rest])


def same_bits(a: Any, b: Any) -> bool:
    """Whether two checksums, or lists of them, are equal."""
    if isinstance(a, list):
        return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return a.shape == b.shape and _equal(a, b)


@one_thread()
def fingerprint(outputs: dict[str, Tensor]) -> list[Tensor]:
    """Bits of up to 4096 evenly spaced elements of each output."""
    marks = []
    for tensor in outputs.values():
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // FINGERPRINT)
        marks.append(flat[::step].contiguous().view(torch.uint8) if flat.numel() else flat.to(torch.uint8))
    return marks


@contextlib.contextmanager
def poisoned_memory(device: torch.device, like: Iterable[Tensor]) -> Iterator[bool]:
    """Inside, freshly allocated memory holds NaN; yields whether that can be done here.

    On a CPU with glibc ``mallopt(M_PERTURB)`` fills every block that ``malloc`` gives out, a kernel's own scratch too.
    On CUDA blocks of the sizes of ``like`` are filled and freed, which torch's allocator then gives out again.
    """
    if device.type == "cuda":
        blocks = [torch.full_like(t, float("nan")) for t in like for _ in range(2)]
        del blocks
        yield True
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    done = mallopt is not None and mallopt(M_PERTURB, PERTURB_NAN) == 1
    try:
        yield done
    finally:
        if mallopt is not None and done:
            mallopt(M_PERTURB, 0)

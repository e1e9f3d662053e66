"""What of a run is still to be measured. Torch-free.

A row that failed settles the later passes of its case too. A device that is given up has nothing left; the rows that
say so (``records.UNMEASURED``) settle nothing for a run that continues this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spikemark.harness.plan import RunOptions, Variant, devices_of, visit_order
from spikemark.harness.records import OK, UNMEASURED, Case, Record


class Remaining:
    """Of ``cases``, in every pass and variant of ``options``, what ``before`` and the records noted since leave."""

    def __init__(self, cases: Sequence[Case], options: RunOptions, before: Iterable[Record] = ()) -> None:
        self.cases, self.options = list(cases), options
        self.devices = devices_of(self.cases, options)
        self.done = 0
        labels = [variant.label for variant in options.variants]
        self._left = {(label, case.key): set(range(options.passes)) for label in labels for case in self.cases}
        self._timed: set[tuple[str, str]] = set()
        for record in before:
            if not record.details.get(UNMEASURED):
                self.note(record)

    def note(self, record: Record) -> None:
        """Remember what a record settles."""
        self.done += 1
        name = (record.details.get("variant") or "", record.case.key)
        left = self._left.get(name, set())
        if record.status == OK:
            self._timed.add(name)
            # A pass of a part of a merged folder may have a number beyond those asked for: it counts all the same.
            left.discard(record.pass_index if record.pass_index < self.options.passes else max(left, default=0))
        else:
            left.clear()

    def order(self, device: str, pass_index: int) -> list[Case]:
        """All cases of a device in the order of one pass."""
        return visit_order([c for c in self.cases if c.device == device], self.options.seed, pass_index)

    def left(self, pass_index: int, device: str, variant: Variant) -> list[Case]:
        """Cases of this device still to measure in this pass, in visit order."""
        return [c for c in self.order(device, pass_index) if pass_index in self._left[variant.label, c.key]]

    def count(self) -> int:
        """How many measurements are left."""
        return sum(map(len, self._left.values()))

    def lacks(self, device: str) -> bool:
        """Whether a device has anything left to measure."""
        names = [(v.label, c.key) for v in self.options.variants for c in self.cases if c.device == device]
        return any(self._left[name] for name in names)

    def give_up(self, device: str) -> list[tuple[Variant, Case]]:
        """Nothing more is measured there; the cases that have neither a time nor a reason."""
        out = []
        for variant in self.options.variants:
            for case in self.cases:
                name = (variant.label, case.key)
                if case.device == device and self._left[name]:
                    self._left[name].clear()
                    if name not in self._timed:
                        out.append((variant, case))
        return out

"""The case record, its statuses, the columns of results.csv: the vocabulary between harness and reports.

Torch-free. A run folder's journal (``cases.jsonl``) holds one record a line: one case measured in one pass.
Everything derived (medians, intervals, speed-ups) is computed from records when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spikemark.kernels.types import Problem

SCHEMA_VERSION = 1

OK = "ok"
INCORRECT = "incorrect"
UNAVAILABLE = "unavailable"
UNSUPPORTED = "unsupported"
OUT_OF_MEMORY = "out-of-memory"
CRASHED = "crashed"
TIMED_OUT = "timed-out"
ERROR = "error"
STATUSES = (OK, INCORRECT, UNAVAILABLE, UNSUPPORTED, OUT_OF_MEMORY, CRASHED, TIMED_OUT, ERROR)

UNMEASURED = "unmeasured"
"""Field of ``Record.details``: the device was lost or never answered, so the row says nothing of its case. A run that
is continued measures it anew."""

COLUMNS = tuple(
    """operator phase workload implementation device device_name dtype batch time_steps spike_rate status reason
    median_s ci_low_s ci_high_s samples speedup speedup_low speedup_high peak_bytes saved_bytes ideal_bytes
    roofline first_call_s max_error ambiguous""".split()
)
"""The first columns of results.csv, in order; more may follow."""


@dataclass(frozen=True)
class Case:
    """What is measured: one phase of one implementation on one problem, dtype and device.

    ``device`` is ``cpu``, ``cpu:N`` (N threads) or ``cuda:I``; measured on a node of a cluster, with the node's name
    after it, ``cuda:0@A100-3f2a9c``. Two cases are the same if their ``key`` is.
    """

    operator: str
    phase: str
    implementation: str
    device: str
    dtype: str
    problem: Problem

    @property
    def workload(self) -> str:
        """Name of the workload."""
        return self.problem.workload

    @property
    def local_device(self) -> str:
        """The device by its name on the machine that has it."""
        return self.device.partition("@")[0]

    @property
    def group(self) -> str:
        """What implementations are compared on: the key without the implementation."""
        p = self.problem
        rate = f"{p.spike_rate:g}"
        return (
            f"{self.operator}/{self.phase}/{p.workload}/{self.device}/{self.dtype}/b{p.batch}/t{p.time_steps}/r{rate}"
        )

    @property
    def key(self) -> str:
        """Unique name of the case; NVTX ranges, journals and reports use it."""
        return f"{self.group}/{self.implementation}"

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict; ``from_json`` is its inverse."""
        out = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return out | {"problem": self.problem.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        """Rebuild a case from ``to_json``'s dict."""
        return cls(**(data | {"problem": Problem.from_json(data["problem"])}))


@dataclass
class Record:
    """One case measured in one pass; a line of the journal. Times in seconds, sizes in bytes.

    ``samples`` are cold (caches flushed before each) device times, ``warm_samples`` back to back,
    ``call_samples`` host times of the whole call where they were taken. ``memory`` is the ledger:
    ``baseline_bytes, peak_bytes`` (above the baseline)``, saved_bytes, workspace_bytes`` and cross-checks.
    ``verification``: ``max_error, ambiguous, checked, total``. ``stop`` says why sampling ended (``narrow``
    or ``budget``). ``flags`` are findings such as ``launch-bound`` or ``noisy``. ``environment`` is the key
    of the device's environment in run.json.
    """

    case: Case
    pass_index: int
    status: str
    reason: str = ""
    spike_rate: float | None = None
    samples: list[float] = field(default_factory=list)
    warm_samples: list[float] = field(default_factory=list)
    call_samples: list[float] = field(default_factory=list)
    first_call_s: float | None = None
    memory: dict[str, int] = field(default_factory=dict)
    verification: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, int] = field(default_factory=dict)
    stop: str = ""
    flags: list[str] = field(default_factory=list)
    environment: str = ""
    started_s: float = 0.0
    elapsed_s: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict; ``from_json`` is its inverse."""
        out = dict(vars(self))
        return out | {"case": self.case.to_json(), "schema": SCHEMA_VERSION}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """Rebuild a record; unknown keys of a newer minor version are ignored.

        Raises ``ValueError`` naming the number for a schema this version does not read.
        """
        if data.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"record has schema {data.get('schema')!r}; this version reads {SCHEMA_VERSION}")
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        return cls(**(known | {"case": Case.from_json(data["case"])}))

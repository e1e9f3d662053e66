"""What makes ``suites/`` a pytest-benchmark suite: options, cases as items, the clock as timer, records, events.

Every item is one case. The first item of a comparison measures all of its selected cases, in turns (see
``harness.measure``); each item then hands its own case's samples to its ``benchmark`` fixture, so that
pytest-benchmark's table and JSON hold the samples of the record. ``benchmark.extra_info`` carries the rest of it.

With a plan (``--spikemark-plan``) the items are the plan's cases in its order, and with ``--spikemark-events`` every
step is written to that descriptor as one JSON line: that is a worker of ``spikemark run``.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from spikemark.harness import conditions, records, turns
from spikemark.harness.errors import NothingMeasured, UsageError
from spikemark.harness.process import log_position
from spikemark.harness.records import Case, Record

Measure = Callable[[Case, BenchmarkFixture], Record]
SKIPPED = (records.UNAVAILABLE, records.UNSUPPORTED)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the suite."""
    group = parser.getgroup("spikemark")
    group.addoption("--spikemark-plan", metavar="FILE", help="measure the cases of this plan (JSON), in its order")
    group.addoption("--spikemark-events", metavar="FD", type=int, help="write JSON events to this descriptor")
    group.addoption("--spikemark-preset", metavar="NAME", default="smoke", help="cases of this preset (default smoke)")
    group.addoption("--spikemark-plugin", metavar="FILE", action="append", default=[],
                    help="import this file of implementations first (repeatable)")  # fmt: skip


@dataclass
class Suite:
    """The session's cases and how they are measured."""

    cases: list[Case]
    options: dict[str, Any] = field(default_factory=dict)
    pass_index: int = 0
    device: str | None = None
    environment: str | None = None
    calibrate: bool = False
    events: int | None = None
    seed: int = 0
    torch_import_s: float = 0.0
    spoilt: str = ""
    measured: dict[str, Record] = field(default_factory=dict)
    process: int = field(default_factory=os.getpid)

    def emit(self, event: str, **data: Any) -> None:
        """Write one event (nothing without a channel), unbuffered: the line is out when this returns."""
        if self.events is None:
            return
        if os.getpid() != self.process:  # a kernel has forked and come back twice: there is one measuring process
            os._exit(1)
        line = (json.dumps({"event": event} | data) + "\n").encode()
        while line:
            line = line[os.write(self.events, line) :]


SUITE = pytest.StashKey[Suite]()


def pytest_configure(config: pytest.Config) -> None:
    """Read the plan or build the preset's cases. Bad input is pytest's usage error: one line, exit 4."""
    config.addinivalue_line("markers", "operators(*names): the operators whose cases a benchmark function measures")
    started = time.perf_counter()
    import torch  # noqa: F401 - apart, so that its time is known: it is not the harness's

    imported_s = time.perf_counter() - started
    conditions.settle()
    try:
        config.stash[SUITE] = _suite(config)
        config.stash[SUITE].torch_import_s = imported_s
    except (UsageError, NothingMeasured, ValueError, OSError) as error:
        raise pytest.UsageError(str(error)) from error


def _suite(config: pytest.Config) -> Suite:
    from spikemark.kernels import registry

    plan_path = config.getoption("--spikemark-plan")
    plan = json.loads(Path(plan_path).read_text(encoding="utf-8")) if plan_path else {}
    if plan and plan.get("schema") != records.SCHEMA_VERSION:
        raise UsageError(f"{plan_path}: plan has schema {plan.get('schema')!r}, expected {records.SCHEMA_VERSION}")
    for file in [*plan.get("plugins", []), *config.getoption("--spikemark-plugin")]:
        registry.load_plugin(file)
    if plan:
        cases = [Case.from_json(c) for c in plan["cases"]]
        options = plan.get("options", {})
    else:
        from spikemark.suites import presets, selection

        preset = config.getoption("--spikemark-preset")
        cases = selection.build(preset)
        options = presets.PRESETS[preset].options()
    return Suite(
        cases,
        options,
        plan.get("pass_index", 0),
        plan.get("device"),
        plan.get("environment"),
        plan.get("calibrate", True) if plan else False,
        config.getoption("--spikemark-events"),
        plan.get("seed", 0),
    )


def case_id(case: Case) -> str:
    """Stable id of a case's item: words for ``-k`` and everything that tells two cases apart."""
    p = case.problem
    return (
        f"{case.operator}-{case.phase}-{case.workload}-{case.implementation}-{case.device}-{case.dtype}"
        f"-b{p.batch}-t{p.time_steps}-r{p.spike_rate:g}"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item for each case of the operators that the function's marker names."""
    marker = metafunc.definition.get_closest_marker("operators")
    if marker is None or "case" not in metafunc.fixturenames:
        return
    from spikemark.harness.clock import clock_for

    cases = [c for c in metafunc.config.stash[SUITE].cases if c.operator in marker.args]
    parameters = [
        pytest.param(c, id=case_id(c), marks=pytest.mark.benchmark(timer=clock_for(c.device), group=c.group))
        for c in cases
    ]
    metafunc.parametrize("case", parameters)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Visit the cases in the plan's order."""
    place = {id(case): index for index, case in enumerate(config.stash[SUITE].cases)}
    items[:] = [i for i in items if _case_of(i) is not None or i.get_closest_marker("operators") is None]
    items.sort(key=lambda item: place.get(id(_case_of(item)), len(place)))


def _case_of(item: pytest.Item) -> Case | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("case") if callspec else None


def pytest_sessionstart(session: pytest.Session) -> None:
    """A worker says what it runs on and calibrates the device."""
    suite = session.config.stash[SUITE]
    if suite.events is None:
        return
    from spikemark.harness import calibration, environment
    from spikemark.harness.measure import placed

    device = suite.device or "cpu"
    with placed(device):
        suite.emit("ready", environment=environment.collect(device), torch_import_s=suite.torch_import_s)
        turns.mine().pause("")  # in an A/B run: calibrate and measure while the other variant's process rests
        if suite.calibrate:
            found = calibration.calibrate(device)
            suite.emit("calibration", pass_index=suite.pass_index, environment=suite.environment or device, **found)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is loaded now stays: collections while measuring need not walk over it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def measure(request: pytest.FixtureRequest) -> Measure:
    """``measure(case, benchmark)``: verify and time one case, beside the others of its comparison that are selected.

    Skips what cannot run here, fails what is wrong.
    """
    suite = request.config.stash[SUITE]

    def run(case: Case, benchmark: Any) -> Record:
        if case.key not in suite.measured:
            _measure_block(suite, _selected_beside(case, request.session.items), timed=benchmark.enabled)
        record = suite.measured.get(case.key)
        if record is None:
            pytest.skip(f"left to a new process: this one is spoilt by {suite.spoilt}")
        benchmark.extra_info["spikemark"] = {k: v for k, v in record.to_json().items() if k != "samples"}
        request.node.stash[RECORD] = record
        if record.status in SKIPPED:
            pytest.skip(f"{record.status}: {record.reason}")
        if record.status != records.OK:
            pytest.fail(f"{record.status}: {record.reason}", pytrace=False)
        _hand_over(record.samples, benchmark)
        return record

    return run


def _selected_beside(case: Case, items: list[pytest.Item]) -> list[Case]:
    """The cases of one comparison among the session's items, ``case`` with them.

    In an A/B run each is alone: its partner in turns is itself in the other version's process.
    """
    if turns.mine().shared:
        return [case]
    selected = [c for c in map(_case_of, items) if isinstance(c, Case)]  # an operator without cases has an empty item
    return [c for c in selected if c.group == case.group and c.problem == case.problem]


def _measure_block(suite: Suite, cases: list[Case], timed: bool) -> None:
    """Measure ``cases`` in turns into ``suite.measured``; every step is an event."""
    from spikemark.harness.measure import measure_block
    from spikemark.harness.sampling import Options

    index = {case.key: i for i, case in enumerate(suite.cases)}

    def tell(event: str, case: Case, **data: Any) -> None:
        if event == "start":
            turns.mine().pause(case.key)
            data["key"] = case.key
        if event in ("start", "turn"):
            data["log"] = log_position()
        if event == "record":
            record = data["record"]
            suite.measured[case.key] = record
            suite.spoilt = suite.spoilt or str(record.details.get("spoilt", ""))
            data["record"] = record.to_json()
        suite.emit(event, index=index[case.key], **data)

    measure_block(
        cases,
        Options.from_json(suite.options | {"timed": timed}),
        pass_index=suite.pass_index,
        environment=suite.environment or cases[0].device,
        seed=suite.seed,
        tell=tell,
        leave_when_spoilt=suite.events is not None,
    )


def _hand_over(samples: list[float], benchmark: Any) -> None:
    """Make a measured case's samples this item's rounds (nothing with ``--benchmark-disable``).

    pytest-benchmark measures one empty round, so that all of its own set-up is done, which the samples then replace.
    """
    benchmark.pedantic(lambda: None)
    if benchmark.stats is not None:
        benchmark.stats.stats.data[:] = samples


RECORD = pytest.StashKey[Record]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A refused case has used its fixture rightly: pytest-benchmark need not warn that it was not used."""
    report = yield
    record = item.stash.get(RECORD, None)
    if record is not None and record.status != records.OK:
        item.funcargs["benchmark"].skipped = True  # type: ignore[attr-defined]
    return report


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A process that a kernel has spoilt (threads, growing memory) measures no more; a new one takes over."""
    suite = item.config.stash[SUITE]
    if suite.spoilt and suite.events is not None:
        item.session.shouldstop = f"spoilt by {suite.spoilt}"


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """No host name in results."""
    machine_info.pop("node", None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The worker's last event: what it was to do is done, or left to a new process."""
    suite = session.config.stash.get(SUITE, None)
    if suite is not None:
        suite.emit("end", **({"spoilt": suite.spoilt} if suite.spoilt else {}))

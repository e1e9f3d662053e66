"""What an engine does without its engine: which nodes are chosen, what they are sent and tell, how it is gathered.

The node's side is real (its supervisor in a process of its own, in a temporary folder), with the fake worker.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_runs import case, fake_command
from spikemark.harness import environment, runs
from spikemark.harness.engines import address, kinds, parcel, ray_engine
from spikemark.harness.engines.gathering import Gathering, Part
from spikemark.harness.engines.kinds import Host, Job
from spikemark.harness.engines.node import Node, versions
from spikemark.harness.errors import UsageError
from spikemark.harness.interrupts import Interrupts
from spikemark.harness.plan import RunOptions
from spikemark.harness.progress import Quiet
from spikemark.harness.records import UNMEASURED, Case, Record
from spikemark.harness.runfolder import Run, RunFolder, StorageError
from spikemark.harness.statistics import summarise
from spikemark.kernels.types import Recording
from spikemark.reports import environments

HERE = Path(__file__).parent

FAST = Host("f" * 56, {"CPU": 4.0, "fast": 1.0, "node:10.0.0.1": 1.0, "memory": 1e9, "object_store_memory": 1e9})
SLOW = Host("0" * 56, {"CPU": 2.0, "slow": 2.0})
A100 = Host("a" * 56, {"CPU": 32.0, "GPU": 2.0, "accelerator_type:A100": 1.0})
A100_SMALL = Host("b" * 56, {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A100": 1.0})
H100 = Host("c" * 56, {"CPU": 64.0, "GPU": 8.0, "accelerator_type:H100": 1.0})
UNKNOWN = Host("d" * 56, {"CPU": 8.0, "GPU": 1.0})


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of this machine do not see each other's runs: whether rows are flagged is not what is tested."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


# Which nodes.


def test_the_table_of_nodes_is_read_without_those_that_are_gone() -> None:
    table = [{"NodeID": "x", "Alive": True, "Resources": {"CPU": 1.0}}, {"NodeID": "y", "Alive": False}]
    (host,) = kinds.hosts(table)
    assert host == Host("x", {"CPU": 1.0})
    assert len(host.short) == 6
    assert host.short != Host("y", {}).short


def test_one_job_a_kind_of_gpu_or_one_a_node() -> None:
    found = [A100_SMALL, A100, H100, FAST, UNKNOWN]
    jobs = kinds.jobs(found, [], False, [])
    assert [(j.kind, j.host, j.devices) for j in jobs] == [
        ("A100", A100, ("cuda:0",)),
        ("H100", H100, ("cuda:0",)),
        ("GPU", UNKNOWN, ("cuda:0",)),
    ]
    every = kinds.jobs(found, ["A100"], True, [])
    assert [(j.host, j.devices) for j in every] == [(A100, ("cuda:0", "cuda:1")), (A100_SMALL, ("cuda:0",))]
    named = kinds.jobs(found, ["fast", "fast"], False, [])
    assert named == [Job("fast", FAST, ("cpu",))]


def test_devices_are_the_nodes_own() -> None:
    asked = ["all", "cpu:2", "cpu"]
    assert kinds.local_devices(asked, A100, "A100", False) == ("cpu", "cuda:0", "cuda:1", "cpu:2")
    assert kinds.local_devices(["cuda"], A100, "A100", True) == ("cuda:0", "cuda:1")
    assert kinds.local_devices(["cuda", "cuda:0"], A100, "A100", False) == ("cuda:0",)
    with pytest.raises(UsageError, match="device 'cuda:2': nodes of kind A100 have cuda:0 to cuda:1"):
        kinds.local_devices(["cuda:2"], A100, "A100", False)
    with pytest.raises(UsageError, match="device 'cuda': nodes of kind fast have no GPU"):
        kinds.local_devices(["cuda"], FAST, "fast", False)


def test_what_the_cluster_lacks_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"the cluster has no GPU: name a resource .* --kind; there are: fast, slow"):
        kinds.jobs([FAST, SLOW], [], False, [])
    with pytest.raises(UsageError, match="no node of the cluster is of kind 'fats'; there are: fast, slow, A100"):
        kinds.jobs([FAST, SLOW, A100], ["fats"], False, [])
    with pytest.raises(UsageError, match="the cluster has no GPU"):
        kinds.jobs([], [], False, [])


def test_who_takes_over() -> None:
    job = Job("A100", A100_SMALL, ("cuda:0",))
    assert kinds.another(job, [A100_SMALL, A100, H100], {A100_SMALL.id}) == replace(job, host=A100)
    assert kinds.another(job, [A100_SMALL, H100], {A100_SMALL.id}) == job, "its own node lives"
    assert kinds.another(job, [H100], {A100_SMALL.id}) is None
    two = Job("A100", A100, ("cuda:0", "cuda:1"))
    assert kinds.another(two, [A100_SMALL], {A100.id}) is None, "it has fewer GPUs"


def test_names_in_results_are_plain() -> None:
    assert kinds.device_name("cuda:0", "A100", "3f2a9c") == "cuda:0@A100-3f2a9c"
    assert kinds.device_name("cpu", "../my kind/10.0.0.1") == "cpu@.._my_kind_10.0.0.1"
    assert kinds.plain("") == "_"
    assert len(kinds.plain("x" * 99)) == 40
    assert replace(case("ok"), device="cuda:0@A100-3f2a9c").local_device == "cuda:0"


# What a node is sent, does and tells.


class Bench:
    """A run folder here, and nodes to measure for it."""

    def __init__(self, folder: Path, cases: list[Case], before: Run | None = None, **changes: Any) -> None:
        self.cases = cases
        self.options = RunOptions(out=folder, **({"passes": 2, "case_timeout_s": 30.0} | changes))
        self.folder, before = runs.open_folder(cases, self.options, ["run"])
        self.gathering = Gathering(self.folder, before, Quiet())
        self.inputs = parcel.inputs(cases, self.options.plugins)

    def part(self, host: Host, kind: str) -> Part:
        """A part of the run on a node."""
        return self.gathering.expect(Job(kind, host, ("cpu",)), self.cases, self.options)

    def letter(self, part: Part) -> str:
        """What the node of a part is sent."""
        node = {"kind": part.job.kind, "id": part.job.host.short}
        known = self.gathering.known(part)
        return parcel.pack(list(part.cases.values()), part.options, self.inputs, fake_command, node, known)

    def begin(self, part: Part) -> Node:
        """The node's side, begun."""
        node = Node()
        node.begin(self.letter(part), *self.inputs.contents)
        return node

    def follow(self, part: Part, node: Node, until: int | None = None) -> dict[str, Any] | None:
        """Take news until the node has ended: how it ended. Or until it has told ``until`` rows, and hear no more."""
        position = rows = 0
        while True:
            news = json.loads(node.poll(position))
            told = [json.loads(line)["kind"] == "record" for line in news["lines"]]
            if until is not None and rows + sum(told) >= until:
                wanted = [i for i, is_row in enumerate(told) if is_row][until - rows - 1]
                self.gathering.hear(part, news | {"lines": news["lines"][: wanted + 1], "ended": None})
                return None
            self.gathering.hear(part, news)
            position = news["position"]
            rows += sum(told)
            if news["ended"]:
                return news["ended"]

    def measure(self, host: Host, kind: str) -> dict[str, Any]:
        """All of a part."""
        part = self.part(host, kind)
        node = self.begin(part)
        ended = self.follow(part, node)
        node.close()
        assert not node.folder.exists()
        assert ended is not None
        self.gathering.end(part, ended["message"])
        return ended

    def lose(self) -> Part:
        """The fast node is lost after its first row; the part as the slow one takes it over."""
        part = self.part(FAST, "fast")
        node = self.begin(part)
        self.follow(part, node, until=1)
        node.close()
        return self.gathering.move(part, Job("fast", SLOW, ("cpu",)), "its node was lost")

    def finish(self) -> Run:
        """The run as it is read back."""
        return runs.finish(self.folder, self.gathering.planned(), False, self.gathering.times())


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where fake workers write what they were given."""
    monkeypatch.setenv("FAKE_TRACE", str(tmp_path / "trace"))
    return tmp_path / "trace"


def test_two_nodes_measure_into_one_folder(tmp_path: Path, traced: Path) -> None:
    """Each by its own name, with its own environment; plug-ins and recordings are there by content."""
    for folder, text in (("one", "# first"), ("two", "# second")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(text)
    (tmp_path / "one" / "spikes.npz").write_bytes(b"\0\1recording")
    plain = case("ok")
    recorded = replace(
        case("fine"), problem=replace(plain.problem, recording=Recording(str(tmp_path / "one" / "spikes.npz"), 1))
    )
    plugins = tuple(str(tmp_path / folder / "mine.py") for folder in ("one", "two"))
    bench = Bench(tmp_path / "r", [plain, recorded, case("exits"), case("absent")], plugins=plugins)
    for host, kind in ((FAST, "fast"), (SLOW, "slow")):
        assert bench.measure(host, kind)["code"] == 0
    run = bench.finish()
    names = [f"cpu@fast-{FAST.short}", f"cpu@slow-{SLOW.short}"]
    assert list(run.meta["environments"]) == names
    for name, kind, host in zip(names, ("fast", "slow"), (FAST, SLOW), strict=True):
        own = run.meta["environments"][name]
        assert (own["device"], own["node"]) == (name, {"kind": kind, "id": host.short})
        assert own["project"]["plugins"] == {"mine.py": environment.file_hash(Path(plugins[1]))}
    rows = {(r["device"], r["implementation"]): r for r in summarise(run)}
    assert {(d, i): r["status"] for (d, i), r in rows.items()} == {
        (name, i): status
        for name in names
        for i, status in (("ok", "ok"), ("fine", "ok"), ("exits", "crashed"), ("absent", "unavailable"))
    }
    assert {r["passes"] for r in rows.values() if r["status"] == "ok"} == {2}
    assert {r["device_id"] for r in rows.values()} == {FAST.short, SLOW.short}
    assert len(run.calibrations) == 4
    assert {c["environment"] for c in run.calibrations} == set(names)
    assert run.meta["unmeasured"] == []
    assert run.meta["time"]["kernel_s"] == pytest.approx(2 * 5 * 0.002), "five rows each of 2 ms"
    assert bench.gathering.disagreement() == ""
    traces = [json.loads(line)["plugins"] for line in traced.read_text().splitlines()]
    assert {Path(p).name for plugins in traces for p in plugins} == {"mine.py"}
    assert all(str(tmp_path / "one") not in p for plugins in traces for p in plugins), "not the files of this machine"
    written = "".join((tmp_path / "r" / name).read_text() for name in ("run.json", "cases.jsonl", "results.csv"))
    for private in (FAST.id, "10.0.0.1", str(tmp_path), socket.gethostname() + "."):
        assert private not in written


def test_gpus_are_called_by_their_own_hash(tmp_path: Path) -> None:
    """So a card has the same name in the next cluster, and two of a node have two; its processor has the node's."""
    cases = [case("ok", device=device) for device in ("cpu", "cuda:0", "cuda:1")]
    bench = Bench(tmp_path / "r", cases, passes=1)
    part = bench.gathering.expect(Job("A100", A100, ("cpu", "cuda:0", "cuda:1")), cases, bench.options)
    said = {"versions": versions(), "names": {"cpu": A100.short, "cuda:0": "aaaaaa", "cuda:1": "bbbbbb"}, "begin": 0}
    gpus = {f"cuda:{i}": {"device_name": "A100", "gpu": {"uuid_hash": letter * 12}} for i, letter in enumerate("ab")}
    why = "the measuring process ended itself with exit code 1 (see logs/pass0-cuda_0-0.log)"
    rows = [{"kind": "record"} | Record(c, 0, "ok", samples=[1e-3], environment=c.device).to_json() for c in cases[:2]]
    rows.append({"kind": "record"} | Record(cases[2], 0, "error", why, details={"log": "x"}).to_json())
    news = {"told": said, "environments": {"cpu": {"device_name": "CPU"}} | gpus, "lost": {"cuda:1": why},
            "lines": [json.dumps(row) for row in rows], "ended": None, "position": 1}  # fmt: skip
    bench.gathering.hear(part, news)
    bench.gathering.end(part, "")
    run = bench.finish()
    cpu, first, second = f"cpu@A100-{A100.short}", "cuda:0@A100-aaaaaa", "cuda:1@A100-bbbbbb"
    assert [(r["device"], r["device_id"], r["status"]) for r in summarise(run)] == [
        (cpu, A100.short, "ok"),
        (first, "a" * 12, "ok"),
        (second, "b" * 12, "error"),
    ]
    assert environments.describe(run.meta["environments"][first]) == "A100 #aaaaaa"
    nodes = {name: found["node"] for name, found in run.meta["environments"].items()}
    assert nodes == {cpu: {"kind": "A100", "id": A100.short}, first: {"kind": "A100"}, second: {"kind": "A100"}}
    assert run.meta["lost"] == {second: "the measuring process ended itself with exit code 1"}, "its log is not here"
    assert run.records[2].reason == run.meta["lost"][second]
    assert "log" not in run.records[2].details


def test_a_device_goes_on_where_it_was_and_no_other_does(tmp_path: Path) -> None:
    """A run that ended early is continued: the node that has measured a part measures the rest; a new one all."""
    bench = Bench(tmp_path / "r", [case("ok"), case("exits")], passes=1)
    bench.measure(FAST, "fast")
    bench.finish()
    before = (tmp_path / "r" / "cases.jsonl").read_text()

    again = Bench(tmp_path / "r", [case("ok"), case("exits"), case("fine")], passes=2, resume=True)
    again.measure(FAST, "fast")
    again.measure(SLOW, "fast")
    run = again.finish()
    assert "lost" not in {k for k, v in run.meta.items() if v}
    assert (tmp_path / "r" / "cases.jsonl").read_text().startswith(before)
    own = [(r.case.implementation, r.pass_index) for r in run.records if FAST.short in r.case.device]
    assert sorted(own) == [("exits", 0), ("fine", 0), ("fine", 1), ("ok", 0), ("ok", 1)], "nothing twice"
    other = [(r.case.implementation, r.pass_index) for r in run.records if SLOW.short in r.case.device]
    assert sorted(other) == sorted(own)


def test_a_lost_nodes_part_is_measured_by_another(tmp_path: Path) -> None:
    """What it has measured stays its own; if the other fails too, what nobody has measured says why."""
    bench = Bench(tmp_path / "r", [case(n) for n in ("ok", "fine", "binary")], passes=2)
    moved = bench.lose()
    assert bench.gathering.left > 0
    other = bench.begin(moved)
    assert bench.follow(moved, other) is not None
    other.close()
    run = bench.finish()
    first, second = f"cpu@fast-{FAST.short}", f"cpu@fast-{SLOW.short}"
    rows = summarise(run)
    assert {(r["implementation"], r["passes"]) for r in rows if r["device"] == second} == {
        ("ok", 2), ("fine", 2), ("binary", 2)
    }  # fmt: skip
    assert all("incomplete" in r["flags"] for r in rows if r["device"] == first and r["passes"] < 2)
    assert run.meta["lost"] == {first: "its node was lost; measured again elsewhere"}
    assert run.meta["unmeasured"] == []


def test_what_two_nodes_could_not_measure_says_why(tmp_path: Path) -> None:
    """The second never answers: rows under the name of the first, whose measured cases keep their times."""
    bench = Bench(tmp_path / "r", [case(n) for n in ("ok", "fine", "binary")], passes=2)
    moved = bench.lose()
    bench.gathering.give_up(moved, "its node was lost, a second time (/home/me/secret: 7)")
    run = bench.finish()
    name = f"cpu@fast-{FAST.short}"
    assert run.meta["lost"] == {name: "its node was lost, a second time (secret: 7)"}
    rows = summarise(run)
    assert {r["device"] for r in rows} == {name}
    assert len(rows) == 3
    for row in rows:
        assert row["status"] in ("ok", "unavailable")
        assert ("incomplete" in row["flags"]) == (row["status"] == "ok" and row["passes"] < 2)
        assert row["reason"] == ("" if row["status"] == "ok" else run.meta["lost"][name])
    assert all(r.details.get(UNMEASURED) for r in run.records if r.status == "unavailable")
    assert run.meta["unmeasured"] == []

    again = Bench(tmp_path / "r", [case(n) for n in ("ok", "fine", "binary")], passes=2, resume=True)
    again.measure(FAST, "fast")
    run = again.finish()
    assert run.meta["lost"] == {}
    assert [(r["status"], r["passes"], "incomplete" in r["flags"]) for r in summarise(run)] == [("ok", 2, False)] * 3


def test_a_kind_that_never_answers_has_rows_of_its_own(tmp_path: Path) -> None:
    """Until one of the kind does, when the run is continued."""
    bench = Bench(tmp_path / "r", [case("ok")])
    bench.gathering.give_up(bench.part(FAST, "fast"), "no node is left")
    (row,) = summarise(bench.finish())
    assert (row["device"], row["status"], row["reason"]) == ("cpu@fast", "unavailable", "no node is left")
    again = Bench(tmp_path / "r", [case("ok")], resume=True)
    again.measure(FAST, "fast")
    run = again.finish()
    assert [(r["device"], r["status"]) for r in summarise(run)] == [(f"cpu@fast-{FAST.short}", "ok")]
    assert (run.meta["lost"], run.meta["unmeasured"]) == ({}, [])


def test_what_was_never_planned_to_its_end_is_planned_anew(tmp_path: Path) -> None:
    """A run that is interrupted before a node has said its name knows its cases by the kind only."""
    bench = Bench(tmp_path / "r", [case("ok")])
    bench.part(FAST, "fast")
    run = runs.finish(bench.folder, bench.gathering.planned(), True, bench.gathering.times())
    assert run.meta["unmeasured"] == [replace(case("ok"), device="cpu@fast").key]
    again = Bench(tmp_path / "r", [case("ok")], resume=True)
    again.measure(FAST, "fast")
    assert again.finish().meta["unmeasured"] == []


def test_rows_that_a_node_left_undone_say_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "r", [case("ok"), case("fine")])
    bench.gathering.end(bench.part(FAST, "fast"), "")
    rows = summarise(bench.finish())
    assert [(r["status"], r["reason"]) for r in rows] == [("unavailable", "its run has ended without these rows")] * 2


@pytest.fixture
def other_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installation of Spikemark with one more comment, and of another torch, found by processes started now."""
    root = Path(environment.PACKAGE)
    site = tmp_path / "site"
    site.mkdir()
    left_out = shutil.ignore_patterns(".*", "runs", "tests", "build", "*.egg-info")
    shutil.copytree(root, site / "spikemark", ignore=left_out)
    with (site / "spikemark" / "harness" / "errors.py").open("a") as file:
        file.write("# changed\n")
    (site / "torch-9.9.9.dist-info").mkdir()
    (site / "torch-9.9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))
    yield site


def test_another_source_of_spikemark_is_refused_and_versions_are_said(tmp_path: Path, other_source: Path) -> None:
    bench = Bench(tmp_path / "r", [case("ok")])
    part = bench.part(FAST, "fast")
    node = bench.begin(part)
    ended = bench.follow(part, node)
    node.close()
    assert ended is not None
    assert ended["code"] == 2
    assert f"another source ({bench.gathering.versions[part.label]['source']}, here " in ended["message"]
    bench.gathering.versions["here"] = versions()
    said = bench.gathering.disagreement()
    assert f"torch 9.9.9 ({part.label}) and " in said
    assert said.startswith("the nodes differ in source ")
    assert "python" not in said
    assert "\n" not in said


def test_what_goes_wrong_on_a_node_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setenv("FAKE_BROKEN", "1")
        ended = Bench(tmp_path / "a", [case("ok")]).measure(FAST, "fast")
    assert ended["code"] == 2
    assert "ImportError: no module named kaputt" in ended["message"]
    with monkeypatch.context() as broken:
        broken.setenv("PYTHONPATH", str(tmp_path / "site"))
        (tmp_path / "site" / "spikemark").mkdir(parents=True)
        absent = "raise ModuleNotFoundError(\"No module named 'spikemark'\")\n"
        (tmp_path / "site" / "spikemark" / "__init__.py").write_text(absent)
        ended = Bench(tmp_path / "b", [case("ok")]).measure(FAST, "fast")
    assert ended["code"] == 2
    assert ended["message"].startswith("the runner ended itself with exit code 1: ")
    assert "ModuleNotFoundError: No module named 'spikemark'" in ended["message"]


def test_a_node_that_is_stopped_finishes_its_case(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "r", [case(n) for n in ("ok", "fine", "binary")], passes=500)
    part = bench.part(FAST, "fast")
    node = bench.begin(part)
    bench.follow(part, node, until=1)
    node.stop()
    ended = bench.follow(part, node)
    node.close()
    assert ended is not None
    assert ended["code"] == 130
    assert {r.status for r in RunFolder.load(tmp_path / "r").records} == {"ok"}


def test_signals_reach_a_run_that_is_begun_where_they_are_blocked(tmp_path: Path) -> None:
    """As in the threads that engines call actors in; and what a killed node left behind is swept up."""
    left = tmp_path / "spikemark-node-4194305-x"  # beyond the largest process id
    (left / "inputs").mkdir(parents=True)
    bench = Bench(tmp_path / "r", [case(n) for n in ("ok", "fine", "binary")], passes=500)
    part = bench.part(FAST, "fast")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        node = bench.begin(part)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert not left.exists()
    bench.follow(part, node, until=1)
    node.stop()
    ended = bench.follow(part, node)
    node.close()
    assert ended is not None
    assert ended["code"] == 130


def test_news_may_be_asked_for_twice(tmp_path: Path) -> None:
    """An answer that was lost on the way is given again from the same place."""
    bench = Bench(tmp_path / "r", [case("ok"), case("fine")])
    part = bench.part(FAST, "fast")
    node = bench.begin(part)
    node._process.wait(60)  # type: ignore[union-attr]
    one, two = (json.loads(node.poll(0)) for _ in range(2))
    node.close()
    assert one == two
    assert [json.loads(line)["kind"] for line in one["lines"]].count("record") == 4
    assert one["ended"] is None, "first its rows"


def test_nonsense_from_a_node_is_refused(tmp_path: Path) -> None:
    bench, other = Bench(tmp_path / "r", [case("ok")]), Bench(tmp_path / "s", [case("fine")])
    part = bench.part(FAST, "fast")
    strange = other.part(FAST, "fast")
    node = other.begin(strange)
    with pytest.raises(ValueError, match="a case that was not asked for"):
        bench.follow(part, node)
    node.close()
    assert RunFolder.load(tmp_path / "r").records == []


def test_a_disk_that_is_full_here_keeps_what_came_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path / "r", [case(n) for n in ("ok", "fine", "binary")])
    part = bench.part(FAST, "fast")
    node = bench.begin(part)
    bench.follow(part, node, until=1)

    def full(fd: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr("spikemark.harness.journal.os.write", full)
        with pytest.raises(StorageError, match="no space left to write"):
            bench.follow(part, node)
    node.close()
    kept = RunFolder.load(tmp_path / "r")
    assert kept.damaged == 0
    assert kept.records


def test_inputs_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*gone\.py: No such file"):
        parcel.inputs([], [str(tmp_path / "gone.py")])


# Where the cluster is.


def test_an_address_that_is_none_is_refused() -> None:
    for bad in ("here", "host:", ":6379", "host:x", "host:0", "host:99999"):
        with pytest.raises(UsageError, match="is no HOST:PORT"):
            address.answers(bad)
    with pytest.raises(UsageError, match="Ray's client is not enough"):
        address.answers("ray://127.0.0.1:10001")


def test_nobody_answers() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    with pytest.raises(UsageError, match=f"nobody answers at 127.0.0.1:{number}: Connection refused"):
        address.answers(f"127.0.0.1:{number}")


def test_something_else_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and says nothing: asked in a child process, which is not waited for without end."""
    monkeypatch.setattr(address, "CHECK_S", 1.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []
        thread = threading.Thread(target=lambda: [held.append(server.accept()[0]) for _ in range(2)], daemon=True)
        thread.start()
        with pytest.raises(UsageError, match="is no Ray cluster, or one of another version"):
            address.answers(f"127.0.0.1:{server.getsockname()[1]}")
        for connection in held:
            connection.close()


def test_a_head_that_is_gone_ends_the_run_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Ray notices: it would wait, and then end the process with no word of ours."""
    monkeypatch.setattr(ray_engine, "HEAD_S", 0.2)
    monkeypatch.setattr(ray_engine, "LOOK_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        ray = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(gcs_address=where))
        bench = Bench(tmp_path / "r", [case("ok")])
        command = fake_command
        engine = ray_engine.Engine(ray, bench.gathering, bench.inputs, command, False, Interrupts())
        engine._check_head()
    with pytest.raises(ray_engine.HeadGone, match=r"does not answer any more \(Connection refused\): continue with"):
        engine._check_head()


def test_what_ray_says_of_an_error_there_is_its_last_line() -> None:
    """Ray's own words name machines."""
    told = (
        "The actor died (ip: 10.0.0.1).\n  File x\nValueError: one\nModuleNotFoundError: No module named 'spikemark'\n"
    )
    assert ray_engine._said(RuntimeError(told)) == "ModuleNotFoundError: No module named 'spikemark'"
    assert ray_engine._said(RuntimeError("The actor is dead because its node 10.0.0.1 has died.")) == ""


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``spikemark run`` with these words."""
    return subprocess.run(
        [sys.executable, "-m", "spikemark", "run", *words],
        capture_output=True, text=True, check=False, timeout=120, env=os.environ | variables,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "A100"], "--kind is about a cluster: it needs --engine ray"),
        (["--address", "a:1"], "--address is about a cluster: it needs --engine ray"),
        (["--every-gpu"], "--every-gpu is about a cluster: it needs --engine ray"),
        (["--engine", "rya"], "unknown --engine 'rya' (did you mean 'ray'?)"),
        (["--engine", "ray", "--device", "gpu"], "unknown device 'gpu' (did you mean 'cuda'?)"),
        (["--engine", "ray", "--device", "cpu:0"], "device 'cpu:0': at least one thread is needed"),
        (["--engine", "ray", "--plugin", "missing.py"], "missing.py"),
        (["--engine", "ray", "--address", "nowhere"], "--address 'nowhere' is no HOST:PORT"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    if "nowhere" in words and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed, which is said first: pip install 'spikemark[ray]'")
    done = command(*words, "--out", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_ray_that_is_not_installed_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError(\"No module named 'ray'\")\n")
    done = command("--engine", "ray", "--out", str(tmp_path / "out"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == ("spikemark: --engine ray needs Ray (No module named 'ray'): pip install 'spikemark[ray]'\n")

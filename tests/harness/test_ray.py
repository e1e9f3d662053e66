"""A real Ray cluster of several nodes on this machine: custom resources stand for kinds of GPU, one node is killed.

The real worker measures tiny cases, one or two passes. What an engine does without Ray is in ``test_cluster``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from spikemark.harness.engines.kinds import Host, hosts
from spikemark.harness.runfolder import Run, RunFolder
from spikemark.harness.statistics import summarise

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'spikemark[ray]'")
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="this build of Ray has no cluster_utils")

pytestmark = pytest.mark.timeout(300)

# A lost node is noticed in seconds, not in half a minute.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 8}
HERE = "127.0.0.2"  # Ray takes 127.0.0.1 for a name of the machine's outer address
PLUGIN = """
import time
import torch
from spikemark import kernels

@kernels.implementation("clamped_sign", device="cpu")
class Unhurried:
    '''As torch, but takes its time: there is a middle to be killed in.'''
    def forward(self, x):
        time.sleep(0.02)
        return torch.sign(x).contiguous()
    def backward(self, grad): return grad.contiguous()
"""
SELECT = (
    *("--preset", "smoke", "--workload", "mnist/conv1", "--operator", "clamped_sign", "--phase", "forward"),
    *("--implementation", "torch", "--implementation", "unhurried", "--plugin", "plugin.py", "--batch", "1"),
)


class Nodes:
    """A cluster whose head measures nothing."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "_system_config": QUICK, "include_dashboard": False, "node_ip_address": HERE}
        self.cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return str(self.cluster.address)

    def add(self, kind: str, **more: Any) -> Any:
        """One more node, of this kind."""
        node = self.cluster.add_node(num_cpus=1, resources={kind: 1}, node_ip_address=HERE, **more)
        self.nodes[kind] = node
        return node

    def kill(self, kind: str) -> None:
        """As when its machine loses power: no farewell."""
        self.cluster.remove_node(self.nodes.pop(kind), allow_graceful=False)

    def table(self) -> list[Host]:
        """The nodes that are alive."""
        return hosts(self.cluster.global_state.node_table())


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Three kinds, a node each."""
    with tempfile.TemporaryDirectory(prefix="sm", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)  # short: sockets are in it; and no note of it for a person's own Ray
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        found = Nodes()
        try:
            for kind in ("red", "green", "blue"):
                found.add(kind)
            yield found
        finally:
            found.cluster.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    return tmp_path


def start(folder: Path, nodes: Nodes, *words: str) -> subprocess.Popen[str]:
    """``spikemark run --engine ray`` as a person types it."""
    command = [sys.executable, "-m", "spikemark", "run", "--engine", "ray", "--address", nodes.address, *SELECT, *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()  # one that hangs would hold its nodes
    return process.returncode, out, err


def kinds_of(run: Run) -> dict[str, set[str]]:
    """kind -> statuses of its rows."""
    out: dict[str, set[str]] = {}
    for row in summarise(run):
        out.setdefault(row["device"].partition("@")[2].partition("-")[0], set()).add(row["status"])
    return out


def test_no_cluster_here(tmp_path: Path) -> None:
    """Nothing is named and nothing runs. (First, for Ray finds the nodes of the other tests by their processes.)"""
    if any(p.info["name"] == "gcs_server" for p in psutil.process_iter(["name"])):
        pytest.skip("a Ray cluster runs on this machine")
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"RAY_TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "spikemark", "run", "--engine", "ray", "--out", "out"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100, env=environment
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "no Ray cluster answers: start one with `ray start --head`" in done.stderr


def test_one_node_of_three_is_killed_in_the_middle(folder: Path, nodes: Nodes) -> None:
    """One report: two nodes' rows complete, the third's marked; and nobody waits for a kind that is gone."""
    process = start(
        folder, nodes, "--kind", "red", "--kind", "green", "--kind", "blue", "--passes", "2", "--out", "out"
    )
    journal = folder / "out" / "cases.jsonl"
    deadline = time.monotonic() + 100
    while not (journal.exists() and any("@blue" in line and '"record"' in line for line in journal.open())):
        assert process.poll() is None and time.monotonic() < deadline, finish(process)
        time.sleep(0.02)
    nodes.kill("blue")
    code, out, err = finish(process)
    assert code == 0, out + err
    assert "Traceback" not in err
    assert "raylet" not in out + err, "nothing of Ray's own"
    assert out.splitlines()[-1] == "out/report.html"
    run = RunFolder.load(folder / "out")
    rows = summarise(run)
    by_kind = {k: [r for r in rows if f"@{k}-" in r["device"]] for k in ("red", "green", "blue")}
    for kind in ("red", "green"):
        assert [(r["status"], r["passes"], "incomplete" in r["flags"]) for r in by_kind[kind]] == [("ok", 2, False)] * 2
    reason = "its node was lost, and no other node of kind blue is left"
    assert len(by_kind["blue"]) == 2
    for row in by_kind["blue"]:
        marked = row["status"] == "unavailable" and row["reason"] == reason
        assert marked or (row["status"] == "ok" and row["passes"] < 2 and "incomplete" in row["flags"])
    (lost,) = {r["device"] for r in by_kind["blue"]}
    assert run.meta["lost"] == {lost: reason}
    assert f"{lost}: {reason}" in out
    assert (run.meta["unmeasured"], run.meta["interrupted"]) == ([], False)
    page = (folder / "out" / "report.html").read_text()
    assert f"Device {lost} was given up: {reason}." in page
    assert all(kind in page for kind in ("cpu@red-", "cpu@green-", "cpu@blue-"))
    for private in (HERE, nodes.address, str(folder), *(node.id for node in nodes.table())):
        for name in ("run.json", "cases.jsonl", "results.csv", "benchmarks.json", "report.html"):
            assert private not in (folder / "out" / name).read_text(), (private, name)
    assert {e["project"]["plugins"].keys().__iter__().__next__() for e in run.meta["environments"].values()} == {
        "plugin.py"
    }

    # A node of that kind joins again: what is missing is measured there, and the run is whole.
    nodes.add("blue")
    words = ("--resume", "--out", "out", "--address", nodes.address)
    again = subprocess.run([sys.executable, "-m", "spikemark", "run", *words],
                           cwd=folder, capture_output=True, text=True, check=False, timeout=200)  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    run = RunFolder.load(folder / "out")
    assert {r["status"] for r in summarise(run)} == {"ok"}
    assert all(why == f"{reason}; measured again elsewhere" for why in run.meta["lost"].values())
    complete = {r["device"] for r in summarise(run) if r["passes"] == 2}
    assert {name.partition("-")[0] for name in complete} == {"cpu@red", "cpu@green", "cpu@blue"}
    assert sum(r.case.device.startswith("cpu@red") for r in run.records) == 4, "nothing is measured twice"


def test_another_node_of_the_kind_takes_over(folder: Path, nodes: Nodes) -> None:
    first, second = nodes.add("twin"), None
    process = start(folder, nodes, "--kind", "twin", "--passes", "2", "--out", "out")
    journal = folder / "out" / "cases.jsonl"
    deadline = time.monotonic() + 100
    while not (journal.exists() and '"record"' in journal.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, finish(process)
        time.sleep(0.02)
    second = nodes.add("twin")
    nodes.nodes["twin"] = first
    nodes.kill("twin")
    nodes.nodes["twin"] = second
    code, out, err = finish(process)
    nodes.kill("twin")
    assert code == 0, out + err
    assert "takes over" in err
    run = RunFolder.load(folder / "out")
    rows = summarise(run)
    assert len({r["device"] for r in rows}) == 2, "rows of two nodes are not mixed"
    assert sorted(r["implementation"] for r in rows if r["passes"] == 2) == ["torch", "unhurried"]
    (why,) = run.meta["lost"].values()
    assert why == "its node was lost; measured again elsewhere"


def test_the_kind_goes_while_its_job_waits(folder: Path, nodes: Nodes) -> None:
    """Another job holds the node; then the node is gone. Ray alone would wait for ever."""
    nodes.add("held")
    with held_by_another(nodes):
        code, out, err = taken_while_waiting(folder, nodes)
    assert code == 4, out + err
    assert kinds_of(RunFolder.load(folder / "out")) == {"held": {"unavailable"}}
    assert "its node was lost, and no other node of kind held is left" in out


@contextmanager
def held_by_another(nodes: Nodes) -> Iterator[None]:
    """Inside, another program's actor holds the node of kind held."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, nodes.address], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert holder.stdout is not None
        # Ray prints there too, of nodes that other tests have killed.
        assert "held\n" in iter(holder.stdout.readline, ""), "it ended"
        yield
    finally:
        holder.kill()
        holder.communicate()


def taken_while_waiting(folder: Path, nodes: Nodes) -> tuple[int, str, str]:
    """A run that waits for the held node, which is then killed: how it ends."""
    process = start(folder, nodes, "--kind", "held", "--passes", "1", "--out", "out")
    journal = folder / "out" / "cases.jsonl"
    deadline = time.monotonic() + 60
    while not journal.exists():
        assert process.poll() is None and time.monotonic() < deadline, finish(process)
        time.sleep(0.05)
    time.sleep(1.0)  # the job is asked for; were it not yet, it would end the same way
    nodes.kill("held")
    return finish(process)


HOLDER = """
import logging, sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)

@ray.remote(num_cpus=1, resources={"held": 1})
class Holder:
    def here(self): return True

holder = Holder.remote()
ray.get(holder.here.remote())
print("held", flush=True)
time.sleep(600)
"""


def test_control_c_lets_the_nodes_finish_their_cases(folder: Path, nodes: Nodes) -> None:
    process = start(folder, nodes, "--kind", "red", "--kind", "green", "--passes", "500", "--out", "out")
    journal = folder / "out" / "cases.jsonl"
    deadline = time.monotonic() + 100
    while not (journal.exists() and all(f"@{k}" in journal.read_text() for k in ("red", "green"))):
        assert process.poll() is None and time.monotonic() < deadline, finish(process)
        time.sleep(0.05)
    process.send_signal(2)
    code, out, err = finish(process)
    assert code == 130, out + err
    assert "Traceback" not in err
    run = RunFolder.load(folder / "out")
    assert run.meta["interrupted"] is True
    assert kinds_of(run) == {"red": {"ok"}, "green": {"ok"}}


def test_what_the_cluster_lacks_is_one_line(folder: Path, nodes: Nodes) -> None:
    code, out, err = finish(start(folder, nodes, "--out", "out"))
    assert (code, out) == (2, "")
    said = "spikemark: the cluster has no GPU: name a resource that stands for a kind of node with --kind; there are: "
    assert err.startswith(said), err
    assert err.count("\n") == 1, err
    assert not (folder / "out").exists()


def test_a_full_disk_here_keeps_the_rows(folder: Path, nodes: Nodes) -> None:
    """A limit on the size of files fails in the middle of a write, as a full disk does."""
    code = (
        "import resource, sys; from spikemark import runner\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, resource.RLIM_INFINITY))\n"
        "sys.exit(runner.main(sys.argv[1:]))\n"
    )
    words = ["run", "--engine", "ray", "--address", nodes.address, "--kind", "red", *SELECT, "--passes", "20"]
    done = subprocess.run([sys.executable, "-c", code, *words, "--out", "out"],
                          cwd=folder, capture_output=True, text=True, check=False, timeout=200)  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no space left to write" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    run = RunFolder.load(folder / "out")
    assert run.damaged == 0
    assert {r.status for r in run.records} == {"ok"}
    assert json.loads((folder / "out" / "run.json").read_text())["interrupted"] is True

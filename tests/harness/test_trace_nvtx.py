"""The NVTX ranges that a real measuring process and a traced layer really emit, heard by an injected library.

The library (``nvtx_injection.cpp``) is compiled here against the headers of the package ``nvidia-nvtx``.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from spikemark.harness.plan import RunOptions, Variant, write_plan
from spikemark.harness.records import OK, Case
from spikemark.harness.trace import profiled
from spikemark.suites import selection
from spikemark.suites.worker import worker_command

HEADER = "include/nvtx3/nvToolsExt.h"


def include() -> Path | None:
    """The folder that holds ``nvtx3/``, of whatever version of the package is installed."""
    try:
        files = importlib.metadata.files("nvidia-nvtx") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if str(file).endswith(HEADER)]
    return found[0].parents[1] if found else None


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The injection library."""
    headers, compiler = include(), shutil.which("g++") or shutil.which("clang++")
    if headers is None:
        pytest.skip("the package nvidia-nvtx (headers of NVTX 3) is not installed")
    if compiler is None:
        pytest.skip("no C++ compiler")
    out = tmp_path_factory.mktemp("nvtx") / "libinjection.so"
    source = Path(__file__).with_name("nvtx_injection.cpp")
    subprocess.run([compiler, "-shared", "-fPIC", "-std=c++17", "-O1", f"-I{headers}", str(source), "-o", str(out)],
                   check=True)  # fmt: skip
    return out


@dataclass
class Range:
    """A start/end range as heard: positions in the log, where it was opened and closed."""

    name: str
    domain: str
    category: str
    payload: str
    thread: int
    start: int
    end: int = -1
    end_thread: int = -1

    def holds(self, other: Range) -> bool:
        return self.start < other.start and other.end < self.end


def heard(log: Path) -> tuple[list[Range], Counter[str]]:
    """The ranges in a log, and how many lines of each kind it has."""
    categories: dict[tuple[str, str], str] = {}
    ranges: dict[str, Range] = {}
    kinds: Counter[str] = Counter()
    for number, line in enumerate(log.read_text().splitlines()):
        what, domain, key, thread, category, payload, message = line.split("\t")
        kinds[what] += 1
        if what == "category":
            categories[domain, key] = message
        elif what == "start":
            where = (message, domain, categories.get((domain, category), category), payload, int(thread), number)
            ranges[key] = Range(*where)
        elif what == "end":
            assert ranges[key].end == -1, "a range ends once"
            ranges[key].end, ranges[key].end_thread = number, int(thread)
    return list(ranges.values()), kinds


def under(library: Path, log: Path) -> dict[str, str]:
    return os.environ | {"NVTX_INJECTION64_PATH": str(library), "NVTX_TEST_LOG": str(log)}


def one_case(operator: str, phase: str, implementation: str) -> Case:
    names: dict[str, Any] = {"operators": [operator], "phases": [phase], "implementations": [implementation]}
    return selection.build("smoke", devices=["cpu"], **names)[0]


def measure(case: Case, library: Path, folder: Path) -> tuple[list[Range], Counter[str], dict[str, Any]]:
    """Ranges of a real measuring process of one case, and the record that it sent."""
    plan, log = folder / "plan.json", folder / "nvtx.log"
    options = RunOptions(out=folder, min_samples=4, max_samples=4, ledger=False)
    write_plan(plan, [case], options, pass_index=0, variant=Variant(), calibrate=False)
    read, write = os.pipe()
    with os.fdopen(read, "rb") as events:
        process = subprocess.Popen(
            worker_command(plan, write), pass_fds=(write,), env=under(library, log), stdout=subprocess.DEVNULL
        )
        os.close(write)
        messages = [json.loads(line) for line in events]
    process.wait()
    (record,) = [message["record"] for message in messages if message["event"] == "record"]
    return *heard(log), record


def test_a_benchmark_is_told_range_by_range(library: Path, tmp_path: Path) -> None:
    """Names, domain, categories, payloads, nesting and balance of one real case."""
    case = one_case("srm_neuron", "forward", "torch_eager")
    ranges, kinds, record = measure(case, library, tmp_path)
    assert record["status"] == OK, record["reason"]
    assert kinds["push"] == kinds["pop"] == 0, "thread-local ranges would miss autograd's kernels"
    assert {r.domain for r in ranges} == {"spikemark"}
    assert all(r.end > r.start for r in ranges), "every range is closed"
    found = {(r.name, r.category) for r in ranges}
    key = case.key
    assert found == {
        (key, "case"),
        (f"verify {key}", "verify"),
        (f"warm-up {key}", "warm-up"),
        (f"flush {key}", "flush"),
        (f"measure cold {key}", "measure"),
        (f"measure warm {key}", "measure"),
    }
    visits = [r for r in ranges if r.name == key]
    parts = sorted((r for r in ranges if r.name != key), key=lambda r: r.start)
    assert all(sum(visit.holds(r) for visit in visits) == 1 for r in parts), "each part is in one visit of the case"
    cold = [r for r in ranges if r.name.startswith("measure cold")]
    assert [r.payload for r in cold] == [str(i) for i in range(len(cold))]
    assert len(cold) == len(record["samples"]) == 4
    assert len([r for r in ranges if r.name.startswith("measure warm")]) >= len(record["warm_samples"]) > 0
    assert all(a.end < b.start for a, b in itertools.pairwise(parts)), "flushes are in no measured range"
    assert key in {Case.from_json(record["case"]).key}, "the name leads back to the record"


def test_a_layers_parts_nest_in_its_measured_step(library: Path, tmp_path: Path) -> None:
    case = one_case("srm_conv2d", "step", "torch_eager+torch_autograd")
    ranges, _, record = measure(case, library, tmp_path)
    assert record["status"] == OK, record["reason"]
    cold = [r for r in ranges if r.name.startswith("measure cold")]
    assert cold
    for sample in cold:
        inside = [r for r in ranges if sample.holds(r)]
        assert {r.category for r in inside} == {"layer"}
        assert [r.name for r in inside] == [
            "srm_conv2d forward", "current", "neuron forward",
            "srm_conv2d backward", "neuron backward", "weight gradient", "input gradient",
        ]  # fmt: skip
        forward, backward = inside[0], inside[3]
        assert all(forward.holds(r) for r in inside[1:3]) and all(backward.holds(r) for r in inside[4:])


TRAIN = """
import threading, torch
from spikemark import kernels
from spikemark.harness.annotate import annotated
layers = [kernels.SrmLinear(6, 5), kernels.SrmLinear(5, 4)]
with annotated("train step", "measure"):
    x = (torch.rand(2, 7, 6) < 0.5).float().requires_grad_()
    y = layers[1](layers[0](x))
    other = threading.Thread(target=lambda: y.sum().backward(), name="autograd's")
    other.start()
    other.join()
print("done")
"""


def test_ranges_of_a_backward_on_another_thread_are_heard_in_the_step(library: Path, tmp_path: Path) -> None:
    """On a GPU autograd runs backward on a thread of its own; here a thread calls it."""
    log = tmp_path / "nvtx.log"
    done = subprocess.run([sys.executable, "-c", TRAIN], env=under(library, log), capture_output=True, text=True)
    assert done.stdout.strip() == "done", done.stderr
    ranges, kinds = heard(log)
    assert kinds["start"] == kinds["end"] == 15
    (step,) = [r for r in ranges if r.name == "train step"]
    assert all(step.holds(r) for r in ranges if r is not step)
    forward = [r for r in ranges if r.name == "srm_linear forward"]
    backward = [r for r in ranges if r.name == "srm_linear backward"]
    assert len(forward) == len(backward) == 2, "both layers of the network, in the step"
    assert {r.thread for r in forward} == {step.thread}
    assert step.thread not in {r.thread for r in backward}
    assert all(r.thread == r.end_thread for r in ranges)


def test_a_traced_case_has_the_ranges_that_exports_are_read_by(library: Path, tmp_path: Path) -> None:
    from spikemark.harness.trace import target, tools

    case = one_case("clamped_sign", "forward", "torch")
    plan, outcome = target.write_plan(tmp_path, case, [], 3, "nvtx")
    subprocess.run(tools.target_command(plan), env=under(library, tmp_path / "nvtx.log"), check=True)
    said = target.read_outcome(outcome)
    assert said is not None and said["status"] == OK, said
    ranges, kinds = heard(tmp_path / "nvtx.log")
    assert kinds["push"] == 0
    calls = [r for r in ranges if r.name == profiled(case.key)]
    (capture,) = [r for r in ranges if r.name == "capture"]
    assert [(r.payload, r.category) for r in calls] == [("0", "profile"), ("1", "profile"), ("2", "profile")]
    inside = Counter(r.name for r in ranges if capture.holds(r))
    assert inside == {profiled(case.key): 3, f"flush {case.key}": 3}, "no gate and no warm-up in what tools collect"

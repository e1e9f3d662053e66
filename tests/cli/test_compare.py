"""``spikemark compare`` from the command line: exit codes, forms of output, and two plug-in files measured in turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spikemark.harness.records import Case, Record
from spikemark.harness.runfolder import RunFolder, new_meta
from spikemark.kernels.types import Problem
from spikemark.runner import main

ENVIRONMENT = {"device": "cpu", "device_name": "CPU", "kind": "cpu", "threads": 2}


def write(path: Path, times: list[float], status: str = "ok", threads: int = 2, variant: str = "") -> Path:
    """A run of ten cases whose seconds are ``times`` in turn, three passes."""
    meta = new_meta(["run"], seed=0, preset="quick", passes=3, planned=10)
    if (path / "run.json").exists():
        folder, _ = RunFolder.reopen(path)
    else:
        folder = RunFolder.create(path, meta | {"environments": {"cpu": ENVIRONMENT | {"threads": threads}}})
    for index in range(10):
        problem = Problem(f"w{index}", "conv", 1, 1, (1,), (1,))
        case = Case("srm_neuron", "forward", "native", "cpu", "float32", problem)
        for p in range(3):
            centre = times[index % len(times)]
            record = Record(case, p, status, "" if status == "ok" else "why", environment="cpu")
            record.samples = [centre * f for f in (0.999, 1.0, 1.001)] if status == "ok" else []
            record.details = {"variant": variant} if variant else {}
            folder.append(record)
    folder.finish()
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["compare", *map(str, arguments)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, same = write(tmp_path / "base", [1.0]), write(tmp_path / "same", [1.0])
    one_slow = write(tmp_path / "slow", [3.0, *[1.0] * 9])
    wrong = write(tmp_path / "wrong", [1.0], status="incorrect")
    other = write(tmp_path / "other", [1.0], threads=4)
    code, out, _ = run(capsys, base, same)
    assert code == 0
    assert "No regression found" in out
    code, out, _ = run(capsys, base, one_slow)
    assert code == 1
    assert "1 regression: 1 slower" in out
    assert run(capsys, base, wrong)[0] == 1
    assert run(capsys, wrong, base)[0] == 4
    assert run(capsys, base, same, "--strict")[0] == 5  # two runs apart: nothing is certain to be the same within 3 %
    code, _, err = run(capsys, base, other)
    assert code == 2
    assert "threads (2 and 4)" in err
    assert err.count("\n") == 1
    assert run(capsys, base, other, "--across")[0] == 0


def test_bad_command_lines_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write(tmp_path / "base", [1.0])
    for arguments, said in (
        ([base], "no A/B run"),
        ([], "BASE and NEW"),
        ([base, base, base], "BASE and NEW"),
        ([base, tmp_path / "none"], "does not exist"),
        ([base, base, "--fail-on", "slow:3%"], "slower:3%"),
        (["--measure"], "one or two revisions"),
        (["--measure", "a.py"], "second one"),
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "")
        assert said in err
        assert err.count("\n") == 1


def test_an_ab_run_is_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "ab", [1.0], variant="base")
    write(path, [2.0], variant="new")
    code, out, _ = run(capsys, path, "--json")
    data: dict[str, Any] = json.loads(out)
    assert code == data["exit_code"] == 1
    assert data["counts"] == {"slower": 10}
    assert data["geometric_mean"]["ratio"] == pytest.approx(2.0)
    assert run(capsys, path, path)[0] == 2
    assert "### ❌" in run(capsys, path, "--markdown")[1]


PLUGIN = '''
import time
from spikemark.kernels.registry import get, implementation

@implementation("clamped_sign", name="mine")
class Mine:
    """The baseline and {wait} s of waiting."""

    def forward(self, x):
        end = time.perf_counter() + {wait}
        y = get("clamped_sign", "torch").forward(x)
        while time.perf_counter() < end:
            pass
        return y

    def backward(self, grad):
        return get("clamped_sign", "torch").backward(grad)
'''


def test_two_plugin_files_measured_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred times slower is seen even in one pass on a busy machine; only the plug-in's own cases are measured."""
    for name, wait in (("old.py", 0.0), ("new.py", 0.01)):
        (tmp_path / name).write_text(PLUGIN.format(wait=wait))
    select = ["--operator", "clamped_sign", "--phase", "forward", "--workload", "mnist/linear2", "--batch", "1"]
    files = [tmp_path / "old.py", tmp_path / "new.py"]
    code, out, err = run(capsys, "--measure", *files, *select, "--passes", "1", "--out", tmp_path / "ab", "--json")
    assert code == 1, err
    data = json.loads(out)
    assert [(c["implementation"], c["verdict"]) for c in data["cases"]] == [("mine", "slower")]
    assert data["about"]["new"]["ref"] == "new.py"
    folder = RunFolder.load(tmp_path / "ab")
    assert folder.variants == ["base", "new"] or folder.variants == ["new", "base"]
    bursts = [r.details["bursts"] for r in folder.records]
    assert all(b[0] == 0 and len(b) > 1 for b in bursts)
    assert str(tmp_path) not in (tmp_path / "ab" / "run.json").read_text()

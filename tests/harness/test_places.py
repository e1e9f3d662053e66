"""Continuing a run that has environments of several machines: each measures its own cases and leaves the others'.

Machines are told apart by the version of torch that the fake worker reports.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from fake_runs import case, fake_command, measure
from spikemark.harness import parts
from spikemark.harness.errors import UsageError
from spikemark.harness.merging import merge
from spikemark.harness.plan import RunOptions
from spikemark.harness.progress import Quiet
from spikemark.harness.records import Case
from spikemark.harness.runfolder import RunFolder
from spikemark.harness.runs import run
from spikemark.harness.statistics import summarise
from spikemark.kernels.types import Problem

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    """Runs of others on this machine are not seen."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def rows(path: Path) -> list[tuple[str, str, int]]:
    """(environment, implementation, passes) of each row, sorted."""
    return sorted((r["environment"], r["implementation"], r["passes"]) for r in summarise(RunFolder.load(path)))


def on(monkeypatch: Patch, machine: str) -> None:
    """From now on this is another machine."""
    monkeypatch.setenv("FAKE_TORCH", machine)


@pytest.fixture
def merged(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Machine 1 has all passes of "ok" and one of "fine"; machine 2 one of "ok"; machine 3 everything."""
    for machine, todo in (("1", [("ok", 2), ("fine", 1)]), ("2", [("ok", 1)]), ("3", [("ok", 2), ("fine", 2)])):
        on(monkeypatch, machine)
        out = tmp_path / f"on{machine}"
        for number, (name, passes) in enumerate(todo):
            measure(out, [case(name)], passes=passes, resume=number > 0)
        RunFolder.reopen(out)[0].finish(unmeasured=[case("fine").key] if machine == "2" else [], passes=2)
    merge([tmp_path / f"on{i}" for i in (1, 2, 3)], tmp_path / "all")
    assert rows(tmp_path / "all") == [
        ("cpu", "fine", 1), ("cpu", "ok", 2), ("cpu (2)", "ok", 1), ("cpu (3)", "fine", 2), ("cpu (3)", "ok", 2)
    ]  # fmt: skip
    return tmp_path / "all"


def go_on(path: Path, *names: str, passes: int = 2) -> str:
    """Continue; what was said at the end."""
    result = measure(path, [case(n) for n in names or ("ok", "fine")], passes=passes, resume=True)
    assert result.exit_code == 0
    return result.message


def test_each_machine_measures_its_own(merged: Path, monkeypatch: Patch) -> None:
    assert RunFolder.load(merged).meta["unmeasured"] == [case("fine").key]
    on(monkeypatch, "2")
    assert go_on(merged) == "left to others: 1 case of cpu (Fake CPU)"
    assert [r for r in rows(merged) if r[0] == "cpu (2)"] == [("cpu (2)", "fine", 2), ("cpu (2)", "ok", 2)]
    assert [r for r in rows(merged) if r[0] == "cpu"] == [("cpu", "fine", 1), ("cpu", "ok", 2)]
    meta = RunFolder.load(merged).meta
    assert (meta["unmeasured"], list(meta["environments"])) == ([], ["cpu", "cpu (2)", "cpu (3)"])
    on(monkeypatch, "1")
    assert go_on(merged) == ""
    assert {passes for _, _, passes in rows(merged)} == {2}
    whole = (merged / "cases.jsonl").read_bytes()
    for machine in "123":
        on(monkeypatch, machine)
        assert go_on(merged) == ""
    assert (merged / "cases.jsonl").read_bytes() == whole, "nothing was missing, so nothing was measured"


def test_who_has_nothing_to_do_leaves_everything(merged: Path, monkeypatch: Patch) -> None:
    on(monkeypatch, "3")
    before = (merged / "cases.jsonl").read_bytes()
    said = go_on(merged).splitlines()
    assert said == [
        "left to others: 1 case of cpu (Fake CPU)", "left to others: 2 cases of cpu (2) (Fake CPU)"
    ]  # fmt: skip
    assert (merged / "cases.jsonl").read_bytes() == before
    assert RunFolder.load(merged).meta["unmeasured"] == [case("fine").key], "machine 2 still lacks it"


def test_a_strange_machine_is_refused(merged: Path, monkeypatch: Patch) -> None:
    on(monkeypatch, "4")
    before = (merged / "cases.jsonl").read_bytes()
    with pytest.raises(UsageError, match=r"^all was measured in another environment.*versions\.torch \(\d and 4\)$"):
        go_on(merged)
    assert (merged / "cases.jsonl").read_bytes() == before
    assert list(RunFolder.load(merged).meta["environments"]) == ["cpu", "cpu (2)", "cpu (3)"]


def test_calibrations_lie_beside_what_they_are_of(merged: Path, monkeypatch: Patch) -> None:
    """The process that was only asked who it is leaves no trace, and does not use up the pass's calibration."""
    logs = set((merged / "logs").iterdir())
    before = len(RunFolder.load(merged).calibrations)
    on(monkeypatch, "2")
    go_on(merged)
    new = RunFolder.load(merged).calibrations[before:]
    assert {(c["environment"], c["pass_index"]) for c in new} == {("cpu (2)", 0), ("cpu (2)", 1)}
    assert len(set((merged / "logs").iterdir()) - logs) == 2


def test_new_records_are_the_folders_own_part(merged: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    on(monkeypatch, "2")
    go_on(merged)
    found = parts.parts(RunFolder.load(merged))
    assert [p["name"] for p in found] == ["on1", "on2", "on3", "all"]
    assert list(found[-1]["environments"]) == ["cpu (2)"]
    again = merge([merged, tmp_path / "on1"], tmp_path / "again").run
    assert rows(again.path) == rows(merged)
    assert [p["name"] for p in again.meta["parts"]] == ["on1", "on2", "on3", "all"]


def test_passes_of_parts_that_add_up_count_whatever_their_numbers(tmp_path: Path) -> None:
    """One machine, two runs: "ok" has two passes of one and two of the other, "fine" only the last two."""
    measure(tmp_path / "a", [case("ok")], passes=2)
    measure(tmp_path / "b", [case("ok"), case("fine")], passes=2)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert rows(tmp_path / "all") == [("cpu", "fine", 2), ("cpu", "ok", 4)]
    before = (tmp_path / "all" / "cases.jsonl").read_bytes()
    go_on(tmp_path / "all")
    assert (tmp_path / "all" / "cases.jsonl").read_bytes() == before
    go_on(tmp_path / "all", passes=3)
    assert rows(tmp_path / "all") == [("cpu", "fine", 3), ("cpu", "ok", 4)]


# -- several devices of one run -----------------------------------------------------------------------------------


def two_devices(path: Path, passes: int = 1, resume: bool = False) -> str:
    """Both of this machine's "devices"; what was said at the end."""
    problem = Problem("net/layer", "neuron", 2, 3, (4,), (4,))
    cases = [Case("srm_neuron", "forward", "ok", device, "float32", problem) for device in ("cpu", "cpu:1")]
    options = RunOptions(out=path, passes=passes, resume=resume)
    return run(cases, options, fake_command, ["run"], Quiet()).message


def test_a_device_of_another_machine_is_left_to_it(tmp_path: Path) -> None:
    """``cpu`` is this machine's, ``cpu:1`` was measured by another: only that one is left, and said."""
    two_devices(tmp_path / "r")
    folder, before = RunFolder.reopen(tmp_path / "r")
    environments = before.meta["environments"]
    other = environments["cpu:1"] | {"device_name": "Other CPU", "versions": {"python": "3", "torch": "9"}}
    folder.update(environments=environments | {"cpu:1": other})
    folder.close()
    said = two_devices(tmp_path / "r", passes=2, resume=True)
    assert said == (
        "left to others: 1 case of cpu:1 (Other CPU), whose environment is another: "
        "device_name (Other CPU and Fake CPU), versions.torch (9 and 1.0)"
    )
    assert rows(tmp_path / "r") == [("cpu", "ok", 2), ("cpu:1", "ok", 1)]
    meta = RunFolder.load(tmp_path / "r").meta
    assert meta["environments"]["cpu:1"] == other and meta["interrupted"] is False and meta["unmeasured"] == []


def test_what_an_earlier_part_lacked_stays_missing(tmp_path: Path) -> None:
    """Continued with a narrower selection, or where only one of the devices is: the rest is not forgotten."""
    measure(tmp_path / "r", [case("ok"), case("fine")], passes=1)
    folder, _ = RunFolder.reopen(tmp_path / "r")
    folder.update(unmeasured=["a/case/of/another/device"])
    folder.close()
    measure(tmp_path / "r", [case("ok")], passes=2, resume=True)
    assert RunFolder.load(tmp_path / "r").meta["unmeasured"] == ["a/case/of/another/device"]


def test_both_are_another_machines(tmp_path: Path, monkeypatch: Patch) -> None:
    two_devices(tmp_path / "r")
    on(monkeypatch, "2")
    before = (tmp_path / "r" / "cases.jsonl").read_bytes()
    with pytest.raises(UsageError, match=r"^r was measured in another environment, start a new run: versions\.torch"):
        two_devices(tmp_path / "r", passes=2, resume=True)
    assert (tmp_path / "r" / "cases.jsonl").read_bytes() == before

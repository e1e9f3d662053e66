"""``list``, ``env``, help and version: what they print, for people and for programs; pipes that close early."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import spikemark
from spikemark import runner
from spikemark.commands import terminal
from spikemark.kernels import registry
from spikemark.kernels.catalog import OPERATORS
from spikemark.suites import workloads

COMMAND = [sys.executable, "-m", "spikemark"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert runner.main(list(words)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_help_and_version_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    plain = run(capsys)
    for words in (["--help"], ["run", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as ended:
            runner.main(words)
        assert ended.value.code == 0
    told = capsys.readouterr().out
    assert plain in told and told.endswith(f"spikemark {spikemark.__version__}\n")
    assert "--spike-rate RATE" in told and "5%" in told


@pytest.mark.parametrize("command", runner.COMMANDS)
def test_every_command_that_is_offered_exists(command: str) -> None:
    import importlib

    module = importlib.import_module(f"spikemark.commands.{runner.COMMANDS[command][2]}")
    assert callable(module.run)


def test_operators(capsys: pytest.CaptureFixture[str]) -> None:
    entries = json.loads(run(capsys, "list", "operators", "--json"))
    assert [(e["operator"], e["phases"]) for e in entries] == [(o.name, list(o.phases)) for o in OPERATORS.values()]
    lines = run(capsys, "list", "operators").splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(OPERATORS)


def test_workloads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[own]\ntime_steps = 2\nbatch = 3\nspike_rate = 0.1\nlayers = [{ name = 'l', neuron = 8 }]\n")
    text = run(capsys, "list", "workloads", "--workload-file", str(own))
    assert [line.split()[0] for line in text.splitlines()[1:]] == [*workloads.built_in(), "own/l"]
    entries = {e["workload"]: e for e in json.loads(run(capsys, "list", "workloads", "--json"))}
    assert entries["cifar10-vgg/conv2"]["in_shape"] == [128, 32, 32]
    assert entries["dvs128-gesture/conv1"]["params"]["tau_m"] == 7.5


def test_implementations_say_whether_they_are_available(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from spikemark import kernels\n"
        "@kernels.implementation('clamped_sign', name='of_a_person', device='cpu')\n"
        "class Mine:\n    '''Mine.\x1b[31m'''\n    def unavailable(self):\n        return 'no fridge: buy one'\n"
    )
    try:
        entries = json.loads(run(capsys, "list", "implementations", "--json", "--plugin", str(plugin)))
        text = run(capsys, "list", "implementations")
    finally:
        registry._classes["clamped_sign"].pop("of_a_person", None)
        registry._instances.pop(("clamped_sign", "of_a_person"), None)
    assert {e["operator"] for e in entries} == set(OPERATORS)
    assert [e["role"] for e in entries].count("baseline") == len(OPERATORS)
    mine = next(e for e in entries if e["implementation"] == "of_a_person")
    assert mine["available"] == "no: no fridge: buy one" and mine["source"] == "plug-in mine.py"
    assert "no fridge" in text and "\x1b" not in text


def test_devices_and_environment(capsys: pytest.CaptureFixture[str]) -> None:
    devices = [e["device"] for e in json.loads(run(capsys, "list", "devices", "--json"))]
    assert devices[0] == "cpu"
    found = json.loads(run(capsys, "env", "--json", "--device", "cpu"))["cpu"]
    assert found["kind"] == "cpu" and found["threads"] >= 1 and found["versions"]["torch"]
    text = run(capsys, "env", "--device", "cpu")
    assert "versions.torch" in text and str(found["versions"]["torch"]) in text
    assert str(Path.home()) not in text and __import__("platform").node() not in text.replace("-", " ").split()


def test_a_table_aligns_and_disarms() -> None:
    text = terminal.table(["Name", "N"], [["a\x1b[1m\n", 5], ["漢字", 12345], ["x" * 300, 1]], right=[1])
    rows = text.splitlines()
    assert len(rows) == 4 and "\x1b" not in text
    assert {terminal.width(row) for row in rows} == {terminal.CELL_LIMIT + 2 + 5}
    assert rows[1].endswith("    5") and rows[2].endswith("12345")


def test_a_closed_pipe_is_no_error() -> None:
    """``spikemark list workloads | head -1``: the writer ends quietly, however much it had to say."""
    process = subprocess.Popen(
        [*COMMAND, "list", "workloads", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "[\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0


def test_no_mark_up_in_what_people_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["list", "implementations"]) == 0
    out = capsys.readouterr().out
    assert "``" not in out and "torch.ops.aten.convolution_backward with one half of its mask" in out

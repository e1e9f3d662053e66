"""``compare --history`` and ``report --history`` as a person types them: tables, pages, selections, what goes wrong."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import histories
import pytest
from spikemark.runner import main

Capture = pytest.CaptureFixture[str]
CASES = histories.cases(6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 runs; the fourth case is 20 % slower from the eleventh on."""
    level = lambda run, case: 1.2 if case == 3 and run >= 10 else 1.0  # noqa: E731
    return histories.folder(tmp_path_factory.mktemp("cli") / "runs", 20, CASES, level, noise=0.01)


@pytest.fixture
def here(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working beside the folder ``runs``."""
    monkeypatch.chdir(runs.parent)
    return runs


def run(capsys: Capture, line: str) -> tuple[int, str, str]:
    code = main(line.split())
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_table_and_the_json(here: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "compare --history runs")
    assert (code, err) == (0, ""), "a regression in the past is no failure now"
    assert "1 change point in 1 case, the latest on 2026-01-02." in out
    assert "native" in out.splitlines()[1] and "+20" in out.splitlines()[1].replace("+19.", "+20.")
    code, out, _ = run(capsys, "compare --history runs --json")
    assert (code, len(json.loads(out)["cases"])) == (0, 6)
    assert run(capsys, "compare --history runs --fail-on slower:50%")[1].count("no change point of 50 %") == 1


@pytest.mark.parametrize(
    ("selection", "count"),
    [
        ("--operator srm_*", 6),
        ("--implementation native", 1),
        ("--implementation torch_?ager --phase backward", 1),
        ("--workload net0/conv0 --device cpu --dtype float32 --batch 1", 6),
        ("--implementation native --implementation torch_eager", 3),
    ],
)
def test_the_selection_is_the_usual_one(here: Path, capsys: Capture, selection: str, count: int) -> None:
    code, out, _ = run(capsys, f"compare --history runs --json {selection}")
    assert (code, len(json.loads(out)["cases"])) == (0, count)


def test_the_page_and_the_csv(here: Path, capsys: Capture, tmp_path: Path) -> None:
    assert run(capsys, "report --history runs")[:2] == (0, "runs/history.html\n")
    assert "What changed, and since when" in (here / "history.html").read_text()
    assert run(capsys, f"report --history runs -o {tmp_path}/other.html")[1] == f"{tmp_path}/other.html\n"
    assert (tmp_path / "other.html").read_text() == (here / "history.html").read_text()
    code, out, _ = run(capsys, "report --history runs --format csv")
    assert (code, len(list(csv.DictReader(io.StringIO(out))))) == (0, 20 * 6)
    assert run(capsys, f"report --history runs --format csv -o {tmp_path}/h.csv")[0] == 0
    assert (tmp_path / "h.csv").read_text() == out
    assert run(capsys, "compare --history runs")[0] == 0, "the page in the folder is in nobody's way"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compare --history none", "folder none does not exist"),
        ("compare --history runs/00000", "is a run itself: name the folder that holds the runs"),
        ("compare --history file", "file is a file, not a folder of runs"),
        ("compare --history empty", "empty holds no run folder"),
        ("compare --history", "argument --history: expected one argument"),
        ("compare --history runs runs/00000", "--history and a run folder do not go together"),
        ("compare --history runs --measure", "--history and --measure do not go together"),
        ("compare --history runs --out x", "do not go together: spikemark report --history DIR writes the page"),
        ("compare --history runs --strict", "--history and --strict do not go together"),
        ("compare --history runs --spike-rate 5%", "--history and --spike-rate do not go together"),
        ("compare --history runs --plugin k.py", "--history and --plugin do not go together"),
        ("compare --history runs --fail-on memory:10%", "--fail-on memory is not for it"),
        ("compare --history runs --fail-on 10%", "write slower:3% or memory:10%"),
        ("compare --histry runs", "unrecognized argument '--histry' (did you mean '--history'?)"),
        ("report --history runs runs/00000", "--history and a run folder do not go together"),
        ("report --history runs --figures x", "--history and --figures do not go together"),
        ("report --history runs --devices a b", "--history and --devices do not go together"),
        ("report --history runs --format latex", "--history is written as html or csv, not as latex"),
        ("report --history runs -o none/x.html", "cannot write none/x.html"),
        ("report --history none", "folder none does not exist"),
        ("report", "the following arguments are required: RUN"),
    ],
)
def test_bad_input_is_one_line(here: Path, capsys: Capture, line: str, message: str) -> None:
    (here.parent / "file").write_text("x")
    (here.parent / "empty").mkdir(exist_ok=True)
    code, out, err = run(capsys, line)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_nothing_that_was_asked_for_is_exit_4(here: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "compare --history runs --operator conv_backward")
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert "nothing to show: no run in runs has a case that was asked for" in err


def test_it_needs_no_torch(here: Path) -> None:
    code = (
        "import sys; from spikemark.runner import main\n"
        "assert main(['compare', '--history', 'runs', '--operator', '*']) == 0\n"
        "assert main(['report', '--history', 'runs', '-o', 'page.html']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=here.parent)

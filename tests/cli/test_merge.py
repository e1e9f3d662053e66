"""``spikemark merge``: the joined folder is a run folder like any other, and says what ``report A B`` says."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic
from spikemark.harness.records import Case
from spikemark.harness.runfolder import RunFolder
from spikemark.reports import html
from spikemark.reports.rows import read
from spikemark.runner import main

LAYERS = {"mnist/conv1": ((15, 24, 24), 5), "mnist/conv2": ((40, 8, 8), 5)}
Capture = pytest.CaptureFixture[str]


def cases(*devices: str) -> list[Case]:
    return list(synthetic.cases(devices or ("cpu",), LAYERS, (1,), operators=("srm_neuron",)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of one machine (a, b: other passes, fewer cases, a failure), of another (c) and of other code (d)."""
    monkeypatch.chdir(tmp_path)
    both = {"cpu": synthetic.environment(), "cpu:1": synthetic.environment("cpu:1", threads=1)}
    every = cases("cpu", "cpu:1")
    failed = synthetic.failure(cases()[0], 1, "crashed", details={"log": "pass1-cpu-0.log"})
    synthetic.write(Path("a"), [synthetic.record(c, p) for p in range(3) for c in every], environments=both, passes=3)
    synthetic.write(Path("b"), [*(synthetic.record(c, p, seed=1) for p in range(2) for c in cases()[1:]), failed])
    other = {"cpu": synthetic.environment(machine="Other CPU")}
    synthetic.write(Path("c"), [synthetic.record(c, 0, seed=2) for c in cases()], environments=other, passes=1)
    newer = {"cpu": synthetic.environment(project={"commit": "fff", "dirty": False})}
    synthetic.write(Path("d"), [synthetic.record(c, 0, seed=3) for c in cases()], environments=newer, passes=1)
    return tmp_path


def run(capsys: Capture, *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_joined_folder_has_the_rows_of_a_report_of_all(folder: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "merge", "a", "b", "c", "d", "-o", "all")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "all/report.html"
    assert out.startswith("4 run folders, 64 rows in 4 environments: a and b · cpu; a · cpu:1; c · cpu; d · cpu\n")
    texts = [run(capsys, "report", *paths, "--format", "csv")[1] for paths in (("a", "b", "c", "d"), ("all",))]
    assert texts[0] == texts[1]
    rows = list(csv.DictReader(io.StringIO(texts[0])))
    assert len(rows) == 4 * 16 == len({(r["key"], r["environment"]) for r in rows}), "no row is there twice"
    assert {r["run"] for r in rows} == {"a, b", "a", "c", "d"}
    assert {r["passes"] for r in rows if r["run"] == "a, b" and r["status"] == "ok"} == {"5"}
    assert [r["reason"].split(":")[0] for r in rows if r["status"] == "crashed"] == ["in 1 of 4 passes"]
    pages = [html.page(read(list(paths)), folder=folder) for paths in (("a", "b", "c", "d"), ("all",))]
    data = [page.partition('id="data">')[2].partition("</script>")[0] for page in pages]
    assert data[0] == data[1] and '"total":64' in data[0]
    again = run(capsys, "merge", "all", "b", "-o", "again")[1]
    assert "31 measurements that more than one folder holds counted once" in again
    assert run(capsys, "report", "again", "--format", "csv")[1] == texts[0]


def test_every_command_reads_it(folder: Path, capsys: Capture) -> None:
    run(capsys, "merge", "a", "c", "-o", "old")
    run(capsys, "merge", "b", "c", "-o", "new")
    code, out, _ = run(capsys, "compare", "old", "new", "--json")
    found = json.loads(out)
    assert (code, sum(found["counts"].values())) == (1, 2 * 16), "each machine with itself"
    assert found["regressions"] == [cases()[0].key] and found["counts"]["broken"] == 1
    slow = [synthetic.record(c, 0, samples=6, seed=4) for c in cases()]
    for one in slow:
        one.samples = [5 * s for s in one.samples] if one.case.key == cases()[3].key else one.samples
    other = {"cpu": synthetic.environment(machine="Other CPU")}
    synthetic.write(Path("slow"), slow, environments=other, passes=1)
    run(capsys, "merge", "a", "slow", "-o", "newer")
    code, out, _ = run(capsys, "compare", "old", "newer", "--json", "--fail-on", "slower:50%")
    assert (code, json.loads(out)["regressions"]) == (1, [cases()[3].key])
    for kind in ("markdown", "latex"):
        assert run(capsys, "report", "new", "--format", kind)[0] == 0
    program = Path(sys.executable).with_name("pytest-benchmark")
    command = [str(program), "compare", "new/benchmarks.json", "old/benchmarks.json", "--csv=out.csv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = [row["name"] for row in csv.DictReader(io.StringIO(Path("out.csv").read_text()))]
    assert sum("[cpu (2)]" in name for name in names) == 2 * 16
    assert len(names) == (15 + 16) + (32 + 16)


def test_conflicts_are_said_and_refused(folder: Path, capsys: Capture) -> None:
    shutil.copytree("a", "changed")
    journal = Path("changed/cases.jsonl").read_text()
    Path("changed/cases.jsonl").write_text(journal.replace('"peak_bytes": ', '"peak_bytes": 1', 1))
    for words in (("merge", "a", "changed", "-o", "all"), ("report", "a", "changed")):
        code, out, err = run(capsys, *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("spikemark: conflict: a and changed both hold pass 1 of srm_neuron/")
    assert not Path("all").exists() and not list(folder.rglob("report.html"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("merge", "the following arguments are required: RUN, -o/--out"),
        ("merge a b", "the following arguments are required: -o/--out"),
        ("merge a -o x", "merge needs two run folders or more, got 1"),
        ("merge a a -o x", "run folder a is given twice"),
        ("merge a none -o x", "run folder none does not exist"),
        ("merge a b -o a", "a already holds a run: choose another --out"),
        ("merge a b -o x --ot y", "unrecognized argument '--ot' (did you mean '--out'?)"),
    ],
)
def test_bad_input_is_one_line(folder: Path, capsys: Capture, words: str, message: str) -> None:
    before = sorted(folder.rglob("*"))
    code, out, err = run(capsys, *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert sorted(folder.rglob("*")) == before


def test_merging_and_reporting_need_no_torch(folder: Path) -> None:
    code = (
        "import sys; from spikemark.runner import main\n"
        "assert main(['merge', 'a', 'b', '-o', 'all']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=folder)


def test_names_from_the_folders_are_inert(folder: Path, capsys: Capture) -> None:
    hostile = "\x1b[31mred</script>\u202e"
    shutil.copytree("a", "x" + hostile.replace("/", "_"))
    synthetic.write(Path("evil"), [synthetic.record(c, 0, environment=hostile) for c in cases()[:2]],
                    environments={hostile: synthetic.environment(machine=hostile)}, passes=1)  # fmt: skip
    code, out, _ = run(capsys, "merge", "evil", "x" + hostile.replace("/", "_"), "-o", "all")
    assert code == 0
    assert "\x1b" not in out and "\u202e" not in out
    page = Path("all/report.html").read_text()
    assert "red</script>" not in page


def test_short_out_is_out_and_stores_no_path(folder: Path) -> None:
    from spikemark.harness.runfolder import without_folders
    from spikemark.runner import parser

    for words in (["run", "-o", "x"], ["run", "-ox"], ["profile", "-o", "x"]):
        assert parser().parse_args(words).out == "x"
    assert [without_folders(w) for w in ("-o/home/me/runs/a", "-oruns/a", "-5/home", "--x")] == [
        "-oa", "-oruns/a", "-5/home", "--x"
    ]  # fmt: skip
    assert RunFolder.load("a").meta["id"] != RunFolder.load("b").meta["id"]


def test_what_was_asked_for_differently_is_not_continued_by_one_command(folder: Path, capsys: Capture) -> None:
    """``run --resume`` repeats a command line; there are two here."""
    for name, preset in (("a", "quick"), ("c", "smoke")):
        opened, _ = RunFolder.reopen(name)
        opened.update(arguments=["run", "--preset", preset])
        opened.close()
    assert run(capsys, "merge", "a", "c", "-o", "all")[0] == 0
    code, out, err = run(capsys, "run", "--resume", "-o", "all")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "all is of runs that asked for different things: continue those, and merge again" in err


def test_devices_that_are_not_here_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from argparse import Namespace

    from spikemark.commands.run import _leave_absent
    from spikemark.suites import selection

    monkeypatch.setattr(selection, "_gpus", lambda: 1)
    arguments = Namespace(devices=["cpu", "cuda:0", "cuda:1"])
    (line,) = _leave_absent(arguments)
    assert line.startswith("left to others: device 'cuda:1': ") and arguments.devices == ["cpu", "cuda:0"]
    nothing = Namespace(devices=["cuda:4"])
    assert _leave_absent(nothing) == [] and nothing.devices == ["cuda:4"], "then the selection says why"


def test_two_devices_are_named_by_key_or_title(folder: Path, capsys: Capture) -> None:
    """The ratio of two machines' times, in pictures."""
    names = {}
    for kind, devices in (("key", ["cpu", "cpu (2)"]), ("title", ["a · cpu", "c · cpu"])):
        words = ["report", "a", "c", "-o", "page.html", "--figures", kind, "--devices", *devices]
        assert run(capsys, *words)[0] == 0
        names[kind] = sorted(p.name for p in Path(kind).glob("Across*"))
    assert names["key"] == names["title"] and len(names["key"]) == 2
    assert run(capsys, "report", "a", "c", "--devices", "cpu", "tpu")[0] == 2

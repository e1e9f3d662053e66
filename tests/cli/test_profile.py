"""``spikemark profile``: torch traces into a new run and an old one, a fake nsys on PATH, exports made elsewhere."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from pathlib import Path

import pytest
import synthetic
from spikemark import runner
from spikemark.harness.trace import summary, tools
from spikemark.suites.synthetic_export import Export

FAKE = Path(__file__).parents[1] / "harness" / "fake_nsight.py"
ONE = ("--operator", "clamped_sign", "--phase", "forward", "--implementation", "torch", "--device", "cpu")
TWO = (*ONE, "--implementation", "native")
KEY = re.compile(r"^clamped_sign/forward/.*/torch$")


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = runner.main(["profile", *words])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def page_details(page: str) -> list[dict[str, object]]:
    """What the report's rows open to."""
    import base64
    import zlib

    packed = re.findall(r'<script type="text/plain" id="details-\d+">(.*?)</script>', page, re.DOTALL)
    return [row for chunk in packed for row in json.loads(zlib.decompress(base64.b64decode(chunk)))]


def test_torch_traces_of_a_new_run_and_then_of_one_that_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    code, shown, _ = run(*TWO, "--calls", "2", "--out", str(out), capsys=capsys)
    assert code == 0 and shown.splitlines()[-1] == str(out / "report.html")
    found, damaged = summary.read_all(out / "traces")
    assert damaged == [] and len(found) == 2
    assert {(s.tool, s.status, s.calls, s.unit) for s in found} == {("torch", "ok", 2, "operator")}
    eager = next(s for s in found if KEY.match(s.key))
    assert eager.ideal_bytes and eager.kernels and eager.timeline and eager.timeline.lanes
    for one in found:
        data = json.loads(gzip.decompress((out / "traces" / one.files[0]["name"]).read_bytes()))
        names = [e.get("name") for e in data["traceEvents"]]
        assert one.key in names and {"call 0", "call 1"} <= set(names) and "call 2" not in names
        assert "host_name" not in data
    merged = json.loads(gzip.decompress((out / "traces" / "all.torch.json.gz").read_bytes()))
    processes = {e["args"]["name"] for e in merged["traceEvents"] if e.get("name") == "process_name"}
    assert {s.key for s in found} <= processes
    page = (out / "report.html").read_text()
    details = page_details(page)
    anchors = {row["traces"][0][1] for row in details}  # type: ignore[index]
    assert len(details) == 2 and anchors == {"#trace-1", "#trace-2"}, "each row leads to its trace"
    for one in found:
        assert f'href="traces/{one.files[0]["name"]}"' in page and (out / "traces" / one.files[0]["name"]).exists()
    journal = (out / "cases.jsonl").read_text()
    code, shown, _ = run(*ONE, "--calls", "1", "--out", str(out), capsys=capsys)
    assert code == 0
    assert (out / "cases.jsonl").read_text() == journal, "the run's own numbers are left alone"
    again = {s.key: s.calls for s in summary.read_all(out / "traces")[0]}
    assert sorted(again.values()) == [1, 2]


DIES = """
import os, signal, sys
import torch
from spikemark import kernels

@kernels.implementation("clamped_sign", device="cpu")
class Dies:
    '''Right, but kills the process that traces it.'''
    def forward(self, x):
        if sys.argv[0].endswith("worker.py") and "trace" in sys.argv[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.sign(x).contiguous()
    def backward(self, grad): return grad.clamp(-1, 1).contiguous()
"""


def test_a_kernel_that_kills_its_process_costs_its_own_trace_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    out = tmp_path / "run"
    words = (*ONE, "--implementation", "dies", "--plugin", str(tmp_path / "dies.py"), "--calls", "1")
    code, shown, _ = run(*words, "--out", str(out), capsys=capsys)
    assert code == 0 and "killed by SIGKILL" in shown
    found = {s.key.rsplit("/", 1)[1]: s for s in summary.read_all(out / "traces")[0]}
    assert (found["torch"].status, found["dies"].status) == ("ok", "crashed")
    assert "its process was killed by SIGKILL" in (out / "report.html").read_text()


def test_nsys_on_path_makes_the_whole_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_NSIGHT_LOG", str(tmp_path / "log"))
    out = tmp_path / "run"
    code, shown, _ = run("--tool", "nsys", *ONE, "--calls", "3", "--out", str(out), capsys=capsys)
    assert code == 0 and "neuron_kernel" in shown
    assert [json.loads(line)[0] for line in (tmp_path / "log").read_text().splitlines()] == ["profile", "export"]
    page = (out / "report.html").read_text()
    assert "neuron_kernel" in page and "In no measured call" in page and "stray" in page
    assert 'class="timeline"' in page and "share without a kernel" in page
    suffixes = {p.name.rsplit(".", 1)[1] for p in (out / "traces").iterdir()}
    assert suffixes == {"nsys-rep", "sqlite", "json"}

    monkeypatch.setenv("FAKE_NSIGHT", "fails")
    code, shown, _ = run("--tool", "nsys", *ONE, "--out", str(out), capsys=capsys)
    assert code == 4 and "does not know an option" in shown
    assert "does not know an option" in (out / "report.html").read_text(), "the failure stands in the report"


def test_dry_run_shows_commands_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nsys").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nsys").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    words = ("--dry-run", "--out", "out", *ONE)
    code, shown, _ = run("--tool", "nsys", "--nsys", "./nsys", *words, capsys=capsys)
    lines = shown.splitlines()
    assert code == 0 and len(lines) == 3 and lines[0].startswith("# clamped_sign/forward/")
    assert re.match(r"\S*nsys profile --trace=cuda,nvtx .*--output=out/traces/\S+\.nsys-rep \S+ -m ", lines[1])
    assert re.match(r"\S*nsys export --type=sqlite .*\.sqlite out/traces/\S+\.nsys-rep$", lines[2])
    code, shown, _ = run(*words, capsys=capsys)
    assert code == 0 and "spikemark.harness.trace.worker PLAN EVENTS out/traces 5" in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tool", sorted(tools.FOLDERS))
def test_commands_can_be_written_down_where_the_tool_is_not(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(tools.FOLDERS, tool, ())
    words = ("--tool", tool, "--dry-run", "--device", "cuda", "--implementation", "cupy_raw")
    code, shown, _ = run(*words, capsys=capsys)
    commands = [line for line in shown.splitlines() if not line.startswith("#")]
    assert code == 0 and commands and all(line.startswith(f"{tool} ") for line in commands)
    code, shown, _ = run(*words, f"--{tool}", "/there/it is", capsys=capsys)
    assert code == 0 and shown.splitlines()[1].startswith("'/there/it is' ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tool", "nsys", *ONE), r"Nsight Systems \(nsys\) is not installed, .* install the package nsight-systems"),
        (("--tool", "ncu", *ONE), r"Nsight Compute \(ncu\) is not installed, .* install the package nsight-compute"),
        (("--tool", "ncu", "--ncu", sys.executable, *ONE), r"profiles CUDA kernels only, not cpu"),
        (("--tool", "nsys", "--nsys", "/none/nsys", *ONE), r"--nsys /none/nsys: no such program"),
        (("--metrics", "x", *ONE), r"--metrics is for --tool ncu"),
        (("--nsys", "/none/nsys", *ONE), r"--nsys is for --tool nsys"),
        (("--tool", "nsys", "--ncu", sys.executable, *ONE), r"--ncu is for --tool ncu"),
        (("--from", "empty.sqlite", "--dry-run"), r"--from reads a file .*: --dry-run has no use there"),
        (("--from", "empty.sqlite", "--operator=clamped_sign"), r"traces nothing: --operator has no use there"),
        (("--from", "empty.sqlite", "--tool", "ncu"), r"traces nothing: --tool ncu has no use there"),
        (("--from", "empty.sqlite", "--out", "none"), r"run folder none does not exist"),
        (("--from", "absent.sqlite"), r"cannot read absent\.sqlite: No such file"),
        (("--from", "empty.sqlite"), r"empty\.sqlite is empty"),
        (("--tool", "vtune"), r"unknown --tool 'vtune'.*known: torch, nsys, ncu"),
        (("--calls", "0"), r"a whole number of at least 1 is needed"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty.sqlite").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in tools.FOLDERS:
        monkeypatch.setitem(tools.FOLDERS, tool, ())
    code, out, err = run(*words, capsys=capsys)
    assert (code, out) == (2, "") and err.count("\n") == 1 and re.search(said, err), err
    assert [p.name for p in tmp_path.iterdir()] == ["empty.sqlite"]


def test_an_export_made_elsewhere_is_shown_and_added_to_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = Export(tmp_path / "theirs.sqlite")
    name = "<script>alert(1)</script>"
    export.rows("NVTX_EVENTS", [export.range(name, 0, 100)])
    export.rows("CUPTI_ACTIVITY_KIND_RUNTIME", [export.launch(10, 12, 1), export.launch(200, 202, 2)])
    kernels = [export.kernel(name, 20, 60, 1), export.kernel("late", 210, 220, 2)]
    export.rows("CUPTI_ACTIVITY_KIND_KERNEL", kernels)
    export.close()
    code, shown, _ = run("--from", str(tmp_path / "theirs.sqlite"), capsys=capsys)
    assert code == 0
    assert "200 ns, 75.0% of it without a running kernel" in shown
    assert re.search(r"In no measured range.*\n.*late", shown) and "a trace of another program" in shown
    synthetic.everyday(tmp_path / "run")
    code, shown, _ = run("--from", str(tmp_path / "theirs.sqlite"), "--out", str(tmp_path / "run"), capsys=capsys)
    assert code == 0 and (tmp_path / "run" / "traces" / "theirs.sqlite").exists()
    page = (tmp_path / "run" / "report.html").read_text()
    assert name not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page, "names are text"
    assert 'href="traces/theirs.sqlite"' in page
    moved = tmp_path / "elsewhere" / "report.html"
    moved.parent.mkdir()
    assert runner.main(["report", str(tmp_path / "run"), "-o", str(moved)]) == 0
    assert 'href="../run/traces/theirs.sqlite"' in moved.read_text(), "links start where the page lies"

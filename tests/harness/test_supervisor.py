"""Passes, deaths and limits, with a worker that needs no torch (``fake_worker``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_runs import FAKE, case, measure, rows
from spikemark.harness.errors import NothingMeasured, UsageError
from spikemark.harness.locks import DeviceLock
from spikemark.harness.plan import Variant, visit_order, worker_env
from spikemark.harness.process import Worker, one_line, telling_line
from spikemark.harness.progress import Bar, Plain, Progress, Quiet, inert
from spikemark.harness.runfolder import RunFolder
from spikemark.harness.supervisor import RunOptions, WorkerFailed, run


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of others on this machine are not seen: whether rows are flagged is part of what is tested."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


DEATHS = {
    "segfault": "killed by SIGSEGV",
    "aborts": "killed by SIGABRT (Aborted) in stage measure: Fatal Python error: made up in kernel.py",
    "exits": "ended itself with exit code 3 in stage measure",
    "exits_quietly": "ended itself with exit code 0",
    "binary_death": "exit code 4 in stage measure",
    "leaves_child": "exit code 5",
    "hangs_up": "closed its event channel",
    "skips": "",
    "foreign_record": "sent an event that cannot be understood",
}


def test_every_death_is_one_row_and_the_rest_is_measured(tmp_path: Path) -> None:
    good = ["ok", "fine", "binary", "garbage", "taints", "bulky"]
    result = measure(tmp_path / "r", [case(n) for n in (*DEATHS, *good)], passes=2)
    found = RunFolder.load(tmp_path / "r").records
    for name, reason in DEATHS.items():
        own = [r for r in found if r.case.implementation == name]
        assert [(r.status, r.pass_index) for r in own] == [("crashed", 0)], "one row, not tried again"
        assert reason in own[0].reason
        assert own[0].reason.isprintable()
        assert not own[0].samples
        assert (tmp_path / "r" / "logs" / own[0].details["log"]).is_file()
    for name in good:
        own = [r for r in found if r.case.implementation == name]
        assert [(r.status, r.pass_index, r.flags) for r in own] == [("ok", 0, []), ("ok", 1, [])], name
    assert result.counts == {"crashed": len(DEATHS), "ok": len(good)}
    assert result.exit_code == 0
    assert bytes(range(256)) in b"".join(p.read_bytes() for p in (tmp_path / "r" / "logs").iterdir())
    survivors = [p for p in psutil.process_iter(["cmdline"]) if str(FAKE) in " ".join(p.info["cmdline"] or [])]
    assert not [p for p in survivors if p.ppid() in (1, os.getpid())], "no process is left, children included"


def test_last_words_are_the_dead_ones_own_even_if_the_runner_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case may have begun, spoken and died before the runner reads of it; what another said is not its."""
    poll = Worker.poll

    def late(worker: Worker, timeout_s: float) -> list[dict[str, Any]]:
        time.sleep(0.3)
        return poll(worker, timeout_s)

    monkeypatch.setattr(Worker, "poll", late)
    for seed in range(3):  # other orders
        measure(tmp_path / str(seed), [case(n) for n in ("aborts", "speaks", "exits")], seed=seed)
        found = rows(tmp_path / str(seed))
        assert found["aborts"].reason.endswith(DEATHS["aborts"])
        assert found["exits"].reason == "its process ended itself with exit code 3 in stage measure"
        assert found["speaks"].status == "ok"


def test_who_dies_in_its_turn_costs_only_its_own_row(tmp_path: Path) -> None:
    """All were begun; the others get no row from the dead, and are measured anew in the next process."""
    names = ["turns_ok", "turns_segfault", "turns_exits", "turns_spoils", "turns_fine"]
    result = measure(tmp_path / "r", [case(n) for n in names])
    found = RunFolder.load(tmp_path / "r").records
    assert sorted(r.case.implementation for r in found) == sorted(names), "one row each"
    statuses = {r.case.implementation: r.status for r in found}
    assert statuses == dict.fromkeys(names, "crashed") | {
        "turns_ok": "ok", "turns_fine": "ok", "turns_spoils": "error"
    }  # fmt: skip
    dead = rows(tmp_path / "r")["turns_exits"]
    assert dead.reason == "its process ended itself with exit code 3 in stage measure"
    assert result.exit_code == 0


def test_who_hangs_in_its_turn_is_ended_and_others_turns_are_not_its_time(tmp_path: Path) -> None:
    measure(tmp_path / "r", [case(n) for n in ("turns_ok", "turns_hangs")], case_timeout_s=0.3, stage_limits_s={})
    found = rows(tmp_path / "r")
    assert found["turns_hangs"].reason == "took longer than 0.3 s, in stage measure"
    assert found["turns_ok"].status == "ok"


def test_a_hang_and_a_hoard_are_ended(tmp_path: Path) -> None:
    """A quarter of what is free would take minutes to fill at the fake's pace: the share is set to about 150 MB."""
    share = 150e6 / psutil.virtual_memory().available
    cases = [case("hangs"), case("ok")]
    measure(tmp_path / "hang", cases, case_timeout_s=0.3, stage_limits_s={"verify": 99.0})
    assert rows(tmp_path / "hang")["hangs"].status == "timed-out"
    assert rows(tmp_path / "hang")["hangs"].reason == "took longer than 0.3 s, in stage measure"
    assert rows(tmp_path / "hang")["ok"].status == "ok"
    measure(tmp_path / "hoard", [case("hoards"), case("ok")], memory_fraction=share)
    hoard = rows(tmp_path / "hoard")["hoards"]
    assert hoard.status == "out-of-memory"
    assert "grew to" in hoard.reason
    assert "MiB" in hoard.reason
    assert "choose a smaller batch" in hoard.reason
    assert rows(tmp_path / "hoard")["ok"].status == "ok"


def test_a_slow_stage_with_its_own_limit_is_no_timeout(tmp_path: Path) -> None:
    """The hanging stage is called ``measure``; its own limit, not the case's, ends it."""
    options = {"case_timeout_s": 0.05, "stage_limits_s": {"measure": 0.6}}
    measure(tmp_path / "r", [case("hangs")], **options)
    record = rows(tmp_path / "r")["hangs"]
    assert record.reason == "took longer than 0.6 s, in stage measure"
    assert record.elapsed_s > 0.5


def test_statuses_and_exit_codes(tmp_path: Path) -> None:
    result = measure(tmp_path / "a", [case("ok"), case("wrong"), case("absent")], passes=3)
    assert result.exit_code == 3
    assert result.counts == {"incorrect": 1, "unavailable": 1, "ok": 1}
    assert len(RunFolder.load(tmp_path / "a").records) == 3 + 1 + 1
    assert measure(tmp_path / "b", [case("absent"), case("exits")]).exit_code == 4
    with pytest.raises(NothingMeasured):
        measure(tmp_path / "c", [])
    with pytest.raises(ValueError, match="planned twice"):
        measure(tmp_path / "d", [case("ok"), case("ok")])
    assert not (tmp_path / "c").exists()


def test_a_worker_that_cannot_start_is_an_error_not_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BROKEN", "1")
    with pytest.raises(WorkerFailed, match=r"exit code 1 before it was ready: ImportError: no module named kaputt"):
        measure(tmp_path / "r", [case("ok")])
    run_json = RunFolder.load(tmp_path / "r").meta
    assert run_json["unmeasured"] == [case("ok").key]
    with pytest.raises(WorkerFailed, match="No such file"):
        run([case("ok")], RunOptions(out=tmp_path / "s"), lambda plan, fd: ["/does/not/exist"], [], Quiet())


def test_the_run_folder_is_finished(tmp_path: Path) -> None:
    measure(tmp_path / "r", [case("ok"), case("exits")], passes=2, seed=7, baselines={"srm_neuron": "ok"})
    loaded = RunFolder.load(tmp_path / "r")
    assert loaded.meta["planned"] == 2
    assert loaded.meta["unmeasured"] == []
    assert loaded.meta["seed"] == 7
    assert loaded.meta["ended"] >= loaded.meta["started"]
    assert loaded.meta["environments"]["cpu"]["device_name"] == "Fake CPU"
    assert loaded.meta["environments"]["cpu"]["project"]["plugins"] == {}
    assert [c["pass_index"] for c in loaded.calibrations] == [0, 1], "once a pass, not once a worker"
    assert (tmp_path / "r" / "results.csv").is_file()
    assert (tmp_path / "r" / "benchmarks.json").is_file()


def test_the_run_says_where_its_time_went(tmp_path: Path) -> None:
    """The fake's cases say that they spent 2 ms in kernels, its process that torch took 3 ms to import."""
    measure(tmp_path / "r", [case("ok"), case("fine")], passes=2)
    time = RunFolder.load(tmp_path / "r").meta["time"]
    assert time["kernel_s"] == pytest.approx(4 * 0.002)
    assert time["torch_import_s"] == pytest.approx(2 * 0.003)
    assert time["harness_share"] == pytest.approx(1 - 0.014 / time["wall_s"], abs=2e-3)
    measure(tmp_path / "r", [case("ok"), case("fine"), case("binary")], passes=2, resume=True)
    later = RunFolder.load(tmp_path / "r").meta["time"]
    assert later["kernel_s"] == pytest.approx(6 * 0.002)
    assert later["wall_s"] > time["wall_s"]


def test_order_is_random_in_blocks_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    cases = [case(i, f"net/l{w}") for w in range(6) for i in ("a", "b", "c")]
    first = visit_order(cases, 1, 0)
    assert first == visit_order(cases[::-1], 1, 0)
    assert sorted(c.key for c in first) == sorted(c.key for c in cases)
    assert all(len({c.group for c in first[i : i + 3]}) == 1 for i in range(0, 18, 3)), "blocks stay together"
    orders = {tuple(c.key for c in visit_order(cases, seed, p)) for seed in range(4) for p in range(4)}
    assert len(orders) == 16
    measure(tmp_path / "r", cases, passes=2, seed=1)
    done = RunFolder.load(tmp_path / "r").records
    assert [r.case for r in done[:18]] == first
    assert [r.case for r in done[18:]] == visit_order(cases, 1, 1)


def test_devices_follow_one_another_in_each_pass(tmp_path: Path) -> None:
    cases = [case("ok", device=d) for d in ("cpu", "cpu:1")]
    measure(tmp_path / "r", cases, passes=2, devices=("cpu:1", "cpu"))
    loaded = RunFolder.load(tmp_path / "r")
    assert [(r.pass_index, r.environment) for r in loaded.records] == [
        (0, "cpu:1"),
        (0, "cpu"),
        (1, "cpu:1"),
        (1, "cpu"),
    ]
    assert loaded.meta["environments"]["cpu:1"]["threads"] == 1, "the worker's OMP_NUM_THREADS"
    assert worker_env("cpu:3", Variant())["OMP_NUM_THREADS"] == "3"
    assert worker_env("cuda:1", Variant()).get("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS")


def test_variants_are_interleaved_pass_by_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("PYTHONPATH", "own")
    (tmp_path / "new.py").write_text("# one plug-in")
    variants = (Variant("base", pythonpath=("old/tree",)), Variant("new", plugins=(str(tmp_path / "new.py"),)))
    measure(tmp_path / "r", [case("ok"), case("exits")], passes=2, variants=variants)
    loaded = RunFolder.load(tmp_path / "r")
    ok = [(r.pass_index, r.details["variant"]) for r in loaded.records if r.status == "ok"]
    assert sorted(ok) == [(0, "base"), (0, "new"), (1, "base"), (1, "new")]
    assert [p for p, _ in ok] == [0, 0, 1, 1], "both in a pass before the next pass"
    assert sorted(loaded.variants) == ["base", "new"]
    assert {c["variant"] for c in loaded.calibrations} == {"base", "new"}
    traces = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert {t["pythonpath"] for t in traces if not t["plugins"]} == {os.pathsep.join(["old/tree", "own"])}
    assert {t["pythonpath"] for t in traces if t["plugins"]} == {"own"}
    plugins = loaded.meta["environments"]["cpu [new]"]["project"]["plugins"]
    assert list(plugins) == ["new.py"]
    with pytest.raises(UsageError, match="different labels"):
        RunOptions(out=tmp_path, variants=(Variant("x"), Variant("x")))


def test_another_run_on_the_device_is_flagged(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from spikemark.harness.locks import DeviceLock\n"
        "lock = DeviceLock('cpu:1', pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()\n"
    )
    folder = tmp_path / "spikemark-locks"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        measure(tmp_path / "shared", [case("ok")])
        other.kill()
    assert rows(tmp_path / "shared")["ok"].flags == ["shared-device"]
    assert len(list(folder.iterdir())) == 1, "what the killed run left behind"
    measure(tmp_path / "alone", [case("ok")])
    assert rows(tmp_path / "alone")["ok"].flags == []
    assert list(folder.iterdir()) == []


def test_locks_of_different_devices_do_not_meet(tmp_path: Path) -> None:
    one, two, gpu = DeviceLock("cpu", tmp_path), DeviceLock("cpu:1", tmp_path), DeviceLock("cuda:0", tmp_path)
    assert one.others() == two.others() == [os.getpid()]
    assert gpu.others() == []
    two.release()
    assert one.others() == []


def test_a_disk_that_fills_up_stops_the_run_and_keeps_it(tmp_path: Path) -> None:
    """A limit on file sizes fails in the middle of a write, as a full disk does; only the runner has it."""
    code = (
        "import resource, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from spikemark.harness.runfolder import StorageError\n"
        "from test_supervisor import *\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    measure(Path(sys.argv[1]), [case('ok', w) for w in 'abcdef'] + [case('bulky', 'z')], seed=5)\n"
        "except StorageError as error:\n"
        "    print(error)\n"
    )
    out = tmp_path / "r"
    command = [sys.executable, "-c", code, str(out), str(FAKE.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("no space left to write"), done.stderr
    assert done.stdout.count("\n") == 1
    loaded = RunFolder.load(out)
    assert loaded.damaged == 0
    assert loaded.meta["interrupted"] is True
    assert case("bulky", "z").key in loaded.meta["unmeasured"]
    before = len(loaded.records)
    assert before == [c.case.implementation for c in loaded.records].count("ok")
    measure(out, [case("ok", w) for w in "abcdef"] + [case("bulky", "z")], seed=5, resume=True)
    assert len(RunFolder.load(out).records) == 7


def test_options_are_checked(tmp_path: Path) -> None:
    for name, value in (("passes", 0), ("precision", 0.0), ("budget_s", -1.0), ("case_timeout_s", float("nan"))):
        with pytest.raises(UsageError, match="must be greater than 0"):
            RunOptions(out=tmp_path, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="less than min_samples"):
        RunOptions(out=tmp_path, min_samples=20, max_samples=10)


def test_reasons_are_one_inert_line_without_paths() -> None:
    assert one_line("a\x1b[31mb\n\tc") == "a [31mb c"
    assert one_line("error in /home/me/x y/k.py:3, see ~/notes/a.txt or a/b") == "error in x y/k.py:3, see a.txt or a/b"
    assert len(one_line("x" * 1000)) == 300
    text = "noise\nterminate called after throwing an instance of 'std::runtime_error'\n  what():  no\nCore dumped\n"
    assert telling_line(text) == "terminate called after throwing an instance of 'std::runtime_error'; what(): no"
    assert telling_line("\x00\x01\x02\n") == ""
    assert telling_line("..F\n..s [ 50%]") == "", "a test runner's dots say nothing"
    assert telling_line(".FFatal Python error: Aborted\n\nCurrent thread 0x1:\n") == "Fatal Python error: Aborted"
    assert telling_line("a\nImportError: no module\n") == "ImportError: no module"


class _Terminal:
    """A text stream that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [Plain, Bar])
def test_progress_shows_names_inert(kind: type[Progress], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spikemark.harness.progress.PLAIN_INTERVAL_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    stream = _Terminal()
    with kind(stream) as progress:  # type: ignore[arg-type]
        progress.begin(3, done=1)
        progress.case("[red]evil[/red]\x1b]0;title\x07\r\n", "pass 1/1 cpu")
        progress.stage("measure")
        if isinstance(progress, Bar):
            progress._rich.refresh()
        progress.message("[bold]kept[/bold]\x1b[2J")
        progress.advance()
        assert (progress.done, progress.total) == (2, 3)
        progress.advance(left=0)
    assert "[red]evil[/red]?]0;title" in stream.text
    assert "[bold]kept[/bold]?[2J" in stream.text
    assert "\x1b]0;" not in stream.text
    assert "\x07" not in stream.text


def test_progress_estimates_from_this_run_only() -> None:
    progress = Quiet()
    progress.begin(100, done=90)
    assert progress.remaining_s() is None
    progress._started -= 10
    progress.advance()
    left = progress.remaining_s()
    assert left is not None
    assert left == pytest.approx(90, rel=0.05), "10 s for one, nine to come"
    assert inert("a" * 100).count("…") == 1
    assert len(inert("a" * 100)) == 70

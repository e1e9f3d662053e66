"""A folder of runs as a history: what is one point, one series, one change; that what is read is what was measured."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import histories
import pytest
import synthetic
from spikemark.harness import results
from spikemark.harness.errors import NothingMeasured, UsageError
from spikemark.harness.merging import merge
from spikemark.harness.records import Case
from spikemark.harness.runfolder import RunFolder, read_meta
from spikemark.harness.statistics import summarise
from spikemark.reports import history, history_page, history_runs, history_text
from spikemark.reports.history import History

CASES = histories.cases(6)


def slower(run: int, case: int) -> float:
    """The third case takes 30 % more from the 13th run on."""
    return 1.3 if case == 2 and run >= 12 else 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 runs, one commit each, whose names are not in the order of their dates."""
    return histories.folder(tmp_path_factory.mktemp("histories") / "runs", 24, CASES, slower, noise=0.02)


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(folder, tmp_path / "runs")
    return tmp_path / "runs"


def figures(found: History) -> dict[str, list[float]]:
    """Times of every case, in order."""
    return {series.case["key"]: series.times for series in found.series}


# -- what is read --------------------------------------------------------------------------------------------------


def test_times_are_those_of_the_summary_in_order_of_date(folder: Path) -> None:
    found = history.read(folder, 0.03)
    assert [run.started for run in found.runs] == [histories.started(i) for i in range(24)]
    for index, run in enumerate(found.runs):
        rows = {row["key"]: row for row in summarise(RunFolder.load(folder / run.name))}
        for series in found.series:
            row = rows[series.case["key"]]
            assert series.times[index] == row["median_s"], "the very same number"
            wanted = math.log(row["ci_high_s"] / row["ci_low_s"]) / 3.92
            assert series.errors[index] == pytest.approx(wanted)


def test_results_and_journal_say_the_same(folder: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the proof everything is read from the journals; the history is the same to the last digit."""
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "load", lambda path: pytest.fail(f"{path} was read from its journal"))
        quick = history_text.to_json(history.read(folder, 0.03))
    for run in own.iterdir():
        meta = json.loads((run / "run.json").read_text())
        del meta["derived"]
        (run / "run.json").write_text(json.dumps(meta))
    assert history_text.to_json(history.read(own, 0.03)) == quick


def _edit_results(run: Path) -> None:
    text = (run / "results.csv").read_text()
    (run / "results.csv").write_text(text.replace("srm_neuron", "srm_neuroN"))


def _continue_run(run: Path) -> None:
    opened, before = RunFolder.reopen(run)
    opened.append(before.records[0])
    opened.close()


def _change_a_digit(run: Path) -> None:
    text = (run / "cases.jsonl").read_text()
    place = text.index('"samples": [', text.index('"record"')) + len('"samples": [')
    digit = "1" if text[place] != "1" else "2"
    (run / "cases.jsonl").write_text(text[:place] + digit + text[place + 1 :])


def _remove_results(run: Path) -> None:
    (run / "results.csv").unlink()


@pytest.mark.parametrize("change", [_edit_results, _continue_run, _change_a_digit, _remove_results])
def test_what_is_not_proven_is_read_from_the_journal(own: Path, change: Any) -> None:
    run = sorted(own.iterdir())[0]
    columns = ("key", "median_s")
    assert results.proven(run, read_meta(run), columns) is not None
    change(run)
    assert results.proven(run, read_meta(run), columns) is None
    wanted = {row["key"]: row["median_s"] for row in summarise(RunFolder.load(run))}
    found = history.read(own, 0.03)
    index = [made.name for made in found.runs].index(run.name)
    assert {s.case["key"]: s.times[s.runs.index(index)] for s in found.series} == wanted


@pytest.mark.parametrize("told", [None, 3, {}, {"schema": 1}, {"schema": 1, "journal_bytes": "x"}, {"schema": 99}])
def test_a_strange_proof_is_none(own: Path, told: Any) -> None:
    run = next(own.iterdir())
    meta = read_meta(run)
    whole = meta["derived"] if isinstance(told, dict) and told.get("schema") == 99 else {}
    assert results.proven(run, meta | {"derived": whole | told if isinstance(told, dict) else told}, ("key",)) is None


def test_a_proof_of_nonsense_crashes_nothing(own: Path) -> None:
    """Somebody wrote a file that matches its digests and holds no figures: the journal decides."""
    run = sorted(own.iterdir())[0]
    rows = list(csv.reader((run / "results.csv").open(newline="")))
    at = rows[0].index("median_s")
    text = io.StringIO()
    csv.writer(text).writerows([rows[0], *([*row[:at], "fast", *row[at + 1 :]] for row in rows[1:])])
    (run / "results.csv").write_text(text.getvalue())
    meta = json.loads((run / "run.json").read_text())
    strange = {"gauges": {"cpu": {"copy": "x"}, "y": 3}}
    meta["derived"] = results.stamp(RunFolder.load(run), results.state(run)) | strange
    (run / "run.json").write_text(json.dumps(meta))
    assert len(history.read(own, 0.03).runs) == 24


# -- what is one point, one series ---------------------------------------------------------------------------------


def test_copies_and_merged_folders_are_no_second_points(folder: Path, own: Path) -> None:
    names = sorted(run.name for run in own.iterdir())
    shutil.copytree(own / names[0], own / "copy")
    merge([own / n for n in names[1:4]], own / "merged")
    found = history.read(own, 0.03)
    assert figures(found) == figures(history.read(folder, 0.03))
    assert found.copies == 4
    for name in names[1:4]:
        shutil.rmtree(own / name)
    found = history.read(own, 0.03)
    assert figures(found) == figures(history.read(folder, 0.03)), "the merged folder stands for its runs"
    assert (len(found.runs), found.copies) == (24, 1)


def test_a_copy_that_was_continued_counts_instead(own: Path) -> None:
    run = sorted(own.iterdir())[0]
    shutil.copytree(run, own / "continued")
    opened, before = RunFolder.reopen(own / "continued")
    extra = before.records[0]
    extra.pass_index, extra.samples = 9, [1.0] * 5
    opened.append(extra)
    opened.finish()
    found = history.read(own, 0.03)
    assert (len(found.runs), found.copies) == (24, 1)
    assert "continued" in [made.name for made in found.runs]


def test_environments_that_do_not_match_are_series_of_their_own(tmp_path: Path) -> None:
    """A newer torch makes everything 30 % slower: that is another environment, and no change of the code."""
    for run in range(30):
        versions = {"python": "3.11.7", "torch": "2.13.0" if run < 15 else "2.14.0"}
        described = {"cpu": histories.environment(run, versions=versions)}
        level = lambda run, case: 1.3 if run >= 15 else 1.0  # noqa: E731
        histories.write(tmp_path / f"{run}", run, CASES[:3], level, noise=0.01, environments=described)
    found = history.read(tmp_path, 0.03)
    assert [len(series.runs) for series in found.series] == [15] * 6
    assert not found.steps
    assert [p.title for p in found.places] == [
        "cpu · Synthetic CPU 3000", "cpu · Synthetic CPU 3000, versions.torch (2.14.0)"
    ]  # fmt: skip
    text = history_text.table(found)
    assert "Environments that do not match are separate series." in text
    assert "[2] cpu · Synthetic CPU 3000, versions.torch (2.14.0)." in text


def test_a_field_that_some_do_not_tell_keeps_series_together_and_others_apart(tmp_path: Path) -> None:
    models = [{"driver": None}, {"driver": "570"}, {"driver": "580"}, {"driver": None}]
    for run, gpu in enumerate(models):
        described = {"cpu": histories.environment(run, gpu=gpu)}
        histories.write(tmp_path / f"{run}", run, CASES[:1], environments=described)
    found = history.read(tmp_path, 0.03)
    assert [series.runs for series in found.series] == [[0, 1, 3], [2]]


def test_a_case_that_fails_or_is_new_has_gaps_not_zeros(tmp_path: Path) -> None:
    for run in range(4):
        path = histories.write(tmp_path / f"{run}", run, CASES[: 1 + run % 2])
        if run == 3:
            opened, _ = RunFolder.reopen(path)
            opened.append(synthetic.failure(CASES[1], 1, "crashed"))
            opened.finish()
    found = history.read(tmp_path, 0.03)
    assert [(s.runs, s.last) for s in found.series] == [([0, 1, 2, 3], "ok"), ([1], "crashed")]
    assert "last run: crashed" in history_text.table(found)


def test_what_is_no_point_is_left_out_and_said(own: Path) -> None:
    names = sorted(run.name for run in own.iterdir())
    (own / names[0] / "run.json").write_text("{")
    meta = json.loads((own / names[1] / "run.json").read_text())
    (own / names[1] / "run.json").write_text(json.dumps(meta | {"schema": 9}))
    both = {f"cpu [{v}]": histories.environment(0) for v in ("base", "new")}
    records = [
        synthetic.record(CASES[0], 0, environment=f"cpu [{v}]", details={"variant": v}) for v in ("base", "new")
    ]  # fmt: skip
    synthetic.write(own / "ab", records, environments=both, passes=1)
    for name in ("ab", "ab finished"):
        if name != "ab":
            shutil.copytree(own / "ab", own / name)
            RunFolder.reopen(own / name)[0].finish()
    (own / "notes").mkdir()
    (own / "notes" / "text.txt").write_text("x")
    found = history.read(own, 0.03)
    assert len(found.runs) == 22
    assert sorted(text.split(": ")[0] for text in found.left_out) == sorted([*names[:2], "ab", "ab finished"])
    assert sum("two versions measured in turns" in text for text in found.left_out) == 2
    assert "Left out: " in history_text.table(found)


def test_runs_may_lie_deeper(tmp_path: Path) -> None:
    histories.write(tmp_path / "commit1" / "comparison" / "run", 0, CASES[:1])
    histories.write(tmp_path / "commit2" / "run", 1, CASES[:1])
    histories.write(tmp_path / ".trash" / "run", 2, CASES[:1])
    assert [path.relative_to(tmp_path).parts for path in history_runs.find(tmp_path)] == [
        ("commit1", "comparison", "run"), ("commit2", "run")
    ]  # fmt: skip
    assert len(history.read(tmp_path, 0.03).runs) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    histories.write(tmp_path / "run", 0, CASES[:1])
    (tmp_path / "locked").mkdir(mode=0)
    try:
        assert history.read(tmp_path, 0.03).left_out[0].startswith("locked: cannot read")
    finally:
        (tmp_path / "locked").chmod(0o700)


def test_a_run_of_a_merged_folder_keeps_its_own_commit(tmp_path: Path) -> None:
    """Different commits are different environments there; here each is its run's."""
    for run in range(3):
        histories.write(tmp_path / f"{run}", run, CASES[:1])
    merge([tmp_path / f"{run}" for run in range(3)], tmp_path / "merged")
    for run in range(3):
        shutil.rmtree(tmp_path / f"{run}")
    found = history.read(tmp_path, 0.03)
    (series,) = found.series
    assert [found.commit(series, run) for run in range(3)] == [f"{run:07x}c0f" for run in range(3)]


@pytest.mark.parametrize(
    ("name", "message"),
    [("none", "does not exist"), ("file", "is a file"), ("empty", "holds no run folder"), ("run", "is a run itself"),
     ("bad", "holds no run of a history: r: ")],
)  # fmt: skip
def test_bad_folders_are_named_in_one_line(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty" / "inside").mkdir(parents=True)
    histories.write(tmp_path / "run", 0, CASES[:1])
    (tmp_path / "bad" / "r").mkdir(parents=True)
    (tmp_path / "bad" / "r" / "run.json").write_text("[]")
    with pytest.raises(UsageError) as caught:
        history.read(tmp_path / name, 0.03)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_nothing_asked_for_or_nothing_timed_is_nothing_measured(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NothingMeasured):
        history.read(folder, 0.03, lambda case: False)
    synthetic.write(tmp_path / "r", [synthetic.failure(CASES[0], 0, "crashed")], passes=1)
    with pytest.raises(NothingMeasured):
        history.read(tmp_path, 0.03)


# -- what changed --------------------------------------------------------------------------------------------------


def test_a_change_has_its_place_size_and_commits(folder: Path) -> None:
    found = history.read(folder, 0.03)
    ((step, series),) = found.steps
    assert series.case["key"] == CASES[2].key
    assert (step.before, step.run) == (11, 12)
    assert step.ratio.low < 1.3 < step.ratio.high
    assert (step.shared, step.common) == (1, False)
    assert history_text.commits(found, series, step) == "000000bc0f..000000cc0f"
    text = history_text.table(found)
    assert text.splitlines()[0].startswith("Since")
    assert "24 runs, 2026-01-01 to 2026-01-05, 6 cases: 1 change point in 1 case, the latest on 2026-01-03." in text


def test_a_change_of_all_cases_and_the_calibration_is_called_the_machines(tmp_path: Path) -> None:
    for run in range(30):
        path = histories.write(tmp_path / f"{run}", run, CASES, lambda run, case: 1.5 if run >= 14 else 1.0, noise=0.02)
        lines = (path / "cases.jsonl").read_text().splitlines()
        moved = []
        for line in map(json.loads, lines):
            if line["kind"] == "calibration":
                line["samples"] = [s * (1.5 if run >= 14 else 1.0) * (1 + run % 3 / 100) for s in line["samples"]]
            moved.append(json.dumps(line))
        (path / "cases.jsonl").write_text("\n".join(moved) + "\n")
        RunFolder.reopen(path)[0].finish(ended=histories.started(run))
    found = history.read(tmp_path, 0.03)
    assert [(step.run, step.shared, step.cases) for step, _ in found.steps] == [(14, 6, 6)] * 6
    assert all(step.common for step, _ in found.steps)
    (gauge,) = found.places[0].gauges.values()
    assert [step.run for step in gauge.steps] == [14]
    text = history_text.table(found)
    (row,) = [line for line in text.splitlines() if "together: the machine?" in line]
    assert "6 of 6 cases" in row, "one row for all"
    assert "The machine itself changed: its calibration (copy) took 2026-01-03 +50" in text
    assert "the machine is as likely a cause as the code" in text


def test_neighbouring_places_of_one_change_are_one(tmp_path: Path) -> None:
    level = lambda run, case: 1.5 if case < 2 and run >= 14 + case else 0.6 if case == 2 and run >= 14 else 1.0  # noqa: E731
    found = history.read(histories.folder(tmp_path, 30, CASES, level, noise=0.01), 0.03)
    told = {series.case["key"]: (step.run, step.shared) for step, series in found.steps}
    assert told == {CASES[0].key: (14, 2), CASES[1].key: (15, 2), CASES[2].key: (14, 1)}, "the other way is another"


def test_the_least_change_is_what_was_asked_for(folder: Path) -> None:
    assert history.read(folder, 0.5).steps == []
    assert "no change point of 50 % or more" in history_text.table(history.read(folder, 0.5))


# -- how it reads --------------------------------------------------------------------------------------------------


def test_json_and_csv_hold_every_figure(folder: Path) -> None:
    found = history.read(folder, 0.03)
    data = json.loads(json.dumps(history_text.to_json(found), allow_nan=False))
    assert len(data["runs"]) == 24 and len(data["cases"]) == 6
    (changed,) = [case for case in data["cases"] if case["changes"]]
    (change,) = changed["changes"]
    assert (change["run"], change["before"], change["of_cases"]) == (12, 11, 6)
    assert [level["first"] for level in changed["levels"]] == [0, 12]
    rows = list(csv.DictReader(io.StringIO(history_text.to_csv(found))))
    assert len(rows) == 24 * 6
    assert [float(row["change"]) for row in rows if row["change"]] == [change["ratio"]]
    assert {float(row["median_s"]) for row in rows} == {t for case in data["cases"] for t in case["median_s"]}


def test_cases_that_stayed_the_same_are_counted_where_they_are_many(folder: Path) -> None:
    found = history.read(folder, 0.03)
    text = history_text.table(found, 3)
    assert "and 5 more cases (--all shows them)" in text
    assert text.count("net0/conv0") == 2


def test_trends_are_drawn_to_scale() -> None:
    assert history_text.spark([1.0] * 3) == "▅▅▅"
    assert history_text.spark([1.0, 1.01, 0.99]) in ("▅▅▄", "▅▅▅"), "noise is no mountain"
    assert history_text.spark([1.0, 2.0]) == "▁█"
    assert len(history_text.spark([1.0] * 1000)) == history_text.SPARK_WIDTH
    assert history_text.spark([]) == ""


def test_the_page_is_whole_inert_and_small(folder: Path, tmp_path: Path) -> None:
    found = history.read(folder, 0.03)
    assert history_page.write(found, tmp_path / "page.html").read_text() == history_page.page(found)
    page = history_page.page(found)
    assert page.count('<svg class="trend"') == 6 + 1
    assert page.count("<figure>") == 1
    assert "30.1 %" in page or "+29" in page or "+30" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert "style=" not in page
    with pytest.raises(UsageError, match="cannot write"):
        history_page.write(found, tmp_path / "absent" / "x.html")


def test_hostile_names_stay_names(tmp_path: Path) -> None:
    hostile = synthetic.HOSTILE
    problems = [synthetic.problem(hostile[i], (4, 8, 8), 5, 1, 0.1) for i in range(4)]
    every = [Case(hostile[0], "forward", hostile[1], "cpu", "float32", problem) for problem in problems]
    for run in range(12):
        described = {"cpu": histories.environment(run, machine=hostile[1])}
        level = lambda run, case: 2.0 if run >= 6 and case == 1 else 1.0  # noqa: E731
        histories.write(tmp_path / f"{run}", run, every, level, noise=0.005, environments=described)
    found = history.read(tmp_path, 0.03)
    assert len(found.steps) == 1
    page, text = history_page.page(found), history_text.table(found)
    for name in ("<script>window", "<img src=x", "</style></script>"):
        assert name not in page
    assert "\x1b" not in text and "\u202e" not in text
    json.loads(json.dumps(history_text.to_json(found)))
    history_text.to_csv(found).encode()


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
def test_in_a_browser_nothing_is_cut_and_the_search_works(
    folder: Path, browser: Any, tmp_path: Path, width: int, dark: bool
) -> None:
    path = history_page.write(history.read(folder, 0.03), tmp_path / "page.html")
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(path.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.execute_script("return document.getElementById('count').textContent") == "6 of 6 cases"
    browser.find_element("id", "search").send_keys("torch_compile 2026")
    assert browser.execute_script("return document.getElementById('count').textContent") == "1 of 6 cases"
    assert browser.execute_script("return document.querySelectorAll('#cases tbody tr:not([hidden])').length") == 1
    assert browser.get_log("browser") == []

"""Markdown, CSV, Parquet, LaTeX and picture files, as the command line asks for them."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
import synthetic
from spikemark import reports
from spikemark.harness.errors import UsageError
from spikemark.harness.records import COLUMNS
from spikemark.reports import cli, export, tables


def text(run: Path, form: str) -> str:
    stream = io.StringIO()
    assert cli.report([run], form=form, stream=stream) == []
    return stream.getvalue()


@pytest.mark.parametrize("which", ["everyday", "hostile"])
def test_markdown_tables_keep_their_columns(which: str, request: pytest.FixtureRequest) -> None:
    page = text(request.getfixturevalue(which), "markdown")
    page.encode("utf-8")
    assert "<script" not in page and "</style" not in page
    blocks = re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE)
    assert blocks
    for block in blocks:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1


def test_markdown_says_who_won_and_what_failed(everyday: Path) -> None:
    page = text(everyday, "markdown")
    assert re.search(
        r"\| srm_neuron \| forward \| cifar10-vgg/conv2 \| batch 8, T 12, 10 % \| cpu \| native \| 1\d\.\d×", page
    )
    assert all(tables.markdown_cell(r) in page for r in synthetic.REASONS.values())
    assert "295 cases are too many" in page


def test_a_small_run_lists_its_cases_in_markdown(tmp_path: Path) -> None:
    run = synthetic.write(tmp_path / "r", [synthetic.record(c, 0) for c in list(synthetic.cases())[:4]], passes=1)
    assert text(run, "markdown").split("## Every case")[1].count("| mnist/conv1 |") == 4


@pytest.mark.parametrize("which", ["everyday", "hostile"])
def test_csv_reads_back_as_the_frame(which: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(which)
    rows = list(csv.reader(io.StringIO(text(run, "csv"))))
    frame = reports.load(run)
    assert rows[0][: len(COLUMNS)] == list(COLUMNS) and len(rows) == len(frame) + 1
    assert {len(r) for r in rows} == {len(rows[0])}
    column = rows[0].index("median_s")
    read = [float(r[column]) if r[column] else None for r in rows[1:]]
    assert read == [None if pd.isna(v) else v for v in frame["median_s"]]


@pytest.mark.parametrize("which", ["everyday", "hostile"])
def test_parquet_reads_back_as_the_frame(which: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    run = request.getfixturevalue(which)
    (path,) = cli.report([run], tmp_path / "x.parquet", "parquet")
    table, frame = pd.read_parquet(path), reports.load(run)
    assert list(table.columns) == list(frame.columns)
    pd.testing.assert_series_equal(table["median_s"], frame["median_s"])
    assert list(table["key"]) == list(frame["key"])


@pytest.mark.parametrize("which", ["everyday", "hostile"])
def test_latex_has_equal_columns_and_no_command_from_names(which: str, request: pytest.FixtureRequest) -> None:
    page = text(request.getfixturevalue(which), "latex")
    lines = [line for line in page.splitlines() if line.endswith(r"\\")]
    assert len(lines) > 3 and len({len(re.findall(r"(?<!\\)&", line)) for line in lines}) == 1
    body = "\n".join(lines[1:])
    commands = "textbackslash textbf textmu textasciicircum textasciitilde textless textgreater textbar times pm dots"
    known = rf"\\({'|'.join(commands.split())}|cdot|[{{}}$&#%_\\])"
    assert not re.sub(known, "", body).count("\\")
    assert body.replace(r"\{", "").count("{") == body.replace(r"\}", "").count("}")


def test_latex_makes_the_winner_bold(everyday: Path) -> None:
    page = text(everyday, "latex")
    assert page.count(r"\textbf{native}") >= 32 and r"\textbf{torch\_eager}" not in page


def test_pictures_are_written_as_svg_and_pdf(tmp_path: Path) -> None:
    every = synthetic.cases(workloads={"a/</style>": ((8, 8, 8), 5)}, operators=("conv_backward",), batches=(1,))
    run = synthetic.write(tmp_path / "r", [synthetic.record(c, p) for p in range(2) for c in every])
    written = cli.report([run], tmp_path / "x.html", figures=tmp_path / "figures")
    files = [p for p in written if p.parent.name == "figures"]
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == sorted(p.name for p in files)
    assert {p.suffix for p in files} == {".svg", ".pdf"} and len(files) >= 10
    for path in files:
        if path.suffix == ".svg":
            ElementTree.parse(path)
            assert "<text" in path.read_text(encoding="utf-8")
        else:
            assert path.read_bytes().startswith(b"%PDF") and b"FontFile" in path.read_bytes()


def test_file_names_are_safe_and_never_taken_twice() -> None:
    taken: set[str] = set()
    names = [export.file_stem(n, taken) for n in ("../../etc/x", "A b", "a-b", "", "\u202e", "n" * 300)]
    assert names[:3] == ["etc-x", "A-b", "a-b-2"] and len(set(names)) == 6
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,81}", n) for n in names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"form": "pdf"}, "unknown format 'pdf'"),
        ({"devices": ["cpu"]}, "two different devices"),
        ({"devices": ["cpu", "cuda"]}, "no case was measured on device 'cuda'"),
    ],
)
def test_bad_requests_are_refused_in_one_line(everyday: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        cli.report([everyday], **changes)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)

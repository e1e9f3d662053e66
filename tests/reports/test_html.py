"""The page as text: self-contained, inert, complete; edge cases; the table's data."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import synthetic
from spikemark.harness.errors import UsageError
from spikemark.harness.records import STATUSES
from spikemark.reports import answers, figures, html, table_data, words
from spikemark.reports.rows import read


class Page(HTMLParser):
    """Collects tags with attributes and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: list[tuple[str, dict[str, str | None], str]] = []
        self.words: list[str] = []
        self._open: tuple[str, dict[str, str | None]] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = (tag, dict(attrs)) if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open:
            self.blocks.append((*self._open, data))
        elif data.strip():
            self.words.append(data)

    def data(self) -> dict[str, Any]:
        """The table's JSON."""
        (found,) = [text for _, attributes, text in self.blocks if attributes.get("id") == "data"]
        out: dict[str, Any] = json.loads(found)
        return out

    def details(self) -> list[dict[str, Any]]:
        """Everything rows open to."""
        packed = [text for _, attributes, text in self.blocks if str(attributes.get("id")).startswith("details-")]
        return [row for chunk in packed for row in json.loads(zlib.decompress(base64.b64decode(chunk)))]


@pytest.fixture(scope="module")
def everyday_page(everyday: Path) -> Page:
    return Page(html.page(read([everyday])))


@pytest.fixture(scope="module")
def hostile_page(hostile: Path) -> Page:
    return Page(html.page(read([hostile])))


def test_write_puts_the_page_into_the_first_run_or_where_it_is_told(tmp_path: Path) -> None:
    run = synthetic.write(tmp_path / "run", [synthetic.record(c, 0) for c in list(synthetic.cases())[:2]], passes=1)
    assert html.write([run]) == run / "report.html"
    assert html.write([run], tmp_path / "other.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not list(tmp_path.rglob("*.part"))
    with pytest.raises(UsageError, match="cannot write"):
        html.write([run], tmp_path / "absent" / "x.html")


@pytest.mark.parametrize("which", ["everyday_page", "hostile_page"])
def test_the_policy_allows_only_the_pages_own_script_and_style(which: str, request: pytest.FixtureRequest) -> None:
    page: Page = request.getfixturevalue(which)
    metas = [a for tag, a in page.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    policy = str(metas[0]["content"])
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
    styles = [text for tag, _, text in page.blocks if tag == "style"]
    scripts = [text for tag, a, text in page.blocks if tag == "script" and "type" not in a]
    assert (len(styles), len(scripts)) == (1, 1)
    for text in (*styles, *scripts):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy


@pytest.mark.parametrize("which", ["everyday_page", "hostile_page"])
def test_nothing_is_loaded_and_nothing_is_inline(which: str, request: pytest.FixtureRequest) -> None:
    page: Page = request.getfixturevalue(which)
    assert not {tag for tag, _ in page.tags} & {"img", "link", "iframe", "object", "embed", "base", "foreignobject"}
    for tag, attributes in page.tags:
        assert "style" not in attributes and "src" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("href", "xlink:href"):
            assert str(attributes.get(name) or "#").startswith("#"), (tag, attributes[name])
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    references = {str(a["xlink:href"])[1:] for _, a in page.tags if "xlink:href" in a}
    references |= {found for _, a in page.tags for found in re.findall(r"url\(#([^)]+)\)", str(a.get("clip-path")))}
    assert references and references <= set(ids)


def test_hostile_names_are_shown_as_they_are(hostile_page: Page) -> None:
    text = "\n".join(hostile_page.words)
    for name in synthetic.HOSTILE[:2]:
        assert words.clean(name) in text
    values = {v for c in hostile_page.data()["columns"] for v in c.get("values", [])}
    assert {words.clean(n) for n in synthetic.HOSTILE} <= values


def test_json_cannot_end_its_script_element() -> None:
    value = {"</script><!--": ["<script>", "\u2028", "&lt;", 'quote"\\']}
    text = table_data.dumps(value)
    assert not set(text) & set("<>&\u2028") and json.loads(text) == value


def test_what_is_not_drawn_is_said(everyday: Path, everyday_page: Page) -> None:
    report = read([everyday])
    left = len(figures.pictures(report, answers.answers(report))) - figures.MOST
    assert left > 0 and f"{left} more pictures of this run would make this page too long" in "\n".join(
        everyday_page.words
    )


def test_every_picture_has_words_and_a_table(everyday_page: Page) -> None:
    pictures = [a for tag, a in everyday_page.tags if tag == "div" and a.get("role") == "img"]
    assert len(pictures) > 20 and all(len(str(a["aria-label"])) > 30 for a in pictures)
    assert sum(tag == "figure" for tag, _ in everyday_page.tags) == len(pictures)
    assert "\n".join(everyday_page.words).count("The numbers behind this picture") == len(pictures)


def test_the_table_holds_every_case_and_its_details(everyday: Path, everyday_page: Page) -> None:
    report, data = read([everyday]), everyday_page.data()
    columns = {c["id"]: c for c in data["columns"]}
    assert data["total"] == len(report.rows) == len(columns["median_s"]["nums"])
    for index in (0, 100, len(report.rows) - 1):
        row = report.rows[index]
        assert columns["workload"]["values"][columns["workload"]["codes"][index]] == row["workload"]
        assert columns["median_s"]["nums"][index] == pytest.approx(row["median_s"], rel=1e-5) or row["median_s"] is None
    assert set(columns["status"]["values"]) == set(STATUSES)
    details = everyday_page.details()
    assert [d["command"] for d in details] == [r["command"] for r in report.rows]
    samples = details[0]["samples"]
    passes = samples["kinds"]["cold"]
    assert [p[:2] for p in passes] == [[0, 12], [1, 12]]
    scale, unit = words.time_unit(report.rows[0]["median_s"])
    assert samples["unit"] == unit
    first = [s * scale for s in report.rows[0]["records"][0].samples]
    assert [n / samples["per"] for n in passes[0][2]] == pytest.approx(first, rel=1e-4)
    facts = dict(details[0]["facts"])
    assert ["peak", words.size(report.rows[0]["peak_bytes"])] in facts["Memory ledger"]
    assert {"Time", "Verification", "Cost model"} <= set(facts)


def test_many_samples_are_thinned_by_rank_and_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_data, "MOST_SAMPLES", 100)
    monkeypatch.setattr(table_data, "SAMPLES_PER_CASE", 40)
    case = next(synthetic.cases())
    run = synthetic.write(tmp_path / "r", [synthetic.record(case, 0, samples=500)], passes=1)
    ((index, taken, shown),) = Page(html.page(read([run]))).details()[0]["samples"]["kinds"]["cold"]
    assert (index, taken) == (0, 500) and 40 <= len(shown) <= 100 and shown == sorted(shown)


def test_reasons_of_all_failures_are_on_the_page(everyday_page: Page) -> None:
    text = "\n".join(everyday_page.words)
    for reason in synthetic.REASONS.values():
        assert reason in text


def test_environments_and_what_differs_are_on_the_page(everyday_page: Page) -> None:
    text = "\n".join(everyday_page.words)
    for wanted in ("Synthetic CPU 3000", "threads", "versions.torch", "2.13.0", "What differs between environments"):
        assert wanted in text


def test_the_dates_of_several_runs_are_in_order_whatever_the_order_of_the_runs(tmp_path: Path) -> None:
    records = [synthetic.record(c, 0) for c in list(synthetic.cases())[:2]]
    days = ("2026-03-02", "2026-03-01", "2026-03-04")
    runs = [synthetic.write(tmp_path / d, records, passes=1, started=f"{d}T10:00:00+00:00") for d in days]
    assert "2026-03-01 10:00 to 2026-03-04 10:00 UTC" in Page(html.page(read(list(runs)))).words


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    page = Page(html.page(read([synthetic.write(tmp_path / "r", [], calibrations=False)])))
    assert "This run holds no case" in "\n".join(page.words) and page.data()["total"] == 0


def test_a_run_of_failures_only(tmp_path: Path) -> None:
    every = list(synthetic.cases())[: len(STATUSES) - 1]
    records = [synthetic.failure(c, 0, s) for c, s in zip(every, STATUSES[1:], strict=True)]
    page = Page(html.page(read([synthetic.write(tmp_path / "r", records, passes=1)])))
    text = "\n".join(page.words)
    assert "No case has a time" in text and "Nothing to draw" in text
    assert all(reason in text for reason in synthetic.REASONS.values())


@pytest.mark.parametrize("samples", [[1e-3], [math.nan], [math.inf, 1e-3], [0.0], []])
def test_strange_samples(tmp_path: Path, samples: list[float]) -> None:
    every = list(synthetic.cases(workloads={"one": ((4, 8, 8), 5)}, batches=(1, 8)))
    records = [synthetic.record(c, 0) for c in every]
    records[0].samples = samples
    records[1].memory = {"peak_bytes": math.nan, "saved_bytes": math.inf}  # type: ignore[dict-item]
    records[2].verification = {"max_error": math.nan}
    records[3].first_call_s = math.inf
    page = Page(html.page(read([synthetic.write(tmp_path / "r", records, passes=1)])))
    data = page.data()
    assert data["total"] == len(every) and len(page.details()) == len(every)
    text = {c["id"]: c.get("text") for c in data["columns"]}
    assert "not a number" in text["peak_bytes"] and "infinite" in text["saved_bytes"]


def test_reports_never_import_torch(tmp_path: Path) -> None:
    run = synthetic.write(tmp_path / "run", [synthetic.record(c, 0) for c in list(synthetic.cases())[:8]], passes=1)
    code = (
        "import sys; from spikemark import reports; from spikemark.reports import cli; "
        f"cli.report([{str(run)!r}]); reports.load({str(run)!r}); "
        "print([m for m in sys.modules if m.split('.')[0] == 'torch'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]"


def test_a_big_run_keeps_to_a_small_page(tmp_path: Path) -> None:
    """A part of the largest run that is promised (measured whole, 10,000 cases: 6.5 MB of the 8 MB allowed)."""
    text = html.page(read([synthetic.big(tmp_path / "big", count=400)]))
    pictures = sum(len(svg) for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert len(text.encode()) - pictures < 300_000 + 400 * 750 and pictures < 1_500_000

"""The section of traces: figures as a person reads them, measured against ideal bytes, the timeline, hostile names."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import synthetic
from spikemark.harness.trace import summary
from spikemark.harness.trace.summary import Timeline, TraceSummary
from spikemark.reports import html, traces
from spikemark.reports.rows import read

HOSTILE = '</script><script>alert("x")</script>'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    synthetic.everyday(tmp_path / "run")
    return tmp_path / "run"


def traced(folder: Path, **changes: object) -> TraceSummary:
    """A trace of the run's first case, of a GPU."""
    key = read([folder]).rows[0]["key"]
    one = TraceSummary("nsys", key, calls=4, wall_s=4e-3, busy_s=1e-3, idle_s=2e-3, ideal_bytes=1000, moved_bytes=2000)
    one.kernels = [{"name": HOSTILE, "count": 4, "total_s": 1e-3, "launch_s": 5e-6}]
    one.outside = [{"name": "stray", "count": 1, "total_s": 1e-6}]
    one.timeline = Timeline(1e-3, [HOSTILE], [("GPU 0 stream 7", [[1e-4, 5e-4, 0]])], 3, [[0.0, 0.0], [5e-4, 2e6]])
    for name, value in changes.items():
        setattr(one, name, value)
    summary.write(folder / "traces", one)
    return one


def entry(folder: Path) -> dict[str, object]:
    (found,) = traces.collect(read([folder])).entries
    return found


def test_figures_are_of_one_call(folder: Path) -> None:
    traced(folder)
    found = entry(folder)
    assert dict(found["facts"]) == {  # type: ignore[call-overload]
        "time a call, traced": "1.00 ms",
        "share without a kernel": "75.0 %",
        "idle device a call": "500 µs",
        "ideal bytes (cost model)": "1.00 kB",
        "bytes that the design moves": "2.00 kB",
    }
    assert found["others"] == [("In no measured call", [("stray", "1", "1.00 µs")])]
    assert found["timeline_note"] == "One traced call, 1.00 ms from left to right. 3 shorter spans are not drawn."


def test_measured_bytes_stand_against_the_cost_model(folder: Path) -> None:
    metrics = {"occupancy": 61.25, "stall long scoreboard": 4.0}
    kernels = [{"name": "k", "count": 1, "total_s": 1e-6, "bytes": 1500, "metrics": metrics}]
    traced(folder, tool="ncu", measured_bytes=1500, wall_s=None, busy_s=None, idle_s=None, kernels=kernels)
    found = entry(folder)
    facts = dict(found["facts"])  # type: ignore[call-overload]
    assert facts["DRAM bytes of a call, measured"] == "1.50 kB"
    assert facts["ideal bytes (cost model)"] == "1.00 kB, measured 1.50×"
    assert facts["bytes that the design moves"] == "2.00 kB, measured 0.750×"
    table = found["kernels"]
    assert table == {  # type: ignore[comparison-overlap]
        "header": ["count", "time", "share", "DRAM bytes", "occupancy and stalls"],
        "rows": [("k", ["1", "1.00 µs", "100 %", "1.50 kB", "occupancy 61.2 %, stall long scoreboard 4"])],
    }


def test_the_timeline_is_drawn_to_scale_and_names_are_text(folder: Path) -> None:
    traced(folder)
    picture = str(entry(folder)["timeline"])
    (box,) = re.findall(r'<rect class="c0" x="([\d.]+)" y="4" width="([\d.]+)"', picture)
    whole = traces.WIDTH - traces.LEFT - 8
    assert float(box[0]) == pytest.approx(traces.LEFT + 0.1 * whole, abs=0.1)
    assert float(box[1]) == pytest.approx(0.5 * whole, abs=0.1)
    assert "<script" not in picture and "&lt;script&gt;" in picture and "2.00 MB" in picture
    assert "style=" not in picture, "the page's policy forbids it"


def test_the_page_links_rows_to_traces_and_stays_inert(folder: Path) -> None:
    one = traced(folder)
    summary.write(folder / "traces", TraceSummary("torch", "no/such/case", status="crashed", reason="its process died"))
    (folder / "traces" / "broken.nsys.summary.json").write_text("{")
    report = read([folder])
    page = html.page(report)
    assert HOSTILE not in page and "This case is not in the run’s table." in page and "its process died" in page
    assert "broken.nsys.summary.json" in page
    (mine,) = [e for e in traces.collect(report).entries if e["title"] == one.key]
    assert [row["traces"] for row in report.rows if row["traces"]] == [[["Nsight Systems", f"#{mine['anchor']}"]]]
    assert f'id="{mine["anchor"]}"' in page


def test_a_run_without_traces_has_no_section(folder: Path) -> None:
    page = html.page(read([folder]))
    assert 'id="traces"' not in page and "#traces" not in page


@pytest.mark.browser
def test_in_a_browser_a_rows_link_opens_its_trace(folder: Path, browser: Any) -> None:
    one = traced(folder)
    path = html.write([folder])
    browser.set_window_size(1280, 900)
    browser.get(path.as_uri())
    (mine,) = [e for e in traces.collect(read([folder])).entries if e["title"] == one.key]
    assert browser.execute_script("return document.querySelector('details.trace').open") is False
    browser.execute_script("document.querySelector('tr.row .opener').click()")
    link = None
    deadline = time.monotonic() + 20
    while link is None and time.monotonic() < deadline:
        link = browser.execute_script("return document.querySelector('tr.detail a[href^=\"#trace\"]')")
    assert link is not None and link.text == "Nsight Systems"
    browser.execute_script("arguments[0].click()", link)
    opened = f"return document.getElementById('{mine['anchor']}').open"
    while not browser.execute_script(opened) and time.monotonic() < deadline:
        pass
    assert browser.execute_script(opened), "the link opens the trace that it leads to"
    assert browser.execute_script("return document.querySelector('.timeline svg').getBoundingClientRect().width") > 300
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]

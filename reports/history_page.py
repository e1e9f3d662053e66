"""The page of a history: what changed, since when, and every case's trend. One self-contained HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup
from spikemark.reports import history_text as texts
from spikemark.reports import html, saving, words
from spikemark.reports.history import History, Series

CSS = (
    ".trend .dots{stroke:var(--link);stroke-width:2.4;stroke-linecap:round;opacity:.6}"
    ".trend .level{stroke:var(--ink);stroke-width:1.6}.trend .step{stroke:var(--bad);stroke-width:1.1;"
    "stroke-dasharray:3 2}.trend path{fill:none}.trend{display:block}"
    ".history td{white-space:nowrap}.history td.wrap{white-space:normal;min-width:10rem;max-width:24rem}"
)
MOST_PICTURES = 40
MOST_STEPS = 500


def write(history: History, out: str | Path | None = None) -> Path:
    """Write the page; ``out`` defaults to ``history.html`` in the folder of the runs. Raises ``StorageError``."""
    path = history.folder / "history.html" if out is None else Path(out)
    saving.save(path, page(history))
    return path


def page(history: History) -> str:
    """The whole page as text."""
    from spikemark import __version__
    from spikemark.reports.figures import trend
    from spikemark.reports.figures.canvas import StyleSheet

    shown = texts.ordered(history)
    changed = [series for series in shown if series.steps]
    sheet = StyleSheet()
    groups = html.picture_groups([trend.picture(history, series) for series in changed[:MOST_PICTURES]], sheet)
    css = (html.ASSETS / "report.css").read_text(encoding="utf-8") + sheet.css() + CSS
    script = (html.ASSETS / "history.js").read_text(encoding="utf-8")
    left, rows = len(changed) - MOST_PICTURES, texts.change_rows(history)
    own = [series for place in history.places for series in place.gauges.values()]
    return html.templates().get_template("history.html.j2").render(
        policy=html.policy(css, script),
        css=Markup(css),
        script=Markup(script),
        title=f"Spikemark: history of {words.short(history.folder.resolve().name, 60)}",
        headline=texts.headline(history),
        remarks=texts.remarks(history),
        change_header=texts.CHANGES,
        changes=[cells for _, cells in rows[:MOST_STEPS]],
        change_at=texts.CHANGES.index("Change"),
        kinds=["bad" if slower else "good" for slower, _ in rows[:MOST_STEPS]],
        changes_left=words.count(len(rows) - MOST_STEPS, "earlier change point") if len(rows) > MOST_STEPS else "",
        picture_groups=groups,
        pictures_left=words.count(left, "more case") if left > 0 else "",
        case_header=texts.CASES,
        cases=[_case(history, series, trend.small(series)) for series in shown],
        machine=[_case(history, series, trend.small(series)) for series in own],
        runs=[_run(history, index) for index in range(len(history.runs) - 1, -1, -1)],
        version=__version__,
    )  # fmt: skip


def _case(history: History, series: Series, picture: Markup) -> dict[str, Any]:
    cells = texts.case_cells(history, series)
    at = texts.CASES.index("Trend")
    return {"before": cells[:at], "picture": picture, "after": cells[at + 1 :], "alt": f"{cells[at - 1]} runs"}


def _run(history: History, index: int) -> list[str]:
    run = history.runs[index]
    commits = dict.fromkeys(filter(None, (run.commit(key) for key in run.environments)))
    when = words.clean(run.started[:16].replace("T", " ")) or words.ABSENT
    return [words.short(run.name, 60), when, words.listed(list(commits), 2), f"{len(run.points):,}"]
